"""Our prompt cache in the place of mlx-lm's, on a GPU: Llama-8B shape, random weights, bf16.

    python benchmarks/gpu_dropin.py [--tokens 32768] [--rows 8] [--layers 32]

What continuing one long conversation costs, alone and in a batch of one, and then several rows on that conversation
through mlx-lm's own BatchGenerator: ms/step and the peak over what is stored. Both classes in one run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm import server
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache

from onefold import mlx_lm as onefold_mlx_lm

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from batching import KEY, Loop
from shapes import llama_model


def settle() -> int:
    gc.collect()
    mx.clear_cache()
    mx.synchronize()
    mx.reset_peak_memory()
    return int(mx.get_active_memory())


def alone(cache: Any, model: Any, prefix: list[int]) -> str:
    """As the server serves a request that it does not batch."""
    layers, rest = cache.fetch_nearest_cache(KEY, prefix)
    if layers is None:
        layers = server.make_prompt_cache(model)
    tokens = [*prefix, *(t for t, _ in generate_step(mx.array(rest), model, max_tokens=8, prompt_cache=layers))]
    cache.insert_cache(KEY, tokens, layers)
    del layers
    held, entry = settle(), cache.nbytes
    layers, rest = cache.fetch_nearest_cache(KEY, [*tokens, *range(1, 33)])
    took, peaks, answer, start = [], [], [], time.perf_counter()
    for t, _ in generate_step(mx.array(rest), model, max_tokens=64, prompt_cache=layers):
        answer.append(t)
        peaks.append((entry + mx.get_peak_memory() - held) / entry)
        took.append(time.perf_counter() - start)
        start = time.perf_counter()
    cache.insert_cache(KEY, [*tokens, *range(1, 33), *answer], layers)
    speed = 1e3 * statistics.median(took[8:])
    peak = f"{peaks[0]:.2f} x {entry / 1e9:.2f} GB at the first token, {peaks[-1]:.2f} x at the 64th"
    return f"alone: {peak}, {speed:.2f} ms/token"


def batched(cache: Any, model: Any, prefix: list[int], rows: int) -> str:
    loop = Loop(model, cache, step=2048)
    ((answer,), _) = loop.serve([prefix], 8)
    held, entry = settle(), cache.nbytes
    uid, _ = loop.ask([*prefix, *answer, *range(1, 33)], 64)
    while not loop.answers[uid]:
        loop.step()
    said = [f"one row: {(entry + mx.get_peak_memory() - held) / entry:.2f} x at the first token"]
    loop.run()
    said.append(f"{(entry + mx.get_peak_memory() - held) / entry:.2f} x at the 64th")
    held = settle()
    for i in range(rows):
        loop.ask([*prefix, 100 + i, 1, 2, 3, 4, 5, i], 64)
    took = []
    while loop._pending:
        start = time.perf_counter()
        loop.step()
        took.append(time.perf_counter() - start)
    peak, held = mx.get_peak_memory() - held, settle() - held
    said.append(f"{rows} rows: {1e3 * statistics.median(took[12:-4]):.2f} ms/step, peak +{peak / 1e9:.2f} GB")
    said.append(f"held afterwards +{held / 1e9:.2f} GB, reported {cache.nbytes / 1e9:.2f} GB")
    return "; ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    wide = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336, "vocab": 128256}
    model = llama_model(layers=args.layers, dtype=mx.bfloat16, **wide)
    prefix = np.random.default_rng(0).integers(0, 100_000, args.tokens).tolist()
    table = []
    for name, module in (("onefold", onefold_mlx_lm), ("mlx-lm", mlx_lm_cache)):
        for measure, more in ((alone, ()), (batched, (args.rows,))):
            settle()
            cache = module.LRUPromptCache(max_size=32)
            table.append(f"{name:8} {measure(cache, model, prefix, *more)}")
            print(table[-1], flush=True)
            del cache
    print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
