"""A window of quantised entries. A bounded layer with 8 or 4 bit KV becomes one when it rotates.

- What a format stores of a token, words and scales and perhaps biases, are as many of mlx-lm's rings that advance
  together, so `keep`, growth, trimming and the order of entries are mlx-lm's own.
- Entries stay packed: attention reads them through the seam, in any order. Only a chunk of several tokens needs them in
  order, for its mask, and then the rings sort them.
- A snapshot holds the arrays of all entries in temporal order, keys' before values'. A format that has both in one
  array is the keys' array of one ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.shapes import ArraySpec, View
from onefold.cache.model.attention import Handle
from onefold.cache.model.kinds.base import Snapshot
from onefold.cache.model.kinds.rotating import RotatingLayer


class PackedRing:
    """The quantised counterpart of `RotatingLayer`, with the methods that a bounded layer needs."""

    def __init__(self, max_size: int, keep: int, codec: Any) -> None:
        self.codec = codec
        self.max_size = max_size
        self.keep = keep
        self.consumed = [0]
        self._rings = [RotatingLayer(max_size, keep) for _ in range(max(1, codec.n_keys()))]
        self._one_array = codec.n_keys() == 0

    @property
    def offset(self) -> int:
        return self._rings[0].offset

    # -- what a model does with it -----------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        parts = self._in_pairs(self.codec.encode(keys, values))
        n = len(self._rings)
        for ring, k, v in zip(self._rings, parts[:n], parts[n:], strict=True):
            ring.update_and_fetch(k, v)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        arrays = self._arrays()
        n = min(self.offset, arrays[0].shape[2])
        rows = [[View(arrays, 0, n, id(self))]]

        k_dim, v_dim, dtype = self._made

        def handle(words: mx.array, dim: int) -> Handle:
            return Handle(rows, self.codec, (1, words.shape[1], n, dim), dtype, self.consumed)

        return handle(arrays[0], k_dim), handle(arrays[self.codec.n_keys()], v_dim)

    @property
    def _made(self) -> tuple[int, int, mx.Dtype]:
        """The dimensions of keys and values, and their type, as the model makes them."""
        return self.codec.made([ArraySpec(a.shape[1], a.shape[3], a.dtype) for a in self._arrays()])

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
        arrays = [s.arrays[j] for j in range(1 if self._one_array else 2) for s in held if s is not None]
        return Snapshot(arrays, first.start, first.end, first.extra)

    def can_restore(self, snapshot: Snapshot | None, target: int) -> bool:
        return all(ring.can_restore(s, target) for ring, s in self._each(snapshot))

    def restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        for ring, part in self._each(snapshot):
            ring.restore(part, target)
        return True

    def adopt(self, snapshot: Snapshot) -> None:
        """Share the snapshot's arrays; the first write copies them."""
        for ring, part in self._each(snapshot):
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
        plain: list[mx.array | None] = [*self.codec.as_made(held.arrays, self._made[2])]
        device.evaluate(plain)
        return Snapshot(plain, held.start, held.end, held.extra)

    @property
    def plain_bytes(self) -> int:
        """The bytes of the dequantised entries."""
        if self.keys is None or self.values is None:
            return 0
        n = min(self.offset, self.max_size)
        k_dim, v_dim, dtype = self._made
        return int(n * (self.keys.shape[1] * k_dim + self.values.shape[1] * v_dim) * dtype.size)

    def _arrays(self) -> list[mx.array]:
        keys = [ring.keys for ring in self._rings]
        return keys if self._one_array else keys + [ring.values for ring in self._rings]

    def _in_pairs(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns the arrays of keys, and then those of values, which the rings hold in pairs. Where both are in one
        array, the values' has no entries."""
        return [arrays[0], arrays[0][..., :0]] if self._one_array else arrays

    def _each(self, snapshot: Snapshot | None) -> list[tuple[Any, Snapshot | None]]:
        """Returns each ring with its part of a snapshot of all."""
        if snapshot is None:
            return [(ring, None) for ring in self._rings]
        arrays, n = self._in_pairs(snapshot.arrays), len(self._rings)
        ends = snapshot.start, snapshot.end, snapshot.extra
        return [(ring, Snapshot([arrays[i], arrays[n + i]], *ends)) for i, ring in enumerate(self._rings)]
