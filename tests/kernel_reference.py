"""The decode kernel in plain operations: what a device's kernel must compute from a work table."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from onefold.cache.model.kernels.decode import DecodeKernel, Partial, Reduction, Shape
from onefold.cache.model.kernels.work_table import COLUMNS

LOG2_E = math.log2(math.e)


class Reference:
    """Reads every entry of the table, on any device."""

    tile = 64

    def __init__(self, shape: Shape, slabs: int) -> None:
        self.shape, self.slabs = shape, slabs
        self.read_tokens = 0

    def partial(self, given: Partial) -> tuple[mx.array, mx.array]:
        q = given.q.astype(mx.float32)
        heads, length, n_kv = q.shape[1], q.shape[2], given.blocks[1]
        work, lists = np.array(given.work).reshape(-1, COLUMNS), np.array(given.lists)
        mixed, sums = [None] * given.partials, [None] * given.partials
        for slab, lo, hi, capacity, member, members, behind, first in work.tolist():
            if not members:
                continue
            self.read_tokens += hi - lo
            k, v = given.arrays[slab]
            assert capacity == k.shape[2]
            assert slab < self.slabs
            k, v = (mx.repeat(a[0, :, lo:hi].astype(mx.float32), heads // n_kv, axis=0) for a in (k, v))
            last = hi - 1 + behind - (length - 1 - mx.arange(length))
            seen = mx.arange(lo, hi)[None] <= last[:, None]
            for i, row in enumerate(lists[member : member + members].tolist()):
                scores = (q[row] @ k.swapaxes(-1, -2)) * (given.scale.item() * LOG2_E)
                scores = mx.where(seen, scores, -1e30)
                top = scores.max(axis=-1, keepdims=True)
                weights = mx.where(seen, mx.power(2.0, scores - top), 0)
                assert mixed[first + i] is None
                mixed[first + i] = weights @ v
                sums[first + i] = mx.concatenate([top, weights.sum(axis=-1, keepdims=True)], axis=-1)
        blank = mx.full((heads, length, self.shape.value_dim), mx.nan), mx.full((heads, length, 2), mx.nan)
        mixed, sums = ([y if x is None else x for x in found] for found, y in ((mixed, blank[0]), (sums, blank[1])))
        return mx.stack(mixed), mx.stack(sums)

    def reduce(self, given: Reduction) -> mx.array:
        numbers, lists = np.array(given.numbers).tolist(), np.array(given.lists)
        rows, heads, length, _ = given.shape
        assert numbers[2] == length
        assert bool(numbers[3]) == (given.sinks is not None)
        out = []
        for row in range(rows):
            first, last = lists[numbers[4] + row], lists[numbers[4] + row + 1]
            parts = mx.array(lists[numbers[5] + first : numbers[5] + last])
            mixed, top, total = given.mixed[parts], given.sums[parts][..., :1], given.sums[parts][..., 1:]
            most = top.max(axis=0)
            if given.sinks is not None:
                sink = given.sinks.astype(mx.float32).reshape(heads, 1, 1) * LOG2_E
                most = mx.maximum(most, sink)
            weights = mx.power(2.0, top - most)
            whole = (weights * total).sum(axis=0)
            if given.sinks is not None:
                whole = whole + mx.power(2.0, sink - most)
            out.append((weights * mixed).sum(axis=0) / whole)
        return mx.stack(out).astype(given.dtype)


class Traceable(Reference):
    """The same without reading the table's content where rows have one query, so that a step on it can be compiled."""

    def partial(self, given: Partial) -> tuple[mx.array, mx.array]:
        if given.q.shape[2] > 1:
            return super().partial(given)
        heads, n_kv = given.q.shape[1], given.blocks[1]
        slab, lo, hi, _, member, members, _, first = (given.work[:, i] for i in range(COLUMNS))
        at = mx.arange(given.partials)[:, None]
        belongs = (first <= at) & (at < first + members)  # [partials, entries]
        entry = mx.argmax(belongs, axis=1)
        row = given.lists[mx.where(belongs.any(axis=1), member[entry] + at[:, 0] - first[entry], 0)]
        q = given.q[row, :, 0].astype(mx.float32)[:, :, None]
        top = mx.full((given.partials, heads, 1, 1), -1e30)
        total, mixed = mx.zeros_like(top), mx.zeros((given.partials, heads, 1, self.shape.value_dim))
        for i, (k, v) in enumerate(given.arrays):
            here = mx.arange(k.shape[2])
            seen = (slab[entry] == i)[:, None] & (here >= lo[entry][:, None]) & (here < hi[entry][:, None])
            seen = seen[:, None, None]
            k, v = (mx.repeat(a.astype(mx.float32), heads // n_kv, axis=1) for a in (k, v))
            scores = mx.where(seen, (q @ k.swapaxes(-1, -2)) * (given.scale * LOG2_E), -1e30)
            most = scores.max(axis=-1, keepdims=True)
            weights = mx.where(seen, mx.power(2.0, scores - most), 0)
            chosen = seen.any(axis=-1, keepdims=True)
            top = mx.where(chosen, most, top)
            total = mx.where(chosen, weights.sum(axis=-1, keepdims=True), total)
            mixed = mx.where(chosen, weights @ v, mixed)
        return mixed, mx.concatenate([top, total], axis=-1)

    def reduce(self, given: Reduction) -> mx.array:
        if given.shape[2] > 1:
            return super().reduce(given)
        rows, n, numbers = given.shape[0], given.mixed.shape[0], given.numbers
        edges = given.lists[numbers[4] + mx.arange(rows + 1)]
        place = mx.minimum(numbers[5] + mx.arange(n), given.lists.shape[0] - 1)
        partial = mx.minimum(given.lists[place], n - 1)
        here = mx.arange(n)[None]
        mine = ((edges[:-1, None] <= here) & (here < edges[1:, None]))[:, :, None, None, None]
        top, total = (mx.where(mine, given.sums[partial][None, ..., i : i + 1], x) for i, x in ((0, -1e30), (1, 0)))
        most = top.max(axis=1, keepdims=True)
        if given.sinks is not None:
            sink = given.sinks.astype(mx.float32).reshape(1, 1, -1, 1, 1) * LOG2_E
            most = mx.maximum(most, sink)
        weights = mx.where(mine, mx.power(2.0, top - most), 0)
        mixed = mx.where(mine, given.mixed[partial][None], 0)
        whole = (weights * total).sum(axis=1)
        if given.sinks is not None:
            whole = whole + mx.power(2.0, sink - most)[:, 0]
        out = (weights * mixed).sum(axis=1) / whole
        return out.astype(given.dtype)


def traceable_kernel() -> DecodeKernel:
    """A kernel whose steps are compiled, like that of CUDA."""
    return DecodeKernel(Traceable, _takes, 240, replaces_stock=True, compiles_steps=True)


def reference_kernel(most_slabs: int = 120) -> DecodeKernel:
    return DecodeKernel(Reference, _takes, 2 * most_slabs)


def _takes(shape: Shape) -> str:
    return "" if shape.format is not None and shape.format.name == "plain" else "this format of keys and values"
