"""A: reusing a conversation must not double peak memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import speculative_generate_step
from problems_driving import Shown, Stock, active, ask, cold, peak_over, watched, words
from shapes import llama_model


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
            row.append(int(mx.argmax(model(mx.array([row[-1:]]), cache=own)[:, -1])))
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
        prompt = mx.array(np.asarray(tokens))
        found = speculative_generate_step(
            prompt, model, draft, prompt_cache=layers, max_tokens=24, prefill_step_size=256
        )
        return [int(t) for t, _, _ in found]

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
        "speculative decoding, target's and draft's KV leased together, same answer: peak / what both occupy after it",
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
