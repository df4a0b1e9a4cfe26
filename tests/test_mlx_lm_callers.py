"""The drop-in under programs that make their caches themselves, on whatever thread, as many servers do."""

from __future__ import annotations

import copy
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from batching import KEY
from driving import cold, elsewhere
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import llama
from mlx_lm.models.cache import LRUPromptCache as StockCache
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from test_mlx_lm import words
from tiny import tiny

import onefold.mlx_lm
from onefold.errors import ConfigError
from onefold.mlx_lm import LRUPromptCache

LAYERS, KV_HEADS, DIM = 8, 1, 64
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * DIM * 4
PREFIX = 500


@pytest.fixture(scope="module")
def deep() -> nn.Module:
    """KV outweighs all else, and one layer's share of it is small."""
    mx.random.seed(0)
    arguments = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 100, "rms_norm_eps": 1e-5}
    heads = {"num_attention_heads": 1, "num_key_value_heads": KV_HEADS, "head_dim": DIM}
    model = llama.Model(llama.ModelArgs(model_type="llama", num_hidden_layers=LAYERS, **arguments, **heads))
    mx.eval(model.parameters())
    return model


@pytest.fixture
def caches() -> Iterator[Callable[..., Any]]:
    """Makes prompt caches, and closes ours at the end."""
    made: list[Any] = []

    def make(cls: type = LRUPromptCache, **options: Any) -> Any:
        made.append(cls(**options))
        return made[-1]

    yield make
    for cache in made:
        if isinstance(cache, LRUPromptCache):
            for store in cache._stores.all():
                store.cache.check()
            cache.close()


def settled() -> int:
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    return int(mx.get_active_memory())


def extra_tokens(before: int) -> float:
    return (mx.get_peak_memory() - before) / TOKEN_BYTES


def run(model: nn.Module, tokens: list[int], layers: list[Any], n: int) -> list[int]:
    return [int(t) for t, _ in generate_step(mx.array(tokens), model, max_tokens=n, prompt_cache=layers)]


def turn(cache: Any, model: nn.Module, prompt: list[int], n: int = 4, key: Any = KEY) -> tuple[list[int], int]:
    """A caller's own loop: the answer, and how much of the prompt was cached."""
    layers, rest = cache.fetch_nearest_cache(key, prompt)
    if layers is None:
        layers, rest = make_prompt_cache(model), prompt
    out = run(model, rest, layers, n)
    cache.insert_cache(key, (prompt + out)[: layers[0].offset], layers)
    return out, len(prompt) - len(rest)


def batch(cache: Any, generator: BatchGenerator, model: nn.Module, prompts: list[list[int]]) -> list[int]:
    """A scheduler that gives its batch the caches, its own where nothing is cached; how much was cached."""
    rows: dict[int, list[int]] = {}
    known = []
    for prompt in prompts:
        layers, rest = cache.fetch_nearest_cache(KEY, prompt)
        if layers is None:
            layers, rest = make_prompt_cache(model), prompt
        (uid,) = generator.insert([rest], caches=[layers], all_tokens=[prompt[: len(prompt) - len(rest)]])
        del layers
        rows[uid] = prompt
        known.append(len(prompt) - len(rest))
    while rows:
        for r in generator.next()[1]:
            if r.finish_reason is not None:
                cache.insert_cache(KEY, r.all_tokens[:], r.prompt_cache)
                del rows[r.uid]
            del r
    return known


# -- memory -------------------------------------------------------------------------------------------


def first_turn(cache: Any, model: nn.Module, prompt: list[int]) -> float:
    """The peak of a first turn, in tokens; when a chunk's activations are freed depends on threads."""
    before = settled()
    turn(cache, model, prompt)
    return extra_tokens(before)


