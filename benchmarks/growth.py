"""What leases, decode steps and evictions cost as more is stored, and how long the cache's lock is held at a stretch.

    python benchmarks/growth.py [--only decode,lease,evict,lock,copy,grow]

Costs are CPU time of the calling thread on a tiny model, so that the bookkeeping shows. Exits with 1 if a target is
missed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma3_text, llama
from rich.console import Console
from rich.table import Table

from onefold.cache.memory.lock import CacheLock, Work
from onefold.cache.memory.segment import Slab

VOCAB = 8192
FEW, MANY = 10, 5000
LEAVES = 800
DEVICE = mx.default_device()


@dataclass
class Row:
    what: str
    small: str
    large: str
    figure: str
    target: str
    met: bool


def plain(layers: int = 2, heads: int = 2, head_dim: int = 16) -> nn.Module:
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama", hidden_size=32, num_hidden_layers=layers, intermediate_size=32, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=head_dim, rms_norm_eps=1e-5, vocab_size=VOCAB,
    )  # fmt: skip
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def windowed() -> nn.Module:
    mx.random.seed(0)
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text", hidden_size=32, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCAB, sliding_window=64, sliding_window_pattern=2,
    )  # fmt: skip
    model = gemma3_text.Model(args)
    mx.eval(model.parameters())
    return model


class Conversations:
    """A cache and a model, and prompts that nobody has asked before."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model = model
        self.cache = onefold.PrefixCache(model, "200GB", **settings)
        self._random = np.random.default_rng(0)

    def words(self, n: int) -> np.ndarray:
        """A prompt that has nothing but its first token in common with others, and not that with those of `fill`."""
        found = self._random.integers(1, VOCAB, n).astype(np.int32)
        found[0] = 0
        return found

    def store(self, tokens: np.ndarray) -> None:
        lease = self.cache.lease(tokens)
        mx.eval(self.model(mx.array(lease.rest)[None], cache=lease.layers))
        lease.commit(lease.tokens)

    def fill(self, n: int, prefix: np.ndarray | None = None) -> None:
        for i in range(n):
            tail = self.words(12)
            tail[0] = 1 + i % (VOCAB - 1)
            tail[1] = 1 + i // (VOCAB - 1)
            self.store(tail if prefix is None else np.concatenate([prefix, tail]))


def cpu(run: Callable[[], object], times: int) -> float:
    """Milliseconds of this thread, the median."""
    gc.disable()
    taken = []
    for _ in range(times):
        began = time.thread_time()
        run()
        taken.append((time.thread_time() - began) * 1e3)
    gc.enable()
    return statistics.median(taken)


def ratio(what: str, small: float, large: float, most: float, sizes: tuple[int, int]) -> Row:
    found = large / small
    return Row(
        what,
        f"{small:.3f} ms at {sizes[0]:,}",
        f"{large:.3f} ms at {sizes[1]:,}",
        f"{found:.2f} x",
        f"<= {most} x",
        found <= most,
    )


