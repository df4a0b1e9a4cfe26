"""What requests say that an answer must keep to, as the engine is told: formats, schemas, grammars, calls of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from starlette.testclient import TestClient

from onefold.engine.constraint import Constraint, Shape, ToolRule
from onefold.server.app import make_app
from onefold.server.constraints import MOST_BYTES
from onefold.server.settings import Settings

USER = {"role": "user", "content": "hi"}
CHAT = ("/v1/chat/completions", {"messages": [USER]})
TEXT = ("/v1/completions", {"prompt": "so"})
TALK = ("/v1/messages", {"messages": [USER], "max_tokens": 9})
OBJECT = '{"type":"object"}'
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "ä": {"const": 1}}, "required": ["ä"]}
WRITTEN = '{"type":"object","properties":{"z":{"type":"string"},"ä":{"const":1}},"required":["ä"]}'
RESPONSE = ("/v1/responses", {"input": "hi"})
F = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "s", "parameters": SCHEMA, "strict": True}}
LARK = {"name": "patch", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}}
REGEX = {"name": "digits", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}}
PATCH, DIGITS = {"type": "custom", "custom": LARK}, {"type": "custom", "custom": REGEX}
FREE = {"type": "custom", "custom": {"name": "free", "format": {"type": "text"}}}
MINE = {"name": "f", "input_schema": SCHEMA}

Ask = Callable[..., Constraint | None]
Refuse = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[TestClient]:
    with TestClient(make_app(engine, Settings(allowed_hosts=("*",)))) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture
def ask(client: TestClient, engine: ScriptedEngine) -> Ask:
    """The constraint that the engine gets for a request with these fields."""

    def asked(to: tuple[str, dict[str, Any]], **fields: Any) -> Constraint | None:
        response = client.post(to[0], json={**to[1], **fields})
        assert response.status_code == 200, response.text
        return engine.requests[-1].constraint

    return asked


@pytest.fixture
def refused(client: TestClient) -> Refuse:
    def asked(to: tuple[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
        response = client.post(to[0], json={**to[1], **fields})
        assert response.status_code == 400 and len(response.text) < 500
        return dict(response.json()["error"])

    return asked


def json_schema(**inside: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "strict": True, **inside}}


FORMATS = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Shape("json_schema", OBJECT, "response_format")),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Shape("json_schema", WRITTEN, "response_format.schema"),
    ),
    (
        {"response_format": json_schema(schema=SCHEMA)},
        Shape("json_schema", WRITTEN, "response_format.json_schema.schema"),
    ),
    (
        {"response_format": json_schema(schema=True)},
        Shape("json_schema", "true", "response_format.json_schema.schema"),
    ),
    ({"response_format": json_schema()}, Shape("json_schema", OBJECT, "response_format")),
    ({"structured_outputs": {"json": SCHEMA}}, Shape("json_schema", WRITTEN, "structured_outputs.json")),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Shape("json_schema", WRITTEN, "structured_outputs.json")),
    ({"structured_outputs": {"regex": "a+"}}, Shape("regex", "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["ä", "b"]}}, Shape("choice", '["ä", "b"]', "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": "start: X"}}, Shape("grammar", "start: X", "structured_outputs.grammar")),
    ({"structured_outputs": {"json_object": True}}, Shape("json_schema", OBJECT, "structured_outputs.json_object")),
    ({"guided_json": SCHEMA}, Shape("json_schema", WRITTEN, "guided_json")),
    ({"guided_json": json.dumps(SCHEMA)}, Shape("json_schema", WRITTEN, "guided_json")),
    ({"guided_regex": "a+"}, Shape("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a"]}, Shape("choice", '["a"]', "guided_choice")),
    ({"guided_grammar": "start: X"}, Shape("grammar", "start: X", "guided_grammar")),
    ({"grammar": 'root ::= "x"'}, Shape("grammar", 'root ::= "x"', "grammar")),
    ({"grammar": ""}, None),
    ({"json_schema": SCHEMA}, Shape("json_schema", WRITTEN, "json_schema")),
]


@pytest.mark.parametrize("to", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize("fields, shape", FORMATS)
def test_the_format_of_an_answer(ask, to, fields, shape):
    assert ask(to, **fields) == (Constraint(shape=shape) if shape else None)


@pytest.mark.parametrize(
    "fields, where",
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": json_schema(schema=[])}, "response_format.json_schema.schema"),
        ({"guided_json": "{no"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": " "}, "guided_grammar"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "x" * (MOST_BYTES + 1)}, "guided_regex"),
        ({"grammar": "ä" * (MOST_BYTES // 2 + 1)}, "grammar"),
        ({"json_schema": {"description": "x" * MOST_BYTES}}, "json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "grammar": "start: X"}, "grammar"),
    ],
)
def test_formats_that_cannot_be(refused, fields, where):
    assert refused(CHAT, **fields)["param"] == where
    assert refused(TEXT, **fields)["param"] == where


TOOLS = [F, STRICT, PATCH, DIGITS, FREE]
RULE = {"strict": {"s"}, "grammars": {"patch": 'start: "x"'}, "regexes": {"digits": "[0-9]+"}}
NONE_ALLOWED = {"mode": "required", "tools": []}
ALLOWED = [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "patch"}}]


@pytest.mark.parametrize(
    "fields, rule",
    [
        ({}, RULE),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, RULE),
        ({"parallel_tool_calls": False}, {**RULE, "parallel": False}),
        ({"tool_choice": "required"}, {**RULE, "required": True}),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, {**RULE, "only": "f"}),
        ({"tool_choice": {"type": "custom", "custom": {"name": "patch"}}}, {**RULE, "only": "patch"}),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": ALLOWED}}},
            {"required": True, "grammars": RULE["grammars"]},
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ALLOWED[:1]}}},
            {},
        ),
    ],
)
def test_calls_of_tools_in_a_chat(ask, fields, rule):
    rule = {**rule, "strict": frozenset(rule.get("strict", ()))}
    assert ask(CHAT, tools=TOOLS, **fields) == Constraint(tools=ToolRule(**rule))


def test_a_format_and_tools_together(ask, engine):
    made = ask(CHAT, tools=[F], response_format={"type": "json_object"})
    assert made == Constraint(shape=Shape("json_schema", OBJECT, "response_format"), tools=ToolRule())
    assert engine.requests[-1].tools == engine.chats[-1]["tools"] and "strict" not in json.dumps(engine.chats[-1])


def test_no_tools_no_rule(ask):
    assert ask(CHAT, tools=TOOLS, tool_choice="none") is None
    assert ask(CHAT, tools=[]) is None and ask(CHAT, tool_choice="auto") is None
    assert ask(TALK, tools=[MINE], tool_choice={"type": "none"}) is None and ask(TALK) is None


def test_functions_as_before_there_were_tools(ask):
    functions = [{"name": "f"}, {"name": "g"}]
    once = {"parallel": False, "where": "functions"}
    assert ask(CHAT, functions=functions) == Constraint(tools=ToolRule(**once))
    assert ask(CHAT, functions=functions, function_call={"name": "g"}) == Constraint(tools=ToolRule(only="g", **once))
    assert ask(CHAT, functions=functions, function_call="none") is None


@pytest.mark.parametrize(
    "to, fields, where",
    [
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT, {"function_call": {"name": "f"}}, "function_call"),
        (
            CHAT,
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": NONE_ALLOWED}},
            "tool_choice",
        ),
        (CHAT, {"tools": [{"type": "custom", "custom": {**LARK, "format": {"type": "grammar"}}}]}, "tools.0.custom"),
        (TALK, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (TALK, {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        (TALK, {"tools": [MINE], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ],
)
def test_calls_that_cannot_be(refused, to, fields, where):
    assert refused(to, **fields)["message"].startswith(where)


def test_a_grammar_of_a_tool_has_a_limit(refused):
    grammar = {"syntax": "lark", "definition": "x" * (MOST_BYTES + 1)}
    tool = {"type": "custom", "custom": {"name": "p", "format": {"type": "grammar", "grammar": grammar}}}
    assert refused(CHAT, tools=[F, tool])["param"] == "tools.1"
    grammar = {"syntax": "ebnf", "definition": "x"}
    tool = {"type": "custom", "custom": {"name": "p", "format": {"type": "grammar", "grammar": grammar}}}
    assert refused(CHAT, tools=[tool])["param"] == "tools.0.custom.format.grammar.syntax"


@pytest.mark.parametrize(
    "choice, rule",
    [
        (None, {}),
        ({"type": "auto"}, {}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel": False}),
        ({"type": "any"}, {"required": True}),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, {"only": "f", "parallel": False}),
    ],
)
def test_calls_of_tools_in_a_message(ask, choice, rule):
    assert ask(TALK, tools=[MINE], tool_choice=choice) == Constraint(tools=ToolRule(**rule))
    strict = ask(TALK, tools=[MINE, {**MINE, "name": "g", "strict": True}], tool_choice=choice)
    assert strict == Constraint(tools=ToolRule(**rule, strict=frozenset({"g"})))


def test_the_format_of_a_message(ask, refused):
    given = {"type": "json_schema", "schema": SCHEMA}
    for fields, where in (({"output_format": given}, "output_format"), ({"output_config": {"format": given}}, "")):
        shape = Shape("json_schema", WRITTEN, f"{where or 'output_config.format'}.schema")
        assert ask(TALK, **fields) == Constraint(shape=shape)
    assert ask(TALK, output_config={"effort": "low", "format": None}) is None
    both = refused(TALK, output_format=given, output_config={"format": given})
    assert both["message"].startswith("output_config.format.schema: The answer has a format already")


FLAT = [
    {"type": "function", "name": "f", "parameters": SCHEMA},
    {"type": "function", "name": "s", "parameters": SCHEMA, "strict": True},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}},
    {"type": "custom", "name": "digits", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}},
    {"type": "custom", "name": "free", "format": {"type": "text"}},
    {"type": "web_search"},
]
FLAT_ALLOWED = [{"type": "function", "name": "f"}, {"type": "custom", "name": "patch"}, {"type": "web_search"}]


@pytest.mark.parametrize(
    "fields, rule",
    [
        ({}, RULE),
        ({"parallel_tool_calls": False}, {**RULE, "parallel": False}),
        ({"tool_choice": "required"}, {**RULE, "required": True}),
        ({"tool_choice": {"type": "function", "name": "f"}}, {**RULE, "only": "f"}),
        ({"tool_choice": {"type": "custom", "name": "patch"}}, {**RULE, "only": "patch"}),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": FLAT_ALLOWED}},
            {"required": True, "grammars": RULE["grammars"]},
        ),
    ],
)
def test_calls_of_tools_in_a_response_are_as_in_a_chat(ask, engine, fields, rule):
    rule = {**rule, "strict": frozenset(rule.get("strict", ()))}
    assert ask(RESPONSE, tools=FLAT, **fields) == Constraint(tools=ToolRule(**rule))
    if "tool_choice" not in fields:
        flat = engine.requests[-1].tools
        ask(CHAT, tools=TOOLS)
        assert engine.requests[-1].tools == flat


@pytest.mark.parametrize(
    "given, shape",
    [
        (None, None),
        ({"format": {"type": "text"}, "verbosity": "low"}, None),
        ({"format": {"type": "json_object"}}, Shape("json_schema", OBJECT, "text.format")),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
            Shape("json_schema", WRITTEN, "text.format.schema"),
        ),
    ],
)
def test_the_format_of_a_response(ask, given, shape):
    assert ask(RESPONSE, text=given) == (Constraint(shape=shape) if shape else None)


def test_a_format_in_the_wrong_place_or_without_its_schema_is_refused(refused):
    chats = {"type": "json_schema", "name": "n", "json_schema": {"schema": SCHEMA}}
    assert refused(RESPONSE, text={"format": chats})["param"] == "text.format.schema"
    assert refused(RESPONSE, response_format={"type": "json_object"})["param"] == "response_format"
    assert refused(CHAT, response_format={"type": "json_schema"})["param"] == "response_format.json_schema"


OTHERS = [(fields, shape) for fields, shape in FORMATS if "response_format" not in fields]


@pytest.mark.parametrize("fields, shape", OTHERS)
def test_a_response_takes_the_formats_of_other_servers_too(ask, refused, fields, shape):
    assert ask(RESPONSE, **fields) == (Constraint(shape=shape) if shape else None)
    if shape:
        assert refused(RESPONSE, text={"format": {"type": "json_object"}}, **fields)["param"] == shape.where


def test_counting_tokens_takes_the_same_fields(client):
    body = {"messages": [USER], "tools": [{**MINE, "strict": True}], "tool_choice": {"type": "any"}}
    body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert client.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": 10}