def test_a_lone_loop_continues_in_place_and_its_readers_share(deep, caches):
    peaks = {}
    base = words(PREFIX + 200)
    for cls in (StockCache, LRUPromptCache):
        cache = caches(cls)
        empty = settled()
        out, _ = turn(cache, deep, base)
        settled()
        assert turn(cache, deep, base + out + words(20, 1))[1] == len(base) + 4
        continued = extra_tokens(empty)
        before = settled()
        held = []
        for seed in range(4):
            layers, rest = cache.fetch_nearest_cache(KEY, base[:PREFIX] + words(8, 2 + seed))
            assert len(rest) == 8
            run(deep, rest, layers, 2)
            held.append(layers)
        peaks[cls] = (continued, extra_tokens(before))
        del held, layers, cache
    first = {cls: max(first_turn(caches(cls), deep, base) for _ in range(5)) for cls in peaks}
    assert first[LRUPromptCache] <= 1.05 * first[StockCache]  # it runs on the same caches, and its peak is activations
    ours, stocks = peaks[LRUPromptCache], peaks[StockCache]
    assert all(a <= b for a, b in zip(ours, stocks, strict=True))
    continued, readers = ours
    assert continued < 1.4 * 768  # the conversation, and a layer while its buffer grows
    assert readers < 4 * 256 + 200  # a buffer of 256 tokens each, and activations


def test_a_batch_with_caches_that_the_caller_made_shares_a_prefix(deep, caches):
    peaks = {}
    for cls in (StockCache, LRUPromptCache):
        cache = caches(cls)
        generator = BatchGenerator(deep, max_tokens=6, completion_batch_size=8, prefill_batch_size=8)
        system = words(PREFIX)
        batch(cache, generator, deep, [system + words(4, 1)])
        before = settled()
        known = batch(cache, generator, deep, [system + words(6, 2 + i) for i in range(4)])
        assert known == [PREFIX] * 4
        peaks[cls] = extra_tokens(before)
        del cache, generator
    assert peaks[LRUPromptCache] < 4 * 256 + 200
    assert peaks[LRUPromptCache] <= peaks[StockCache]


# -- which model a key stands for ----------------------------------------------------------------------


def test_a_model_that_is_told_serves_its_first_request_in_place(caches):
    model = tiny("llama")
    for cache in (caches(model=model), caches()):
        cache.learn(KEY, model)
        prompt = words(60)
        layers, rest = cache.fetch_nearest_cache(KEY, prompt)
        assert rest == prompt and layers[0].offset == 0
        out = run(model, rest, layers, 6)
        assert out == cold(model, prompt, 6)[0]
        cache.insert_cache(KEY, (prompt + out)[: layers[0].offset], layers)
        assert len(cache.fetch_nearest_cache(KEY, prompt + out + [3])[1]) == 1
        assert not cache.reasons


def test_a_model_may_be_its_own_key(caches):
    """mlx-lm's class raises TypeError: a module cannot be hashed."""
    cache, models = caches(), [tiny("llama", seed=1), tiny("llama", seed=2)]
    for known in (0, 59):
        for model in models:
            out, found = turn(cache, model, words(60), key=model)
            assert found == known and out == cold(model, words(60), 4)[0]
    assert not cache.reasons


def test_a_draft_that_is_told_has_its_layers_behind_the_targets(caches):
    model, draft = tiny("llama"), tiny("llama", seed=3)
    cache = caches(model=model, draft_model=draft)
    layers, _ = cache.fetch_nearest_cache(KEY, words(20))
    assert len(layers) == len(model.layers) + len(draft.layers)


