"""Schemas in the keywords that llguidance enforces: what each rule makes, and that nothing is allowed that was not."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import random
import time
from typing import Any

import jsonschema
import pytest
from call_templates import tokenizer_of
from effort import effort
from llguidance import LLMatcher

from onefold.engine.guidance import schema_forms
from onefold.engine.guidance.lark import SPACED, json_value
from onefold.engine.guidance.limits import parser_limits
from onefold.engine.guidance.messages import explained
from onefold.engine.guidance.schema_forms import enforceable
from onefold.engine.guidance.vocabulary import Vocabulary

DRAFTS = {
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
A, B = {"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
BOTH = {"a": TEXT, "b": TEXT}
KINDS = {"properties": {"kind": {"enum": ["x", "y", "z"]}, "n": NUMBER}, "type": "object", "required": ["kind"]}
IF_X = {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}
BRANCHES = {
    "$defs": {
        "x": {"type": "object", "properties": {"kind": {"const": "x"}, "a": TEXT}, "required": ["kind"]},
        "y": {"type": "object", "properties": {"kind": {"enum": ["y", "z"]}}, "required": ["kind"]},
    },
    "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
}

ENFORCED: list[Any] = [
    {"type": "string", "format": "phone"},
    {"type": "array", "items": NUMBER, "maxItems": 2.0, "minItems": 1.0, "uniqueItems": False},
    {"properties": {"a": TEXT}, "unevaluatedProperties": False},
    {"properties": {"a": TEXT}, "unevaluatedProperties": {"type": "integer"}},
    {"allOf": [{"properties": {"b": NUMBER}}], "properties": {"a": TEXT}, "unevaluatedProperties": False},
    {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": NUMBER}}}, "unevaluatedProperties": False},
    {"prefixItems": [TEXT], "unevaluatedItems": False},
    {"contains": NUMBER, "unevaluatedItems": False},
    {"type": "object", "properties": BOTH, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": BOTH, "dependencies": {"a": ["b"], "n": False}},
    {"type": "object", "properties": {"b": NUMBER}, "dependencies": {"a": {"required": ["b"]}}},
    {"type": "object", "dependentSchemas": {"a": {"properties": {"b": NUMBER}}, "b": True}},
    {"type": "array", "contains": {"const": 1}},
    {"type": "array", "items": NUMBER, "contains": {"minimum": 2}, "minContains": 2},
    {"type": "array", "contains": {"const": 1}, "minContains": 0},
    {"type": "object", "propertyNames": {"type": "string"}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "propertyNames": {"maxLength": 1}, "properties": {"aa": NUMBER}},
    {"type": "object", "propertyNames": {"minLength": 2}},
    {"type": "object", "propertyNames": {"enum": ["a", "aa"]}, "additionalProperties": NUMBER},
    {"type": "object", "propertyNames": False},
    {"not": {"type": "string"}},
    {"type": ["string", "object", "null"], "not": {"type": ["null", "object"]}},
    {"not": {"type": "integer"}},
    {"type": "object", "not": {"required": ["a"]}},
    {"not": {"required": ["a", "b"]}},
    {"not": {"type": "object", "required": ["a"]}},
    {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    {"enum": [1, True, "x", None], "not": {"const": 1.0}},
    {"type": "boolean", "not": {"const": True}},
    {"type": "string", "not": {"enum": [""]}},
    {"not": {"not": NUMBER}},
    {"properties": {"a": {"not": {}}}},
    {"not": False},
    {**KINDS, "not": {"properties": {"kind": {"const": "x"}}, "required": ["n"]}},
    {"if": {"minimum": 2}, "type": "integer"},
    {"then": False, "else": False},
    {**KINDS, "if": IF_X, "then": {"required": ["n"]}},
    {**KINDS, "if": IF_X, "then": {"required": ["n"]}, "else": {"properties": {"n": {"minimum": 2}}}},
    {**KINDS, "if": {"not": IF_X}, "then": {"required": ["n"]}},
    {**KINDS, "allOf": [{"if": IF_X, "then": {"required": ["n"]}}, {"if": A, "then": B}]},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"if": {"required": ["a"]}, "then": {"type": "string"}, "else": {"type": "object"}},
    {"if": A, "then": {"required": ["b"]}, "else": {"maxProperties": 0}},
    {"if": True, "then": NUMBER},
    {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True, "maxItems": 2},
    {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1},
    {"items": {"$ref": "#/$defs/c"}, "uniqueItems": True, "$defs": {"c": {"enum": ["a", "b"]}}},
    BRANCHES,
    {"oneOf": [NUMBER, {"type": ["string", "null"]}]},
    {"oneOf": [{"const": 1}, {"enum": [2, True]}]},
    {"oneOf": [A, B]},
    {"oneOf": [{"properties": {"a": TEXT}, "required": ["a"]}, {"properties": {"b": NUMBER}, "required": ["b"]}]},
    {"type": "object", "anyOf": [A, B], "oneOf": [{"required": ["a", "b"]}, {"required": ["n"]}]},
]
REFUSED: list[Any] = [
    {"type": "array", "items": TEXT, "uniqueItems": True},
    {"type": "array", "items": {"enum": [*range(13)]}, "uniqueItems": True},
    {"not": {"pattern": "x"}},
    {"type": "number", "not": {"type": "integer"}},
    {"type": "string", "not": {"const": "x"}},
    {"if": {"minimum": 2}, "then": {"maximum": 3}},
    {"type": "object", "properties": {"a": TEXT}, "if": {"properties": {"a": {"const": "x"}}}, "then": B},
    {"contains": NUMBER, "maxContains": 1},
    {"propertyNames": {"pattern": "x", "minLength": 2}},
    {"propertyNames": {"pattern": "x"}, "properties": {"a": TEXT}},
    {"unevaluatedProperties": False, "anyOf": [{"properties": {"a": TEXT}}, {"properties": {"b": TEXT}}]},
    {"oneOf": [NUMBER, {"type": "number"}]},
    {"oneOf": [A, {"type": "object", "required": ["a", "b"]}]},
]
SCALARS: list[Any] = [None, True, False, 0, 1, 2, 5, 1.5, "", "a", "x", "xyz"]


def values() -> list[Any]:
    """Small values of all kinds."""
    lists = [list(some) for n in (0, 1, 2, 3) for some in itertools.product([1, 2, "a", "b", True, None], repeat=n)]
    names: dict[str, list[Any]] = {"kind": ["x", "y"], "a": [1, "a"], "aa": [1], "b": [1, "b"], "n": [1, 3]}
    objects: list[dict[str, Any]] = [{}]
    for name, options in names.items():
        objects += [{**one, name: option} for one in objects for option in options]
    return [*SCALARS, *lists, *objects]


@functools.cache
def vocabulary() -> Vocabulary:
    tokenizer = tokenizer_of("hermes")
    return Vocabulary(tokenizer, len(tokenizer))


def compiled(schema: Any) -> Any:
    grammar = f"%llguidance {{}}\nstart: {json_value(enforceable(schema), SPACED)}"
    return LLMatcher(vocabulary().compiled(), grammar, log_level=0, limits=parser_limits())


def accepts(matcher: Any, tokens: list[int]) -> bool:
    matcher.reset()
    if matcher.validate_tokens(tokens) != len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


@functools.cache
def written() -> list[tuple[Any, list[int]]]:
    encode = vocabulary()._tokenizer.encode
    return [(value, encode(json.dumps(value), add_special_tokens=False)) for value in values()]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("schema", ENFORCED, ids=lambda schema: json.dumps(schema)[:60])
def test_what_is_enforced_allows_nothing_that_is_forbidden(schema, draft):
    named = {"$schema": DRAFTS[draft], **schema}
    matcher = compiled(named)
    if draft == 2020:
        assert not matcher.is_error(), matcher.get_error()
    if matcher.is_error():
        return
    validator = jsonschema.validators.validator_for(named)(named)
    allowed = 0
    for value, tokens in written():
        if accepts(matcher, tokens):
            allowed += 1
            assert validator.is_valid(value), value
    assert allowed


@pytest.mark.parametrize("schema", REFUSED, ids=lambda schema: json.dumps(schema)[:60])
def test_what_cannot_be_enforced_is_refused_in_words(schema):
    matcher = compiled(schema)
    assert matcher.is_error()


def test_reasons_are_in_words():
    assert "12 listed values" in explained('Unimplemented keys: ["uniqueItems"]')
    assert "maxContains" in explained('Unimplemented keys: ["contains", "maxContains"]')
    assert explained("Invalid type: x") == "Invalid type: x"
    assert explained('Unimplemented keys: ["$dynamicRef"]') == 'Unimplemented keys: ["$dynamicRef"]'


class Drawn:
    """Schemas of all keywords at random, a few levels deep."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def schema(self, depth: int = 0) -> Any:
        draw = self._draw
        if depth > 2 or draw.random() < 0.1:
            return draw.choice([True, False, TEXT, NUMBER, {"const": 1}, {"enum": ["x", "a", 1, None]}, A, B, {}, IF_X])
        made: dict[str, Any] = {}
        for _ in range(draw.randint(1, 4)):
            made |= self._part(depth + 1)
        return made

    def root(self) -> Any:
        made = self.schema()
        named = {
            "$schema": DRAFTS[self._draw.choice([7, 2020])],
            "$defs": {"d": self.schema(2), "e": BRANCHES["$defs"]["x"]},
        }
        return {**made, **named} if isinstance(made, dict) else made

    def _part(self, depth: int) -> dict[str, Any]:
        draw, inner = self._draw, lambda: self.schema(depth)
        names = [*("a", "b", "kind", "n")]
        some = draw.sample(names, 2)
        return draw.choice(
            [
                lambda: {"type": draw.choice(["object", "array", "string", ["integer", "null"], ["object", "array"]])},
                lambda: {"type": "object", "properties": {name: inner() for name in some}},
                lambda: {"type": "object", "properties": KINDS["properties"]},
                lambda: {"required": some[:1]},
                lambda: {"additionalProperties": inner()},
                lambda: {"type": "array", "items": draw.choice([inner(), {"enum": [1, 2, "a", "b"]}])},
                lambda: {"minItems": draw.choice([1, 2.0])},
                lambda: {"uniqueItems": True},
                lambda: {"contains": inner(), **draw.choice([{}, {"minContains": draw.choice([0, 1, 2])}])},
                lambda: {draw.choice(["allOf", "anyOf", "oneOf"]): [inner() for _ in range(draw.randint(1, 3))]},
                lambda: {"oneOf": [inner(), inner()]},
                lambda: {"not": inner()},
                lambda: {
                    "if": draw.choice([IF_X, A, inner()]),
                    "then": inner(),
                    **draw.choice([{}, {"else": inner()}]),
                },
                lambda: {"dependentRequired": {some[0]: some[1:]}},
                lambda: {"dependentSchemas": {some[0]: inner()}},
                lambda: {"dependencies": {some[0]: draw.choice([inner(), some[1:]])}},
                lambda: {
                    "propertyNames": draw.choice([{"enum": some}, {"maxLength": 1}, {"pattern": "^[ab]"}, inner()])
                },
                lambda: {"unevaluatedProperties": draw.choice([False, inner()])},
                lambda: {"unevaluatedItems": draw.choice([False, inner()])},
                lambda: {"$ref": draw.choice(["#/$defs/d", "#/$defs/e"])},
                lambda: {"enum": ["x", 1, None, True, "a"]},
            ]
        )()


