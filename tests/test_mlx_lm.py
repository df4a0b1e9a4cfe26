"""The drop-in for mlx-lm's LRUPromptCache, used by hand and under mlx-lm's own batches."""

from __future__ import annotations

import gc
import logging
import random
import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from batching import KEY, Loop
from driving import cold
from mlx_lm import server
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from tiny import tiny

import onefold
from onefold.cache.memory import device
from onefold.cache.model.stock import stock_attention
from onefold.mlx_lm import UNLIMITED, LRUPromptCache

HEADS, DIM = 2, 16
FAMILIES = ["llama", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "deepseek_v32", "falcon_h1", "qwen3_next", "mamba"]


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


def kv(tokens: list[int], layer: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values that show which tokens they are of, and where."""
    base = mx.array(tokens, mx.float32).reshape(1, 1, -1, 1) + layer / 8
    k = mx.broadcast_to(base, (1, HEADS, len(tokens), DIM))
    return k, k + 1000


def filled(tokens: list[int], n_layers: int = 2) -> list[KVCache]:
    layers = [KVCache() for _ in range(n_layers)]
    for i, layer in enumerate(layers):
        layer.update_and_fetch(*kv(tokens, i))
    mx.eval([x.state for x in layers])
    return layers


def feed(layers: list[Any], tokens: list[int]) -> None:
    for i, layer in enumerate(layers):
        layer.update_and_fetch(*kv(tokens, i))


def held(layers: list[Any]) -> list[list[int]]:
    """The tokens that each layer holds."""
    found = []
    for i, layer in enumerate(layers):
        k, v = layer.keys_and_values()
        assert mx.array_equal(k + 1000, v)
        found.append((k[0, 0, :, 0] - i / 8).astype(mx.int32).tolist())
    return found


@pytest.fixture
def cache():
    made = LRUPromptCache(max_size=10)
    yield made
    for store in made._stores.all():
        store.cache.check()
    made.close()


# -- by hand: caches of a model that nobody has shown ---------------------------------------------


def test_the_first_fetch_moves(cache):
    prompt = words(3000)
    cache.insert_cache(KEY, prompt, filled(prompt))
    entry = cache.nbytes
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    layers, rest = cache.fetch_nearest_cache(KEY, [*prompt, 7, 8])
    assert rest == [7, 8]
    feed(layers, rest)
    mx.eval([x.state for x in layers])
    assert held(layers) == [[*prompt, 7, 8]] * 2
    assert mx.get_peak_memory() - before < 0.6 * entry  # one of two layers, while the buffer grows
    cache.insert_cache(KEY, [*prompt, 7, 8], layers)
    assert len(cache) == 1


def test_a_fetch_while_it_is_out_reads_the_same_and_neither_disturbs_the_other(cache):
    prompt = words(300)
    cache.insert_cache(KEY, prompt, filled(prompt))
    first, _ = cache.fetch_nearest_cache(KEY, [*prompt, 1])
    second, _ = cache.fetch_nearest_cache(KEY, [*prompt, 2])
    feed(first, [1, 1, 1])
    feed(second, [2])
    feed(first, [1])
    assert held(first) == [[*prompt, 1, 1, 1, 1]] * 2
    assert held(second) == [[*prompt, 2]] * 2
    cache.insert_cache(KEY, [*prompt, 1, 1, 1, 1], first)
    cache.insert_cache(KEY, [*prompt, 2], second)
    assert len(cache) == 2
    third, rest = cache.fetch_nearest_cache(KEY, [*prompt, 1, 1, 3])
    assert rest == [3] and held(third) == [[*prompt, 1, 1]] * 2


def test_what_is_fetched_and_never_put_back_loses_nothing(cache):
    prompt = words(300)
    cache.insert_cache(KEY, prompt, filled(prompt))
    for _ in range(3):
        layers, rest = cache.fetch_nearest_cache(KEY, [*prompt, 5])
        assert rest == [5] and held(layers) == [prompt] * 2
        feed(layers, [9, 9, 9])  # other tokens than were asked for, in the stored buffer's room
        del layers
    gc.collect()
    layers, rest = cache.fetch_nearest_cache(KEY, [*prompt, 5])
    assert held(layers) == [prompt] * 2
    assert cache._stores.all()[0].cache.stats().open_leases == 1


def test_a_branch_keeps_the_other_branch(cache):
    prompt = words(300)
    cache.insert_cache(KEY, prompt, filled(prompt))
    other = [*prompt[:120], 91, 92]
    layers, rest = cache.fetch_nearest_cache(KEY, other)
    assert rest == [91, 92] and held(layers) == [prompt[:120]] * 2
    feed(layers, rest)
    cache.insert_cache(KEY, other, layers)
    layers, rest = cache.fetch_nearest_cache(KEY, [*prompt, 3])
    assert rest == [3] and held(layers) == [prompt] * 2


def test_an_exact_hit_leaves_a_token_to_run(cache):
    prompt = words(40)
    cache.insert_cache(KEY, prompt, filled(prompt))
    layers, rest = cache.fetch_nearest_cache(KEY, prompt)
    assert rest == prompt[-1:] and held(layers) == [prompt[:-1]] * 2


def test_a_key_longer_than_the_kv_is_clipped_to_the_shortest_layer(cache, caplog):
    prompt = words(50)
    layers = filled(prompt)
    layers[1].trim(3)
    with caplog.at_level(logging.WARNING, "onefold"):
        cache.insert_cache(KEY, [*prompt, 1, 2], layers)
        cache.insert_cache(KEY, [*prompt, 1, 2], filled(prompt))
    assert cache.reasons["more tokens than KV"] == 2
    assert len([r for r in caplog.records if "more tokens than KV" in r.message]) == 1
    found, rest = cache.fetch_nearest_cache(KEY, [*prompt, 1, 2])
    assert held(found) == [prompt] * 2 and rest == [1, 2]


def test_tokens_fewer_than_the_kv_keep_just_those(cache):
    prompt = words(50)
    cache.insert_cache(KEY, prompt[:30], filled(prompt))
    assert cache.reasons == {"fewer tokens than KV": 1}
    found, rest = cache.fetch_nearest_cache(KEY, prompt)
    assert held(found) == [prompt[:30]] * 2 and rest == prompt[30:]


def test_layers_that_disagree_keep_what_all_have(cache):
    prompt = words(50)
    layers = filled(prompt)
    layers[0].trim(10)
    cache.insert_cache(KEY, prompt[:45], layers)
    assert sum(cache.reasons.values()) == 1
    found, rest = cache.fetch_nearest_cache(KEY, prompt)
    assert held(found) == [prompt[:40]] * 2 and rest == prompt[40:]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_window_that_does_not_end_with_the_tokens_is_not_reused(cache, wrapped):
    n = 40 if wrapped else 12
    ring = RotatingKVCache(max_size=16)
    for t in range(n):
        ring.update_and_fetch(*kv([t]))
    cache.insert_cache(KEY, list(range(n - 2)), [ring, *filled(list(range(n)), 1)])
    found, rest = cache.fetch_nearest_cache(KEY, list(range(n)))
    if wrapped:
        assert found is None and len(cache) == 0 and cache.reasons["fewer tokens than KV"] == 1
    else:
        assert rest == [n - 2, n - 1] and found[0].offset == found[1].offset == n - 2


def test_a_class_that_we_do_not_know_is_not_reused(cache, caplog):
    class Mystery:
        def __init__(self) -> None:
            self.secret = mx.ones((4, 4))

        nbytes = 64

    with caplog.at_level(logging.WARNING, "onefold"):
        for _ in range(3):
            cache.insert_cache(KEY, words(10), [Mystery()])
    assert cache.fetch_nearest_cache(KEY, words(10)) == (None, words(10))
    assert len(cache) == 0 and cache.nbytes == 0
    assert sum(n for reason, n in cache.reasons.items() if "Mystery" in reason) == 3
    assert len([r for r in caplog.records if "prompt cache: cache class Mystery" in r.getMessage()]) == 1


def test_layers_of_another_shape_under_the_same_key_are_kept_apart(cache):
    prompt = words(40)
    cache.insert_cache(KEY, prompt, filled(prompt, 2))
    cache.insert_cache(KEY, prompt, filled(prompt, 3))
    found, _ = cache.fetch_nearest_cache(KEY, [*prompt, 1])
    assert len(found) in (2, 3) and held(found) == [prompt] * len(found)


def test_another_key_shares_nothing(cache):
    prompt = words(40)
    cache.insert_cache(KEY, prompt, filled(prompt))
    assert cache.fetch_nearest_cache(("other", None, None), prompt) == (None, prompt)


def test_layers_put_back_twice_are_refused_the_second_time(cache):
    prompt = words(40)
    cache.insert_cache(KEY, prompt, filled(prompt))
    layers, rest = cache.fetch_nearest_cache(KEY, [*prompt, 1])
    feed(layers, rest)
    cache.insert_cache(KEY, [*prompt, 1], layers)
    cache.insert_cache(KEY, [*prompt, 1], layers)
    assert cache.reasons == {"already put back": 1}


def test_other_tokens_than_were_fetched_are_not_kept(cache):
    prompt = words(40)
    cache.insert_cache(KEY, prompt, filled(prompt))
    layers, _ = cache.fetch_nearest_cache(KEY, [*prompt, 1])
    feed(layers, [1])
    cache.insert_cache(KEY, [*words(40, seed=3), 1], layers)
    assert cache.reasons == {"layers do not fit the tokens": 1}
    found, _ = cache.fetch_nearest_cache(KEY, [*prompt, 2])
    assert held(found) == [prompt] * 2


@pytest.mark.parametrize("tokens", [[1.5, 2], ["a"], [[1, 2]], [1 << 40]])
def test_what_is_no_token_is_a_miss(cache, tokens):
    cache.insert_cache(KEY, tokens, filled([1, 2]))
    assert cache.fetch_nearest_cache(KEY, tokens) == (None, tokens)
    assert cache.reasons["not tokens"] == 2 and len(cache) == 0


def test_images_are_told_apart(cache):
    """mlx-lm names an image by a large negative number in place of its patches' tokens."""
    one, two = [1, 2, *[-(1 << 59) - 5] * 8, 3], [1, 2, *[-(1 << 59) - 6] * 8, 3]
    cache.insert_cache(KEY, one, filled([1, 2, *[50] * 8, 3]))
    layers, rest = cache.fetch_nearest_cache(KEY, [*one, 4])
    assert rest == [4] and layers[0].offset == 11
    _, rest = cache.fetch_nearest_cache(KEY, [*two, 4])
    assert rest == [*two[2:], 4]


def test_unknown_cache_types_are_named(cache):
    with pytest.raises(onefold.ConfigError, match="assistant, user, system"):
        cache.insert_cache(KEY, [1], filled([1]), cache_type="nonsense")


def test_a_fetch_refreshes():
    cache = LRUPromptCache(max_size=2)
    one, two, three = words(20, 1), words(20, 2), words(20, 3)
    cache.insert_cache(KEY, one, filled(one))
    cache.insert_cache(KEY, two, filled(two))
    cache.fetch_nearest_cache(KEY, [*one, 1])
    gc.collect()
    cache.insert_cache(KEY, three, filled(three))
    assert [len(cache.fetch_nearest_cache(KEY, [*t, 1])[1]) for t in (one, two, three)] == [1, 21, 1]
    cache.close()


def test_an_entry_larger_than_the_limit_does_not_empty_the_cache():
    small = [words(200, seed) for seed in range(3)]
    cache = LRUPromptCache(max_size=10, max_bytes=4 * sum(x.nbytes for x in filled(small[0])))
    for tokens in small:
        cache.insert_cache(KEY, tokens, filled(tokens))
    large = words(5000, seed=9)
    cache.insert_cache(KEY, large, filled(large))
    assert cache.reasons == {"larger than the limit": 1}
    assert [len(cache.fetch_nearest_cache(KEY, [*t, 1])[1]) for t in small] == [1, 1, 1]
    assert cache.fetch_nearest_cache(KEY, large)[0] is None
    cache.close()


def test_the_byte_limit_holds_and_the_oldest_goes_first():
    limit = 5 * sum(x.nbytes for x in filled(words(200)))
    cache = LRUPromptCache(max_size=100, max_bytes=limit)
    before = mx.get_active_memory()
    for seed in range(20):
        tokens = words(200, seed)
        cache.insert_cache(KEY, tokens, filled(tokens))
        assert cache.nbytes <= limit
    n_arrays = 4 * len(cache)
    assert mx.get_active_memory() - before <= limit + n_arrays * (32 << 10)  # MLX's pool gives up to 32 KiB too much
    _, rest = cache.fetch_nearest_cache(KEY, [*words(200, 19), 1])
    assert rest == [1] and len(cache) <= 7  # six whole ones, and a token that several begin with
    assert cache.fetch_nearest_cache(KEY, words(200, 0))[0] is None
    stats = cache.stats_by_type()
    assert sum(s["n_bytes"] for s in stats.values()) == cache.nbytes
    assert sum(s["n_sequences"] for s in stats.values()) == len(cache)
    cache.trim_to(n_bytes=limit // 2)
    assert cache._stores.stored_bytes <= limit // 2
    cache.trim_to(n_sequences=1)
    assert len(cache) == 1
    cache.close()
    gc.collect()
    assert mx.get_active_memory() - before < 1 << 20


def test_quantised_layers_stay_quantised_and_are_mlx_lms_own(cache):
    prompt, more = words(300), words(20, seed=1)
    layers = [QuantizedKVCache(group_size=32, bits=4) for _ in range(2)]
    arrays = [mx.random.normal((1, HEADS, 320, 32)) for _ in range(2)]
    for layer in layers:
        layer.update_and_fetch(arrays[0][..., :300, :], arrays[1][..., :300, :])
    cache.insert_cache(KEY, prompt, layers)
    found, rest = cache.fetch_nearest_cache(KEY, prompt + more)
    assert rest == more and all(isinstance(x, QuantizedKVCache) and x.bits == 4 for x in found)
    reference = QuantizedKVCache(group_size=32, bits=4)
    reference.update_and_fetch(*arrays)
    q = mx.random.normal((1, HEADS, 1, 32))
    for layer in found:
        k, v = layer.update_and_fetch(arrays[0][..., 300:, :], arrays[1][..., 300:, :])
        out = stock_attention(q + 0, k, v, layer, scale=0.2, mask=None)
        expected = stock_attention(q + 0, *reference.keys_and_values(), reference, scale=0.2, mask=None)
        assert mx.allclose(out, expected, atol=1e-5)
    assert cache.nbytes < 0.3 * sum(2 * a.nbytes for a in arrays) * 2  # 512 slots of 4 bits and scales


def test_kinds_that_hold_a_point_are_taken_over_at_it(cache):
    prompt = list(range(40))
    ring = RotatingKVCache(max_size=16, keep=2)
    ring.update_and_fetch(*kv(prompt))
    state = ArraysCache(2)
    state[0], state[1] = mx.ones((1, 3)), mx.zeros((1, 8, 4))[:, ::2]
    pair = CacheList(ArraysCache(1), KVCache())
    pair[0][0] = mx.full((1, 4), 7.0)
    pair[1].update_and_fetch(*kv(prompt))
    cache.insert_cache(KEY, prompt, [ring, state, pair])
    found, rest = cache.fetch_nearest_cache(KEY, [*prompt, 40])
    assert rest == [40]
    assert isinstance(found[1], ArraysCache) and mx.array_equal(found[1][0], mx.ones((1, 3)))
    assert found[2][0][0].tolist() == [[7.0] * 4] and found[2][1].offset == 40
    expected, _ = ring.update_and_fetch(*kv([40]))
    got, _ = found[0].update_and_fetch(*kv([40]))
    assert sorted(got[0, 0, :, 0].tolist()) == sorted(expected[0, 0, :, 0].tolist())
    again, rest = cache.fetch_nearest_cache(KEY, [*prompt[:30], 91])
    assert again is None and rest == [*prompt[:30], 91]  # no point there to go back to


def test_unknown_models_are_batched_by_mlx_lm_itself(cache):
    """Fetched by hand, given to a batch by hand: the layers can be merged, as mlx-lm merges its own."""
    model = tiny("llama")
    prompts = [words(30, 1), words(44, 2)]
    for prompt in prompts:
        layers = make_prompt_cache(model)
        mx.eval(model(mx.array([prompt]), cache=layers))
        cache.insert_cache(KEY, prompt, layers)
    loop = Loop(model, cache)
    again = [[*p, 5, 6] for p in prompts]
    answers, known = loop.serve(again)
    assert known == [30, 44]
    assert answers == [cold(model, p, 6)[0] for p in again]


# -- under mlx-lm's batches: the model is known ------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_answer_as_a_cold_run_does(family):
    model, cache = tiny(family), LRUPromptCache(max_size=50)
    loop = Loop(model, cache)
    shared = words(70)
    prompts = [shared + words(n, seed=n) for n in (6, 9, 20)]
    answers, _ = loop.serve(prompts)
    assert answers == [cold(model, p, 6)[0] for p in prompts]
    turns = [p + a + words(4, seed=9) for p, a in zip(prompts, answers, strict=True)]
    answers, known = loop.serve(turns)
    assert answers == [cold(model, p, 6)[0] for p in turns]
    assert known == [len(p) + 6 for p in prompts]
    answers, known = loop.serve([turns[0], prompts[1], prompts[1] + [3, 4]])  # exact repeats, and a branch
    assert answers == [cold(model, p, 6)[0] for p in (turns[0], prompts[1], [*prompts[1], 3, 4])]
    assert not cache.reasons
    (store,) = cache._stores.all()
    store.cache.check()
    assert store.cache.stats().open_leases == 0
    cache.close()


def test_rows_come_and_go_and_a_cancelled_one_keeps_its_prompt():
    model, cache = tiny("llama"), LRUPromptCache()
    loop = Loop(model, cache)
    prompts = [words(100, seed) for seed in range(3)]
    first, _ = loop.ask(prompts[0], 20)
    for _ in range(4):
        loop.step()
    second, _ = loop.ask(prompts[1], 4)
    third, _ = loop.ask(prompts[2], 30)
    for _ in range(6):
        loop.step()
    loop.cancel(third)
    loop.run()
    assert loop.answers[first] == cold(model, prompts[0], 20)[0]
    assert loop.answers[second] == cold(model, prompts[1], 4)[0]
    (_, known) = loop.ask([*prompts[2], 5], 2)
    assert known >= 99
    loop.run()
    (store,) = cache._stores.all()
    store.cache.check()
    assert store.cache.stats().open_leases == 0
    cache.close()


def test_cancelled_requests_do_not_pile_up():
    model, cache = tiny("llama"), LRUPromptCache(max_size=3)
    loop = Loop(model, cache)
    for seed in range(12):
        uid, _ = loop.ask(words(100, seed), 50)
        for _ in range(5):
            loop.step()
        loop.cancel(uid)
        assert len(cache) <= 3
    (store,) = cache._stores.all()
    assert store.cache.stats().stored_tokens <= 3 * 100
    assert store.cache.stats().open_leases == 0
    store.cache.check()
    cache.close()


@pytest.mark.parametrize("evaluated", [True, False])
def test_layers_are_put_back_on_another_thread_where_it_can_compute_them(cache, evaluated):
    prompt = words(40)
    cache.insert_cache(KEY, prompt, filled(prompt))
    layers, rest = cache.fetch_nearest_cache(KEY, [*prompt, 1])
    feed(layers, rest)
    if evaluated:
        mx.eval([x.state for x in layers])
    thread = threading.Thread(target=cache.insert_cache, args=(KEY, [*prompt, 1], layers))
    thread.start()
    thread.join()
    assert cache.reasons == ({} if evaluated else {"another thread": 1})
    if not evaluated:  # they are still good here
        cache.insert_cache(KEY, [*prompt, 1], layers)
    assert len(cache) == 1 and len(cache.fetch_nearest_cache(KEY, [*prompt, 1, 2])[1]) == 1


def test_a_lone_request_makes_its_own_caches_and_they_are_taken_over_without_a_copy():
    """As the server does for a request that is not batched."""
    model, cache = tiny("llama"), LRUPromptCache()
    prompt = words(60)
    assert cache.fetch_nearest_cache(KEY, prompt) == (None, prompt)
    layers = server.make_prompt_cache(model)
    out = [t for t, _ in zip(_tokens(model, prompt, layers), range(8), strict=False)]
    before = mx.get_active_memory()
    cache.insert_cache(KEY, prompt + out, layers)
    assert mx.get_active_memory() <= before + 4096
    del layers
    layers, rest = cache.fetch_nearest_cache(KEY, prompt + out + [3])
    assert rest == [3]
    again = [t for t, _ in zip(_tokens(model, rest, layers), range(5), strict=False)]
    assert again == cold(model, prompt + out + [3], 5)[0]
    cache.insert_cache(KEY, prompt + out + [3] + again, layers)
    (store,) = cache._stores.all()
    assert store.table is not None and store.cache.stats().moves == 1
    cache.close()


def _tokens(model: nn.Module, prompt: list[int], layers: list[Any]) -> Any:
    return (int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=-1, prompt_cache=layers))


def test_a_model_that_is_loaded_again_finds_its_kv():
    cache = LRUPromptCache()
    model, prompt = tiny("llama", seed=1), words(80)
    prompts = [prompt, words(70, 2)]
    answers, _ = Loop(model, cache).serve(prompts)
    model = tiny("llama", seed=1)
    gc.collect()
    server.make_prompt_cache(model)  # as mlx-lm's ModelProvider does when it has loaded a model
    turns = [p + a + [4] for p, a in zip(prompts, answers, strict=True)]
    again, known = Loop(model, cache).serve(turns)
    assert known == [86, 76]
    assert again == [cold(model, t, 6)[0] for t in turns]
    cache.close()


def test_another_model_under_the_same_key_finds_nothing():
    cache = LRUPromptCache()
    model, prompt = tiny("llama", seed=1), words(80)
    Loop(model, cache).serve([prompt])
    other = tiny("llama", seed=2)
    server.make_prompt_cache(other)
    (answer,), (known,) = Loop(other, cache).serve([prompt])
    assert known == 0 and answer == cold(other, prompt, 6)[0]
    cache.close()


def test_a_model_is_not_kept_alive():
    cache = LRUPromptCache()
    before = mx.get_active_memory()
    model = tiny("llama")
    Loop(model, cache).serve([words(80), words(70, 1)])
    del model
    gc.collect()
    (store,) = cache._stores.all()
    assert store.cache.model is None
    assert mx.get_active_memory() - before <= cache.nbytes + 4096
    cache.close()


def test_the_seams_are_taken_out_again():
    before = (server.make_prompt_cache, BatchGenerator.insert_segments)
    cache = LRUPromptCache()
    assert server.make_prompt_cache is not before[0]
    assert BatchGenerator.insert_segments is not before[1]
    del cache
    gc.collect()
    assert (server.make_prompt_cache, BatchGenerator.insert_segments) == before


# -- where it was wrong once ---------------------------------------------------------------------------


def test_exact_repeats_that_join_a_pooled_batch_together(monkeypatch):
    """Their regions of the common buffer are empty until they have decoded something."""
    monkeypatch.setattr(device, "on_gpu", lambda: True)  # tails in one slab, as on a GPU
    model, cache = tiny("llama"), LRUPromptCache()
    loop = Loop(model, cache)
    x, y, z = words(40, 1), words(40, 2), words(40, 3)
    loop.serve([x], 2)
    asked = [(y, 9), (z, 9)]
    uids = [loop.ask(*a)[0] for a in asked]
    for _ in range(5):
        loop.step()
    later = [(x, 20), (x[:30], 8)]
    uids += [loop.ask(*a)[0] for a in later]
    loop.step()
    last = ([*y[:35], 1], 4)
    uids.append(loop.ask(*last)[0])  # reads what y committed, and seals the slab
    loop.run()
    for uid, (prompt, n) in zip(uids, [*asked, *later, last], strict=True):
        assert loop.answers[uid] == cold(model, prompt, n)[0]
    assert not cache.reasons
    cache.close()


def test_rows_of_a_pooled_batch_report_a_common_buffer_once(monkeypatch):
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    cache = LRUPromptCache()
    loop = Loop(tiny("llama"), cache)
    for seed in range(6):
        loop.ask(words(100, seed), 12)
    for _ in range(8):
        loop.step()
    assert loop.batches.prompt_cache_nbytes <= cache.nbytes
    loop.run()
    cache.close()


@pytest.mark.parametrize("family", ["llama", "falcon_h1", "deepseek_v32"])
def test_what_was_put_in_by_hand_is_served_in_a_batch_with_what_was_not(family):
    model, cache = tiny(family), LRUPromptCache()
    prompts = [words(70, 1), words(84, 2)]
    for known in (1, 2):
        for prompt in prompts[:known]:
            layers = make_prompt_cache(model)
            mx.eval(model(mx.array([prompt[:-1]]), cache=layers), model(mx.array([prompt[-1:]]), cache=layers))
            cache.insert_cache(KEY, prompt, layers)
        for extra in ([5, 6], [7]):
            turns = [p + extra for p in prompts]
            answers, _ = Loop(model, cache).serve(turns)
            assert answers == [cold(model, t, 6)[0] for t in turns]
    assert not {r for r in cache.reasons if r.startswith("failed")}
    cache.close()


def test_a_model_that_is_refused_is_not_reused_by_its_layers_either(caplog):
    model, cache = tiny("gemma2"), LRUPromptCache()
    original = type(model).__call__

    def uncausal(self, inputs, cache=None, **kwargs):
        out = original(self, inputs, cache=cache, **kwargs)
        return out + out[:, -1:] if inputs.shape[1] > 1 else out

    type(model).__call__ = uncausal
    try:
        prompt = words(90)
        for _ in range(2):
            assert cache.fetch_nearest_cache(KEY, prompt) == (None, prompt)
            layers = server.make_prompt_cache(model)
            mx.eval(model(mx.array([prompt]), cache=layers))
            cache.insert_cache(KEY, prompt, layers)
        assert len(cache) == 0 and cache.nbytes == 0
        assert sum(n for r, n in cache.reasons.items() if "see later ones" in r) >= 2
    finally:
        type(model).__call__ = original
        cache.close()


def test_a_cut_never_falls_inside_an_image(cache):
    image = -(1 << 59) - 5
    key = [1, 2, *[image] * 300, 3, 4, *words(500)]
    cache.insert_cache(KEY, key, filled([t if t >= 0 else 50 for t in key]))
    cache.trim_to(n_bytes=cache.nbytes * 2 // 10)
    _, rest = cache.fetch_nearest_cache(KEY, [*key, 7])
    assert len(key) + 1 - len(rest) in (0, 2)


def test_windows_of_other_sizes_are_kept_apart(cache):
    def ring(n: int, size: int) -> RotatingKVCache:
        made = RotatingKVCache(max_size=size, keep=2)
        for t in range(n):
            made.update_and_fetch(*kv([t]))
        return made

    cache.insert_cache(KEY, list(range(40)), [ring(40, 16)])
    cache.insert_cache(KEY, list(range(50)), [ring(50, 64)])
    layers, rest = cache.fetch_nearest_cache(KEY, list(range(51)))
    assert rest == [50] and layers[0].max_size == 64


def test_what_cannot_be_quantised_says_so():
    cache = LRUPromptCache()
    model = tiny("falcon_h1")
    Loop(model, cache).serve([words(90)])
    layers, rest = cache.fetch_nearest_cache(KEY, words(90) + words(20, 1))
    assert not any(hasattr(layer, "to_quantized") for layer in layers)
    steps = generate_step(
        mx.array(rest), model, max_tokens=4, prompt_cache=layers, kv_bits=8, kv_group_size=32, quantized_kv_start=0
    )
    assert [int(t) for t, _ in steps] == cold(model, words(90) + words(20, 1), 4)[0]
    cache.close()


def test_requests_that_wait_hold_nothing_and_evict_nothing():
    cache = LRUPromptCache(max_bytes=4 << 20)
    loop = Loop(tiny("llama"), cache)
    loop.serve([words(1500, 9)], 2)
    held = cache.nbytes
    waiting = [loop.ask(words(1500, seed), 2)[0] for seed in range(6)]
    assert cache.nbytes == held
    for uid in waiting:
        loop.cancel(uid)
    assert len(cache.fetch_nearest_cache(KEY, [*words(1500, 9), 1])[1]) == 1
    cache.close()


def test_the_limit_holds_at_rest_after_a_request_that_outgrew_it():
    token_bytes = 512
    cache = LRUPromptCache(max_bytes=600 * token_bytes)
    loop = Loop(tiny("llama"), cache)
    for seed in range(3):
        loop.serve([words(100, seed)], 3)
        loop.serve([words(100, seed) + words(700, 50 + seed)], 3)
        gc.collect()
        assert cache.nbytes <= cache.max_bytes
    cache.close()


def test_what_a_discarded_request_leaves_stored_is_an_entry():
    cache = LRUPromptCache(max_size=1, max_bytes=500 * 512)
    loop = Loop(tiny("llama"), cache)
    for seed in range(3):
        loop.serve([words(200, seed)], 3)
        loop.serve([words(200, seed) + words(700, 50 + seed)], 3)
        assert len(cache) == 1
        (store,) = cache._stores.all()
        assert store.cache.stats().stored_tokens <= 210
    cache.close()


def test_of_several_models_the_one_that_was_used_longest_ago_gives_way():
    limit = 5 * sum(x.nbytes for x in filled(words(200)))
    cache = LRUPromptCache(max_size=100, max_bytes=limit)
    cache.insert_cache("a", words(200, 1), filled(words(200, 1)))
    for seed in range(4):
        cache.insert_cache("b", words(200, seed), filled(words(200, seed)))
    cache.insert_cache("a", words(200, 9), filled(words(200, 9)))
    assert len(cache.fetch_nearest_cache("a", [*words(200, 9), 1])[1]) == 1
    assert cache.nbytes <= limit
    cache.close()


def test_an_entry_that_was_cut_keeps_its_place():
    cache = LRUPromptCache(max_size=3)
    for seed in (1, 2, 3):
        cache.insert_cache(KEY, words(512, seed), filled(words(512, seed)))
    cache.trim_to(n_bytes=cache.nbytes - 200 * 512)
    cache.insert_cache(KEY, words(512, 4), filled(words(512, 4)))
    rests = [len(cache.fetch_nearest_cache(KEY, [*words(512, seed), 1])[1]) for seed in (1, 2, 3, 4)]
    assert rests == [513, 1, 1, 1]
    cache.close()


def test_by_type_adds_up_while_a_request_runs():
    cache = LRUPromptCache()
    loop = Loop(tiny("llama"), cache)
    loop.ask(words(300), 4)
    loop.step()
    assert sum(s["n_bytes"] for s in cache.stats_by_type().values()) == cache.nbytes > 0
    loop.run()
    cache.close()


def test_layers_of_another_key_or_cache_are_refused(cache):
    prompt = words(40)
    cache.insert_cache(KEY, prompt, filled(prompt))
    layers, rest = cache.fetch_nearest_cache(KEY, [*prompt, 1])
    feed(layers, rest)
    cache.insert_cache("other", [*prompt, 1], layers)
    other = LRUPromptCache()
    other.insert_cache(KEY, [*prompt, 1], layers)
    assert cache.reasons == {"another key": 1} and other.reasons == {"another key": 1}
    assert len(cache) == 1 and len(other) == 0
    cache.insert_cache(KEY, [*prompt, 1], layers)
    assert len(cache.fetch_nearest_cache(KEY, [*prompt, 1, 2])[1]) == 1
    other.close()


def test_nothing_that_fails_inside_reaches_the_server(cache, monkeypatch):
    prompt = words(40)
    cache.insert_cache(KEY, prompt, filled(prompt))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("onefold.cache.leasing.Leasing.lease", broken)
    assert cache.fetch_nearest_cache(KEY, [*prompt, 1]) == (None, [*prompt, 1])
    cache.insert_cache(KEY, words(50, 1), filled(words(50, 1)))
    assert cache.reasons == {"failed: RuntimeError": 2} and len(cache) == 1
    monkeypatch.undo()
    assert len(cache.fetch_nearest_cache(KEY, [*prompt, 1])[1]) == 1


def test_no_layers_at_all_are_no_entry(cache):
    cache.insert_cache(KEY, [1, 2, 3], [])
    assert cache.fetch_nearest_cache(KEY, [1, 2, 3]) == (None, [1, 2, 3]) and len(cache) == 0


def test_layers_that_are_fetched_and_dropped_do_not_pile_up(cache):
    prompt = words(300)
    cache.insert_cache(KEY, prompt, filled(prompt))
    for _ in range(80):
        cache.fetch_nearest_cache(KEY, [*prompt, 1])
    assert cache._stores.all()[0].cache.inventory.open_leases <= 34


@pytest.mark.parametrize(("given", "kept"), [(-1, 0), (0, 0), (2, 2)])
def test_a_size_below_zero_keeps_nothing(given, kept):
    cache = LRUPromptCache(given)
    for seed in range(3):
        cache.insert_cache(KEY, words(20, seed), filled(words(20, seed)))
    assert len(cache) == kept
    cache.close()


@pytest.mark.parametrize(
    ("given", "limit"), [("8GB", 8_000_000_000), (None, UNLIMITED), (-5, 0), (0, 0), (1e6, 1_000_000)]
)
def test_limits_as_people_write_them(given, limit):
    cache = LRUPromptCache(10, given)
    assert cache.max_bytes == limit
    cache.insert_cache(KEY, words(20), filled(words(20)))
    assert len(cache) == (limit >= 1_000_000) and cache.nbytes <= limit
    cache.close()


@pytest.mark.parametrize(
    ("size", "limit"), [("10", 0), (None, 0), (1.5, 0), (10, "nonsense"), (10, [1]), (10, float("nan"))]
)
def test_nonsense_is_refused_where_it_is_given(size, limit):
    with pytest.raises(onefold.ConfigError):
        LRUPromptCache(size, limit)


def test_nonsense_in_the_place_of_tokens_or_layers_is_a_counted_miss(cache):
    for tokens in (None, 5, "hello"):
        assert cache.fetch_nearest_cache(KEY, tokens) == (None, tokens)
    for layers in (None, "x", 5):
        cache.insert_cache(KEY, [1, 2], layers)
    cache.insert_cache(KEY, [1, 2], [1, 2])
    cache.insert_cache(KEY, [1, 2], [KVCache()])
    assert cache.reasons["not tokens"] == 3 and cache.reasons["not layers"] == 3
    assert cache.reasons["the layers are empty"] == 1 and len(cache) == 0


def test_a_closed_cache_keeps_nothing():
    cache = LRUPromptCache()
    cache.insert_cache(KEY, words(20), filled(words(20)))
    cache.close()
    cache.insert_cache(KEY, words(20), filled(words(20)))
    assert cache.fetch_nearest_cache(KEY, words(20)) == (None, words(20)) and len(cache) == cache.nbytes == 0
