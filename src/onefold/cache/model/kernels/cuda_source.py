"""The decode kernel for CUDA, as source text.

- `partial` attends the queries of some rows over one chunk of one slab; `reduce` weights the chunks of each row.
- Products run on tensor cores (`mma.sync.m16n8k16`), straight from global memory: each thread loads eight neighbouring
  dimensions of a key or value at once, and the order of dimensions and keys inside a product is chosen to match. So
  nothing is staged in shared memory, and a chunk that several rows read is read once for up to 64 queries.
- A block has four warps, or eight where values are wider than 160: they split the queries where there are more than 16,
  and the keys otherwise.

The work table has eight integers for each chunk: slab, lo, hi, capacity, first member, number of members, how many keys
the row has behind the chunk, first partial. A member is a row that reads the chunk; its partial has the chunk's
maximum, sum and weighted values for each of the row's queries.
"""

from __future__ import annotations

import mlx.core as mx

NAMES = {mx.bfloat16: "bf16", mx.float16: "f16"}
"""The types that a kernel can read, by the names that instructions have for them."""


def shortened(source: str) -> str:
    """Returns the source without indents and comments: MLX puts it together and hashes it at every call."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


THREADS = 128
TILE = 64
"""Queries of one block."""

HEADER = """
typedef unsigned int u32;
__device__ __forceinline__ u32 of_pack(float a, float b) {{
  u32 r;
  asm("cvt.rn.{t}x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}}
__device__ __forceinline__ void of_mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {{
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, {{%0,%1,%2,%3}};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}}
{load}
"""

PARTIAL = """
constexpr int DK = {dk}, DV = {dv}, SPLIT = {split}, WIDTH = DV / SPLIT, NK = DK / 32;
constexpr int EACH = WIDTH % 64 == 0 ? 8 : 4, NB = WIDTH / (8 * EACH);
const int tiles = numbers[0], G = numbers[1], L = numbers[2], GL = G * L;
const int item = blockIdx.x / tiles, tile = blockIdx.x % tiles, head = blockIdx.y, HK = gridDim.y;
const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, half = threadIdx.x >> 7, g = lane >> 2, c = lane & 3;
const int* w = work + 8 * item;
const int slab = w[0], lo = w[1], hi = w[2], capacity = w[3], member = w[4], behind = w[6], partial = w[7];
const int queries = w[5] * GL - tile * 64;
if (queries <= 0) return;
const int tiles_m = queries <= 16 ? 1 : queries <= 32 ? 2 : 4, parts_k = 4 / tiles_m;
const int mt = warp % tiles_m, part = warp / tiles_m;
{pointers}
switch (slab) {{
{cases}
}}
const float to_log2 = scale[0] * 1.4426950408889634f;

// the two queries of this thread: rows g and g + 8 of its tile
uint4 q0[NK], q1[NK];
int last0 = -1, last1 = -1;
long at0 = -1, at1 = -1;
#pragma unroll
for (int side = 0; side < 2; side++) {{
  const int m = tile * 64 + mt * 16 + g + 8 * side;
  const bool real = m < w[5] * GL;
  const int mine = real ? m / GL : 0, rest = m % GL, gq = rest / L, l = rest % L;
  const long row = real ? lists[member + mine] : 0;
  const long offset = row * q_strides[0] + (long)(head * G + gq) * q_strides[1] + (long)l * q_strides[2];
  const char* from = (const char*)q + 2 * offset;
  uint4* to = side ? q1 : q0;
#pragma unroll
  for (int j = 0; j < NK; j++) to[j] = real ? *(const uint4*)(from + 2 * (j * 32 + c * 8)) : make_uint4(0, 0, 0, 0);
  const int last = real ? min(hi - 1, hi - 1 + behind - (L - 1 - l)) : -1;
  const long at = real ? ((long)(partial + mine) * HK * G + head * G + gq) * L + l : -1;
  if (side) {{ last1 = last; at1 = at; }} else {{ last0 = last; at0 = at; }}
}}

int stop = max(last0, last1) + 1;  // no query of this warp sees a later key
for (int o = 16; o; o >>= 1) stop = max(stop, __shfl_xor_sync(~0u, stop, o));

float acc[NB * EACH][4];
#pragma unroll
for (int i = 0; i < NB * EACH; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
float m0 = -1e30f, m1 = -1e30f, l0 = 0.f, l1 = 0.f;
for (int t = lo + 16 * part; t < stop; t += 16 * parts_k) {{
  uint4 kk[2][NK];
#pragma unroll
  for (int n = 0; n < 2; n++) {{
    const long key = (long)head * capacity + min(t + 8 * n + g, hi - 1);
#pragma unroll
    for (int j = 0; j < NK; j++) kk[n][j] = of_load8({k_args}, key, DK, j * 32 + c * 8);
  }}
  u32 vv[4][NB][EACH / 2];
#pragma unroll
  for (int i = 0; i < 4; i++) {{
    const long key = (long)head * capacity + min(t + 2 * c + (i & 1) + 8 * (i >> 1), hi - 1);
#pragma unroll
    for (int b = 0; b < NB; b++) {{
      const int dim = half * WIDTH + b * 8 * EACH + g * EACH;
      if constexpr (EACH == 8) {{
        const uint4 x = of_load8({v_args}, key, DV, dim);
        vv[i][b][0] = x.x; vv[i][b][1] = x.y; vv[i][b][2] = x.z; vv[i][b][3] = x.w;
      }} else {{
        const uint2 x = of_load4({v_args}, key, DV, dim);
        vv[i][b][0] = x.x; vv[i][b][1] = x.y;
      }}
    }}
  }}
  float s[2][4];
#pragma unroll
  for (int n = 0; n < 2; n++) {{
    s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
    for (int j = 0; j < NK; j++) {{
      of_mma(s[n], q0[j].x, q1[j].x, q0[j].y, q1[j].y, kk[n][j].x, kk[n][j].y);
      of_mma(s[n], q0[j].z, q1[j].z, q0[j].w, q1[j].w, kk[n][j].z, kk[n][j].w);
    }}
  }}
  float n0 = m0, n1 = m1;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {{
      const int key = t + 8 * n + 2 * c + i;
      s[n][i] = key <= last0 ? s[n][i] * to_log2 : -1e30f;
      s[n][2 + i] = key <= last1 ? s[n][2 + i] * to_log2 : -1e30f;
      n0 = fmaxf(n0, s[n][i]);
      n1 = fmaxf(n1, s[n][2 + i]);
    }}
  n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 1));
  n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 2));
  n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 1));
  n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 2));
  if (__any_sync(~0u, n0 > m0 || n1 > m1)) {{
    const float c0 = exp2f(m0 - n0), c1 = exp2f(m1 - n1);
    m0 = n0; m1 = n1; l0 *= c0; l1 *= c1;
#pragma unroll
    for (int i = 0; i < NB * EACH; i++) {{ acc[i][0] *= c0; acc[i][1] *= c0; acc[i][2] *= c1; acc[i][3] *= c1; }}
  }}
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {{
      const int key = t + 8 * n + 2 * c + i;
      s[n][i] = key <= last0 ? exp2f(s[n][i] - m0) : 0.f;
      s[n][2 + i] = key <= last1 ? exp2f(s[n][2 + i] - m1) : 0.f;
      l0 += s[n][i];
      l1 += s[n][2 + i];
    }}
  const u32 p0 = of_pack(s[0][0], s[0][1]), p1 = of_pack(s[0][2], s[0][3]);
  const u32 p2 = of_pack(s[1][0], s[1][1]), p3 = of_pack(s[1][2], s[1][3]);