@pytest.mark.parametrize("seed", range(effort(60, 1000)))
def test_no_schema_allows_more_than_it_did(seed):
    schema = Drawn(seed).root()
    matcher = compiled(schema)
    if matcher.is_error():
        return
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    for value, tokens in written():
        if accepts(matcher, tokens):
            assert kind(schema).is_valid(value), (value, schema)


# -- exactly, where a rule is not narrower ---------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": NUMBER, "maxItems": 2.0, "uniqueItems": False},
        {"properties": {"a": TEXT}, "unevaluatedProperties": False},
        {"type": "object", "not": {"required": ["a", "b"]}},
        {"not": {"type": "string"}},
        {**KINDS, "if": IF_X, "then": {"required": ["n"]}, "else": {"properties": {"n": {"minimum": 2}}}},
        {"if": A, "then": {"required": ["b"]}, "else": {"maxProperties": 0}},
        {"oneOf": [NUMBER, {"type": ["string", "null"]}]},
        {"oneOf": [A, B]},
        {"type": "object", "propertyNames": {"enum": ["a", "aa"]}, "additionalProperties": NUMBER},
        {"type": "object", "propertyNames": {"maxLength": 1}},
        BRANCHES,
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_a_rule_that_is_exact_forbids_nothing_either(schema):
    """In some order of the properties: llguidance keeps to one."""
    matcher, validator = compiled(schema), jsonschema.Draft202012Validator(schema)
    assert not matcher.is_error(), matcher.get_error()
    encode = vocabulary()._tokenizer.encode
    for value, _ in written():
        if validator.is_valid(value) and not (isinstance(value, dict) and len(value) > 3):
            forms = map(dict, itertools.permutations(value.items())) if isinstance(value, dict) else [value]
            assert any(accepts(matcher, encode(json.dumps(f), add_special_tokens=False)) for f in forms), value


