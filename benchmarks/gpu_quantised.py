"""A quantised layer on a GPU: rows of a decode step as they are, folded into one matrix, and folded and padded.

    python benchmarks/gpu_quantised.py [--dims 4096] [--rows 1 2 4 8 16 32]

Prints microseconds for each format of weights and number of rows: [rows, 1, dims], [1, rows, dims], and the latter
padded to eight rows. `onefold.cache.model.linear` does what is fastest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx

FORMATS = ((4, 64, "affine"), (8, 64, "affine"), (3, 64, "affine"), (6, 64, "affine"), (4, 32, "mxfp4"))


def microseconds(call: Callable[[], mx.array], times: int = 40) -> float:
    mx.eval(call())
    mx.eval(call())
    begun = time.perf_counter()
    mx.eval([call() for _ in range(times)])
    return 1e6 * (time.perf_counter() - begun) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    given = parser.parse_args()
    print(f"{'weights':>12} {'rows':>5} {'as they are':>12} {'folded':>8} {'padded':>8}")
    for bits, group, mode in FORMATS:
        weight = mx.random.normal((given.dims, given.dims)).astype(mx.bfloat16)
        packed = mx.quantize(weight, group_size=group, bits=bits, mode=mode)
        mx.eval(packed)
        for rows in given.rows:
            x = mx.random.normal((rows, 1, given.dims)).astype(mx.bfloat16)
            folded = x.reshape(1, rows, given.dims)
            mx.eval(x, folded)

            def product(array: mx.array) -> mx.array:
                return mx.quantized_matmul(array, *packed, transpose=True, group_size=group, bits=bits, mode=mode)  # noqa: B023

            def padded() -> mx.array:
                return product(mx.pad(folded, [(0, 0), (0, max(0, 8 - rows)), (0, 0)]))[:, :rows].reshape(rows, 1, -1)  # noqa: B023

            took = [microseconds(lambda a=a: product(a)) for a in (x, folded)]  # type: ignore[misc]
            took.append(microseconds(padded))
            print(f"{mode:>8} {bits:>3} {rows:>5} {took[0]:>12.0f} {took[1]:>8.0f} {took[2]:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
