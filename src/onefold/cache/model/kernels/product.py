"""Products of a few rows with a matrix of weights, on CUDA.

MLX leaves products of more than one row to cuBLAS. At every call cuBLAS chooses an algorithm, and MLX captures its
kernels into a graph. To schedule one product takes the host 14 to 31 µs, which is more than most of them take on the
device. Our kernel takes 5 to 9 µs to schedule, and as long on the device for up to 16 rows
(`benchmarks/gpu_products.py`). For one row MLX has a kernel that is faster on the device.

The result of a row does not depend on how many rows are beside it: all variants add in the same order.

- A block computes 16 or 32 columns of the result for all rows. Its eight warps split the inner dimension, and their
  sums are added in shared memory.
- Products run on tensor cores, straight from global memory: see `cuda_source`.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from onefold.cache.model.kernels.compiled import kernel
from onefold.cache.model.kernels.cuda_header import NAMES, header, shortened

TYPES = tuple(NAMES)
_DIMS = 32
"""The inner dimension is a multiple of it."""
_TILES = ((8, 1, 1, 4), (16, 2, 1, 4), (32, 4, 2, 2))
"""Up to how many rows; tiles of eight rows, tiles of 16 columns, and steps of the inner dimension that are loaded at
once: the fastest on an H200. A thread may use 80 registers in the first, and 128 in the others, or fewer blocks run at
once."""
MOST_ROWS = _TILES[-1][0]
_THREADS = 256

_LOAD = """
typedef unsigned short u16;
// eight neighbours of a row; FAST: they are contiguous and aligned; ONCE: nobody else reads them
template <bool FAST, bool ONCE>
__device__ __forceinline__ uint4 of_eight(const u16* p, long step) {
  if constexpr (FAST && ONCE) return __ldcs((const uint4*)p);
  if constexpr (FAST) return __ldg((const uint4*)p);
  u32 r[4];
  for (int i = 0; i < 4; i++) r[i] = p[2 * i * step] | (u32)p[(2 * i + 1) * step] << 16;
  return make_uint4(r[0], r[1], r[2], r[3]);
}
template <bool FAST, int MT, int A, int U>
__device__ __forceinline__ void of_products(
    float (&acc)[A][MT][4], const u16* (&wp)[2 * A], const u16* (&xp)[MT], int first, int K, long w_step, long x_step) {
#pragma unroll 1
  for (int k = first; k < K; k += U * 256) {
    uint4 wv[U][2 * A], xv[U][MT];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const long at = k + u * 256;
      if (at < K) {
#pragma unroll
        for (int i = 0; i < 2 * A; i++) wv[u][i] = of_eight<FAST, true>(wp[i] + at * w_step, w_step);
#pragma unroll
        for (int i = 0; i < MT; i++) xv[u][i] = of_eight<FAST, false>(xp[i] + at * x_step, x_step);
      }
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (k + u * 256 < K) {
#pragma unroll
        for (int a = 0; a < A; a++) {
#pragma unroll
          for (int i = 0; i < MT; i++) {
            const uint4 p = wv[u][2 * a], q = wv[u][2 * a + 1], z = xv[u][i];
            of_mma(acc[a][i], p.x, q.x, p.y, q.y, z.x, z.y);
            of_mma(acc[a][i], p.z, q.z, p.w, q.w, z.z, z.w);
          }
        }
      }
    }
  }
}
"""

_SOURCE = """
constexpr int MT = TILES_M, A = TILES_N, U = STEPS;
const int N = w_shape[0], K = w_shape[1], M = x_shape[0] * x_shape[1];
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3, n0 = blockIdx.x * 16 * A;
const long w_row = w_strides[0], w_step = w_strides[1], x_step = x_strides[2];
const u16* wp[2 * A];
const u16* xp[MT];
bool fast = w_step == 1 && x_step == 1 && ((((size_t)w | (size_t)x) & 15) | (w_row & 7)) == 0;
fast = fast && (x_shape[0] == 1 || (x_strides[0] & 7) == 0) && (x_shape[1] == 1 || (x_strides[1] & 7) == 0);
for (int i = 0; i < 2 * A; i++) wp[i] = (const u16*)w + (long)min(n0 + 8 * i + g, N - 1) * w_row + c * 8 * w_step;
for (int i = 0; i < MT; i++) {
  const int m = min(8 * i + g, M - 1);
  xp[i] = (const u16*)x + (m / x_shape[1]) * x_strides[0] + (m % x_shape[1]) * x_strides[1] + c * 8 * x_step;
}
float acc[A][MT][4];
for (int a = 0; a < A; a++) for (int i = 0; i < MT; i++) for (int j = 0; j < 4; j++) acc[a][i][j] = 0.f;
if (fast) of_products<true, MT, A, U>(acc, wp, xp, warp * 32, K, 1, 1);
else of_products<false, MT, A, 1>(acc, wp, xp, warp * 32, K, w_step, x_step);
__shared__ float part[8][A * MT * 128];
for (int a = 0; a < A; a++) for (int i = 0; i < MT; i++) {
  float* to = part[warp] + (a * MT + i) * 128;
  to[g * 8 + 2 * c] = acc[a][i][0];
  to[g * 8 + 2 * c + 1] = acc[a][i][1];
  to[(g + 8) * 8 + 2 * c] = acc[a][i][2];
  to[(g + 8) * 8 + 2 * c + 1] = acc[a][i][3];
}
__syncthreads();
for (int t = threadIdx.x; t < A * MT * 128; t += 256) {
  const int column = t % (16 * A), m = t / (16 * A), n = n0 + column;
  const int at = ((column >> 4) * MT + (m >> 3)) * 128 + (column & 15) * 8 + (m & 7);
  if (m >= M || n >= N) continue;
  float sum = 0.f;
  for (int i = 0; i < 8; i++) sum += part[i][at];
  ADD_BIAS
  u16 rounded;
  asm("cvt.rn.TYPE.f32 %0, %1;" : "=h"(rounded) : "f"(sum));
  ((u16*)y)[(long)m * N + n] = rounded;
}
"""

_LOAD_BIAS = "const u16 b = ((const u16*)bias)[n * bias_strides[0]];"
_BIAS = {
    mx.bfloat16: "sum += __uint_as_float((u32)b << 16);",
    mx.float16: 'float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(b)); sum += f;',
}


def takes(x: mx.array, weight: mx.array, bias: mx.array | None) -> bool:
    """Whether there is a kernel for this product."""
    if x.ndim != 3 or not 2 <= x.shape[0] * x.shape[1] <= MOST_ROWS or x.dtype not in NAMES:
        return False
    if weight.ndim != 2 or weight.dtype != x.dtype or weight.shape[1] != x.shape[2] or weight.shape[1] % _DIMS:
        return False
    return bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1])


def multiply(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """Returns `x @ weight.T + bias`, for what `takes` accepts."""
    rows, columns = x.shape[0] * x.shape[1], weight.shape[0]
    tiles = next(i for i, (most, *_) in enumerate(_TILES) if rows <= most)
    found = _kernel(x.dtype, tiles, bias is not None)(
        inputs=[x, weight] if bias is None else [x, weight, bias],
        grid=(-(-columns // (16 * _TILES[tiles][2])) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(x.shape[0], x.shape[1], columns)],
        output_dtypes=[x.dtype],
    )
    product: mx.array = found[0]
    return product


def row_counts() -> list[int]:
    """Returns for which number of rows each variant is used at most."""
    return [most for most, *_ in _TILES]


@functools.cache
def _kernel(dtype: mx.Dtype, tiles: int, biased: bool) -> Any:
    name = NAMES[dtype]
    _, m, n, steps = _TILES[tiles]
    source = _SOURCE.replace("ADD_BIAS", _LOAD_BIAS + _BIAS[dtype] if biased else "").replace("TYPE", name)
    source = source.replace("TILES_M", str(m)).replace("TILES_N", str(n)).replace("STEPS", str(steps))
    parts = {
        "name": f"onefold_product_{name}_{m}{'_biased' if biased else ''}",
        "input_names": ["x", "w", "bias"] if biased else ["x", "w"],
        "output_names": ["y"],
        "header": header(name) + shortened(_LOAD),
        "source": shortened(source),
    }
    return kernel(parts)
