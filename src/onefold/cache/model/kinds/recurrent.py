"""Recurrent states (Mamba, gated delta nets, short convolutions): a point, nothing else.

- It *is* an `ArraysCache`, because some models ask.
- Models replace states, they never write into them, so a snapshot is a second reference and costs nothing
  until the state moves on.
- States are often slices of a whole forward's activations: each is given a buffer of its own when it is set.
- Most models say how many tokens passed (`advance`); for the others their owner does, when a
  forward has ended.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory.arrays import own_bytes
from onefold.cache.model import stock
from onefold.cache.model.kinds.base import ForwardListener, NoPulse, Point, Snapshot
from onefold.cache.model.stock import Kind


class RecurrentLayer(Point, stock.ArraysCache):  # type: ignore[misc, valid-type]
    kind = Kind.RECURRENT
    cache: list[mx.array | None]  # type: ignore[assignment]

    def __init__(self, size: int, *, pulse: ForwardListener | None = None) -> None:
        super().__init__(size)
        self.offset = 0
        self.epoch = 0
        self._pulse: ForwardListener = pulse or NoPulse()
        self._written: set[int] | None = None

    def __setitem__(self, slot: int, value: mx.array | None) -> None:
        if self._written is None or slot in self._written:
            self._pulse.enter(self, None)  # a slot's second write is the next forward's first
            self._written = set()
        self._written.add(slot)
        self.cache[slot] = None if value is None else own_bytes(value)

    def advance(self, N: int) -> None:
        super().advance(N)
        self.offset += N

    def snapshot(self, from_offset: int = 0) -> Snapshot | None:
        if self.empty() or self.offset <= from_offset:
            return None
        mx.eval([a for a in self.cache if a is not None])
        return Snapshot(list(self.cache), max(0, from_offset), self.offset)

    def copied_states(self) -> list[mx.array | None]:
        """The states, each in a buffer of its own."""
        copies = [None if a is None else own_bytes(a) for a in self.cache]
        mx.eval([a for a in copies if a is not None])
        return copies

    def can_restore(self, snapshot: Snapshot | None, target: int) -> bool:
        return target == (self.offset if snapshot is None else snapshot.end)

    def restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        if snapshot is not None:
            self.cache = list(snapshot.arrays)
            self.offset = snapshot.end
        self._written = None
        return True

    def is_trimmable(self) -> bool:
        return self.pulse.rolls_back

    def empty(self) -> bool:
        return all(a is None for a in self.cache)

    def free(self) -> None:
        self.cache = [None] * len(self.cache)
        self.left_padding = self.lengths = None
        self.offset = 0
        self._written = None

    def mark(self) -> tuple[Any, ...]:
        return list(self.cache), self.offset

    def reset(self, mark: tuple[Any, ...]) -> None:
        self.cache, self.offset = list(mark[0]), mark[1]
        self._written = None

    def live_arrays(self) -> list[mx.array]:
        return [a for a in self.cache if a is not None]
