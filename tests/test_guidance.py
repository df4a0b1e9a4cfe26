"""Answers that keep to a schema, in the engine: a tiny model with random weights, which would keep to nothing."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from asking import Answer, ask_all
from call_templates import HERMES, bytes_and_words, tokenizer_of
from effort import effort
from llguidance import LLParserLimits

from onefold.engine import decode, stock
from onefold.engine.constraint import Constraint, Shape, ToolRule
from onefold.engine.engine import Engine
from onefold.engine.guidance import closing, compiler, guide, masks, trial
from onefold.engine.guidance.guide import Guide
from onefold.engine.guidance.limits import SLOW_SECONDS, SLOW_STEPS
from onefold.engine.limits import Limits
from onefold.engine.request import Reasoning, Request, Sampling, Text
from onefold.errors import BudgetError, EngineStopped, PromptError, RequestError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 8}},
            "required": ["word"],
        },
    },
}
DRAWN = Sampling(temperature=1.0)


@functools.cache
def speaker(name: str = "hermes", thinks: bool = False) -> tuple[Any, Any]:
    """A llama of random weights and the tokenizer of a format of calls."""
    special = ("<think>", "</think>") if thinks else ()
    tokenizer = tokenizer_of(name, special=special)
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": len(tokenizer) + 24,  # models have more ids than their tokenizers
    }
    mx.random.seed(7)
    model = stock.random_llama(config)
    mx.eval(model.parameters())
    return model, tokenizer


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(*speaker(), budget="256MB") as made:
        yield made
        made.check()


def shaped(schema: Any, where: str = "response_format") -> Constraint:
    return Constraint(shape=Shape("json_schema", json.dumps(schema), where))


def asked(engine: Engine, constraint: Constraint | None, said: str = "Who?", **options: Any) -> Request:
    tools = options.get("tools")
    prompt = engine.chat([{"role": "user", "content": said}], tools=tools)
    return Request(prompt=prompt, constraint=constraint, **{"sampling": DRAWN, "max_tokens": 400, **options})


def ask(engine: Engine, constraint: Constraint | None, said: str = "Who?", **options: Any) -> Answer:
    return Answer(list(engine.ask(asked(engine, constraint, said, **options))))


# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [DRAWN, Sampling(temperature=0), Sampling(temperature=2.0, top_k=3, min_p=0.01)])
def test_an_answer_is_json_of_its_schema(engine, sampling):
    for i in range(effort(4, 25)):
        answer = ask(engine, shaped(PERSON), f"Who is {i}?", sampling=sampling)
        assert answer.done.finish == "stop"
        jsonschema.validate(json.loads(answer.text), PERSON)


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("regex", "[0-9]{3}-[a-c]/x", r"[0-9]{3}-[a-c]/x"),
        ("regex", r"^\d\.\d$", r"[0-9]\.[0-9]"),
        ("choice", json.dumps(["yes", 'no "x"', "line\nbreak", "straße"]), r'yes|no "x"|line\nbreak|straße'),
        ("grammar", 'start: "a" b ";"\nb: /[0-9]{1,3}/', r"a[0-9]{1,3};"),
        ("grammar", 'root ::= "x" [0-9] [0-9] "."', r"x[0-9][0-9]\."),
        ("json_schema", '{"type": "object", "maxProperties": 0}', r"\{\}"),
        ("json_schema", '{"const": {"a": [1, 2], "b": null}}', r'\{"a": \[1, 2\], "b": null\}'),
        ("json_schema", "true", r"[\s\S]*"),
    ],
)
def test_an_answer_has_the_shape_that_was_asked_for(engine, kind, text, wanted):
    for i in range(3):
        answer = ask(engine, Constraint(shape=Shape(kind, text)), f"Try {i}")
        if answer.done.finish == "stop":
            assert re.fullmatch(wanted, answer.text), answer.text


STORY = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "mood": {"enum": ["glad", "sad"]},
        "at": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+@[a-z]+[.]de$"}, "minItems": 2},
        "seen": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
    },
    "required": ["text", "mood", "at", "seen"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("most", [120, 260, 700])
def test_an_answer_is_completed_before_its_limit(engine, most):
    for i in range(effort(2, 10)):
        answer = ask(engine, shaped(STORY), f"Tell {i}", max_tokens=most)
        assert answer.done.completion_tokens <= most
        jsonschema.validate(json.loads(answer.text), STORY)


@pytest.mark.parametrize("schema", [{"type": "string", "minLength": 2000}, {"type": "array", "minItems": 2000}])
def test_an_answer_that_cannot_be_completed_is_cut(engine, schema):
    answer = ask(engine, shaped(schema), max_tokens=120)
    assert answer.done.finish == "length"
    assert answer.done.completion_tokens == 120


def test_looking_for_a_completion_that_does_not_fit_is_bounded(engine, monkeypatch):
    """All rows wait for it."""
    tried = []
    real = closing.Completions.find
    monkeypatch.setattr(closing.Completions, "find", lambda *given: tried.append(given[2]) or real(*given))
    ask(engine, shaped({"type": "string", "minLength": 2000}), max_tokens=120)
    assert tried
    assert sum(tried) <= 3 * 120


def test_an_answer_that_is_not_near_its_limit_is_not_completed(engine):
    """Its end is the model's own."""
    answers = [ask(engine, shaped({"type": "boolean"}), f"Is it {i}?", max_tokens=12) for i in range(4)]
    assert {answer.done.finish for answer in answers} == {"stop"}


