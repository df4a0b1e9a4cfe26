"""Tokenising a conversation that has grown: only what is new.

A long conversation is tokenised again on every turn, at some milliseconds per thousand tokens. What lies before a
special token never changes the tokens behind it, so a text that begins like an earlier one needs only its own end
tokenised, from the last special token that both have.

- The result is that of tokenising the whole text. Where that is not certain, the whole text is tokenised.

Knows nothing of templates, of MLX, or of the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import Any

import numpy as np

KEPT_TEXTS = 64
KEPT_CHARACTERS = 8_000_000
LEAST = 4096
"""Characters of a text that is worth remembering."""


def tokenizer_digest(tokenizer: Any) -> str:
    """Tells one tokenizer from another: the same text may be other tokens with the other."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(vocabulary.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class Tokeniser:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._markers = _markers(tokenizer)
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        """Texts, the one used last at the end."""

    def encode(self, text: str) -> np.ndarray:
        """Raises what the tokenizer raises."""
        if len(text) < LEAST or not self._markers:
            return self._whole(text)
        head, tokens = self._head(text)
        tokens = np.concatenate([tokens, self._whole(text[head:])]) if head else self._whole(text)
        self._known[text] = tokens
        self._known.move_to_end(text)
        while len(self._known) > KEPT_TEXTS or sum(map(len, self._known)) > KEPT_CHARACTERS:
            self._known.popitem(last=False)
        return tokens

    def _whole(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def _head(self, text: str) -> tuple[int, np.ndarray]:
        """How much of the text is known from an earlier one, up to a special token, and its tokens."""
        best, source = 0, ""
        for known in reversed(self._known):
            common = _common(known, text, best)
            if common > best:
                best, source = common, known
        at, marker = max(((text.rfind(m, 0, best), m) for m in self._markers), default=(-1, ""))
        if at <= 0:
            return 0, np.empty(0, np.int32)
        tokens = self._known[source]
        places = np.flatnonzero(tokens == self._markers[marker])
        if len(places) != source.count(marker):  # it is also part of something else
            return 0, np.empty(0, np.int32)
        return at, tokens[: places[text.count(marker, 0, at)]]


def _common(a: str, b: str, more_than: int) -> int:
    """Characters that both begin with; 0 if they are no more than `more_than`. Compares slices, not characters."""
    low, high = more_than, min(len(a), len(b))
    if high <= low or a[:low + 1] != b[:low + 1]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _markers(tokenizer: Any) -> dict[str, int]:
    """Special tokens that are matched as they are, and at which this tokenizer can really be cut."""
    found = {
        added.content: token
        for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if added.special and not (added.lstrip or added.rstrip or added.single_word or added.normalized)
    }
    return {m: t for m, t in found.items() if len(m) > 2 and _cuts(tokenizer, m, found)}


def _overlap(a: str, b: str) -> bool:
    """Whether the two can share characters of a text without being the same occurrence of the same string."""
    ends = any(a.endswith(b[:n]) or b.endswith(a[:n]) for n in range(1, min(len(a), len(b))))
    return ends or (a != b and (a in b or b in a))


def _cuts(tokenizer: Any, marker: str, all_markers: dict[str, int]) -> bool:
    if any(_overlap(marker, other) for other in all_markers):
        return False

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    head, tail = " Some words, 12 ", f"{marker} and\n\n more  words"
    return all(encode(a + b) == encode(a) + encode(b) for a, b in ((head, tail), (head.strip(), tail), (marker, tail)))
