"""The decode kernel for Metal, as source text. It reads the same work table as the one for CUDA (`cuda_source`).

- A threadgroup of four simdgroups attends up to `tile` queries of one head over one chunk. The simdgroups take every
  fourth key; the 32 lanes of each share the dimensions of a key, so a key is loaded once for all queries of the tile.
- Metal gives a kernel 31 buffers, so a launch takes few slabs: see `metal`.
- MLX passes inputs of less than eight elements in the constant address space and others in the device's, so lists are
  indexed and never pointed into.
"""

from __future__ import annotations

from onefold.cache.model.levels import levels_source

THREADS = 128

HEADER = """
#include <metal_stdlib>
using namespace metal;
{load}
"""

PARTIAL = """
constexpr int DK = {dk}, DV = {dv}, EK = DK / 32, EV = DV / 32, TILE = {tile};
const int tiles = numbers[0], G = numbers[1], L = numbers[2], GL = G * L;
const int item = int(threadgroup_position_in_grid.x) / tiles, tile = int(threadgroup_position_in_grid.x) % tiles;
const int head = int(threadgroup_position_in_grid.y), HK = int(threadgroups_per_grid.y);
const int lane = int(thread_index_in_simdgroup), part = int(simdgroup_index_in_threadgroup);
const int slab = work[8 * item], lo = work[8 * item + 1], hi = work[8 * item + 2], capacity = work[8 * item + 3];
const int member = work[8 * item + 4], members = work[8 * item + 5], behind = work[8 * item + 6];
const int first = work[8 * item + 7];
const int n = min(members * GL - tile * TILE, TILE);
if (n <= 0) return;
{pointers}
switch (slab) {{
{cases}
}}
const float to_log2 = scale[0] * 1.4426950408889634f;
threadgroup float tops[4][TILE], totals[4][TILE], mixes[4][TILE][DV];

float q_own[TILE][EK], mix[TILE][EV], top[TILE], total[TILE];
int last[TILE];
for (int j = 0; j < TILE; j++) {{
  const int m = tile * TILE + min(j, n - 1);
  const int rest = m % GL, gq = rest / L, l = rest % L;
  const int64_t row = lists[member + m / GL];
  const int64_t at = row * q_strides[0] + int64_t(head * G + gq) * q_strides[1] + int64_t(l) * q_strides[2];
  for (int e = 0; e < EK; e++) q_own[j][e] = float(q[at + lane * EK + e]) * to_log2;
  {turn}
  for (int e = 0; e < EV; e++) mix[j][e] = 0.0f;
  top[j] = -1e30f;
  total[j] = 0.0f;
  last[j] = min(hi - 1, hi - 1 + behind - (L - 1 - l));
}}
for (int t = lo + part; t < hi; t += 4) {{
  const int64_t key = int64_t(head) * capacity + t;
  float k[EK], v[EV];
  for (int e = 0; e < EK; e++) k[e] = of_load({k_args}, key, DK, lane * EK + e);
  for (int e = 0; e < EV; e++) v[e] = of_load({v_args}, key, DV, lane * EV + e);
  for (int j = 0; j < n; j++) {{
    float score = 0.0f;
    for (int e = 0; e < EK; e++) score += q_own[j][e] * k[e];
    score = simd_sum(score);
    if (t > last[j]) continue;
    const float most = max(top[j], score);
    const float keep = exp2(top[j] - most), weight = exp2(score - most);
    top[j] = most;
    total[j] = total[j] * keep + weight;
    for (int e = 0; e < EV; e++) mix[j][e] = mix[j][e] * keep + weight * v[e];
  }}
}}
for (int j = 0; j < n; j++) {{
  if (lane == 0) {{
    tops[part][j] = top[j];
    totals[part][j] = total[j];
  }}
  for (int e = 0; e < EV; e++) mixes[part][j][lane * EV + e] = mix[j][e];
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int j = part; j < n; j += 4) {{
  const int m = tile * TILE + j, rest = m % GL;
  const int64_t at = (int64_t(first + m / GL) * HK * G + head * G + rest / L) * L + rest % L;
  const float most = max(max(tops[0][j], tops[1][j]), max(tops[2][j], tops[3][j]));
  float weights[4], sum = 0.0f;
  for (int p = 0; p < 4; p++) {{
    weights[p] = exp2(tops[p][j] - most);
    sum += weights[p] * totals[p][j];
  }}
  for (int d = lane; d < DV; d += 32) {{
    float out = 0.0f;
    for (int p = 0; p < 4; p++) out += weights[p] * mixes[p][j][d];
    mixed[at * DV + d] = out;
  }}
  if (lane == 0) {{
    sums[2 * at] = most;
    sums[2 * at + 1] = sum;
  }}
}}
"""

REDUCE = """
constexpr int DV = {dv};
const int L = numbers[2], row = int(threadgroup_position_in_grid.x), hl = int(threadgroup_position_in_grid.y);
const int HL = int(threadgroups_per_grid.y);
const int lane = int(thread_index_in_simdgroup), part = int(simdgroup_index_in_threadgroup);
const int first = lists[numbers[4] + row], last = lists[numbers[4] + row + 1], parts = numbers[5];
threadgroup float totals[4], outs[4][DV];
float top = -1e30f;
for (int i = first + lane; i < last; i += 32) top = max(top, sums[2 * (int64_t(lists[parts + i]) * HL + hl)]);
top = simd_max(top);
const float sink = numbers[3] != 0 ? float(sinks[hl / L]) * 1.4426950408889634f : -1e30f;
top = max(top, sink);
float out[DV / 32], total = 0.0f;
for (int e = 0; e < DV / 32; e++) out[e] = 0.0f;
for (int i = first + part; i < last; i += 4) {{
  const int64_t at = int64_t(lists[parts + i]) * HL + hl;
  const float weight = exp2(sums[2 * at] - top);
  total += weight * sums[2 * at + 1];
  for (int e = 0; e < DV / 32; e++) out[e] += weight * mixed[at * DV + e * 32 + lane];
}}
if (lane == 0) totals[part] = total;
for (int e = 0; e < DV / 32; e++) outs[part][e * 32 + lane] = out[e];
threadgroup_barrier(mem_flags::mem_threadgroup);
total = totals[0] + totals[1] + totals[2] + totals[3];
if (numbers[3] != 0) total += exp2(sink - top);
"""