@pytest.mark.parametrize(
    ("schema", "most", "fits"),
    [
        ({"type": "object", "properties": {"score": {"enum": [66, 77]}}, "required": ["score"]}, 24, 15),
        ({"type": "integer", "minimum": 100, "maximum": 120}, 5, 3),
        ({"enum": ["1", "10", "100"]}, 9, 6),
    ],
)
def test_an_answer_that_fits_is_the_models_own(engine, schema, most, fits):
    """Completing it would leave the model no choice."""
    closed = {**schema, "additionalProperties": False} if "properties" in schema else schema
    for i in range(6):
        free = ask(engine, shaped(closed), f"Say {i}", max_tokens=200, sampling=Sampling(temperature=1.0, seed=i))
        near = ask(engine, shaped(closed), f"Say {i}", max_tokens=most, sampling=Sampling(temperature=1.0, seed=i))
        assert free.done.completion_tokens <= fits + 2
        assert near.text == free.text


def test_a_call_is_not_completed(engine):
    """A file half written would look like a whole one."""
    tool = json.loads(json.dumps(TOOL))
    tool["function"]["parameters"]["properties"]["word"] = {"type": "string", "minLength": 3000}
    rule = Constraint(tools=ToolRule(required=True))
    answer = ask(engine, rule, tools=[tool], max_tokens=100)
    assert answer.done.finish == "length"
    assert not answer.calls


def test_a_matcher_that_takes_long_to_make_is_copied_for_some_answers(engine, monkeypatch):
    made = []
    real = compiler.LLMatcher
    monkeypatch.setattr(compiler, "LLMatcher", lambda *given, **named: made.append(1) or real(*given, **named))
    monkeypatch.setattr(compiler, "COPIED_SECONDS", -1.0)
    monkeypatch.setattr(compiler, "MOST_COPIES", 3)
    for i in range(7):
        answer = ask(engine, shaped({"enum": ["slow", "slower"]}), f"Say {i}")
        assert json.loads(answer.text) in ("slow", "slower")
    assert len(made) == 3


def test_a_tool_that_was_refused_for_now_is_enforced_later(engine, monkeypatch):
    schema = {"type": "object", "properties": {"n": {"enum": [5]}}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "dial", "parameters": schema}}
    asking = asked(engine, Constraint(tools=ToolRule(only="dial")), tools=[tool])
    tried = trial.Verdict("it took too long", lasting=False)
    compiler_ = engine._compiler
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "KEPT_SECONDS", 0.0)
        patch.setattr(compiler_._trials, "run", lambda grammar: tried if "[5]" in grammar else real(grammar))
        real = type(compiler_._trials).run.__get__(compiler_._trials)
        loose = compiler_.guided(asking)
    strict = compiler_.guided(asking)
    assert loose is not None and strict is not None
    assert len(loose.guide.forced) < len(strict.guide.forced)


