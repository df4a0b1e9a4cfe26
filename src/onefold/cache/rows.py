"""One layer for several requests: the rows of a decode batch.

- Rows are ragged: `offset` is an array with one position per row. Each row appends to its own storage and
  reads its own pieces; joining and leaving a batch copies nothing, and nothing is padded.
- Each row's own layer stays the owner of its state, so a lease can leave between any two steps.

Knows nothing of leases.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache import stock
from onefold.cache.attention import Handle, View
from onefold.cache.kinds.full import PlainCodec, SegmentedLayer
from onefold.cache.segment import ArraySpec
from onefold.cache.stock import Kind


class RowsLayer:
    """Makes the right kind of row layer; see `over`."""

    @staticmethod
    def over(layers: list[Any], plans: dict[Any, Any] | None = None) -> Any:
        """`plans` is shared by the layers of one batch: positions and reading plans are worked out once a step."""
        plans = {} if plans is None else plans
        kind = layers[0].kind
        if kind is Kind.COMPOSITE:
            members = zip(*(layer.caches for layer in layers), strict=True)
            return _CompositeRows(*(RowsLayer.over(list(m), plans) for m in members))
        if kind is Kind.RECURRENT:
            return _RecurrentRows(layers)
        return _AttentionRows(layers, plans)


class _Rows:
    layers: list[Any]

    def watchers(self) -> list[Any]:
        return [w for layer in self.layers for w in layer.watchers()]


class _AttentionRows(_Rows):
    def __init__(self, layers: list[Any], plans: dict[Any, Any]) -> None:
        self.layers = layers
        self._plans = plans

    @property
    def offset(self) -> mx.array:
        offsets = [layer.offset for layer in self.layers]
        if self._plans.get("offsets") != offsets:
            self._plans["offsets"], self._plans["offset"] = offsets, mx.array(offsets)
        offset: mx.array = self._plans["offset"]
        return offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        if self._write_together(keys, values):
            return self.keys_and_values()
        n = len(self.layers)
        for layer, k, v in zip(self.layers, mx.split(keys, n), mx.split(values, n), strict=True):
            layer.update_and_fetch(k, v)
        return self.keys_and_values()

    def _write_together(self, keys: mx.array, values: mx.array) -> bool:
        """Rows whose tails lie in one slab are written with one operation per array."""
        first = self.layers[0]
        if not isinstance(first, SegmentedLayer) or not first.track.pieces:
            return False
        for layer in self.layers:
            layer.admit(1)
        if any(layer.ring is not None or layer.offset < layer.track.floor for layer in self.layers):
            return self._write_admitted(keys, values)
        lasts = [layer.track.pieces[-1] for layer in self.layers]
        slab = lasts[0].slab
        if any(p.slab is not slab for p in lasts):
            return self._write_admitted(keys, values)
        spots = [p.lo + x.offset - p.pos for p, x in zip(lasts, self.layers, strict=True)]
        if self._plans.get("spots") != spots:
            self._plans["spots"], self._plans["spot"] = spots, mx.array(spots)
        arrays, index = slab.arrays(first.index), self._plans["spot"]
        for j, new in enumerate(first.codec.encode(keys, values)):
            arrays[j][:, :, index, :] = new.transpose(2, 1, 0, 3)
        for layer in self.layers:
            layer.offset += 1
        return True

    def _write_admitted(self, keys: mx.array, values: mx.array) -> bool:
        n = len(self.layers)
        for layer, k, v in zip(self.layers, mx.split(keys, n), mx.split(values, n), strict=True):
            layer.store(k, v)
        return True

    def keys_and_values(self) -> tuple[Handle, Handle]:
        rows, first = list[list[View]](), self.layers[0]
        for layer in self.layers:
            if isinstance(layer, SegmentedLayer) and layer.ring is None:
                rows.append(layer.track.read(layer.index, layer.offset))
            else:
                k, v = layer.keys_and_values()
                rows.append([View([k, v], 0, k.shape[2], id(layer))])
        codec = first.codec if isinstance(first, SegmentedLayer) and first.ring is None else PlainCodec()
        longest = max(sum(v.hi - v.lo for v in row) for row in rows)
        arrays, dtype = rows[0][0].arrays, rows[0][0].arrays[codec.n_keys() - 1].dtype

        def handle(a: mx.array) -> Handle:
            dim = codec.dim(ArraySpec(a.shape[1], a.shape[3], a.dtype))
            return Handle(rows, codec, (len(rows), a.shape[1], longest, dim), dtype, [0], self._plans)

        return handle(arrays[0]), handle(arrays[codec.n_keys()])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        masks = [layer.make_mask(N, return_array=return_array, window_size=window_size) for layer in self.layers]
        if N == 1 and all(m is None for m in masks):
            return None
        raise NotImplementedError("a ragged batch decodes one token at a time, without a mask")

    def is_trimmable(self) -> bool:
        return False

    def empty(self) -> bool:
        return False

    @property
    def state(self) -> list[mx.array]:
        return [a for layer in self.layers for a in layer.live_arrays()]


class _CompositeRows(stock.CacheList):  # type: ignore[misc, valid-type]
    def watchers(self) -> list[Any]:
        found: list[Any] = self.caches[0].watchers()
        return found


class _RecurrentRows(_Rows, stock.ArraysCache):  # type: ignore[misc, valid-type]
    """Reads the rows' states side by side, writes each row's back to it."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(len(layers[0].cache))
        self.layers = layers

    def __getitem__(self, slot: int) -> mx.array | None:
        parts = [layer.cache[slot] for layer in self.layers]
        if any(p is None for p in parts):
            return None
        return mx.concatenate(parts, axis=0)

    def __setitem__(self, slot: int, value: mx.array) -> None:
        for i, layer in enumerate(self.layers):
            layer[slot] = value[i : i + 1]

    @property
    def batch_size(self) -> int:
        return len(self.layers)

    @property  # type: ignore[misc]
    def state(self) -> list[mx.array]:
        return [a for layer in self.layers for a in layer.live_arrays()]

    def advance(self, N: int) -> None:
        for layer in self.layers:
            layer.advance(N)
