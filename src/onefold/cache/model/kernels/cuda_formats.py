"""How the decode kernel for CUDA reads each format of stored KV, as source text."""

from __future__ import annotations

from typing import NamedTuple

from onefold.cache.model.levels import levels_source

_PLAIN = """
__device__ __forceinline__ uint4 of_order(const void*, uint4 q) {{ return q; }}
__device__ constexpr int of_place(const void*, int dim, int each) {{ return dim; }}
__device__ constexpr float of_shift(const void*) {{ return 0.f; }}
__device__ __forceinline__ unsigned short of_fetch_scale(const void* x, int key) {{ return 0; }}
__device__ __forceinline__ float of_factor(const void* x, unsigned short scale) {{ return 1.f; }}
__device__ __forceinline__ uint4 of_fetch8(const void* x, int key, int dims, int start, int within) {{
  return *(const uint4*)((const char*)x + (long)(u32)key * (u32)(2 * dims) + 2 * within + 2 * start);
}}
__device__ __forceinline__ uint2 of_fetch4(const void* x, int key, int dims, int start, int within) {{
  return *(const uint2*)((const char*)x + (long)(u32)key * (u32)(2 * dims) + 2 * within + 2 * start);
}}
// In a tile, the order of a key's parts of 16 bytes depends on the key: so threads that read other keys at once use
// other banks.
struct of_tile {{}};
__device__ __forceinline__ int of_mixed(int part, int key, int parts) {{
  const int by = (key & 1) << 2 ^ (key >> 1 & 3) << 1;
  return part ^ (parts % 8 ? by & 3 : by);
}}
__device__ __forceinline__ const char* of_part(const void* x, int key, int dims, int dim) {{
  return (const char*)x + 16 * (key * (dims / 8) + of_mixed(dim / 8, key, dims / 8));
}}
__device__ __forceinline__ unsigned short of_fetch_scale(const void* x, of_tile, int key) {{ return 0; }}
__device__ __forceinline__ uint4 of_fetch8(const void* x, of_tile, int key, int dims, int start, int within) {{
  return *(const uint4*)of_part(x, key, dims, start + within);
}}
__device__ __forceinline__ uint2 of_fetch4(const void* x, of_tile, int key, int dims, int start, int within) {{
  return *(const uint2*)(of_part(x, key, dims, start + within) + 2 * (within % 8));
}}
__device__ __forceinline__ uint4 of_open8(const void* x, uint4 fetched, int within) {{ return fetched; }}
__device__ __forceinline__ uint2 of_open4(const void* x, uint2 fetched, int within) {{ return fetched; }}
"""

_AFFINE = """
#define OF_ARRAYS const void*, const void*, const void*
__device__ __forceinline__ uint4 of_order(OF_ARRAYS, uint4 q) {{ return q; }}
__device__ constexpr int of_place(OF_ARRAYS, int dim, int each) {{ return dim; }}
__device__ constexpr float of_shift(OF_ARRAYS) {{ return 0.f; }}
struct of_group {{ u32 low, high; unsigned short scale, bias; }};
__device__ __forceinline__ unsigned short of_fetch_scale(OF_ARRAYS, int) {{ return 0; }}
__device__ __forceinline__ float of_factor(OF_ARRAYS, unsigned short) {{ return 1.f; }}
__device__ __forceinline__ of_group of_fetch4(
    const void* w, const void* s, const void* b, int key, int dims, int start, int within) {{
  const int dim = start + within;
  const long group = (long)key * (dims / {group}) + dim / {group};
  const u32* words = (const u32*)w + ((long)key * dims + dim) * {bits} / 32;
  return {{__ldg(words), 0u, __ldg((const unsigned short*)s + group), __ldg((const unsigned short*)b + group)}};
}}
__device__ __forceinline__ of_group of_fetch8(
    const void* w, const void* s, const void* b, int key, int dims, int start, int within) {{
  of_group x = of_fetch4(w, s, b, key, dims, start, within);
  if ({bits} == 8) x.high = __ldg((const u32*)w + ((long)key * dims + start + within) * {bits} / 32 + 1);
  return x;
}}
__device__ __forceinline__ uint2 of_four(u32 codes, float scale, float bias) {{
  constexpr u32 mask = (1u << {bits}) - 1u;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = scale * (float)((codes >> (i * {bits})) & mask) + bias;
  return make_uint2(of_pack(x[0], x[1]), of_pack(x[2], x[3]));
}}
__device__ __forceinline__ uint2 of_open4(OF_ARRAYS, of_group x, int within) {{
  return of_four(x.low >> (within * {bits} % 32), of_wide16(x.scale), of_wide16(x.bias));
}}
__device__ __forceinline__ uint4 of_open8(OF_ARRAYS, of_group x, int within) {{
  const float scale = of_wide16(x.scale), bias = of_wide16(x.bias);
  const uint2 low = of_four(x.low, scale, bias), high = of_four({bits} == 8 ? x.high : x.low >> 16, scale, bias);
  return make_uint4(low.x, low.y, high.x, high.y);
}}
"""

