"""OpenAI's Responses API, asked by OpenAI's own client and by hand, on an engine that says what a test wrote down."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from listening import listening
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from scripted_engine import HIT, ScriptedEngine, says

from onefold.engine.request import Done, Failed, Logprob, Progress, Reasoning, Started, Text, ToolCall
from onefold.errors import BadRequest, BudgetError, Busy, DeviceError, EngineStopped, TooLong
from onefold.server.body import parse
from onefold.server.openai import translate as from_chat
from onefold.server.openai.schemas import ChatRequest
from onefold.server.responses import translate
from onefold.server.responses.schemas import InputTokensRequest
from onefold.server.settings import Settings

PATH = "/v1/responses"
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edits."}
TOOLS = [LOOK, PATCH]
EVENTS = [
    Started(HIT),
    0.2,
    Reasoning("hm"),
    Reasoning("!"),
    Text("I "),
    Text("look"),
    ToolCall("call_1", "look", '{"x": "ü"}'),
    ToolCall("call_2", "patch", '{"input": "*** Begin"}'),
    Done("tool_calls", 9, HIT, reasoning_tokens=2),
]
ORDER = [
    *("response.created", "response.in_progress"),
    *("response.output_item.added", "response.content_part.added"),
    *("response.reasoning_text.delta", "response.reasoning_text.delta", "response.reasoning_text.done"),
    *("response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta", "response.output_text.delta", "response.output_text.done"),
    *("response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    *("response.output_item.added", "response.custom_tool_call_input.delta"),
    *("response.custom_tool_call_input.done", "response.output_item.done"),
    "response.completed",
]


@pytest.fixture
def engine(scripted_engine: ScriptedEngine) -> ScriptedEngine:
    return scripted_engine


@pytest.fixture
def http(scripted_server: tuple[str, ScriptedEngine], engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted_server[0], timeout=30) as made:
        yield made


@pytest.fixture
def client(scripted_server: tuple[str, ScriptedEngine], engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted_server[0]}/v1", api_key="any", max_retries=0, timeout=30) as made:
        yield made


def streamed(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The data of each event, whose name is its type."""
    response = http.post(PATH, json={"input": "hi", "stream": True, **fields})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in output]


