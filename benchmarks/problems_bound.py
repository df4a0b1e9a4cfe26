"""C: memory that grows without bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from problems_driving import (
    NONE,
    Shown,
    active,
    ask,
    generate,
    known_tokens,
    listening,
    pytest_counts,
    run,
    words,
)
from shapes import llama_model

from onefold.cache.memory.device import memory_bytes


def c1_bound_everywhere() -> Shown:
    model, draft, bound = llama_model(layers=4), llama_model(layers=2, seed=1), 64
    per_token = 4 * 2 * 2 * 128 * 4
    live: list[float] = []
    options: dict[str, Any] = {"max_kv_size": bound, "keep": 4}
    with listening():
        with onefold.PrefixCache(model, "256MB", draft_model=draft, **options) as cache:
            lease = cache.lease(words(10))  # the draft's layers too
            leaves = [leaf for watcher in lease.hold.watchers for leaf in watcher.leaves]
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
        for bound in (None, 0):
            with onefold.PrefixCache(model, "256MB", max_kv_size=bound) as cache:
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
