"""Leased layers leave the cache as mlx-lm's own, exported, copied or saved, and continue with the right logits."""

from __future__ import annotations

import copy
import gc
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.cache_prompt
import mlx_lm.models.cache as mlx_cache
import pytest
from driving import forward, in_its_own_process
from fake import RoundedCache, RoundedRing
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from tiny import tiny

import onefold
from onefold.mlx_lm import LRUPromptCache
from onefold.mlx_lm.stand_ins import Table


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


@dataclass(frozen=True)
class Case:
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    made: tuple[str, ...] = ("KVCache",)
    saves: bool = True

    def stock(self, model: Any) -> list[Any]:
        """What mlx-lm would run this on."""
        if "max_kv_size" in self.options and "kv" in self.options:
            return [RoundedRing(32, 4, 8) for _ in model.layers]
        if "max_kv_size" in self.options:
            return [mlx_cache.RotatingKVCache(self.options["max_kv_size"], 4) for _ in model.layers]
        if "kv" in self.options:
            return [RoundedCache(self.options["kv"]) for _ in model.layers]
        return make_prompt_cache(model)


CASES = {
    "full": Case("llama"),
    "8": Case("llama_q", {"kv": "8"}),
    "affine, 8 bits": Case("llama_q", {"kv": "affine8"}, ("QuantizedKVCache",)),
    "affine, 4 bits": Case("llama_q", {"kv": "affine4"}, ("QuantizedKVCache",)),
    "4": Case("llama_q", {"kv": "4"}),
    "bounded": Case("llama", {"max_kv_size": 32}, ("RotatingKVCache",)),
    "bounded, 8 bits": Case("llama_q", {"max_kv_size": 32, "kv": "8"}, ("RotatingKVCache",)),
    "windows": Case("gemma3", {}, ("KVCache", "RotatingKVCache")),
    "chunked": Case("llama4", {}, ("ChunkedKVCache", "KVCache")),
    "recurrent": Case("qwen3_next", {}, ("ArraysCache", "KVCache")),
    "composite": Case("falcon_h1", {}, ("CacheList",)),
    "outside the seam": Case("deepseek_v3"),
    "the model's own": Case("deepseek_v41", {}, ("LayerCache",), saves=False),
}


def continued(model: Any, layers: list[Any], tokens: list[int]) -> list[mx.array]:
    seen = []
    for chunk in (tokens[:5], *([t] for t in tokens[5:])):
        seen.append(model(mx.array([chunk]), cache=layers)[:, -1, :])
        mx.eval(seen[-1])
    return seen


def assert_same(found: list[mx.array], wanted: list[mx.array], tolerance: float = 1e-4) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert mx.abs(a - b).max().item() <= tolerance * mx.abs(b).max().item()


@pytest.mark.parametrize("name", CASES)
def test_a_copy_continues_as_mlx_lm_s_own_cache_would(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, tokens, more = tiny(case.family), words(50), words(12, 1)
    reference = case.stock(model)
    forward(model, reference, tokens, 0, grid=50)
    wanted = continued(model, reference, more)
    tolerance = {"8": 2e-3, "affine8": 2e-3, "affine4": 2e-3, "4": 2e-2}.get(case.options.get("kv", ""), 1e-4)
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1, **case.options) as cache:
        with cache.lease(tokens) as first:
            forward(model, first.layers, tokens[:30], 0, grid=50)
        with cache.lease(tokens) as lease, cache.lease(tokens[:30] + words(3, 9)):  # reads what another one reads
            forward(model, lease.layers, tokens, lease.cached, grid=50)
            exported = lease.export()
            copied = copy.deepcopy(lease.layers)
            assert {type(c).__name__ for c in exported} == set(case.made)
            if case.saves:
                save_prompt_cache(str(tmp_path / "saved.safetensors"), lease.layers, {"model": "tiny"})
            assert_same(continued(model, lease.layers, more), wanted, tolerance)  # copying changed nothing here
        cache.check()
        if name in ("bounded, 8 bits", "8", "4"):  # what comes after the copy is not quantised any more
            reference = case.stock(model)
            forward(model, reference, tokens, 0, grid=50)
            for ring in reference:
                ring.round = False
            wanted = continued(model, reference, more)
        assert_same(continued(model, exported, more), wanted, tolerance)
    assert_same(continued(model, copied, more), wanted, tolerance)  # it outlives the cache
    if case.saves:
        loaded, metadata = load_prompt_cache(str(tmp_path / "saved.safetensors"), return_metadata=True)
        assert metadata == {"model": "tiny"}
        assert [type(c) for c in loaded] == [type(c) for c in copied]
        assert_same(continued(model, loaded, more), wanted, tolerance)


def test_a_copy_is_in_the_ledger_while_it_lives() -> None:
    model, tokens = tiny("llama"), words(300)
    with onefold.PrefixCache(model, "64MB") as cache, cache.lease(tokens) as lease:
        forward(model, lease.layers, tokens, 0, grid=300)
        before = cache.stats().bytes["live"]
        gc.collect()  # or what earlier tests left goes in between
        mx.clear_cache()  # or the pool hands out buffers that are larger than asked for
        active = mx.get_active_memory()
        exported = lease.export()
        grown = mx.get_active_memory() - active
        expected = 300 * cache.inventory.token_bytes
        assert cache.stats().bytes["live"] - before == expected == sum(c.nbytes for c in exported)
        assert grown == pytest.approx(300 * cache.inventory.token_bytes, rel=0.01, abs=1024)
        cache.check()
        del exported
        assert cache.stats().bytes["live"] == before
        cache.check()