@pytest.mark.parametrize("told", [True, False])
def test_a_draft_beside_windows_gives_the_plain_answer_once_the_model_is_known(caches, told):
    """mlx-lm's own caches leave rejected tokens in a window that has wrapped, and its second turn raises."""
    model, draft = tiny("gemma3"), tiny("gemma3", seed=3)
    cache = caches(model=model, draft_model=draft) if told else caches()
    prompt = words(50)
    for turn_number in range(3):
        layers, rest = cache.fetch_nearest_cache(KEY, prompt)
        if layers is None:
            assert not told and turn_number == 0
            layers = make_prompt_cache(model) + make_prompt_cache(draft)
        found = speculative_generate_step(mx.array(rest), model, draft, max_tokens=16, prompt_cache=layers)
        out = [int(t) for t, *_ in found]
        if told or turn_number:
            assert out == cold(model, prompt, 16)[0]
        if turn_number > (0 if told else 1):
            assert len(rest) <= 3
        cache.insert_cache(KEY, prompt + out, layers)
        prompt = prompt + out + [7]
    assert not {r for r in cache.reasons if r.startswith("failed")}


def test_layers_that_were_fed_nothing_are_not_kept(caches):
    model = tiny("llama")
    cache = caches(model=model)
    layers, rest = cache.fetch_nearest_cache(KEY, words(20))
    cache.insert_cache(KEY, rest, layers)
    assert cache.reasons == {"layers do not fit the tokens": 1}
    assert len(cache) == 0 and cache.nbytes == 0
    assert not any(store.cache.inventory.open_leases for store in cache._stores.all())


def test_a_running_row_whose_draft_was_fed_nothing_goes_on(caches):
    """mlx-lm's server puts the layers of a row back at the end of each segment of its prompt, while the row runs."""
    model, draft = tiny("llama"), tiny("llama", seed=3)
    cache = caches(model=model, draft_model=draft)
    prompt, n = words(40), len(model.layers)
    layers, _ = cache.fetch_nearest_cache(KEY, prompt)
    model(mx.array([prompt[:30]]), cache=layers[:n])
    cache.insert_cache(KEY, prompt[:30], copy.deepcopy(layers))
    assert cache.reasons == {"layers do not fit the tokens": 1} and len(cache) == 0
    logits = model(mx.array([prompt[30:]]), cache=layers[:n])
    assert int(mx.argmax(logits[0, -1])) == cold(model, prompt, 1)[0][0]


def test_a_draft_without_a_model_is_refused():
    with pytest.raises(ConfigError, match="draft_model requires model="):
        LRUPromptCache(draft_model=tiny("llama"))
    with pytest.raises(ConfigError, match="a model is an mlx module"):
        LRUPromptCache(model="llama")


def test_a_key_that_is_told_another_model_drops_the_first_ones_kv(caches):
    first, second, cache = tiny("llama", seed=1), tiny("llama", seed=2), caches()
    prompt = words(60)
    cache.learn(KEY, first)
    turn(cache, first, prompt)
    cache.learn(KEY, second)
    out, known = turn(cache, second, prompt)
    assert known == 0 and out == cold(second, prompt, 4)[0]


def test_layers_of_another_model_than_was_told_are_refused(caches):
    told, other, cache = tiny("llama", seed=1), tiny("llama", seed=2), caches()
    cache.learn(KEY, told)
    prompt = words(40)
    layers = make_prompt_cache(other)
    run(other, prompt, layers, 2)
    cache.insert_cache(KEY, prompt, layers)
    assert len(cache) == 0 and cache.reasons == {"layers do not fit the model": 1}


def test_a_model_that_was_told_and_is_gone_is_learnt_again(caches):
    model, cache = tiny("llama", seed=1), caches()
    cache.learn(KEY, model)
    prompt = words(60)
    out, _ = turn(cache, model, prompt)
    model = tiny("llama", seed=1)
    gc.collect()
    make_prompt_cache(model)
    again, known = turn(cache, model, prompt + out + [3])
    assert known > 0 and again == cold(model, prompt + out + [3], 4)[0]


def test_the_model_is_learnt_from_layers_that_were_made_and_filled_on_another_thread(caches):
    """As an async server does: fetch in a handler, generate in an executor."""
    model, cache, prompt = tiny("llama"), caches(), words(60)
    assert cache.fetch_nearest_cache(KEY, prompt) == (None, prompt)
    layers = elsewhere(lambda: make_prompt_cache(model))
    out = run(model, prompt, layers, 4)
    cache.insert_cache(KEY, (prompt + out)[: layers[0].offset], layers)
    (store,) = cache._stores.all()
    assert store.table is not None and store.cache.model is model
    assert turn(cache, model, prompt + out + [3])[1] == len(prompt) + 4


