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


def reference_kernel(most_slabs: int = 120) -> DecodeKernel:
    return DecodeKernel(Reference, _takes, 2 * most_slabs)


def _takes(shape: Shape) -> str:
    return "" if shape.format is not None and shape.format.name == "plain" else "this format of keys and values"