def test_distinct_values_come_in_order():
    matcher = compiled({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True})
    found = [value for value, tokens in written() if accepts(matcher, tokens)]
    assert found == [[], [1], ["a"], ["b"], ["a", 1], ["a", "b"], ["b", 1], ["a", "b", 1]]


def test_twelve_distinct_values_compile():
    days = [f"day {i}" for i in range(12)]
    schema = {"type": "array", "items": {"enum": days}, "uniqueItems": True}
    matcher = compiled(schema)
    assert not matcher.is_error(), matcher.get_error()
    encode = vocabulary()._tokenizer.encode
    for some in ([], days[3:4], [days[0], days[11]], [days[4], days[5], days[10]], days):
        assert accepts(matcher, encode(json.dumps(some), add_special_tokens=False)), some


# -- what is left alone ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"format": TEXT, "uniqueItems": TEXT, "not": NUMBER, "if": NUMBER, "then": NUMBER}},
        {"enum": [{"format": "phone", "uniqueItems": False}], "default": {"format": "phone", "then": 1}},
        {"const": {"format": "phone", "maxItems": 2.0}, "examples": [{"uniqueItems": False}]},
        {"$defs": {"format": TEXT, "oneOf": TEXT}, "type": "object"},
        {"type": "string", "format": "email"},
        {"x-other": {"format": "phone"}},
        True,
        False,
        [],
    ],
)
def test_data_and_names_are_no_keywords(schema):
    before = json.dumps(schema)
    assert enforceable(schema) == json.loads(before)
    assert json.dumps(schema) == before


