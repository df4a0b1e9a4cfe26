"""The problems that Onefold is there to solve, each shown on a small model, mlx-lm's own figure beside it.

    make problems              # or: python benchmarks/problems.py [--only A1,B4,...]

docs/problems.md has a row for each. The models have random weights in shapes where KV outweighs activations;
what is measured is MLX's own count of memory, less the weights, and the tokens that come out.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import LRUPromptCache, RotatingKVCache, make_prompt_cache
from rich.console import Console
from rich.table import Table
from shapes import gemma_model, hybrid_model, llama_model

from onefold.cache.memory.device import memory_bytes
from onefold.cache.memory.tree import as_tokens
from onefold.cache.model.kinds.base import Snapshot
from onefold.cache.model.kinds.recurrent import RecurrentLayer
from onefold.cache.model.kinds.rotating import RotatingLayer
from onefold.cache.tiers.disk.pace import Pace

ROOT = Path(__file__).resolve().parent.parent
NONE = "—"
T = TypeVar("T")


@dataclass(frozen=True)
class Shown:
    what: str
    figure: str
    stock: str
    ok: bool


# -- driving ------------------------------------------------------------------------------------------


def words(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 120, n).tolist()


def active() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())


def watched(run: Callable[[], T]) -> tuple[int, T]:
    """The highest that MLX's active memory stood during `run`, weights included, and what came out."""
    active()
    mx.reset_peak_memory()
    out = run()
    return int(mx.get_peak_memory()), out


def peak_over(run: Callable[[], object]) -> int:
    return watched(run)[0]


def generate(model: nn.Module, prompt: Any, layers: list[Any], n: int, step: int = 256) -> list[int]:
    prompt = mx.array(np.asarray(prompt))
    found = generate_step(prompt, model, max_tokens=n, prompt_cache=layers, prefill_step_size=step)
    return [token for token, _ in found]


def cold(model: nn.Module, tokens: list[int], n: int) -> list[int]:
    return generate(model, tokens, make_prompt_cache(model), n)


def ask(
    cache: onefold.PrefixCache, model: nn.Module, tokens: list[int], n: int = 4, step: int = 256
) -> tuple[onefold.Lease, list[int]]:
    """One request: lease, generate, commit. The lease, and the conversation as it stands then."""
    with cache.lease(tokens) as lease:
        out = generate(model, lease.rest, lease.layers, n, step)
        lease.commit(tokens + out)
    return lease, tokens + out


class Stock:
    """The same request as mlx-lm serves it: fetch a copy, generate, insert."""

    def __init__(self, *models: nn.Module, max_bytes: int = 1 << 63, kv_bits: int | None = None) -> None:
        self.models = models
        self.lru = LRUPromptCache(max_size=1000, max_bytes=max_bytes)
        self.kv_bits = kv_bits
        self.reused = 0

    def fetch(self, tokens: list[int]) -> tuple[list[Any], list[int]]:
        layers, rest = self.lru.fetch_nearest_cache("m", tokens)
        self.reused = len(tokens) - len(rest)
        if layers is None:
            layers = [c for m in self.models for c in make_prompt_cache(m)]
            if self.kv_bits:
                layers = [c.to_quantized(group_size=64, bits=self.kv_bits) for c in layers]
        return layers, rest

    def ask(self, tokens: list[int], n: int = 4, step: int = 256) -> list[int]:
        layers, rest = self.fetch(tokens)
        known = tokens + generate(self.models[0], rest, layers, n, step)
        self.lru.insert_cache("m", known, layers)
        return known


def run(model: nn.Module, lease: onefold.Lease) -> list[float]:
    """The rest of a lease in one forward; its last logits."""
    logits = model(mx.array(lease.rest)[None], cache=lease.layers)[0, -1]
    mx.eval(logits, [c.state for c in lease.layers])
    return logits.tolist()  # type: ignore[no-any-return]


def held_bytes(cache: onefold.PrefixCache) -> int:
    found = cache.stats().bytes
    return found["live"] + found["stored"] + found["checkpoint"]


def agree(cache: onefold.PrefixCache, base: int) -> bool:
    """Whether the books are MLX's own count, but for what is too small to have an entry."""
    return abs(held_bytes(cache) - (active() - base)) <= 0.001 * held_bytes(cache)


def as_asked() -> None:
    """From here until the cache is closed a buffer has the size that was asked for. One from MLX's pool may be up to
    two pages larger, and which ones are there is chance."""
    mx.set_cache_limit(0)


def known_tokens(cache: onefold.PrefixCache, tokens: list[int]) -> int:
    """How much of a conversation the tree still knows, without a request."""
    return int(cache.state.nodes.tree(("", cache._format)).match(as_tokens(tokens)).matched)


def address(array: mx.array) -> int:
    """Where an array's buffer lies (floats only: what numpy can view)."""
    return int(np.asarray(array).__array_interface__["data"][0])


def slab_addresses(cache: onefold.PrefixCache) -> set[int]:
    return {address(a) for slab in cache.state.store.slabs for layer in slab.layers if layer for a in layer}


def on_disk(model: nn.Module, folder: str, budget: int | str, **options: Any) -> onefold.PrefixCache:
    """A cache with this folder as its disk. That computing may be quicker than reading is left out: these models
    compute in no time."""
    cache = onefold.PrefixCache(model, budget, disk=folder, disk_budget="4GB", **options)
    assert cache._disk is not None
    cache._disk.reading.prefill_pace.estimate = lambda units: None  # type: ignore[method-assign]
    return cache


def record_files(folder: str, what: str = "") -> list[Path]:
    return sorted(p for p in Path(folder).glob("*/*.safetensors") if what in p.name)


def tokens_in(folder: str) -> int:
    """The tokens of all records there, as their headers have them."""
    found = 0
    for path in record_files(folder):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found += int(header["__metadata__"]["tokens"])
    return found


