"""The decode kernel for CUDA, as source text.

- `partial` attends the queries of some rows over one chunk of one slab; `reduce` (`cuda_reduce`) weights the chunks of
  each row.
- Products run on tensor cores (`mma.sync.m16n8k16`). Each thread reads eight neighbouring dimensions of a key or value
  at once, and the order of dimensions and keys inside a product is chosen to match. A chunk that several rows read is
  read once for 32 or 64 queries.
- A block has four warps, which split the keys; each attends up to 32 queries. It copies the tiles of its next rounds
  into shared memory meanwhile (`STAGED`).
- Affine formats and values wider than 160 need more registers: their warps, eight where values are wider than 160,
  split the queries where there are more than 16. These, and heads whose tiles do not fit in shared memory, are read
  from global memory, one round ahead (`AHEAD`).

The work table has eight integers for each chunk: slab, lo, hi, capacity, first member, number of members, how many keys
the row has behind the chunk, first partial. A member is a row that reads the chunk; its partial has the chunk's
maximum, sum and weighted values for each of the row's queries.
"""

from __future__ import annotations

THREADS = 128
TILE, WIDE_TILE = 64, 32
"""Queries of one block; and the most of one whose warps attend all of them."""


def shared_bytes(key_dim: int, value_dim: int, tile: int) -> int:
    """Returns the bytes of shared memory that the source declares where warps attend all queries of a tile."""
    queries, kept = tile // 16 * key_dim // 32 * 2 * 32 * 16, (value_dim // 2 + 4) * 32 * 4
    return queries + kept + 2 * 4 * 8 * 4


PARTIAL = """
constexpr int DK = {dk}, DV = {dv}, SPLIT = {split}, WIDTH = DV / SPLIT, NK = DK / 32;
constexpr int EACH = {each}, NB = WIDTH / (8 * EACH);
constexpr bool WIDE = {wide}, OPENED = {opened};
constexpr int TILE = {tile};
const int tiles = numbers[0], G = numbers[1], L = numbers[2], GL = G * L;
// Blocks begin in the order of their numbers: those of long chunks, which come first, before others in all heads.
const int HK = gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x, head = block % HK;
const int item = block / HK / tiles, tile = block / HK % tiles;
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
auto load_query = [&](int m, int side, uint4* to, float* total) {{
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
  for (int j = 0; j < NK; j++) to[j] = of_order({k_args}, to[j]);
  return factor;
}};
uint4 own[WIDE ? 1 : 2][NK];
float own_factors[2], own_totals[2] = {{0.f, 0.f}};
__shared__ uint4 shared_queries[WIDE ? TILE / 16 : 1][WIDE ? NK : 1][2][32];  // as an instruction takes them
__shared__ float shared_factors[WIDE ? 4 : 1][8], shared_totals[WIDE ? 4 : 1][8];
if constexpr (WIDE) {{  // each warp loads half of a tile, and all attend it
  const int m = warp & 1, side = warp >> 1;
  if (!m || queries > 16) {{
    shared_factors[warp][g] = load_query(m, side, own[0], own_totals);
    shared_totals[warp][g] = own_totals[0];
#pragma unroll
    for (int j = 0; j < NK; j++) {{
      u32 parts[4];
      of_put(parts, own[0][j]);
#pragma unroll
      for (int i = 0; i < 4; i++) ((u32*)&shared_queries[m][j][i >> 1][lane])[side + 2 * (i & 1)] = parts[i];
    }}
  }}
  __syncthreads();
}} else {{
  own_factors[0] = load_query(0, 0, own[0], own_totals);
  own_factors[1] = load_query(0, 1, own[1], own_totals + 1);
}}
auto query = [&](int m, int j, int h) {{
  if constexpr (WIDE) return shared_queries[m][j][h][lane];
  else return h ? make_uint4(own[0][j].z, own[1][j].z, own[0][j].w, own[1][j].w)
                : make_uint4(own[0][j].x, own[1][j].x, own[0][j].y, own[1][j].y);
}};

const long first_key = (long)head * capacity;
{seek}
{reading}
__shared__ float kept[(WIDE ? 1 : 2) * SPLIT][NB * EACH * 4 + 4][32];
float (*mine)[32] = kept[(WIDE ? 0 : mt & 1) * SPLIT + half];

"""
"""The beginning of the kernel."""

