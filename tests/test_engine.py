"""The engine on small real models: who runs when, on whose memory, and that answers are those of a cold run."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from asking import GREEDY, Pending, ask, ask_all, cold, prompt_of, request
from effort import effort, quick
from tiny import tiny, with_unknown_caches

from onefold.engine import decode
from onefold.engine.config import EngineConfig, EngineOptions
from onefold.engine.engine import Engine
from onefold.engine.limits import Limits
from onefold.engine.request import Progress, Sampling, Started, Text
from onefold.errors import Busy, ConfigError, DeviceError, EngineStopped, PromptError, TooLong


def words(n: int, seed: int = 0) -> list[int]:
    return [(i * i * 31 + i * 7 + seed * 13) % 90 for i in range(n)]


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(model))


@pytest.fixture
def engine(loaded: tuple[Any, Any]) -> Iterator[Engine]:
    with Engine(*loaded, budget="256MB") as made:
        yield made
        if made.alive:
            made.check()


class Forwards:
    """Rows and tokens of every forward of a model's class, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.before: Any = lambda shape: None
        original = type(model).__call__

        def call(model: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
            self.shapes.append((inputs.shape[0], inputs.shape[1]))
            self.before(self.shapes[-1])
            return original(model, inputs, *args, **kwargs)

        monkeypatch.setattr(type(model), "__call__", call)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch, loaded: tuple[Any, Any]) -> Forwards:
    return Forwards(monkeypatch, loaded[0])


def test_a_budget_for_less_than_a_conversation_is_warned_about(loaded, caplog):
    for budget, warned in (("3MB", True), ("256MB", False)):
        with Engine(*loaded, budget=budget) as engine:
            assert ("has room for a conversation of" in caplog.text) == (engine.most_tokens < 4096) == warned
            least = engine.cache.budget.least_bytes()
        caplog.clear()
    with Engine(*loaded, budget=least + (32 << 20)):  # with MLX's pool
        assert not caplog.text


# -- one answer ------------------------------------------------------------------------------------


def test_an_answer_is_that_of_a_cold_run(engine, loaded):
    tokens = words(150)
    answer = ask(engine, tokens, 20)
    assert answer.tokens == cold(loaded[0], tokens, 20)
    assert answer.done.completion_tokens == 20 and answer.done.finish == "length"
    assert [type(e) for e in answer.events[:2]] == [Started, Text]


def test_an_exact_repeat_and_a_prompt_with_its_own_output_are_hits(engine, loaded):
    tokens = words(150)
    first = ask(engine, tokens, 20)
    again = ask(engine, tokens, 20)
    assert again.tokens == first.tokens
    assert (again.hit.matched, again.hit.cached, again.hit.reason) == (150, 149, "")
    longer = [*tokens, *first.tokens]
    onward = ask(engine, longer, 5)
    assert onward.tokens == cold(loaded[0], longer, 5)
    assert onward.hit.cached == 169  # the last token was chosen, and never run
    assert ask(engine, longer[:160], 5).tokens == first.tokens[10:15]


def test_where_a_prompt_diverged_is_said(engine):
    system = {"role": "system", "content": "You are one of many agents."}
    asked = engine.chat([system, {"role": "user", "content": "What is the capital of France?"}])
    other = engine.chat([system, {"role": "user", "content": "What is the capital of Peru?"}])
    assert ask(engine, asked).hit.diverged == ""
    hit = ask(engine, other).hit
    assert "messages[1] (user)" in hit.diverged and "'France?" in hit.diverged and "'Peru?" in hit.diverged
    longer = engine.chat([system, {"role": "user", "content": "What is the capital of Peru? And of Chile?"}])
    assert "messages[1] (user)" in ask(engine, longer).hit.diverged  # what was known there is an end of message
    assert ask(engine, asked).hit.diverged == ""


def test_a_turn_that_only_goes_on_has_not_diverged(engine):
    messages = [{"role": "user", "content": "Tell me a long story about a fox."}]
    first = ask(engine, engine.chat(messages), 20)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
    prompt = engine.chat(messages)
    hit = ask(engine, prompt, 5).hit
    assert hit.diverged == "" and hit.cached == len(engine.chat(messages[:1])) + 19


