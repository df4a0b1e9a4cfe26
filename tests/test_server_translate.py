"""What clients send, as the chat template gets it: OpenAI's messages and tools, Anthropic's, options, bad bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onefold.engine.request import Sampling
from onefold.errors import BadRequest
from onefold.server.anthropic import translate as from_anthropic
from onefold.server.anthropic.schemas import Conversation, MessagesRequest
from onefold.server.body import parse
from onefold.server.openai import translate as from_openai
from onefold.server.openai.schemas import ChatRequest, CompletionRequest
from onefold.server.options import MOST_TOKENS, SamplingFields, most_tokens, stop_strings

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"messages": [USER], **fields}).encode(), ChatRequest)


def talk(**fields: Any) -> MessagesRequest:
    return parse(json.dumps({"messages": [USER], "max_tokens": 5, **fields}).encode(), MessagesRequest)


def openai_messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return from_openai.messages(chat(messages=list(given)).messages)


def anthropic_messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return from_anthropic.messages(talk(messages=list(given), **fields))


def openai_tools(asked: ChatRequest) -> list[dict[str, Any]] | None:
    return from_openai.offer(asked).tools


def anthropic_tools(asked: Conversation) -> list[dict[str, Any]] | None:
    return from_anthropic.offer(asked).tools


def refusal(make: Any, *args: Any, **fields: Any) -> tuple[str, str]:
    with pytest.raises(BadRequest) as caught:
        make(*args, **fields)
    return caught.value.where, str(caught.value)


# -- OpenAI ----------------------------------------------------------------------------------------


def test_plain_messages_pass_as_they_are():
    given = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": " yes\n"}, USER]
    assert openai_messages(*given) == given


def test_parts_are_lines_and_a_developer_is_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    made = openai_messages({"role": "developer", "content": parts}, USER)
    assert made == [{"role": "system", "content": "a\nb"}, USER]


def test_a_billing_header_is_dropped_from_a_system_message_only():
    text = "x-anthropic-billing-header: cch=1;\nBe brief."
    made = openai_messages({"role": "system", "content": text}, {"role": "user", "content": text})
    assert [m["content"] for m in made] == ["Be brief.", text]


def test_calls_and_results():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"b": 1, "a": [2]}'}}
    made = openai_messages(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "tool", "tool_call_id": "other", "content": None, "name": "given"},
    )
    function = {"name": "look", "arguments": {"b": 1, "a": [2]}}
    assert made[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    assert made[2] == {"role": "tool", "content": "found", "tool_call_id": "c1", "name": "look"}
    assert made[3] == {"role": "tool", "content": "", "tool_call_id": "other", "name": "given"}


@pytest.mark.parametrize(
    "given, made",
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("{bad", "{bad"), ("[1]", "[1]"), ("5", "5")],
)
def test_arguments_become_an_object_if_they_are_one(given, made):
    call = {"id": "c", "function": {"name": "f", "arguments": given}}
    (message,) = openai_messages({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == made


def test_reasoning_goes_back_by_either_name():
    for name in ("reasoning_content", "reasoning"):
        (message,) = openai_messages({"role": "assistant", "content": "x", name: "because"})
        assert message["reasoning_content"] == "because"


def test_tools_and_their_choice():
    tools = [{"function": {"parameters": {"type": "object"}, "name": "f", "strict": True}, "type": "function"}]
    made = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for choice in (None, "auto", "required", {"type": "function", "function": {"name": "f"}}):
        assert openai_tools(chat(tools=tools, tool_choice=choice)) == made
    assert openai_tools(chat(tools=tools, tool_choice="none")) is None
    assert openai_tools(chat(tools=[])) is None
    other = chat(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert refusal(from_openai.offer, other)[0] == "tool_choice"


def test_a_custom_tool_is_a_function_of_one_text():
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: WORD"}}
    custom = {"name": "patch", "description": "Edits a file.", "format": grammar}
    (made,) = openai_tools(chat(tools=[{"type": "custom", "custom": custom}])) or []
    function = made["function"]
    assert made["type"] == "function" and (function["name"], function["description"]) == ("patch", "Edits a file.")
    assert function["parameters"]["required"] == ["input"]
    assert "start: WORD" in function["parameters"]["properties"]["input"]["description"]
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    said, result = openai_messages(
        {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "done"}
    )
    assert said["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "*** Begin"}}
    assert result["name"] == "patch"


def test_functions_and_their_results_are_tools_and_theirs():
    function = {"name": "f", "parameters": {"type": "object"}}
    as_tools = openai_tools(chat(tools=[{"type": "function", "function": function}]))
    for choice in (None, "auto", {"name": "f"}):
        assert openai_tools(chat(functions=[function], function_call=choice)) == as_tools
    assert openai_tools(chat(functions=[function], function_call="none")) is None
    wrong = chat(functions=[function], function_call={"name": "g"})
    assert refusal(from_openai.offer, wrong)[0] == "function_call"
    call, result = openai_messages(
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "r"},
    )
    assert call["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert result == {"role": "tool", "name": "f", "content": "r"}
    assert refusal(openai_messages, {"role": "function", "content": "r"})[0] == "messages.0.name"


def test_allowed_tools_are_the_only_ones_that_are_offered():
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]

    def allowed(*names: str) -> dict[str, Any]:
        chosen = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": chosen}}

    made = openai_tools(chat(tools=tools, tool_choice=allowed("c", "a"))) or []
    assert [tool["function"]["name"] for tool in made] == ["a", "c"]
    assert refusal(from_openai.offer, chat(tools=tools, tool_choice=allowed("d")))[0] == "tool_choice"
    half = chat(tools=tools, tool_choice={"type": "custom"})
    assert refusal(from_openai.offer, half)[0] == "tool_choice.custom"


def test_a_refusal_that_was_said_is_part_of_the_conversation():
    (made,) = openai_messages({"role": "assistant", "content": None, "refusal": "I will not."})
    assert made == {"role": "assistant", "content": "I will not."}


def test_template_options():
    assert from_openai.template_options(chat()) == {}
    assert from_openai.template_options(chat(reasoning_effort="high")) == {"reasoning_effort": "high"}
    off = from_openai.template_options(chat(reasoning_effort="none"))
    assert off == {"reasoning_effort": "none", "enable_thinking": False}
    asked = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "x": [1]})
    assert from_openai.template_options(asked) == {"reasoning_effort": "none", "enable_thinking": True, "x": [1]}
    for name in ("chat_template", "tokenize", "tools", "add_generation_prompt"):
        where, _ = refusal(from_openai.template_options, chat(chat_template_kwargs={name: 1}))
        assert where == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    "message, where, said",
    [
        ({"role": "user", "content": None}, "messages.0.content", "needs content"),
        ({"role": "user"}, "messages.0.content", "needs content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text", "required"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content.0.type", "text only"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages.0.content.0.type", "text only"),
        ({"role": "king", "content": "x"}, "messages.0.role", "'assistant'"),
        ({"content": "x"}, "messages.0.role", "required"),
        ({"role": "user", "content": 5}, "messages.0.content", "a valid string or a valid list"),
        ({"role": "user", "content": [5]}, "messages.0.content.0", "an object"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages.0.tool_calls.0.function.name", "required"),
    ],
)
def test_a_bad_message_is_named(message, where, said):
    at, text = refusal(openai_messages, message)
    assert at == where and said in text


# -- Anthropic -------------------------------------------------------------------------------------


def test_system_as_text_or_as_blocks():
    expected = [{"role": "system", "content": "Be brief.\nBe kind."}, USER]
    assert anthropic_messages(USER, system="Be brief.\nBe kind.") == expected
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"},
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
    ]
    assert anthropic_messages(USER, system=blocks) == expected
    assert anthropic_messages(USER, system=blocks[:1]) == [USER]
    assert anthropic_messages(USER, system=[]) == anthropic_messages(USER) == [USER]


def test_thinking_calls_and_results():
    made = anthropic_messages(
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "xxxx"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"b": 1, "a": 2}},
                {"type": "tool_use", "id": "t2", "name": "see", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "found"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "x"}] * 2},
                {"type": "text", "text": "Go on."},
                {"type": "text", "text": "Please.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    )
    assert made == [
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"b": 1, "a": 2}}},
                {"id": "t2", "type": "function", "function": {"name": "see", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "found", "name": "look"},
        {"role": "tool", "tool_call_id": "t2", "content": "x\nx", "name": "see"},
        {"role": "user", "content": "Go on.\nPlease."},
    ]


def test_a_system_message_is_shown_for_as_long_as_it_says():
    note = {"role": "system", "content": "Now."}
    for clear_at in (None, "never"):
        assert anthropic_messages(USER, {**note, "clear_at": clear_at}, USER) == [USER, note, USER]
    brief = {**note, "clear_at": "next_user_message"}
    assert anthropic_messages(USER, brief, USER) == [USER, USER]
    assert anthropic_messages(USER, brief) == [USER, note]
    assert anthropic_messages(USER, {"role": "system", "output_config": {"effort": "low"}}) == [USER]
    assert refusal(anthropic_messages, {"role": "user"})[0] == "messages.0.content"


def test_a_result_without_words_and_one_that_failed():
    def result(**fields: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": "t", **fields}
        return anthropic_messages({"role": "user", "content": [block]})[0]["content"]

    assert result() == "" and result(content=[]) == ""
    assert result(is_error=True) == "error" and result(is_error=True, content="no file") == "no file"


def test_the_two_apis_say_the_same():
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    openai = openai_messages(
        {"role": "system", "content": "S"},
        USER,
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "r"},
    )
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}}
    anthropic = anthropic_messages(
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
        system="S",
    )
    assert openai == anthropic
    schema = {"type": "object", "properties": {"x": {"type": "number"}}}
    function = {"name": "f", "description": "d", "parameters": schema}
    mine = anthropic_tools(talk(tools=[{"name": "f", "description": "d", "input_schema": schema}]))
    theirs = openai_tools(chat(tools=[{"type": "function", "function": function}]))
    assert json.dumps(mine) == json.dumps(theirs)


def test_choice_of_tools_and_tools_of_their_servers():
    tool = {"name": "f", "input_schema": {"type": "object"}, "type": "custom"}
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}):
        assert anthropic_tools(talk(tools=[tool], tool_choice=choice)) is not None
    assert anthropic_tools(talk(tools=[tool], tool_choice={"type": "none"})) is None
    wrong = talk(tools=[tool], tool_choice={"type": "tool", "name": "g"})
    assert refusal(from_anthropic.offer, wrong)[0] == "tool_choice.name"
    where, said = refusal(talk, tools=[tool, {"type": "web_search_20250305", "name": "web_search"}])
    assert where == "tools.1.type" and "'web_search_20250305'" in said
    assert refusal(from_anthropic.offer, talk(tools=[{"name": "f"}]))[0] == "tools.0.input_schema"


def test_thinking_is_off_unless_asked_for():
    def thinks(**fields: Any) -> Any:
        return from_anthropic.template_options(talk(**fields))["enable_thinking"]

    assert thinks() is False and thinks(thinking={"type": "disabled"}) is False
    assert thinks(thinking={"type": "enabled", "budget_tokens": 1024}) is True
    assert thinks(thinking={"type": "adaptive"}) is True
    assert thinks(chat_template_kwargs={"enable_thinking": True}) is True


@pytest.mark.parametrize(
    "block, where, said",
    [
        ({"type": "image", "source": {}}, "messages.0.content.0.type", "text only"),
        ({"type": "document", "source": {}}, "messages.0.content.0.type", "text only"),
        ({"type": "text"}, "messages.0.content.0.text", "required"),
        ({"type": "tool_result", "content": "x"}, "messages.0.content.0.tool_use_id", "required"),
        (
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]},
            "messages.0.content.0.content.0.type",
            "text only",
        ),
        ({}, "messages.0.content.0.type", "required"),
    ],
)
def test_a_bad_block_is_named(block, where, said):
    at, text = refusal(anthropic_messages, {"role": "user", "content": [block]})
    assert at == where and said in text


# -- options ---------------------------------------------------------------------------------------


def test_sampling_is_what_is_said_and_otherwise_the_default():
    defaults = Sampling(temperature=0.6, top_p=0.9, top_k=20, seed=None)
    assert SamplingFields().sampling(defaults) == defaults
    asked = SamplingFields(temperature=0.0, min_p=0.1, seed=-1, logit_bias={"5": -100.0}, top_k=-1)
    made = asked.sampling(defaults)
    assert (made.temperature, made.top_p, made.min_p, made.top_k) == (0.0, 0.9, 0.1, 0)
    assert made.seed == 2**63 - 1 and made.logit_bias == {5: -100.0}
    narrow = SamplingFields(top_p=0.0).sampling(defaults)
    assert (narrow.temperature, narrow.top_p) == (0.0, 1.0)
    for name in ("-1", "a", "1.5", "", "9" * 30, "²"):
        assert refusal(SamplingFields(logit_bias={name: 1.0}).sampling, defaults)[0] == "logit_bias"


def test_stop_strings():
    assert stop_strings(None, "stop") == stop_strings([], "stop") == stop_strings("", "stop") == ()
    assert stop_strings("a", "stop") == ("a",)
    assert stop_strings(["b", "a", "", "b"], "stop") == ("b", "a")
    assert refusal(stop_strings, ["x"] * 17, "stop_sequences")[0] == "stop_sequences"


def test_max_tokens():
    assert most_tokens(None, None) is None
    assert most_tokens(None, 7) == 7 and most_tokens(3, 7) == 3
    assert most_tokens(10**40) == MOST_TOKENS


@pytest.mark.parametrize(
    "fields, where",
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop.0"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"1": 200}}, "logit_bias.1"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.custom.name"),
        ({"tools": [{"type": "magic"}]}, "tools.0.type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_a_bad_option_is_named(fields, where):
    at, said = refusal(chat, **fields)
    assert at == where
    assert said.endswith(".") and said[0].isupper()


@pytest.mark.parametrize(
    "body, said",
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object, not a list"),
        (b"null", "not null"),
        (b"1", "not a number"),
        (b'{"messages": NaN}', "not valid JSON"),
        (b'{"messages": Infinity}', "not valid JSON"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\\udc00 "}', "surrogate"),
        (b'{"a": ' + b"[" * 100_000, "200 levels"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object(body, said):
    for schema in (ChatRequest, CompletionRequest, MessagesRequest, Conversation):
        where, text = refusal(parse, body, schema)
        assert where == "" and said in text


def test_fields_that_are_not_known_pass_and_are_only_named_in_the_log(caplog):
    with caplog.at_level("DEBUG", "onefold.server"):
        chat(user="me", metadata={"a": 1}, store=True, made_up="secret")
    assert "made_up" in caplog.text and "secret" not in caplog.text
