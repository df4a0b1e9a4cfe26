"""The drop-in's limits: what does not fit the device is refused before allocation, and conversations are bounded."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from batching import KEY, Loop
from driving import cold
from local_model import Shape, write_model
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache
from serving import CHAT, ServerError, serving, text_of
from test_mlx_lm import words
from tiny import tiny

from onefold import PrefixCache
from onefold.errors import BudgetError, ConfigError, Unstorable
from onefold.mlx_lm import LRUPromptCache

WIDE = Shape(layers=8, heads=2, kv_heads=2)
STEPS = ["--prefill-step-size", "64"]


def active() -> int:
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


def limited(tokens: int, token_bytes: int) -> LRUPromptCache:
    """A cache on a device that has room for the KV of so many tokens, beside what is in use now."""
    cache = LRUPromptCache()
    cache.device_limit = active() + tokens * token_bytes
    return cache


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("wide"), WIDE)


# -- over HTTP ---------------------------------------------------------------------------------------


@pytest.fixture(params=["batched", "single"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"max_tokens": 4, **({"seed": 1} if request.param == "single" else {})}


def test_a_prompt_that_does_not_fit_the_device_is_an_error_and_the_server_goes_on(wide, options):
    cache = LRUPromptCache()
    with serving(cache, model=wide, flags=STEPS) as server:
        cache.device_limit = active() + 1536 * WIDE.token_bytes

        def ask(n: int, letter: str) -> dict[str, Any]:
            return server.post(CHAT, {"messages": [{"role": "user", "content": letter * n}], **options})

        first = text_of(ask(300, "a"))
        mx.reset_peak_memory()
        with pytest.raises(ServerError, match="does not fit the device"):
            ask(3000, "b")
        server.settle()
        assert mx.get_peak_memory() <= cache.device_limit  # nothing was allocated for it
        assert len(cache) == 1  # nothing was evicted in vain
        assert text_of(ask(300, "a")) == first
        for letter in "cdefgh":  # what is stored makes way
            assert len(text_of(ask(500, letter))) == 4
        assert active() <= cache.device_limit
        assert cache.reasons["no room on the device"] == 1


def test_a_request_that_is_refused_does_not_disturb_the_rows_beside_it(wide):
    cache = LRUPromptCache()
    with serving(cache, model=wide, flags=STEPS) as server:
        messages = [{"role": "user", "content": "x" * 200}]
        alone = text_of(server.post(CHAT, {"messages": messages, "max_tokens": 24}))
        cache.device_limit = active() + 2048 * WIDE.token_bytes
        events = server.stream(CHAT, {"messages": messages, "max_tokens": 24})
        said = text_of(next(events))
        with pytest.raises(ServerError, match="does not fit the device"):
            server.post(CHAT, {"messages": [{"role": "user", "content": "y" * 4000}]}, settle=False)
        assert said + "".join(text_of(e) for e in events) == alone
        server.settle()


# -- by hand -------------------------------------------------------------------------------------------


def token_bytes(model: Any) -> int:
    layers = [RotatingKVCache(max_size=64) for _ in model.layers]
    mx.eval(model(mx.array([[1]]), cache=layers))
    return sum(x.keys[..., :1, :].nbytes + x.values[..., :1, :].nbytes for x in layers)


def test_rows_that_outgrow_the_device_are_ended_by_their_length_newest_first():
    model = tiny("llama")
    cache = limited(1400, token_bytes(model))
    loop = Loop(model, cache)
    prompts = [words(240, seed) for seed in range(2)]
    uids = [loop.ask(prompt, 60)[0] for prompt in prompts]
    loop.run()
    answers = [loop.answers[uid] for uid in uids]
    assert 0 < len(answers[1]) < len(answers[0]) <= 60
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == cold(model, prompt, len(answer))[0]
    assert mx.get_active_memory() <= cache.device_limit
    assert cache.reasons["no room on the device"] > 0
    cache.close()


def test_a_batch_is_refused_a_request_that_does_not_fit_before_it_takes_it_on():
    model = tiny("llama")
    cache = limited(2048, token_bytes(model))
    loop = Loop(model, cache)
    (answer,), _ = loop.serve([words(100)])
    with pytest.raises(BudgetError, match="does not fit the device"):
        loop.ask(words(4000, 1), 6)
    assert loop.serve([words(100)])[0] == [answer]
    cache.close()


def test_a_refusal_is_logged_once_and_counted_each_time(caplog):
    model = tiny("llama")
    cache = limited(1024, token_bytes(model))
    for seed in range(2):
        with pytest.raises(BudgetError):
            cache.admit(KEY, words(4000, seed), model)
    assert cache.reasons == {"no room on the device": 2}
    (said,) = [r.getMessage() for r in caplog.records if "no room on the device" in r.getMessage()]
    assert "a prompt of 4000 tokens does not fit the device" in said
    assert re.search(r"need [\d.]+ MB more of KV, and [\d.]+ kB are left of device_limit=", said)
    assert "or raise device_limit" in said
    cache.close()


def test_a_lone_row_is_refused_at_the_forward_that_does_not_fit():
    model = tiny("llama")
    cache = limited(1024, token_bytes(model))
    cache.learn(KEY, model)
    layers, rest = cache.fetch_nearest_cache(KEY, words(2000))
    with pytest.raises(BudgetError, match="does not fit the device"):
        next(generate_step(mx.array(rest), model, prompt_cache=layers))
    del layers
    layers, rest = cache.fetch_nearest_cache(KEY, words(100))
    assert [int(t) for t, _ in generate_step(mx.array(rest), model, max_tokens=4, prompt_cache=layers)]
    cache.close()


def test_by_default_nothing_is_refused_that_the_device_has_room_for():
    assert LRUPromptCache().device_limit > mx.get_active_memory()
    assert LRUPromptCache(device_limit=None).device_limit is None
    assert LRUPromptCache(device_limit="1GB").device_limit == 10**9


# -- a bound ---------------------------------------------------------------------------------------------


def bounded_cold(model: Any, prompt: list[int], n: int, size: int, keep: int) -> list[int]:
    layers = [RotatingKVCache(max_size=size, keep=keep) for _ in model.layers]
    found = generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=layers, prefill_step_size=64)
    return [int(t) for t, _ in found]


@pytest.fixture(params=[4, 0])
def bounded(request: pytest.FixtureRequest) -> Iterator[LRUPromptCache]:
    cache = LRUPromptCache(max_kv_size=96, keep=request.param)
    yield cache
    for store in cache._stores.all():
        store.cache.check()
    cache.close()


def test_every_row_of_a_batch_is_bounded(bounded):
    model = tiny("llama")
    loop = Loop(model, bounded)
    prompts = [words(40, 1), words(80, 2), words(60, 3)]
    answers, _ = loop.serve(prompts, 60)
    assert answers == [bounded_cold(model, p, 60, 96, bounded.keep) for p in prompts]
    turns = [p + a + [5] for p, a in zip(prompts, answers, strict=True)]
    assert min(loop.serve(turns, 20)[1]) > 90
    uid, _ = loop.ask(words(80, 4), 50)
    while len(loop.answers[uid]) < 40:
        loop.step()
    assert loop.batches.prompt_cache_nbytes <= 96 * token_bytes(model)
    loop.run()
    assert not {r for r in bounded.reasons if r.startswith("failed")}


def test_a_lone_row_is_bounded_from_its_first_turn(bounded):
    model, prompt = tiny("llama"), words(50)
    bounded.learn(KEY, model)
    layers, rest = bounded.fetch_nearest_cache(KEY, prompt)
    out = [int(t) for t, _ in generate_step(mx.array(rest), model, max_tokens=80, prompt_cache=layers)]
    assert out == bounded_cold(model, prompt, 80, 96, bounded.keep)
    assert layers[0].nbytes <= 2 * 96 * token_bytes(model) / len(model.layers)


@pytest.mark.parametrize(("size", "keep"), [(-1, 0), (8, 8), (8, -1), ("8", 4), (8, "4")])
def test_a_bound_that_cannot_be_is_refused(size, keep):
    with pytest.raises(ConfigError, match="max_kv_size"):
        LRUPromptCache(max_kv_size=size, keep=keep)


# -- a format ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["8", "4", "turbo3"])
def test_rows_of_a_batch_and_a_lone_row_are_held_in_a_format(kv):
    model = tiny("llama_q")
    prompts = [words(40, 1), words(80, 2), words(60, 3)]
    wanted = []
    for prompt in prompts:
        with PrefixCache(model, "64MB", kv=kv) as alone, alone.lease(prompt, reserve_tokens=16) as lease:
            found = generate_step(mx.array(prompt), model, max_tokens=12, prompt_cache=lease.layers)
            wanted.append([int(t) for t, _ in found])
    cache, plain = LRUPromptCache(kv=kv), LRUPromptCache()
    loop = Loop(model, cache)
    answers, _ = loop.serve(prompts, 12)
    assert answers == wanted
    turns = [p + a + [5] for p, a in zip(prompts, answers, strict=True)]
    assert min(loop.serve(turns, 4)[1]) > 50
    Loop(model, plain).serve(prompts, 12)
    Loop(model, plain).serve(turns, 4)
    assert 0 < cache.nbytes < 0.6 * plain.nbytes
    cache.learn(KEY, model)
    layers, rest = cache.fetch_nearest_cache(KEY, prompts[0])
    assert [int(t) for t, _ in generate_step(mx.array(rest), model, max_tokens=12, prompt_cache=layers)] == wanted[0]
    for each in (cache, plain):
        for store in each._stores.all():
            store.cache.check()
        each.close()


def test_a_format_that_cannot_be_is_refused(caplog):
    with pytest.raises(ConfigError, match="kv must be one of 16, 8"):
        LRUPromptCache(kv="5")
    cache, model = LRUPromptCache(kv="4"), tiny("llama")
    with pytest.raises(Unstorable, match="use kv='16'"):
        cache.admit(KEY, words(20), model)
    with pytest.raises(Unstorable, match="use kv='16'"):
        cache.fetch_nearest_cache(KEY, words(20))
    assert "every request for this model is refused: kv='4' cannot store" in caplog.text
    cache.close()
