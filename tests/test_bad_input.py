"""Nonsense, misuse and faults: a clear error of our own, the cache still sound, nothing stored lost."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from driving import forward, turn
from mlx_lm.generate import speculative_generate_step
from tiny import tiny, with_unknown_caches

import onefold


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture
def cache(model):
    with onefold.PrefixCache(model, "16MB") as cache:
        yield cache
        cache.check()


@pytest.fixture
def known(cache, model) -> list[int]:
    return turn(cache, model, words(40))[1]


@pytest.mark.parametrize(
    "tokens",
    [[], "text", [1.5, 2], [[1, 2]], [-1, 2], [1, 2**40], None, [None], np.array([], np.int32), ["a"], 7],
)
def test_tokens_that_are_none(cache, tokens):
    with pytest.raises(onefold.TokenError):
        cache.lease(tokens)
    with pytest.raises(onefold.TokenError):
        cache.pin(tokens)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([{"role": "user", "content": "hello"}], "apply_chat_template"),
        ({"input_ids": [1, 2]}, "input_ids"),
        ("text", "tokenizer.encode"),
        ([], "at least one"),
    ],
)
def test_tokens_that_are_none_say_what_to_do(cache, tokens, says):
    with pytest.raises(onefold.TokenError, match=says):
        cache.lease(tokens)


def test_options_of_a_lease_are_named_one_by_one(cache):
    with pytest.raises(onefold.ConfigError, match="namespace must be hashable") as refused:
        cache.lease([1, 2], namespace=[])
    assert "checkpoints" not in str(refused.value)
    with pytest.raises(onefold.ConfigError, match="checkpoints must be token positions") as refused:
        cache.lease([1, 2], checkpoints=["x"])
    assert "namespace" not in str(refused.value)


def test_two_rows_through_one_lease_are_refused_before_anything_is_written(cache, model, known):
    with cache.lease([*known, 1]) as lease:
        with pytest.raises(onefold.LeaseError, match=r"a lease is one row.*cache\.batch\(leases\)"):
            model(mx.array([[1], [2]]), cache=lease.layers)
        assert lease.offset == len(known)
        forward(model, lease.layers, [*known, 1], lease.cached)
        lease.commit()
    with cache.lease([*known, 2]) as one, cache.lease([*known, 3]) as other:
        assert cache.batch([one, other]).step([2, 3]).shape[0] == 2


def test_a_draft_without_layers_in_the_lease_says_which_option_is_missing(cache, model):
    with cache.lease(words(20)) as lease, pytest.raises(onefold.LeaseError, match=r"pass draft_model= to PrefixCache"):
        next(speculative_generate_step(mx.array(lease.rest), model, tiny("llama", seed=3), prompt_cache=lease.layers))


def test_a_commit_of_more_than_the_layers_hold_names_both_numbers(cache, model, known):
    with cache.lease([*known, 1, 2]) as lease:
        forward(model, lease.layers, [*known, 1, 2], lease.cached)
        with pytest.raises(onefold.CommitError, match=f"{len(known) + 5}.*{len(known) + 2}"):
            lease.commit([*known, 1, 2, 3, 4, 5])
        cache.check()
        lease.commit([*known, 1, 2])  # the lease is still good
    assert cache.lease([*known, 1, 2, 9]).cached == len(known) + 2


def test_a_commit_of_other_tokens_than_were_leased(cache, model, known):
    with cache.lease([*known, 1, 2]) as lease:
        forward(model, lease.layers, [*known, 1, 2], lease.cached)
        with pytest.raises(onefold.CommitError, match=f"token {len(known)} .* 7.* 1"):
            lease.commit([*known, 7, 2])
    assert cache.lease([*known, 7, 2]).matched == len(known)


def test_a_commit_of_fewer_tokens_keeps_those(cache, model, known):
    with cache.lease([*known, 1, 2, 3]) as lease:
        forward(model, lease.layers, [*known, 1, 2, 3], lease.cached)
        lease.commit([*known, 1])
    assert cache.lease([*known, 1, 2]).matched == len(known) + 1


def test_a_lease_after_it_closed(cache, model, known):
    lease = cache.lease([*known, 1])
    layers = lease.layers
    lease.cancel()
    lease.cancel()  # twice is harmless
    with pytest.raises(onefold.LeaseClosed):
        lease.commit(known)
    with pytest.raises(onefold.LeaseClosed):
        model(mx.array([[1]]), cache=layers)
    cache.check()
    assert cache.lease([*known, 1]).cached == len(known)


def test_layers_changed_behind_its_back(cache, model, known):
    with cache.lease([*known, 1]) as lease:
        forward(model, lease.layers, [*known, 1], lease.cached)
        lease.layers[0] = object()
        with pytest.raises(onefold.CommitError, match="layers was changed"):
            lease.commit([*known, 1])
    with cache.lease([*known, 1]) as lease:
        forward(model, lease.layers, [*known, 1], lease.cached)
        lease.layers[0].offset -= 3
        with pytest.raises(onefold.LeaseError, match=rf"{len(known) - 2} to {len(known) + 1}"):
            model(mx.array([[1]]), cache=lease.layers)
        with pytest.raises(onefold.CommitError):
            lease.commit([*known, 1])
    cache.check()
    lease = cache.lease([*known, 1])
    assert lease.cached == len(known)


def test_a_budget_smaller_than_one_prompt(model):
    with onefold.PrefixCache(model, "200KB") as cache:
        with pytest.raises(onefold.BudgetError) as refused:
            cache.lease(words(500))
        assert refused.value.needed_bytes > refused.value.available_bytes
        assert "needed" in str(refused.value) and "shorten the prompt" in str(refused.value)
        cache.check()


def test_a_forward_whose_scratch_does_not_fit_says_how_to_feed_it(model):
    prompt = words(400)
    with onefold.PrefixCache(model, "1MB") as cache, cache.lease(prompt) as lease:
        with pytest.raises(onefold.BudgetError, match=r"scratch.*; feed the prompt with lease\.chunks\(\)"):
            model(mx.array([prompt]), cache=lease.layers)
        for chunk in lease.chunks():
            mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
        assert lease.offset == len(prompt) - 1


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1"])
def test_a_budget_that_no_forward_fits_is_refused_with_one_that_is_enough(name):
    model = tiny(name)
    before = type(model).__call__
    with pytest.raises(onefold.ConfigError, match=r"has no room for a forward of this model: give at least") as refused:
        onefold.PrefixCache(model, "1KB")
    assert type(model).__call__ is before
    number, unit = str(refused.value).partition("at least ")[2].split()[:2]
    with onefold.PrefixCache(model, f"{number}{unit.strip(',')}") as cache:
        turn(cache, model, [1, 2, 3], n=2)


@pytest.mark.parametrize(
    "size", ["8 gigs", "", "-1GB", "0", "GB", "120%", "0%", 0, -5, float("nan"), None.__class__, [], True]
)
def test_nonsense_sizes(model, size):
    with pytest.raises(onefold.ConfigError):
        onefold.PrefixCache(model, size)


@pytest.mark.parametrize(
    "options",
    [{"kv": "3"}, {"kv": "fp8"}, {"max_kv_size": -4}, {"max_kv_size": 8, "keep": 8},
     {"high_water": 0.5, "low_water": 0.9}],
)  # fmt: skip
def test_nonsense_options(model, options):
    with pytest.raises(onefold.ConfigError):
        onefold.PrefixCache(model, "8MB", **options)


def test_a_refused_constructor_leaves_the_model_as_it_was(model):
    before = type(model).__call__
    with pytest.raises(onefold.ConfigError):
        onefold.PrefixCache(model, "8 gigs")
    assert type(model).__call__ is before


def test_a_refused_lease_loses_nothing_stored(model):
    with onefold.PrefixCache(model, "1MB") as cache:
        _, known = turn(cache, model, words(40))
        with pytest.raises(onefold.BudgetError):
            cache.lease(words(5000, seed=3))
        cache.check()
        lease = cache.lease([*known, 1])
        assert lease.cached == len(known)
        assert cache.stats().evicted_tokens == 0


def test_an_oversize_conversation_keeps_the_prefix_that_fits(model):
    with onefold.PrefixCache(model, "1MB") as cache:
        _, known = turn(cache, model, words(40))
        prompt = words(200, seed=4)
        with pytest.raises(onefold.BudgetError), cache.lease(prompt) as lease:
            forward(model, lease.layers, prompt, 0)
            while True:
                mx.eval(model(mx.array([[5] * 64]), cache=lease.layers))
        cache.check()
        assert cache.lease([*prompt, 1]).cached == 200
        assert cache.lease([*known, 1]).matched <= len(known)


def test_an_allocation_that_fails(cache, model, known, monkeypatch):
    """An impossible allocation would take the process down, so it is injected."""

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no more")

    prompt = words(40, seed=8)
    monkeypatch.setattr(cache.state.store, "allocate", broken)
    with pytest.raises(onefold.BudgetError, match="no more"), cache.lease(prompt) as lease:
        forward(model, lease.layers, prompt, 0)
    monkeypatch.undo()
    cache.check()
    assert cache.lease([*known, 1]).cached == len(known)
    turn(cache, model, prompt)


def test_an_allocation_that_fails_while_growing(model, monkeypatch):
    with onefold.PrefixCache(model, "16MB") as cache:
        _, known = turn(cache, model, words(250))
        longer = known + words(300, seed=1)
        store = cache.state.store
        count = [0]
        real = store.allocate

        def second_fails(*args: object, **kwargs: object) -> mx.array:
            count[0] += 1
            if count[0] > 2:
                raise MemoryError("no more")
            return real(*args, **kwargs)

        monkeypatch.setattr(store, "allocate", second_fails)
        with pytest.raises(onefold.BudgetError), cache.lease(longer) as lease:
            forward(model, lease.layers, longer, lease.cached)
        monkeypatch.undo()
        cache.check()
        lease = cache.lease([*known, 1])
        assert lease.cached == len(known)
        lease.cancel()
        turn(cache, model, longer)


def test_a_device_that_fails_while_compacting_costs_only_the_miss(model, monkeypatch):
    with onefold.PrefixCache(model, "16MB") as cache:
        _, known = turn(cache, model, words(300))
        _, other = turn(cache, model, words(60, seed=2))
        count, real = [0], mx.eval

        def second_fails(*args: object) -> None:
            count[0] += 1
            if count[0] == 2:
                raise RuntimeError("no more")
            real(*args)

        monkeypatch.setattr("onefold.cache.memory.segment.mx.eval", second_fails)
        slab = max(cache.state.store.slabs, key=lambda s: s.capacity)
        assert not cache.state.lock.run(cache.state.placement.compacting(slab))
        monkeypatch.undo()
        cache.check()
        assert cache.lease([*known, 1]).cached == 0
        assert cache.lease([*other, 1]).cached == len(other)
        turn(cache, model, [*known, 1])


def test_a_closed_cache(model):
    cache = onefold.PrefixCache(model, "8MB")
    lease = cache.lease([1, 2, 3])
    cache.close()
    cache.close()
    with pytest.raises(onefold.ConfigError):
        cache.lease([1, 2, 3])
    with pytest.raises(onefold.LeaseClosed):
        lease.commit([1])


def test_an_unknown_cache_class_runs_uncached_with_its_reason(monkeypatch):
    model = with_unknown_caches(monkeypatch)
    with onefold.PrefixCache(model, "16MB") as cache:
        with cache.lease(words(20)) as lease:
            mx.eval(model(mx.array([words(20)]), cache=lease.layers))
            assert lease.cached == 0 and lease.reason == "unknown cache"
            lease.commit(words(20))
        assert cache.lease(words(20)).matched == 0
        assert cache.stats().reasons["unknown cache"] == 2
        assert "Listing" in cache.uncached_reason
        cache.check()


def test_set_budget_while_running(model):
    with onefold.PrefixCache(model, "4MB") as cache:
        for i in range(8):
            turn(cache, model, words(200, seed=i), n=1)
        held = cache.stats().used_bytes
        cache.set_budget("1MB")
        cache.check()
        assert cache.stats().used_bytes <= 1_000_000 < held
        lease = cache.lease(words(200, seed=9))
        with pytest.raises(onefold.BudgetError):
            cache.set_budget("10KB")
        assert cache.stats().budget_bytes == 1_000_000
        lease.cancel()
        cache.set_budget("16MB")
        turn(cache, model, words(200, seed=3), n=1)


def test_a_device_that_fails_in_a_forward_costs_only_the_buffers_it_was_writing(cache, model, known, monkeypatch):
    _, other = turn(cache, model, words(30, seed=4))
    real = mx.eval

    def fails(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="mine"), cache.lease([*known, 1, 2]) as lease:
        model(mx.array([[1, 2]]), cache=lease.layers)
        monkeypatch.setattr("onefold.cache.memory.device.mx.eval", fails)
        raise RuntimeError("mine")
    monkeypatch.setattr("onefold.cache.memory.device.mx.eval", real)
    cache.check()
    assert cache.stats().reasons["lost on the device"] == 1
    assert cache.lease([*known, 1]).cached == 0
    assert cache.lease([*other, 1]).cached == len(other)
    lease = cache.lease([*other, 2])
    model(mx.array([[2]]), cache=lease.layers)
    monkeypatch.setattr("onefold.cache.memory.device.mx.eval", fails)
    with pytest.raises(onefold.DeviceError, match="gone"):
        lease.commit([*other, 2])
    monkeypatch.setattr("onefold.cache.memory.device.mx.eval", real)
    assert lease.closed


def test_a_budget_that_no_forward_fits_may_be_set_for_a_while(model):
    with onefold.PrefixCache(model, "16MB") as cache:
        turn(cache, model, words(30))
        cache.set_budget(cache.inventory.token_bytes * 20)
        with pytest.raises(onefold.BudgetError, match="needed for"):
            cache.lease(words(30))
        cache.set_budget("16MB")
        turn(cache, model, words(30))


@pytest.mark.parametrize("keep", [-1, "x", 1.5])
def test_forget_says_what_keep_is(model, keep):
    with onefold.PrefixCache(model, "16MB") as cache, pytest.raises(onefold.ConfigError, match="keep is the number"):
        cache.inventory.forget(words(10), keep)


def test_nothing_instead_of_tokens(model):
    with onefold.PrefixCache(model, "16MB") as cache:
        with pytest.raises(onefold.TokenError, match="None"):
            cache.lease(None)
        with cache.lease(words(10)) as lease, pytest.raises(onefold.LeaseError, match="0 tokens for 1 row"):
            cache.batch([lease]).step([])


def test_a_request_without_its_draft_says_why_it_is_not_stored(model, caplog):
    with onefold.PrefixCache(model, "16MB", draft_model=tiny("llama", seed=5)) as cache:
        for _ in range(2):
            with cache.lease(words(10)) as lease:
                mx.eval(model(mx.array([words(10)]), cache=lease.layers[: len(model.layers)]))
                lease.commit()
        assert cache.stats().reasons["draft or target was fed nothing"] == 2
    assert [r.message for r in caplog.records if "draft model was fed nothing" in r.message][1:] == []
    assert any("draft model was fed nothing" in r.message for r in caplog.records)
