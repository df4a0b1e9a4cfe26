"""Room to grow, and how much of a budget one conversation can have."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from driving import forward
from mlx_lm.models import llama
from tiny import tiny

import onefold
from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.segment import Slab, Store
from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.memory.track import Track

SPEC = LayerSpec((ArraySpec(1, 4, mx.float32), ArraySpec(1, 4, mx.float32)))


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


@pytest.fixture(scope="module")
def heavy() -> Any:
    """KV outweighs activations: 131 kB a token in 16 layers."""
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=16, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-5, vocab_size=128,
    )  # fmt: skip
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def store(cache: onefold.PrefixCache, model: Any, tokens: list[int]) -> None:
    with cache.lease(tokens) as lease:
        for chunk in lease.chunks(512):
            mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
        mx.eval(model(mx.array([tokens[-1:]]), cache=lease.layers))
        lease.commit(tokens)


def copied_per_token(budget: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Tokens copied for each token that is written after the first 1,000, one at a time, up to 9,000."""
    copied = 0
    rewrite = Slab.rewrite

    def counted(slab: Slab, ranges: list[tuple[int, int]], capacity: int) -> None:
        nonlocal copied
        copied += sum(hi - lo for lo, hi in ranges)
        rewrite(slab, ranges, capacity)

    monkeypatch.setattr(Slab, "rewrite", counted)
    track = Track(Store([SPEC] * 4, Ledger(budget)))
    track.ensure(0, 1000)
    for i in range(1000, 9000):
        track.ensure(i, 1)
    assert track.whole
    return copied / 8000


def test_growing_copies_in_proportion_to_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copied_per_token(100_000_000, monkeypatch) <= 9


def test_where_bytes_are_short_a_buffer_grows_by_little() -> None:
    tokens = 4000
    store = Store([SPEC] * 4, Ledger(tokens * 4 * SPEC.token_bytes))
    track = Track(store)
    track.ensure(0, 3000)
    for i in range(3000, 3900):
        track.ensure(i, 1)
    assert track.end == 3900
    with pytest.raises(onefold.BudgetError):
        for i in range(3900, 4100):
            track.ensure(i, 1)
    assert track.end >= 3990


@pytest.mark.parametrize("n", [60, 150, 900])
def test_at_rest_a_conversation_holds_little_more_than_its_tokens(n: int) -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "256MB") as cache:
        tokens = words(n)
        for stop in range(n // 3, n + 1, n // 3):
            store(cache, model, tokens[:stop])
        stats = cache.stats()
        assert stats.bytes["stored"] <= 1.25 * stats.stored_tokens * stats.token_bytes
        cache.check()


def test_a_turn_that_its_room_is_enough_for_copies_nothing() -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "256MB") as cache:
        tokens = words(1500)
        store(cache, model, tokens[:1000])
        (before,) = cache.state.store.slabs
        kept = before.layers[0]
        compactions = cache.stats().compactions
        store(cache, model, tokens[:1100])
        (after,) = cache.state.store.slabs
        assert after is before and after.layers[0] is kept
        assert cache.stats().compactions == compactions


def test_room_is_given_back_before_any_token_is_evicted() -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "256MB") as cache:
        for i in range(10):
            store(cache, model, words(500, seed=i))
        stats = cache.stats()
        room = stats.bytes["stored"] - stats.stored_tokens * stats.token_bytes
        assert room > 0
        cache.inventory.shrink(stats.bytes["stored"] - room // 2)
        assert cache.stats().evicted_tokens == 0
        assert cache.stats().bytes["stored"] <= stats.bytes["stored"] - room // 2
        cache.check()


def filled(cache: onefold.PrefixCache, model: Any, chunk: int) -> list[int]:
    """Feed one conversation until it is refused, commit it, and return its tokens."""
    said = words(1)
    lease = cache.lease(said)
    forward(model, lease.layers, said, 0)
    try:
        for seed in range(100_000):
            more = words(chunk, seed=seed)
            mx.eval(model(mx.array([more]), cache=lease.layers))
            said += more
    except onefold.BudgetError:
        pass
    lease.commit(said)
    return said


def test_one_conversation_can_have_nine_tenths_of_the_budget(heavy: Any) -> None:
    with onefold.PrefixCache(heavy, "64MB") as cache:
        said = filled(cache, heavy, 16)
        stats = cache.stats()
        assert len(said) * stats.token_bytes >= 0.9 * stats.budget_bytes
        assert cache.inventory.in_memory(said) * stats.token_bytes >= 0.9 * stats.budget_bytes
        cache.check()


def test_a_prompt_can_have_nine_tenths_of_the_budget(heavy: Any) -> None:
    with onefold.PrefixCache(heavy, "64MB") as cache:
        n = int(0.9 * cache.inventory.budget_bytes / cache.inventory.token_bytes)
        assert cache.inventory.most_tokens() >= n
        store(cache, heavy, words(n))
        stats = cache.stats()
        assert stats.evicted_tokens == 0 and stats.stored_tokens == n
        assert stats.peak_bytes <= stats.budget_bytes
        cache.check()


@pytest.mark.parametrize(("budget", "chunk"), [("8MB", 2), ("12MB", 24)])
def test_a_refused_conversation_can_be_continued_by_one_token(heavy: Any, budget: str, chunk: int) -> None:
    with onefold.PrefixCache(heavy, budget) as cache:
        store(cache, heavy, words(40, seed=1))  # something that may be evicted
        said = filled(cache, heavy, chunk)
        with cache.lease([*said, 1]) as lease:
            assert lease.cached == len(said)
            mx.eval(heavy(mx.array([[1]]), cache=lease.layers))
            lease.commit([*said, 1])
        assert cache.inventory.in_memory([*said, 1]) == len(said) + 1
        cache.check()


def test_the_pool_gives_way_to_a_conversation_and_comes_back(heavy: Any) -> None:
    with onefold.PrefixCache(heavy, "16MB") as cache:
        share = cache.stats().bytes["pool"]
        assert share > 0
        lease = cache.lease(words(115))
        assert cache.stats().bytes["pool"] < share
        lease.cancel()
        assert cache.stats().bytes["pool"] == share
        cache.check()


def test_in_a_full_cache_a_prompt_is_still_computed_in_long_chunks(heavy: Any) -> None:
    """Stored KV is evicted for the scratch of a chunk: chunks of 16 tokens would take many times as long."""
    with onefold.PrefixCache(heavy, "512MB") as cache:
        for seed in range(6):
            store(cache, heavy, words(600, seed=seed))
        assert cache.state.nodes.counts["evicted_tokens"] > 0, "the cache is full"
        tokens = words(1500, seed=9)
        with cache.lease(tokens) as lease:
            lengths = [len(chunk) for chunk in lease.chunks() if fed(heavy, lease, chunk)]
        assert min(lengths[:-1]) >= 64 and sum(lengths) == len(tokens) - 1
        cache.check()


def fed(model: Any, lease: onefold.Lease, chunk: Any) -> bool:
    mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
    return True
