"""What comes before a kernel for CUDA: instructions, the types that they take, and queries for products with codes."""

from __future__ import annotations

import mlx.core as mx

NAMES = {mx.bfloat16: "bf16", mx.float16: "f16"}
"""The types that a kernel can read, by the names that instructions have for them."""


def shortened(source: str) -> str:
    """Returns the source without indents and comments: MLX puts it together and hashes it at every call."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


_OF_ONE_NUMBER = """
__device__ __forceinline__ float {name}(float x) {{
  float r;
  asm("{instruction}.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}}
"""
_APPROXIMATE = {"of_exp2": "ex2", "of_log2": "lg2", "of_inverse": "rcp"}

INSTRUCTIONS = """
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
__device__ __forceinline__ float of_wide16(unsigned short h) {{
  float r;
  asm("cvt.f32.{given} %0, %1;" : "=f"(r) : "h"(h));
  return r;
}}
{of_one_number}
#define OF_STAGED extern __shared__ uint4 of_staged[]
// copies n of 16 bytes into shared memory, and zeros in place of the others
__device__ __forceinline__ void of_copy16(void* to, const void* from, int n) {{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(n) : "memory");
}}
__device__ __forceinline__ void of_commit() {{ asm volatile("cp.async.commit_group;" ::: "memory"); }}
// waits until all copies but those of the last N commits are there
template <int N> __device__ __forceinline__ void of_wait() {{
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}}
// keeps the compiler from computing an address again from its parts in every round of a loop
__device__ __forceinline__ const void* of_kept(const void* x) {{
  asm("" : "+l"(x));
  return x;
}}
__device__ __forceinline__ void of_put(u32* to, uint2 x) {{ to[0] = x.x; to[1] = x.y; }}
__device__ __forceinline__ void of_put(u32* to, uint4 x) {{ to[0] = x.x; to[1] = x.y; to[2] = x.z; to[3] = x.w; }}
// x * y + z, of two numbers each
__device__ __forceinline__ u32 of_fma2(u32 x, u32 y, u32 z) {{
  u32 r;
  asm("fma.rn.{t}x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
  return r;
}}
"""

_PREPARE = """
// A query for products with codes: rotated if they are, and divided by a power of two so that f16 holds it. Returns
// what it must be multiplied by, and its sum in `total`. Four neighbouring threads have 8 dimensions in 32 each; c:
// which of them.
template <int NK> __device__ __forceinline__ float of_prepare(uint4* q, {signs}int c, float* total) {{
  float x[NK][8], most = 0.f, sum = 0.f;
#pragma unroll
  for (int j = 0; j < NK; j++) {{
    u32 pairs[4];
    of_put(pairs, q[j]);
#pragma unroll
    for (int e = 0; e < 8; e++) x[j][e] = of_wide16((unsigned short)(pairs[e / 2] >> (16 * (e & 1)))){signed};
  }}
  {turn}
#pragma unroll
  for (int j = 0; j < NK; j++)
#pragma unroll
    for (int e = 0; e < 8; e++) {{
      most = fmaxf(most, fabsf(x[j][e]));
      sum += x[j][e];
    }}
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const u32 power = most < 1e-30f ? 0x3f800000u : __float_as_uint(most) & 0x7f800000u;
  const float by = __uint_as_float(0x7f000000u - power);
#pragma unroll
  for (int j = 0; j < NK; j++)
    q[j] = make_uint4(of_pack(x[j][0] * by, x[j][1] * by), of_pack(x[j][2] * by, x[j][3] * by),
                      of_pack(x[j][4] * by, x[j][5] * by), of_pack(x[j][6] * by, x[j][7] * by));
  *total = sum * by;
  return __uint_as_float(power){norm};
}}
"""

_TURN = """
#pragma unroll
for (int j = 0; j < NK; j++) {
#pragma unroll
  for (int h = 1; h < 8; h *= 2)
#pragma unroll
    for (int e = 0; e < 8; e++) if (!(e & h)) {
      const float a = x[j][e], b = x[j][e + h];
      x[j][e] = a + b;
      x[j][e + h] = a - b;
    }
#pragma unroll
  for (int o = 1; o < 4; o *= 2)
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float other = __shfl_xor_sync(~0u, x[j][e], o);
      x[j][e] = c & o ? other - x[j][e] : x[j][e] + other;
    }
}
#pragma unroll
for (int h = 1; h < NK; h *= 2)
#pragma unroll
  for (int j = 0; j < NK; j++) if (!(j & h))
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float a = x[j][e], b = x[j + h < NK ? j + h : j][e];
      x[j][e] = a + b;
      x[j + h < NK ? j + h : j][e] = a - b;
    }
"""
_TURNED = {
    "signs": "const float* signs, ",
    "signed": " * signs[j * 32 + c * 8 + e]",
    "turn": _TURN,
    "norm": " * rsqrtf(32.f * NK)",
}
_AS_GIVEN = dict.fromkeys(_TURNED, "")


def header(given: str, load: str = "", *, products: str = "", turns: bool = False, **parameters: int) -> str:
    """Returns what comes before a kernel: instructions, and functions that load a format. Numbers are given in one
    type, and multiplied in another if `products` is one: then queries are prepared for it."""
    prepare = _PREPARE.format(**(_TURNED if turns else _AS_GIVEN)) if products else ""
    loads = load.format(**parameters)
    return "\n".join([instructions(given, products or given), shortened(loads + prepare)])


def instructions(given: str, products: str) -> str:
    """Returns the functions that are single instructions."""
    of_one = (_OF_ONE_NUMBER.format(name=name, instruction=i) for name, i in _APPROXIMATE.items())
    return shortened(INSTRUCTIONS.format(t=products, given=given, of_one_number="".join(of_one)))
