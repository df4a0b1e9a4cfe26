"""Chunked attention (llama4): mlx-lm's cache keeps the entries from `start_position` on.

A snapshot holds [start_position, offset). A query attends only within its own chunk, so a snapshot can be clamped, and
a layer rewound, to a point if the start of that point's chunk is still kept.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import own_bytes
from onefold.cache.memory.runs import Stretch
from onefold.cache.model import exporting, stock
from onefold.cache.model.kinds.base import ForwardListener, NoListener, Snapshot
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.leaf import Leaf, Making, entries
from onefold.cache.model.kinds.window import Window, window_snapshot
from onefold.cache.model.rows import AttentionRows


class ChunkedLayer(Window, stock.ChunkedKVCache):  # type: ignore[misc, valid-type]
    kind = "chunked"
    shares_runs = True
    rows = staticmethod(AttentionRows)  # type: ignore[assignment]

    def __init__(self, chunk_size: int, *, listener: ForwardListener | None = None) -> None:
        super().__init__(chunk_size)
        self.epoch = 0
        self._listener: ForwardListener = listener or NoListener()

    def is_trimmable(self) -> bool:
        return self.start_position == 0 or self.listener.rolls_back

    def snapshot(self, from_offset: int = 0) -> Snapshot | None:
        if self.keys is None or self.offset <= max(0, from_offset):
            return None
        valid = self.offset - self.start_position
        keep = min(valid, self.chunk_size)
        arrays: list[mx.array | None] = [own_bytes(a[..., valid - keep : valid, :]) for a in (self.keys, self.values)]
        device.evaluate(arrays)
        return Snapshot(arrays, max(0, from_offset), self.offset, (self.chunk_size, self.offset - keep))

    def can_restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if target < 0:
            return False
        if snapshot is None:
            rewinds = target < self.offset and self._holds(target, self.start_position)
            return rewinds or target == self.offset
        if snapshot.extra[0] != self.chunk_size or target > snapshot.end:
            return False
        return target == snapshot.end or self._holds(target, snapshot.extra[1])

    def restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        if snapshot is not None:
            self.adopt_arrays(snapshot)
            self.offset, self.start_position = snapshot.end, snapshot.extra[1]
        self.offset = target
        return True

    def free(self) -> None:
        self.let_go()
        self.offset = self.start_position = 0

    def take_place(self, cache: Any) -> None:
        self.start_position = cache.start_position

    def as_stock(self) -> Any:
        return exporting.chunk(self)

    def _holds(self, target: int, start: int) -> bool:
        return start <= target // self.chunk_size * self.chunk_size

    def mark(self) -> tuple[Any, ...]:
        return self.held, self.offset, self.start_position

    def reset(self, mark: tuple[Any, ...]) -> None:
        self.held, self.offset, self.start_position = mark

    # -- snapshots that share runs ---------------------------------------------------------------

    def begin(self) -> int:
        return max(int(self.start_position), int(self.offset - self.chunk_size))

    def extra(self, begin: int) -> tuple[int, ...]:
        return self.chunk_size, begin

    def entries(self, array: mx.array, start: int, end: int) -> mx.array:
        return array[..., start - self.start_position : end - self.start_position, :]


class ChunkedLeaf(Leaf):
    kind = "chunked"

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        return stock.keeps_kv(cache) and stock.has(cache, "chunk_size", "start_position", "maybe_trim_front")

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        self.chunk_size: int = cache.chunk_size

    def make(self, given: Making) -> ChunkedLayer:
        return ChunkedLayer(self.chunk_size, listener=given.listener)

    def point_bytes(self, offset: int, n_tokens: int) -> int:
        n_entries = min(offset, self.chunk_size + 256) + math.ceil(n_tokens / 256) * 256 + 256
        return n_entries * self.token_bytes

    def fits(self, cache: Any) -> bool:
        return super().fits(cache) and cache.chunk_size == self.chunk_size

    @property
    def window(self) -> int:
        return self.chunk_size

    def revive_window(self, described: dict[str, Any], stretches: tuple[Stretch, ...]) -> Snapshot:
        end, (size, begin) = int(described["end"]), (int(x) for x in described["extra"])
        begin = max(begin, stretches[0].start)  # an earlier chunk's entries are not needed
        if size != self.chunk_size or not end - size <= begin <= end // size * size:
            raise ValueError(f"a chunk of {size} has no entries before {begin}")
        return window_snapshot(stretches, begin, end, (size, begin))

    def describe(self, bound: Bound | None) -> dict[str, Any]:
        return {"in_ranges": False, "chunk": self.chunk_size, "slots": [entries(a) for a in self.plain or ()]}