def test_a_copy_that_does_not_fit_is_refused_and_nothing_of_it_stays() -> None:
    model, tokens = tiny("llama"), words(700)
    with onefold.PrefixCache(model, "3MB") as cache, cache.lease(tokens) as lease:
        for chunk in lease.chunks(64):
            mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
        copies = []
        held = cache.inventory.held_bytes
        with pytest.raises(onefold.BudgetError, match="a copy of a layer"):
            while True:
                copies.append(lease.export())
        kept = len(copies)
        assert cache.inventory.held_bytes == held + kept * 699 * cache.inventory.token_bytes
        with pytest.raises(onefold.BudgetError, match="a copy of a layer"):
            copy.deepcopy(lease.layers)
        copies.clear()
        assert cache.inventory.held_bytes == held
        cache.check()


def test_a_closed_lease_has_nothing_to_copy() -> None:
    model, tokens = tiny("llama"), words(20)
    with onefold.PrefixCache(model, "16MB") as cache:
        with cache.lease(tokens) as lease:
            assert [c.empty() for c in lease.export()] == [True, True]
            layers = lease.layers
        for copying in (lease.export, lambda: copy.deepcopy(layers)):
            with pytest.raises(onefold.LeaseClosed):
                copying()


def test_a_target_that_is_ahead_of_its_draft_is_cut_to_what_both_hold() -> None:
    model, draft, tokens = tiny("llama"), tiny("llama", seed=1), words(20)
    with onefold.PrefixCache(model, "16MB", draft_model=draft) as cache, cache.lease(tokens) as lease:
        n = len(model.layers)
        forward(model, lease.layers[:n], tokens, 0)
        forward(draft, lease.layers[n:], tokens[:-1], 0)
        assert lease.offset == 19
        assert [c.offset for c in lease.export()] == [19] * 4


def test_evaluating_what_layers_show_copies_nothing() -> None:
    """mlx-lm's loops evaluate every layer's state after each chunk."""
    model, tokens = tiny("llama"), words(600)
    with onefold.PrefixCache(model, "64MB") as cache:
        with cache.lease(tokens) as first:
            forward(model, first.layers, tokens, 0, grid=600)
            first.commit(tokens)
        with cache.lease([*tokens, 1]) as one, cache.lease([*tokens, 2]) as other:
            gc.collect()
            mx.reset_peak_memory()
            active = mx.get_active_memory()
            mx.eval([c.state for c in one.layers], [c.state for c in other.layers])
            assert mx.get_peak_memory() - active < 1024


def _saving_is_mlx_lm_s_again() -> None:
    original = mlx_cache.save_prompt_cache
    model = tiny("llama")
    one, two = onefold.PrefixCache(model, "16MB"), onefold.PrefixCache(model, "16MB")
    hooked = mlx_cache.save_prompt_cache
    assert hooked is not original
    assert mlx_lm.cache_prompt.save_prompt_cache is hooked is globals()["save_prompt_cache"]
    one.close()
    assert mlx_cache.save_prompt_cache is hooked
    two.close()
    assert mlx_cache.save_prompt_cache is original is mlx_lm.cache_prompt.save_prompt_cache


def test_saving_is_mlx_lm_s_again_when_the_last_cache_is_closed() -> None:
    in_its_own_process("test_exporting", "_saving_is_mlx_lm_s_again")


def test_stock_caches_are_saved_as_ever(tmp_path: Path) -> None:
    model, tokens = tiny("llama"), words(20)
    layers = make_prompt_cache(model)
    with onefold.PrefixCache(model, "16MB"):
        forward(model, layers, tokens, 0)
        save_prompt_cache(str(tmp_path / "saved.safetensors"), layers)
    assert [c.offset for c in load_prompt_cache(str(tmp_path / "saved.safetensors"))] == [20, 20]


def test_what_the_drop_in_hands_out_can_be_saved(tmp_path: Path) -> None:
    model, tokens, more = tiny("llama"), words(40), words(8, 1)
    reference = make_prompt_cache(model)
    forward(model, reference, tokens, 0)
    wanted = continued(model, reference, more)
    prompts: Any = LRUPromptCache(max_size=4, max_bytes="64MB")
    try:
        layers = make_prompt_cache(model)
        forward(model, layers, tokens, 0)
        prompts.insert_cache("m", tokens, layers)
        del layers
        fetched, rest = prompts.fetch_nearest_cache("m", [*tokens, 1])
        assert rest == [1]
        save_prompt_cache(str(tmp_path / "saved.safetensors"), fetched)
        assert_same(continued(model, load_prompt_cache(str(tmp_path / "saved.safetensors")), more), wanted)
        del fetched
        gc.collect()
    finally:
        prompts.close()


def test_stand_ins_are_saved_one_row_at_a_time(tmp_path: Path) -> None:
    model, more = tiny("gemma3"), words(6, 1)
    with onefold.PrefixCache(model, "64MB") as cache:
        table, rows = Table(cache), []
        for seed in range(2):
            tokens = words(30, seed)
            rows.append(table.serve(cache.lease(tokens)))
            forward(model, rows[-1], tokens, 0)
        save_prompt_cache(str(tmp_path / "saved.safetensors"), rows[1])
        reference = make_prompt_cache(model)
        forward(model, reference, words(30, 1), 0)
        loaded = load_prompt_cache(str(tmp_path / "saved.safetensors"))
        assert [type(c) for c in loaded] == [type(c) for c in reference]
        assert_same(continued(model, loaded, more), continued(model, reference, more))
        together = [pair[0].merge(list(pair)) for pair in zip(*rows, strict=True)]
        with pytest.raises(onefold.ConfigError, match="a batch of 2 rows"):
            save_prompt_cache(str(tmp_path / "both.safetensors"), together)
        assert [c.rows for c in copy.deepcopy(together)] == [c.rows for c in together]  # moves references
        for row in rows:
            row[0].rows[0].lease.cancel()
