"""What a decode step costs on the host beside mlx-lm's own caches: time to build it, and primitives of its graph.

    python benchmarks/overhead.py [--layers 16] [--prompts 40,600,2000] [--rows 8,32] [--steps 64] [--wall]

The model is tiny, so that the bookkeeping shows. A batch of distinct conversations, of which one leaves and another
joins every 16 steps, is compared with one padded forward on `BatchKVCache` of the same model and lengths; a lone lease
with a step on mlx-lm's own cache. Steps of both alternate. Time is that of the calling thread until the graph of a step
exists, as a median. A forward schedules itself otherwise, and its graph is gone before its primitives can be counted:
the script switches that off. With --wall, also the time of evaluated steps of a larger model. Exits with 1 if a target
is missed.
"""

from __future__ import annotations

import argparse
import gc
import io
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from rich.console import Console
from rich.table import Table

from onefold.cache.model import seam

VOCAB = 128
TURNOVER = 16
HOST, PRIMITIVES, LONE = 1.6, 1.3, 1.1
"""The most that Onefold may take, as multiples of mlx-lm's own."""
FEW_TOKENS = 40
"""The prompts for which primitives have a target."""

random = np.random.default_rng(0)


def words(n: int) -> list[int]:
    return random.integers(1, VOCAB, n).tolist()  # type: ignore[no-any-return]


def make_model(layers: int, hidden: int = 32, heads: int = 2, kv_heads: int = 1, dim: int = 16) -> llama.Model:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        rope_theta=1e4,
    )
    mx.random.seed(0)
    return llama.Model(args)


def primitives(out: mx.array) -> int:
    """Returns the number of primitives in the graph of an array that is not evaluated yet."""
    written = io.StringIO()
    mx.export_to_dot(written, out)
    return written.getvalue().count("shape=rectangle")


def fill(model: Any, caches: list[Any], rows: int, n: int) -> None:
    """Stores keys and values of `n` tokens without computing them."""
    args, dtype = model.args, model.layers[0].self_attn.k_proj.weight.dtype
    for cache in caches:
        new = mx.random.normal((rows, args.num_key_value_heads, n, args.head_dim)).astype(dtype)
        cache.update_and_fetch(new, new)
        mx.eval(cache.state)


class Rows:
    """A batch of Onefold's leases, of which one leaves and another joins every `TURNOVER` steps."""

    def __init__(self, model: Any, lengths: list[int]) -> None:
        self.model, self.lengths = model, lengths
        self.cache = onefold.PrefixCache(model, budget="8GB")
        self.leases = [self._lease(n) for n in lengths]
        self.batch = self.cache.batch(self.leases)
        self.steps = 0

    def _lease(self, n: int) -> onefold.Lease:
        lease = self.cache.lease(words(n))
        fill(self.model, lease.layers, 1, n)
        return lease

    def turn_over(self) -> None:
        """Replaces the first row if it is time, outside of what is measured."""
        self.steps += 1
        if self.steps % TURNOVER == 0:
            first = self.leases.pop(0)
            self.batch.remove(first)
            first.cancel()
            self.lengths.append(self.lengths.pop(0))
            self.leases.append(self._lease(self.lengths[-1]))
            self.batch.add(self.leases[-1])

    def step(self) -> mx.array:
        return self.batch.step([5] * len(self.leases))

    def close(self) -> None:
        for lease in self.leases:
            lease.cancel()
        self.cache.close()


class Padded:
    """mlx-lm's own batch of the same lengths."""

    def __init__(self, model: Any, lengths: list[int]) -> None:
        n, longest = len(lengths), max(lengths)
        self.model = model
        self.caches = [BatchKVCache([longest - k for k in lengths]) for _ in model.layers]
        fill(model, self.caches, n, longest)
        self.tokens = mx.array([[5]] * n)

    def step(self) -> mx.array:
        return self.model(self.tokens, cache=self.caches)  # type: ignore[no-any-return]


