"""Formats of stored KV on a GPU: bytes, peaks and speed, on a model of Llama-8B's shape with random weights in bf16.

    python benchmarks/gpu_kv.py [--tokens 4096 32768] [--formats 16 8 4 ...] [--rows 8] [--rounds 7]

Of each format and length: bytes of KV a token as measured when a prompt is stored; the peak of KV and scratch during
its prefill (chunks of 2,048) beyond the weights; the peak of a next turn beyond what is stored; milliseconds of a step
of one row, and of several rows on that prefix. In parentheses: the speed, compared with that of the first format. All
formats are measured in turn, round after round.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import onefold

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step

sys.path.insert(0, str(Path(__file__).parent))
from shapes import llama_model

from onefold.cache.model.formats.names import NAMES

STEPS = 24
"""Of each format in a round."""


def settle() -> int:
    gc.collect()
    mx.clear_cache()
    mx.synchronize()
    mx.reset_peak_memory()
    return int(mx.get_active_memory())


def steps(step: Any, n: int) -> float:
    """Returns the median of milliseconds of some steps, as a server decodes: the next is built while the device
    works."""
    took, y = [], None
    for _ in range(n):
        begun = time.perf_counter()
        following = step(y)
        mx.async_eval(following)
        if y is not None:
            y.tolist()
            took.append(time.perf_counter() - begun)
        y = following
    mx.eval(y)
    return 1e3 * statistics.median(took)


def sampled(batch: Any, first: list[int]) -> Any:
    """Returns what decodes the likeliest token of each row of a batch."""
    last = mx.array(first)
    return lambda y: mx.argmax(batch.step(last if y is None else y), axis=-1)


class Measured:
    """One format at one length: a stored prompt, and rows that continue it."""

    def __init__(self, model: Any, name: str, tokens: int, rows: int, reserve: int) -> None:
        self.name = name
        self.times: tuple[list[float], list[float]] = ([], [])
        prompt = [(i * 31 + i * i * 7) % 120_000 for i in range(tokens)]
        weights = settle()
        self.cache = cache = onefold.PrefixCache(model, "60GB", kv=name)
        with cache.lease([1, 2, 3]) as lease:
            cache.batch([lease])  # compiles the kernels
            lease.cancel()
        begun = time.perf_counter()
        with cache.lease(prompt, reserve_tokens=64) as lease:
            options: dict[str, Any] = {"max_tokens": 1, "prefill_step_size": 2048}
            list(generate_step(mx.array(lease.rest), model, prompt_cache=lease.layers, **options))
            took, peak = time.perf_counter() - begun, mx.get_peak_memory() - weights
            lease.commit(prompt)
        stored = settle() - weights
        with cache.lease([*prompt, *range(1, 33)], reserve_tokens=128) as lease:
            list(generate_step(mx.array(lease.rest), model, max_tokens=4, prompt_cache=lease.layers))
            turn = (mx.get_peak_memory() - weights) / stored
            lease.cancel()
        self.figures = [f"{stored / tokens:,.0f}", f"{peak / 1e9:.3f}", f"{tokens / took:,.0f}", f"{turn:.3f}"]
        self.leases = [cache.lease([*prompt, 1000 + i, 1, 2, 3, i], reserve_tokens=reserve) for i in range(rows + 1)]
        for lease in self.leases:
            mx.eval(model(mx.array(lease.rest[:-1])[None], cache=lease.layers))
        last = [int(lease.tokens[-1]) for lease in self.leases]
        alone, several = cache.batch(self.leases[:1]), cache.batch(self.leases[1:])
        self._steps = sampled(alone, last[:1]), sampled(several, last[1:])

    def run(self, n: int, *, warm: bool) -> None:
        for step, times in zip(self._steps, self.times, strict=True):
            found = steps(step, n)
            if not warm:
                times.append(found)

    def close(self) -> None:
        for lease in self.leases:
            lease.cancel()
        self.cache.check()
        self.cache.close()


def table(found: list[Measured], tokens: int) -> None:
    """Prints a row for each format. Ratios are medians over rounds in which all formats were measured in turn."""
    for one in found:
        speed = []
        for i, times in enumerate(one.times):
            ratio = statistics.median(a / b for a, b in zip(found[0].times[i], times, strict=True))
            speed.append(f"{statistics.median(times):.2f} ({ratio:.3f})")
        print(f"| {tokens:,} | {one.name} | {' | '.join([*one.figures, *speed])} |", flush=True)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--formats", nargs="+", default=list(NAMES))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args(given)
    shape: dict[str, Any] = {"hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocab": 128_256}
    model = llama_model(layers=options.layers, dtype=mx.bfloat16, **shape)
    names = "tokens, format, bytes a token, prefill peak GB, prefill tokens/s, next turn, ms of a row, ms of rows"
    print(f"{mx.default_device()}, {options.layers} layers\n| {names.replace(', ', ' | ')} |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for tokens in options.tokens:
        found: list[Measured] = []
        for name in options.formats:
            try:
                found.append(Measured(model, name, tokens, options.rows, (options.rounds + 1) * STEPS + 8))
            except (RuntimeError, onefold.OnefoldError) as error:
                print(f"| {tokens:,} | {name} | {type(error).__name__}: {error} |", flush=True)
        for i in range(options.rounds + 1):
            for one in found:
                one.run(STEPS, warm=i == 0)
        table(found, tokens)
        for one in found:
            one.close()


if __name__ == "__main__":
    main()