def test_no_tokens_wanted_is_an_answer_without_tokens(engine):
    done = ask(engine, words(30), 0).done
    assert (done.finish, done.completion_tokens) == ("length", 0)
    assert ask(engine, words(30), 4).hit.cached == 29


def test_a_prompt_of_one_token(engine, loaded):
    assert ask(engine, [5], 6).tokens == cold(loaded[0], [5], 6)


# -- many at once ----------------------------------------------------------------------------------


def test_one_forward_per_step_for_all_rows(engine, forwards, loaded):
    prompts, length = [words(100 + 9 * i, seed=i) for i in range(6)], 200
    answers = ask_all(engine, [request(p, length) for p in prompts])
    decoded = [shape for shape in forwards.shapes if shape[1] == 1]  # before the cold runs add theirs
    assert [a.tokens for a in answers] == [cold(loaded[0], p, length) for p in prompts]
    stats = engine.stats()
    assert max(rows for rows, _ in decoded) == 6
    assert len(decoded) == stats.steps
    # A step that serves six is counted once. While a prompt is computed, the rows before it take steps of their own.
    assert stats.steps <= 1.6 * length
    assert sum(rows for rows, _ in decoded) >= 6 * (length - 1)


@pytest.mark.parametrize("most_rows", [3, 8])
def test_on_cuda_rows_do_not_change_right_after_a_chunk(loaded, forwards, monkeypatch, most_rows):
    monkeypatch.setattr(decode, "device", SimpleNamespace(on_cuda=lambda: True))
    long, others = words(40), [words(20 + 70 * (i % 2), seed=1 + i) for i in range(6)]
    with Engine(*loaded, budget="256MB", limits=Limits(rows=most_rows)) as engine:
        stream = Pending(engine, request(long, 120))
        stream.wait_for_text()
        forwards.shapes.clear()
        answers = ask_all(engine, [request(p, 7) for p in others])
        forwards_run = list(forwards.shapes)
        assert stream.wait().tokens == cold(loaded[0], long, 120)
    assert [a.tokens for a in answers] == [cold(loaded[0], p, 7) for p in others]
    rows, changes, after_chunk = 1, 0, False
    for n, tokens in forwards_run:
        if tokens == 1:
            assert n == rows or not after_chunk, "rows joined or left right after a chunk of a prompt"
            changes += n != rows
            rows = n
        after_chunk = tokens > 1
    assert changes


def test_identical_prompts_that_come_together_are_prefilled_once(loaded, forwards):
    tokens = words(4096)
    with Engine(*loaded, budget="256MB") as engine:
        forwards.shapes.clear()
        answers = ask_all(engine, [request(tokens, 4) for _ in range(8)])
        assert len({tuple(a.tokens) for a in answers}) == 1
        assert engine.stats().prefilled_tokens <= 4096 + 8
        fed = sum(rows * n for rows, n in forwards.shapes if n > 1)
        assert fed <= 4096
        assert sorted(a.hit.cached for a in answers) == [0] + [4095] * 7
        engine.check()


def test_a_prefix_that_is_being_prefilled_is_waited_for_and_borrowed(engine, loaded):
    system = words(600)
    prompts = [[*system, *words(40 + i, seed=i + 1)] for i in range(5)]
    answers = ask_all(engine, [request(p, 6) for p in prompts])
    assert [a.tokens for a in answers] == [cold(loaded[0], p, 6) for p in prompts]
    assert engine.stats().prefilled_tokens <= 600 + sum(40 + i for i in range(5)) + 5 * 2
    assert all(a.hit.cached >= 600 for a in answers[1:])


def test_what_a_running_request_holds_is_lent(engine, loaded):
    system = words(500)
    running = Pending(engine, request([*system, 3, 4], 200))
    running.wait_for_text(3)
    other = ask(engine, [*system, 7, 8, 9], 5)
    assert other.hit.cached >= 500
    assert other.tokens == cold(loaded[0], [*system, 7, 8, 9], 5)
    assert running.wait().tokens == cold(loaded[0], [*system, 3, 4], 200)


def test_namespaces_borrow_nothing_from_each_other(engine):
    tokens = words(300)
    answers = ask_all(engine, [request(tokens, 4, namespace=str(i)) for i in range(3)])
    assert [a.hit.cached for a in answers] == [0, 0, 0]
    assert ask(engine, tokens, 4, namespace="1").hit.cached == 299


