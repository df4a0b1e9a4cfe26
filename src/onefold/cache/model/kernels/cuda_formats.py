"""How the decode kernel for CUDA reads each format of stored KV, as source text."""

from __future__ import annotations

from onefold.cache.model.levels import levels_source

_IN_ORDER = """
__device__ __forceinline__ uint4 of_order(uint4 q) {{ return q; }}
__device__ constexpr int of_place(int dim, int each) {{ return dim; }}
"""

_PLAIN = (
    _IN_ORDER
    + """
__device__ __forceinline__ unsigned short of_fetch_scale(const void* x, int key) {{ return 0; }}
__device__ __forceinline__ float of_factor(const void* x, unsigned short scale) {{ return 1.f; }}
__device__ __forceinline__ uint4 of_fetch8(const void* x, int key, int dims, int dim) {{
  return __ldg((const uint4*)((const char*)x + 2 * ((long)key * dims + dim)));
}}
__device__ __forceinline__ uint2 of_fetch4(const void* x, int key, int dims, int dim) {{
  return __ldg((const uint2*)((const char*)x + 2 * ((long)key * dims + dim)));
}}
__device__ __forceinline__ uint4 of_open8(const void* x, uint4 fetched, int dim) {{ return fetched; }}
__device__ __forceinline__ uint2 of_open4(const void* x, uint2 fetched, int dim) {{ return fetched; }}
"""
)

_AFFINE = (
    _IN_ORDER
    + """
struct of_group {{ u32 low, high; unsigned short scale, bias; }};
__device__ __forceinline__ unsigned short of_fetch_scale(const void*, const void*, const void*, int) {{ return 0; }}
__device__ __forceinline__ float of_factor(const void*, const void*, const void*, unsigned short) {{ return 1.f; }}
__device__ __forceinline__ of_group of_fetch4(
    const void* w, const void* s, const void* b, int key, int dims, int dim) {{
  const long group = (long)key * (dims / {group}) + dim / {group};
  const u32* words = (const u32*)w + ((long)key * dims + dim) * {bits} / 32;
  return {{__ldg(words), 0u, __ldg((const unsigned short*)s + group), __ldg((const unsigned short*)b + group)}};
}}
__device__ __forceinline__ of_group of_fetch8(
    const void* w, const void* s, const void* b, int key, int dims, int dim) {{
  of_group x = of_fetch4(w, s, b, key, dims, dim);
  if ({bits} == 8) x.high = __ldg((const u32*)w + ((long)key * dims + dim) * {bits} / 32 + 1);
  return x;
}}
__device__ __forceinline__ uint2 of_four(u32 codes, float scale, float bias) {{
  constexpr u32 mask = (1u << {bits}) - 1u;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = scale * (float)((codes >> (i * {bits})) & mask) + bias;
  return make_uint2(of_pack(x[0], x[1]), of_pack(x[2], x[3]));
}}
__device__ __forceinline__ uint2 of_open4(const void*, const void*, const void*, of_group x, int dim) {{
  return of_four(x.low >> (dim * {bits} % 32), of_wide16(x.scale), of_wide16(x.bias));
}}
__device__ __forceinline__ uint4 of_open8(const void*, const void*, const void*, of_group x, int dim) {{
  const float scale = of_wide16(x.scale), bias = of_wide16(x.bias);
  const uint2 low = of_four(x.low, scale, bias), high = of_four({bits} == 8 ? x.high : x.low >> 16, scale, bias);
  return make_uint4(low.x, low.y, high.x, high.y);
}}
"""
)

_CODES = """
typedef unsigned long long u64;
template <int B, int FIRST, int HALF> struct of_side {{}};
struct of_words {{ u32 low, high; }};
#define OF_SIDE template <int B, int FIRST, int HALF> __device__ __forceinline__
// both scales of a row are one word, which is loaded once
OF_SIDE unsigned short of_fetch_scale(const void* x, of_side<B, FIRST, HALF>, int key) {{
  return (unsigned short)(__ldg((const u32*)x + key * {row} + ({row} - 1)) >> (16 * HALF));
}}
// the words of N neighbours: dim is a multiple of N
template <int B, int N> __device__ __forceinline__ of_words of_fetch(const u32* row, int dim) {{
  if (B == 8 && N == 8) {{  // rows begin at multiples of 8 bytes
    const uint2 both = __ldg((const uint2*)(row + dim / 4));
    return {{both.x, both.y}};
  }}
  const int bit = dim * B, at = bit / 32, off = bit % 32;
  of_words x = {{__ldg(row + at), 0u}};
  if (N * B > 32 || (32 % B != 0 && off + N * B > 32)) x.high = __ldg(row + at + 1);
  return x;
}}
OF_SIDE of_words of_fetch8(const void* x, of_side<B, FIRST, HALF>, int key, int dims, int dim) {{
  return of_fetch<B, 8>((const u32*)x + key * {row} + FIRST, dim);
}}
OF_SIDE of_words of_fetch4(const void* x, of_side<B, FIRST, HALF>, int key, int dims, int dim) {{
  return of_fetch<B, 4>((const u32*)x + key * {row} + FIRST, dim);
}}
template <int B, int N> __device__ __forceinline__ u64 of_codes(of_words x, int dim) {{
  const u64 both = (u64)x.high << 32 | x.low;
  return N * B % 32 == 0 ? both : both >> (dim * B % 32);
}}
OF_SIDE uint2 of_open4(const void*, of_side<B, FIRST, HALF>, of_words x, int dim) {{
  const u64 codes = of_codes<B, 4>(x, dim);
  return make_uint2(of_pair<B>(codes, 0, 1), of_pair<B>(codes, 2, 3));
}}
"""

