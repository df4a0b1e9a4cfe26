"""The kernels for rotated formats, as source text for CUDA and Metal.

The words in capitals that begin with `OF_` are replaced by the device's own, and `@` by k or v. A warp of 32 threads
has one vector, each thread as many neighbouring values.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.model.kernels import cuda_header, metal_source
from onefold.cache.model.kernels.coded_rows import Coding, Turning
from onefold.cache.model.levels import levels_source, steps

_TURN = """
#pragma unroll
for (int h = 1; h < E; h *= 2)
#pragma unroll
  for (int i = 0; i < E; i++) if (!(i & h)) {
    const float a = x[i], b = x[i + h];
    x[i] = a + b;
    x[i + h] = a - b;
  }
#pragma unroll
for (int o = 1; o < 32; o *= 2)
#pragma unroll
  for (int i = 0; i < E; i++) {
    const float other = OF_XOR(x[i], o);
    x[i] = lane & o ? other - x[i] : x[i] + other;
  }
#pragma unroll
for (int i = 0; i < E; i++) x[i] *= NORM;
"""

_ROTATED = """
constexpr float HALF = float(1 << (B - 1));
const float shares[] = {STEPS};
float top = 0.0f, best = -1.0f, found = 0.0f;
for (int i = 0; i < E; i++) top = OF_MAX(top, OF_ABS(x[i]));
for (int o = 1; o < LANES; o *= 2) top = OF_MAX(top, OF_XOR(top, o));
#pragma unroll
for (int s = 0; s < COUNT; s++) {
  const float step = OF_MAX(top / (HALF - 0.5f) * shares[s], 1e-6f);
  float up = 0.0f, down = 0.0f;
  int codes[E];
#pragma unroll
  for (int i = 0; i < E; i++) {
    const float code = OF_MIN(OF_MAX(OF_FLOOR(x[i] / step), -HALF), HALF - 1.0f), middle = code + 0.5f;
    up += middle * x[i];
    down += middle * middle;
    codes[i] = int(code + HALF);
  }
  for (int o = 1; o < LANES; o *= 2) {
    up += OF_XOR(up, o);
    down += OF_XOR(down, o);
  }
  const float scale = up / down;
  if (s == 0 || up * scale > best) {
    best = up * scale;
    found = scale;
#pragma unroll
    for (int i = 0; i < E; i++) staged[lane * E + i] = (unsigned char)(codes[i]);
  }
}
if (GROUPS > 1) {  // the largest scale is stored, and the share of it that each group has
  float whole = found;
  for (int o = LANES; o < 32; o *= 2) whole = OF_MAX(whole, OF_XOR(whole, o));
  const float share = OF_FLOOR(found / OF_MAX(whole, 1e-30f) * 256.0f + 0.5f);
  const OF_LONG first = 4 * (to * ROW + ROW - 2);
  if (lane % LANES == 0) OF_BYTE(coded, first + lane / LANES, int(OF_MIN(OF_MAX(share, 1.0f), 256.0f)) - 1);
  if (lane >= GROUPS && lane < 4) OF_BYTE(coded, first + lane, 0);
  found = whole;
}
"""

_TURBO = """
constexpr int LEVELS = 1 << B;
float up = 0.0f, down = 0.0f;
for (int i = 0; i < E; i++) up += x[i] * x[i];
for (int o = 1; o < 32; o *= 2) up += OF_XOR(up, o);
up = OF_SQRT(up);
const float unit = 1.0f / (NORM * OF_MAX(up, 1e-6f));
#pragma unroll
for (int i = 0; i < E; i++) {
  int code = 0;
  const float value = x[i] * unit;
#pragma unroll
  for (int j = 1; j < LEVELS; j++) code += value > 0.5f * (of_levels[LEVELS - 3 + j] + of_levels[LEVELS - 2 + j]);
  const float level = of_levels[LEVELS - 2 + code];
  down += level * level;
  staged[lane * E + i] = (unsigned char)(code);
}
for (int o = 1; o < 32; o *= 2) down += OF_XOR(down, o);
const float found = up / OF_SQRT(down);
"""

_PLACE = """
const int H = @_shape[1], L = @_shape[2];
const OF_LONG from = (at / (H * L)) * @_strides[0] + (at / L % H) * @_strides[1] + (at % L) * @_strides[2];
const OF_LONG each = @_strides[3];
"""

_SIDE = (
    """
constexpr int D = DIM, E = D / 32, B = BITS, FIRST = BEGIN, GROUPS = GROUPED, LANES = 32 / GROUPS;
constexpr float NORM = SCALE;
"""
    + _PLACE
    + """
const OF_LONG to = ACROSS ? OF_LONG(at % H) * @_shape[0] + at / H : OF_LONG(at);
float x[E];
#pragma unroll
for (int i = 0; i < E; i++) x[i] = OF_READ(@, from + (lane * E + i) * each) * @_signs[lane * E + i];
"""
    + _TURN
    + "CODES"
    + """
