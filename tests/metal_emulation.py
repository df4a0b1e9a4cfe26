"""Runs the sources for Metal on the CPU, as C++.

So the logic of the kernels is tested where there is no Metal. What this cannot show: that Apple's compiler takes the
source, and how fast it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from kernel_emulation import COMPILER, in_other_order, run

from onefold.cache.model.kernels import coding_source, metal, metal_source
from onefold.cache.model.kernels.coded_rows import WARP, Coding, Turning
from onefold.cache.model.kernels.decode import DecodeKernel, Partial, Reduction, Shape

__all__ = ["COMPILER", "emulated_coding", "emulated_kernel"]

LANGUAGE = """
using std::max; using std::min; using std::exp2; using std::abs; using std::floor; using std::sqrt;
typedef unsigned int uint;
#define device
#define constant
#define threadgroup static
static thread_local place threadgroup_position_in_grid, threadgroups_per_grid, thread_position_in_threadgroup;
static thread_local uint thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
static float simd_sum(float x) { return over_lanes(x, [](float a, float b) { return a + b; }); }
static float simd_max(float x) { return over_lanes(x, [](float a, float b) { return a > b ? a : b; }); }
static float simd_shuffle_xor(float x, int mask) { return of_lane(x, lane_ ^ mask); }
static float rsqrt(float x) { return 1 / std::sqrt(x); }
struct half {
  unsigned short bits;
  half() {}
  half(float x) : bits(to_half(x)) {}
  operator float() const { return from_half(bits); }
};
template <class To, class From> static To as_type(From x) { To y; std::memcpy(&y, &x, sizeof(y)); return y; }
typedef unsigned short ushort;
#define threadgroup_barrier(x) all_threads->arrive_and_wait()
static void begin(int x, int y, int t, int groups_x, int groups_y) {
  threadgroup_position_in_grid = {uint(x), uint(y), 0};
  threadgroups_per_grid = {uint(groups_x), uint(groups_y), 1};
  thread_position_in_threadgroup = {uint(t), 0, 0};
  thread_index_in_simdgroup = t % 32;
  simdgroup_index_in_threadgroup = t / 32;
}
"""


def _run(
    folder: str,
    parts: dict[str, Any],
    inputs: list[Any],
    outputs: list[Any],
    groups: tuple[int, int],
    threads: int = metal_source.THREADS,
) -> None:
    header = [line for line in parts["header"].splitlines() if not line.startswith(("#include", "using namespace"))]
    source = parts["source"].replace("mem_flags::mem_threadgroup", "0")
    run(folder, LANGUAGE, {**parts, "header": "\n".join(header), "source": source}, inputs, outputs, groups, threads)


class Emulated(metal.MetalLauncher):
    """The launcher of Metal, with its kernels run here. For 32 bits only."""

    folder = ""

    def __init__(self, shape: Shape, slabs: int) -> None:
        self.shape, self.slabs = shape, slabs
        self.parts = metal.partial_source(shape, slabs)
        self.tile = metal.tile(shape)

    def partial(self, given: Partial) -> tuple[mx.array, mx.array]:
        arrays = [a for slab in given.arrays for a in slab] + given.arrays[0] * (self.slabs - len(given.arrays))
        heads, length = given.q.shape[1:3]
        q = np.ascontiguousarray(np.array(given.q).transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)  # not in order
        fixed = [np.array(a) for a in (given.numbers, given.work, given.lists, given.scale, *arrays)]
        mixed = np.full((given.partials, heads, length, self.shape.value_dim), np.nan, np.float32)
        sums = np.full((given.partials, heads, length, 2), np.nan, np.float32)
        signs = [] if given.signs is None else [np.array(given.signs)]
        _run(self.folder, self.parts, [q, *fixed, *signs], [mixed, sums], given.blocks)
        return mx.array(mixed), mx.array(sums)

    def reduce(self, given: Reduction) -> mx.array:
        rows, heads, length, value_dim = given.shape
        signs = [] if given.signs is None else [given.signs]
        parts = metal.reduce_source("float", value_dim, "" if given.sinks is None else "float32", bool(signs))
        sinks = given.mixed if given.sinks is None else given.sinks
        inputs = [np.array(a) for a in (given.numbers, given.lists, given.mixed, given.sums, sinks, *signs)]
        out = np.full(given.shape, np.nan, np.float32)
        _run(self.folder, parts, inputs, [out], (rows, heads * length))
        return mx.array(out)


def emulated_kernel(folder: Path) -> DecodeKernel:
    cls = type("Emulated", (Emulated,), {"folder": str(folder)})
    return DecodeKernel(cls, metal.takes, metal.MOST_ARRAYS)


def emulated_coding(folder: Path) -> tuple[Any, Any, Any]:
    """Returns functions like `coding.encode`, `turn` and `decode`, for 32 bits only."""

    def encode(how: Coding, k: mx.array, v: mx.array, *signs: mx.array, across: bool = False) -> mx.array:
        shape = (1, k.shape[1], k.shape[0]) if across else k.shape[:3]
        out, vectors = np.full((*shape, how.row), 7, np.uint32), sum(a.size // a.shape[-1] for a in (k, v))
        given = [in_other_order(np.array(k)), in_other_order(np.array(v))]
        parts = coding_source.encoder_source(how, metal=True, across=across)
        _run(str(folder), parts, [*given, *map(np.array, signs)], [out], (vectors, 1), WARP)
        return mx.array(out)

    def turn(how: Turning, x: mx.array, signs: mx.array) -> mx.array:
        out, parts = np.zeros(x.shape, np.float32), coding_source.turner_source(how, metal=True)
        given = [in_other_order(np.array(x)), np.array(signs)]
        _run(str(folder), parts, given, [out], (x.size // how.dim, 1), WARP)
        return mx.array(out)

    def decode(how: Coding, rows: mx.array) -> tuple[mx.array, mx.array]:
        k, v = (np.zeros((*rows.shape[:3], dim), np.float32) for dim in (how.key_dim, how.value_dim))
        parts, vectors = coding_source.decoder_source(how, metal=True), 2 * rows.size // rows.shape[3]
        _run(str(folder), parts, [in_other_order(np.array(rows))], [k, v], (vectors, 1), WARP)
        return mx.array(k), mx.array(v)

    return encode, turn, decode