_ROTATED = (
    """
// Codes are opened as 2 * code + 1 - 2 ** B: whole numbers, which f16 holds, two for each shift, mask and sum. Their
// bits are put into those of a number whose last bit is worth 1. Code i and code i + 4 make a pair.
template <int B> __device__ __forceinline__ u32 of_pair(unsigned long long codes, int low, int high) {{
  constexpr u32 mask = ((1u << B) - 1u) << 1, whole = {whole}u * 0x10001u;
  if (B == 8) {{
    const u32 both = __byte_perm((u32)codes, (u32)(codes >> 32), low | high << 8) << 1;
    return of_fma2((both & mask * 0x10001u) | whole | 0x10001u, {one}u * 0x10001u, 0x80008000u | whole | 0x1000100u);
  }}
  const int up = 17 - B * high;
  const u32 a = low ? (u32)(codes >> (low ? B * low - 1 : 0)) : (u32)codes << 1;
  const u32 b = up > 0 ? (u32)(codes << (up > 0 ? up : 0)) : (u32)(codes >> (up > 0 ? 0 : -up));
  return of_fma2((a & mask) | (b & (mask << 16)) | whole | 0x10001u, {one}u * 0x10001u,
                 0x80008000u | whole | (1u << B) * 0x10001u);
}}
__device__ __forceinline__ uint4 of_order(uint4 q) {{
  return make_uint4(__byte_perm(q.x, q.z, 0x5410), __byte_perm(q.x, q.z, 0x7632), __byte_perm(q.y, q.w, 0x5410),
                    __byte_perm(q.y, q.w, 0x7632));
}}
__device__ constexpr int of_place(int dim, int each) {{
  return each == 4 ? dim : dim < 4 ? 2 * dim : 2 * (dim - 4) + 1;
}}
"""
    + _CODES
    + """
OF_SIDE float of_factor(const void*, of_side<B, FIRST, HALF>, unsigned short scale) {{
  return of_wide16(scale) * 0.5f;
}}
OF_SIDE uint4 of_open8(const void*, of_side<B, FIRST, HALF>, of_words x, int dim) {{
  const u64 codes = of_codes<B, 8>(x, dim);
  return make_uint4(of_pair<B>(codes, 0, 4), of_pair<B>(codes, 1, 5), of_pair<B>(codes, 2, 6), of_pair<B>(codes, 3, 7));
}}
"""
)

_TURBO = (
    _IN_ORDER
    + levels_source("__device__ const float")
    + """
template <int B> __device__ __forceinline__ u32 of_pair(unsigned long long codes, int low, int high) {{
  constexpr u32 mask = (1u << B) - 1u;
  const float* levels = of_levels + (1 << B) - 2;
  const u32 a = (u32)(codes >> (B * low)) & mask, b = (u32)(codes >> (B * high)) & mask;
  return of_pack(__ldg(levels + a), __ldg(levels + b));
}}
"""
    + _CODES
    + """
OF_SIDE float of_factor(const void*, of_side<B, FIRST, HALF>, unsigned short scale) {{
  return of_wide16(scale);
}}
OF_SIDE uint4 of_open8(const void*, of_side<B, FIRST, HALF>, of_words x, int dim) {{
  const u64 codes = of_codes<B, 8>(x, dim);
  return make_uint4(of_pair<B>(codes, 0, 1), of_pair<B>(codes, 2, 3), of_pair<B>(codes, 4, 5), of_pair<B>(codes, 6, 7));
}}
"""
)

LOADS = {"plain": _PLAIN, "affine": _AFFINE, "rotated": _ROTATED, "turbo": _TURBO}
"""By the name of a format, functions whose first arguments are `Format.arguments`:
- `of_fetch8` and `of_fetch4` load what is stored of 8 and 4 neighbouring dimensions of one key or value, and
  `of_fetch_scale` what is stored once for each;
- `of_open8` and `of_open4` return the dimensions, in 16 bits each, up to the factor that `of_factor` returns;
- `of_place` returns where a dimension is among the 8 or 4, and `of_order` brings 8 of a query into that order."""
_SEEK_ROWS = "x0 = (const u32*)x0 + first_key * {row};"
SEEK = {
    "plain": "k0 = (const unsigned short*)k0 + first_key * DK; v0 = (const unsigned short*)v0 + first_key * DV;",
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
