"""Models that run uncached are counted and limited like others, and a bound reaches every cache or is refused."""

from __future__ import annotations

import gc
import inspect
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from driving import forward
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache
from tiny import tiny, with_unknown_caches

import onefold
from onefold.cache.model.formats.rotation import Rotation
from onefold.errors import Unbounded


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


def active() -> int:
    """Bytes, with nothing of earlier tests that waits for the collector."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


class Counted(KVCache):
    """A cache class that is not understood: its offset is no number."""

    @property
    def offset(self) -> Any:  # type: ignore[override]
        return mx.array(self._offset)

    @offset.setter
    def offset(self, value: Any) -> None:
        self._offset = int(value)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        before = self._offset
        plain = KVCache()
        plain.keys, plain.values, plain.offset = self.keys, self.values, before
        fetched = plain.update_and_fetch(keys, values)
        self.keys, self.values, self._offset = plain.keys, plain.values, plain.offset
        return fetched

    def make_mask(self, N: int, **options: Any) -> Any:
        return None if N == 1 else "causal"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A llama whose caches do not say where they stand."""
    model = tiny("llama")
    monkeypatch.setattr(type(model), "make_cache", lambda self: [Counted() for _ in self.layers], raising=False)
    return model


def test_an_uncached_model_s_kv_is_in_the_ledger(unknown: Any) -> None:
    with onefold.PrefixCache(unknown, "64MB") as cache:
        assert "Counted" in cache.uncached_reason
        before = active()
        with cache.lease(words(600)) as lease:
            forward(unknown, lease.layers, words(600), 0, grid=200)
            assert lease.offset == 600
            live = cache.stats().bytes["live"]
            assert live == lease.nbytes > 0
            assert live == pytest.approx(active() - before, rel=0.01, abs=1024)
            cache.check()
        assert cache.stats().bytes["live"] == 0
        assert active() - before < 1024


def test_a_forward_that_does_not_fit_is_refused_before_it_runs(unknown: Any) -> None:
    tokens = words(4000)
    with onefold.PrefixCache(unknown, "1MB") as cache, cache.lease(tokens) as lease:
        with pytest.raises(onefold.BudgetError):
            for at in range(0, 4000, 64):
                mx.eval(unknown(mx.array([tokens[at : at + 64]]), cache=lease.layers))
                stats = cache.stats()
                assert stats.used_bytes <= stats.budget_bytes
        held = lease.offset
        assert 0 < held < 4000 and held % 64 == 0
        assert [c._offset for c in lease.layers] == [held] * 2  # nothing of the refused forward was written
        assert cache.stats().bytes["live"] == lease.nbytes
        cache.check()


@pytest.mark.slow
def test_the_same_budget_holds_for_a_cache_class_of_a_model_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = with_unknown_caches(monkeypatch), words(6000)
    with onefold.PrefixCache(model, "1.6MB") as cache, cache.lease(tokens) as lease:
        with pytest.raises(onefold.BudgetError, match=r"needed for (live|scratch)"):
            for chunk in lease.chunks(64):
                mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
                stats = cache.stats()
                assert stats.bytes["live"] == lease.nbytes
                assert stats.used_bytes <= stats.budget_bytes
        assert 100 < lease.offset < 6000
        cache.check()


def test_several_uncached_rows_are_admitted_together(unknown: Any) -> None:
    with onefold.PrefixCache(unknown, "1.3MB") as cache:
        leases = [cache.lease(words(120, seed=i)) for i in range(3)]
        for i, lease in enumerate(leases):
            for chunk in lease.chunks(40):
                mx.eval(unknown(mx.array(chunk)[None], cache=lease.layers))
            assert lease.offset == 119, i
        batch = cache.batch(leases)
        with pytest.raises(onefold.BudgetError):
            while True:
                mx.eval(batch.step([1, 2, 3]))
        assert len({lease.offset for lease in leases}) == 1  # none went ahead
        cache.check()
        for lease in leases:
            lease.cancel()