OF_BARRIER;
for (int w = lane; w < D * B / 32; w += 32) {
  unsigned int word = 0u;
  for (int i = 32 * w / B; i < D && i * B < 32 * w + 32; i++) {
    const int bit = i * B - 32 * w;
    const unsigned int code = staged[i];
    word |= bit >= 0 ? code << bit : code >> -bit;
  }
  coded[to * ROW + FIRST + w] = word;
}
if (PART == 1 && GROUPS == 1 && FIRST + D * B / 32 < ROW - 1 && lane == 0) coded[to * ROW + ROW - 2] = 0u;
if (lane == 0) OF_STORE(coded, 2 * (to * ROW + ROW - 1) + PART, found);
"""
)

_TURN_SOURCE = (
    """
constexpr int D = DIM, E = D / 32;
constexpr float NORM = SCALE;
const int at = OF_GROUP, lane = OF_LANE;
"""
    + _PLACE.replace("@", "vectors")
    + """
float x[E];
#pragma unroll
for (int i = 0; i < E; i++) x[i] = OF_READ(vectors, from + (lane * E + i) * each) FIRST;
"""
    + _TURN
    + """
#pragma unroll
for (int i = 0; i < E; i++) OF_WRITE(y, OF_LONG(at) * D + lane * E + i, x[i] LAST);
"""
)

_DECODE_SIDE = (
    """
constexpr int D = DIM, E = D / 32, B = BITS, FIRST = BEGIN, GROUPS = GROUPED, LANES = 32 / GROUPS;
"""
    + _PLACE.replace("@", "coded")
    + """
float scale = of_scale((coded[from + (ROW - 1) * each] >> (16 * PART)) & 0xffffu);
if (GROUPS > 1)
  scale *= float(((coded[from + (ROW - 2) * each] >> (8 * (lane / LANES))) & 255u) + 1u) * (1.0f / 256.0f);
