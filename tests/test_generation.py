"""`onefold.generate`, `stream_generate` and `async_stream_generate`: mlx-lm's answers, on leased layers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from effort import quick
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from tiny import tiny

import onefold
from onefold.cache.model.formats.registry import FORMATS
from onefold.errors import AddedTo, CommitError, LeaseClosed

TEXT = "The quick brown fox jumps over the lazy dog; a radix tree holds it once."


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return onefold.load(model)


@pytest.fixture(scope="module")
def drafted(draft: Path) -> Any:
    return onefold.load(draft)[0]


@pytest.fixture
def cache(loaded: tuple[Any, Any]) -> Iterator[onefold.PrefixCache]:
    with onefold.PrefixCache(loaded[0], budget="64MB") as made:
        yield made
        made.check()


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text))


def test_a_text_is_answered_as_mlx_lm_answers_it(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    for text in (TEXT, TEXT + " Again.", TEXT[:30]):
        expected = mlx_lm.generate(model, tokenizer, text, max_tokens=12)
        assert onefold.generate(model, tokenizer, text, cache=cache, max_tokens=12) == expected
        prompt = tokens_of(tokenizer, text)
        assert onefold.generate(model, tokenizer, prompt, cache=cache, max_tokens=12) == expected
        assert onefold.generate(model, tokenizer, mx.array(prompt), cache=cache, max_tokens=12) == expected
    assert cache.stats().hits == 8
    assert cache.inventory.open_leases == 0


@pytest.mark.parametrize("n", [1, 2, 9])
def test_what_is_committed_is_what_was_fed(loaded: Any, cache: onefold.PrefixCache, n: int) -> None:
    """mlx-lm feeds a token before it yields it, and runs one ahead: the prompt and all yielded tokens are fed."""
    model, tokenizer = loaded
    prompt = tokens_of(tokenizer, TEXT)
    responses = list(onefold.stream_generate(model, tokenizer, prompt, n, cache=cache))
    told = prompt + [r.token for r in responses]
    assert len(responses) == n
    assert responses[-1].finish_reason == "length"
    assert cache.inventory.matched(told) == len(told) == cache.stats().stored_tokens
    (again,) = onefold.stream_generate(model, tokenizer, [*told, 3], 1, cache=cache)
    assert (again.cached_tokens, again.prompt_tokens) == (len(told), len(told) + 1)


def test_responses_are_mlx_lm_s(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    ours = list(onefold.stream_generate(model, tokenizer, TEXT, max_tokens=5, cache=cache))
    stock = list(mlx_lm.stream_generate(model, tokenizer, TEXT, max_tokens=5))
    for a, b in zip(ours, stock, strict=True):
        assert isinstance(a, type(b))
        assert (a.text, a.token, a.from_draft, a.generation_tokens) == (b.text, b.token, False, b.generation_tokens)
        assert (a.prompt_tokens, a.finish_reason, a.cached_tokens) == (b.prompt_tokens, b.finish_reason, 0)
        assert mx.abs(a.logprobs - b.logprobs).max().item() < 1e-4
        assert a.prompt_tps > 0 and a.generation_tps > 0


def test_an_abandoned_iterator_commits_what_was_fed(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    prompt = tokens_of(tokenizer, TEXT)
    told = list(prompt)
    for response in onefold.stream_generate(model, tokenizer, prompt, cache=cache):
        told.append(response.token)
        if len(told) == len(prompt) + 3:
            break
    assert cache.inventory.open_leases == 0
    assert cache.inventory.matched(told) == len(told) == cache.stats().stored_tokens

    other = tokens_of(tokenizer, "Another one: " + TEXT)
    steps = onefold.stream_generate(model, tokenizer, other, cache=cache)
    other.append(next(steps).token)
    assert cache.inventory.open_leases == 1
    steps.close()
    assert cache.inventory.open_leases == 0
    assert cache.inventory.matched(other) == len(other)


def test_an_iterator_that_was_never_begun_holds_nothing(loaded: Any, cache: onefold.PrefixCache) -> None:
    onefold.stream_generate(*loaded, TEXT, cache=cache)
    assert cache.stats().requests == 0


def test_a_step_that_raises_commits_what_was_fed(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    prompt = tokens_of(tokenizer, TEXT)
    told = list(prompt)
    greedy = make_sampler(0.0)

    def sampler(logprobs: mx.array) -> mx.array:
        if len(told) == len(prompt) + 2:
            raise RuntimeError("no more dice")
        return greedy(logprobs)

    with pytest.raises(RuntimeError, match="no more dice"):
        for response in onefold.stream_generate(model, tokenizer, prompt, cache=cache, sampler=sampler):
            told.append(response.token)
    assert len(told) == len(prompt) + 2
    assert cache.inventory.open_leases == 0
    assert cache.inventory.matched(told) == len(told)
    assert cache.stats().stored_tokens == len(told) + 1  # a token is fed before it is yielded


def test_a_refused_prefill_is_a_budget_error_and_leaves_nothing_open(loaded: Any) -> None:
    model, tokenizer = loaded
    with onefold.PrefixCache(model, budget="1MB") as small, pytest.raises(onefold.BudgetError):
        onefold.generate(model, tokenizer, TEXT * 20, cache=small, max_tokens=3)
        assert small.inventory.open_leases == 0


def test_samplers_and_processors_see_what_they_see_without_a_cache(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    options = {"logits_processors": make_logits_processors(repetition_penalty=1.3, repetition_context_size=200)}
    expected = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=10, **options)
    for _ in range(2):  # the second one is cached but for its last token
        assert onefold.generate(model, tokenizer, TEXT, cache=cache, max_tokens=10, **options) == expected
    mx.random.seed(3)
    expected = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=10, sampler=mx.random.categorical)
    mx.random.seed(3)
    dice = mx.random.categorical
    assert onefold.generate(model, tokenizer, TEXT, cache=cache, max_tokens=10, sampler=dice) == expected


def test_progress_counts_reused_tokens_as_done(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    prompt = tokens_of(tokenizer, TEXT)[:40]
    heard: list[tuple[int, int]] = []
    options: dict[str, Any] = {"prompt_progress_callback": lambda *x: heard.append(x), "prefill_step_size": 16}
    onefold.generate(model, tokenizer, prompt, cache=cache, max_tokens=1, **options)
    assert heard == [(0, 40), (16, 40), (32, 40), (39, 40), (40, 40)]
    heard.clear()
    onefold.generate(model, tokenizer, [*prompt[:30], 5, 6], cache=cache, max_tokens=1, **options)
    assert heard == [(30, 32), (31, 32), (32, 32)]


def test_namespaces_do_not_share(loaded: Any, cache: onefold.PrefixCache) -> None:
    for name, cached in (("a", 0), ("b", 0), ("a", len(TEXT) - 1)):
        (response,) = onefold.stream_generate(*loaded, TEXT, 1, cache=cache, namespace=name)
        assert response.cached_tokens == cached


def test_verbose_prints_the_text_and_what_was_reused(
    loaded: Any, cache: onefold.PrefixCache, capsys: pytest.CaptureFixture[str]
) -> None:
    text = onefold.generate(*loaded, TEXT, verbose=True, cache=cache, max_tokens=4)
    out = capsys.readouterr().out
    assert text in out
    assert f"Prompt: {len(TEXT)} tokens, 0 reused" in out


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("prompt_cache", [], "leave prompt_cache out"),
        ("max_kv_size", 64, r"PrefixCache\(max_kv_size=\)"),
        ("kv_bits", 8, r"PrefixCache\(kv=\)"),
        ("kv_group_size", 32, r"PrefixCache\(kv=\)"),
        ("quantized_kv_start", 0, r"PrefixCache\(kv=\)"),
        ("input_embeddings", mx.zeros((1, 2)), "mlx_lm.stream_generate"),
        ("max_tokens", 0, "-1 for no limit"),
    ],
)
def test_options_that_bypass_the_cache_are_refused(
    loaded: Any, cache: onefold.PrefixCache, option: str, value: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        onefold.stream_generate(*loaded, TEXT, cache=cache, **{option: value})  # at the call, not at the first step


def test_options_that_nobody_knows_are_refused_and_none_is_mlx_lm_s_default(
    loaded: Any, cache: onefold.PrefixCache
) -> None:
    with pytest.raises(TypeError, match=r"temperature: .*sampler=mlx_lm\.sample_utils\.make_sampler\(temp=\.\.\.\)"):
        onefold.stream_generate(*loaded, TEXT, cache=cache, temperature=0.3)
    with pytest.raises(TypeError, match=r"unknown options: colour$"):
        onefold.stream_generate(*loaded, TEXT, cache=cache, colour=1)
    nothing = dict.fromkeys(["prompt_cache", "max_kv_size", "kv_bits", "sampler", "logits_processors"])
    assert onefold.generate(*loaded, TEXT, cache=cache, max_tokens=2, **nothing)


def test_a_cache_of_another_model_is_a_value_error(loaded: Any, drafted: Any, cache: onefold.PrefixCache) -> None:
    with pytest.raises(ValueError, match="another model"):
        onefold.stream_generate(drafted, loaded[1], TEXT, cache=cache)
    with pytest.raises(ValueError, match="without this draft model"):
        onefold.stream_generate(*loaded, TEXT, draft_model=drafted, cache=cache)
    with pytest.raises(ValueError, match=r"must be an onefold\.PrefixCache, got list"):
        onefold.stream_generate(*loaded, TEXT, cache=[])  # type: ignore[arg-type]


def test_a_draft_decodes_and_the_last_token_is_committed_only_if_it_was_fed(loaded: Any, drafted: Any) -> None:
    model, tokenizer = loaded
    expected = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=14)
    prompt = tokens_of(tokenizer, TEXT)
    with onefold.PrefixCache(model, budget="64MB", draft_model=drafted) as cache:
        for n in range(1, 15):
            told, from_draft = list(prompt), False
            steps = onefold.stream_generate(model, tokenizer, prompt, 14, drafted, cache=cache, num_draft_tokens=3)
            for response in steps:
                told.append(response.token)
                from_draft = response.from_draft
                if len(told) == len(prompt) + n:
                    break
            del steps
            assert tokenizer.decode(told[len(prompt) :]) == expected[:n]
            known = cache.inventory.matched(told)
            assert known >= len(told) - 2  # the newest is not fed, and the draft may be one token behind
            assert known < len(told) or from_draft
            (again,) = onefold.stream_generate(model, tokenizer, [*told, 3], 1, cache=cache)
            assert again.cached_tokens == known
            reference = next(iter(mlx_lm.stream_generate(model, tokenizer, [*told, 3], max_tokens=1)))
            assert mx.abs(again.logprobs - reference.logprobs).max().item() < 1e-4
            cache.check()
            cache.clear()


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_a_draft_on_windows_and_recurrent_layers_gives_the_plain_answer(loaded: Any, name: str) -> None:
    tokenizer, target, draft = loaded[1], tiny(name), tiny(name, seed=1)
    prompt = [1 + i % 90 for i in range(30)]
    expected = [r.token for r in mlx_lm.stream_generate(target, tokenizer, mx.array(prompt), 24)]
    with onefold.PrefixCache(target, budget="64MB", draft_model=draft, min_checkpoint_tokens=1) as cache:
        told = [r.token for r in onefold.stream_generate(target, tokenizer, prompt, 24, cache=cache)]
        assert told == expected
        cache.check()


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "llama4", "deepseek_v41"])
def test_models_that_need_checkpoints_continue_from_what_was_committed(loaded: Any, name: str) -> None:
    target, tokenizer = tiny(name), loaded[1]
    conversation = [1 + i % 90 for i in range(70)]
    with onefold.PrefixCache(target, budget="64MB", min_checkpoint_tokens=1) as cache:
        for turn in range(3):
            responses = list(onefold.stream_generate(target, tokenizer, conversation, 5, cache=cache))
            assert responses[0].cached_tokens == (0 if turn == 0 else len(conversation) - 1)
            conversation += [r.token for r in responses] + [7]
        cache.check()


def test_closing_does_not_replace_the_error_that_is_being_raised(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded

    def sampler(logprobs: mx.array) -> mx.array:
        for lease in list(cache.state.leases):
            lease.discard()  # so that the commit at the end fails
        raise ValueError("the sampler's own")

    with pytest.raises(ValueError, match="the sampler's own") as caught:
        onefold.generate(model, tokenizer, TEXT, cache=cache, sampler=sampler)
    assert [note for note in caught.value.__notes__ if "LeaseClosed" in note]


def test_an_error_that_takes_no_notes_is_not_replaced_either() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        code: int

    with AddedTo(Frozen(7)):
        raise RuntimeError("closing failed")


def test_a_commit_that_fails_when_an_iterator_is_closed_is_raised(loaded: Any, cache: onefold.PrefixCache) -> None:
    """There is no other error that could tell of it."""
    model, tokenizer = loaded
    responses = onefold.stream_generate(model, tokenizer, TEXT, cache=cache)
    next(responses)
    for lease in list(cache.state.leases):
        lease.discard()
    with pytest.raises(LeaseClosed):
        responses.close()


def test_a_cancelled_task_stays_cancelled_if_the_commit_fails(
    loaded: Any, cache: onefold.PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded

    def fail(*_: Any, **__: Any) -> None:
        raise CommitError("no commit today")

    async def main() -> None:
        async for _ in onefold.async_stream_generate(model, tokenizer, TEXT, 100_000, cache=cache):
            monkeypatch.setattr(onefold.Lease, "commit", fail)
            if (task := asyncio.current_task()) is not None:
                task.cancel()

    with pytest.raises(asyncio.CancelledError) as caught:
        asyncio.run(main())
    assert [note for note in caught.value.__notes__ if "no commit today" in note]


# -- asyncio ----------------------------------------------------------------------------------


def test_async_gives_the_same_and_does_not_block_the_loop(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    expected = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=6)
    go = threading.Event()
    greedy = make_sampler(0.0)

    def sampler(logprobs: mx.array) -> mx.array:
        assert go.wait(60), "the event loop is blocked"
        return greedy(logprobs)

    async def main() -> str:
        asyncio.get_running_loop().call_later(0.05, go.set)  # never comes if a step runs on the loop
        text = ""
        async for response in onefold.async_stream_generate(model, tokenizer, TEXT, 6, cache=cache, sampler=sampler):
            text += response.text
            assert mx.exp(response.logprobs).sum().item() == pytest.approx(1, abs=1e-3)  # evaluated over there
        return text

    assert asyncio.run(main()) == expected
    assert cache.inventory.open_leases == 0
    assert cache.inventory.matched(tokens_of(tokenizer, TEXT + expected)) == len(TEXT) + 6


@pytest.mark.parametrize("kv", quick([*FORMATS], "4"))
def test_async_is_the_first_use_of_a_new_cache(loaded: Any, kv: str) -> None:
    """Its thread is another one than the thread that made the cache."""
    model, tokenizer = tiny("llama_q"), loaded[1]

    async def main(cache: onefold.PrefixCache) -> str:
        return "".join([r.text async for r in onefold.async_stream_generate(model, tokenizer, TEXT, 6, cache=cache)])

    with onefold.PrefixCache(model, "64MB", kv=kv) as cache:
        found = asyncio.run(main(cache))
    with onefold.PrefixCache(model, "64MB", kv=kv) as cache:
        assert found == onefold.generate(model, tokenizer, TEXT, cache=cache, max_tokens=6)


def waiting(tokenizer: Any, go: threading.Event) -> Any:
    """A tokenizer that takes its time to encode a prompt."""
    plain = type(tokenizer._tokenizer)

    def encode(self: Any, text: str, *args: Any, **options: Any) -> Any:
        assert text != TEXT or go.wait(60), "the event loop is blocked"
        return plain.encode(self, text, *args, **options)

    made = copy.copy(tokenizer._tokenizer)
    made.__class__ = type("Waiting", (plain,), {"encode": encode})
    return type(tokenizer)(made)


def test_async_encodes_off_the_loop(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    expected = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=3)
    go = threading.Event()
    slow = waiting(tokenizer, go)

    async def main() -> str:
        asyncio.get_running_loop().call_later(0.05, go.set)
        return "".join([r.text async for r in onefold.async_stream_generate(model, slow, TEXT, 3, cache=cache)])

    assert asyncio.run(main()) == expected


def test_several_async_generations_run_side_by_side(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    texts = [TEXT + f" {i}" for i in range(3)]
    expected = [mlx_lm.generate(model, tokenizer, text, max_tokens=5) for text in texts]

    async def one(text: str) -> str:
        steps = onefold.async_stream_generate(model, tokenizer, text, 5, cache=cache)
        return "".join([r.text async for r in steps])

    async def main() -> list[str]:
        return await asyncio.gather(*map(one, texts))

    assert asyncio.run(main()) == expected
    assert cache.inventory.open_leases == 0


def test_a_cancelled_task_commits_what_was_fed(loaded: Any, cache: onefold.PrefixCache) -> None:
    model, tokenizer = loaded
    prompt = tokens_of(tokenizer, TEXT)
    told = list(prompt)
    inside, go = threading.Event(), threading.Event()
    greedy = make_sampler(0.0)

    def sampler(logprobs: mx.array) -> mx.array:
        if len(told) == len(prompt) + 2:
            inside.set()
            assert go.wait(60)
        return greedy(logprobs)

    async def answer() -> None:
        async for response in onefold.async_stream_generate(model, tokenizer, prompt, cache=cache, sampler=sampler):
            told.append(response.token)

    async def main() -> None:
        task = asyncio.create_task(answer())
        await asyncio.to_thread(inside.wait, 60)  # a step is running
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert cache.inventory.open_leases == 0
    assert len(told) == len(prompt) + 2
    assert cache.inventory.matched(told) == len(told)


def test_a_closed_async_iterator_commits_what_was_fed(loaded: Any, cache: onefold.PrefixCache) -> None:
    told = tokens_of(loaded[1], TEXT)

    async def main() -> None:
        async with contextlib.aclosing(onefold.async_stream_generate(*loaded, TEXT, cache=cache)) as steps:  # type: ignore[type-var]
            async for response in steps:
                told.append(response.token)
                if len(told) == len(TEXT) + 3:
                    break
        assert cache.inventory.open_leases == 0

    asyncio.run(main())
    assert cache.inventory.matched(told) == len(told) == len(TEXT) + 3


def test_an_async_iterator_that_is_left_by_break_commits_without_the_collector(
    loaded: Any, cache: onefold.PrefixCache
) -> None:
    told = tokens_of(loaded[1], TEXT)

    async def main() -> None:
        async for response in onefold.async_stream_generate(*loaded, TEXT, cache=cache):
            told.append(response.token)
            break
        async with asyncio.timeout(10):
            while cache.inventory.open_leases:
                await asyncio.sleep(0.01)

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
    assert cache.inventory.matched(told) == len(told) == len(TEXT) + 1
