"""An answer's events in the words of each API, streamed and whole, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onefold.engine.request import Done, Event, Hit, Logprob, Progress, Reasoning, Started, Text, ToolCall
from onefold.errors import BudgetError, Busy, DeviceError, EngineStopped, PromptError, TooLong, UnknownModel
from onefold.server.anthropic.errors import shape as anthropic_shape
from onefold.server.anthropic.messages import MessageWriter
from onefold.server.errors import problem_of
from onefold.server.openai.chat import ChatWriter
from onefold.server.openai.completions import CompletionWriter
from onefold.server.openai.errors import shape as openai_shape
from onefold.server.outcome import Outcome, Tally
from onefold.server.record import Record, header_text
from onefold.server.registry import spoken
from onefold.server.reply import Writer

HIT = Hit(prompt_tokens=10, matched=7, cached=6)
CALL = ToolCall("call_1", "look", '{"x": "ü"}')
EVENTS: list[Event] = [
    Started(HIT),
    Progress(8, 10),
    Reasoning("hm"),
    Reasoning("!"),
    Text("I "),
    Text("look"),
    CALL,
    ToolCall("call_2", "see", ""),
    Done("tool_calls", 9, HIT, reasoning_tokens=2),
]


def streamed(writer: Writer, *events: tuple[int, Event]) -> list[tuple[str, Any]]:
    """(name, data) of each event of the stream."""
    said = b"".join(writer.feed(choice, event) for choice, event in events) + writer.end()
    found = []
    for block in said.decode().split("\n\n"):
        if block:
            *name, data = block.split("\n")
            text = data.removeprefix("data: ")
            said_as = name[0].removeprefix("event: ") if name else ""
            found.append((said_as, text if text == "[DONE]" else json.loads(text)))
    return found


def whole(writer: Writer, *choices: list[Event]) -> dict[str, Any]:
    tally, outcomes = Tally(len(choices)), []
    for i, events in enumerate(choices):
        outcomes.append(Outcome())
        for event in events:
            outcomes[i].add(event)
            tally.add(i, event)
    return writer.whole(outcomes, tally.usage)


def of_choice_0(events: list[Event]) -> list[tuple[int, Event]]:
    return [(0, event) for event in events]


# -- OpenAI, chat ----------------------------------------------------------------------------------


def test_a_streamed_chat_is_as_openai_sends_it():
    found = streamed(ChatWriter("m", include_usage=True), *of_choice_0(EVENTS))
    assert {name for name, _ in found} == {""}
    *chunks, last, done = [data for _, data in found]
    assert done == "[DONE]"
    assert len({c["id"] for c in [*chunks, last]}) == 1
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and chunk["model"] == "m" and chunk["usage"] is None
        assert set(chunk) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    deltas = [c["choices"][0]["delta"] for c in chunks]

    def called(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": ""}}

    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"reasoning_content": "hm"},
        {"reasoning_content": "!"},
        {"content": "I "},
        {"content": "look"},
        {"tool_calls": [{"index": 0, "id": "call_1", **called("look")}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": "ü"}'}}]},
        {"tool_calls": [{"index": 1, "id": "call_2", **called("see")}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": ""}}]},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 9 + ["tool_calls"]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 9,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_a_stream_has_usage_only_if_it_was_asked_for():
    found = [data for _, data in streamed(ChatWriter("m"), *of_choice_0(EVENTS))]
    assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any("usage" in chunk for chunk in found[:-1])


def test_a_whole_chat():
    made = whole(ChatWriter("m"), EVENTS)
    assert made["object"] == "chat.completion"
    (choice,) = made["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["logprobs"] is None
    message = choice["message"]
    assert message["content"] == "I look" and message["reasoning_content"] == "hm!"
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"x": "ü"}'}
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


def test_content_is_null_with_calls_alone_and_empty_text_otherwise():
    only_call = whole(ChatWriter("m"), [Started(HIT), CALL, Done("tool_calls", 1, HIT)])
    assert only_call["choices"][0]["message"]["content"] is None
    nothing = whole(ChatWriter("m"), [Started(HIT), Done("stop", 1, HIT)])
    assert nothing["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_several_choices_share_their_prompt():
    first = [Started(HIT), Text("a"), Done("stop", 1, HIT)]
    second = [Started(Hit(10, 10, 9)), Text("b"), Done("length", 3, HIT)]
    made = whole(ChatWriter("m", choices=2), first, second)
    assert [c["message"]["content"] for c in made["choices"]] == ["a", "b"]
    assert [c["index"] for c in made["choices"]] == [0, 1]
    assert made["usage"]["prompt_tokens"] == 10 and made["usage"]["completion_tokens"] == 4
    assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    found = streamed(ChatWriter("m", choices=2), (0, first[0]), (1, second[0]), (1, second[1]), (1, CALL), (0, CALL))
    indices = [data["choices"][0]["index"] for _, data in found[:-1]]
    assert indices == [0, 1, 1, 1, 1, 0, 0]
    assert all(d["choices"][0]["delta"].get("tool_calls", [{"index": 0}])[0]["index"] == 0 for _, d in found[:-1])


def test_logprobs_of_a_chat():
    lp = Logprob(5, "é", -0.5, ((5, "é", -0.5), (6, "x", float("-inf"))))
    events = [Started(HIT), Text("é", (lp,)), Done("stop", 1, HIT)]
    content = [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                {"token": "x", "logprob": -9999.0, "bytes": [120]},
            ],
        }
    ]
    made = whole(ChatWriter("m", logprobs=True), events)
    assert made["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    found = streamed(ChatWriter("m", logprobs=True), *of_choice_0(events))
    assert found[1][1]["choices"][0]["logprobs"] == {"content": content, "refusal": None}


# -- OpenAI, completions ---------------------------------------------------------------------------


def test_completions_echo_and_offsets():
    lp = [Logprob(1, "ab", -0.1, ((1, "ab", -0.1),)), Logprob(2, "c", -0.2)]
    events = [Started(HIT), Text("ab", (lp[0],)), Text("c", (lp[1],)), Done("length", 2, HIT)]
    made = whole(CompletionWriter("m", ["so: "]), events)
    assert made["object"] == "text_completion" and made["choices"][0]["text"] == "so: abc"
    logprobs = {"tokens": ["ab", "c"], "token_logprobs": [-0.1, -0.2], "text_offset": [0, 2]}
    made = whole(CompletionWriter("m", [""], logprobs=True), events)
    assert made["choices"][0]["logprobs"] == {**logprobs, "top_logprobs": [{"ab": -0.1}, {}]}
    found = [d for _, d in streamed(CompletionWriter("m", ["so: "], include_usage=True), *of_choice_0(events))]
    assert [c["choices"][0]["text"] for c in found[:-2]] == ["so: ", "ab", "c", ""]
    assert found[-3]["choices"][0]["finish_reason"] == "length"
    assert found[-2]["choices"] == [] and found[-2]["usage"]["total_tokens"] == 12
    offsets = [d for _, d in streamed(CompletionWriter("m", [""], logprobs=True), *of_choice_0(events))][:2]
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in offsets] == [[0], [2]]


# -- Anthropic -------------------------------------------------------------------------------------


def test_a_streamed_message_is_as_anthropic_sends_it():
    found = streamed(MessageWriter("m"), *of_choice_0(EVENTS))
    assert all(name == data["type"] for name, data in found)
    assert [name for name, _ in found] == [
        "message_start",
        "ping",
        *("content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_delta", "content_block_stop"),  # the signature
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    message = found[0][1]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    usage = {"input_tokens": 4, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 0}
    assert message["usage"] == {**usage, "output_tokens": 0}
    begun = [d["content_block"] for name, d in found if name == "content_block_start"]
    assert begun == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {}},
        {"type": "tool_use", "id": "call_2", "name": "see", "input": {}},
    ]
    deltas = [d["delta"] for name, d in found if name == "content_block_delta"]
    assert [d["type"] for d in deltas] == [
        *("thinking_delta", "thinking_delta", "signature_delta"),
        *("text_delta", "text_delta", "input_json_delta", "input_json_delta"),
    ]
    assert deltas[-2]["partial_json"] == '{"x": "ü"}' and deltas[-1]["partial_json"] == "{}"
    indices = [d["index"] for name, d in found if name.startswith("content_block")]
    assert indices == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert found[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2][1]["usage"] == {**usage, "output_tokens": 9}


def test_a_whole_message():
    made = whole(MessageWriter("m"), EVENTS)
    assert made["type"] == "message" and made["role"] == "assistant" and made["stop_reason"] == "tool_use"
    assert made["content"] == [
        {"type": "thinking", "thinking": "hm!", "signature": "onefold"},
        {"type": "text", "text": "I look"},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"x": "ü"}},
        {"type": "tool_use", "id": "call_2", "name": "see", "input": {}},
    ]
    assert made["usage"]["input_tokens"] + made["usage"]["cache_read_input_tokens"] == HIT.prompt_tokens


@pytest.mark.parametrize(
    "done, reason",
    [
        (Done("stop", 1, HIT), "end_turn"),
        (Done("stop", 1, HIT, stop_sequence="END"), "stop_sequence"),
        (Done("length", 1, HIT), "max_tokens"),
        (Done("tool_calls", 1, HIT), "tool_use"),
    ],
)
def test_stop_reasons(done, reason):
    made = whole(MessageWriter("m"), [Started(HIT), Text("x"), done])
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, done.stop_sequence)


def test_arguments_that_are_no_object_are_still_json_to_an_anthropic_client():
    found = streamed(MessageWriter("m"), (0, Started(HIT)), (0, ToolCall("c", "f", "[1]")))
    (delta,) = [d["delta"] for name, d in found if name == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == {"arguments": "[1]"}


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, status, code, kind",
    [
        (PromptError("no", where="messages.0"), 400, None, "invalid_request_error"),
        (TooLong("long", tokens=9, most=5), 400, "context_length_exceeded", "invalid_request_error"),
        (UnknownModel("other"), 404, "model_not_found", "not_found_error"),
        (Busy("later", retry_after=7), 503, "overloaded", "overloaded_error"),
        (EngineStopped("gone"), 503, "engine_stopped", "overloaded_error"),
        (BudgetError("full", needed_bytes=2, available_bytes=1), 503, "out_of_memory", "overloaded_error"),
        (DeviceError("a secret"), 500, "internal_error", "api_error"),
    ],
)
def test_errors_have_each_apis_shape(error, status, code, kind):
    problem = problem_of(error)
    assert problem.status == status
    openai, anthropic = openai_shape(problem)["error"], anthropic_shape(problem)["error"]
    assert openai["code"] == code and openai["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert anthropic["type"] == kind
    assert "secret" not in openai["message"] + anthropic["message"]


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_look_for():
    problem = problem_of(TooLong("there is room for 5", tokens=9, most=5))
    assert "maximum context length is 5 tokens" in openai_shape(problem)["error"]["message"]
    assert anthropic_shape(problem)["error"]["message"] == "prompt is too long: 9 tokens > 5 maximum"


@pytest.mark.parametrize(
    "path, sent, name",
    [
        ("/v1/messages", set(), "anthropic"),
        ("/v1/messages/count_tokens", set(), "anthropic"),
        ("/v1/models", {b"anthropic-version"}, "anthropic"),
        ("/v1/models", {b"host"}, "openai"),
        ("/v1/chat/completions", {b"anthropic-version"}, "openai"),
        ("/nothing", set(), "openai"),
    ],
)
def test_which_api_a_client_speaks(path, sent, name):
    assert spoken(path, sent).name == name


# -- the record ------------------------------------------------------------------------------------


def test_the_record_of_an_answer():
    clock = iter([0.0, 1.0, 1.5, 2.0, 9.0])
    record = Record("POST", "/v1/messages", now=lambda: next(clock))
    hit = Hit(10, 7, 6, "short", "token 7: known 'x', now 'é\n'")
    gaps = [record.note(0, e) for e in (Started(hit), Progress(1, 2), Text("a"), Text("b"), Text("c"))]
    assert gaps == [None, None, None, 0.5, 0.5]
    record.note(0, Done("stop", 3, hit))
    assert record.time_to_first_token == 1.0 and record.tokens_per_second == 2.0
    headers = record.headers()
    assert headers["x-onefold-prompt-tokens"] == "10" and headers["x-onefold-matched-tokens"] == "7"
    assert headers["x-onefold-cached-tokens"] == "6" and headers["x-onefold-reason"] == "short"
    assert headers["x-onefold-diverged"] == "token 7: known 'x', now '%C3%A9%0A'"
    line = record.line()
    for part in ("prompt=10 matched=7 cached=6", "generated=3 finish=stop", "first_token=1.000s", 'reason="short"'):
        assert part in line
    assert "diverged=\"token 7: known 'x', now '%C3%A9%0A'\"" in line


@pytest.mark.parametrize("text", ["", "a b", "100%", "\r\nx: y", "日本", "\ud800", "x" * 5000])
def test_headers_are_printable_ascii(text):
    made = header_text(text)
    assert made.isascii() and (made.isprintable() or not made) and len(made) < 2000
