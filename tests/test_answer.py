"""Reading answers: reasoning, tool calls, stop strings however they are cut, and characters of several tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx_lm
import numpy as np
import pytest
from asking import GREEDY, Answer
from hypothesis import given, settings
from hypothesis import strategies as st
from talking_model import CALL, SPLIT_ANSWER, THOUGHT, write_talking_model

from onefold.cache.memory.eviction import LONGEST_PAUSE, PERSON_PAUSE
from onefold.engine.answer import Answer as Reader
from onefold.engine.answer import StopStrings
from onefold.engine.engine import Engine
from onefold.engine.request import Prompt, Reasoning, Request, Text, ToolCall

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model, tokenizer = mlx_lm.load(str(write_talking_model(tmp_path_factory.mktemp("talking"))))
    with Engine(model, tokenizer, budget="64MB") as made:
        yield made


def ask(engine: Engine, messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any) -> Answer:
    prompt = engine.chat(messages, tools=tools)
    asked = Request(prompt=prompt, tools=tools, sampling=GREEDY, max_tokens=options.pop("max_tokens", 32), **options)
    return Answer(list(engine.ask(asked)))


USER = {"role": "user", "content": "What is the weather in Paris?"}


def test_reasoning_and_a_tool_call(engine):
    answer = ask(engine, [USER], [TOOL])
    assert (answer.reasoning, answer.text) == (THOUGHT, "")
    (call,) = answer.calls
    assert call.name == "get_weather" and json.loads(call.arguments) == CALL["arguments"]
    assert answer.done.finish == "tool_calls"
    assert 0 < answer.done.reasoning_tokens < answer.done.completion_tokens


def test_a_tool_result_is_answered_in_words_and_reuses_the_turn_before(engine):
    first = ask(engine, [USER], [TOOL])
    called = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": CALL["arguments"]}}
    turn = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    answer = ask(engine, turn, [TOOL])
    assert answer.text == SPLIT_ANSWER and answer.done.finish == "stop" and not answer.calls
    assert answer.hit.cached >= first.hit.prompt_tokens - 2  # up to the generation prompt


@pytest.mark.parametrize(
    ("messages", "tools", "expected"),
    [
        ([USER], [TOOL], LONGEST_PAUSE),  # it calls the tool, whose result comes soon
        ([USER, {"role": "tool", "tool_call_id": "1", "content": "cloudy"}], [TOOL], PERSON_PAUSE),
        ([{"role": "user", "content": "What is the weather in Rome?"}], None, LONGEST_PAUSE),  # may be a program's turn
    ],
)
def test_a_turn_that_is_over_is_expected_back_later_than_a_tools_result(engine, messages, tools, expected):
    ask(engine, messages, tools)
    tokens = engine.chat(messages, tools=tools).tokens
    with engine.cache.state.lock:
        (tree,) = engine.cache.state.nodes.trees.values()
        path, matched = tree.match(tokens)
        ends = [path[-1], *path[-1].walk()]
    assert matched == len(tokens) and expected in {n.pause for n in ends}
    assert expected == PERSON_PAUSE or PERSON_PAUSE not in {n.pause for n in ends}


def test_a_call_that_cannot_be_parsed_is_text(engine, caplog):
    answer = ask(engine, [{"role": "user", "content": "a broken one"}], [TOOL])
    assert answer.calls == [] and answer.text == "<tool_call>{not json</tool_call>"
    assert answer.done.finish == "stop" and "could not be parsed" in caplog.text


def test_without_tools_a_call_is_text(engine):
    prompt = engine.chat([USER], tools=[TOOL])
    asked = Request(prompt=prompt, tools=None, sampling=GREEDY, max_tokens=32)
    answer = Answer(list(engine.ask(asked)))
    assert answer.calls == [] and answer.text == f"<tool_call>{json.dumps(CALL)}</tool_call>"


@pytest.mark.parametrize("error", [OverflowError, RecursionError, KeyError])
def test_whatever_a_parser_raises_the_call_is_text(engine, monkeypatch, error):
    def parse(text: str, tools: Any) -> Any:
        raise error("1e999")

    monkeypatch.setattr(engine.tokenizer, "_tool_parser", parse)
    answer = ask(engine, [USER], [TOOL])
    assert answer.calls == [] and answer.text == f"<tool_call>{json.dumps(CALL)}</tool_call>"
    assert engine.alive


def test_a_call_that_was_cut_off_is_what_was_written(engine):
    assert ask(engine, [USER], [TOOL], max_tokens=4).text == "<tool_call>"
    answer = ask(engine, [USER], [TOOL], max_tokens=5)
    assert answer.text == f"<tool_call>{json.dumps(CALL)}" and not answer.calls and answer.done.finish == "length"


def test_an_answer_that_is_cut_short_in_its_reasoning(engine):
    answer = ask(engine, [USER], [TOOL], max_tokens=2)
    assert answer.reasoning == THOUGHT and answer.done.finish == "length"


@pytest.mark.parametrize("stop", ["sunny", "nny in", "s sun", " ", "It is sunny in Paris.", "."])
def test_stop_strings_however_tokens_are_cut(engine, stop):
    answer = ask(engine, [USER], stop=(stop,))
    assert answer.text == SPLIT_ANSWER[: SPLIT_ANSWER.index(stop)]
    assert (answer.done.finish, answer.done.stop_sequence) == ("stop", stop)


def test_a_stop_string_that_only_begins_is_given_out_at_the_end(engine):
    answer = ask(engine, [USER], stop=("Paris. And", "sunny day"))
    assert answer.text == SPLIT_ANSWER and answer.done.stop_sequence is None


def test_plain_text_keeps_its_markers(engine):
    prompt = engine.chat([USER], tools=[TOOL])
    asked = Request(prompt=prompt, sampling=GREEDY, max_tokens=32, plain=True)
    answer = Answer(list(engine.ask(asked)))
    assert answer.text.startswith(f"<think>{THOUGHT}</think><tool_call>") and not answer.reasoning


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
@settings(deadline=None)
def test_stop_strings_in_pieces_are_those_of_the_whole(text: str, stops: list[str], data: st.DataObject) -> None:
    pieces, at = [], 0
    while at < len(text):
        n = data.draw(st.integers(1, 5))
        pieces.append(text[at : at + n])
        at += n
    finder, given_out = StopStrings(tuple(stops)), ""
    for piece in pieces:
        given_out += finder.feed(piece)
        if finder.found:
            break
    if finder.found is None:
        given_out += finder.flush()
    ends = [text.index(s) + len(s) for s in stops if s in text]
    if not ends:
        assert (given_out, finder.found) == (text, None)
    else:
        assert finder.found is not None and text.startswith(given_out + finder.found)
        assert not any(s in given_out for s in stops)


class Letters:
    """A tokenizer of single bytes, so that a character may take several tokens."""

    eos_token_ids = (300,)
    has_thinking = has_tool_calling = False
    structural_markers: tuple[str, ...] = ()
    response_transitions: dict[str, Any] = {}  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    @property
    def detokenizer(self) -> Any:
        from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

        source = SimpleNamespace(
            decode=lambda ids: bytes(ids).decode("utf-8", "replace"), encode=self.encode, eos_token_id=300
        )
        return NaiveStreamingDetokenizer(source)


@pytest.mark.parametrize("text", [" leading space", "naïve café", "🙂🙃 ok", "\n\nlines\n", "日本語"])
def test_text_comes_whole_and_in_whole_characters(text: str) -> None:
    reader = Reader(Letters(), Request(prompt=Prompt(np.array([1], np.int32)), plain=True))
    events: list[Any] = []
    for token in text.encode():
        found, ended = reader.read(token)
        assert not ended
        events += found
    events += reader.close()
    assert "".join(e.text for e in events) == text
    assert all("\ufffd" not in e.text for e in events)


def test_the_kinds_of_events() -> None:
    assert Text("a") != Reasoning("a")
    assert ToolCall("1", "f", "{}").arguments == "{}"
