"""A lease belongs to one thread at a time, and moves freely between forwards."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from driving import cold, decode, elsewhere, forward, prefilled, same, turn
from effort import quick
from mlx_lm.models.cache import make_prompt_cache
from tiny import FAMILIES as CONFIGS
from tiny import build, tiny

import onefold
from onefold.cache.model import stock
from onefold.cache.model.formats.registry import FORMATS
from onefold.mlx_lm import LRUPromptCache

FAMILIES = ("llama", "gemma3", "qwen3_next", "gemma2")
"""Full, sliding, hybrid, and outside the seam."""


WIDE = {"llama_q": {"num_hidden_layers": 4}, "gemma4": {}, "qwen3_next": {"head_dim": 32}, "deepseek_v3": {}}
"""Full, sliding, hybrid and MLA, with heads that quantised formats store."""
STORED = [f"{family} {kv}" for family in ("llama_q", "gemma4", "qwen3_next") for kv in FORMATS]
HANDED = quick([*STORED, "llama_q 4+1", "deepseek_v3 16"], "llama_q 4", "gemma4 8", "qwen3_next k8v4", "deepseek_v3 16")


def wide(family: str) -> Any:
    return build(CONFIGS[family].module, {**CONFIGS[family].config, **WIDE[family]}, seed=1)


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=n)


def step(model: Any, layers: list[Any], tokens: list[int]) -> mx.array:
    """A forward that leaves its logits to whoever reads them, evaluated."""
    logits = model(mx.array([tokens]), cache=layers)[:, -1, :]
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("stored", HANDED)
def test_a_cache_that_is_made_here_and_first_used_elsewhere(stored: str) -> None:
    """The second conversation steps in a batch that was made here, too."""
    family, kv = stored.split()
    model, tokens, options = wide(family), words(40), {"kv": kv, "min_checkpoint_tokens": 1}

    def run(cache: onefold.PrefixCache) -> list[mx.array]:
        with cache.lease(tokens) as lease:
            seen = [forward(model, lease.layers, tokens, lease.cached)]
            lease.commit()
        return seen

    def batched(cache: onefold.PrefixCache, on: Any) -> list[mx.array]:
        prompts = [tokens + words(5, 1), words(30, 2)]
        leases = on(lambda: prefilled(cache, model, prompts, 8))
        batch = cache.batch(leases)
        seen = [on(lambda: decode(batch, prompts, 1)), decode(batch, prompts, 1), on(lambda: decode(batch, prompts, 1))]
        for lease in leases:
            on(lease.commit)
        return seen

    with onefold.PrefixCache(model, "64MB", **options) as cache:
        reference = run(cache) + batched(cache, lambda work: work())
    with onefold.PrefixCache(model, "64MB", **options) as cache:
        kept = stock.arrays_of(cache.parts.models.anatomies)
        assert bool(kept) == (kv not in ("16", "affine8", "affine4"))
        elsewhere(lambda: mx.eval(kept))  # what is lazy can be computed on this thread alone
        seen = elsewhere(lambda: run(cache)) + batched(cache, elsewhere)
        cache.check()
    assert all(mx.array_equal(a, b) for a, b in zip(seen, reference, strict=True))


def test_closing_a_lease_or_a_cache_does_not_replace_the_error_that_is_being_raised() -> None:
    model = tiny("llama")
    cache, left, go = onefold.PrefixCache(model, "64MB"), threading.Event(), threading.Event()
    lease = cache.lease(words(40))

    def leave_lazy_arrays() -> None:  # which only a thread that is alive can compute
        model.model(mx.array([words(8)]), cache=lease.layers)
        left.set()
        go.wait(60)
        mx.clear_streams()

    thread = threading.Thread(target=leave_lazy_arrays)
    thread.start()
    assert left.wait(60)
    try:
        with pytest.raises(ValueError, match="the caller's own") as caught, lease:
            raise ValueError("the caller's own")
        assert [note for note in caught.value.__notes__ if "WrongThread" in note]
    finally:
        go.set()
        thread.join()
    closing = cache.close

    def failing() -> None:
        closing()
        raise RuntimeError("the cache's own")

    cache.close = failing  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the caller's own") as caught, cache:
        raise ValueError("the caller's own")
    assert caught.value.__notes__ == ["After this error, closing failed too: RuntimeError: the cache's own"]
    with pytest.raises(RuntimeError, match="the cache's own"), cache:
        pass


def test_what_another_thread_left_lazy_in_a_model_is_named() -> None:
    model = tiny("llama")
    elsewhere(lambda: setattr(model, "held", [{"more": mx.zeros(3) + 1}]))
    with pytest.raises(onefold.ConfigError, match="made on another thread"):
        onefold.PrefixCache(model, "64MB")


def test_a_model_that_was_loaded_elsewhere(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "scaled")
    config = json.loads((tmp_path / "scaled" / "config.json").read_text())
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    (tmp_path / "scaled" / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    loaded, _ = elsewhere(lambda: onefold.load(tmp_path / "scaled"))
    with onefold.PrefixCache(loaded, "64MB") as cache:
        turn(cache, loaded, words(40))


def test_a_model_that_is_loaded_here_and_first_used_elsewhere() -> None:
    """Rotary frequencies are no parameters, and mlx-lm leaves them lazy."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = rope | {"original_max_position_embeddings": 64}
    model = build("llama", {**CONFIGS["llama"].config, "rope_scaling": scaled})
    with onefold.PrefixCache(model, "64MB") as cache:
        elsewhere(lambda: turn(cache, model, words(40)))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_forward_on_any_thread_of_a_pool(family: str) -> None:
    """Four conversations at once, `asyncio.to_thread` around each forward, two turns each."""
    model = tiny(family)
    system = words(24)

    async def talk(cache: onefold.PrefixCache, pool: ThreadPoolExecutor, who: int) -> None:
        loop, tokens = asyncio.get_running_loop(), system + words(9, who)
        for turn_number in range(2):
            _, reference = await loop.run_in_executor(pool, cold, model, tokens, 4)
            lease = cache.lease(tokens)  # on the event loop's thread
            seen, at = [], lease.cached
            while at < len(tokens):
                stop = len(tokens) if at == len(tokens) - 1 else min((at // 8 + 1) * 8, len(tokens) - 1)
                logits = await loop.run_in_executor(pool, step, model, lease.layers, tokens[at:stop])
                at = stop
            seen.append(logits)
            for _ in range(4):
                tokens = [*tokens, int(mx.argmax(seen[-1]).item())]
                seen.append(await loop.run_in_executor(pool, step, model, lease.layers, tokens[-1:]))
            assert same(seen, reference), f"conversation {who}, turn {turn_number}"
            await loop.run_in_executor(pool, lease.commit, tokens)
            tokens = tokens + words(7, 10 * who + turn_number)

    async def main(cache: onefold.PrefixCache) -> None:
        with ThreadPoolExecutor(4) as pool:
            await asyncio.gather(*(talk(cache, pool, who) for who in range(4)))

    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        asyncio.run(main(cache))
        cache.check()
        stats = cache.stats()
        assert stats.open_leases == 0 and "lost on the device" not in stats.reasons


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_that_nobody_evaluated_is_continued_after_its_thread_has_ended(family: str) -> None:
    model, prompt = tiny(family), words(40)
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        lease = cache.lease(prompt)
        for at in range(0, 39, 13):
            elsewhere(lambda at=at: [model(mx.array([prompt[at : at + 13]]), cache=lease.layers)][:0])
        logits = model(mx.array([prompt[39:]]), cache=lease.layers)[:, -1, :]
        reference = make_prompt_cache(model)
        for at in range(0, 39, 13):
            model(mx.array([prompt[at : at + 13]]), cache=reference)
        assert same([logits], [model(mx.array([prompt[39:]]), cache=reference)[:, -1, :]])
        elsewhere(lambda: lease.commit(prompt))
        cache.check()
        turn(cache, model, [*prompt, 5], n=2)


def test_a_conversation_is_continued_in_place_whatever_thread_had_it() -> None:
    model, tokens = tiny("llama"), words(40)
    with onefold.PrefixCache(model, "16MB") as cache:
        for i in range(4):
            tokens = elsewhere(lambda i=i, tokens=tokens: turn(cache, model, [*tokens, *words(5, i)])[1])
        assert cache.stats().moves == 3 and cache.stats().borrows == 0


def test_two_threads_in_one_forward_are_refused() -> None:
    model, prompt = tiny("llama"), words(20)
    inside, go = threading.Event(), threading.Event()
    with onefold.PrefixCache(model, "16MB") as cache, cache.lease(prompt) as lease:
        first, caught = lease.layers[0], list[BaseException]()
        real = first.update_and_fetch

        def slowly(*args: Any) -> Any:
            inside.set()
            assert go.wait(60)
            return real(*args)

        first.update_and_fetch = slowly
        thread = threading.Thread(target=forward, args=(model, lease.layers, prompt, 0))
        thread.start()
        assert inside.wait(60)
        for use in (
            lambda: model(mx.array([prompt]), cache=lease.layers),
            lambda: lease.commit(prompt),
        ):
            try:
                use()
            except onefold.WrongThread as error:
                caught.append(error)
        go.set()
        thread.join()
        assert len(caught) == 2
        lease.commit(prompt)
        cache.check()


@pytest.mark.parametrize("how", ["cancel", "discard", "close"])
def test_ending_a_lease_during_another_threads_forward_is_done_by_that_thread(how: str) -> None:
    model, prompt = tiny("llama"), words(20)
    inside, go = threading.Event(), threading.Event()
    cache = onefold.PrefixCache(model, "16MB")
    lease = cache.lease(prompt)
    first, ended = lease.layers[0], list[Any]()
    real = first.update_and_fetch

    def slowly(*args: Any) -> Any:
        inside.set()
        assert go.wait(60)
        return real(*args)

    def run() -> None:
        logits = model(mx.array([prompt]), cache=lease.layers)
        ended.append(lease.closed)
        try:
            model(mx.array([[1]]), cache=lease.layers)
        except onefold.LeaseClosed as error:
            ended.append(error)
        mx.eval(logits)  # the forward itself was whole

    first.update_and_fetch = slowly
    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(60)
    if how == "close":

        def let_go() -> None:
            while not cache.closed:
                time.sleep(0.01)
            time.sleep(0.2)
            go.set()

        threading.Thread(target=let_go).start()
        cache.close()
    else:
        getattr(lease, how)()
        assert not lease.closed
        go.set()
    thread.join()
    assert ended[0] is True and isinstance(ended[1], onefold.LeaseClosed)
    if how != "close":
        cache.check()
        assert cache.lease([*prompt, 1]).cached == (len(prompt) if how == "cancel" else 0)
    cache.close()


def test_what_only_another_thread_can_compute() -> None:
    """A part of the model was called, which is not watched, and nothing of it was evaluated."""
    model, prompt = tiny("llama"), words(20)
    wait, ready = threading.Event(), threading.Event()
    with onefold.PrefixCache(model, "16MB") as cache:
        lease = cache.lease(prompt)

        def run() -> None:
            model.model(mx.array([prompt]), cache=lease.layers)
            ready.set()
            wait.wait(60)

        thread = threading.Thread(target=run, name="another")
        thread.start()
        assert ready.wait(60)
        with pytest.raises(onefold.WrongThread, match="'another'"):
            model(mx.array([[1]]), cache=lease.layers)
        wait.set()
        thread.join()
        with pytest.raises(onefold.DeviceError, match="'another'"):
            model(mx.array([[1]]), cache=lease.layers)
        assert lease.closed and cache.stats().reasons["lost on the device"] == 1
        cache.check()
        turn(cache, model, prompt)


def test_a_reader_waits_for_a_forward_and_shares_what_it_finds() -> None:
    """Another thread's request on the same prefix is not computed again because its owner is in a forward."""
    model, prompt = tiny("llama"), words(40)
    inside, go = threading.Event(), threading.Event()
    with onefold.PrefixCache(model, "16MB") as cache:
        lease = cache.lease([*prompt, 1])
        forward(model, lease.layers, [*prompt, 1], 0)
        lease.commit(prompt, close=False)
        first = lease.layers[0]
        real = first.update_and_fetch

        def slowly(*args: Any) -> Any:
            inside.set()
            assert go.wait(60)
            return real(*args)

        first.update_and_fetch = slowly
        thread = threading.Thread(target=forward, args=(model, lease.layers, [*prompt, 1, 2], 41))
        thread.start()
        assert inside.wait(60)
        threading.Timer(0.2, go.set).start()
        other = cache.lease([*prompt, 3])
        assert other.cached == len(prompt)
        thread.join()
        other.cancel()
        lease.commit([*prompt, 1, 2])
        cache.check()


@pytest.mark.parametrize("stored", HANDED)
def test_the_drop_in_made_here_and_first_used_elsewhere(stored: str) -> None:
    family, kv = stored.split()
    model, tokens = wide(family), words(40)
    longer = [*tokens, 5]
    seen = []
    for on in (lambda work: work(), elsewhere):
        cache = LRUPromptCache(kv=kv)
        cache.learn("model", model)
        layers, _ = cache.fetch_nearest_cache("model", tokens)
        seen.append(on(lambda layers=layers: forward(model, layers, tokens, 0)))
        on(lambda cache=cache, layers=layers: cache.insert_cache("model", tokens, layers))
        layers, rest = cache.fetch_nearest_cache("model", longer)
        assert layers is not None
        start = len(longer) - len(rest)
        seen.append(on(lambda layers=layers, start=start: forward(model, layers, longer, start)))
        cache.close()
    assert mx.array_equal(seen[0], seen[2]) and mx.array_equal(seen[1], seen[3])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drop_in_fetched_here_generated_there_and_put_back_elsewhere(family: str) -> None:
    model, cache, tokens = tiny(family), LRUPromptCache(), words(40)
    with ThreadPoolExecutor(4) as pool:
        for i in range(4):
            layers, rest = cache.fetch_nearest_cache("model", tokens)
            if layers is None:
                layers = make_prompt_cache(model)
            reference = cold(model, tokens, 3)[1]
            seen = [pool.submit(forward, model, layers, tokens, len(tokens) - len(rest)).result()]
            for _ in range(3):
                tokens = [*tokens, int(mx.argmax(seen[-1]).item())]
                seen.append(pool.submit(step, model, layers, tokens[-1:]).result())
            assert same(seen, reference)
            pool.submit(cache.insert_cache, "model", tokens, layers).result()
            assert "another thread" not in cache.reasons
            if i and family != "qwen3_next":  # hybrids keep a state each 64 tokens
                assert len(rest) < 10
            tokens = tokens + words(5, i)
    cache.close()