def test_answers_of_one_schema_share_no_limits(engine, monkeypatch):
    """A lexer that answers shared would exceed its states after some of them, and fail all requests from then on."""
    monkeypatch.setattr(compiler, "parser_limits", lambda: LLParserLimits(max_lexer_states=400))
    kinds = "abcdefghijkl"
    schema = {"type": "string", "pattern": f"^({'|'.join(f'{kind}[^{kind}]{{30}}{kind}' for kind in kinds)})$"}
    for kind in kinds:
        made = engine._compiler.guided(asked(engine, shaped(schema)))
        assert made is not None
        for letter in f'"{kind}{"z" * 28}':
            masks.allowed_bits([made.guide], engine.vocab)
            token = engine.tokenizer.encode(letter, add_special_tokens=False)[0]
            made.guide.read(made.guide.forced[0] if made.guide.forced else token, "normal", 1000)


def test_a_token_that_was_not_allowed_fails_its_request(engine):
    made = engine._compiler.guided(asked(engine, shaped(PERSON)))
    assert made is not None
    guided = made.guide
    wrong = engine.tokenizer.encode("zebra", add_special_tokens=False)[0]
    while guided.forced:
        guided.read(guided.forced[0], "normal", 100)
    with pytest.raises(RequestError, match="not allowed"):
        guided.read(wrong, "normal", 100)


def test_bias_and_penalties_do_not_get_past_the_mask(engine):
    token = engine.tokenizer.encode("zebra", add_special_tokens=False)[0]
    sampling = Sampling(temperature=1.0, logit_bias={token: 100.0}, presence_penalty=2.0, repetition_penalty=1.4)
    for i in range(4):
        answer = ask(engine, shaped(PERSON), f"Who is {i}?", sampling=sampling)
        jsonschema.validate(json.loads(answer.text), PERSON)


def test_logprobs_are_those_of_the_model(engine):
    answer = ask(engine, shaped(PERSON), top_logprobs=2, sampling=Sampling(temperature=0))
    reported = [p for e in answer.events if isinstance(e, Text) for p in e.logprobs]
    assert len(reported) == answer.done.completion_tokens - 1  # all but the end
    assert any(p.logprob < max(top for _, _, top in p.top) for p in reported)  # the mask forbade the likeliest
    jsonschema.validate(json.loads(answer.text), PERSON)


def test_a_cut_off_answer_ends_with_length(engine):
    answer = ask(engine, shaped(PERSON), max_tokens=5)
    assert answer.done.finish == "length" and answer.done.completion_tokens == 5
    assert answer.text.startswith('{"name')


# -- rows ------------------------------------------------------------------------------------------


def test_rows_with_and_without_a_schema_do_not_concern_each_other(engine):
    """With seeds, each answer is that of its request alone."""
    made = [
        asked(
            engine,
            [None, shaped(PERSON), Constraint(shape=Shape("choice", '["yes", "never ever"]'))][i % 3],
            f"Who is {i}?",
            sampling=Sampling(temperature=1.0, seed=i + 1),
            max_tokens=60,
        )
        for i in range(9)
    ]
    alone = [Answer(list(engine.ask(one))).text for one in made]
    assert [answer.text for answer in ask_all(engine, made)] == alone
    assert [answer.text for answer in ask_all(engine, made[::-1])] == alone[::-1]


def test_forced_tokens_are_computed_at_once_and_change_nothing(engine, monkeypatch):
    fixed = {"const": {"title": "a fixed text that is long", "items": ["one", "two", "three"]}}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": fixed, "c": {"type": "boolean"}}}
    schema |= {"required": ["a", "b", "c"], "additionalProperties": False}
    request = asked(engine, shaped(schema), sampling=Sampling(temperature=1.0, seed=5))
    before = engine.stats().steps
    ahead = Answer(list(engine.ask(request)))
    steps = engine.stats().steps - before
    assert steps < ahead.done.completion_tokens / 3
    with monkeypatch.context() as patch:
        patch.setattr(decode.Decode, "_runs_ahead", lambda *_: False)
        one_by_one = Answer(list(engine.ask(request)))
    assert one_by_one.text == ahead.text and one_by_one.done.completion_tokens == ahead.done.completion_tokens
    jsonschema.validate(json.loads(ahead.text), schema)


