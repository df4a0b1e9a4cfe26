"""A lease that is dropped is settled by reference counting alone, at the cache's next call."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from driving import forward, turn
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from tiny import tiny

import onefold


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=n)


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "gemma2", "deepseek_v41"])
@pytest.mark.parametrize("used", ["never", "forward", "generate_step", "batch", "only its layers", "after an error"])
def test_a_dropped_lease_is_settled_at_the_next_call(family: str, used: str) -> None:
    model = tiny(family)
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        prompt = words(40)
        lease = cache.lease(prompt)
        if used == "forward":
            mx.eval(model(mx.array([prompt[:39]]), cache=lease.layers))
        elif used == "generate_step":
            list(generate_step(mx.array(lease.rest), model, max_tokens=3, prompt_cache=lease.layers))
        elif used == "batch":
            other = cache.lease(words(40, 1))
            forward(model, lease.layers, prompt[:39], 0)
            forward(model, other.layers, words(40, 1)[:39], 0)
            batch = cache.batch([lease, other])
            mx.eval(batch.step([prompt[39], words(40, 1)[39]]))
            del batch, other
        elif used == "only its layers":
            layers = lease.layers
            lease = None
            assert cache.stats().open_leases == 1
            forward(model, layers, prompt[:39], 0)  # they keep the lease alive
            assert cache.stats().open_leases == 1
            del layers
        elif used == "after an error":
            with pytest.raises(onefold.LeaseError):
                model(mx.array([[prompt[0] + 1]]), cache=lease.layers)
        del lease
        stats = cache.stats()
        assert stats.open_leases == 0 and stats.bytes["live"] == 0
        assert stats.reasons["dropped"] == (2 if used == "batch" else 1)
        cache.check()
        if used in ("forward", "only its layers"):
            with cache.lease([*prompt, 1]) as lease:
                assert lease.cached == 39  # what was prefilled was kept
        turn(cache, model, [*prompt, 7], n=2)


def test_a_request_is_refused_only_after_dead_leases_were_settled() -> None:
    """Half of the requests are dropped in the middle, on a budget of a few."""
    mx.random.seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 2}
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama", num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5, vocab_size=128, **shape
        )
    )
    mx.eval(model.parameters())
    rng = random.Random(1)
    with onefold.PrefixCache(model, "12MB") as cache:
        system = words(64)
        for i in range(60):
            tokens = system + words(rng.randint(2, 30), i)
            if i % 2:
                lease = cache.lease(tokens)
                model(mx.array([lease.rest[:5].tolist()]), cache=lease.layers)
                del lease
            else:
                with cache.lease(tokens) as lease:
                    mx.eval(model(mx.array([lease.rest.tolist()]), cache=lease.layers))
        cache.check()


def test_a_forward_that_needs_room_settles_dead_leases_first() -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "8MB") as cache:
        with cache.lease(words(10)) as lease:
            dead = cache.lease(words(2000, 1))
            model(mx.array([words(2000, 1)[:16]]), cache=dead.layers)
            held = cache.stats().bytes["live"]
            del dead
            assert cache.state.ledger.by_purpose()["live"] == held  # nobody has called the cache since
            forward(model, lease.layers, words(10), 0)
            assert cache.state.ledger.by_purpose()["live"] < held / 2
        cache.check()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_lease_in_a_cycle_is_settled_whatever_order_the_collector_has(family: str) -> None:
    class Request:
        me: object
        layers: list[object]
        deep: list[object]

    model, prompt = tiny(family), words(40)
    with onefold.PrefixCache(model, "64MB") as cache:

        def abandon() -> None:
            lease, request = cache.lease(prompt), Request()
            request.me, request.layers, request.deep = request, list(lease.layers), [[[[lease]]]]
            del lease
            forward(model, request.layers, prompt, 0)
            gc.collect()

        abandon()
        gc.collect()
        assert cache.stats().open_leases == 0 and cache.stats().bytes["live"] == 0
        cache.check()
        turn(cache, model, [*prompt, 7], n=2)


def test_a_dropped_lease_is_closed_and_counted_once() -> None:
    with onefold.PrefixCache(tiny("llama"), "64MB") as cache:
        closed: list[Any] = []
        cache.state.on_dropped = closed.append
        cache.lease(words(40))
        for _ in range(3):
            cache.state.sweep()
        assert cache.stats().reasons["dropped"] == len(closed) == 1 and not cache.state.dropped