AHEAD = """
decltype(of_fetch8({k_args}, 0, DK, 0, 0)) kk[2][NK];
decltype(of_fetch{each}({v_args}, 0, DV, 0, 0)) vv[4][NB];
unsigned short k_scales[2][2], v_scales[2][2];
auto fetch_keys = [&](int t) {{
#pragma unroll
  for (int n = 0; n < 2; n++) {{
    const int key = min(t + 8 * n + g, hi - 1);
#pragma unroll
    for (int j = 0; j < NK; j++) kk[n][j] = of_fetch8({k_args}, key, DK, j * 32, c * 8);
#pragma unroll
    for (int i = 0; i < 2; i++) k_scales[n][i] = of_fetch_scale({k_args}, min(t + 8 * n + 2 * c + i, hi - 1));
  }}
}};
auto fetch_values = [&](int t) {{
#pragma unroll
  for (int i = 0; i < 4; i++) {{
    const int key = min(t + 2 * c + (i & 1) + 8 * (i >> 1), hi - 1);
#pragma unroll
    for (int b = 0; b < NB; b++) vv[i][b] = of_fetch{each}({v_args}, key, DV, b * 8 * EACH, half * WIDTH + g * EACH);
    v_scales[i >> 1][i & 1] = of_fetch_scale({v_args}, key);
  }}
}};
auto begin = [&](int t, int step) {{
  fetch_keys(t);
  fetch_values(t);
}};
auto arrive = [&](int t, int step) {{}};
auto keys_done = [&](int t) {{ fetch_keys(t); }};  // what a warp reads next is loaded while it computes
auto values_done = [&](int t) {{ fetch_values(t); }};
auto key_part = [&](int n, int j) {{ return kk[n][j]; }};
auto value_part = [&](int i, int b) {{ return vv[i][b]; }};
auto key_scale = [&](int n, int i) {{ return k_scales[n][i]; }};
auto value_scale = [&](int n, int i) {{ return v_scales[n][i]; }};
"""
"""How a warp reads 16 keys and values, into registers: those of its next round while it computes."""

STAGED = """
OF_STAGED;
char* const tiles_of_warp = (char*)of_staged + warp * ({stages} * {tile_bytes});
int now = 0;
{origin}
auto copy = [&](int t, int at) {{
  char* const to = tiles_of_warp + at * {tile_bytes};
  {copy}
}};
auto begin = [&](int t, int step) {{
#pragma unroll
  for (int i = 0; i < {stages} - 1; i++) {{
    copy(t + i * step, i);
    of_commit();
  }}
}};
{tiles_declared}
auto arrive = [&](int t, int step) {{
  of_wait<{stages} - 2>();
  __syncwarp();  // all of the tile is there, and no thread reads the one before any more: that is overwritten
  copy(t + ({stages} - 1) * step, now ? now - 1 : {stages} - 1);
  of_commit();
  const char* const tile_now = tiles_of_warp + now * {tile_bytes};
  {tiles_set}
  now = now == {stages} - 1 ? 0 : now + 1;
}};
auto keys_done = [&](int t) {{}};
auto values_done = [&](int t) {{}};
auto key_part = [&](int n, int j) {{ return of_fetch8({k_tile}, 8 * n + g, DK, j * 32, c * 8); }};
auto value_part = [&](int i, int b) {{
  return of_fetch{each}({v_tile}, 2 * c + (i & 1) + 8 * (i >> 1), DV, b * 8 * EACH, g * EACH);
}};
auto key_scale = [&](int n, int i) {{ return of_fetch_scale({k_tile}, 8 * n + 2 * c + i); }};
auto value_scale = [&](int n, int i) {{ return of_fetch_scale({v_tile}, 8 * n + 2 * c + i); }};
"""
"""The same through shared memory, into which each warp copies the tiles of its next rounds: registers for one round
ahead do not keep enough loads on the way to hide how long each takes."""

