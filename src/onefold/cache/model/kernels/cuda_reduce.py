"""The reduction of the decode kernel for CUDA, as source text: it weights the partial results of each row."""

from __future__ import annotations

THREADS = 128

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
  const float weight = of_exp2(sums[2 * at] - top);
  total += weight * sums[2 * at + 1];
#pragma unroll
  for (int d = 0; d < DV / 32; d++) out[d] += weight * mixed[at * DV + d * 32 + lane];
}}
if (!lane) totals[warp] = total;
#pragma unroll
for (int d = 0; d < DV / 32; d++) outs[warp][d * 32 + lane] = out[d];
__syncthreads();
total = totals[0] + totals[1] + totals[2] + totals[3] + (numbers[3] ? of_exp2(sink - top) : 0.f);
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
