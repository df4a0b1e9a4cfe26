"""Products of a few rows with a matrix of weights, on CUDA: our kernel beside MLX's own, which is cuBLAS; bf16.

    python benchmarks/gpu_products.py [--rows 2 8 16 32]

For each shape and number of rows, when many products are in flight: microseconds of the host for one, and from when
they are scheduled until they are computed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.model.kernels import product

SHAPES = ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096))
MANY, SETS = 96, 6
"""Products in flight, and matrices that are used in turn, so that none of them stays in the device's cache."""


def microseconds(call: Callable[[int], mx.array]) -> tuple[float, float]:
    host, whole = [], []
    for _ in range(6):
        begun = time.perf_counter()
        made = [call(i) for i in range(MANY)]
        built = time.perf_counter()
        mx.async_eval(*made)
        host.append(time.perf_counter() - begun)
        mx.synchronize()
        whole.append(time.perf_counter() - built)
    return 1e6 * statistics.median(host[1:]) / MANY, 1e6 * statistics.median(whole[1:]) / MANY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 16, 24, 32])
    given = parser.parse_args()
    if not device.on_cuda():
        print("no CUDA: nothing to measure")
        return
    print(f"{'columns':>8} {'dims':>6} {'rows':>5} {'our host':>9} {'all':>6} {'TB/s':>6} {'MLX host':>9} {'all':>6}")
    for columns, dims in SHAPES:
        weights = [mx.random.normal((columns, dims)).astype(mx.bfloat16) for _ in range(SETS)]
        for rows in given.rows:
            x = mx.random.normal((rows, 1, dims)).astype(mx.bfloat16)
            mx.eval(weights, x)
            ours = microseconds(lambda i: product.multiply(x, weights[i % SETS], None))  # noqa: B023
            other = microseconds(lambda i: x @ weights[i % SETS].T)  # noqa: B023
            rate = 2 * columns * dims / ours[1] / 1e6
            print(
                f"{columns:>8} {dims:>6} {rows:>5} {ours[0]:>9.1f} {ours[1]:>6.1f} {rate:>6.2f} {other[0]:>9.1f} "
                f"{other[1]:>6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
