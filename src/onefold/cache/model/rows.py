"""One layer for several requests: the rows of a decode batch.

- Rows are ragged: `offset` is an array with one position per row. Each row appends to its own storage and reads its own
  pieces; nothing is padded, and no prefix is copied.
- Each row's layer keeps its own state, so a lease can leave the batch between any two steps.
- Each kind names the class of its rows (`Watched.rows`): `AttentionRows` for those that attend, or its own.

Knows nothing of leases.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec, View
from onefold.cache.model.attention import Handle
from onefold.cache.model.kinds.plain import PlainCodec
from onefold.cache.model.step_plan import OneSlab, Rows, StepPlan


class RowsOf:
    """A layer whose rows are other layers."""

    layers: list[Any]

    def watchers(self) -> list[Any]:
        return [w for layer in self.layers for w in layer.watchers()]

    @property
    def state(self) -> list[mx.array]:
        return [a for layer in self.layers for a in layer.live_arrays()]


class AttentionRows(RowsOf):
    """The rows' keys and values, each in its own layer's buffers."""

    def __init__(self, layers: list[Any], plan: StepPlan) -> None:
        self.layers = layers
        self._plan = plan
        self._sliceable = all(layer.sliceable for layer in layers)

    @property
    def offset(self) -> mx.array:
        return self._plan.offset([layer.offset for layer in self.layers])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        layers, n, plan = self.layers, len(self.layers), self._plan
        if not self._sliceable:
            for layer, k, v in zip(layers, mx.split(keys, n), mx.split(values, n), strict=True):
                layer.update_and_fetch(k, v)
            return self.keys_and_values()
        before = [layer.offset for layer in layers]
        if plan.admitted != before:  # the first layer of a step reserves room for all layers
            for layer in layers:
                layer.admit(1)
            plan.admitted = before
            plan.one_slab = self._find_slab()
        found = plan.one_slab
        if found is None:
            for layer, k, v in zip(layers, mx.split(keys, n), mx.split(values, n), strict=True):
                layer.store(k, v)
            return self.keys_and_values()
        arrays, where = found.slab.arrays(layers[0].index), found.where
        for j, part in enumerate(layers[0].codec.encode(keys, values)):
            new = part.transpose(2, 1, 0, 3)
            if new.shape not in where:
                where[new.shape] = mx.broadcast_to(found.spots[:, None], new.shape)
            arrays[j] = mx.put_along_axis(arrays[j], where[new.shape], new, axis=2)
        for layer in layers:
            layer.offset += 1
        return self.keys_and_values()

    def _find_slab(self) -> OneSlab | None:
        """Returns the slab to which all rows append in this step; None if there are several."""
        layers = self.layers
        if any(not x.in_track or x.offset < x.track.floor or not x.track.pieces for x in layers):
            return None
        lasts = [x.track.pieces[-1] for x in layers]
        if any(p.slab is not lasts[0].slab or x.offset < p.pos for p, x in zip(lasts, layers, strict=True)):
            return None
        spots = [p.lo + x.offset - p.pos for p, x in zip(lasts, layers, strict=True)]
        return OneSlab(lasts[0].slab, mx.array(spots), {})

    def keys_and_values(self) -> tuple[Handle, Handle]:
        first, plan = self.layers[0], self._plan
        if all(x.in_track for x in self.layers):
            offsets = [x.offset for x in self.layers]
            if plan.laid_out != offsets:
                plan.laid_out = offsets
                plan.layout = [x.track.layout(x.offset) for x in self.layers]
            rows: Any = Rows(plan.layout, first.index)
            codec, arrays = first.codec, plan.layout[0][0][0].arrays(first.index)
            longest = max(offsets)
        else:
            found, codec = [], PlainCodec()
            for layer in self.layers:
                k, v = layer.keys_and_values()
                if isinstance(k, Handle):
                    found.append(k.rows[0])
                    codec = k.codec  # the same in all rows of a layer
                else:
                    found.append([View([k, v], 0, k.shape[2], id(layer))])
            rows, arrays = found, found[0][0].arrays
            longest = max(sum(v.hi - v.lo for v in row) for row in found)
        dtype = arrays[codec.n_keys() - 1].dtype

        def handle(a: mx.array) -> Handle:
            dim = codec.dim(ArraySpec(a.shape[1], a.shape[3], a.dtype))
            return Handle(rows, codec, (len(rows), a.shape[1], longest, dim), dtype, [0], plan)

        return handle(arrays[0]), handle(arrays[codec.n_keys()])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        masks = [layer.make_mask(N, return_array=return_array, window_size=window_size) for layer in self.layers]
        if N == 1 and all(m is None for m in masks):
            return None
        raise NotImplementedError("a ragged batch decodes one token per row, without a mask")

    def is_trimmable(self) -> bool:
        return False

    def empty(self) -> bool:
        return False