def beside(small: Callable[[], object], large: Callable[[], object], times: int) -> tuple[float, float]:
    """The median of each, taken in turn, so that whatever else the machine does falls on both."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        taken[0].append(cpu(small, 1))
        taken[1].append(cpu(large, 1))
    return statistics.median(taken[0]), statistics.median(taken[1])


def bench_decode() -> list[Row]:
    """A decode step, a lease and a commit beside few and many conversations."""
    model = plain()
    talks = Conversations(model), Conversations(model)
    for talk, n in zip(talks, (FEW, MANY), strict=True):
        talk.fill(n)
    leases = [talk.cache.lease(talk.words(40)) for talk in talks]
    for lease in leases:
        mx.eval(model(mx.array(lease.rest)[None], cache=lease.layers))

    def step(lease: onefold.Lease) -> Callable[[], object]:
        return lambda: mx.eval(model(mx.array([[5]]), cache=lease.layers))

    def store(talk: Conversations) -> Callable[[], object]:
        return lambda: talk.store(talk.words(40))

    def open_and_cancel(talk: Conversations) -> Callable[[], object]:
        return lambda: talk.cache.lease(talk.words(40)).cancel()

    gc.collect()
    gc.freeze()
    found = {"decode step": beside(step(leases[0]), step(leases[1]), 400)}
    found["lease and cancel"] = beside(open_and_cancel(talks[0]), open_and_cancel(talks[1]), 300)
    found["lease, prefill and commit"] = beside(store(talks[0]), store(talks[1]), 100)
    gc.unfreeze()
    for talk in talks:
        talk.cache.close()
    return [ratio(what, few, many, 1.1, (FEW, MANY)) for what, (few, many) in found.items()]


def bench_lease() -> list[Row]:
    """A lease on a prefix that one and many conversations branch off from."""
    rows = []
    for name, model in (("plain model", plain()), ("model with windows", windowed())):
        runs, caches = [], []
        for n in (1, MANY):
            talk = Conversations(model)
            prefix = talk.words(40)
            talk.fill(n, prefix)
            asked = np.concatenate([prefix, [VOCAB - 1, VOCAB - 1]]).astype(np.int32)
            runs.append(lambda talk=talk, asked=asked: talk.cache.lease(asked).cancel())
            caches.append(talk.cache)
        gc.collect()
        gc.freeze()
        rows.append(ratio(f"lease at a node with branches, {name}", *beside(runs[0], runs[1], 300), 1.2, (1, MANY)))
        gc.unfreeze()
        for cache in caches:
            cache.close()
    return rows


def bench_evict() -> list[Row]:
    """Giving up a number of leaves and ten times as many."""
    rows = []
    for name in ("shrink", "set_budget", "clear"):
        taken = []
        for n in (LEAVES, 10 * LEAVES):
            talk = Conversations(plain())
            talk.fill(n)
            assert talk.cache.stats().nodes == n
            ways: dict[str, Callable[[], object]] = {
                "shrink": partial(talk.cache.inventory.shrink, 0),
                "set_budget": partial(talk.cache.set_budget, 200_000),
                "clear": talk.cache.clear,
            }
            gc.collect()
            taken.append(cpu(ways[name], 1))
            left = talk.cache.stats().nodes
            assert left <= n // 20, f"{left} nodes of {n} are left after {name}"
            talk.cache.close()
        rows.append(ratio(f"{name}: leaves given up", taken[0], taken[1], 12, (LEAVES, 10 * LEAVES)))
    return rows


class Timed:
    """Stands in for the outer part of a cache's lock, and notes how long it is held at a stretch."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._lock, self._depth, self._since = lock, 0, 0.0
        self.longest = 0.0

    def acquire(self, blocking: bool = True) -> bool:
        if not self._lock.acquire(blocking):
            return False
        self._depth += 1
        if self._depth == 1:
            self._since = time.perf_counter()
        return True

    def release(self) -> None:
        if self._depth == 1:
            self.longest = max(self.longest, time.perf_counter() - self._since)
        self._depth -= 1
        self._lock.release()


def watched(cache: onefold.PrefixCache) -> Timed:
    lock: CacheLock = cache.state.lock
    lock._outer = Timed(lock._outer)  # type: ignore[assignment]
    return lock._outer  # type: ignore[return-value]


def bench_lock() -> list[Row]:
    """The longest that the lock is held at a stretch, by what has most to do."""
    rows = []
    for name in ("set_budget", "shrink", "clear", "requests"):
        talk = Conversations(plain())
        talk.fill(10 * LEAVES)
        lock = watched(talk.cache)
        gc.collect()
        gc.disable()
        if name == "requests":
            held = talk.cache.stats().used_bytes
            talk.cache.set_budget(held)
            lock.longest = 0.0
            talk.fill(200, talk.words(3))
        elif name == "set_budget":
            talk.cache.set_budget(200_000)
        elif name == "shrink":
            talk.cache.inventory.shrink(0)
        else:
            talk.cache.clear()
        gc.enable()
        most = lock.longest * 1e3
        what, size = f"lock held at a stretch: {name}", f"{10 * LEAVES:,} leaves"
        rows.append(Row(what, "", size, f"{most:.1f} ms", "<= 20 ms", most <= 20))
        talk.cache.close()
    return rows


