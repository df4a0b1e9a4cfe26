"""The decode kernel for CUDA, as source text.

- `partial` attends the queries of some rows over one chunk of one slab; `reduce` weights the chunks of each row.
- Products run on tensor cores (`mma.sync.m16n8k16`), straight from global memory: each thread loads eight neighbouring
  dimensions of a key or value at once, and the order of dimensions and keys inside a product is chosen to match. So
  nothing is staged in shared memory, and a chunk that several rows read is read once for up to 64 queries.
- A block has four warps, or eight where values are wider than 160: they split the queries where there are more than 16,
  and the keys otherwise. A key that is opened (decoded) costs more than a product with it. So with such formats warps
  split the keys, and each attends up to 32 queries.

The work table has eight integers for each chunk: slab, lo, hi, capacity, first member, number of members, how many keys
the row has behind the chunk, first partial. A member is a row that reads the chunk; its partial has the chunk's
maximum, sum and weighted values for each of the row's queries.
"""

from __future__ import annotations

THREADS = 128
TILE, WIDE_TILE = 64, 32
"""Queries of one block; and of one whose warps attend all of them."""

PARTIAL = """
constexpr int DK = {dk}, DV = {dv}, SPLIT = {split}, WIDTH = DV / SPLIT, NK = DK / 32;
constexpr int EACH = {each}, NB = WIDTH / (8 * EACH);
constexpr bool WIDE = {wide}, OPENED = {opened};
constexpr int TILE = {tile};
const int tiles = numbers[0], G = numbers[1], L = numbers[2], GL = G * L;
const int item = blockIdx.x / tiles, tile = blockIdx.x % tiles, head = blockIdx.y, HK = gridDim.y;
const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, half = threadIdx.x >> 7, g = lane >> 2, c = lane & 3;
const int* w = work + 8 * item;
const int slab = w[0], lo = w[1], hi = w[2], capacity = w[3], member = w[4], behind = w[6], partial = w[7];
const int queries = w[5] * GL - tile * TILE;
if (queries <= 0) return;
const int tiles_m = WIDE || queries <= 16 ? 1 : queries <= 32 ? 2 : 4, parts_k = 4 / tiles_m;
const int mt = warp % tiles_m, part = warp / tiles_m;
{pointers}
switch (slab) {{
{cases}
}}
const float to_log2 = scale[0] * 1.4426950408889634f;

// A thread has two queries of a tile of 16: rows g and g + 8.
auto number = [&](int m, int side) {{ return tile * TILE + (mt + m) * 16 + g + 8 * side; }};
auto load_query = [&](int m, int side, uint4* to) {{
  float factor = 1.f;
  const int n = number(m, side);
  const bool real = n < w[5] * GL;
  const int rest = n % GL;
  const long row = real ? lists[member + n / GL] : 0;
  const long offset = row * q_strides[0] + (long)(head * G + rest / L) * q_strides[1] + (long)(rest % L) * q_strides[2];
  const char* from = (const char*)q + 2 * offset;
#pragma unroll
  for (int j = 0; j < NK; j++) to[j] = real ? *(const uint4*)(from + 2 * (j * 32 + c * 8)) : make_uint4(0, 0, 0, 0);
  {prepare}
#pragma unroll
  for (int j = 0; j < NK; j++) to[j] = of_order(to[j]);
  return factor;
}};
uint4 own[WIDE ? 1 : 2][NK];
float own_factors[2];
__shared__ uint4 shared_queries[WIDE ? 4 : 1][WIDE ? NK : 1][32];
__shared__ float shared_factors[WIDE ? 4 : 1][8];
if constexpr (WIDE) {{  // each warp loads half of a tile, and all attend it
  if (queries > 16 || !(warp & 1)) {{
    shared_factors[warp][g] = load_query(warp & 1, warp >> 1, own[0]);
#pragma unroll
    for (int j = 0; j < NK; j++) shared_queries[warp][j][lane] = own[0][j];
  }}
  __syncthreads();
}} else {{
  own_factors[0] = load_query(0, 0, own[0]);
  own_factors[1] = load_query(0, 1, own[1]);
}}
auto query = [&](int m, int side, int j) {{
  if constexpr (WIDE) return shared_queries[m + 2 * side][j][lane];
  else return own[side][j];
}};

decltype(of_fetch8({k_args}, 0, DK, 0)) kk[2][NK];
decltype(of_fetch{each}({v_args}, 0, DV, 0)) vv[4][NB];
unsigned short k_scales[2][2], v_scales[2][2];
const long first_key = (long)head * capacity;
{seek}
auto fetch_keys = [&](int t) {{
#pragma unroll
  for (int n = 0; n < 2; n++) {{
    const int key = min(t + 8 * n + g, hi - 1);
#pragma unroll
    for (int j = 0; j < NK; j++) kk[n][j] = of_fetch8({k_args}, key, DK, j * 32 + c * 8);
#pragma unroll
    for (int i = 0; i < 2; i++) k_scales[n][i] = of_fetch_scale({k_args}, min(t + 8 * n + 2 * c + i, hi - 1));
  }}
}};
auto fetch_values = [&](int t) {{
#pragma unroll
  for (int i = 0; i < 4; i++) {{
    const int key = min(t + 2 * c + (i & 1) + 8 * (i >> 1), hi - 1);
#pragma unroll
    for (int b = 0; b < NB; b++) vv[i][b] = of_fetch{each}({v_args}, key, DV, half * WIDTH + b * 8 * EACH + g * EACH);
    v_scales[i >> 1][i & 1] = of_fetch_scale({v_args}, key);
  }}
}};
__shared__ float kept[(WIDE ? 1 : 2) * SPLIT][NB * EACH * 4 + 4][32];
float (*mine)[32] = kept[(WIDE ? 0 : mt & 1) * SPLIT + half];

"""
"""The beginning of the kernel."""

