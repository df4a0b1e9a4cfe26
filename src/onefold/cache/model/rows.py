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
from onefold.cache.model.attention import Forms, Handle, WindowMask
from onefold.cache.model.formats.codec import Codec
from onefold.cache.model.formats.plain import PlainCodec
from onefold.cache.model.step_plan import Layout, OneSlab, Rows, StepPlan


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
        self.plan = plan
        self._forms: Forms | None = None
        self._sliceable = all(layer.sliceable for layer in layers)
        self._keeps_all = self._sliceable and all(layer.bound is None for layer in layers)
        """Whether the layers keep the KV of all tokens, also of later ones."""

    def watchers(self) -> list[Any]:
        return super().watchers() if self.plan.watcher is None else [self.plan.watcher]

    @property
    def offset(self) -> mx.array:
        plan = self.plan
        return plan.positions if plan.is_prepared else plan.offset([layer.offset for layer in self.layers])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        layers, n, plan = self.layers, len(self.layers), self.plan
        if plan.is_prepared:
            self._write_prepared(keys, values)
            return self._handles(plan.layout, plan.longest)
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
        self._write(found, keys, values)
        for layer in layers:
            layer.offset += 1
        return self.keys_and_values()

    def _write_prepared(self, keys: mx.array, values: mx.array) -> None:
        """Write a token of each row to where the plan says. The layers move on after the forward."""
        found = self.plan.one_slab
        if found is not None:
            self._write(found, keys, values)
            return
        n = len(self.layers)
        for layer, k, v in zip(self.layers, mx.split(keys, n), mx.split(values, n), strict=True):
            layer.track.write(layer.index, layer.offset, layer.codec.encode(k, v))

    def _write(self, found: OneSlab, keys: mx.array, values: mx.array) -> None:
        first, where = self.layers[0], found.where
        arrays = self.plan.arrays(found.slab, first.index)
        for j, new in enumerate(first.codec.encode_step(keys, values)):
            if new.shape not in where:
                where[new.shape] = mx.broadcast_to(found.spots[:, None], new.shape)
            arrays[j] = mx.put_along_axis(arrays[j], where[new.shape], new, axis=2)

    def _find_slab(self) -> OneSlab | None:
        """Returns the slab to which all rows append in this step; None if there are several."""
        if any(not x.in_track for x in self.layers):
            return None
        return OneSlab.of([x.track for x in self.layers], [x.offset for x in self.layers])

    def keys_and_values(self) -> tuple[Handle, Handle]:
        plan = self.plan
        if all(x.in_track for x in self.layers):
            offsets = [x.offset for x in self.layers]
            if plan.laid_out != offsets:
                plan.laid_out = offsets
                plan.layout = [x.track.layout(x.offset) for x in self.layers]
            return self._handles(plan.layout, max(offsets))
        found: list[list[View]] = []
        codec: Codec = PlainCodec()
        for layer in self.layers:
            k, v = layer.keys_and_values()
            if isinstance(k, Handle):
                found.append(k.rows[0])
                codec = k.codec  # the same in all rows of a layer
            else:
                found.append([View([k, v], 0, k.shape[2], id(layer))])
        longest = max(sum(v.hi - v.lo for v in row) for row in found)
        specs = [ArraySpec(a.shape[1], a.shape[3], a.dtype) for a in found[0][0].arrays]
        return Forms.of(codec, specs).handles(found, longest, self.plan, [0])

    def _handles(self, layout: Layout, longest: int) -> tuple[Handle, Handle]:
        first = self.layers[0]
        if self._forms is None:
            self._forms = Forms.of(first.codec, first.track.store.specs[first.index].arrays)
        return self._forms.handles(Rows(layout, first.index), longest, self.plan, [0])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> WindowMask | None:
        if N == 1 and window_size is not None and self._keeps_all and not return_array:
            return WindowMask(window_size)
        masks = [layer.make_mask(N, return_array=return_array, window_size=window_size) for layer in self.layers]
        if N == 1 and all(m is None for m in masks):
            return None
        raise NotImplementedError("a ragged batch decodes one token per row, without a mask")

    def is_trimmable(self) -> bool:
        return False

    def empty(self) -> bool:
        return False