def test_a_call_that_was_replaced_while_it_was_watched(unknown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever replaces the class's call while a cache is open may put the watched one back after it was closed."""
    with onefold.PrefixCache(unknown, "16MB"), monkeypatch.context() as patch:
        watched = type(unknown).__call__
        patch.setattr(type(unknown), "__call__", lambda *a, **k: watched(*a, **k))
    type(unknown).__call__ = watched
    with onefold.PrefixCache(unknown, "16MB") as cache, cache.lease(words(40)) as lease:
        mx.eval(unknown(mx.array([words(40)]), cache=lease.layers))
        assert lease.offset == 40
    type(unknown).__call__ = inspect.unwrap(watched)


def test_an_uncached_model_whose_call_is_made_of_a_watched_one(unknown: Any) -> None:
    class Derived(type(unknown)):  # type: ignore[misc]
        def __call__(self, *args: object, **kwargs: object) -> mx.array:
            return super().__call__(*args, **kwargs)

    model = tiny("llama", seed=1)
    model.__class__ = Derived
    with (
        onefold.PrefixCache(unknown, "16MB"),
        onefold.PrefixCache(model, "16MB") as cache,
        cache.lease(words(40)) as lease,
    ):
        mx.eval(model(mx.array([words(40)]), cache=lease.layers))
        assert lease.offset == 40
        assert cache.stats().bytes["live"] == lease.nbytes


def test_an_exported_copy_of_an_uncached_lease_continues(unknown: Any) -> None:
    tokens, more = words(50), words(5, 1)
    with onefold.PrefixCache(unknown, "16MB") as cache, cache.lease(tokens) as lease:
        forward(unknown, lease.layers, tokens, 0)
        before = cache.stats().bytes["live"]
        copies = lease.export()
        assert cache.stats().bytes["live"] == 2 * before
        wanted = [unknown(mx.array([[t]]), cache=lease.layers) for t in more]
        found = [unknown(mx.array([[t]]), cache=copies) for t in more]
        assert all(mx.abs(a - b).max().item() < 1e-4 for a, b in zip(found, wanted, strict=True))
        del copies
        assert cache.stats().bytes["live"] == lease.nbytes


def test_generation_on_a_model_that_runs_uncached_is_mlx_lm_s(unknown: Any, model: Path) -> None:
    tokenizer = onefold.load(model)[1]
    with onefold.PrefixCache(unknown, "16MB") as cache:
        for n in (40, 60):
            told = [r.token for r in onefold.stream_generate(unknown, tokenizer, words(n), 6, cache=cache)]
            assert told == [r.token for r in mlx_lm.stream_generate(unknown, tokenizer, mx.array(words(n)), 6)]
        assert cache.inventory.open_leases == 0
        assert cache.nbytes == 0


# -- bounds -------------------------------------------------------------------------------------


def test_a_bound_that_a_cache_class_cannot_have_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, unknown: Any
) -> None:
    for model, name in ((tiny("deepseek_v41"), "LayerCache"), (unknown, "Counted")):
        before = type(model).__call__
        with pytest.raises(Unbounded, match=f"max_kv_size=64 cannot bound .* {name} .*Leave max_kv_size out"):
            onefold.PrefixCache(model, "16MB", max_kv_size=64)
        assert type(model).__call__ is before
        assert issubclass(Unbounded, onefold.ConfigError)
    model = with_unknown_caches(monkeypatch)
    with pytest.raises(Unbounded, match="Listing"):
        onefold.PrefixCache(model, "16MB", max_kv_size=64)


def test_a_bound_reaches_the_stock_caches_of_a_model_that_runs_uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sees later tokens of its chunk is run on mlx-lm's caches: they are rings then."""
    model, tokens = tiny("llama"), words(80)
    monkeypatch.setattr("onefold.cache.model.survey._takes_handles", lambda *_: False)
    monkeypatch.setattr("onefold.cache.model.survey._is_causal", lambda *_: False)
    with onefold.PrefixCache(model, "16MB", max_kv_size=32, keep=4) as cache, cache.lease(tokens) as lease:
        assert "later ones" in cache.uncached_reason
        assert [(type(c), c.max_size, c.keep) for c in lease.layers] == [(RotatingKVCache, 32, 4)] * 2
        forward(model, lease.layers, tokens, 0)
        assert lease.offset == 80
        assert lease.nbytes == cache.stats().bytes["live"] < 80 * 512
        reference = [RotatingKVCache(32, 4) for _ in model.layers]
        forward(model, reference, tokens, 0)
        found, wanted = (forward(model, layers, [*tokens, 1], 80) for layers in (lease.layers, reference))
        assert mx.abs(found - wanted).max().item() < 1e-4


@pytest.mark.parametrize(("name", "kv"), [("llama4", 16), ("falcon_h1", 16), ("deepseek_v3", 16), ("llama_q", 8)])
def test_no_cache_grows_past_the_bound(name: str, kv: int) -> None:
    model, tokens = tiny(name), words(500)
    with onefold.PrefixCache(model, "64MB", max_kv_size=48, kv=kv) as cache, cache.lease(tokens) as lease:
        forward(model, lease.layers, tokens[:300], 0, grid=100)  # the last token of each goes alone
        held = lease.nbytes
        forward(model, lease.layers, tokens, 300, grid=100)
        assert lease.nbytes == held
        cache.check()


def test_arrays_are_found_wherever_a_cache_has_them() -> None:
    from onefold.cache.model import stock

    class Slotted:
        __slots__ = ("held",)

    inner = Slotted()
    inner.held = {"a": [mx.zeros(3)], "b": (mx.zeros(5), None)}
    shared = mx.zeros(7)
    outer = CacheList(*make_prompt_cache(tiny("llama")))
    outer.extra = [inner, shared, shared, outer]
    outer.extra.append(outer.extra)  # and nobody is followed in circles
    inner.held["again"] = inner.held
    outer.bound = Rotation(32, 1).turn
    assert sorted(a.size for a in stock.arrays_of([outer, inner])) == [3, 5, 7, 32]
