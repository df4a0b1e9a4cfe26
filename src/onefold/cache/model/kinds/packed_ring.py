"""A window of quantised entries. A bounded layer with 8 or 4 bit KV becomes one when it rotates.

- Packed words, scales and biases are three of mlx-lm's rings that advance together, so `keep`, growth, trimming and the
  order of entries are mlx-lm's own.
- Entries stay packed: attention reads them through the seam, in any order. Only a chunk of several tokens needs them in
  order, for its mask, and then the rings sort them.
- A snapshot holds the six arrays of all entries in temporal order, keys' before values'.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.shapes import View
from onefold.cache.model.attention import Handle
from onefold.cache.model.kinds.base import Snapshot
from onefold.cache.model.kinds.rotating import RotatingLayer

_PARTS = 3
"""Words, scales, biases."""


class PackedRing:
    """The quantised counterpart of `RotatingLayer`, with the methods that a bounded layer needs."""

    def __init__(self, max_size: int, keep: int, codec: Any) -> None:
        self.codec = codec
        self.max_size = max_size
        self.keep = keep
        self.consumed = [0]
        self._rings = [RotatingLayer(max_size, keep) for _ in range(_PARTS)]

    @property
    def offset(self) -> int:
        return self._rings[0].offset

    # -- what a model does with it -----------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        parts = self.codec.encode(keys, values)
        for ring, k, v in zip(self._rings, parts[:_PARTS], parts[_PARTS:], strict=True):
            ring.update_and_fetch(k, v)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        arrays = self._arrays()
        n = min(self.offset, arrays[0].shape[2])
        rows = [[View(arrays, 0, n, id(self))]]

        def handle(words: mx.array, scales: mx.array) -> Handle:
            shape = (1, words.shape[1], n, words.shape[3] * 32 // self.codec.bits)
            return Handle(rows, self.codec, shape, scales.dtype, self.consumed)

        return handle(arrays[0], arrays[1]), handle(arrays[_PARTS], arrays[_PARTS + 1])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self._rings[0].make_mask(N, return_array=return_array, window_size=window_size)

    def is_trimmable(self) -> bool:
        return bool(self._rings[0].is_trimmable())

    @property
    def keys(self) -> mx.array | None:
        """The packed words of the keys."""
        words: mx.array | None = self._rings[0].keys
        return words

    @keys.setter
    def keys(self, words: mx.array) -> None:
        self._rings[0].keys = words

    @property
    def values(self) -> mx.array | None:
        words: mx.array | None = self._rings[0].values
        return words

    @values.setter
    def values(self, words: mx.array) -> None:
        self._rings[0].values = words

    # -- the contract of a window --------------------------------------------------------------

    def snapshot(self, from_offset: int = 0) -> Snapshot | None:
        held = [ring.snapshot(from_offset) for ring in self._rings]
        first = held[0]
        if first is None:
            return None
        arrays = [s.arrays[j] for j in range(2) for s in held if s is not None]
        return Snapshot(arrays, first.start, first.end, first.extra)

    def can_restore(self, snapshot: Snapshot | None, target: int) -> bool:
        return all(ring.can_restore(s, target) for ring, s in zip(self._rings, _split(snapshot), strict=True))

    def restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        for ring, part in zip(self._rings, _split(snapshot), strict=True):
            ring.restore(part, target)
        return True

    def adopt(self, snapshot: Snapshot) -> None:
        """Share the snapshot's arrays; the first write copies them."""
        for ring, part in zip(self._rings, _split(snapshot), strict=True):
            assert part is not None
            ring.adopt(part)

    def mark(self) -> tuple[Any, ...]:
        return tuple(ring.mark() for ring in self._rings)

    def reset(self, mark: tuple[Any, ...]) -> None:
        for ring, part in zip(self._rings, mark, strict=True):
            ring.reset(part)

    def live_arrays(self) -> list[mx.array]:
        return [a for ring in self._rings for a in ring.live_arrays()]

    # -- leaving the cache ---------------------------------------------------------------------

    def plain_snapshot(self) -> Snapshot | None:
        """Returns the entries, dequantised, in temporal order."""
        held = self.snapshot(0)
        if held is None:
            return None
        halves = held.arrays[:_PARTS], held.arrays[_PARTS:]
        plain: list[mx.array | None] = [self.codec.decode(*half) for half in halves]
        device.evaluate(plain)
        return Snapshot(plain, held.start, held.end, held.extra)

    @property
    def plain_bytes(self) -> int:
        """The bytes of the dequantised entries."""
        if self.keys is None or self.values is None:
            return 0
        n = min(self.offset, self.max_size)
        widths = sum(words.shape[1] * words.shape[3] * 32 // self.codec.bits for words in (self.keys, self.values))
        return int(n * widths * self._rings[1].keys.dtype.size)

    def _arrays(self) -> list[mx.array]:
        return [*(ring.keys for ring in self._rings), *(ring.values for ring in self._rings)]


def _split(snapshot: Snapshot | None) -> list[Snapshot | None]:
    """Returns a snapshot of all parts as one snapshot per ring."""
    if snapshot is None:
        return [None] * _PARTS
    arrays = snapshot.arrays
    return [
        Snapshot([arrays[i], arrays[_PARTS + i]], snapshot.start, snapshot.end, snapshot.extra) for i in range(_PARTS)
    ]
