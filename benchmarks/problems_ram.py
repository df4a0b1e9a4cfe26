"""B1 to B4: what a conversation takes in memory, with a disk and without."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
from problems_driving import (
    NONE,
    Shown,
    Stock,
    active,
    address,
    ask,
    cold,
    generate,
    held_bytes,
    known_tokens,
    on_disk,
    peak_over,
    run,
    slab_addresses,
    words,
)
from shapes import hybrid_model, llama_model

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


class Packed(NamedTuple):
    """What a format showed: its share of plain KV, and peaks as multiples of the entry."""

    share: float
    continued: float
    shared: float
    ok: bool


def packed(model: nn.Module, layers: int, kv: str) -> Packed:
    turn, base = words(8, 1), active()
    with onefold.PrefixCache(model, "1GB", kv=kv) as cache:

        def kinds() -> set[mx.Dtype]:
            return {layer[0].dtype for slab in cache.state.store.slabs for layer in slab.layers if layer}

        _, known = ask(cache, model, words(700))
        seen = kinds()
        peak = peak_over(lambda: ask(cache, model, known + turn)) - base
        entry, hit = active() - base, cache.stats().tokens_cached == len(known)
        seen |= kinds()
        plain = layers * 2 * 2 * 128 * 4 * len(known)
        two = [cache.lease([*known, *turn, i]) for i in (1, 2)]
        shared = peak_over(lambda: [run(model, x) for x in two]) - base
        shared -= held_bytes(cache) - entry  # their own tails
        seen |= kinds()
        for lease in two:
            lease.cancel()
        cache.check()
    # one layer may be decoded at a time, and what was looked up of it, in 32 bits
    ok = seen == {mx.uint32} and hit and max(peak, shared) < entry + 3 * plain / layers
    return Packed(entry / plain, peak / entry, shared / entry, ok)


def b3_quantised() -> Shown:
    layers, turn = 32, words(8, 1)
    model = llama_model(layers=layers)
    found = {kv: packed(model, layers, kv) for kv in ("8", "4", "turbo4", "turbo3")}
    base = active()
    stock = Stock(model, kv_bits=8)
    stock_known = stock.ask(words(700))
    stock_peak = peak_over(lambda: stock.ask(stock_known + turn)) - base
    stock_ratio = stock_peak / (active() - base)
    shares = ", ".join(f"kv={kv} ({x.share:.0%})" for kv, x in found.items())
    return Shown(
        f"{shares} of plain KV, codes packed at commit, when continued and when shared: peak / the entry, continued "
        "and shared",
        "; ".join(f"{kv}: {x.continued:.2f}x, {x.shared:.2f}x" for kv, x in found.items()),
        f"8: {stock_ratio:.2f}x",
        all(x.ok for x in found.values()),
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
        base = active()
        with onefold.PrefixCache(model, "256MB", min_checkpoint_tokens=16) as cache:
            for end in ends:
                right = ask(cache, model, end[:-24], 24)[1] == end and right
            n_bytes += active() - base
            for prompt, answer in zip(prompts, expected, strict=True):
                lease, told = ask(cache, model, prompt, 6)
                right = right and told[len(prompt) :] == answer and lease.cached > 0
                asked, reused = asked + lease.matched, reused + lease.cached
            cache.check()
        with tempfile.TemporaryDirectory() as folder:
            with on_disk(model, folder, "256MB", min_checkpoint_tokens=16) as cache:
                for end in ends:
                    ask(cache, model, end[:-24], 24)
            for prompt, answer in zip(prompts, expected, strict=True):  # a restart before each
                with on_disk(model, folder, "256MB", min_checkpoint_tokens=16) as cache:
                    lease, told = ask(cache, model, prompt, 6)
                    right = right and told[len(prompt) :] == answer and lease.cached == lease.restored > 0
                    from_disk += lease.restored
                    cache.check()
    return Shown(
        "sliding-window and gated-delta-net models go on, walk back a turn and into an answer, same answers: "
        "tokens put back / known, bytes held; with a restart before each request, from disk",
        f"{reused / asked:.0%}, {n_bytes / 1e6:.1f} MB; {from_disk / asked:.0%}",
        f"{stock_reused / asked:.0%}, {stock_bytes / 1e6:.1f} MB",
        right and min(reused, from_disk) / asked > 0.9,
    )