WRITE = """
for (int d = int(thread_position_in_threadgroup.x); d < DV; d += 128) {{
  const float x = (outs[0][d] + outs[1][d] + outs[2][d] + outs[3][d]) / total;
  attended[(int64_t(row) * HL + hl) * DV + d] = {t}(x);
}}
"""

WRITE_TURNED = """
const int first_d = int(thread_position_in_threadgroup.x);
for (int d = first_d; d < DV; d += 128) outs[0][d] = (outs[0][d] + outs[1][d] + outs[2][d] + outs[3][d]) / total;
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int h = 1; h < DV; h *= 2) {{
  for (int i = first_d; i < DV / 2; i += 128) {{
    const int at = i / h * 2 * h + i % h;
    const float a = outs[0][at], b = outs[0][at + h];
    outs[0][at] = a + b;
    outs[0][at + h] = a - b;
  }}
  threadgroup_barrier(mem_flags::mem_threadgroup);
}}
for (int d = first_d; d < DV; d += 128)
  attended[(int64_t(row) * HL + hl) * DV + d] = {t}(outs[0][d] * signs[d] * rsqrt(float(DV)));
"""

TURN_QUERY = """
for (int e = 0; e < EK; e++) q_own[j][e] *= signs[lane * EK + e] * rsqrt(float(DK));
for (int h = 1; h < EK; h *= 2)
  for (int e = 0; e < EK; e++) if (!(e & h)) {{
    const float a = q_own[j][e], b = q_own[j][e + h];
    q_own[j][e] = a + b;
    q_own[j][e + h] = a - b;
  }}
for (int o = 1; o < 32; o *= 2)
  for (int e = 0; e < EK; e++) {{
    const float other = simd_shuffle_xor(q_own[j][e], ushort(o));
    q_own[j][e] = lane & o ? other - q_own[j][e] : q_own[j][e] + other;
  }}
"""

_PLAIN = """
inline float of_load(const device {t}* x, int64_t key, int dims, int dim) {{
  return float(x[key * dims + dim]);
}}
"""

_AFFINE = """
inline float of_load(const device uint* w, const device {t}* s, const device {t}* b, int64_t key, int dims, int dim) {{
  const int64_t group = key * (dims / {group}) + dim / {group};
  const uint word = w[key * (dims * {bits} / 32) + dim * {bits} / 32];
  const uint code = (word >> (dim * {bits} % 32)) & ((1u << {bits}) - 1u);
  return float(s[group]) * float(code) + float(b[group]);
}}
"""

_CODES = """
template <int B, int FIRST, int HALF> struct of_side {{}};
template <int B> inline uint of_code(const device uint* x, int64_t row, int dim) {{
  const int bit = dim * B, at = bit / 32, off = bit % 32;
  uint code = x[row + at] >> off;
  if (off + B > 32) code |= x[row + at + 1] << (32 - off);
  return code & ((1u << B) - 1u);
}}
inline float of_scale(uint bits) {{ return {scale}; }}
"""

_ROTATED = (
    _CODES
    + """
template <int B, int FIRST, int HALF>
inline float of_load(const device uint* x, of_side<B, FIRST, HALF>, int64_t key, int dims, int dim) {{
  float scale = of_scale((x[key * {row} + ({row} - 1)] >> (16 * HALF)) & 0xffffu);
  if (HALF && {groups} > 1)
    scale *= float(((x[key * {row} + ({row} - 2)] >> (8 * (dim / (dims / {groups})))) & 255u) + 1u) * (1.0f / 256.0f);
  return scale * (float(of_code<B>(x, key * {row} + FIRST, dim)) + (0.5f - float(1 << (B - 1))));
}}
"""
)

_TURBO = (
    _CODES
    + levels_source("constant constexpr float")
    + """
template <int B, int FIRST, int HALF>
inline float of_load(const device uint* x, of_side<B, FIRST, HALF>, int64_t key, int dims, int dim) {{
  const float scale = of_scale((x[key * {row} + ({row} - 1)] >> (16 * HALF)) & 0xffffu);
  return scale * of_levels[(1 << B) - 2 + int(of_code<B>(x, key * {row} + FIRST, dim))];
}}
"""
)

LOADS = {"plain": _PLAIN, "affine": _AFFINE, "rotated": _ROTATED, "turbo": _TURBO}
"""By the name of a format: `of_load` returns one dimension of one key or value."""
TYPES = {"plain": ("{t}",) * 2, "affine": ("uint", "{t}", "{t}") * 2, "rotated": ("uint",), "turbo": ("uint",)}
"""The types of a format's arrays."""
SCALE = "float(as_type<half>(ushort(bits)))"
SCALES = {"bfloat16_t": "as_type<float>(bits << 16)"}
"""What a scale's 16 bits mean: numbers of the model's type if that has 16 bits, else halves."""