#pragma unroll
  for (int b = 0; b < NB; b++)
#pragma unroll
    for (int e = 0; e < EACH; e++) {{
      const u32 pick = e & 1 ? 0x7632u : 0x5410u;
      const u32 b0 = __byte_perm(vv[0][b][e / 2], vv[1][b][e / 2], pick);
      const u32 b1 = __byte_perm(vv[2][b][e / 2], vv[3][b][e / 2], pick);
      of_mma(acc[b * EACH + e], p0, p1, p2, p3, b0, b1);
    }}
}}
l0 += __shfl_xor_sync(~0u, l0, 1);
l0 += __shfl_xor_sync(~0u, l0, 2);
l1 += __shfl_xor_sync(~0u, l1, 1);
l1 += __shfl_xor_sync(~0u, l1, 2);

// warps that read other keys of the same queries hand theirs to the first
__shared__ float kept[2 * SPLIT][NB * EACH * 4 + 4][32];
float (*mine)[32] = kept[(mt & 1) * SPLIT + half];
for (int k = 1; k < parts_k; k++) {{
  if (part == k) {{
    mine[0][lane] = m0; mine[1][lane] = m1; mine[2][lane] = l0; mine[3][lane] = l1;
#pragma unroll
    for (int i = 0; i < NB * EACH * 4; i++) mine[4 + i][lane] = acc[i / 4][i % 4];
  }}
  __syncthreads();
  if (part == 0) {{
    const float o0 = mine[0][lane], o1 = mine[1][lane], n0 = fmaxf(m0, o0), n1 = fmaxf(m1, o1);
    const float a0 = exp2f(m0 - n0), a1 = exp2f(m1 - n1), b0 = exp2f(o0 - n0), b1 = exp2f(o1 - n1);
    m0 = n0; m1 = n1; l0 = l0 * a0 + mine[2][lane] * b0; l1 = l1 * a1 + mine[3][lane] * b1;
#pragma unroll
    for (int i = 0; i < NB * EACH * 4; i++) {{
      const bool low = i % 4 < 2;
      acc[i / 4][i % 4] = acc[i / 4][i % 4] * (low ? a0 : a1) + mine[4 + i][lane] * (low ? b0 : b1);
    }}
  }}
  __syncthreads();
}}
if (part == 0) {{
#pragma unroll
  for (int side = 0; side < 2; side++) {{
    const long at = side ? at1 : at0;
    if (at < 0) continue;
    if (c == 0 && half == 0) {{
      sums[2 * at] = side ? m1 : m0;
      sums[2 * at + 1] = side ? l1 : l0;
    }}
#pragma unroll
    for (int b = 0; b < NB; b++)
#pragma unroll
      for (int i = 0; i < 2; i++) {{
        float* to = mixed + at * DV + half * WIDTH + b * 8 * EACH + (2 * c + i) * EACH;
#pragma unroll
        for (int e = 0; e < EACH; e += 4)
          *(float4*)(to + e) = make_float4(acc[b * EACH + e][2 * side + i], acc[b * EACH + e + 1][2 * side + i],
                                           acc[b * EACH + e + 2][2 * side + i], acc[b * EACH + e + 3][2 * side + i]);
      }}
  }}
}}
"""

REDUCE = """
constexpr int DV = {dv};
const int L = numbers[2], HL = gridDim.y, row = blockIdx.x, hl = blockIdx.y;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
const int first = lists[numbers[4] + row], last = lists[numbers[4] + row + 1];
const int* parts = lists + numbers[5];
__shared__ float tops[4], totals[4], outs[4][DV];
float top = -1e30f;
for (int i = first + threadIdx.x; i < last; i += 128) top = fmaxf(top, sums[2 * ((long)parts[i] * HL + hl)]);
for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
if (!lane) tops[warp] = top;
__syncthreads();
top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
const float sink = numbers[3] ? (float)sinks[hl / L] * 1.4426950408889634f : -1e30f;
top = fmaxf(top, sink);
float out[DV / 32], total = 0.f;
#pragma unroll
for (int d = 0; d < DV / 32; d++) out[d] = 0.f;
#pragma unroll 4
for (int i = first + warp; i < last; i += 4) {{
  const long at = (long)parts[i] * HL + hl;
  const float weight = exp2f(sums[2 * at] - top);
  total += weight * sums[2 * at + 1];
#pragma unroll
  for (int d = 0; d < DV / 32; d++) out[d] += weight * mixed[at * DV + d * 32 + lane];
}}
if (!lane) totals[warp] = total;
#pragma unroll
for (int d = 0; d < DV / 32; d++) outs[warp][d * 32 + lane] = out[d];
__syncthreads();
total = totals[0] + totals[1] + totals[2] + totals[3] + (numbers[3] ? exp2f(sink - top) : 0.f);
for (int d = threadIdx.x; d < DV; d += 128) {{
  const float x = (outs[0][d] + outs[1][d] + outs[2][d] + outs[3][d]) / total;
  ((unsigned short*)attended)[((long)row * HL + hl) * DV + d] = (unsigned short)(of_pack(x, 0.f) & 0xffffu);
}}
"""

_PLAIN = """
__device__ __forceinline__ uint4 of_load8(const void* x, long key, int dims, int dim) {{
  return __ldg((const uint4*)((const char*)x + 2 * (key * dims + dim)));
}}
__device__ __forceinline__ uint2 of_load4(const void* x, long key, int dims, int dim) {{
  return __ldg((const uint2*)((const char*)x + 2 * (key * dims + dim)));
}}
"""

_AFFINE = """
__device__ __forceinline__ float of_wide(const void* x, long at) {{
  const unsigned short h = __ldg((const unsigned short*)x + at);
  float r;
  asm("cvt.f32.{t} %0, %1;" : "=f"(r) : "h"(h));
  return r;
}}
__device__ __forceinline__ uint2 of_load4(const void* w, const void* s, const void* b, long key, int dims, int dim) {{
  const long group = key * (dims / {group}) + dim / {group};
  const float scale = of_wide(s, group), bias = of_wide(b, group);
  const long bit = (long)dim * {bits};
  const u32 words = __ldg((const u32*)w + key * (dims * {bits} / 32) + bit / 32) >> (bit % 32);
  constexpr u32 mask = (1u << {bits}) - 1u;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = scale * (float)((words >> (i * {bits})) & mask) + bias;
  return make_uint2(of_pack(x[0], x[1]), of_pack(x[2], x[3]));
}}
__device__ __forceinline__ uint4 of_load8(const void* w, const void* s, const void* b, long key, int dims, int dim) {{
  const uint2 low = of_load4(w, s, b, key, dims, dim), high = of_load4(w, s, b, key, dims, dim + 4);
  return make_uint4(low.x, low.y, high.x, high.y);
}}
"""

LOADS = {"plain": _PLAIN, "affine": _AFFINE}
"""By the name of a format: `of_load8` and `of_load4` return 8 and 4 neighbouring dimensions of one key or value, in 16
bits each. A format of more than one array has one argument for each."""