def told(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages of a conversation."""
    return translate.messages(parse(json.dumps({"input": list(items), **fields}).encode(), InputTokensRequest))


def refusal(*items: Any, **fields: Any) -> tuple[str, str]:
    with pytest.raises(BadRequest) as caught:
        told(*items, **fields)
    return caught.value.where, str(caught.value)


# -- what comes back -------------------------------------------------------------------------------


def test_a_whole_response(client, engine):
    engine.script = lambda request: EVENTS
    made = client.responses.create(
        model="default",
        input="hi",
        instructions="Be brief.",
        tools=TOOLS,
        temperature=0.3,
        max_output_tokens=50,
        metadata={"a": "b"},
        parallel_tool_calls=False,
        reasoning={"effort": "high"},
        store=True,
        user="u",
        extra_body={"client_metadata": {"x": "y"}, "prompt_cache_key": "k"},
    )
    assert made.object == "response" and made.status == "completed" and made.error is None
    assert made.model == engine.model_id and made.instructions == "Be brief." and made.metadata == {"a": "b"}
    assert (made.temperature, made.top_p, made.max_output_tokens, made.tool_choice) == (0.3, 0.95, 50, "auto")
    assert made.parallel_tool_calls is False and made.store is False and made.user == "u"
    assert made.prompt_cache_key == "k" and made.reasoning.effort == "high" and made.text.format.type == "text"
    assert [tool.name for tool in made.tools] == ["look", "patch"] and made.previous_response_id is None
    assert without_ids([item.to_dict() for item in made.output]) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm!"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "status": "completed",
            "call_id": "call_1",
            "name": "look",
            "arguments": '{"x": "ü"}',
        },
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_2",
            "name": "patch",
            "input": "*** Begin",
        },
    ]
    assert made.usage.to_dict() == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 19,
    }
    assert engine.requests[0].max_tokens == 50 and engine.chats[0]["template_options"] == {"reasoning_effort": "high"}


def test_a_stream_has_openais_events_in_their_order(http, engine):
    engine.script = lambda request: EVENTS
    found = streamed(http, tools=TOOLS)
    assert [event["type"] for event in found] == ORDER
    for event in found:
        TypeAdapter(ResponseStreamEvent).validate_python(event)  # has every field that the type requires
    indices = [event["output_index"] for event in found if "output_index" in event]
    assert indices == [0] * 7 + [1] * 7 + [2] * 4 + [3] * 4
    added = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in added] == ["in_progress"] * 4 and done == found[-1]["response"]["output"]
    assert [item["id"] for item in added] == [item["id"] for item in done] and len({i["id"] for i in done}) == 4
    for event in found:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["usage"] is None
    assert len({event["response"]["id"] for event in found if "response" in event}) == 1


def test_the_clients_own_helper_assembles_the_same_response(client, engine):
    engine.script = lambda request: EVENTS
    asked: Any = {"model": "default", "input": "hi", "tools": TOOLS, "instructions": "x"}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds == ORDER
    plain, assembled = whole.to_dict(), final.to_dict()
    for made in (plain, assembled):
        made["output"] = without_ids(json.loads(json.dumps(made["output"], default=str)))
    for item in assembled["output"]:  # what the client parsed on top
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    assert {**assembled, "id": "", "created_at": 0, "completed_at": 0} == {
        **plain,
        "id": "",
        "created_at": 0,
        "completed_at": 0,
    }


def test_text_between_calls_is_a_message_of_its_own(http, engine):
    call = ToolCall("c", "look", "{}")
    engine.script = lambda request: [Started(HIT), Text("a"), call, Text(""), Text("b"), Done("stop", 3, HIT)]
    whole = http.post(PATH, json={"input": "hi", "tools": TOOLS}).json()["output"]
    assert [item["type"] for item in whole] == ["message", "function_call", "message"]
    assert without_ids(streamed(http, tools=TOOLS)[-1]["response"]["output"]) == without_ids(whole)


@pytest.mark.parametrize("last", [Text("cut"), Reasoning("cut")])
def test_an_answer_that_was_cut_off_is_incomplete(http, engine, last):
    engine.script = lambda request: [Started(HIT), last, Done("length", 1, HIT)]
    whole = http.post(PATH, json={"input": "hi", "max_output_tokens": 1}).json()
    end = streamed(http, max_output_tokens=1)[-1]
    assert end["type"] == "response.incomplete"
    for made in (whole, end["response"]):
        assert made["status"] == "incomplete" and made["incomplete_details"] == {"reason": "max_output_tokens"}
        assert made["completed_at"] is None and made["usage"]["output_tokens"] == 1
        assert [item["status"] for item in made["output"]] == ["incomplete"]


def test_logprobs_if_they_are_asked_for(http, engine):
    lp = Logprob(5, "é", -0.5, ((5, "é", -0.5), (6, "x", float("-inf"))))
    engine.script = lambda request: [Started(HIT), Text("é", (lp,)), Text("x", (lp,)), Done("stop", 2, HIT)]
    shown = {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "x", "logprob": -9999.0, "bytes": [120]},
        ],
    }
    asked = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2}
    found = streamed(http, **asked)
    assert engine.requests[-1].top_logprobs == 2 and found[-1]["response"]["top_logprobs"] == 2
    assert [e["logprobs"] for e in found if e["type"] == "response.output_text.delta"] == [[shown], [shown]]
    whole = http.post(PATH, json={"input": "hi", **asked}).json()
    for made in (whole, found[-1]["response"]):
        assert made["output"][0]["content"][0]["logprobs"] == [shown, shown]
    http.post(PATH, json={"input": "hi", "include": ["message.output_text.logprobs"]})
    assert engine.requests[-1].top_logprobs == 0
    plain = http.post(PATH, json={"input": "hi"}).json()
    assert engine.requests[-1].top_logprobs is None and plain["output"][0]["content"][0]["logprobs"] == []


def test_what_codex_asks_first_of_a_local_server(http, engine):
    assert http.post(PATH, json={"input": "", "max_output_tokens": 1}).status_code == 200
    assert engine.chats[-1]["messages"] == [{"role": "user", "content": ""}]


def test_a_choice_and_a_format_are_given_back(http):
    wanted = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    made = http.post(
        PATH,
        json={
            "input": "hi",
            "tools": [LOOK],
            "tool_choice": {"type": "function", "name": "look"},
            "text": {"format": wanted, "verbosity": "low"},
            "truncation": "auto",
        },
    ).json()
    assert made["tool_choice"] == {"type": "function", "name": "look"} and made["truncation"] == "auto"
    assert made["text"] == {"format": wanted, "verbosity": "low"}


class Weather(BaseModel):
    city: str
    days: int


def test_the_clients_own_helper_asks_for_a_format_and_parses_it(client, engine):
    engine.script = lambda request: says('{"city": "Paris",', ' "days": 3}')
    made = client.responses.parse(model="default", input="hi", text_format=Weather)
    assert made.output_parsed == Weather(city="Paris", days=3)
    with client.responses.stream(model="default", input="hi", text_format=Weather) as stream:
        assert stream.get_final_response().output_parsed == Weather(city="Paris", days=3)
    for request in engine.requests:
        shape = request.constraint.shape
        assert shape.kind == "json_schema" and set(json.loads(shape.text)["properties"]) == {"city", "days"}


def test_tools_that_only_openai_can_run_are_left_out_and_named_once(http, engine, caplog):
    hosted = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}, {"type": "x" * 500}]
    with caplog.at_level(logging.INFO, "onefold.server"):
        for _ in range(2):
            made = http.post(PATH, json={"input": "hi", "tools": [*hosted, LOOK]})
            assert made.status_code == 200 and [tool["name"] for tool in made.json()["tools"]] == ["look"]
    assert [tool["function"]["name"] for tool in engine.chats[-1]["tools"]] == ["look"]
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 3 and "'web_search'" in said[0] and "'namespace'" in said[1] and len(said[2]) < 150


# -- streams that wait and fail --------------------------------------------------------------------


def test_a_silent_stream_says_that_it_is_in_progress(engine):
    go_on = threading.Event()

    def script(request: Any) -> Any:
        yield Started(HIT)
        while not go_on.is_set():
            yield Progress(1, 2)
            yield 0.02
        yield from (Text("at last"), Done("stop", 1, HIT))

    engine.script = script
    asked = {"input": "hi", "stream": True}
    with (
        listening(engine, Settings(keep_alive_seconds=0.05)) as url,
        httpx.stream("POST", url + PATH, json=asked) as response,
    ):
        seen = ""
        for chunk in response.iter_text():
            seen += chunk
            if seen.count("event: response.in_progress\n") >= 4:
                go_on.set()
    events = [json.loads(line.removeprefix("data: ")) for line in seen.split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed" and ": keep-alive" not in seen


@pytest.mark.parametrize(
    "error, code, said",
    [
        (TooLong("no room", tokens=9, most=5), "context_length_exceeded", "maximum context length is 5 tokens"),
        (Busy("gone", retry_after=7), "rate_limit_exceeded", "gone. Please try again in 7 s."),
        (BudgetError("full", needed_bytes=2, available_bytes=1), "rate_limit_exceeded", "try again in 5 s"),
        (EngineStopped("stopped"), "server_error", "try again in 10 s"),
        (DeviceError("a secret"), "server_error", "The server failed on this request"),
    ],
)
def test_a_failure_ends_the_stream_with_a_code(http, engine, error, code, said):
    engine.script = lambda request: [Started(HIT), Reasoning("hm"), Text("he"), 0.3, Failed(error)]
    found = streamed(http)
    assert found[-1]["type"] == "response.failed" and found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"]["code"] == code and said in found[-1]["response"]["error"]["message"]
    assert [item["type"] for item in found[-1]["response"]["output"]] == ["reasoning"]
    assert "secret" not in json.dumps(found)


def test_the_client_hears_of_a_stream_that_failed(client, engine):
    engine.script = lambda request: [Started(HIT), Text("he"), 0.3, Failed(Busy("gone", retry_after=1))]
    *_, last = client.responses.create(model="default", input="hi", stream=True)
    assert last.type == "response.failed" and last.response.error.code == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_start_are_http_errors_of_openais_shape(client, engine, stream):
    asked: Any = {"model": "default", "input": "hi", "stream": stream}
    engine.refuses = TooLong("no room", tokens=9, most=5)
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(**asked)
    assert long.value.code == "context_length_exceeded" and "maximum context length" in long.value.message
    engine.refuses = Busy("The queue is full.", retry_after=7)
    with pytest.raises(openai.InternalServerError) as busy:
        client.responses.create(**asked)
    assert busy.value.status_code == 503 and "The queue is full. Please try again in 7 s." in busy.value.message
    assert busy.value.response.headers["retry-after"] == "7"


# -- what is kept: nothing -------------------------------------------------------------------------


def test_nothing_is_kept(client, http):
    made = client.responses.create(model="default", input="hi")
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="whole conversation to POST /v1/responses"):
            ask(made.id)
    for fields in (
        {"previous_response_id": made.id},
        {"conversation": "conv_1"},
        {"background": True},
        {"prompt": {"id": "p"}},
    ):
        response = http.post(PATH, json={"input": "hi", **fields})
        assert response.status_code == 400 and response.json()["error"]["param"] in fields
        assert "input" in response.json()["error"]["message"]
    assert http.post(PATH, json={"input": "hi", "background": False, "previous_response_id": None}).status_code == 200


def test_tokens_are_counted(client, engine):
    made = client.responses.input_tokens.count(model="default", input="hi", instructions="x", tools=[LOOK])
    assert made.object == "response.input_tokens" and made.input_tokens == 10
    assert [message["role"] for message in engine.chats[-1]["messages"]] == ["system", "user"]
    assert engine.chats[-1]["tools"] and engine.requests == []


# -- what the model is shown -----------------------------------------------------------------------

HI = {"role": "user", "content": "hi"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
WORDS = {"type": "output_text", "text": "I look", "annotations": []}
SAID = {"type": "message", "role": "assistant", "content": [WORDS]}
CALLED = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x": 1}'}
PATCHED = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"}


def test_pieces_of_an_answer_are_one_turn_as_in_a_chat():
    answers = [
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
    ]
    mine = told(HI, THOUGHT, SAID, CALLED, PATCHED, *answers, instructions="S")
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}},
        {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}},
    ]
    chat = [
        {"role": "system", "content": "S"},
        HI,
        {"role": "assistant", "content": "I look", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
    ]
    theirs = from_chat.messages(parse(json.dumps({"messages": chat}).encode(), ChatRequest).messages)
    assert mine == theirs


def test_what_was_answered_can_be_sent_back_as_it_is(client, engine):
    engine.script = lambda request: EVENTS
    first = client.responses.create(model="default", input="hi", tools=TOOLS)
    engine.script = lambda request: says("done")
    result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "seen"}
    history: Any = [{"role": "user", "content": "hi"}, *first.output, result]
    client.responses.create(model="default", input=history, tools=TOOLS)
    asked, answer, _ = engine.chats[-1]["messages"]
    assert asked == {"role": "user", "content": "hi"}
    assert answer["content"] == "I look" and answer["reasoning_content"] == "hm!"
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "look", "arguments": {"x": "ü"}},
        {"name": "patch", "arguments": {"input": "*** Begin"}},
    ]


def test_turns_are_kept_apart():
    other = {"role": "assistant", "content": "more"}
    made = told(HI, SAID, other, CALLED, HI, THOUGHT, other)
    assert [m["role"] for m in made] == ["user", "assistant", "assistant", "user", "assistant"]
    assert "tool_calls" not in made[1] and made[2]["content"] == "more" and made[2]["tool_calls"]
    assert made[4] == {"role": "assistant", "content": "more", "reasoning_content": "hm"}
    between = told(THOUGHT, SAID, CALLED, {"role": "assistant", "content": "!"}, {**THOUGHT, "content": None}, THOUGHT)
    assert len(between) == 1
    assert between[0]["content"] == "I look!" and between[0]["reasoning_content"] == "hm\nhm"


def test_a_summary_stands_for_reasoning_that_cannot_be_read():
    summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    made = told(HI, {"type": "reasoning", "summary": summary, "encrypted_content": "gAAA"}, SAID)
    assert made[-1]["reasoning_content"] == "a\nb"
    assert told(HI, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}) == [HI]


def test_messages_stay_where_they_are():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    made = told({"role": "user", "content": parts}, refused, developer, {"role": "system", "content": "S"}, HI)
    assert [(m["role"], m["content"]) for m in made] == [
        ("user", "a\nb"),
        ("assistant", "No."),
        ("system", "D"),
        ("system", "S"),
        ("user", "hi"),
    ]
    left = {"role": "system", "content": "<total_tokens>12 tokens left</total_tokens>"}
    assert told(HI, left) == [HI]


def test_a_local_shell_is_a_function():
    action = {"type": "exec", "command": ["ls"], "env": {}, "user": None}
    call = {"type": "local_shell_call", "id": "i", "call_id": "c", "action": action, "status": "completed"}
    for result in (
        {"type": "local_shell_call_output", "id": "i", "output": "a.txt"},
        {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
    ):
        said, answer = told(call, result)
        function = {"name": "local_shell", "arguments": {"command": ["ls"], "env": {}}}
        assert said["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
        assert answer == {"role": "tool", "content": "a.txt", "tool_call_id": "c", "name": "local_shell"}


def test_an_empty_input_is_an_empty_message():
    assert told() == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    "item, where, said",
    [
        ({"type": "item_reference", "id": "msg_1"}, "input.1", "whole conversation in input"),
        ({"id": "msg_1"}, "input.1", "whole conversation in input"),
        ({"type": "web_search_call", "id": "w"}, "input.1.type", "'web_search_call'"),
        ({"type": "x" * 9000}, "input.1.type", "not supported"),
        ({"type": ["message"]}, "input.1.type", "required"),
        ({}, "input.1.type", "required"),
        ("hi", "input.1", "dictionary"),
        ({"role": "tool", "content": "x"}, "input.1.role", "'user'"),
        ({"role": "user"}, "input.1.content", "required"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input.1.content.0.type", "text only"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.1.content.0.text", "required"),
        ({"type": "function_call", "call_id": "c", "arguments": ""}, "input.1.name", "required"),
        ({"type": "function_call_output", "output": "x"}, "input.1.call_id", "required"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
            "input.1.output.0.type",
            "text only",
        ),
        ({"type": "local_shell_call", "action": {}}, "input.1.call_id", "required"),
        ({"type": "local_shell_call_output", "output": ""}, "input.1.call_id", "required"),
    ],
)
def test_a_bad_item_is_named(item, where, said):
    found = refusal(HI, item)
    assert found[0] == where and said in found[1] and len(found[1]) < 200


@pytest.mark.parametrize(
    "fields, where",
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools.0.name"),
        ({"input": "hi", "tools": [{"name": "f"}]}, "tools.0.type"),
        ({"input": "hi", "tools": ["f"]}, "tools.0"),
        ({"input": "hi", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
        ({"input": "hi", "tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools.0.format.syntax"),
        ({"input": "hi", "tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"input": "hi", "tools": [LOOK], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"input": "hi", "tools": [LOOK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"input": "hi", "tools": [LOOK], "tool_choice": {"type": "mcp", "server_label": "s"}}, "tool_choice.type"),
        ({"input": "hi", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "hi", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "hi", "metadata": {"a": 1}}, "metadata.a"),
        ({"input": "hi", "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ],
)
def test_a_bad_field_is_named(http, fields, where):
    response = http.post(PATH, json=fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == where
