"""Costs do not depend on how much is stored: operations are counted here, and timed in benchmarks/growth.py."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from driving import forward, turn
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny

import onefold
from onefold.cache.memory.ranking import Ranking


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


class Counted(set[Any]):
    """A set that counts how many of its members are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for member in set.__iter__(self):
            self.looks += 1
            yield member


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Iterator[Counting]:
    model = tiny(request.param)
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        yield Counting(cache, model)


class Counting:
    """A cache of 20 conversations that counts every slab and node that is looked at among all of them."""

    def __init__(self, cache: onefold.PrefixCache, model: nn.Module) -> None:
        self.cache, self.model = cache, model
        self.prefix = words(20)
        for i in range(10):
            self.store([*words(30, seed=100 + i)])
            self.store([*self.prefix, i, *words(10, seed=i)])
        self.slabs = cache.state.store.slabs = Counted(cache.state.store.slabs)
        self.nodes = 0
        walk = cache.state.nodes.nodes

        def nodes() -> Iterator[Any]:
            for node in walk():
                self.nodes += 1
                yield node

        cache.state.nodes.nodes = nodes  # type: ignore[method-assign]

    def store(self, tokens: list[int]) -> None:
        with self.cache.lease(tokens) as lease:
            forward(self.model, lease.layers, tokens, lease.cached)
            lease.commit(tokens)

    @property
    def looks(self) -> int:
        return self.slabs.looks + self.nodes


FAMILIES = pytest.mark.parametrize("counted", ["llama", "gemma3", "qwen3_next"], indirect=True)


@FAMILIES
def test_a_request_looks_at_nothing_but_its_own_path(counted: Counting) -> None:
    cache, model = counted.cache, counted.model
    with cache.lease([*counted.prefix, 85, 86]) as lease:
        forward(model, lease.layers, lease.tokens.tolist(), lease.cached)
        for _ in range(8):
            mx.eval(model(mx.array([[5]]), cache=lease.layers))
        mx.eval(model(mx.array([[5] * 300]), cache=lease.layers))  # grows
        lease.commit([*counted.prefix, 85, 86, *[5] * 308])
    counted.store(words(30, seed=999))
    assert cache.inventory.held_bytes > 0
    assert counted.looks == 0


@FAMILIES
def test_reclaiming_looks_at_nothing_but_what_it_frees(counted: Counting) -> None:
    cache = counted.cache
    stored = cache.stats().stored_tokens
    counted.nodes = 0
    cache.inventory.shrink(cache.inventory.stored_bytes // 2)
    cache.set_budget("16MB")
    cache.inventory.forget(words(30, seed=109), 10)
    assert counted.looks == 0
    assert cache.stats().stored_tokens < stored
    cache.check()


def test_a_slab_that_lost_several_nodes_is_compacted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of one buffer go together; the buffer is copied when all of them are gone, and not for each."""
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        _, known = turn(cache, model, words(200))
        for cut in range(150, 190, 5):
            cache.pin(known[:cut]).release()  # splits the node
        keep = cache.pin(known[:150])
        before = cache.stats().compactions
        cache.inventory.shrink(0)
        assert cache.stats().compactions - before <= 2  # room first, then what was evicted
        assert cache.inventory.in_memory(known) == 150
        keep.release()
        cache.check()


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 50)), max_size=200)


@given(STEPS)
def test_a_ranking_gives_items_by_their_last_key(steps: list[tuple[int, int, int]]) -> None:
    ranking, keys = Ranking[int](), dict[int, int]()
    for what, item, key in steps:
        if what < 2:
            ranking.place(item, (key, item))
            keys[item] = key
        elif what == 2:
            ranking.remove(item)
            keys.pop(item, None)
        else:
            best = min(keys, key=lambda i: (keys[i], i), default=None)
            assert ranking.first() == best and ranking.pop() == best
            keys.pop(best, None)  # type: ignore[call-overload]
        assert len(ranking) == len(keys)
    assert ranking.keys() == {item: (key, item) for item, key in keys.items()}


def test_a_ranking_keeps_nothing_of_what_was_moved() -> None:
    ranking = Ranking[int]()
    for i in range(10_000):
        ranking.place(i % 10, (i,))
    assert len(ranking._order) == 10


def test_what_a_ranking_passes_over_comes_again() -> None:
    ranking = Ranking[str]()
    for key, item in enumerate("abcd"):
        ranking.place(item, key)
    ranking.pass_over("a", 0)
    ranking.pass_over("c", 2)
    assert ranking.first() == "b" and len(ranking) == 4 and ranking.keys()["a"] == 0
    ranking.place("c", -1)
    ranking.remove("b")
    assert ranking.pop() == "c"
    ranking.put_back()
    assert [ranking.pop() for _ in range(3)] == ["a", "d", None]


@pytest.mark.parametrize("what", ["set_budget", "shrink", "clear"])
def test_other_threads_get_in_while_much_is_given_up(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In short stretches, between which the lock is free and the books are right."""
    monkeypatch.setattr("onefold.cache.memory.lock.STRETCH_SECONDS", -1.0)
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        for i in range(12):
            turn(cache, model, words(40, seed=i))
        left: list[int] = []

        def look() -> None:
            cache.check()
            left.append(cache.stats().nodes)

        def between(pause: float) -> None:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "the lock is held"

        with monkeypatch.context() as patch:
            patch.setattr(cache.state.lock, "between", between)
            if what == "set_budget":
                cache.set_budget(cache.inventory.token_bytes * 100)
            elif what == "shrink":
                cache.inventory.shrink(0)
            else:
                cache.clear()
        assert len(left) >= 6 and left == sorted(left, reverse=True) and left[0] > left[-1]
        cache.check()
