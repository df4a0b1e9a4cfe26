"""Thousands of shapes on a GPU: does MLX's CUDA backend stop with "Cache thrashing"?

    python benchmarks/gpu_shapes.py [--seconds 25]

MLX counts the misses of its caches of attention plans and of graphs, and beyond twice their capacity raises for every
new shape from then on. Each row is a process of its own: what was varied, with MLX as it comes or with Onefold's
setting (`onefold/cuda.py`), how many distinct shapes ran, and the error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

CASES = ("attention", "lengths", "chunks", "rows", "pieces")
AS_IT_COMES = {
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "1",
    "MLX_CUDA_SDPA_CACHE_SIZE": "256",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "400",
}


def words(n: int, seed: int) -> list[int]:
    return [(i * 31 + seed * 17 + i * i) % 120 + 1 for i in range(n)]


def child(case: str, seconds: float) -> None:
    import onefold

    # isort: split
    import mlx.core as mx
    from shapes import llama_model

    def attention(i: int) -> None:
        q = mx.zeros((1, 8, 1 + i % 37, 128), mx.bfloat16)
        kv = mx.zeros((1, 2, 64 + i, 128), mx.bfloat16)
        mx.eval(mx.fast.scaled_dot_product_attention(q, kv, kv, scale=0.1))

    model = llama_model(layers=2, hidden=256, heads=8, kv_heads=2, dtype=mx.bfloat16)
    cache = onefold.PrefixCache(model, "20GB")

    def run(tokens: list[int], step: int, n: int = 2) -> None:
        with cache.lease(tokens) as lease:
            at = lease.cached
            while at < len(tokens):
                mx.eval(model(mx.array([tokens[at : at + step]]), cache=lease.layers))
                at += step
            for token in range(n):
                mx.eval(model(mx.array([[token]]), cache=lease.layers))
            lease.commit()

    def lengths(i: int) -> None:
        run(words(i + 2, i), 1 << 20)

    def chunks(i: int) -> None:
        run(words(3000, i), 16 + i % 2900)

    def pieces(i: int) -> None:
        base = words(200 + i, 1)
        with cache.lease([*base, 7]) as first:  # holds the prefix, so that the second reads it in pieces
            mx.eval(model(mx.array([first.rest.tolist()]), cache=first.layers))
            first.commit(close=False)
            run([*base, 7, *words(1 + i % 90, i)], 33 + i % 50)

    def rows(i: int) -> None:
        leases = [cache.lease(words(30 + (i * 7 + r * 13) % 500, i * 40 + r)) for r in range(1 + i % 33)]
        for lease in leases:
            mx.eval(model(mx.array([lease.tokens[:-1].tolist()]), cache=lease.layers))
        batch = cache.batch(leases)
        for _ in range(3):
            mx.eval(batch.step([int(lease.tokens[-1]) for lease in leases]))
        for lease in leases:
            lease.discard()

    work = {"attention": attention, "lengths": lengths, "chunks": chunks, "rows": rows, "pieces": pieces}[case]
    repeat(case, work, seconds, (RuntimeError, onefold.OnefoldError))


def repeat(case: str, work: Callable[[int], None], seconds: float, faults: tuple[type[Exception], ...]) -> None:
    """Runs `work` with 0, 1, 2, ... until the time is over or it fails, and prints how often it ran."""
    began, done, error = time.monotonic(), 0, ""
    while time.monotonic() - began < seconds and not error:
        try:
            work(done)
        except faults as raised:
            error = str(raised)
        else:
            done += 1
    print(f"{case:>10} {os.environ['MLX_ENABLE_CACHE_THRASHING_CHECK']:>12} {done:>7}  {error[:120]}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=25)
    options.add_argument("--child", default="")
    given = options.parse_args()
    if given.child:
        child(given.child, given.seconds)
        return
    print(f"{'varied':>10} {'check':>12} {'shapes':>7}  error")
    for case in CASES:
        for settings in (AS_IT_COMES, {}):
            env = os.environ | settings
            command = [sys.executable, __file__, "--child", case, "--seconds", str(given.seconds)]
            subprocess.run(command, env=env, check=False)


if __name__ == "__main__":
    main()