def test_a_running_stream_waits_for_one_chunk_at_most(loaded, forwards):
    limits = Limits(prefill_chunk=128, prefill_share=0.99)
    with Engine(*loaded, budget="256MB", limits=limits) as engine:
        running = Pending(engine, request(words(80, seed=9), 400))
        running.wait_for_text(3)
        start = len(forwards.shapes)
        long = Pending(engine, request(words(1500), 3))
        long.wait()
        running.wait()
        shapes = forwards.shapes[start:]
        chunks = [i for i, (_, n) in enumerate(shapes) if n > 1]
        assert len(chunks) >= 1500 // 128
        assert all(b - a > 1 for a, b in itertools.pairwise(chunks)), "two chunks without a step between"
        assert all(n <= 128 for _, n in shapes)
        assert len([e for e in long.events if isinstance(e, Progress)]) >= 5


def test_a_short_prompt_does_not_wait_for_a_long_one(loaded):
    with Engine(*loaded, budget="256MB", limits=Limits(prefill_chunk=64)) as engine:
        order: list[str] = []
        gate = threading.Event()
        engine._mailbox.put(lambda _: gate.wait(60) and None)
        long, short = Pending(engine, request(words(4000), 1)), Pending(engine, request(words(90, seed=5), 1))
        gate.set()
        short.wait()
        order.append("short" if not any(isinstance(e, Text) for e in long.events) else "long")
        long.wait()
        assert order == ["short"]


def test_a_long_prompt_gets_there_while_short_ones_keep_coming(loaded):
    with Engine(*loaded, budget="256MB", limits=Limits(prefill_chunk=64)) as engine:
        long = Pending(engine, request(words(2000), 1))
        n = 0
        while not any(isinstance(e, Text) for e in long.events):
            n += 1
            assert n < 400, "it never gets a turn"
            ask_all(engine, [request(words(40 + i, seed=n * 3 + i), 1) for i in range(3)])
        long.wait()


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "llama4"])
def test_models_outside_the_seam_serve_several_at_once(family, loaded):
    check_family(family, loaded[1])


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3", "mamba", "falcon_h1", "rwkv7"])
def test_windows_and_recurrent_layers(family, loaded):
    check_family(family, loaded[1])


def check_family(family: str, tokenizer: Any) -> None:
    model = tiny(family)
    with Engine(model, tokenizer, budget="256MB") as engine:
        end = min(tokenizer.eos_token_ids)
        prompts = [[*words(130), *words(20 + 3 * i, seed=i + 1)] for i in range(4)]
        for _ in range(2):  # cold, then warm
            answers = ask_all(engine, [request(p, 10) for p in prompts])
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == until(end, cold(model, prompt, 10))
        assert all(a.hit.cached > 0 for a in answers)
        engine.check()