_CODES = """
typedef unsigned long long u64;
template <int B, int FIRST, int HALF> struct of_side {{}};
struct of_words {{ u32 low, high; }};
#define OF_SIDE template <int B, int FIRST, int HALF> __device__ __forceinline__
__device__ __forceinline__ const u32* of_row(const void* x, int key) {{
  return (const u32*)x + (long)(u32)(key * {row});
}}
// both scales of a row are one word, which is loaded once
OF_SIDE unsigned short of_fetch_scale(const void* x, of_side<B, FIRST, HALF>, int key) {{
  return (unsigned short)(of_row(x, key)[{row} - 1] >> (16 * HALF));
}}
// the words of N neighbours, which begin `within` dimensions behind a multiple of 32: both are multiples of N
template <int B, int N> __device__ __forceinline__ of_words of_fetch(const u32* row, int start, int within) {{
  const u32* at = row + start / 32 * B + (u32)(within * B) / 32u;
  if (B == 8 && N == 8) {{  // rows begin at multiples of 8 bytes
    const uint2 both = *(const uint2*)at;
    return {{both.x, both.y}};
  }}
  of_words x = {{at[0], 0u}};
  if (N * B > 32 || (32 % B != 0 && (u32)(within * B) % 32u + N * B > 32)) x.high = at[1];
  return x;
}}
OF_SIDE of_words of_fetch8(const void* x, of_side<B, FIRST, HALF>, int key, int dims, int start, int within) {{
  return of_fetch<B, 8>(of_row(x, key) + FIRST, start, within);
}}
OF_SIDE of_words of_fetch4(const void* x, of_side<B, FIRST, HALF>, int key, int dims, int start, int within) {{
  return of_fetch<B, 4>(of_row(x, key) + FIRST, start, within);
}}
template <int B, int N> __device__ __forceinline__ u64 of_codes(of_words x, int within) {{
  const u64 both = (u64)x.high << 32 | x.low;
  return N * B % 32 == 0 ? both : both >> ((u32)(within * B) % 32u);
}}
"""

_ROTATED = (
    _CODES
    + """
// A code is opened by putting its bits into those of an f16 whose last bit is worth 1: so two codes, one in each half
// of a word, take one instruction, and another one takes away what is too much. Where their bits are higher up, that
// one also divides. Half steps are taken away there too, except from codes of 8 bits: f16 does not hold these, so they
// are opened half a step too low, and `of_shift` is multiplied by the sum of what they are multiplied by.
#define OF_OPENED(x, mask, by, less) of_fma2(((x) & (mask)) | 0x64006400u, by, less)
OF_SIDE constexpr float of_shift(const void*, of_side<B, FIRST, HALF>) {{ return B == 8 ? 0.5f : 0.f; }}
OF_SIDE float of_factor(const void*, of_side<B, FIRST, HALF>, unsigned short scale) {{ return of_wide16(scale); }}
// four codes of 8 bits, two by two
__device__ __forceinline__ uint2 of_bytes(u32 x) {{
  return make_uint2(of_fma2(__byte_perm(x, 0x64646464u, 0x4140), 0x3c003c00u, 0xe480e480u),
                    of_fma2(__byte_perm(x, 0x64646464u, 0x4342), 0x3c003c00u, 0xe480e480u));
}}
// a code of 4 bits in the second lowest bits of each half
__device__ __forceinline__ u32 of_nibbles(u32 x) {{ return OF_OPENED(x, 0x00f000f0u, 0x2c002c00u, 0xd478d478u); }}
// codes of 5 bits, 15 bits apart, the first one from the third bit on, or from the sixth
__device__ __forceinline__ u32 of_fives2(u32 x) {{ return OF_OPENED(x, 0x003e007cu, 0x38003400u, 0xe01fdc3eu); }}
__device__ __forceinline__ u32 of_fives5(u32 x) {{ return OF_OPENED(x, 0x01f003e0u, 0x2c002800u, 0xd4f8d1f0u); }}
OF_SIDE uint4 of_open8(const void*, of_side<B, FIRST, HALF>, of_words x, int within) {{
  if (B == 8) {{  // codes 0 and 1, 2 and 3, ...
    const uint2 low = of_bytes(x.low), high = of_bytes(x.high);
    return make_uint4(low.x, low.y, high.x, high.y);
  }}
  if (B == 4)  // codes 0 and 4, 1 and 5, ...
    return make_uint4(of_nibbles(x.low << 4), of_nibbles(x.low), of_nibbles(x.low >> 4), of_nibbles(x.low >> 8));
  // codes 0 and 3, 1 and 4, 2 and 5, 6 and 7
  const u64 codes = of_codes<B, 8>(x, within);
  const u32 low = (u32)codes, last = (u32)(codes >> 28);
  return make_uint4(of_fives2(low << 2), of_fives5(low), of_fives5(low >> 5),
                    of_fives2((last & 0x7cu) | ((last << 10) & 0x003e0000u)));
}}
OF_SIDE uint2 of_open4(const void*, of_side<B, FIRST, HALF>, of_words x, int within) {{
  const u32 codes = (u32)of_codes<B, 4>(x, within);
  if (B == 8) return of_bytes(codes);
  const u32 apart = (codes & 0xffffu) | codes << 12;  // codes 0 and 2 below, 1 and 3 above
  return make_uint2(of_nibbles(apart << 4), of_nibbles(apart >> 4));
}}
// brings 8 dimensions of a query into the order of opened codes
OF_SIDE uint4 of_order(const void*, of_side<B, FIRST, HALF>, uint4 q) {{
  if (B == 8) return q;
  if (B == 4)
    return make_uint4(__byte_perm(q.x, q.z, 0x5410), __byte_perm(q.x, q.z, 0x7632), __byte_perm(q.y, q.w, 0x5410),
                      __byte_perm(q.y, q.w, 0x7632));
  return make_uint4(__byte_perm(q.x, q.y, 0x7610), __byte_perm(q.x, q.z, 0x5432), __byte_perm(q.y, q.z, 0x7610), q.w);
}}
OF_SIDE constexpr int of_place(const void*, of_side<B, FIRST, HALF>, int dim, int each) {{
  return B == 8 || each == 4 ? dim : dim < 4 ? 2 * dim : 2 * (dim - 4) + 1;
}}
"""
)

