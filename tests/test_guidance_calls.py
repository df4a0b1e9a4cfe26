"""Calls of tools are kept to a grammar: in every format that mlx-lm has a parser for, whatever tokens are drawn."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from call_templates import FORMATS, MARKS, tokenizer_of
from effort import effort
from guided_walks import allowed, walk

from onefold.engine.constraint import Constraint, ToolRule
from onefold.engine.guidance import call_format
from onefold.engine.guidance.compiler import Compiler
from onefold.engine.guidance.escaping import escaped_regex
from onefold.engine.guidance.listed_grammar import closing
from onefold.engine.request import Prompt, Request
from onefold.errors import PromptError

UNKNOWN = {"longcat", "function gemma"}
"""Their parsers cannot read a call without arguments, and one with an object in its arguments."""
CLOSERS = ('"}}', '"}', '", "', '"')
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"enum": ["C", "F"]},
                    "where": {"$ref": "#/$defs/point"},
                    "exact": {"type": "boolean"},
                },
                "required": ["city", "unit"],
                "$defs": {
                    "point": {
                        "type": "object",
                        "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}},
                        "required": ["x"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {
            "name": "add-up",
            "parameters": {
                "type": "object",
                "properties": {"numbers": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3}},
            },
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def offering(tokenizer: Any, rule: ToolRule, tools: list[dict[str, Any]] = TOOLS) -> Request:
    tokens = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    return Request(prompt=Prompt(np.array(tokens, np.int32)), tools=tools, constraint=Constraint(tools=rule))


def closers(tokenizer: Any) -> tuple[str, ...]:
    """What ends a string in the format of these calls."""
    calls = call_format.learn(tokenizer)
    return (closing(calls)[0], *CLOSERS) if isinstance(calls, call_format.ListedCalls) else CLOSERS


@pytest.fixture(scope="module")
def compilers():
    made: dict[Any, Compiler] = {}

    def of(name: str, special: tuple[str, ...] = ()) -> tuple[Any, Compiler]:
        tokenizer = tokenizer_of(name, special=special)
        key = (name, special)
        if key not in made:
            made[key] = Compiler(tokenizer, len(tokenizer))
        return tokenizer, made[key]

    yield of
    for compiler in made.values():
        compiler.close()


@pytest.mark.parametrize("special", [(), MARKS], ids=["text", "special"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in UNKNOWN])
def test_whatever_is_drawn_is_a_call_that_parses_and_keeps_to_its_schema(compilers, name, special):
    tokenizer, compiler = compilers(name, special)
    ended = 0
    tools = TOOLS if name != "pythonic" else [t for t in TOOLS if t["function"]["name"] != "add-up"]
    seeds = effort(8, 60)
    for seed in range(seeds):
        request = offering(tokenizer, ToolRule(required=True), tools)
        guided = compiler.guided(request)
        assert guided is not None
        found = walk(tokenizer, request, guided, seed, closers=closers(tokenizer))
        if not found.ended:
            continue
        ended += 1
        assert found.calls and not found.text.strip(), tokenizer.decode(found.tokens)
        for call in found.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert ended > seeds // 2


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "minimax"])
def test_one_tool_is_called_once(compilers, name):
    tokenizer, compiler = compilers(name)
    for seed in range(6):
        request = offering(tokenizer, ToolRule(only="add-up"))
        guided = compiler.guided(request)
        assert guided is not None
        found = walk(tokenizer, request, guided, seed)
        assert found.ended and [call.name for call in found.calls] == ["add-up"]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm", "mistral"])
def test_text_is_free_and_a_call_in_it_parses(compilers, name):
    """The trigger is written by force after some text, as a model that calls a tool would."""
    tokenizer, compiler = compilers(name)
    called = 0
    for seed in range(8):
        request = offering(tokenizer, ToolRule())
        guided = compiler.guided(request)
        assert guided is not None
        words = {i for i in range(len(tokenizer)) if tokenizer.decode([i]).isascii()}
        forbidden = words - set(allowed(guided.guide, len(tokenizer)))
        assert forbidden == {tokenizer.convert_tokens_to_ids("<|im_start|>")}
        marks = (tokenizer.tool_call_start, *closers(tokenizer))
        found = walk(tokenizer, request, guided, seed, closers=marks, most=300)
        called += len(found.calls)
        if found.ended:
            assert tokenizer.tool_call_start not in found.text, tokenizer.decode(found.tokens)
        for call in found.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert called


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_a_format_that_its_parser_cannot_read_back_is_not_used(compilers, name):
    tokenizer, compiler = compilers(name)
    assert call_format.learn(tokenizer) is None
    assert compiler.guided(offering(tokenizer, ToolRule())) is None


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_a_forced_call_is_plain_json_where_the_format_is_not_known(compilers, name):
    tokenizer, compiler = compilers(name)
    request = offering(tokenizer, ToolRule(only="add-up"))
    guided = compiler.guided(request)
    assert guided is not None and guided.calls is not None
    found = walk(tokenizer, request, guided, 3)
    assert [call.name for call in found.calls] == ["add-up"] and not found.text


@pytest.mark.parametrize("bad", ['quo"te', "new\nline", "a</tool_call>b", ""])
def test_a_name_that_no_call_can_have_is_refused(compilers, bad):
    tokenizer, compiler = compilers("hermes")
    tool = {"type": "function", "function": {"name": bad, "parameters": {"type": "object"}}}
    with pytest.raises(PromptError, match="rename the tool") as refused:
        compiler.guided(offering(tokenizer, ToolRule(), [TOOLS[1], tool]))
    assert refused.value.where == "tools.1.name"


def test_a_schema_that_cannot_be_enforced_is_left_out_unless_it_is_strict(compilers, caplog):
    tokenizer, compiler = compilers("hermes")
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    assert compiler.guided(offering(tokenizer, ToolRule(), [TOOLS[1], tool])) is not None
    assert "odd" in caplog.text
    with pytest.raises(PromptError, match="cannot be enforced"):
        compiler.guided(offering(tokenizer, ToolRule(strict=frozenset({"odd"})), [TOOLS[1], tool]))


def test_the_grammar_of_a_custom_tool_holds_inside_json(compilers):
    tokenizer, compiler = compilers("hermes")
    lines = ['start: "say \\"" WORD "\\"" LF line+', 'line: "+" /[^\\n]{0,4}/ LF', 'WORD: /[a-z"\\\\]{1,3}/']
    grammar = "\n".join([*lines, "%import common.LF"])
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = {"type": "function", "function": {"name": "patch", "parameters": schema}}
    ended = 0
    for seed in range(12):
        request = offering(tokenizer, ToolRule(only="patch", grammars={"patch": grammar}), [tool])
        guided = compiler.guided(request)
        assert guided is not None
        found = walk(tokenizer, request, guided, seed, closers=('"}',))
        if found.ended:
            ended += 1
            text = json.loads(found.calls[0].arguments)["input"]
            first, *lines = text.split("\n")
            assert first.startswith('say "') and first.endswith('"') and 1 <= len(first[5:-1]) <= 3
            assert lines[-1] == "" and lines[:-1] and all(line[:1] == "+" and len(line) <= 5 for line in lines[:-1])
    assert ended > 6


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1]},
        {"properties": "x"},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {}}, "required": [["a"]]},
        {"properties": {"a": {"anyOf": 5}}},
    ],
)
def test_a_schema_that_is_none_is_no_fault(compilers, schema):
    tokenizer, compiler = compilers("qwen3_coder")
    tool = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", **schema}}}
    assert compiler.guided(offering(tokenizer, ToolRule(), [tool])) is not None


@pytest.mark.parametrize(
    ("regex", "texts", "others"),
    [
        (r"(\r?\n)+", ["\n", "\r\n", "\n\r\n"], ["", "\r", "\\\n"]),
        (r'"?x', ["x", '"x'], ["\\x", '""x']),
        (r"\\*\n{2}", ["\n\n", "\\\\\n\n"], ["\n", "\nn"]),
    ],
)
def test_what_repeats_is_a_whole_character_in_escaped_text_too(regex, texts, others):
    made = re.compile(escaped_regex(regex))
    for text in texts + others:
        assert bool(made.fullmatch(json.dumps(text)[1:-1])) == bool(re.fullmatch(regex, text)) == (text in texts)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "hermes"])
def test_the_expression_of_a_custom_tool_holds_in_every_format(compilers, name):
    tokenizer, compiler = compilers(name)
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = {"type": "function", "function": {"name": "dial", "parameters": schema}}
    for seed in range(5):
        request = offering(tokenizer, ToolRule(only="dial", regexes={"dial": r"\d{3}-[a-c]{2}"}), [tool])
        guided = compiler.guided(request)
        assert guided is not None
        found = walk(tokenizer, request, guided, seed)
        assert found.ended and re.fullmatch(r"[0-9]{3}-[a-c]{2}", json.loads(found.calls[0].arguments)["input"])


@pytest.mark.parametrize(
    ("lark", "wanted"),
    [
        (r'start: /a\x22b{1,2}/', r'a"b{1,2}'),
        (r'start: "!".."#"', r'[!-#]'),
        (r'start: "x\f" "y"', "x\x0cy"),
        (r"start: /a.b/s", r"a[\s\S]b"),
        (r"start: /[^a-z\n]{2}/", r"[^a-z\n]{2}"),
        ('start: "k" NEWLINE "m"\n%import common.NEWLINE', r"k(\r?\n)+m"),
    ],
)
def test_a_grammar_holds_inside_json(compilers, lark, wanted):
    tokenizer, compiler = compilers("hermes")
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = {"type": "function", "function": {"name": "say", "parameters": schema}}
    for seed in range(6):
        request = offering(tokenizer, ToolRule(only="say", grammars={"say": lark}), [tool])
        guided = compiler.guided(request)
        assert guided is not None
        found = walk(tokenizer, request, guided, seed, closers=('m"}',))
        assert not found.ended or re.fullmatch(wanted, json.loads(found.calls[0].arguments)["input"])


@pytest.mark.parametrize("lark", [r"start: /\P{L}/", r'start: "a\n"i', r"start: /[[:alpha:]]/", r"start: /a\b/"])
def test_a_grammar_that_cannot_be_escaped_is_refused(compilers, lark):
    tokenizer, compiler = compilers("hermes")
    tool = {"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}
    with pytest.raises(PromptError, match="custom tool"):
        compiler.guided(offering(tokenizer, ToolRule(only="say", grammars={"say": lark}), [tool]))


def test_names_of_special_tokens_in_keys_and_values_are_text(compilers):
    tokenizer, compiler = compilers("qwen3_coder", MARKS)
    properties = {"kind": {"enum": ["<|im_end|>", "</arg_value>"]}, "n": {"enum": [1, 22]}}
    schema = {"type": "object", "properties": properties, "required": ["kind", "n"]}
    tool = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    for seed in range(4):
        request = offering(tokenizer, ToolRule(only="odd"), [tool])
        guided = compiler.guided(request)
        assert guided is not None
        found = walk(tokenizer, request, guided, seed)
        assert found.ended
        jsonschema.validate(json.loads(found.calls[0].arguments), schema)
