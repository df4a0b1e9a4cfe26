"""The tokens that one model's layers were fed, by position. A commit may store only these.

- A forward's tokens are recorded as the array that the model was given, which may not be computed yet. The array is
  read on demand, or after newer forwards have used it.
- A forward that was not watched, or that was given embeddings without an id from the caller, leaves a gap: its tokens
  are not known, and nothing from there on can be committed.

Knows nothing of layers or leases.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from onefold.cache.memory.tokens import Tokens, common_length

UNKNOWN = -1
_MOST_UNREAD = 64
"""The most forwards whose tokens are not read yet."""
_IN_FLIGHT = 2
"""Forwards that a generation loop may have scheduled without waiting for them."""


class _Unread(NamedTuple):
    inputs: mx.array
    row: int
    start: int
    n_tokens: int


class Fed:
    def __init__(self) -> None:
        self._tokens: Tokens = np.empty(0, np.int32)
        self._end = 0
        """How many of `_tokens` are valid; the rest is room."""
        self._unread: list[_Unread] = []

    @property
    def end(self) -> int:
        """One past the last position that is recorded."""
        last = self._unread[-1] if self._unread else None
        return self._end if last is None else last.start + last.n_tokens

    def begin_with(self, tokens: Tokens) -> None:
        """Record that the layers hold exactly `tokens`."""
        held = tokens.view()
        held.flags.writeable = False  # it may be the caller's array: `_store` then copies it
        self._tokens, self._end, self._unread = held, len(tokens), []

    def append(self, start: int, inputs: mx.array | Tokens | None, row: int, n_tokens: int) -> None:
        """Record a forward of `n_tokens` at `start`: row `row` of the array `inputs`, known tokens, or a gap if
        `inputs` is None. Replaces what was recorded from `start` on."""
        self.cut(start)
        if not isinstance(inputs, mx.array):
            self._read(0)
            self._store(start, np.full(n_tokens, UNKNOWN, np.int32) if inputs is None else inputs[:n_tokens])
            return
        self._unread.append(_Unread(inputs, row, start, n_tokens))
        if len(self._unread) > _MOST_UNREAD:
            self._read(_IN_FLIGHT)

    def cut(self, to: int) -> None:
        """Delete what was recorded from position `to` on."""
        while self._unread and self._unread[-1].start >= to:
            self._unread.pop()
        if self.end > to:
            self._read(0)
            self._end = to

    def agreement(self, tokens: Tokens) -> int:
        """Returns how many of `tokens`, from the first on, the layers were fed."""
        self._read(0)
        return common_length(self._tokens[: self._end], tokens)

    def tokens(self) -> Tokens:
        """Returns a copy of the tokens that the layers were fed, from the first position to the first gap."""
        self._read(0)
        found = self._tokens[: self._end]
        gaps = found == UNKNOWN
        return found[: int(gaps.argmax()) if gaps.any() else len(found)].copy()

    def _read(self, leave: int) -> None:
        """Read the tokens of all forwards but the last `leave`. Waits for those that are not computed yet."""
        n = len(self._unread) - leave
        if n <= 0:
            return
        done, self._unread = self._unread[:n], self._unread[n:]
        for inputs, row, start, n_tokens in done:
            found = np.array(inputs, copy=False)[row] if inputs.ndim > 1 else np.array(inputs, copy=False)
            self._store(start, found[:n_tokens].astype(np.int32))

    def _store(self, start: int, tokens: Tokens) -> None:
        end = start + len(tokens)
        if end > len(self._tokens) or not self._tokens.flags.writeable:
            room = np.empty(max(end, len(self._tokens) * 3 // 2, 256), np.int32)
            room[: self._end] = self._tokens[: self._end]
            self._tokens = room
        self._tokens[self._end : start] = UNKNOWN
        self._tokens[start:end] = tokens
        self._end = end