def bench_copy() -> list[Row]:
    """The longest that the lock is held while a large buffer is copied, beside what one layer of it takes."""
    layers, tokens = 12, 8192
    model = plain(layers, heads=8, head_dim=128)
    rows = []
    with onefold.PrefixCache(model, "16GB") as cache:
        said = np.random.default_rng(0).integers(1, VOCAB, tokens).astype(np.int32)
        with cache.lease(said) as lease:
            for chunk in lease.chunks(512):
                mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
        lock = watched(cache)
        for name, run in (
            ("cut to half", lambda: cache.inventory.forget(said, tokens // 2)),
            ("made to grow", lambda: cache.lease(said).cancel()),
        ):
            lock.longest = 0.0
            began = time.perf_counter()
            run()
            whole, most = (time.perf_counter() - began) * 1e3, lock.longest * 1e3
            target = max(20.0, 3 * whole / layers)  # one layer, and the first touches memory that nobody had
            size = f"{whole:.0f} ms in all, {layers} layers"
            what = f"lock held at a stretch: a buffer of {tokens:,} tokens, {name}"
            rows.append(Row(what, "", size, f"{most:.1f} ms", f"<= {target:.0f} ms", most <= target))
    return rows


def bench_grow() -> list[Row]:
    """Bytes copied to grow a buffer, and what a conversation at rest holds, against its tokens."""
    model, rng = plain(layers=8), random.Random(0)
    with onefold.PrefixCache(model, "1GB") as cache:
        prompt = [rng.randrange(1, VOCAB) for _ in range(1000)]
        copied = [0]
        rewriting_to = Slab.rewriting_to

        def counted(slab: Slab, ranges: list[tuple[int, int]], capacity: int) -> Work[None]:
            copied[0] += sum(hi - lo for lo, hi in ranges)
            return rewriting_to(slab, ranges, capacity)

        Slab.rewriting_to = counted  # type: ignore[method-assign, assignment]
        try:
            with cache.lease(prompt) as lease:
                mx.eval(model(mx.array(lease.rest)[None], cache=lease.layers))
                for _ in range(4000):
                    mx.eval(model(mx.array([[5]]), cache=lease.layers))
                lease.commit(prompt + [5] * 4000)
        finally:
            Slab.rewriting_to = rewriting_to  # type: ignore[method-assign]
        per_token = copied[0] / 4000
        rest = []
        for n in (50, 200, 700, 3000):
            cache.clear()
            tokens = prompt[:n] if n <= 1000 else prompt * 3
            with cache.lease(tokens) as lease:
                mx.eval(model(mx.array(lease.rest)[None], cache=lease.layers))
                lease.commit(tokens)
            stats = cache.stats()
            rest.append(stats.bytes["stored"] / (stats.stored_tokens * stats.token_bytes))
    return [
        Row("tokens copied per token decoded, 1,000 to 5,000", "", "", f"{per_token:.1f}", "<= 9", per_token <= 9),
        Row("held at rest / bytes of the tokens (50 to 3,000 tokens)", "", "", f"{max(rest):.2f} x", "<= 1.25 x",
            max(rest) <= 1.25),
    ]  # fmt: skip


BENCHES = {
    "decode": bench_decode,
    "lease": bench_lease,
    "evict": bench_evict,
    "lock": bench_lock,
    "copy": bench_copy,
    "grow": bench_grow,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(BENCHES), help="comma-separated: " + ", ".join(BENCHES))
    asked = parser.parse_args().only.split(",")
    rows = [row for name in asked for row in BENCHES[name]()]
    table = Table(title=f"Growth ({DEVICE})", title_justify="left")
    for column in ("what", "small", "large", "figure", "target", "met"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.what, row.small, row.large, row.figure, row.target, "yes" if row.met else "NO")
    Console(width=140).print(table)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