_TURBO = (
    levels_source("__device__ const float")
    + _CODES
    + """
OF_SIDE uint4 of_order(const void*, of_side<B, FIRST, HALF>, uint4 q) {{ return q; }}
OF_SIDE constexpr int of_place(const void*, of_side<B, FIRST, HALF>, int dim, int each) {{ return dim; }}
OF_SIDE constexpr float of_shift(const void*, of_side<B, FIRST, HALF>) {{ return 0.f; }}
template <int B> __device__ __forceinline__ u32 of_pair(u64 codes, int low, int high) {{
  constexpr u32 mask = (1u << B) - 1u;
  const float* levels = of_levels + (1 << B) - 2;
  const u32 a = (u32)(codes >> (B * low)) & mask, b = (u32)(codes >> (B * high)) & mask;
  return of_pack(__ldg(levels + a), __ldg(levels + b));
}}
OF_SIDE float of_factor(const void*, of_side<B, FIRST, HALF>, unsigned short scale) {{ return of_wide16(scale); }}
OF_SIDE uint4 of_open8(const void*, of_side<B, FIRST, HALF>, of_words x, int within) {{
  const u64 codes = of_codes<B, 8>(x, within);
  return make_uint4(of_pair<B>(codes, 0, 1), of_pair<B>(codes, 2, 3), of_pair<B>(codes, 4, 5), of_pair<B>(codes, 6, 7));
}}
OF_SIDE uint2 of_open4(const void*, of_side<B, FIRST, HALF>, of_words x, int within) {{
  const u64 codes = of_codes<B, 4>(x, within);
  return make_uint2(of_pair<B>(codes, 0, 1), of_pair<B>(codes, 2, 3));
}}
"""
)