SHARES_AHEAD = """
auto value_shares = [&](int t, int i) {{
  return of_fetch_shares({v_args}, min(t + 2 * c + (i & 1) + 8 * (i >> 1), hi - 1));
}};
"""
SHARES_STAGED = """
auto value_shares = [&](int t, int i) {{ return of_fetch_shares({v_tile}, 2 * c + (i & 1) + 8 * (i >> 1)); }};
"""
"""What reads the shares that groups of a value have of its scale, if it is divided into groups."""
READ_SHARES = """
u32 shares[4];
#pragma unroll
for (int i = 0; i < 4; i++) shares[i] = value_shares(t, i);
"""
USE_SHARES = """
#pragma unroll
for (int i = 0; i < 4; i++)
  of_share(v[i], EACH / 2, shares[i], (half * WIDTH + b * 8 * EACH + g * EACH) / (DV / {groups}));
"""

ATTEND = """
{{
constexpr int MT = {tiles};  // tiles of queries of a warp, which opens each key and value once for them
int last[MT][2], stop = 0, all_see = hi;
#pragma unroll
for (int m = 0; m < MT; m++)
#pragma unroll
  for (int side = 0; side < 2; side++) {{
    const int n = number(m, side);
    last[m][side] = n < w[5] * GL ? min(hi - 1, hi - 1 + behind - (L - 1 - n % GL % L)) : -1;
    stop = max(stop, last[m][side] + 1);
    if (n < w[5] * GL) all_see = min(all_see, last[m][side]);
  }}
for (int o = 16; o; o >>= 1) {{
  stop = max(stop, __shfl_xor_sync(~0u, stop, o));  // no query sees a later key
  all_see = min(all_see, __shfl_xor_sync(~0u, all_see, o));  // every query sees those up to here
}}

float acc[MT][NB * EACH][4], top[MT][2], sum[MT][2], factors[MT][2], shifts[MT][2], spread[MT][2];
#pragma unroll
for (int m = 0; m < MT; m++) {{
#pragma unroll
  for (int side = 0; side < 2; side++) {{
    factors[m][side] = WIDE ? shared_factors[m + 2 * side][g] : own_factors[side];
    shifts[m][side] = of_shift({k_args}) * (WIDE ? shared_totals[m + 2 * side][g] : own_totals[side]);
    top[m][side] = -1e30f;
    sum[m][side] = spread[m][side] = 0.f;
  }}
#pragma unroll
  for (int i = 0; i < NB * EACH; i++) acc[m][i][0] = acc[m][i][1] = acc[m][i][2] = acc[m][i][3] = 0.f;
}}
begin(lo + 16 * part, 16 * parts_k);
for (int t = lo + 16 * part; t < stop; t += 16 * parts_k) {{
  arrive(t, 16 * parts_k);
  {read_shares}
  float s[MT][2][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < 2; n++) {{
      s[m][n][0] = s[m][n][1] = shifts[m][0];
      s[m][n][2] = s[m][n][3] = shifts[m][1];
    }}
#pragma unroll
  for (int j = 0; j < NK; j++) {{
    uint4 k[2];
#pragma unroll
    for (int n = 0; n < 2; n++) k[n] = of_open8({k_args}, key_part(n, j), c * 8);
#pragma unroll
    for (int m = 0; m < MT; m++) {{
      const uint4 near = query(m, j, 0), far = query(m, j, 1);
#pragma unroll
      for (int n = 0; n < 2; n++) {{
        of_mma(s[m][n], near.x, near.y, near.z, near.w, k[n].x, k[n].y);
        of_mma(s[m][n], far.x, far.y, far.z, far.w, k[n].z, k[n].w);
      }}
    }}
  }}
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {{
      const float factor = of_factor({k_args}, key_scale(n, i)) * to_log2;
#pragma unroll
      for (int m = 0; m < MT; m++) {{
        s[m][n][i] *= OPENED ? factor * factors[m][0] : factor;
        s[m][n][2 + i] *= OPENED ? factor * factors[m][1] : factor;
      }}
    }}
  keys_done(t + 16 * parts_k);
  // Codes of values are multiplied by weights times scales. A scale is therefore added to the scores, as its logarithm:
  // so f16 holds the largest product. The weight alone is the product divided by the scale.
  float inverse[2][2];
  if constexpr (OPENED) {{
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {{
        // keys that are not attended may have any bits; where one argument is not a number fmaxf returns the other
        const float factor = fmaxf(of_factor({v_args}, value_scale(n, i)), 1e-30f), log = of_log2(factor);
        inverse[n][i] = of_inverse(factor);
#pragma unroll
        for (int m = 0; m < MT; m++) {{
          s[m][n][i] += log;
          s[m][n][2 + i] += log;
        }}
      }}
  }}
  if (t + 15 > all_see) {{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {{
          const int key = t + 8 * n + 2 * c + i;
          if (key > last[m][0]) s[m][n][i] = -2e30f;  // below every maximum: its weight is 0
          if (key > last[m][1]) s[m][n][2 + i] = -2e30f;
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
        n0 = fmaxf(n0, s[m][n][i]);
        n1 = fmaxf(n1, s[m][n][2 + i]);
      }}
    n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 1));
    n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 2));
    n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 1));
    n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 2));
    if (__any_sync(~0u, n0 > top[m][0] || n1 > top[m][1])) {{
      const float c0 = of_exp2(top[m][0] - n0), c1 = of_exp2(top[m][1] - n1);
      top[m][0] = n0; top[m][1] = n1; sum[m][0] *= c0; sum[m][1] *= c1; spread[m][0] *= c0; spread[m][1] *= c1;
#pragma unroll
      for (int i = 0; i < NB * EACH; i++) {{
        acc[m][i][0] *= c0; acc[m][i][1] *= c0; acc[m][i][2] *= c1; acc[m][i][3] *= c1;
      }}
    }}
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {{
        s[m][n][i] = of_exp2(s[m][n][i] - top[m][0]);
        s[m][n][2 + i] = of_exp2(s[m][n][2 + i] - top[m][1]);
        sum[m][0] += OPENED ? s[m][n][i] * inverse[n][i] : s[m][n][i];
        sum[m][1] += OPENED ? s[m][n][2 + i] * inverse[n][i] : s[m][n][2 + i];
        if (of_shift({v_args}) != 0.f) {{
          spread[m][0] += s[m][n][i];
          spread[m][1] += s[m][n][2 + i];
        }}
      }}
    p[m][0] = of_pack(s[m][0][0], s[m][0][1]); p[m][1] = of_pack(s[m][0][2], s[m][0][3]);
    p[m][2] = of_pack(s[m][1][0], s[m][1][1]); p[m][3] = of_pack(s[m][1][2], s[m][1][3]);
  }}
#pragma unroll
  for (int b = 0; b < NB; b++) {{
    u32 v[4][EACH / 2];
#pragma unroll
    for (int i = 0; i < 4; i++) of_put(v[i], of_open{each}({v_args}, value_part(i, b), half * WIDTH + g * EACH));
    {use_shares}
#pragma unroll
    for (int e = 0; e < EACH; e++) {{
      const u32 pick = e & 1 ? 0x7632u : 0x5410u;
      const u32 b0 = __byte_perm(v[0][e / 2], v[1][e / 2], pick);
      const u32 b1 = __byte_perm(v[2][e / 2], v[3][e / 2], pick);
#pragma unroll
      for (int m = 0; m < MT; m++) of_mma(acc[m][b * EACH + e], p[m][0], p[m][1], p[m][2], p[m][3], b0, b1);
    }}
  }}
  values_done(t + 16 * parts_k);
}}
#pragma unroll
for (int m = 0; m < MT; m++) {{
#pragma unroll
  for (int side = 0; side < 2; side++) {{
    sum[m][side] += __shfl_xor_sync(~0u, sum[m][side], 1);
    sum[m][side] += __shfl_xor_sync(~0u, sum[m][side], 2);
    if (of_shift({v_args}) == 0.f) continue;
    spread[m][side] += __shfl_xor_sync(~0u, spread[m][side], 1);
    spread[m][side] += __shfl_xor_sync(~0u, spread[m][side], 2);
#pragma unroll
    for (int i = 0; i < NB * EACH; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) acc[m][i][2 * side + e] += of_shift({v_args}) * spread[m][side];
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
      const float a0 = of_exp2(top[m][0] - n0), a1 = of_exp2(top[m][1] - n1);
      const float b0 = of_exp2(o0 - n0), b1 = of_exp2(o1 - n1);
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
          for (int d = 0; d < 4; d++) x[d] = acc[m][b * EACH + of_place({v_args}, e + d, EACH)][2 * side + i];
          *(float4*)(to + e) = make_float4(x[0], x[1], x[2], x[3]);
        }}
      }}
  }}
}}
}}
"""
"""The rest of it, for so many tiles."""
