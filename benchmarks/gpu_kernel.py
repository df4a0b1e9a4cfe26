"""The decode kernel on a GPU: microseconds of one layer, Llama-8B shape, bf16.

    python benchmarks/gpu_kernel.py

Each row: how many rows with how many tokens of their own on how many shared ones; the kernel, and how much it reads, in
TB/s; beside it the shared prefix alone as two matmuls and a softmax, or for a row alone MLX's own attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx

from onefold.cache.model.kernels import comparison, current
from onefold.cache.model.kernels.decode import Format, Shape

HEADS, KV_HEADS, DIM = 32, 8, 128
CASES = ((1, 1000, 0), (1, 32768, 0), (8, 1000, 0), (32, 1000, 0), (8, 64, 32768), (32, 64, 32768), (8, 2000, 16384))


def microseconds(call: Callable[[], mx.array], times: int = 50) -> float:
    """The median of a few batches: a single call is too short to be timed."""
    mx.eval(call())
    took = []
    for _ in range(5):
        begun = time.perf_counter()
        mx.eval([call() for _ in range(times)])
        took.append(1e6 * (time.perf_counter() - begun) / times)
    return statistics.median(took)


def main() -> None:
    kernel = current.device_kernel()
    if kernel is None:
        print("no GPU: nothing to measure")
        return
    shape = Shape(DIM, DIM, mx.bfloat16, Format("plain", 2))
    print(f"{'rows':>4} {'own':>6} {'shared':>7} {'kernel':>8} {'TB/s':>6} {'beside it':>10}")
    for rows, own, shared in CASES:
        prefix = comparison.Slab(shared, KV_HEADS, shape) if shared else None
        slabs = [comparison.Slab(own + 256, KV_HEADS, shape) for _ in range(rows)]
        before = [] if prefix is None else [(prefix, 0, shared)]
        table = kernel.table([[*before, (slab, 0, own)] for slab in slabs], 1, KV_HEADS, shape)
        arrays = [slab.arrays for slab in table.slabs]
        q = mx.random.normal((rows, HEADS, 1, DIM)).astype(mx.bfloat16)
        mx.eval(q, arrays)

        def attend() -> mx.array:
            return kernel.attend(q, arrays, table, shape, KV_HEADS, DIM**-0.5, None)  # noqa: B023

        def other() -> mx.array:
            if prefix is None:  # noqa: B023
                k, v = (a[..., :own, :] for a in slabs[0].arrays)  # noqa: B023
                return mx.fast.scaled_dot_product_attention(q[:1], k, v, scale=DIM**-0.5)  # noqa: B023
            folded = q.reshape(rows, KV_HEADS, -1, DIM).transpose(1, 0, 2, 3).reshape(1, KV_HEADS, -1, DIM)  # noqa: B023
            weights = mx.softmax(folded @ prefix.arrays[0].swapaxes(-1, -2), axis=-1, precise=True)  # noqa: B023
            return weights @ prefix.arrays[1]  # noqa: B023

        took = microseconds(attend)
        read = (shared + rows * own) * 2 * KV_HEADS * DIM * 2
        beside = f"{microseconds(other):.0f}" if shared or rows == 1 else ""
        print(f"{rows:>4} {own:>6} {shared:>7} {took:>8.0f} {read / took / 1e6:>6.2f} {beside:>10}", flush=True)


if __name__ == "__main__":
    main()