def test_a_row_finds_its_key_on_another_thread_than_the_fetch(caches):
    model, cache, prompt = tiny("llama"), caches(), words(60)
    assert elsewhere(lambda: cache.fetch_nearest_cache(KEY, prompt)) == (None, prompt)
    generator = BatchGenerator(model, max_tokens=4)
    generator.insert([prompt], caches=[make_prompt_cache(model)])
    assert [s.cache.inventory.open_leases for s in cache._stores.all()] == [1]
    while not (ended := [r for r in generator.next()[1] if r.finish_reason]):
        pass
    cache.insert_cache(KEY, ended[0].all_tokens, ended[0].prompt_cache)
    assert len(cache) == 1 and not cache.reasons


def test_the_same_tokens_under_two_keys_are_not_mixed_up(caches):
    model, cache, prompt = tiny("llama"), caches(), words(60)
    for key in ("one", "two"):
        elsewhere(lambda key=key: cache.fetch_nearest_cache(key, prompt))
    BatchGenerator(model, max_tokens=4).insert([prompt])
    assert cache._stores.all() == []  # whose row it is cannot be known: mlx-lm's own caches


def test_two_models_that_take_turns_are_both_cached(caches):
    cache, models = caches(), {"one": tiny("llama", seed=1), "two": tiny("llama", seed=2)}
    said = {key: words(60) for key in models}
    for n in range(4):
        for key, model in models.items():
            out, known = turn(cache, model, said[key], key=key)
            assert out == cold(model, said[key], 4)[0]
            assert known == (len(said[key]) - 1 if n else 0)
            said[key] += out


# -- what stock allows -----------------------------------------------------------------------------------


def test_other_tokens_than_were_fetched_may_be_fed(caches):
    """A warm-up, or a prompt that is rendered again: nothing says that caches are for the last miss."""
    model, cache = tiny("llama"), caches()
    assert cache.fetch_nearest_cache(KEY, words(60))[0] is None
    layers, other = make_prompt_cache(model), words(50, 9)
    out = run(model, other, layers, 4)
    assert out == cold(model, other, 4)[0]
    cache.insert_cache(KEY, (other + out)[: layers[0].offset], layers)
    generator = BatchGenerator(model, max_tokens=4)
    assert cache.fetch_nearest_cache(KEY, words(40, 3))
    generator.insert([words(30, 4)], caches=[make_prompt_cache(model)])
    while not (ended := [r for r in generator.next()[1] if r.finish_reason]):
        pass
    assert ended[0].all_tokens[30:] == cold(model, words(30, 4), 4)[0]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_copy_may_be_put_in_while_its_original_goes_on(caches, family):
    """As servers do that keep the state at the end of a system prompt."""
    model, cache, prompt = tiny(family), caches(), words(160)
    cache.learn(KEY, model)
    layers, rest = cache.fetch_nearest_cache(KEY, prompt)
    mx.eval(model(mx.array([rest[:100]]), cache=layers))
    cache.insert_cache(KEY, prompt[:100], copy.deepcopy(layers), cache_type="system")
    out = run(model, rest[100:], layers, 4)
    cache.insert_cache(KEY, (prompt + out)[: layers[0].offset], layers)
    assert out == cold(model, prompt, 4)[0]
    assert cache.fetch_nearest_cache(KEY, prompt[:100] + words(9, 7))[1] == words(9, 7)
    assert not cache.reasons