def flip(path: Path) -> None:
    """Damage a byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 0x10
    path.write_bytes(data)


# -- A. reuse doubles peak memory ---------------------------------------------------------------------


def a1_move() -> Shown:
    model, first, turn = llama_model(layers=24), words(1000), words(16, 1)
    base = active()
    with onefold.PrefixCache(model, "2GB") as cache:
        _, known = ask(cache, model, first, 8)
        found: list[onefold.Lease] = []
        peak = peak_over(lambda: found.append(ask(cache, model, known + turn, 32)[0])) - base
        ratio = peak / (active() - base)
        moved = cache.stats().moves == 1 and found[0].cached == len(known)
        cache.check()
    stock = Stock(model)
    stock.ask(first, 8)
    stock_peak = peak_over(lambda: stock.ask(known + turn, 32)) - base
    stock_ratio = stock_peak / (active() - base)
    return Shown(
        "a 1,008-token conversation continued in place: peak over the turn / what it occupies after it",
        f"{ratio:.2f}x",
        f"{stock_ratio:.2f}x",
        moved and ratio < 1.1,
    )


def decode(model: nn.Module, layers: list[list[Any]], rests: list[Any], n: int) -> list[list[int]]:
    """Several requests at once, a token of each in turn."""
    for rest, own in zip(rests, layers, strict=True):
        mx.eval(model(mx.array(np.asarray(rest[:-1]))[None], cache=own), [c.state for c in own])
    told = [[int(rest[-1])] for rest in rests]
    for _ in range(n):
        for row, own in zip(told, layers, strict=True):
            row.append(int(mx.argmax(model(mx.array([row[-1:]]), cache=own)[:, -1]).item()))
    return [row[1:] for row in told]


def a2_share() -> Shown:
    model, prefix = llama_model(layers=24), words(1000)
    prompts = [[*prefix, *words(8, i)] for i in (1, 2)]
    base, answers, expected = active(), list[list[int]](), list[list[int]]()
    with onefold.PrefixCache(model, "2GB") as cache:
        ask(cache, model, prefix, 1)
        entry = active() - base

        def ours() -> None:
            leases = [cache.lease(p) for p in prompts]
            assert all(lease.cached == len(prefix) for lease in leases)
            answers.extend(decode(model, [x.layers for x in leases], [x.rest for x in leases], 8))
            for lease in leases:
                lease.cancel()

        extra = peak_over(ours) - base - entry
        cache.check()
    stock = Stock(model)
    stock.ask(prefix, 1)
    stock_entry = active() - base

    def theirs() -> None:
        found = [stock.fetch(p) for p in prompts]
        expected.extend(decode(model, [layers for layers, _ in found], [rest for _, rest in found], 8))

    stock_extra = peak_over(theirs) - base - stock_entry
    tails = 2 * 256 / len(prefix)  # a buffer of 256 tokens each, for their own tokens
    ratio = extra / entry
    return Shown(
        "two requests decode on one 1,000-token prefix at once, answers as mlx-lm's: extra peak / the prefix "
        f"(two tails of 256 tokens are {tails:.2f})",
        f"{ratio:.2f}x",
        f"{stock_extra / stock_entry:.2f}x",
        answers == expected and ratio < tails + 0.1,
    )


def a3_draft() -> Shown:
    model, draft = llama_model(layers=20), llama_model(layers=4, seed=1)
    prompt, turn = words(800), words(16, 1)

    def speculate(tokens: Any, layers: list[Any]) -> list[int]:
        prompt, options = mx.array(np.asarray(tokens)), {"max_tokens": 24, "prefill_step_size": 256}
        found = speculative_generate_step(prompt, model, draft, prompt_cache=layers, **options)
        return [t for t, _, _ in found]

    base = active()
    answers: list[int] = []
    with onefold.PrefixCache(model, "2GB", draft_model=draft) as cache:

        def ours(tokens: list[int]) -> list[int]:
            with cache.lease(tokens) as lease:
                answers[:] = speculate(lease.rest, lease.layers)
                known = (tokens + answers)[: lease.offset]
                lease.commit(known)
            return known

        known = ours(prompt)
        peak = peak_over(lambda: ours(known + turn)) - base
        ratio, stats = peak / (active() - base), cache.stats()
        cache.check()
    right = answers == cold(model, known + turn, 24)

    stock = Stock(model, draft)

    def theirs(tokens: list[int]) -> None:
        layers, rest = stock.fetch(tokens)
        speculate(rest, layers)
        stock.lru.insert_cache("m", tokens[: layers[0].offset], layers)

    theirs(prompt)
    stock_peak = peak_over(lambda: theirs(prompt + turn)) - base
    stock_ratio = stock_peak / (active() - base)
    return Shown(
        "speculative decoding, target's and draft's KV leased together, same answer: peak / what both occupy "
        "after it",
        f"{ratio:.2f}x",
        f"{stock_ratio:.2f}x",
        right and stats.tokens_cached == len(known) and ratio < 1.1,
    )


def a4_budget() -> Shown:
    model, budget = llama_model(layers=8), 40_000_000
    turns = [words(64, i) for i in range(60)]
    base, tops, stock_tops, whole, entry = active(), [0], [0], 0, 0
    with onefold.PrefixCache(model, budget) as cache:
        known, done = ask(cache, model, turns[0])[1], 1
        for turn in turns[1:]:
            try:
                top, (lease, longer) = watched(partial(ask, cache, model, known + turn))
            except onefold.BudgetError:
                break
            tops.append(top - base)
            whole, known, done = whole + (lease.cached == len(known)), longer, done + 1
            entry = cache.stats().bytes["stored"]
        with cache.lease([*known, 1]) as lease:
            kept = lease.cached == len(known)
        stats = cache.stats()
        cache.check()
    stock, known = Stock(model, max_bytes=budget), []
    for turn in turns[:done]:
        top, known = watched(partial(stock.ask, known + turn))
        stock_tops.append(top - base)
    top = max(tops)
    return Shown(
        f"one conversation grows to {entry / budget:.0%} of a 40 MB limit, {whole} of {done - 1} turns whole "
        "hits, then refused and kept: peak / limit",
        f"{top / budget:.2f}x",
        f"{max(stock_tops) / budget:.2f}x",
        whole == done - 1 < 59 and kept and max(stats.peak_bytes, top) <= budget and entry > budget / 2,
    )


def a5_reserve() -> Shown:
    model, limit = llama_model(layers=8), 16_000_000
    refused = allocations = 0
    with onefold.PrefixCache(model, limit) as cache:
        known = ask(cache, model, words(200))[1]
        allocate = cache.state.store.allocate

        def counted(*args: Any) -> mx.array:
            nonlocal allocations
            allocations += 1
            return allocate(*args)

        cache.state.store.allocate = counted
        untouched = True
        for prompt in (words(1_000_000, 5), [*known[:150], *words(1_000_000, 5)]):  # a new one, and a branch
            before = active()
            mx.reset_peak_memory()
            try:
                cache.lease(prompt)
            except onefold.BudgetError as error:
                refused += error.needed_bytes > error.available_bytes
            allocations += max(int(mx.get_peak_memory()), active()) > before
            untouched = untouched and active() == before
        untouched = untouched and allocations == 0

        def failing(*_: Any) -> mx.array:
            raise MemoryError("injected")

        cache.state.store.allocate = failing
        survived = False
        try:
            ask(cache, model, words(200, 1))
        except onefold.BudgetError:
            survived = True
        cache.state.store.allocate = allocate
        cache.check()
        lease, _ = ask(cache, model, [*known, 1, 2])
        again = lease.cached == len(known)
    base = active()
    stock = Stock(model, max_bytes=limit)
    stock_peak = peak_over(lambda: stock.ask(words(2000))) - base
    return Shown(
        "requests that cannot fit are refused, a new one and a branch; an allocation made to fail costs that "
        "request only: refusals that allocated (mlx-lm: peak / limit)",
        f"{allocations}",
        f"{stock_peak / limit:.1f}x, allowed",
        bool(refused == 2 and untouched and survived and again),
    )


# -- B. RAM usage ---------------------------------------------------------------------------------------

_heard: Counter[str] | None = None
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _heard is None:
        return
    if event == "open":
        mode, flags = args[1], args[2]
        by_mode = isinstance(mode, str) and bool(set(mode) & set("wax+"))
        if by_mode or (isinstance(flags, int) and flags & _WRITES):
            _heard["writes"] += 1
    elif event in ("os.mkdir", "_thread.start_new_thread", "subprocess.Popen", "socket.connect"):
        _heard[event] += 1


@contextmanager
def heard() -> Iterator[Counter[str]]:
    """Count what the interpreter does to the world: files opened for writing, folders, threads, processes."""
    global _heard
    if not getattr(_hear, "added", False):
        sys.addaudithook(_hear)
        _hear.added = True  # type: ignore[attr-defined]
    _heard = Counter()
    try:
        yield _heard
    finally:
        _heard = None


def b1_ram_only() -> Shown:
    model, here = llama_model(layers=8), os.getcwd()
    prompts = [words(200, i) for i in range(12)]
    make = onefold.PrefixCache  # imported before anybody listens
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            threads = threading.active_count()
            with heard() as did, make(model, 24_000_000) as cache:
                told = [ask(cache, model, p)[1] for p in prompts]
                stats, first = cache.stats(), known_tokens(cache, told[0])
                cache.check()
            left = os.listdir(folder)
        finally:
            os.chdir(here)
    quiet = not did and not left and threading.active_count() == threads
    gone = stats.discarded_tokens == stats.evicted_tokens > 0 and first == 0 and stats.disk.mode == "off"
    with tempfile.TemporaryDirectory() as folder, on_disk(model, folder, 24_000_000) as cache:
        for p in prompts:
            ask(cache, model, p)
        spilled = cache.stats()
        back = [ask(cache, model, [*t, 1], 1)[0].cached for t in told]
        then = cache.stats()
        cache.check()
    kept = spilled.evicted_tokens > 0 == then.discarded_tokens and back == [len(t) for t in told]
    return Shown(
        f"12 conversations, {stats.evicted_tokens:,} tokens evicted, all discarded: files, folders, threads and "
        f"processes made. The same with a disk: {spilled.evicted_tokens:,} evicted, {sum(back):,} of "
        f"{sum(map(len, told)):,} there when asked for again ({then.tokens_from_disk:,} from disk), discarded",
        f"{sum(did.values()) + len(left)}; {then.discarded_tokens}",
        NONE,
        bool(quiet and gone and kept and then.tokens_from_disk > 0),
    )


def a_hit(cache: onefold.PrefixCache, model: nn.Module, known: list[int]) -> tuple[int, int, int, int]:
    """A hit in memory: device bytes that it allocated, the most Python bytes at a time, buffers at the same address
    after the turn, of how many."""
    before, active_before = slab_addresses(cache), active()
    tracemalloc.start()
    mx.reset_peak_memory()
    lease = cache.lease([*known, 1, 2, 3])
    python_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    fresh = max(int(mx.get_peak_memory()), active()) - active_before
    assert (lease.cached, lease.restored) == (len(known), 0)
    run(model, lease)
    lease.commit([*known, 1, 2, 3])
    cache.check()
    return fresh, python_bytes, len(before & slab_addresses(cache)), len(before)


def b2_arrays() -> Shown:
    model = llama_model(layers=16)
    base = active()
    with onefold.PrefixCache(model, "1GB") as cache:
        _, known = ask(cache, model, words(1000))
        entry = active() - base
        fresh, python_bytes, same, buffers = a_hit(cache, model, known)
    with tempfile.TemporaryDirectory() as folder:
        with on_disk(model, folder, "1GB", disk_mode="through") as cache:
            ask(cache, model, words(1000))
            flushed = cache.flush()
            beside = a_hit(cache, model, known)
        with on_disk(model, folder, "1GB") as cache:
            before = active()
            tracemalloc.start()
            mx.reset_peak_memory()
            lease = cache.lease([*known, 1, 2, 3, 4])
            restore_python = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            restore_peak = int(mx.get_peak_memory()) - before
            held, read_into = held_bytes(cache), slab_addresses(cache)
            run(model, lease)
            lease.commit([*known, 1, 2, 3, 4])
            used = slab_addresses(cache) == read_into
            restored = lease.restored == lease.cached == len(known) + 3
            cache.check()
    stock = Stock(model)
    stock_known = stock.ask(words(1000))
    stock_before = {address(a) for c in stock.fetch(stock_known)[0] for a in (c.keys, c.values)}
    layers, rest = stock.fetch([*stock_known, 1, 2, 3])
    generate(model, rest, layers, 1)
    stock_same = len(stock_before & {address(a) for c in layers for a in (c.keys, c.values)})
    small = max(python_bytes, beside[1], restore_python) < entry / 100
    return Shown(
        f"a hit on {entry / 1e6:.0f} MB: device bytes it allocated, Python bytes it made, buffers at the same "
        f"address after the turn; beside a disk; after a restart: peak of the restore / the entry, Python bytes",
        f"{fresh} B, {python_bytes / 1e3:.1f} kB, {same} of {buffers}; {beside[0]} B, {beside[1] / 1e3:.1f} kB, "
        f"{beside[2]} of {beside[3]}; {restore_peak / held:.2f}x, {restore_python / 1e3:.1f} kB",
        f"{stock_same} of {len(stock_before)}",
        fresh == 0 == beside[0] and same == buffers and beside[2] == beside[3] and small
        and flushed and restored and used and restore_peak <= held * 1.01,
    )  # fmt: skip


def b3_quantised() -> Shown:
    layers, turn = 12, words(8, 1)
    model = llama_model(layers=layers)
    base = active()
    with onefold.PrefixCache(model, "1GB", kv="8") as cache:

        def packed() -> set[mx.Dtype]:
            return {layer[0].dtype for slab in cache.state.store.slabs for layer in slab.layers if layer}

        _, known = ask(cache, model, words(700))
        kinds = packed()
        peak = peak_over(lambda: ask(cache, model, known + turn)) - base
        entry, hit = active() - base, cache.stats().tokens_cached == len(known)
        kinds |= packed()
        plain = layers * 2 * 2 * 128 * 4 * len(known)
        two = [cache.lease([*known, *turn, i]) for i in (1, 2)]
        shared = peak_over(lambda: [run(model, x) for x in two]) - base
        shared -= held_bytes(cache) - entry  # their own tails
        kinds |= packed()
        for lease in two:
            lease.cancel()
        cache.check()
    stock = Stock(model, kv_bits=8)
    stock_known = stock.ask(words(700))
    stock_peak = peak_over(lambda: stock.ask(stock_known + turn)) - base
    stock_ratio = stock_peak / (active() - base)
    return Shown(
        f"kv=8 ({entry / plain:.0%} of plain KV), codes packed at commit, when continued and when shared: "
        "peak / the entry, continued and shared",
        f"{peak / entry:.2f}x, {shared / entry:.2f}x",
        f"{stock_ratio:.2f}x",
        kinds == {mx.uint32} and hit and max(peak, shared) < 1.25 * entry,
    )


def b4_real_state() -> Shown:
    asked = reused = stock_reused = n_bytes = stock_bytes = from_disk = 0
    right = True
    for model in (llama_model(layers=4, window=64), hybrid_model(layers=4)):
        base = active()
        stock = Stock(model)
        known, ends = words(120), list[list[int]]()
        for i in range(3):
            ends.append(stock.ask(known, 24))
            known = ends[-1] + words(40, i)
        # ask the last turn otherwise; go on; break the last answer off half-way
        prompts = [[*ends[1], *words(40, 8)], known, [*ends[2][:-12], *words(20, 9)]]
        for prompt in prompts:
            stock.fetch(prompt)
            stock_reused += stock.reused
        stock_bytes += active() - base
        del stock
        expected = [cold(model, prompt, 6) for prompt in prompts]
        base, at = active(), list[int]()
        with onefold.PrefixCache(model, "256MB", min_checkpoint_tokens=16) as cache:
            for end in ends:
                right = ask(cache, model, end[:-24], 24)[1] == end and right
            n_bytes += active() - base
            for prompt, answer in zip(prompts, expected, strict=True):
                lease, told = ask(cache, model, prompt, 6)
                right = right and told[len(prompt) :] == answer and lease.cached > 0
                asked, reused = asked + lease.matched, reused + lease.cached
                at.append(lease.cached)
            cache.check()
        with tempfile.TemporaryDirectory() as folder:
            with on_disk(model, folder, "256MB", min_checkpoint_tokens=16) as cache:
                for end in ends:
                    ask(cache, model, end[:-24], 24)
            for prompt, answer, cached in zip(prompts, expected, at, strict=True):  # a restart before each
                with on_disk(model, folder, "256MB", min_checkpoint_tokens=16) as cache:
                    lease, told = ask(cache, model, prompt, 6)
                    right = right and told[len(prompt) :] == answer and lease.cached == lease.restored == cached
                    from_disk += lease.restored
                    cache.check()
    return Shown(
        "sliding-window and gated-delta-net models go on, walk back a turn and into an answer, same answers: "
        "tokens put back / known, bytes held; with a restart before each request, from disk",
        f"{reused / asked:.0%}, {n_bytes / 1e6:.1f} MB; {from_disk / asked:.0%}",
        f"{stock_reused / asked:.0%}, {stock_bytes / 1e6:.1f} MB",
        right and reused / asked > 0.9,
    )


def open_snapshots() -> int:
    gc.collect()
    return sum(isinstance(x, Snapshot) and not x.closed for x in gc.get_objects())


def b5_snapshots() -> Shown:
    model, leaves, turns = hybrid_model(layers=4), 3, 8
    base, before = active(), open_snapshots()
    with onefold.PrefixCache(model, "256MB") as cache:
        for i in range(20):  # too short to be worth a state
            ask(cache, model, words(12, i), 2)
        none, flat = cache.stats().checkpoints, active() - base
        known = words(100)
        for i in range(turns):
            known = ask(cache, model, known, 4)[1] + words(70, i)
        stats = cache.stats()
        real, counted = active() - base, held_bytes(cache)
        alive = open_snapshots() - before
        cache.check()
        with cache.lease([*known, 1]) as lease:  # dropped in the middle of a turn
            generate(model, lease.rest, lease.layers, 3)
        after_cancel = open_snapshots() - before - leaves * cache.stats().checkpoints
    at_close = open_snapshots() - before
    seen, on_path, counted_files = set[str](), 0, True
    with tempfile.TemporaryDirectory() as folder:
        with on_disk(model, folder, "256MB", disk_mode="through") as cache:
            known = words(100)
            for i in range(turns):
                known = ask(cache, model, known, 4)[1] + words(70, i)
                cache.flush()
                points = {p.name for p in record_files(folder, "point")}
                seen, on_path = seen | points, max(on_path, len(points))
                counted_files = counted_files and len(record_files(folder)) == cache.stats().disk.records
        left = len(record_files(folder, "point"))
    stock, known = Stock(model), words(100)
    for i in range(turns):
        known = stock.ask(known, 4) + words(70, i)
    states = sum(type(c).__name__ == "ArraysCache" for entry in _entries(stock.lru) for c in entry)
    ok = (
        none == 0 and flat < 4096 and stats.checkpoints <= 4 and alive == leaves * stats.checkpoints
        and after_cancel == 0 and at_close == 0 and abs(real - counted) <= 0.01 * real
        and 0 < left <= on_path <= 4 < len(seen) and counted_files
    )  # fmt: skip
    return Shown(
        f"hybrid model, {turns} turns: layer states held ({stats.checkpoints} checkpoints of {leaves}); "
        f"{none} after 20 requests too short to resume; {at_close} after close. Written through, files of "
        f"checkpoints seen over the turns ({len(seen)}), at most at a time",
        f"{alive}; {on_path}",
        f"{states}",
        ok,
    )


def _entries(lru: LRUPromptCache) -> list[list[Any]]:
    kept = [key for queue in lru._lru._lrus.values() for key in queue]
    return [lru._trie.get(model, tokens).prompt_cache for model, tokens in kept]


def damaged(model: nn.Module, what: str) -> tuple[bool, int]:
    """The first range or the last checkpoint of a conversation is damaged on disk, then asked for. Whether all was
    right, and the tokens that were prefilled."""
    with tempfile.TemporaryDirectory() as folder:
        with on_disk(model, folder, "256MB") as cache:
            _, known = ask(cache, model, words(170), 70)
        prompt = [*known, *words(30, 1)]
        expected, base = cold(model, prompt, 4), active()
        flip(record_files(folder, what)[0 if what == "range" else -1])

        with on_disk(model, folder, "256MB") as cache, listening() as said:
            as_asked()
            lease = cache.lease(prompt)
            right = generate(model, lease.rest, lease.layers, 4) == expected
            lease.discard()  # what is left now is what the failed restore left
            cost, stats = len(prompt) - lease.cached, cache.stats()
            right = right and cost > len(prompt) - len(known) and len(said) == 1 and stats.bytes["live"] == 0
            rejected, orphans = stats.disk.rejected_records, stats.reasons.get("disk: orphan", 0)
            right = right and stats.reasons.get("disk: checksum") == 1 and rejected == 1 + orphans
            if what == "range":  # all that there was hung on it
                right = right and active() - base == held_bytes(cache) == 0
            else:  # the KV was right, and is memory's now
                right = right and agree(cache, base) and stats.stored_tokens == len(known)
            _, told = ask(cache, model, prompt, 4)
            right = right and told[len(prompt) :] == expected and agree(cache, base)
            again, _ = ask(cache, model, [*told, *words(30, 2)])
            right = right and again.cached > len(known) and cache.stats().disk.rejected_records == rejected
            cache.check()
    return right, cost


def b6_failed_restore() -> Shown:
    costs, right, said = list[int](), True, 0
    sliding = llama_model(layers=4, window=64)
    for model, kind in ((hybrid_model(layers=4), RecurrentLayer), (sliding, RotatingLayer)):
        base = active()
        with onefold.PrefixCache(model, "256MB") as cache:
            as_asked()
            _, known = ask(cache, model, words(170), 70)
            prompt = [*known, *words(30, 1)]
            expected, restore = cold(model, prompt, 4), kind.restore
            kind.restore = lambda *_: False  # type: ignore[method-assign, assignment]
            try:
                with listening():
                    lease, told = ask(cache, model, prompt, 4)
            finally:
                kind.restore = restore  # type: ignore[method-assign]
            said += bool(lease.reason) and cache.stats().reasons.get(lease.reason, 0) > 0
            right = right and told[len(prompt) :] == expected and agree(cache, base)
            costs.append(len(prompt) - lease.cached)
            cache.check()
            right = right and cache.stats().open_leases == 0 and cache.stats().bytes["live"] == 0
            again, _ = ask(cache, model, [*known, *words(30, 2)])
            right = right and again.cached > 0
    from_disk = [damaged(m, what) for m in (hybrid_model(layers=4), sliding) for what in ("range", "point")]
    return Shown(
        "a state that cannot be put back (injected; window and recurrent): same answer, reason counted: tokens "
        "prefilled again; a byte of a record on disk flipped (range and checkpoint of both): the same",
        f"{max(costs)} of {len(prompt)}; {max(cost for _, cost in from_disk)} of {len(prompt)}",
        NONE,
        right and said == 2 and all(ok for ok, _ in from_disk),
    )


@dataclass
class Outside:
    """What a caller counts itself."""

    asked: int = 0
    hits: int = 0
    from_memory: int = 0
    from_disk: int = 0
    computed: int = 0
    worst: float = 0.0


def mixed(cache: onefold.PrefixCache, model: nn.Module, base: int) -> tuple[Outside, list[list[int]]]:
    """30 mixed requests under a short budget, counted from outside."""
    rng, own, told = np.random.default_rng(7), Outside(), list[list[int]]()
    for i in range(30):
        fresh = not told or rng.random() < 0.5
        prompt = words(150, 100 + i) if fresh else [*told.pop(0), *words(20, i)]
        lease, known = ask(cache, model, prompt)
        told.append(known)
        own.asked += len(prompt)
        own.hits += lease.cached > 0
        own.from_memory += lease.cached - lease.restored
        own.from_disk += lease.restored
        own.computed += len(known) - lease.cached
        own.worst = max(own.worst, abs(held_bytes(cache) - (active() - base)) / held_bytes(cache))
    return own, told


def b7_statistics() -> Shown:
    model = llama_model(layers=8)
    base, ok, worst, figures = active(), True, 0.0, list[str]()
    for mode in ("off", "back", "through"):
        with tempfile.TemporaryDirectory() as folder:
            options = {} if mode == "off" else {"disk_mode": mode}
            make = partial(onefold.PrefixCache, model) if mode == "off" else partial(on_disk, model, folder)
            with make(40_000_000, **options) as cache:
                own, told = mixed(cache, model, base)
                flushed, stats = cache.flush(), cache.stats()
                skipped, room = [*told[0], 1], 0
                if cache._disk is not None:  # reading is made out to be slow: left on disk, and counted
                    cache.clear(disk=False)
                    on_it = cache.durable(told[0])
                    cache._disk.reading.prefill_pace = Pace()
                    cache._disk.reading.read_pace.took(10.0, 1)
                    cache._disk.reading.prefill_pace.took(1e-9, 1)
                    ok = ok and ask(cache, model, skipped, 1)[0].cached == 0 < on_it
                    ok = ok and cache.stats().disk.skipped_tokens == on_it
                try:
                    cache.lease(words(1_000_000))
                except onefold.BudgetError:
                    room = cache.stats().reasons.get("no room", 0)
                cache.check()
                ok = ok and flushed and room == 1
                cache.flush()
                disk, in_files = cache.stats().disk, tokens_in(folder)
                sizes = [p.stat().st_size for p in record_files(folder)]
                ok = ok and disk.spilled_tokens == in_files and disk.mode == mode
                ok = ok and disk.written_bytes == sum(sizes) and disk.records == len(sizes)
                ok = ok and disk.used_bytes == sum(-(-n // 4096) * 4096 for n in sizes)  # in blocks
        found = (stats.tokens_requested, stats.hits, stats.tokens_cached, stats.tokens_from_disk)
        ok = ok and found == (own.asked, own.hits, own.from_memory + own.from_disk, own.from_disk)
        # what came into memory is there or was evicted; what was evicted and is not on disk is discarded
        ok = ok and own.computed + own.from_disk == stats.stored_tokens + stats.evicted_tokens
        ok = ok and stats.disk.restored_tokens == own.from_disk
        ok = ok and stats.discarded_tokens == (stats.evicted_tokens if mode == "off" else 0)
        ok = ok and stats.evicted_tokens > 0 and own.worst <= 0.01
        worst = max(worst, own.worst)
        figures.append(
            f"{mode}: {own.hits} hits, {own.from_memory:,} + {own.from_disk:,} tokens, "
            f"{stats.evicted_tokens:,} evicted, {stats.discarded_tokens:,} discarded, "
            f"{stats.disk.spilled_tokens:,} written"
        )
    return Shown(
        "30 mixed requests under a short budget, without a disk and in both modes, as counted from outside and in "
        "the files (" + "; ".join(figures) + "): bytes against MLX's own count: worst",
        f"{worst:.2%} off",
        NONE,
        ok,
    )


@dataclass(frozen=True)
class Turn:
    active: int
    """MLX's count after the turn, less the weights."""
    books: int
    """The same by the cache's own count."""
    peak: int
    prefilled: int
    """Tokens of the prompt that were computed."""
    new: int
    """Tokens of the prompt that nobody had ever seen."""


