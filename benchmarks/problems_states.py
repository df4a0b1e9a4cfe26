"""B5 and B6: the states of windows and recurrent layers, and restores that fail."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.nn as nn
from mlx_lm.models.cache import LRUPromptCache
from problems_driving import (
    NONE,
    Shown,
    Stock,
    active,
    agree,
    as_asked,
    ask,
    cold,
    flip,
    generate,
    held_bytes,
    listening,
    on_disk,
    record_files,
    words,
)
from shapes import hybrid_model, llama_model

from onefold.cache.memory.checkpoints import DISK_PER_PATH
from onefold.cache.model.kinds.base import Snapshot
from onefold.cache.model.kinds.recurrent import RecurrentLayer
from onefold.cache.model.kinds.rotating import RotatingLayer


def open_snapshots() -> int:
    gc.collect()
    return sum(isinstance(x, Snapshot) and not x.closed for x in gc.get_objects())


def b5_snapshots() -> Shown:
    model, leaves, turns = hybrid_model(layers=4), 3, 20
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
        none == 0 and flat < 4096 and stats.checkpoints <= 2 * turns and alive == leaves * stats.checkpoints
        and after_cancel == 0 and at_close == 0 and abs(real - counted) <= 0.01 * real
        and 0 < left <= on_path <= DISK_PER_PATH < len(seen) and counted_files
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