def until(end: int, tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens


def test_a_model_that_runs_uncached_serves_several_at_once(loaded, monkeypatch):
    model = with_unknown_caches(monkeypatch)
    with Engine(model, loaded[1], budget="64MB") as engine:
        assert engine.cache.uncached_reason
        prompts = [words(70 + i, seed=i) for i in range(3)]
        answers = ask_all(engine, [request(p, 6) for p in prompts])
        end = min(loaded[1].eos_token_ids)
        assert [a.tokens for a in answers] == [until(end, cold(model, p, 6)) for p in prompts]
        assert all(a.hit.cached == 0 for a in answers)


# -- sampling --------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(engine):
    seeded = Sampling(temperature=1.0, top_p=0.95, seed=17)
    alone = ask(engine, words(90), 24, sampling=seeded).tokens
    others = [Sampling(temperature=0.7), GREEDY, Sampling(temperature=1.3, min_p=0.02, seed=4)]
    answers = ask_all(
        engine,
        [request(words(60 + i, seed=i), 24, sampling=s) for i, s in enumerate(others)]
        + [request(words(90), 24, sampling=seeded)],
    )
    assert answers[-1].tokens == alone
    assert ask(engine, words(90), 24, sampling=Sampling(temperature=1.0, top_p=0.95, seed=18)).tokens != alone


def test_without_a_seed_answers_differ(engine):
    hot = Sampling(temperature=1.5)
    answers = ask_all(engine, [request(words(90), 16, sampling=hot) for _ in range(3)])
    assert len({tuple(a.tokens) for a in answers}) == 3


def test_a_seeded_neighbour_does_not_make_others_predictable(engine):
    seeded, free = Sampling(temperature=1.0, seed=1), Sampling(temperature=1.5)
    pairs = [ask_all(engine, [request(words(50), 12, sampling=s) for s in (seeded, free)]) for _ in range(2)]
    assert pairs[0][0].tokens == pairs[1][0].tokens
    assert pairs[0][1].tokens != pairs[1][1].tokens


def test_filters_narrow_the_choice_to_the_likeliest(engine):
    greedy = ask(engine, words(90), 12).tokens
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert ask(engine, words(90), 12, sampling=Sampling(temperature=1.0, **narrow)).tokens == greedy


@pytest.mark.parametrize("tiny_one", [{"temperature": 1e-38}, {"temperature": 1.0, "top_p": 1e-300}])
def test_what_is_next_to_nothing_is_greedy_and_not_noise(engine, tiny_one):
    assert ask(engine, words(90), 12, sampling=Sampling(**tiny_one)).tokens == ask(engine, words(90), 12).tokens


def test_filters_that_filter_nothing_are_fine(engine):
    wide = Sampling(temperature=0.5, top_k=10**9, top_p=1.0, min_p=0.0, seed=3)
    assert ask(engine, words(90), 5, sampling=wide).done.completion_tokens == 5


def test_logit_bias(engine):
    only = Sampling(temperature=0, logit_bias={40: 1e4})
    assert set(ask(engine, words(90), 6, sampling=only).tokens) == {40}
    never = Sampling(temperature=0, logit_bias={ask(engine, words(90), 1).tokens[0]: -1e4})
    assert ask(engine, words(90), 1, sampling=never).tokens != ask(engine, words(90), 1).tokens
    with pytest.raises(PromptError, match="logit_bias has token id 100000"):
        engine.submit(request(words(9), sampling=Sampling(logit_bias={100000: 1.0})), lambda events: None)


@pytest.mark.parametrize("penalty", [{"presence_penalty": 1e4}, {"frequency_penalty": 1e4}])
def test_penalties_look_at_what_was_generated(engine, penalty):
    tokens = ask(engine, words(90), 40, sampling=Sampling(temperature=0, **penalty)).tokens
    assert len(set(tokens)) == len(tokens)
    assert tokens[0] == ask(engine, words(90), 1).tokens[0]


def test_the_repetition_penalty_looks_at_the_prompt_too(engine):
    prompt = [*words(90), *[ask(engine, words(90), 1).tokens[0]] * 3]
    plain = ask(engine, prompt, 30).tokens
    penalised = ask(engine, prompt, 30, sampling=Sampling(temperature=0, repetition_penalty=1e6)).tokens
    assert penalised != plain
    recent = prompt[-64:]
    for token in penalised:
        assert token not in recent[-64:]
        recent.append(token)


def test_logprobs_are_those_of_the_model(engine, loaded):
    tokens = words(90)
    logits = loaded[0](mx.array(tokens)[None])[0, -1]
    expected = (logits - mx.logsumexp(logits)).tolist()
    answer = ask(engine, tokens, 1, top_logprobs=3, sampling=Sampling(temperature=0.3, seed=1))
    (found,) = answer.events[1].logprobs  # type: ignore[union-attr]
    assert found.logprob == pytest.approx(expected[found.token], abs=1e-4)
    best = sorted(range(len(expected)), key=lambda t: -expected[t])[:3]
    assert [t for t, _, _ in found.top] == best
    assert [p for _, _, p in found.top] == pytest.approx([expected[t] for t in best], abs=1e-4)


# -- ends ------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(engine):
    whole = ask(engine, words(90), 30).text
    stop = whole[10:14]
    at = whole.index(stop)
    answer = ask(engine, words(90), 30, stop=("never in it", stop))
    assert answer.text == whole[:at]
    assert (answer.done.finish, answer.done.stop_sequence) == ("stop", stop)
    assert answer.done.completion_tokens == at + 4


def test_cancel_frees_the_row_and_keeps_what_was_computed(engine):
    running = Pending(engine, request(words(200), 100_000))
    running.wait_for_text(2)
    engine.cancel(running.number)
    waited = ask(engine, words(50, seed=3), 3)
    assert waited.done.completion_tokens == 3
    stats = engine.stats()
    assert (stats.decoding, stats.cancelled) == (0, 1)
    assert not any(hasattr(e, "finish") for e in running.events)
    assert ask(engine, words(200), 3).hit.cached == 199


def test_cancel_in_the_middle_of_prefill_keeps_the_chunks_that_are_done(loaded):
    with Engine(*loaded, budget="256MB", limits=Limits(prefill_chunk=64)) as engine:
        seen = threading.Event()
        number = engine.submit(
            request(words(4000), 5), lambda events: [seen.set() for e in events if isinstance(e, Progress)] and None
        )
        assert seen.wait(60)
        engine.cancel(number)
        hit = ask(engine, words(4000), 2).hit
        assert 64 <= hit.cached < 3999
        engine.check()


def test_cancelling_what_is_over_or_never_was_is_harmless(engine):
    engine.cancel(ask_all(engine, [request(words(20), 2)])[0].done.completion_tokens)
    engine.cancel(10**9)
    assert ask(engine, words(20), 2).done.completion_tokens == 2


# -- memory ----------------------------------------------------------------------------------------

SMALL = 12_000_000


def test_a_prompt_that_can_never_fit_is_refused_with_the_number_that_would(loaded):
    with Engine(*loaded, budget=SMALL) as engine:
        most = engine.most_tokens
        with pytest.raises(TooLong, match=f"has {most + 1} tokens; .* has room for {most}") as caught:
            engine.submit(request(words(most + 1)), lambda events: None)
        assert (caught.value.tokens, caught.value.most) == (most + 1, most)
        answer = ask(engine, words(most), 1)
        assert answer.done.completion_tokens == 1
        engine.check()


@pytest.mark.slow  # the next but one preempts and resumes, too
def test_shortage_in_mid_generation_preempts_the_youngest_and_resumes_it(loaded):
    with Engine(*loaded, budget=SMALL) as engine:
        most = engine.most_tokens
        prompts = [words(most // 5, seed=i) for i in range(4)]
        n = most // 4
        answers = ask_all(engine, [request(p, n) for p in prompts])
        assert [a.tokens for a in answers] == [cold(loaded[0], p, n) for p in prompts]
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.cache.peak_bytes <= SMALL
        engine.check()


@pytest.mark.slow
def test_a_request_that_waits_for_memory_is_not_counted_again_and_again(loaded):
    with Engine(*loaded, budget=SMALL) as engine:
        most = engine.most_tokens
        ask_all(engine, [request(words(most // 2, seed=i), most // 4) for i in range(3)])
        stats = engine.stats()
        assert stats.cache.requests == 3 + stats.preemptions
        assert stats.cache.tokens_requested >= 3 * (most // 2)
        assert 0 < stats.cache.reasons["no room"] < stats.generated_tokens / 8, "not asked again in every step"


def test_a_preempted_request_with_a_seed_goes_on_as_it_would_have(loaded):
    seeded = [Sampling(temperature=1.0, seed=i) for i in range(4)]
    with Engine(*loaded, budget="256MB") as engine:
        wide = [ask(engine, words(400, seed=i), 500, sampling=s).tokens for i, s in enumerate(seeded)]
    with Engine(*loaded, budget=SMALL // 2) as engine:
        answers = ask_all(engine, [request(words(400, seed=i), 500, sampling=s) for i, s in enumerate(seeded)])
        assert engine.stats().preemptions > 0
        assert [a.tokens for a in answers] == wide


@pytest.mark.parametrize("share", quick([0.05, 0.3], 0.3))
@pytest.mark.parametrize("first, second", [(0.7, 0.7), (0.9, 0.9), (0.5, 0.8)])
def test_what_is_stored_never_keeps_out_a_prompt_that_fits(loaded, share, first, second):
    with Engine(*loaded, budget=SMALL) as engine:
        most = engine.most_tokens
        kept = words(int(most * first), seed=1)
        other = [*kept[: int(most * share)], *words(int(most * (second - share)), seed=2)]
        ask(engine, kept, 4)
        assert ask(engine, other, 4).tokens == cold(loaded[0], other, 4)
        assert ask(engine, words(20, seed=3), 4).tokens == cold(loaded[0], words(20, seed=3), 4)
        engine.check()


@pytest.mark.parametrize("n", [600, 5000])
def test_a_bounded_conversation_may_be_longer_than_the_budget(loaded, n):
    bound = {"max_kv_size": 512, "keep": 16}
    with Engine(*loaded, budget=SMALL, limits=Limits(prefill_chunk=64), **bound) as engine:
        assert ask(engine, words(n), 5).done.completion_tokens == 5
        engine.check()


def test_a_common_slab_for_tails_under_memory_pressure(loaded, monkeypatch):
    """As on a GPU, where rows that share a prefix have their tails side by side."""
    monkeypatch.setattr("onefold.cache.memory.device.on_gpu", lambda: True)
    with Engine(*loaded, budget=SMALL) as engine:
        system = words(200)
        for round in range(effort(1, 3)):
            prompts = [[*system, *words(30 + 40 * i, seed=10 * round + i)] for i in range(5)]
            answers = ask_all(engine, [request(p, 120) for p in prompts])
            assert [a.tokens for a in answers] == [cold(loaded[0], p, 120) for p in prompts]
            engine.check()


@pytest.mark.slow
def test_alone_and_out_of_memory_an_answer_ends_with_length(loaded):
    with Engine(*loaded, budget=SMALL) as engine:
        most = engine.most_tokens
        answer = ask(engine, words(most - 100), None)
        assert answer.done.finish == "length"
        assert 100 <= answer.done.completion_tokens < most
        assert ask(engine, words(50), 3).done.completion_tokens == 3
        engine.check()


@pytest.mark.parametrize("wrong", [{"budget": "100kB"}, {"kv": "3"}, {"max_kv_size": 10, "keep": 20}])
def test_what_cannot_be_used_is_said_and_leaves_no_thread(loaded, wrong):
    with pytest.raises(ConfigError):
        Engine(*loaded, **{"budget": "64MB", **wrong})
    assert "onefold-engine" not in [t.name for t in threading.enumerate()]


def test_the_queue_is_bounded(loaded):
    with Engine(*loaded, budget="64MB", max_queue=3, limits=Limits(rows=1)) as engine:
        running = Pending(engine, request(words(20), 100_000))
        running.wait_for_text()
        waiting = [Pending(engine, request(words(20, seed=i), 1)) for i in range(3)]
        with pytest.raises(Busy, match="full with 3 requests") as caught:
            engine.submit(request(words(20)), lambda events: None)
        assert 1 <= caught.value.retry_after <= 60
        engine.cancel(running.number)
        assert all(p.wait().done.completion_tokens == 1 for p in waiting)


def test_waiting_too_long_ends_with_busy(loaded):
    limits = Limits(rows=1, queue_timeout_seconds=0.05)
    with Engine(*loaded, budget="64MB", limits=limits) as engine:
        running = Pending(engine, request(words(20), 100_000))
        running.wait_for_text()
        late = Pending(engine, request(words(20, seed=1), 1)).wait()
        assert isinstance(late.error, Busy)
        engine.cancel(running.number)


# -- faults ----------------------------------------------------------------------------------------


def test_a_device_that_fails_costs_the_requests_of_that_forward_alone(engine, forwards, loaded):
    running = Pending(engine, request(words(60, seed=2), 300))
    running.wait_for_text(2)

    def fail(shape: tuple[int, int]) -> None:
        if shape[1] > 20:
            raise RuntimeError("[malloc] out of memory")

    forwards.before = fail
    failed = ask(engine, words(101), 5)
    assert isinstance(failed.error, DeviceError) and "out of memory" in str(failed.error)
    forwards.before = lambda shape: None
    assert running.wait().tokens == cold(loaded[0], words(60, seed=2), 300)
    assert ask(engine, words(101), 5).tokens == cold(loaded[0], words(101), 5)


def test_a_tokenizer_that_raises_costs_its_request_alone(engine, loaded, monkeypatch):
    running = Pending(engine, request(words(60, seed=2), 200))
    running.wait_for_text(2)
    doomed = Pending(engine, request(words(70, seed=3), 50))
    doomed.wait_for_text(1)
    (job,) = [j for j in engine._scheduler.jobs.decoding if j.number == doomed.number]

    def add_token(token: int) -> None:
        raise IndexError("no such token")

    monkeypatch.setattr(job._answer._detokenizer, "add_token", add_token)
    assert "no such token" in str(doomed.wait().error)
    assert running.wait().tokens == cold(loaded[0], words(60, seed=2), 200)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 1.5}, {"min_p": 2.0}, {"top_k": -3}, {"repetition_penalty": 0.0}]
)
def test_sampling_that_is_out_of_range_is_refused_at_once(engine, wrong):
    with pytest.raises(PromptError, match=next(iter(wrong))):
        engine.submit(request(words(9), sampling=Sampling(**wrong)), lambda events: None)
    with pytest.raises(PromptError, match=next(iter(wrong))):
        engine.submit(request(words(9), sampling=Sampling(**{next(iter(wrong)): float("nan")})), lambda events: None)


def test_stopping_tells_everyone(loaded):
    engine = Engine(*loaded, budget="64MB", limits=Limits(rows=1))
    running = Pending(engine, request(words(20), 100_000))
    running.wait_for_text()
    waiting = Pending(engine, request(words(20, seed=1), 1))
    engine.stop()
    assert isinstance(running.wait().error, EngineStopped)
    assert isinstance(waiting.wait().error, EngineStopped)
    with pytest.raises(EngineStopped):
        engine.submit(request(words(20)), lambda events: None)
    assert not engine.alive
    with pytest.raises(EngineStopped):
        engine.check()


def test_a_program_that_forgets_to_stop_it_ends_well(model):
    code = (
        "import onefold; from onefold.engine.engine import Engine; from asking import Pending, request; "
        f"engine = Engine(*onefold.load({str(model)!r}), budget='64MB'); "
        "Pending(engine, request([1, 2, 3], 100000)).wait_for_text(2)"
    )
    here = Path(__file__).parent
    ended = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_thread_that_dies_of_a_bug_tells_everyone(engine, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    running = Pending(engine, request(words(20), 100_000))
    running.wait_for_text()
    engine._mailbox.put(lambda scheduler: 1 / 0)  # type: ignore[arg-type, return-value]
    assert isinstance(running.wait().error, EngineStopped)
    engine._thread.join(10)
    assert not engine.alive


def test_bad_prompts(engine):
    with pytest.raises(PromptError, match="empty"):
        engine.chat([])
    with pytest.raises(PromptError, match="empty"):
        engine.text("")
    with pytest.raises(PromptError, match="from 0 to"):
        engine.text([1, 2, 10**6])
    with pytest.raises(PromptError, match="from 0 to"):
        engine.text([-1])
    with pytest.raises(PromptError):
        engine.text("\ud800")
    with pytest.raises(PromptError, match="at least one"):
        engine.submit(request(prompt_of([])), lambda events: None)


def test_clear_drops_what_nobody_holds(engine):
    ask(engine, words(200), 3)
    memory, disk = engine.clear()
    assert memory > 0 and disk == 0
    assert engine.stats().cache.stored_tokens == 0
    assert ask(engine, words(200), 3).hit.cached == 0


def test_every_keyword_of_an_engine_is_in_its_signature(loaded):
    signature = inspect.signature(Engine)
    assert list(signature.parameters)[:2] == ["model", "tokenizer"]
    keywords = {name: p.default for name, p in list(signature.parameters.items())[2:]}
    assert keywords == vars(EngineConfig()) and keywords.keys() == EngineOptions.__annotations__.keys()
    with pytest.raises(TypeError, match="unexpected keyword argument 'buget'"):
        Engine(*loaded, buget="64MB")


def test_an_engine_whose_thread_fails_at_its_start_says_so(loaded, monkeypatch):
    model, tokenizer = loaded

    def fail(*_: Any) -> None:
        raise TypeError("no scheduler")

    printed: list[str] = []
    monkeypatch.setattr("onefold.engine.engine.Scheduler", fail)
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(str(args.exc_value)))
    with pytest.raises(EngineStopped, match="could not start"):
        Engine(model, tokenizer, budget="64MB")
    assert printed == ["no scheduler"]
