"""Rows on one long prefix, on a GPU: Llama-8B shape, random weights, bf16.

    python benchmarks/gpu.py [--tokens 32768] [--rows 8] [--layers 32]

Prints ms/step and the peak over the prefix for 1 to 8 rows that share it, beside mlx-lm's BatchGenerator on the same
prompts; then what continuing one long conversation costs; then the facts about MLX on this device that the
attention relies on.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import onefold

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

sys.path.insert(0, str(Path(__file__).parent))
from shapes import llama_model


def settle() -> None:
    gc.collect()
    mx.clear_cache()
    mx.synchronize()


def steps(batch: onefold.Batch, y: mx.array, n: int = 120) -> tuple[float, mx.array]:
    """As a server decodes: the next step is built while the device works on this one."""
    took = []
    for i in range(n):
        start = time.perf_counter()
        following = mx.argmax(batch.step(y), axis=-1)
        mx.async_eval(following)
        y.tolist()
        y = following
        if i >= 8:
            took.append(time.perf_counter() - start)
    mx.eval(y)
    return 1e3 * statistics.median(took), y


def build_time(batch: onefold.Batch, y: mx.array) -> float:
    start = time.perf_counter()
    out = batch.step(y)
    took = 1e3 * (time.perf_counter() - start)
    mx.eval(out)
    return took


def ours(model: nn.Module, prefix: list[int], rows: int, table: list[str]) -> None:
    cache = onefold.PrefixCache(model, "60GB")
    t0 = time.perf_counter()
    with cache.lease(prefix) as lease:
        for _ in generate_step(
            mx.array(lease.rest), model, max_tokens=1, prompt_cache=lease.layers, prefill_step_size=2048
        ):
            pass
        lease.commit(prefix)
    table.append(f"prefill of {len(prefix)} tokens: {time.perf_counter() - t0:.2f} s")
    for n in [r for r in (1, 2, 4, 8, 16, 32) if r <= rows]:
        settle()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        leases = [cache.lease([*prefix, 1000 * n + i, 1, 2, 3, i]) for i in range(n)]
        for lease in leases:
            model(mx.array(lease.rest[:-1])[None], cache=lease.layers)
            mx.eval([c.state for c in lease.layers])
        first = mx.get_peak_memory() - held
        batch = cache.batch(leases)
        ms, _ = steps(batch, mx.array([int(x.tokens[-1]) for x in leases]))
        extra = mx.get_peak_memory() - held
        built = statistics.median(build_time(batch, mx.array([7] * n)) for _ in range(5))
        table.append(f"  (building a step takes {built:.2f} ms of Python)")
        line = f"ours: {n:2d} rows on {len(prefix)} tokens: {ms:6.2f} ms/step, +{extra / 1e9:.3f} GB peak"
        table.append(f"{line} (of which prefilling the tails +{first / 1e9:.3f})")
        for lease in leases:
            lease.cancel()
        cache.check()
    del leases, batch, lease
    stats = cache.stats()
    entry = stats.bytes["stored"]
    # continue it, alone
    settle()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    with cache.lease([*prefix, *range(1, 33)]) as lease:
        out = [t for t, _ in generate_step(mx.array(lease.rest), model, max_tokens=64, prompt_cache=lease.layers)]
        moved = len(lease.hold.track.pieces) == 1
        peak = mx.get_peak_memory() - held
        token, took = mx.array([[7]]), []
        for _ in range(40):
            start = time.perf_counter()
            mx.eval(model(token, cache=lease.layers))
            took.append(time.perf_counter() - start)
    line = f"ours: continue {entry / 1e9:.2f} GB by 32+64 tokens: peak +{peak / 1e9:.3f} GB = {1 + peak / entry:.3f} x"
    table.append(f"{line} (moved: {moved}), {1e3 * statistics.median(took[8:]):.2f} ms/token")
    del out
    cache.close()
    settle()


def stock(model: nn.Module, prefix: list[int], rows: int, table: list[str]) -> None:
    layers = make_prompt_cache(model)
    for _ in generate_step(mx.array(prefix), model, max_tokens=1, prompt_cache=layers):
        pass
    token, took = mx.array([[7]]), []
    for _ in range(40):
        start = time.perf_counter()
        mx.eval(model(token, cache=layers))
        took.append(time.perf_counter() - start)
    table.append(f"stock: lone decode: {1e3 * statistics.median(took[8:]):.2f} ms/token")
    for c in layers:
        c.trim(c.offset - len(prefix))
    entry = sum(c.nbytes for c in layers)
    lru = LRUPromptCache(max_size=32)
    lru.insert_cache("m", prefix, layers)
    del layers, c
    settle()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    got, rest = lru.fetch_nearest_cache("m", [*prefix, *range(1, 33)])
    for _ in generate_step(mx.array(rest), model, max_tokens=64, prompt_cache=got):
        pass
    peak = mx.get_peak_memory() - held
    table.append(f"stock: continue by 32+64 tokens: peak +{peak / 1e9:.3f} GB = {1 + peak / entry:.3f} x")
    del got
    settle()
    from mlx_lm.generate import BatchGenerator

    mx.reset_peak_memory()
    caches, rests = [], []
    for i in range(rows):
        c, r = lru.fetch_nearest_cache("m", [*prefix, 100 + i, i])
        caches.append(c)
        rests.append(r)
    generator = BatchGenerator(model, max_tokens=32)
    generator.insert(rests, caches=caches)
    del caches, c
    took = []
    for _ in range(24):
        start = time.perf_counter()
        generator.next()
        mx.synchronize()
        took.append(time.perf_counter() - start)
    ms, peak = 1e3 * statistics.median(took[8:]), mx.get_peak_memory() - held
    table.append(f"stock: {rows} rows, BatchGenerator: {ms:.2f} ms/step, peak +{peak / 1e9:.1f} GB")
    del generator
    settle()


def facts(table: list[str]) -> None:
    """What the attention relies on, on this device."""
    k = mx.random.normal((1, 8, 1024, 128)).astype(mx.bfloat16)
    v = mx.random.normal((1, 8, 1024, 128)).astype(mx.bfloat16)
    q = mx.random.normal((1, 32, 1, 128)).astype(mx.bfloat16)
    for lo, hi in ((0, 700), (0, 1024), (13, 700), (256, 768)):
        a = mx.fast.scaled_dot_product_attention(q, k[..., lo:hi, :], v[..., lo:hi, :], scale=0.088)
        b = mx.fast.scaled_dot_product_attention(
            q, mx.contiguous(k[..., lo:hi, :]), mx.contiguous(v[..., lo:hi, :]), scale=0.088
        )
        worst = mx.abs(a - b).max().item()
        table.append(f"fact: SDPA with one query on a slice [{lo}:{hi}) of 1024 differs from its copy by {worst:.1e}")
    big = mx.zeros((1, 8, 8192, 128), mx.bfloat16)
    mx.eval(big)
    settle()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(q.reshape(1, 8, 4, 128) @ big[..., :5000, :].swapaxes(-1, -2))
    extra, copied = (mx.get_peak_memory() - before) / 1e6, 5000 * 8 * 128 * 2 / 1e6
    table.append(f"fact: matmul on a slice of 8192: extra peak {extra:.2f} MB (a copy would be {copied:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--skip-stock", action="store_true")
    args = parser.parse_args()
    model = llama_model(
        layers=args.layers,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=128256,
        dtype=mx.bfloat16,
    )
    prefix = np.random.default_rng(0).integers(0, 100_000, args.tokens).tolist()
    table: list[str] = []
    try:
        facts(table)
        ours(model, prefix, args.rows, table)
        if not args.skip_stock:
            stock(model, prefix, args.rows, table)
    finally:
        print("\n".join(table))


if __name__ == "__main__":
    main()