def alternate(
    one: Callable[[], mx.array], other: Callable[[], mx.array], steps: int, between: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """Returns the medians of the milliseconds in which each builds a step, in steps that alternate."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(steps + 8):
        between()
        for found, build in zip(times, (one, other), strict=True):
            began = time.thread_time()
            out = build()
            took = time.thread_time() - began
            mx.eval(out)
            if i >= 8:
                found.append(1e3 * took)
    return statistics.median(times[0]), statistics.median(times[1])


def batch_row(model: Any, n: int, prompt: int, steps: int) -> tuple[list[str], bool]:
    ours, stock = Rows(model, [prompt] * n), Padded(model, [prompt] * n)
    try:
        host = alternate(ours.step, stock.step, steps, ours.turn_over)
        counts = []
        for side in (ours, stock):
            out = side.step()
            counts.append(primitives(out))
            mx.eval(out)
    finally:
        ours.close()
    met = host[0] <= HOST * host[1] and (prompt > FEW_TOKENS or counts[0] <= PRIMITIVES * counts[1])
    cells = [f"{n} rows of {prompt}", f"{host[0]:.2f}", f"{host[1]:.2f}", f"{host[0] / host[1]:.2f}"]
    return [*cells, str(counts[0]), str(counts[1]), f"{counts[0] / counts[1]:.2f}", "yes" if met else "NO"], met


def lone_row(model: Any, prompt: int, steps: int) -> tuple[list[str], bool]:
    own = make_prompt_cache(model)
    fill(model, own, 1, prompt)
    with onefold.PrefixCache(model, budget="2GB") as cache, cache.lease(words(prompt)) as lease:
        fill(model, lease.layers, 1, prompt)
        one, other = lambda: model(mx.array([[5]]), cache=lease.layers), lambda: model(mx.array([[5]]), cache=own)
        host = alternate(one, other, 4 * steps)
        counts = []
        for build in (one, other):
            out = build()
            counts.append(primitives(out))
            mx.eval(out)
    met = host[0] <= LONE * host[1]
    cells = [f"a lone lease of {prompt}", f"{host[0]:.2f}", f"{host[1]:.2f}", f"{host[0] / host[1]:.2f}"]
    return [*cells, str(counts[0]), str(counts[1]), f"{counts[0] / counts[1]:.2f}", "yes" if met else "NO"], met


def wall_row(dtype: mx.Dtype, lengths: list[int], steps: int) -> list[str]:
    """Returns the median milliseconds of an evaluated step: Onefold's default, and mlx-lm's padded batch."""
    model = make_model(8, 1024, 8, 2, 128)
    model.set_dtype(dtype)
    ours, stock = Rows(model, lengths), Padded(model, lengths)
    found = []
    try:
        for side in (ours, stock):
            times = []
            for i in range(steps + 3):
                began = time.perf_counter()
                mx.eval(side.step())
                if i >= 3:
                    times.append(1e3 * (time.perf_counter() - began))
            found.append(statistics.median(times))
    finally:
        ours.close()
    kind = str(dtype).rpartition(".")[2]
    shown = str(lengths[0]) if len(set(lengths)) == 1 else f"{min(lengths)} to {max(lengths)}"
    ratio = f"{found[0] / found[1]:.2f}"
    return [f"{kind}, {len(lengths)} rows of {shown}", f"{found[0]:.1f}", f"{found[1]:.1f}", ratio]


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--prompts", type=numbers, default=[40, 600, 2000])
    parser.add_argument("--rows", type=numbers, default=[8, 32])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--wall", action="store_true")
    options = parser.parse_args()
    seam.schedule = lambda arrays: None
    console, model = Console(width=140), make_model(options.layers)
    mx.eval(model.parameters())
    table = Table(title=f"building a decode step, {options.layers} layers, {mx.default_device()}")
    for name in ("what", "host ms", "mlx-lm", "ratio", "primitives", "mlx-lm", "ratio", "met"):
        table.add_column(name)
    all_met = True
    for make in [lambda p=p: lone_row(model, p, options.steps) for p in options.prompts] + [
        lambda n=n, p=p: batch_row(model, n, p, options.steps) for n in options.rows for p in options.prompts
    ]:
        cells, met = make()
        table.add_row(*cells)
        all_met = all_met and met
        gc.collect()
    console.print(table)
    if options.wall:
        table = Table(title="an evaluated step: 8 layers, hidden 1,024, 8 heads of 128, 2 for keys")
        for name in ("what", "ms", "mlx-lm", "ratio"):
            table.add_column(name)
        for dtype in (mx.float32, mx.bfloat16):
            for n in options.rows:
                mixed = [(40, 600, 2000, 300)[i % 4] for i in range(n)]
                for lengths in [*([p] * n for p in options.prompts), mixed]:
                    table.add_row(*wall_row(dtype, lengths, 15))
                    gc.collect()
        console.print(table)
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
