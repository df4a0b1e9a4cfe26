"""Runs the sources for CUDA on the CPU, as C++, with numbers given in bf16.

So the logic of the kernels is tested where there is no GPU. Their instructions (`cuda_header.INSTRUCTIONS`) are written
again here, so those and the speed are tested on a GPU only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from kernel_emulation import run

from onefold.cache.model.kernels import cuda, cuda_header, cuda_reduce
from onefold.cache.model.kernels.decode import DecodeKernel, Partial, Reduction, Shape

LANGUAGE = """
using std::max; using std::min;
#define __device__
#define __forceinline__ inline
#define __shared__ static
typedef unsigned int u32;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static thread_local place blockIdx, threadIdx, gridDim;
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __shfl_xor_sync(u32, T x, int mask) { return of_lane(x, lane_ ^ mask); }
static bool __any_sync(u32, bool x) { return over_lanes(x, [](float a, float b) { return a > b ? a : b; }) > 0; }
static void __syncthreads() { all_threads->arrive_and_wait(); }
static void __syncwarp() { meet(); }
static u32 __byte_perm(u32 x, u32 y, u32 s) {
  const unsigned long long both = (unsigned long long)y << 32 | x;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= u32(both >> (8 * (s >> (4 * i) & 7)) & 255) << (8 * i);
  return r;
}
static u32 __float_as_uint(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
static float __uint_as_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static float of_number(float a, float b) { return std::isnan(a) ? b : std::isnan(b) ? a : std::max(a, b); }
#define fmaxf of_number  // the C library's returns NaN for a signalling one
static float of_exp2(float x) { return std::exp2(x); }
static float of_log2(float x) { return std::log2(x); }
static float of_inverse(float x) { return 1 / x; }
static uint4 of_staged[1 << 13];
static const void* of_unset = memset(of_staged, 0xff, sizeof(of_staged));  // what is read before it is written: NaN
#define OF_STAGED static_assert(true)
static void of_copy16(void* to, const void* from, int n) {
  memcpy(to, from, n);
  memset((char*)to + n, 0, 16 - n);
}
static void of_commit() {}
template <int N> static void of_wait() {}
static const void* of_kept(const void* x) { return x; }
static float of_wide16(unsigned short h) { return __uint_as_float(u32(h) << 16); }
#if OF_F16
static float of_float(unsigned short h) { return from_half(h); }
static u32 of_half(float x) { return to_half(x); }
#else
static float of_float(unsigned short h) { return of_wide16(h); }
static u32 of_half(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif
static u32 of_pack(float a, float b) { return of_half(a) | of_half(b) << 16; }
static void of_put(u32* to, uint2 x) { to[0] = x.x; to[1] = x.y; }
static void of_put(u32* to, uint4 x) { to[0] = x.x; to[1] = x.y; to[2] = x.z; to[3] = x.w; }
static u32 of_fma2(u32 x, u32 y, u32 z) {
  return of_pack(of_float(x) * of_float(y) + of_float(z), of_float(x >> 16) * of_float(y >> 16) + of_float(z >> 16));
}
// lane 4 * g + c has rows g and g + 8 of the first matrix, column g of the second, in columns and rows 2 * c and
// 2 * c + 8 and their next
static void of_mma(float* sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  static float a[8][16][16], b[8][16][8];
  const int g = lane_ >> 2, c = lane_ & 3;
  const u32 first[2][2] = {{a0, a2}, {a1, a3}}, second[2] = {b0, b1};
  for (int far = 0; far < 2; far++)
    for (int h = 0; h < 2; h++) {
      const int k = 2 * c + 8 * far + h;
      for (int row = 0; row < 2; row++) a[warp_][g + 8 * row][k] = of_float(first[row][far] >> (16 * h));
      b[warp_][k][g] = of_float(second[far] >> (16 * h));
    }
  meet();
  for (int row = 0; row < 2; row++)
    for (int h = 0; h < 2; h++)
      for (int k = 0; k < 16; k++) sums[2 * row + h] += a[warp_][g + 8 * row][k] * b[warp_][k][2 * c + h];
  meet();
}
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static void begin(int x, int y, int t, int groups_x, int groups_y) {
  blockIdx = {u32(x), u32(y), 0};
  threadIdx = {u32(t), 0, 0};
  gridDim = {u32(groups_x), u32(groups_y), 1};
}
"""
_INSTRUCTIONS = {of_f16: cuda_header.instructions("bf16", "f16" if of_f16 else "bf16") for of_f16 in (0, 1)}


def _numbers(array: mx.array) -> Any:
    """Returns an array of NumPy, which has no bf16: its bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _run(
    folder: str, parts: dict[str, Any], inputs: list[Any], outputs: list[Any], groups: tuple[int, int], threads: int
) -> None:
    (of_f16,) = [i for i, text in _INSTRUCTIONS.items() if text in parts["header"]]
    parts = {**parts, "header": parts["header"].replace(_INSTRUCTIONS[of_f16], "")}
    run(folder, f"#define OF_F16 {of_f16}\n{LANGUAGE}", parts, inputs, outputs, groups, threads)


class Emulated(cuda.CudaLauncher):
    """The launcher of CUDA, with its kernels run here."""

    folder = ""

    def __init__(self, shape: Shape, slabs: int) -> None:
        self.shape, self.slabs, self.tile = shape, slabs, cuda.tile(shape)
        self.parts = cuda.partial_source(shape, slabs)

    def partial(self, given: Partial) -> tuple[mx.array, mx.array]:
        arrays = [a for slab in given.arrays for a in slab] + given.arrays[0] * (self.slabs - len(given.arrays))
        heads, length = given.q.shape[1:3]
        q = np.ascontiguousarray(_numbers(given.q).transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)  # not in order
        fixed = [_numbers(a) for a in (given.numbers, given.work, given.lists, given.scale, *arrays)]
        mixed = np.full((given.partials, heads, length, self.shape.value_dim), np.nan, np.float32)
        sums = np.full((given.partials, heads, length, 2), np.nan, np.float32)
        signs = [] if given.signs is None else [np.array(given.signs)]
        _run(self.folder, self.parts, [q, *fixed, *signs], [mixed, sums], given.blocks, cuda.threads(self.shape))
        return mx.array(mixed), mx.array(sums)

    def reduce(self, given: Reduction) -> mx.array:
        rows, heads, length, value_dim = given.shape
        signs = [] if given.signs is None else [given.signs]
        parts = cuda.reduce_source("bf16", value_dim, "" if given.sinks is None else "float32", bool(signs))
        sinks = mx.zeros((1,)) if given.sinks is None else given.sinks.astype(mx.float32)
        inputs = [_numbers(a) for a in (given.numbers, given.lists, given.mixed, given.sums, sinks, *signs)]
        out = np.zeros(given.shape, np.uint16)
        _run(self.folder, parts, inputs, [out], (rows, heads * length), cuda_reduce.THREADS)
        return mx.array(out).view(mx.bfloat16)


def emulated_kernel(folder: Path) -> DecodeKernel:
    cls = type("Emulated", (Emulated,), {"folder": str(folder)})
    return DecodeKernel(cls, cuda.takes, cuda.MOST_ARRAYS)
