"""One layer for several requests: the rows of a decode batch.

- Rows are ragged: `offset` is an array with one position per row. Each row appends to its own storage and
  reads its own pieces; nothing is padded, and no prefix is copied.
- Each row's own layer stays the owner of its state, so a lease can leave between any two steps.

Knows nothing of leases.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory.segment import ArraySpec, Slab, View
from onefold.cache.model import stock
from onefold.cache.model.attention import Handle, Rows
from onefold.cache.model.kinds.full import PlainCodec, SegmentedLayer
from onefold.cache.model.stock import Kind


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

    @staticmethod
    def begin_step(plans: dict[Any, Any]) -> None:
        """Nothing that was worked out for the last step's positions holds for the next."""
        for name in ("admitted", "laid out", "offsets"):
            plans.pop(name, None)


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
        layers, n = self.layers, len(self.layers)
        if not all(isinstance(layer, SegmentedLayer) for layer in layers):
            for layer, k, v in zip(layers, mx.split(keys, n), mx.split(values, n), strict=True):
                layer.update_and_fetch(k, v)
            return self.keys_and_values()
        before = [layer.offset for layer in layers]
        if self._plans.get("admitted") != before:  # this step's first layer admits for all of them
            for layer in layers:
                layer.admit(1)
            self._plans["admitted"] = before
            self._plans["together"] = self._one_slab()
        together = self._plans["together"]
        if together is None:
            for layer, k, v in zip(layers, mx.split(keys, n), mx.split(values, n), strict=True):
                layer.store(k, v)
            return self.keys_and_values()
        slab, spots, where = together
        arrays = slab.arrays(layers[0].index)
        for j, part in enumerate(layers[0].codec.encode(keys, values)):
            new = part.transpose(2, 1, 0, 3)
            if new.shape not in where:
                where[new.shape] = mx.broadcast_to(spots[:, None], new.shape)
            arrays[j] = mx.put_along_axis(arrays[j], where[new.shape], new, axis=2)
        for layer in layers:
            layer.offset += 1
        return self.keys_and_values()

    def _one_slab(self) -> tuple[Slab, mx.array, dict[Any, mx.array]] | None:
        """If this step's tokens all go to one slab: that slab and the indices, and room to keep what depends on the
        shape of a write alone. Such a step is one write per array for all rows."""
        layers = self.layers
        if any(x.ring is not None or x.offset < x.track.floor or not x.track.pieces for x in layers):
            return None
        lasts = [x.track.pieces[-1] for x in layers]
        if any(p.slab is not lasts[0].slab or x.offset < p.pos for p, x in zip(lasts, layers, strict=True)):
            return None
        spots = [p.lo + x.offset - p.pos for p, x in zip(lasts, layers, strict=True)]
        return lasts[0].slab, mx.array(spots), {}

    def keys_and_values(self) -> tuple[Handle, Handle]:
        first = self.layers[0]
        if all(isinstance(x, SegmentedLayer) and x.ring is None for x in self.layers):
            offsets = [x.offset for x in self.layers]
            if self._plans.get("laid out") != offsets:
                self._plans["laid out"] = offsets
                self._plans["layout"] = [x.track.layout(x.offset) for x in self.layers]
            layout = self._plans["layout"]
            rows: Any = Rows(layout, first.index)
            codec, arrays = first.codec, layout[0][0][0].arrays(first.index)
            longest = max(offsets)
        else:
            found, codec = [], PlainCodec()
            for layer in self.layers:
                k, v = layer.keys_and_values()
                if isinstance(k, Handle):
                    found.append(k.rows[0])
                    codec = k.codec  # a layer has one format in all rows
                else:
                    found.append([View([k, v], 0, k.shape[2], id(layer))])
            rows, arrays = found, found[0][0].arrays
            longest = max(sum(v.hi - v.lo for v in row) for row in found)
        dtype = arrays[codec.n_keys() - 1].dtype

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
        known = next((p for p in parts if p is not None), None)
        if known is None:
            return None
        # a row that has not begun starts from zeros, as the models themselves do
        return mx.concatenate([mx.zeros_like(known) if p is None else p for p in parts], axis=0)

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