def test_caches_with_a_bound_stay_mlx_lms_own(caches):
    model, cache, prompt = tiny("gemma2"), caches(), words(60)
    cache.fetch_nearest_cache(KEY, prompt)
    layers = make_prompt_cache(model, max_kv_size=32)
    assert all(type(x) is RotatingKVCache for x in layers)
    generator = BatchGenerator(model, max_tokens=4)
    generator.insert([prompt], caches=[layers])
    assert cache._stores.all() == []
    while not (ended := [r for r in generator.next()[1] if r.finish_reason]):
        pass
    assert all(x.max_size == 32 for x in ended[0].prompt_cache)
    cache.insert_cache(KEY, ended[0].all_tokens, ended[0].prompt_cache)
    assert cache.fetch_nearest_cache(KEY, [*ended[0].all_tokens, 3])[1] == [3]


def test_caches_that_hold_something_are_not_replaced(caches):
    model, cache, prompt = tiny("llama"), caches(), words(60)
    layers = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt[:40]]), cache=layers))
    cache.fetch_nearest_cache(KEY, prompt)
    generator = BatchGenerator(model, max_tokens=4)
    generator.insert([prompt[40:]], caches=[layers], all_tokens=[prompt[:40]])
    while not (ended := [r for r in generator.next()[1] if r.finish_reason]):
        pass
    assert ended[0].all_tokens[60:] == cold(model, prompt, 4)[0]


# -- names that others have bound -------------------------------------------------------------------------


@pytest.fixture
def server_module(monkeypatch):
    """A module that bound mlx-lm's names before we came, one of them under a name of its own."""
    module = types.ModuleType("somebodys_server")
    module.make_cache = mlx_lm_cache.make_prompt_cache
    module.LRUPromptCache = mlx_lm_cache.LRUPromptCache
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_names_that_were_bound_before_are_heard_and_put_back(server_module, monkeypatch):
    original = mlx_lm_cache.make_prompt_cache
    cache, second = LRUPromptCache(), LRUPromptCache()
    later = types.ModuleType("loaded_later")
    later.make_prompt_cache = mlx_lm_cache.make_prompt_cache
    monkeypatch.setitem(sys.modules, later.__name__, later)
    assert server_module.make_cache is later.make_prompt_cache is not original
    model, prompt = tiny("llama"), words(60)
    cache.fetch_nearest_cache(KEY, prompt)
    layers = server_module.make_cache(model)
    run(model, prompt, layers, 2)
    cache.insert_cache(KEY, prompt, layers)
    assert cache._stores.all()[0].table is not None
    cache.close()
    assert server_module.make_cache is not original
    second.close()
    assert server_module.make_cache is later.make_prompt_cache is mlx_lm_cache.make_prompt_cache is original


def test_install_takes_the_place_of_mlx_lms_class(server_module):
    original, ours = mlx_lm_cache.LRUPromptCache, onefold.mlx_lm.LRUPromptCache
    with onefold.mlx_lm.install(max_bytes="1GB") as first:
        assert server_module.LRUPromptCache is mlx_lm_cache.LRUPromptCache
        second = onefold.mlx_lm.install(max_bytes="1GB")
        made = server_module.LRUPromptCache(3), server_module.LRUPromptCache(max_size=3, max_bytes=5)
        assert all(isinstance(cache, ours) and cache.max_size == 3 for cache in made)
        assert [cache.max_bytes for cache in made] == [10**9, 5]
        with pytest.raises(ConfigError, match="uninstall it before you install it with others"):
            onefold.mlx_lm.install()
        first.uninstall()
        assert issubclass(server_module.LRUPromptCache, ours)
        second.uninstall()
    assert server_module.LRUPromptCache is mlx_lm_cache.LRUPromptCache is original
    assert onefold.mlx_lm.LRUPromptCache is ours is LRUPromptCache is not original
    for cache in made:
        cache.close()


def test_options_that_are_wrong_are_refused_when_they_are_installed(server_module):
    with pytest.raises(ConfigError, match="cannot read"):
        onefold.mlx_lm.install(max_bytes="a lot")
    assert server_module.LRUPromptCache is mlx_lm_cache.LRUPromptCache is StockCache
