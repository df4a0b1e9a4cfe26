"""B7 and B8: the statistics, compared with counts made from outside, and memory over turns."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.nn as nn
import numpy as np
from problems_driving import (
    NONE,
    Shown,
    Stock,
    active,
    agree,
    ask,
    held_bytes,
    on_disk,
    record_files,
    tokens_in,
    watched,
    words,
)
from shapes import gemma_model, llama_model

from onefold.cache.tiers.disk.tier import Disk
from onefold.cache.tiers.pace import Pace


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
                if isinstance(cache.parts.tier, Disk):  # reading is made out to be slow: left on disk, and counted
                    cache.clear(disk=False)
                    on_it = cache.durable(told[0])
                    cache.parts.tier.reading.prefill_pace = Pace()
                    cache.parts.tier.reading.read_pace.took(10.0, 1)
                    cache.parts.tier.reading.prefill_pace.took(1e-9, 1)
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