def test_what_follows_a_guided_answer_reuses_it(engine):
    """JSON is written as templates write it, and forced tokens are those that a tokenizer makes of the text. So the
    next turn, which may have another schema, reuses the answer."""
    fixed = {"const": {"title": "a fixed text", "items": ["one", "two", 3]}}
    question = {"role": "user", "content": "A person, please, with all there is to know about them."}
    first = ask(engine, shaped(fixed), question["content"])
    said = [question, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Another one."}]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    request = Request(prompt=engine.chat(said), constraint=shaped(schema), sampling=DRAWN, max_tokens=50)
    second = Answer(list(engine.ask(request)))
    jsonschema.validate(json.loads(second.text), schema)
    assert second.hit.cached >= first.hit.prompt_tokens + first.done.completion_tokens


def test_an_answer_that_was_preempted_goes_on_where_it_was(monkeypatch):
    with Engine(*speaker(), budget="256MB") as engine:
        made = [
            asked(engine, shaped(PERSON), f"Who is {i}?", sampling=Sampling(temperature=1.0, seed=i + 1))
            for i in range(3)
        ]
        alone = [Answer(list(engine.ask(one))).text for one in made]
        steps = iter(range(1000))
        original = decode.Decode._step

        def short(self: Any, rows: Any) -> Any:
            if next(steps) % 4 == 3:
                raise BudgetError("a test wants room", needed_bytes=1, available_bytes=0)
            return original(self, rows)

        monkeypatch.setattr(decode.Decode, "_step", short)
        assert [answer.text for answer in ask_all(engine, made)] == alone
        assert engine.stats().preemptions > 0
        engine.check()


LONG = {"const": {"title": "a fixed text that is long " * 4, "items": ["one", "two", "three"]}}
CHOSEN = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": LONG}, "required": ["a", "b"]}


@pytest.mark.parametrize(("budget", "chunk"), [("256MB", 32), ("1MB", 2048)])
def test_forced_tokens_that_are_too_many_for_one_chunk_are_computed_in_several(budget, chunk):
    with Engine(*speaker(), budget=budget, limits=Limits(prefill_chunk=chunk)) as engine:
        free = [asked(engine, None, "Talk.", sampling=Sampling(temperature=1.0, seed=3), max_tokens=100)]
        made = [
            asked(engine, shaped(CHOSEN), f"Who is {i}?", sampling=Sampling(temperature=1.0, seed=i)) for i in (1, 2)
        ]
        answers = ask_all(engine, free + made)[1:]
        for answer in answers:
            jsonschema.validate(json.loads(answer.text), CHOSEN)
        engine.check()


def test_forced_tokens_are_counted(engine):
    before = engine.stats().generated_tokens
    answer = ask(engine, shaped(CHOSEN))
    assert engine.stats().generated_tokens - before == answer.done.completion_tokens


@pytest.mark.parametrize("text", ["a <|im_end|> b", "<|im_start|>"])
def test_text_may_have_the_name_of_a_special_token(engine, text):
    keyed = {"type": "object", "properties": {text: {"type": "null"}}, "required": [text]}
    keyed["additionalProperties"] = False
    for schema in ({"const": text}, keyed):
        answer = ask(engine, shaped(schema))
        assert answer.done.finish == "stop"
        jsonschema.validate(json.loads(answer.text), schema)


# -- thinking --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker() -> Iterator[Engine]:
    with Engine(*speaker(thinks=True), budget="256MB") as made:
        yield made


def test_a_model_may_think_before_it_keeps_to_a_schema(thinker):
    tokenizer = thinker.tokenizer
    assert tokenizer.has_thinking
    start, end = tokenizer.think_start_tokens[0], tokenizer.think_end_tokens[0]
    thought = 0
    for i in range(12):
        sampling = Sampling(temperature=1.0, logit_bias={start: 50.0, end: 51.0}, seed=i + 1)
        answer = ask(thinker, shaped(PERSON), f"Who is {i}?", sampling=sampling)
        assert answer.done.finish == "stop" and answer.done.reasoning_tokens >= 1
        thought += any(isinstance(e, Reasoning) for e in answer.events)
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert thought


def test_a_model_that_must_not_think_does_not(thinker):
    """The prompt ends behind an empty thought, as templates write it that switch thinking off."""
    tokenizer = thinker.tokenizer
    text = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    sampling = Sampling(temperature=1.0, logit_bias={tokenizer.think_start_tokens[0]: 50.0})
    for _ in range(3):
        request = Request(prompt=thinker.text(tokens), constraint=shaped(PERSON), sampling=sampling, max_tokens=400)
        answer = Answer(list(thinker.ask(request)))
        assert not answer.reasoning
        jsonschema.validate(json.loads(answer.text), PERSON)


# -- tools -----------------------------------------------------------------------------------------


def test_a_call_is_forced(engine):
    answer = ask(engine, Constraint(tools=ToolRule(required=True, parallel=False)), tools=[TOOL])
    assert answer.done.finish == "tool_calls" and not answer.text.strip()
    (call,) = answer.calls
    assert call.name == "look_up" and set(json.loads(call.arguments)) == {"word"}


def test_an_answer_is_of_the_shape_or_a_call(engine):
    kinds = set()
    for i in range(16):
        rule = Constraint(shape=Shape("choice", '["done"]'), tools=ToolRule(parallel=False))
        answer = ask(engine, rule, f"Try {i}", tools=[TOOL], sampling=Sampling(temperature=3.0, seed=i + 1))
        kinds.add(answer.done.finish)
        assert answer.text == "done" if answer.done.finish == "stop" else len(answer.calls) == 1
    assert kinds == {"stop", "tool_calls"}


def test_a_model_without_a_format_is_forced_to_call_all_the_same():
    model, _ = speaker()
    tokenizer = stock.TokenizerWrapper(bytes_and_words(()))
    tokenizer.chat_template = HERMES
    with Engine(model, tokenizer, budget="64MB") as engine:
        answer = ask(engine, Constraint(tools=ToolRule(only="look_up")), tools=[TOOL])
        assert [call.name for call in answer.calls] == ["look_up"] and answer.done.finish == "tool_calls"
        free = ask(engine, Constraint(tools=ToolRule()), tools=[TOOL], max_tokens=5)
        assert free.done.finish in ("length", "stop")


# -- what cannot be done ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Shape("json_schema", '{"type": "string", "enum": [1]}'), "Unsatisfiable schema"),
        (Shape("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}'), "Unsatisfiable schema"),
        (Shape("json_schema", '{"$ref": "#"}'), "cannot be enforced"),
        (Shape("json_schema", '{"$ref": "#/$defs/nowhere"}'), "cannot be enforced"),
        (Shape("json_schema", '{"$ref": "http://127.0.0.1:1/x"}'), "cannot be enforced"),
        (Shape("json_schema", '{"type": "nonsense"}'), "cannot be enforced"),
        (Shape("json_schema", "false"), "nothing can satisfy it"),
        (Shape("json_schema", '{"type": "object", "properties": {"a": false}, "required": ["a"]}'), "cannot be"),
        (Shape("regex", "(?=a)b"), "look-around"),
        (Shape("regex", "(("), "unclosed group"),
        (Shape("grammar", 'root ::= foo "a"'), "Rule 'foo' not found"),
        (Shape("grammar", 'foo ::= "a"'), "root"),
        (Shape("grammar", 'root ::= root "a"'), "nothing can satisfy it"),
        (Shape("regex", ""), "empty"),
        (Shape("choice", "[]"), "at least one"),
        (Shape("grammar", "%%% }{"), "neither as Lark nor as GBNF"),
        (Shape("grammar", "start: nothing"), "cannot be enforced"),
        (Shape("grammar", 'start: "' + "x" * (1 << 20) + '"'), "is the most"),
    ],
)
def test_a_shape_that_cannot_be_enforced_is_refused(engine, shape, said):
    with pytest.raises(PromptError, match=said) as refused:
        engine.submit(asked(engine, Constraint(shape=Shape(shape.kind, shape.text, "text.format"))), print)
    assert refused.value.where == "text.format" and len(str(refused.value)) < 500
    jsonschema.validate(json.loads(ask(engine, shaped(PERSON)).text), PERSON)


def deep(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        made = {"type": "object", "properties": {"a": made}}
    return made


HOSTILE = {
    "takes minutes": Shape("json_schema", '{"type": "integer", "multipleOf": 12345678}'),
    "ends a process": Shape(
        "grammar", "\n".join(["start: r0", *(f'r{i}: "x" r{i + 1}' for i in range(20000)), 'r20000: "y"'])
    ),
    "is deep": Shape("json_schema", json.dumps(deep(180))),
    "has many properties": Shape(
        "json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(9000)}})
    ),
    "is a grammar of a megabyte": Shape("grammar", "start: " + " | ".join(f'"w{i}"' for i in range(95000))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_delays_no_other_request(engine, name, monkeypatch):
    monkeypatch.setattr(trial, "MOST_SECONDS", 1.5)
    refused: list[Exception] = []

    def hostile() -> None:
        try:
            engine.submit(asked(engine, Constraint(shape=HOSTILE[name])), print)
        except PromptError as error:
            refused.append(error)

    thread = threading.Thread(target=hostile)
    begun = time.monotonic()
    thread.start()
    answers = 0
    while thread.is_alive():
        ask(engine, None, max_tokens=4)
        answers += 1
    assert refused and "cannot be enforced" in str(refused[0])
    assert time.monotonic() - begun < 3 * trial.MOST_SECONDS + 10
    begun = time.monotonic()
    with pytest.raises(PromptError):  # the error is kept
        engine.submit(asked(engine, Constraint(shape=HOSTILE[name])), print)
    assert time.monotonic() - begun < 2
    jsonschema.validate(json.loads(ask(engine, shaped(PERSON)).text), PERSON)


def test_a_grammar_that_becomes_too_complex_fails_its_request_alone(engine, monkeypatch):
    """Its masks exceed a limit after some tokens."""
    monkeypatch.setattr(compiler, "parser_limits", lambda: LLParserLimits(step_lexer_fuel=3000))
    hard = Constraint(shape=Shape("regex", "(?:.*[a-f].{20}){5}"))
    answers = ask_all(
        engine, [asked(engine, hard, "Hard", max_tokens=300), asked(engine, shaped(PERSON), "Who is it?")]
    )
    assert isinstance(answers[0].error, RequestError) and "cannot be kept" in str(answers[0].error)
    jsonschema.validate(json.loads(answers[1].text), PERSON)


def test_a_tokenizer_without_its_file_is_named():
    model, wrapped = speaker()

    class Slow:
        """A tokenizer of the kind that has no tokenizer.json."""

        name_or_path = "some/slow-tokenizer"
        all_special_ids: tuple[int, ...] = ()

        def __getattr__(self, name: str) -> Any:
            if name in ("backend_tokenizer", "_tokenizer"):
                raise AttributeError(name)
            return getattr(wrapped, name)

        def __len__(self) -> int:
            return len(wrapped)

    with Engine(model, Slow(), budget="64MB") as engine:
        with pytest.raises(PromptError, match=r"some/slow-tokenizer.*tokenizer\.json"):
            ask(engine, shaped(PERSON))
        with pytest.raises(PromptError, match=r"tokenizer\.json"):
            ask(engine, Constraint(tools=ToolRule(required=True)), tools=[TOOL])
        assert ask(engine, Constraint(tools=ToolRule()), tools=[TOOL], max_tokens=4).done


def test_the_child_process_ends_with_the_engine(caplog):
    caplog.set_level(logging.INFO)
    with Engine(*speaker(), budget="64MB") as engine:
        ask(engine, shaped(PERSON), max_tokens=3)
        child = engine._compiler._trials._child
        assert child is not None and child.running
    assert not child.running


def test_a_strict_tool_that_cannot_be_enforced_is_named_by_every_model(engine):
    bad = {"type": "function", "function": {"name": "odd", "parameters": {"type": "objct"}}}
    rule = Constraint(tools=ToolRule(strict=frozenset({"odd"})))
    model, _ = speaker()
    tokenizer = stock.TokenizerWrapper(bytes_and_words(()))
    tokenizer.chat_template = HERMES
    with Engine(model, tokenizer, budget="64MB") as without_tools:
        for served in (engine, without_tools):
            with pytest.raises(PromptError, match="objct") as refused:
                ask(served, rule, tools=[TOOL, bad])
            assert refused.value.where.startswith("tools")


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_mask_forbids_what_the_guide_forbids_and_nothing_else(engine, dtype):
    guided = engine._compiler.guided(asked(engine, shaped(PERSON)))
    assert guided is not None
    free = engine._compiler.guided(asked(engine, shaped({"type": "string"})))
    assert free is not None
    guides: list[Guide | None] = [guided.guide, None, free.guide]
    logits = mx.random.normal((3, engine.vocab)).astype(dtype)
    found = logits + masks.mask(guides, engine.vocab, dtype)
    assert found.dtype == dtype
    bits = masks.allowed_bits(guides, engine.vocab)
    for row in range(3):
        may = np.unpackbits(bits[row].view(np.uint8), bitorder="little")[: engine.vocab].astype(bool)
        values = np.array(found[row].astype(mx.float32))
        assert (np.isneginf(values) == ~may).all()
        assert (values[may] == np.array(logits[row].astype(mx.float32))[may]).all()
        assert may.any()
    assert guided.guide.forced  # the beginning of the object
    assert np.unpackbits(bits[0].view(np.uint8)).sum() == 1


def test_a_thought_that_begins_with_several_tokens_is_begun_whole(engine):
    """As Gemma 4's, whose first token alone begins other things, too."""
    guided = engine._compiler.guided(asked(engine, shaped(PERSON)))
    assert guided is not None
    guide = Guide(guided.guide.matcher.deep_copy(), engine.vocab, ends=[3], state="normal", thinks=[5, 6, 7])
    row = np.unpackbits(masks.allowed_bits([guide], engine.vocab)[0].view(np.uint8), bitorder="little")
    assert row[5]
    guide.read(5, "normal", 100)
    for expected in (6, 7):
        assert not guide.rests and guide.forced[0] == expected
        row = np.unpackbits(masks.allowed_bits([guide], engine.vocab)[0].view(np.uint8), bitorder="little")
        assert row.sum() == 1 and row[expected]
        guide.read(expected, "normal" if expected == 6 else "reasoning", 100)
    assert guide.rests
    guide.read(9, "reasoning", 100)
    guide.read(10, "normal", 100)
    assert not guide.rests


@pytest.mark.parametrize("rule", [ToolRule(), ToolRule(required=True, parallel=False)])
def test_a_call_that_begins_in_a_thought_is_kept_to_the_grammar(rule):
    with Engine(*speaker(thinks=True), budget="64MB") as engine:
        guided = engine._compiler.guided(asked(engine, Constraint(tools=rule), tools=[TOOL]))
        assert guided is not None
        guide, tokenizer = guided.guide, engine.tokenizer
        guide.read(tokenizer.think_start_tokens[0], "reasoning", 100)
        assert guide.rests
        for token in tokenizer.encode("hm <tool_call>", add_special_tokens=False):
            guide.read(token, "reasoning", 100)
        guide._awake("tool")
        guide._look_ahead()
        written = tokenizer.decode(list(guide.forced))
        assert not guide.rests and written.startswith('\n{"name": "look_up", "arguments": {"word"')


# -- the child process -----------------------------------------------------------------------------


def child_of(engine: Engine) -> Any:
    return engine._compiler._trials._child


def test_a_child_process_that_something_ended_is_replaced():
    with Engine(*speaker(), budget="64MB") as engine:
        ask(engine, shaped({"enum": ["a", "b"]}), max_tokens=1)
        process = child_of(engine)._process
        process.kill()
        process.wait()
        for words in (["c", "d"], ["e", "f"]):
            assert json.loads(ask(engine, shaped({"enum": words})).text) in words


def test_a_stopped_engine_starts_no_child_process():
    engine = Engine(*speaker(), budget="64MB")
    request = asked(engine, shaped({"enum": ["g", "h"]}))
    engine.stop()
    with pytest.raises(EngineStopped):
        engine.submit(request, print)
    assert child_of(engine) is None


def test_a_beginning_that_is_too_long_is_refused(engine):
    text = " ".join(map(str, range(90_000)))
    with pytest.raises(PromptError, match="cannot be"):  # or it takes too long, on a busy machine
        engine.submit(asked(engine, Constraint(shape=Shape("regex", text))), lambda _: None)


# -- what hostile requests found -------------------------------------------------------------------


def test_text_that_looks_like_a_thought_stays_text(thinker):
    schema = {"const": {"note": "a <think> b </think> <tool_call>"}}
    tokenizer = thinker.tokenizer
    tokens = tokenizer.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n", add_special_tokens=False)
    request = Request(prompt=thinker.text(tokens), constraint=shaped(schema), sampling=DRAWN, max_tokens=400)
    answer = Answer(list(thinker.ask(request)))
    assert json.loads(answer.text) == schema["const"] and not answer.reasoning


def test_an_answer_does_not_end_while_the_model_thinks(thinker):
    tokenizer = thinker.tokenizer
    end, start = min(tokenizer.eos_token_ids), tokenizer.think_start_tokens[0]
    sampling = Sampling(temperature=1.0, logit_bias={start: 60.0, tokenizer.think_end_tokens[0]: 70.0, end: 80.0})
    for i in range(3):
        answer = ask(thinker, shaped({"enum": ["yes", "no"]}), f"Try {i}", sampling=sampling, max_tokens=900)
        assert answer.done.finish == "stop" and json.loads(answer.text) in ("yes", "no")


def test_a_guide_that_takes_long_fails_its_request_alone(engine, monkeypatch):
    monkeypatch.setattr(guide, "SLOW_SECONDS", 0.0)
    answer = ask(engine, shaped({"type": "string", "minLength": 50}))
    assert isinstance(answer.error, PromptError) and "takes too long" in str(answer.error)
    monkeypatch.undo()
    jsonschema.validate(json.loads(ask(engine, shaped(PERSON)).text), PERSON)


def test_a_busy_machine_is_not_a_slow_grammar(engine, monkeypatch):
    """The thread may wait for the processor at any time, and no answer fails or is cut for it."""

    def late(real: Callable[..., Any]) -> Callable[..., Any]:
        pauses = itertools.repeat(2 * SLOW_SECONDS, 2 * SLOW_STEPS)

        def called(*given: Any) -> Any:
            time.sleep(next(pauses, 0.0))
            return real(*given)

        return called

    monkeypatch.setattr(masks, "fill_next_token_bitmask", late(masks.fill_next_token_bitmask))
    monkeypatch.setattr(Guide, "_read", late(Guide._read))
    monkeypatch.setattr(closing.Completions, "_next", late(closing.Completions._next))
    answer = ask(engine, shaped(STORY), max_tokens=120)
    jsonschema.validate(json.loads(answer.text), STORY)


def test_masks_that_take_long_together_are_looked_at_one_by_one(engine, monkeypatch):
    made = [engine._compiler.guided(asked(engine, shaped({"type": "string", "minLength": i + 3}))) for i in range(3)]
    guides: list[Guide | None] = [found.guide for found in made if found is not None]
    for one in guides:
        assert one is not None
        for token in list(one.forced):
            one.read(token, "normal", 100)
    monkeypatch.setattr(masks, "SLOW_SECONDS", 0.0)
    masks.allowed_bits(guides, engine.vocab)
    assert all(one is not None and one.suspect for one in guides)
    masks.allowed_bits(guides, engine.vocab)
    assert not any(one is not None and one.suspect for one in guides)  # each was quick by itself


def test_many_tools_are_offered_without_their_schemas_rather_than_refused():
    properties = {f"argument_{j}": {"type": "string"} for j in range(12)}
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"properties": properties}}}
        for i in range(900)
    ]
    with Engine(*speaker("qwen3_coder"), budget="64MB") as engine:
        begun = time.monotonic()
        guided = engine._compiler.guided(asked(engine, Constraint(tools=ToolRule(only="tool_7")), tools=tools))
        assert guided is not None and time.monotonic() - begun < 20
        answer = ask(engine, Constraint(tools=ToolRule(only="tool_7")), tools=tools, max_tokens=12)
        assert answer.done


def test_a_grammar_that_took_too_long_once_is_tried_again(monkeypatch):
    with Engine(*speaker(), budget="64MB") as engine:
        real = trial._Child.ask
        monkeypatch.setattr(trial, "MOST_SECONDS", 0.0)
        monkeypatch.setattr(trial._Child, "ask", lambda *given: real(*given) if given[-1] else None)
        with pytest.raises(PromptError, match="to compile"):
            ask(engine, shaped({"enum": ["k", "l"]}))
        monkeypatch.undo()
        with pytest.raises(PromptError, match="to compile"):
            ask(engine, shaped({"enum": ["k", "l"]}))
        monkeypatch.setattr(compiler.time, "monotonic", lambda at=time.monotonic: at() + 61)
        assert json.loads(ask(engine, shaped({"enum": ["k", "l"]})).text) in ("k", "l")
