"""Pieces: the ranges of slabs that cover the positions [0, end) of one sequence, and how to read them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import join
from onefold.cache.memory.segment import Slab, Store
from onefold.cache.memory.shapes import View


@dataclass(eq=False, slots=True)
class Piece:
    """A track's view of slab indices [lo, hi), which hold the positions from `pos` on."""

    slab: Slab
    lo: int
    hi: int
    pos: int
    limit: int | None = None
    """The end of its region of the slab; None if it may use the whole slab."""
    front: int = 0
    """So many tokens before `lo` are a copy of those before `pos`, which the track has in other slabs."""

    @property
    def end(self) -> int:
        return self.pos + self.hi - self.lo

    @property
    def room(self) -> int:
        return (self.slab.capacity if self.limit is None else self.limit) - self.hi


class Pieces:
    """The KV of one sequence, for reading."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.pieces: list[Piece] = []

    @property
    def end(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    @property
    def whole(self) -> bool:
        """Whether it is one piece that starts at index 0, which can be read as a plain slice."""
        return len(self.pieces) == 1 and self.pieces[0].lo == 0

    def read(self, index: int, upto: int) -> list[View]:
        """Returns, for layer `index`, the arrays and index ranges that hold the positions [0, upto)."""
        return [
            View(p.slab.arrays(index), p.lo, min(p.hi, p.lo + upto - p.pos), id(p.slab))
            for p in self.pieces
            if p.pos < upto and p.lo < p.hi
        ]

    def layout(self, upto: int) -> list[tuple[Slab, int, int]]:
        """Returns the slabs and index ranges that hold the positions [0, upto), which are the same for every layer."""
        found = [p for p in self.pieces if p.pos < upto and p.lo < p.hi]
        return [(p.slab, p.lo, min(p.hi, p.lo + upto - p.pos)) for p in found]

    def front(self, upto: int) -> int:
        """Returns `Piece.front` of the piece in which the positions [0, upto) end."""
        return next((p.front for p in reversed(self.pieces) if p.pos < upto and p.lo < p.hi), 0)

    def copied(self, index: int, start: int, stop: int, capacity: int) -> list[mx.array]:
        """Returns layer `index`'s arrays of the positions [start, stop), copied to new ones of `capacity` and
        evaluated."""
        parts: list[list[mx.array | None]] = [[] for _ in self.store.specs[index].arrays]
        for p in self.pieces:
            a, b = max(start, p.pos), min(stop, p.end)
            if a < b:
                for j, array in enumerate(p.slab.arrays(index)):
                    parts[j].append(array[..., p.lo + a - p.pos : p.lo + b - p.pos, :])
        if capacity > stop - start:
            for j, room in enumerate(self.store.zeros(index, capacity - (stop - start))):
                parts[j].append(room)
        new = [join(p) for p in parts]
        device.evaluate(new)
        return new