def round_robin(
    model: nn.Module,
    cache: onefold.PrefixCache | Stock,
    *,
    conversations: int,
    turns: int,
    first: int,
    question: int,
    answer: int,
    step: int = 64,
) -> tuple[list[Turn], list[list[int]]]:
    """Conversations that grow, a turn of each after the other. What every turn took, and all that was said."""
    base, said, found = active(), [list[int]() for _ in range(conversations)], list[Turn]()
    for i in range(conversations * turns):
        which = i % conversations
        new = words(question if said[which] else first, 1000 + i)
        prompt = [*said[which], *new]
        if isinstance(cache, Stock):
            peak, said[which] = watched(partial(cache.ask, prompt, answer, step))
            now, reused = active() - base, cache.reused
            books = now
        else:
            peak, (lease, said[which]) = watched(partial(ask, cache, model, prompt, answer, step))
            if not agree(cache, base):  # a checkpoint that went is held until it is written
                cache.flush(10)
            now, books, reused = active() - base, held_bytes(cache), lease.cached
        found.append(Turn(now, books, peak - base, len(prompt) - reused, len(new)))
    return found, said


def b8_over_turns() -> Shown:
    model, budget = gemma_model(), 16_000_000
    shape = {"conversations": 4, "turns": 5, "first": 120, "question": 80, "answer": 12}
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for name, make in (("off", onefold.PrefixCache), ("on", partial(on_disk, folder=folder))):
            with make(model, budget=budget) as cache:
                runs[name] = round_robin(model, cache, **shape)
                cache.check()
    stock, theirs = round_robin(model, Stock(model, max_bytes=budget), **shape)
    right = runs["off"][1] == runs["on"][1] == theirs
    off, on = runs["off"][0], runs["on"][0]
    worst = max(abs(t.books - t.active) / t.active for t in [*off, *on])
    peaks = [max(t.peak for t in run) / budget for run in (off, on, stock)]
    computed = [sum(t.prefilled for t in run) for run in (off, on, stock)]
    new = sum(t.new for t in on)
    return Shown(
        f"gemma4 shape, 4 conversations of 5 turns under 16 MB, same answers, books {worst:.2%} off: highest peak / "
        f"budget, tokens computed ({new:,} were new), RAM-only; with a disk",
        f"{peaks[0]:.2f}x, {computed[0]:,}; {peaks[1]:.2f}x, {computed[1]:,}",
        f"{peaks[2]:.2f}x, {computed[2]:,}",
        right and max(peaks[:2]) <= 1 and worst <= 0.01 and computed[1] < computed[0],
    )


