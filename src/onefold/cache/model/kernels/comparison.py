"""Compares a device's kernels with plain operations: the decode kernel over the edge cases of work tables, and products
over those of their shapes.

Each case has rows of different length that share a prefix or not, in one slab or many, with one query or several, with
sinks or without; pieces of one token and pieces that end at a chunk's edge. Runs in a process of its own (`trial`).
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import mlx.core as mx

from onefold.cache.model.formats.turned import TurnedSides, turned_sides
from onefold.cache.model.kernels import product
from onefold.cache.model.kernels.coded_rows import Coding
from onefold.cache.model.kernels.decode import DecodeKernel, Shape, Signs
from onefold.cache.model.kernels.work_table import CHUNK, MOST_QUERIES, Layout

TOLERANCE = {mx.float32: 2e-2, mx.float16: 1e-2, mx.bfloat16: 3e-2}
"""The largest difference, as a share of the largest value. GPUs round products of 32 bits to fewer."""
LENGTHS = (1, 2, 7, 15, 16, 17, 64, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


class Slab:
    """A slab of one layer, with random content."""

    def __init__(self, capacity: int, heads: int, shape: Shape) -> None:
        self.capacity = capacity
        self.plain = [
            mx.random.normal((1, heads, capacity, dim)).astype(shape.dtype) for dim in (shape.key_dim, shape.value_dim)
        ]
        self.plain[1][:, 0, 0] = 0  # a value of zeros, and a large one
        self.plain[1][:, -1, -1] *= 20
        form = shape.format
        self.arrays = list(self.plain)
        if form is not None and form.name == "affine":
            packed = [mx.quantize(a, group_size=form.group, bits=form.bits) for a in self.plain]
            self.arrays = [part for parts in packed for part in parts]
            self.plain = [mx.dequantize(*parts, group_size=form.group, bits=form.bits) for parts in packed]
        elif form is not None and form.value_bits:
            codec = codec_of(shape)
            self.arrays = list(codec.encode(*self.plain))
            self.plain = list(codec.decode(self.arrays, mx.float32))


def codec_of(shape: Shape) -> TurnedSides:
    """Returns the codec of a rotated format."""
    form = shape.format
    assert form is not None
    how = Coding(form.name, shape.key_dim, shape.value_dim, form.bits, form.value_bits, shape.dtype)
    return turned_sides(how, turns=form.turns)


class Case(NamedTuple):
    rows: int
    slabs: int
    """Of one row."""
    shared: int
    """Tokens of a prefix that all rows read."""
    queries: int
    has_sinks: bool


def cases(buckets: tuple[int, ...], most_queries: int) -> list[Case]:
    """Returns the cases for a kernel with variants for so many slabs each: every variant, and more than the largest.
    Chunks of prompts have up to `most_queries`."""
    found = [Case(1, 1, 0, 1, False), Case(1, 3, 0, 2, True), Case(3, 1, 2 * CHUNK + 9, 1, False)]
    found += [Case(2, 2, 40, MOST_QUERIES, True), Case(9, 1, CHUNK, 1, True), Case(33, 1, 100, 1, False)]
    found += [Case(max(1, n // 2), 2, 0, 1, False) for n in buckets]
    if most_queries > MOST_QUERIES:
        found += [Case(1, 1, 0, 33, False), Case(1, 2, 300, 130, True), Case(1, 1, 0, most_queries, False)]
    return [*found, Case(buckets[-1] + 1, 1, 20, 1, False)]


def compare(kernel: DecodeKernel, shape: Shape, heads: int, n_kv: int, seed: int = 0) -> str:
    """Returns why the kernel's results are wrong for a shape; empty if all cases agree. Raises RuntimeError if the
    device cannot compile or run it."""
    rng = random.Random(seed)
    mx.random.seed(seed)
    for case in cases(kernel.buckets(shape), kernel.most_queries):
        room = max(MOST_QUERIES, case.queries) + 3
        slabs = [Slab(rng.choice(LENGTHS) + room, n_kv, shape) for _ in range(case.rows * case.slabs)]
        prefix = Slab(case.shared + 5, n_kv, shape) if case.shared else None
        layout = [_row(rng, slabs[i :: case.rows], prefix, case) for i in range(case.rows)]
        q = mx.random.normal((case.rows, case.queries, heads, shape.key_dim)).astype(shape.dtype).transpose(0, 2, 1, 3)
        sinks = (2 * mx.random.normal((heads,))).astype(shape.dtype) if case.has_sinks else None
        scale = shape.key_dim**-0.5
        table = kernel.table(layout, case.queries, n_kv, shape)
        arrays = [slab.arrays for slab in table.slabs]
        out = kernel.attend(q, arrays, table, shape, n_kv, scale, sinks, signs(shape))
        wanted = attention(q, layout, scale, sinks, shape)
        largest = max(1.0, _largest(wanted))
        difference = _largest(out.astype(mx.float32) - wanted) / largest
        if not difference <= TOLERANCE[shape.dtype]:  # also NaN
            return f"{case} differs by {difference:.2g}"
    return ""


def compare_products(dtype: mx.Dtype, seed: int = 0) -> str:
    """The same for products of a few rows with weights of a type."""
    mx.random.seed(seed)
    shapes = (2, 32, 1), (5, 4096, 1024), (8, 288, 33), (9, 1056, 40), (16, 64, 4096), (32, 1024, 130)
    for rows, dims, columns in shapes:
        for biased, strided, across in ((False, False, False), (True, True, False), (True, False, True)):
            shape = (1, rows) if across else (rows, 1)
            x = mx.random.normal((*shape, dims + 3 * strided)).astype(dtype)[..., 3 * strided :]
            weight = mx.random.normal((columns, dims)).astype(dtype)
            if strided:
                weight = mx.contiguous(weight.T).T
            bias = mx.random.normal((columns,)).astype(dtype) if biased else None
            wanted = x.astype(mx.float32) @ weight.astype(mx.float32).T
            wanted = wanted if bias is None else wanted + bias.astype(mx.float32)
            difference = _largest(product.multiply(x, weight, bias).astype(mx.float32) - wanted) / _largest(wanted)
            if not difference <= TOLERANCE[dtype]:  # also NaN
                return f"{rows} rows of {dims} to {columns} differ by {difference:.2g}"
    return ""


def _largest(array: mx.array) -> float:
    return float(mx.abs(array).max())


def _row(rng: random.Random, slabs: list[Slab], prefix: Slab | None, case: Case) -> list[tuple[Any, int, int]]:
    row: list[tuple[Any, int, int]] = []
    if prefix is not None:
        row.append((prefix, 3, 3 + case.shared))
    for slab in slabs:
        lo = rng.choice([0, 0, 1, 2])
        most = slab.capacity - lo
        row.append((slab, lo, lo + min(most, max(case.queries, rng.choice(LENGTHS)))))
    return row


def signs(shape: Shape) -> Signs | None:
    """Returns those of the rotations, for a format that turns."""
    if shape.format is None or not shape.format.turns:
        return None
    return codec_of(shape).signs


def attention(q: mx.array, layout: Layout, scale: float, sinks: mx.array | None, shape: Shape) -> mx.array:
    """Returns the same attention, row by row, in 32 bits."""
    if shape.format is not None and shape.format.turns:
        codec = codec_of(shape)
        turned = codec.keys.turn(q.astype(mx.float32))
        return codec.values.turn_back(attention(turned, layout, scale, sinks, shape._replace(format=None)))
    outs = []
    for i, row in enumerate(layout):
        k, v = (mx.concatenate([s.plain[j][..., lo:hi, :] for s, lo, hi in row], axis=2) for j in (0, 1))
        length, n, repeats = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        k, v = (mx.repeat(a.astype(mx.float32), repeats, axis=1) for a in (k, v))
        scores = (q[i : i + 1].astype(mx.float32) * scale) @ k.swapaxes(-1, -2)
        scores = mx.where(mx.arange(n)[None] <= (n - length + mx.arange(length))[:, None], scores, -1e30)
        if sinks is not None:
            column = sinks.astype(mx.float32).reshape(1, -1, 1, 1)
            scores = mx.concatenate([scores, mx.broadcast_to(column, (*scores.shape[:3], 1))], axis=-1)
        outs.append(mx.softmax(scores, axis=-1)[..., :n] @ v)
    return mx.concatenate(outs)
