"""Runs: the KV of a model's window layers for some consecutive tokens, which several checkpoints share.

- A run is never changed. It belongs to the checkpoints that refer to it, has an account of its own, and is freed with
  the last of them.
- A window of a checkpoint is a chain of stretches: each is a run's arrays of one layer. The first may begin before the
  window does.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import mlx.core as mx

from onefold.cache.memory.ledger import Account

MOST = 16
"""Stretches of a window. One that would have more is copied whole: each array is a buffer of the device."""


class Run:
    __slots__ = ("account", "arrays", "holders")

    def __init__(self, account: Account) -> None:
        """Has no arrays yet. `account` is its own from now on."""
        self.account = account
        self.arrays: list[mx.array] = []
        """Keys and values of a layer, one after the other."""
        self.holders = 0
        """How many checkpoints refer to it."""

    def add(self, arrays: list[mx.array], start: int, end: int) -> Stretch:
        """Add the keys and values of a layer for the tokens [start, end), which the run owns from now on."""
        self.arrays += arrays
        return Stretch(self, len(self.arrays) - len(arrays), start, end)

    @property
    def bytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @property
    def is_closed(self) -> bool:
        return self.account.closed

    def hold(self) -> None:
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1
        if not self.holders:
            self.close()

    def close(self) -> None:
        """Free a run that no checkpoint refers to. Does nothing if it is closed."""
        self.arrays = []
        if not self.account.closed:
            self.account.close()


class Stretch(NamedTuple):
    """The part of a run that is one layer's."""

    run: Run
    first: int
    """Where its keys are among the run's arrays; its values follow."""
    start: int
    end: int

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the tokens [start, end)."""
        return self.run.arrays[self.first], self.run.arrays[self.first + 1]


def shared(stretches: tuple[Stretch, ...], begin: int, end: int) -> tuple[Stretch, ...]:
    """Returns those of a window's stretches that one of [begin, end) shares: the most tokens in a row of which no run
    is closed. None if there would be too many, or if they end behind `end`. A stretch of which less than half is still
    needed is left out, so that it can be freed."""
    if not stretches or stretches[-1].end > end:
        return ()
    needed = [s for s in stretches if s.end > begin]
    groups = [tuple(found) for closed, found in itertools.groupby(needed, lambda s: s.run.is_closed) if not closed]
    kept = max(groups, key=lambda found: found[-1].end - found[0].start, default=())
    if kept and 2 * (kept[0].end - max(begin, kept[0].start)) < kept[0].end - kept[0].start:
        kept = kept[1:]
    return kept if len(kept) + 2 <= MOST else ()