def test_what_is_given_is_not_changed():
    for schema in ENFORCED + REFUSED:
        before = json.dumps(schema)
        enforceable(schema)
        assert json.dumps(schema) == before


def test_definitions_are_written_too():
    made = enforceable({"$defs": {"x": {"type": "string", "format": "phone"}}, "definitions": {"y": {"format": "z"}}})
    assert made == {"$defs": {"x": {"type": "string"}}, "definitions": {"y": {}}}


def test_an_unknown_format_is_told_of_once(caplog, monkeypatch):
    monkeypatch.setattr(schema_forms, "_told", set())
    caplog.set_level(logging.INFO, "onefold.engine")
    for _ in range(3):
        enforceable({"properties": {"a": {"format": "phone"}, "b": {"format": "phone"}}})
    assert [r.message for r in caplog.records] == ["a format of schemas is not known, and not enforced: 'phone'"]


def test_additional_properties_are_all_evaluated():
    parts = {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": True}}}, "additionalProperties": NUMBER}
    assert enforceable({**parts, "unevaluatedProperties": False}) == parts


def test_a_oneof_is_not_judged_by_branches_that_were_narrowed():
    """What is made of the first branch shares no value with the second, and the branch itself does."""
    some = {"type": "object", "properties": BOTH, "dependentRequired": {"a": ["b"]}, "required": ["a"]}
    other = {"type": "object", "properties": {**BOTH, "b": False}}
    schema = {"oneOf": [some, other]}
    matcher = compiled(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert matcher.is_error() or all(validator.is_valid(v) for v, tokens in written() if accepts(matcher, tokens))


# -- hostile schemas -------------------------------------------------------------------------------


def nested(word: str, levels: int) -> Any:
    made: Any = {"type": "string", "format": "phone"}
    for _ in range(levels):
        made = {word: [made] if word in ("allOf", "anyOf", "oneOf") else made}
    return made


BIG = {"required": [f"n{i}" for i in range(400)], "properties": {f"n{i}": {"enum": [i]} for i in range(400)}}
LOOP = {"$defs": {"x": {"allOf": [{"$ref": "#/$defs/y"}] * 50}, "y": {"anyOf": [{"$ref": "#/$defs/x"}] * 50}}}


@pytest.mark.parametrize(
    "schema",
    [
        *(nested(word, 190) for word in ("items", "not", "if", "allOf", "oneOf", "contains", "additionalProperties")),
        {"oneOf": [{**BIG, "title": str(i)} for i in range(100)]},
        {**LOOP, "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "not": {"const": 1}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}, "oneOf": [{"$ref": "#/$defs/x"}] * 9},
        {"properties": {f"p{i}": {"items": {"enum": [*range(12)]}, "uniqueItems": True} for i in range(5000)}},
        {"allOf": [{"properties": {f"p{i}": TEXT for i in range(300)}, "if": A, "then": B}] * 300},
        {"oneOf": [{"enum": [*range(1000)]}] * 100},
    ],
    ids=lambda schema: json.dumps(schema)[:50],
)
def test_a_hostile_schema_takes_no_time(schema):
    begun = time.process_time()
    made = enforceable(schema)
    assert time.process_time() - begun < 3
    assert len(json.dumps(made)) < 60 * len(json.dumps(schema)) + 10_000


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 1, "required": 2, "oneOf": 3, "allOf": 4, "anyOf": {}, "if": 5, "then": 6, "not": 7},
        {"dependentRequired": {"a": 1}, "dependencies": {"a": [1]}, "dependentSchemas": 2, "required": [{}]},
        {"contains": 1, "minContains": "x", "propertyNames": 3, "uniqueItems": True, "items": 4, "maxItems": "5"},
        {"oneOf": [{"required": [[]]}, {"required": ["a"], "properties": []}], "type": [1, {}], "format": []},
        {"not": {"type": {}}, "enum": 3, "$ref": 5, "unevaluatedProperties": 1, "unevaluatedItems": []},
        {"if": {"properties": {"a": {"enum": {}}}, "required": [1]}, "then": [], "properties": {"a": {"enum": [[]]}}},
        {"propertyNames": {"enum": 3, "type": []}, "properties": {"a": 1}, "patternProperties": 5},
        {"$schema": 3, "$id": 4, "$defs": [], "minItems": 1e300, "maxItems": float("inf")},
    ],
)
def test_a_schema_of_the_wrong_shape_is_left_to_llguidance(schema):
    enforceable(schema)