#pragma unroll
for (int i = 0; i < E; i++) {
  const int bit = (lane * E + i) * B, off = bit % 32;
  unsigned int code = coded[from + (FIRST + bit / 32) * each] >> off;
  if (off + B > 32) code |= coded[from + (FIRST + bit / 32 + 1) * each] << (32 - off);
  code &= (1u << B) - 1u;
  OF_WRITE(@, OF_LONG(at) * D + lane * E + i, scale * (VALUE));
}
"""
)

_VALUES = {
    "rotated": "float(code) + (0.5f - float(1 << (B - 1)))",
    "turbo": "of_levels[(1 << B) - 2 + int(code)]",
}

_CUDA_WORDS = {
    "OF_GROUP": "int(blockIdx.x)",
    "OF_LANE": "int(threadIdx.x)",
    "OF_SHARED": "__shared__",
    "OF_BARRIER": "__syncwarp()",
    "OF_XOR(": "__shfl_xor_sync(~0u, ",
    "OF_READ(": "of_read(",
    "OF_WRITE(": "of_write(",
    "OF_STORE(": "of_write(",
    "OF_BYTE(": "of_byte(",
    "OF_LONG": "long",
    "OF_MAX": "fmaxf",
    "OF_MIN": "fminf",
    "OF_ABS": "fabsf",
    "OF_FLOOR": "floorf",
    "OF_SQRT": "sqrtf",
}
_METAL_WORDS = {
    "OF_GROUP": "int(threadgroup_position_in_grid.x)",
    "OF_LANE": "int(thread_index_in_simdgroup)",
    "OF_SHARED": "threadgroup",
    "OF_BARRIER": "threadgroup_barrier(mem_flags::mem_threadgroup)",
    "OF_XOR(": "simd_shuffle_xor(",
    "OF_READ(": "of_read(",
    "OF_WRITE(": "of_write(",
    "OF_STORE(": "of_store(",
    "OF_BYTE(": "of_byte(",
    "OF_LONG": "int64_t",
    "OF_MAX": "max",
    "OF_MIN": "min",
    "OF_ABS": "abs",
    "OF_FLOOR": "floor",
    "OF_SQRT": "sqrt",
}
_CUDA_HEADER = """
__device__ __forceinline__ float of_read(const void* x, long at) {
  const unsigned short h = __ldg((const unsigned short*)x + at);
  float r;
  asm("cvt.f32.TYPE %0, %1;" : "=f"(r) : "h"(h));
  return r;
}
__device__ __forceinline__ void of_write(void* y, long at, float x) {
  unsigned short h;
  asm("cvt.rn.TYPE.f32 %0, %1;" : "=h"(h) : "f"(x));
  ((unsigned short*)y)[at] = h;
}
#define of_byte(y, at, v) ((unsigned char*)(y))[at] = (unsigned char)(v)
__device__ __forceinline__ float of_scale(unsigned int bits) {
  float r;
  asm("cvt.f32.TYPE %0, %1;" : "=f"(r) : "h"((unsigned short)bits));
  return r;
}
"""
_METAL_HEADER = """
#include <metal_stdlib>
using namespace metal;
#define of_read(x, at) float((x)[at])
#define of_write(y, at, v) (y)[at] = TYPE(v)
#define of_store(y, at, v) ((device HALVES*)(y))[at] = HALVES(v)
#define of_byte(y, at, v) ((device unsigned char*)(y))[at] = (unsigned char)(v)
inline float of_scale(unsigned int bits) { return OPENED; }
"""
_METAL_TYPES = {mx.bfloat16: "bfloat16_t", mx.float16: "half", mx.float32: "float"}
_LEVELS = {True: "constant constexpr float", False: "__device__ const float"}


def encoder_source(coding: Coding, metal: bool, across: bool) -> dict[str, Any]:
    """Returns the name, the arguments, the header and the source of the kernel that encodes."""
    side = _SIDE.replace("CODES", _ROTATED if coding.name == "rotated" else _TURBO)
    side = side.replace("ACROSS", "true" if across else "false")
    staged = f"OF_SHARED unsigned char staged[{max(coding.key_dim, coding.value_dim)}];"
    return {
        "name": f"onefold_encode_{_tag(coding)}{'_across' if across else ''}",
        "input_names": ["k", "v", "k_signs", "v_signs"],
        "output_names": ["coded"],
        **_written(staged + _of_both(coding, side, "k"), coding.dtype, metal, levels=coding.name == "turbo"),
    }


def turner_source(turning: Turning, metal: bool) -> dict[str, Any]:
    """The same of the kernel that rotates."""
    signs = "* signs[lane * E + i]"
    body = _TURN_SOURCE.replace("DIM", str(turning.dim)).replace("SCALE", f"{turning.dim**-0.5!r}f")
    body = body.replace("FIRST", "" if turning.back else signs).replace("LAST", signs if turning.back else "")
    return {
        "name": f"onefold_turn_{turning.dim}_{_type(turning.dtype)}{'_back' if turning.back else ''}",
        "input_names": ["vectors", "signs"],
        "output_names": ["y"],
        **_written(body, turning.dtype, metal),
    }


def decoder_source(coding: Coding, metal: bool) -> dict[str, Any]:
    """The same of the kernel that unpacks."""
    body = _of_both(coding, _DECODE_SIDE.replace("VALUE", _VALUES[coding.name]), "coded")
    return {
        "name": f"onefold_decode_{_tag(coding)}",
        "input_names": ["coded"],
        "output_names": ["k", "v"],
        **_written(body, coding.dtype, metal, levels=coding.name == "turbo"),
    }


def _of_both(coding: Coding, side: str, given: str) -> str:
    """Returns what each group does: the first half of them for a key, the others for a value. `given` is the input
    whose shape says how many there are."""
    k_side = ("k", coding.key_dim, coding.key_bits, 0, 0, 1)
    v_side = ("v", coding.value_dim, coding.value_bits, coding.key_words, 1, coding.value_groups)
    k, v = (
        side.replace("@", name).replace("DIM", str(dim)).replace("BITS", str(bits)).replace("BEGIN", str(begin))
        .replace("PART", str(part)).replace("GROUPED", str(groups)).replace("SCALE", f"{dim**-0.5!r}f")
        .replace("STEPS", ", ".join(f"{share}f" for share in steps(bits))).replace("COUNT", str(len(steps(bits))))
        for name, dim, bits, begin, part, groups in (k_side, v_side)
    )  # fmt: skip
    return f"""
constexpr int ROW = {coding.row};
const int each_side = {given}_shape[0] * {given}_shape[1] * {given}_shape[2], group = OF_GROUP, lane = OF_LANE;
if (group < each_side) {{
const int at = group;
{k}
}} else {{
const int at = group - each_side;
{v}
}}
"""


def _tag(coding: Coding) -> str:
    *sizes, dtype = coding
    return f"{'_'.join(map(str, sizes))}_{_type(dtype)}"


def _written(body: str, dtype: mx.Dtype, metal: bool, *, levels: bool = False) -> dict[str, str]:
    """Returns the header and the source in the device's language."""
    if metal:
        own = _METAL_TYPES[dtype]
        halves, opened = own if dtype.size == 2 else "half", metal_source.SCALES.get(own, metal_source.SCALE)
        header = _METAL_HEADER.replace("TYPE", own).replace("HALVES", halves).replace("OPENED", opened)
    else:
        header = _CUDA_HEADER.replace("TYPE", cuda_header.NAMES[dtype])
    if levels:
        header += levels_source(_LEVELS[metal]).format()
    for word, replaced in (_METAL_WORDS if metal else _CUDA_WORDS).items():
        body = body.replace(word, replaced)
    return {"header": cuda_header.shortened(header), "source": cuda_header.shortened(body)}


def _type(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