ATTEND = """
{{
constexpr int MT = {tiles};  // tiles of queries of a warp, which opens each key and value once for them
int last[MT][2], stop = 0;
#pragma unroll
for (int m = 0; m < MT; m++)
#pragma unroll
  for (int side = 0; side < 2; side++) {{
    const int n = number(m, side);
    last[m][side] = n < w[5] * GL ? min(hi - 1, hi - 1 + behind - (L - 1 - n % GL % L)) : -1;
    stop = max(stop, last[m][side] + 1);
  }}
for (int o = 16; o; o >>= 1) stop = max(stop, __shfl_xor_sync(~0u, stop, o));  // no query sees a later key

float acc[MT][NB * EACH][4], top[MT][2], sum[MT][2], factors[MT][2];
#pragma unroll
for (int m = 0; m < MT; m++) {{
  for (int side = 0; side < 2; side++) factors[m][side] = WIDE ? shared_factors[m + 2 * side][g] : own_factors[side];
#pragma unroll
  for (int i = 0; i < NB * EACH; i++) acc[m][i][0] = acc[m][i][1] = acc[m][i][2] = acc[m][i][3] = 0.f;
  top[m][0] = top[m][1] = -1e30f;
  sum[m][0] = sum[m][1] = 0.f;
}}
fetch_keys(lo + 16 * part);
fetch_values(lo + 16 * part);
for (int t = lo + 16 * part; t < stop; t += 16 * parts_k) {{
  float s[MT][2][4];
#pragma unroll
  for (int n = 0; n < 2; n++) {{
#pragma unroll
    for (int m = 0; m < MT; m++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
#pragma unroll
    for (int j = 0; j < NK; j++) {{
      const uint4 k = of_open8({k_args}, kk[n][j], j * 32 + c * 8);
#pragma unroll
      for (int m = 0; m < MT; m++) {{
        const uint4 q0 = query(m, 0, j), q1 = query(m, 1, j);
        of_mma(s[m][n], q0.x, q1.x, q0.y, q1.y, k.x, k.y);
        of_mma(s[m][n], q0.z, q1.z, q0.w, q1.w, k.z, k.w);
      }}
    }}
#pragma unroll
    for (int i = 0; i < 2; i++) {{
      const float factor = of_factor({k_args}, k_scales[n][i]) * to_log2;
#pragma unroll
      for (int m = 0; m < MT; m++) {{
        s[m][n][i] *= OPENED ? factor * factors[m][0] : factor;
        s[m][n][2 + i] *= OPENED ? factor * factors[m][1] : factor;
      }}
    }}
  }}
  fetch_keys(t + 16 * parts_k);  // what a warp reads next is loaded while it computes
  // Codes of values are multiplied by weights times scales. A scale is therefore added to the scores, as its logarithm:
  // so f16 holds the largest product. The weight alone is the product divided by the scale.
  float logs[2][2], inverse[2][2];
  if constexpr (OPENED) {{
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {{
        const float factor = fmaxf(of_factor({v_args}, v_scales[n][i]), 1e-30f);
        logs[n][i] = __log2f(factor);
        inverse[n][i] = __fdividef(1.f, factor);
      }}
  }}
  u32 p[MT][4];
#pragma unroll
  for (int m = 0; m < MT; m++) {{
    float n0 = top[m][0], n1 = top[m][1];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {{
        const int key = t + 8 * n + 2 * c + i;
        const float log = OPENED ? logs[n][i] : 0.f;
        s[m][n][i] = key <= last[m][0] ? s[m][n][i] + log : -1e30f;
        s[m][n][2 + i] = key <= last[m][1] ? s[m][n][2 + i] + log : -1e30f;
        n0 = fmaxf(n0, s[m][n][i]);
        n1 = fmaxf(n1, s[m][n][2 + i]);
      }}
    n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 1));
    n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 2));
    n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 1));
    n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 2));
    if (__any_sync(~0u, n0 > top[m][0] || n1 > top[m][1])) {{
      const float c0 = exp2f(top[m][0] - n0), c1 = exp2f(top[m][1] - n1);
      top[m][0] = n0; top[m][1] = n1; sum[m][0] *= c0; sum[m][1] *= c1;
#pragma unroll
      for (int i = 0; i < NB * EACH; i++) {{
        acc[m][i][0] *= c0; acc[m][i][1] *= c0; acc[m][i][2] *= c1; acc[m][i][3] *= c1;
      }}
    }}
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {{
        const int key = t + 8 * n + 2 * c + i;
        s[m][n][i] = key <= last[m][0] ? exp2f(s[m][n][i] - top[m][0]) : 0.f;
        s[m][n][2 + i] = key <= last[m][1] ? exp2f(s[m][n][2 + i] - top[m][1]) : 0.f;
        sum[m][0] += OPENED ? s[m][n][i] * inverse[n][i] : s[m][n][i];
        sum[m][1] += OPENED ? s[m][n][2 + i] * inverse[n][i] : s[m][n][2 + i];
      }}
    p[m][0] = of_pack(s[m][0][0], s[m][0][1]); p[m][1] = of_pack(s[m][0][2], s[m][0][3]);
    p[m][2] = of_pack(s[m][1][0], s[m][1][1]); p[m][3] = of_pack(s[m][1][2], s[m][1][3]);
  }}
#pragma unroll
  for (int b = 0; b < NB; b++) {{
    u32 v[4][EACH / 2];
#pragma unroll
    for (int i = 0; i < 4; i++) of_put(v[i], of_open{each}({v_args}, vv[i][b], half * WIDTH + b * 8 * EACH + g * EACH));
#pragma unroll
    for (int e = 0; e < EACH; e++) {{
      const u32 pick = e & 1 ? 0x7632u : 0x5410u;
      const u32 b0 = __byte_perm(v[0][e / 2], v[1][e / 2], pick);
      const u32 b1 = __byte_perm(v[2][e / 2], v[3][e / 2], pick);
#pragma unroll
      for (int m = 0; m < MT; m++) of_mma(acc[m][b * EACH + e], p[m][0], p[m][1], p[m][2], p[m][3], b0, b1);
    }}
  }}
  fetch_values(t + 16 * parts_k);
}}
#pragma unroll
for (int m = 0; m < MT; m++) {{
#pragma unroll
  for (int side = 0; side < 2; side++) {{
    sum[m][side] += __shfl_xor_sync(~0u, sum[m][side], 1);
    sum[m][side] += __shfl_xor_sync(~0u, sum[m][side], 2);
  }}
  // warps that read other keys of the same queries hand theirs to the first
  for (int k = 1; k < parts_k; k++) {{
    if (part == k) {{
      mine[0][lane] = top[m][0]; mine[1][lane] = top[m][1]; mine[2][lane] = sum[m][0]; mine[3][lane] = sum[m][1];
#pragma unroll
      for (int i = 0; i < NB * EACH * 4; i++) mine[4 + i][lane] = acc[m][i / 4][i % 4];
    }}
    __syncthreads();
    if (part == 0) {{
      const float o0 = mine[0][lane], o1 = mine[1][lane], n0 = fmaxf(top[m][0], o0), n1 = fmaxf(top[m][1], o1);
      const float a0 = exp2f(top[m][0] - n0), a1 = exp2f(top[m][1] - n1), b0 = exp2f(o0 - n0), b1 = exp2f(o1 - n1);
      top[m][0] = n0; sum[m][0] = sum[m][0] * a0 + mine[2][lane] * b0;
      top[m][1] = n1; sum[m][1] = sum[m][1] * a1 + mine[3][lane] * b1;
#pragma unroll
      for (int i = 0; i < NB * EACH * 4; i++) {{
        const bool low = i % 4 < 2;
        acc[m][i / 4][i % 4] = acc[m][i / 4][i % 4] * (low ? a0 : a1) + mine[4 + i][lane] * (low ? b0 : b1);
      }}
    }}
    __syncthreads();
  }}
  if (part != 0) continue;
#pragma unroll
  for (int side = 0; side < 2; side++) {{
    const int n = number(m, side), rest = n % GL;
    if (n >= w[5] * GL) continue;
    const long at = ((long)(partial + n / GL) * HK * G + head * G + rest / L) * L + rest % L;
    if (c == 0 && half == 0) {{
      sums[2 * at] = top[m][side];
      sums[2 * at + 1] = sum[m][side];
    }}
#pragma unroll
    for (int b = 0; b < NB; b++)
#pragma unroll
      for (int i = 0; i < 2; i++) {{
        float* to = mixed + at * DV + half * WIDTH + b * 8 * EACH + (2 * c + i) * EACH;
#pragma unroll
        for (int e = 0; e < EACH; e += 4) {{
          float x[4];
#pragma unroll
          for (int d = 0; d < 4; d++) x[d] = acc[m][b * EACH + of_place(e + d, EACH)][2 * side + i];
          *(float4*)(to + e) = make_float4(x[0], x[1], x[2], x[3]);
        }}
      }}
  }}
}}
}}
"""
"""The rest of it, for so many tiles."""

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
"""

WRITE = """
for (int d = threadIdx.x; d < DV; d += 128) {{
  const float x = (outs[0][d] + outs[1][d] + outs[2][d] + outs[3][d]) / total;
  ((unsigned short*)attended)[((long)row * HL + hl) * DV + d] = (unsigned short)(of_pack(x, 0.f) & 0xffffu);
}}
"""
"""The end of a reduction."""

WRITE_TURNED = """
for (int d = threadIdx.x; d < DV; d += 128)
  outs[0][d] = (outs[0][d] + outs[1][d] + outs[2][d] + outs[3][d]) / (total * sqrtf(DV));
__syncthreads();
for (int h = 1; h < DV; h *= 2) {{
  for (int i = threadIdx.x; i < DV / 2; i += 128) {{
    const int at = i / h * 2 * h + i % h;
    const float a = outs[0][at], b = outs[0][at + h];
    outs[0][at] = a + b;
    outs[0][at + h] = a - b;
  }}
  __syncthreads();
}}
for (int d = threadIdx.x; d < DV; d += 128)
  ((unsigned short*)attended)[((long)row * HL + hl) * DV + d] =
      (unsigned short)(of_pack(outs[0][d] * signs[d], 0.f) & 0xffffu);
"""
"""The end of a reduction that rotates outputs back."""