# -- C. unbounded growth --------------------------------------------------------------------------------


class ModelObserver(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """What Onefold logs, here instead of on the screen."""
    log, ears = logging.getLogger("onefold"), ModelObserver()
    log.addHandler(ears)
    propagate, log.propagate = log.propagate, False
    try:
        yield ears.said
    finally:
        log.removeHandler(ears)
        log.propagate = propagate


def c1_bound_everywhere() -> Shown:
    model, draft, bound = llama_model(layers=4), llama_model(layers=2, seed=1), 64
    per_token = 4 * 2 * 2 * 128 * 4
    live: list[float] = []
    options: dict[str, Any] = {"max_kv_size": bound, "keep": 4}
    with listening():
        with onefold.PrefixCache(model, "256MB", draft_model=draft, **options) as cache:
            lease = cache.lease(words(10))  # the draft's layers too
            leaves = [leaf for beat in lease.hold.watchers for leaf in beat.leaves]
            right = len(leaves) == 6 and all(leaf.bound == (bound, 4) for leaf in leaves)
        with onefold.PrefixCache(model, "256MB", **options) as cache:  # a batch
            prompts = [words(40, i) for i in range(3)]
            leases = [cache.lease(p) for p in prompts]
            for lease in leases:
                mx.eval(model(mx.array(lease.rest[:-1])[None], cache=lease.layers))
            y, batch = mx.array([p[-1] for p in prompts]), cache.batch(leases)
            for _ in range(60):
                y = mx.argmax(batch.step(y), axis=-1)
                mx.eval(y)
            live.append(cache.stats().bytes["live"] / 3 / per_token)
        base = active()
        with onefold.PrefixCache(model, "256MB", **options) as cache:  # one at a time, resumed
            known, fed = words(40), 0
            stock = [RotatingKVCache(bound, 4) for _ in model.layers]
            for i in range(6):
                expected = generate(model, known[fed:], stock, 60)
                with cache.lease(known) as lease:
                    out = generate(model, lease.rest, lease.layers, 60)
                    live.append(cache.stats().bytes["live"] / per_token)
                    lease.commit(known + out)
                right = right and out == expected
                fed, known = len(known) + 60, known + out + words(5, i)
            del stock
            kept = (active() - base) / per_token
    theirs = make_prompt_cache(model, max_kv_size=bound)  # it does not reach a model with a make_cache
    generate(model, known[:-5], theirs, 1)
    stock_held = sum(c.keys.nbytes + c.values.nbytes for c in theirs) / per_token
    checked = pytest_counts(["tests/test_structure.py"], r"factory").get("factory", Counter())
    return Shown(
        f"max_kv_size=64 for target, draft, batch and resumed turns, answers as a ring's "
        f"({checked['passed']} source checks for one factory): KV of a {len(known) - 5}-token conversation, "
        "in tokens, live and stored",
        f"{max(live):.0f}, {kept:.0f}",
        f"{stock_held:.0f}",
        right and max(live) <= bound + 1 and kept <= 4 * bound + 1 and set(checked) == {"passed"},
    )


def c2_off_unless_asked() -> Shown:
    model, off = llama_model(layers=4), True
    with listening() as said:
        for options in ({}, {"max_kv_size": 0}):
            with onefold.PrefixCache(model, "256MB", **options) as cache:
                known = ask(cache, model, words(100), 60)[1]
                off = off and known_tokens(cache, known) == 160 and "rotated" not in cache.stats().reasons
        off = off and not said
        with onefold.PrefixCache(model, "256MB", max_kv_size=64) as cache:
            ask(cache, model, words(40), 60)
            reported = cache.stats().reasons.get("rotated", 0)
    told = sum("max_kv_size=64" in line for line in said)
    return Shown(
        "off by default and at 0; when a conversation begins to rotate: times logged, times reported",
        f"{told}, {reported}",
        NONE,
        off and told == 1 and reported == 1,
    )


def c3_same_below() -> Shown:
    model = llama_model(layers=4)
    runs = []
    for bound in (None, 512):
        record: list[Any] = []
        with onefold.PrefixCache(model, "256MB", max_kv_size=bound) as cache:
            known, first = words(60), list[int]()
            for i in range(4):
                lease, known = ask(cache, model, known, 20)
                first = first or known
                record += [lease.cached, lease.matched, lease.reason, known]
                known = [*known, *words(10, i)]
            for prompt in ([*first, *words(9, 5)], known[:100], known):  # branch, rewind, repeat
                lease, told = ask(cache, model, prompt, 5)
                record += [lease.cached, lease.matched, lease.reason, told]
            two = [cache.lease([*known, i]) for i in (1, 2)]  # share
            record += [x.cached for x in two] + [run(model, x) for x in two]
            for lease in two:
                lease.cancel()
            stats = cache.stats()
            record += [stats.moves, stats.borrows, stats.nodes, stats.stored_tokens, stats.bytes["stored"]]
            cache.check()
        runs.append(record)
    same = sum(a == b for a, b in zip(*runs, strict=True))
    return Shown(
        "continue, branch, rewind, repeat, share below max_kv_size=512, against no bound: records that agree",
        f"{same} of {len(runs[0])}",
        NONE,
        runs[0] == runs[1],
    )


def c4_oldest_first() -> Shown:
    model = llama_model(layers=8)
    asked: list[tuple[int, int]] = []
    with onefold.PrefixCache(model, 40_000_000, high_water=1.0, low_water=1.0) as cache:
        making_room, ledger = cache.state.ledger.making_room, cache.state.ledger

        def counted(missing: int) -> Iterator[float]:
            before = ledger.used_bytes
            yield from making_room(missing)
            if before > ledger.used_bytes:
                asked.append((missing, before - ledger.used_bytes))

        ledger.making_room = counted  # type: ignore[assignment]
        told = [ask(cache, model, words(200, 0))[1]]
        busy = cache.lease([*told[0], 1])  # the oldest, but somebody is using it
        told += [ask(cache, model, words(200, i))[1] for i in range(1, 14)]
        kept = [known_tokens(cache, t) for t in told]
        busy_whole = kept.pop(0) == len(told[0])
        busy.cancel()
        cache.check()
    gone, whole = kept.count(0), sum(k == 204 for k in kept)
    in_order = kept == sorted(kept) and gone + whole >= len(kept) - 1 and gone > 0
    ratio = sum(f for _, f in asked) / max(1, sum(m for m, _ in asked))
    with onefold.PrefixCache(model, "80%") as cache:
        share = cache.stats().budget_bytes / memory_bytes()
    return Shown(
        f'{gone} of 13 idle conversations dropped, oldest first, the leased one spared ("80%" is {share:.0%} '
        "of memory): bytes freed / bytes missing",
        f"{ratio:.2f}x",
        NONE,
        busy_whole and in_order and 1 <= ratio < 1.5 and abs(share - 0.8) < 0.001,
    )


# -- D. the contract ------------------------------------------------------------------------------------


def pytest_counts(paths: list[str], pattern: str) -> dict[str, Counter[str]]:
    """Run tests; passed and failed by what `pattern` finds in their names."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *paths]
        subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    counts: dict[str, Counter[str]] = {}
    for case in cases:
        if (found := re.search(pattern, case.get("name", ""))) is not None:
            bad = any(child.tag in ("failure", "error") for child in case)
            counts.setdefault(found.group(0), Counter())["failed" if bad else "passed"] += 1
    return counts


_CONTRACT = {
    "D1": "snapshot: live state unchanged, None for nothing new, pins its own bytes",
    "D2": "restore(None, target): rewinds, or is refused and changes nothing",
    "D3": "restore(snapshot, target): clamps, or is refused; the write position comes back",
    "D4": "merge and split consume their inputs; what cannot split stays with the child",
    "D5": "rotating: growth, rotation, order of tokens, as in mlx-lm's own rings",
    "D6": "free releases everything, offset 0",
}


def contract(points: list[str]) -> dict[str, Shown]:
    counts = pytest_counts(["tests/test_kinds_contract.py"], r"(?<=^test_)d[1-6](?=_)")
    shown = {}
    for point in points:
        found = counts.get(point.lower(), Counter())
        total = found["passed"] + found["failed"]
        ok = total > 0 and not found["failed"]
        shown[point] = Shown(_CONTRACT[point], f"{found['passed']} of {total} tests", NONE, ok)
    return shown


# -- all of them ----------------------------------------------------------------------------------------

PROOFS: dict[str, Callable[[], Shown]] = {
    "A1": a1_move,
    "A2": a2_share,
    "A3": a3_draft,
    "A4": a4_budget,
    "A5": a5_reserve,
    "B1": b1_ram_only,
    "B2": b2_arrays,
    "B3": b3_quantised,
    "B4": b4_real_state,
    "B5": b5_snapshots,
    "B6": b6_failed_restore,
    "B7": b7_statistics,
    "B8": b8_over_turns,
    "C1": c1_bound_everywhere,
    "C2": c2_off_unless_asked,
    "C3": c3_same_below,
    "C4": c4_oldest_first,
}


def prove(name: str) -> Shown:
    """A proof that raises has failed; what it raised is the figure, and the others go on."""
    try:
        return PROOFS[name]()
    except Exception as error:
        return Shown(f"{type(error).__name__}: {error}"[:160], "raised", NONE, False)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", default="", help="comma-separated, such as A1,B4,D3")
    args = parser.parse_args()
    names = [*PROOFS, *_CONTRACT]
    chosen = [n.strip().upper() for n in args.only.split(",") if n.strip()] or names
    if unknown := [n for n in chosen if n not in names]:
        parser.error(f"no such problem: {', '.join(unknown)}")
    console = Console(width=150)
    title = f"Onefold {onefold.__version__}, MLX {mx.__version__}, {mx.default_device()}"
    table = Table(title=title, show_lines=True)
    for column in ("problem", "what was shown", "Onefold", "mlx-lm", ""):
        table.add_column(column, justify="right" if column in ("Onefold", "mlx-lm") else "left")
    failed = 0
    points = [n for n in chosen if n in _CONTRACT]
    with console.status("") as status:
        shown: dict[str, Shown] = {}
        for name in chosen:
            if name in PROOFS:
                status.update(name)
                shown[name] = prove(name)
        if points:
            status.update("D")
            shown |= contract(points)
    for name, row in shown.items():
        failed += not row.ok
        table.add_row(name, row.what, row.figure, row.stock, "ok" if row.ok else "[bold red]FAILED")
    console.print(table)
    console.print("Not yet: B3's TurboQuant half.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