SHARES = """
// Each byte of a word says how many 256ths of the scale a group of a value has, less one. What was opened of a group is
// multiplied by that.
OF_SIDE u32 of_fetch_shares(const void* x, of_side<B, FIRST, HALF>, int key) {{ return of_row(x, key)[{row} - 2]; }}
__device__ __forceinline__ void of_share(u32* opened, int n, u32 shares, int group) {{
  const u32 by = of_fma2(__byte_perm(shares, 0x64646464u, 0x4040 + 0x0101 * group), 0x1c001c00u, 0xc3fec3feu);
#pragma unroll
  for (int i = 0; i < n; i++) opened[i] = of_fma2(opened[i], by, 0u);
}}
"""
"""What formats have besides whose values are divided into groups."""
LOADS = {"plain": _PLAIN, "affine": _AFFINE, "rotated": _ROTATED, "turbo": _TURBO}
"""By the name of a format, functions whose first arguments are `Format.arguments`:
- `of_fetch8` and `of_fetch4` load what is stored of 8 and 4 neighbouring dimensions of one key or value, and
  `of_fetch_scale` what is stored once for each. The dimensions begin at the sum of two numbers: the first is a multiple
  of 32 and known when the kernel is compiled, the second is the thread's own.
- `of_open8` and `of_open4` return the dimensions, in 16 bits each, up to the factor that `of_factor` returns;
  `of_shift` is to be added to them before.
- `of_place` returns where a dimension is among the 8 or 4, and `of_order` brings 8 of a query into that order."""
_SEEK_ROWS = "x0 = of_kept((const u32*)x0 + first_key * {row});"
SEEK = {
    "plain": "k0 = of_kept((const unsigned short*)k0 + first_key * DK);\n"
    "v0 = of_kept((const unsigned short*)v0 + first_key * DV);",
    "affine": "\n".join(
        f"{side}0 = (const u32*){side}0 + first_key * (D{side.upper()} * {{bits}} / 32);\n"
        f"{side}1 = (const unsigned short*){side}1 + first_key * (D{side.upper()} / {{group}});\n"
        f"{side}2 = (const unsigned short*){side}2 + first_key * (D{side.upper()} / {{group}});"
        for side in "kv"
    ),
    "rotated": _SEEK_ROWS,
    "turbo": _SEEK_ROWS,
}
"""By the name of a format: what moves the arrays on to the first key of a head. Keys are numbered from there."""


class Tiles(NamedTuple):
    """How tiles of 16 keys and their values are copied into shared memory, as source text."""

    origin: str
    """What is computed once."""
    copy: str
    """What copies the tile that begins with key `t` to `to`; keys from `hi` on are not there."""
    declared: str
    """The variables that stand for the format's arrays in a tile."""
    set: str
    """What sets them for the tile at `tile_now`."""
    tag: str = ""
    """What comes behind such a variable where a tile is read."""


_ROWS = Tiles(
    origin="const int skew = (int)((unsigned long long)((const char*)x0 + (long)lo * (4 * {row})) & 15);",
    copy="""
// rows follow one another: all bytes from the last multiple of 16 before them on
constexpr int SURE = 64 * {row} / 512 * 512;
const char* const from = (const char*)x0 + (long)t * (4 * {row}) - skew;
const int n = t < hi ? skew + (min(t + 16, hi) - t) * (4 * {row}) : 0;
const bool whole = t + 16 <= hi;
if (whole) {{
#pragma unroll
  for (int i = 0; i < SURE; i += 512) of_copy16(to + i + lane * 16, from + i + lane * 16, 16);
}}
for (int i = (whole ? SURE : 0) + lane * 16; i < n; i += 512) of_copy16(to + i, from + i, min(16, n - i));
""",
    declared="const void* x0_tile;",
    set="x0_tile = tile_now + skew;",
)
_VECTORS = """
if (t + 16 <= hi) {{{{
#pragma unroll
  for (int i = lane; i < 16 * ({dim} / 8); i += 32) {{{{
    const int key = i / ({dim} / 8), at = 16 * (key * ({dim} / 8) + of_mixed(i % ({dim} / 8), key, {dim} / 8));
    of_copy16(to + {begin} + at, (const char*){array} + (long)t * (2 * {dim}) + 16 * i, 16);
  }}}}
}}}} else {{{{
  for (int i = lane; i < 16 * ({dim} / 8); i += 32) {{{{
    const int key = i / ({dim} / 8), at = 16 * (key * ({dim} / 8) + of_mixed(i % ({dim} / 8), key, {dim} / 8));
    const char* const from = (const char*){array} + (long)min(t + key, hi - 1) * (2 * {dim}) + i % ({dim} / 8) * 16;
    of_copy16(to + {begin} + at, from, t + key < hi ? 16 : 0);
  }}}}
}}}}
"""
TILES = {
    "plain": Tiles(
        origin="",
        copy=_VECTORS.format(dim="DK", array="k0", begin="0") + _VECTORS.format(dim="DV", array="v0", begin="32 * DK"),
        declared="const void *k0_tile, *v0_tile;",
        set="k0_tile = tile_now; v0_tile = tile_now + 32 * DK;",
        tag=", of_tile()",
    ),
    "rotated": _ROWS,
    "turbo": _ROWS,
}
"""By the name of a format; those that are not here are read into registers."""


def tile_bytes(name: str, key_dim: int, value_dim: int, row: int) -> int:
    """Returns the bytes of a tile, with what comes before its first row."""
    return 32 * (key_dim + value_dim) if name == "plain" else 64 * row + 16
