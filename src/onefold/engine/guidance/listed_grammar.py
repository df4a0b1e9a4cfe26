"""The grammar of a call's arguments where each of them is written by itself, as XML-like formats do.

Strings are raw text up to what closes them; other values are JSON. Arguments come in the order of the schema, and those
that are not required may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from onefold.engine.guidance.call_format import ListedCalls, type_of
from onefold.engine.guidance.lark import SPACED, Rules, json_value, quoted
from onefold.engine.tool_schemas import DEFINITIONS, definition

RAW, WORD = "raw", "word"
"""Kinds of strings: any text, and one of a list."""
KINDS = {"integer": "integer", "number": "integer", "boolean": "boolean", "array": "array", "object": "object"}


class ListedArguments:
    def __init__(self, rules: Rules, calls: ListedCalls, number: int) -> None:
        """`number`: of the tool, for names of rules."""
        self._rules = rules
        self._format = calls
        self._number = number
        self._close, self._quote = closing(calls)

    def expression(self, schema: Mapping[str, Any], text: str | None = None, *, strict: bool = False) -> str:
        """Returns the expression from behind the tool's name to the call's end. `text`: of a string, the expression.
        `strict`: what cannot be enforced is not left out."""
        given, required = schema.get("properties"), schema.get("required")
        properties: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
        literal, calls = self._rules.literal, self._format
        ways = {kind: self._way(kind) for kind in (RAW, WORD, *KINDS.values())}
        # From the last argument to the first: what may follow a value, by its way on, and what may follow the name.
        after = {way: literal(way.tail) for way in ways.values()}
        first = literal(calls.empty)
        for i, (key, inside) in reversed([*enumerate(properties.items())]):
            kind, value = self._value(i, inside, schema, text, strict)
            link = f"{quoted(key)} {literal(calls.links['string' if kind in (RAW, WORD) else kind])}"
            argument = self._rules.add(f"argument_{self._number}_{i}", f"{link} {value} {after[ways[kind]]}")
            here = {way: f"{literal(way.glue)} {argument}" for way in after}
            begun = f"{literal(calls.middle)} {argument}"
            if key in needed:
                after, first = here, begun
            else:
                after = {
                    way: self._either(f"rest_{i}_{n}", here[way], other) for n, (way, other) in enumerate(after.items())
                }
                first = self._either(f"first_{i}", begun, first)
        return first

    def anything(self) -> str:
        """Returns the same for any arguments, as text."""
        literal, calls, way = self._rules.literal, self._format, self._way(RAW)
        value = self._value(0, {}, {}, None, strict=False)[1]
        one = self._rules.add(f"any_{self._number}", f"/[\\w.-]+/ {literal(calls.links['string'])} {value}")
        more = f"({literal(way.glue)} {one})*"
        return self._either("some", f"{literal(calls.middle)} {one} {more} {literal(way.tail)}", literal(calls.empty))

    def _either(self, name: str, one: str, other: str) -> str:
        return self._rules.add(f"{name}_{self._number}", f"{one} | {other}")

    def _way(self, kind: str) -> Way:
        """How a call goes on behind a value of a kind. Raw text in tags has taken its closing tag already."""
        written = "string" if kind in (RAW, WORD) else kind
        glue, tail = self._format.glue[written], self._format.tails[written]
        if kind == RAW and not self._quote:
            glue, tail = glue.partition(self._close)[2], tail.partition(self._close)[2]
        return Way(glue, tail)

    def _value(
        self, i: int, inside: Any, root: Mapping[str, Any], text: str | None, strict: bool
    ) -> tuple[str, str]:
        kind, schema = _kind(inside, root)
        if kind == WORD:
            return WORD, "(" + " | ".join(quoted(word) for word in _words(schema) or ()) + ")"
        if kind != RAW:
            definitions = {name: root[name] for name in DEFINITIONS if name in root}
            return kind, json_value({**definitions, **schema}, SPACED, lenient=not strict)
        if text is not None:
            return WORD, text
        if self._quote:
            return WORD, rf"/[^{self._close}\\\x00-\x1f\x7f]*/"
        return RAW, self._rules.until(f"text_{self._number}_{i}", self._close)


class Way(NamedTuple):
    """What follows a value: before another argument, and at the end."""

    glue: str
    tail: str


def _kind(inside: Any, root: Mapping[str, Any], depth: int = 0) -> tuple[str, Mapping[str, Any]]:
    """The kind of a value, and its schema. What may be a string is raw text."""
    if not isinstance(inside, Mapping) or depth > 8:
        return RAW, {}
    if _words(inside):
        return WORD, inside
    values = inside.get("enum", [inside["const"]] if "const" in inside else None)
    if isinstance(values, list) and values and not any(isinstance(value, str) for value in values):
        kinds = {type_of(value) for value in values if value is not None}
        return (kinds.pop() if len(kinds) == 1 else RAW), inside
    found = definition(inside.get("$ref"), root)
    if found is not None:
        return _kind(found, root, depth + 1)
    given = inside.get("type")
    types = given if isinstance(given, list) else [given]
    listed = [inside[name] for name in ("anyOf", "oneOf") if isinstance(inside.get(name), list)]
    options = [option for some in listed for option in some]
    if given is None and options:
        kinds = {_kind(option, root, depth + 1)[0] for option in options if option != {"type": "null"}}
        return (kinds.pop() if len(kinds) == 1 and not kinds & {RAW, WORD} else RAW), inside
    named = [KINDS.get(str(name), RAW) for name in types if name != "null"]
    return (named[0] if len(named) == 1 else RAW), inside


def _words(schema: Mapping[str, Any]) -> list[str] | None:
    """The strings that a schema allows, if it lists them."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) and found and all(isinstance(x, str) for x in found) else None


def closing(calls: ListedCalls) -> tuple[str, bool]:
    """Returns the text that closes a string, which no string contains, and whether it is a quote."""
    after, last = calls.glue["string"], calls.tails["string"]
    common = next((after[:n] for n in range(min(len(after), len(last)), 0, -1) if last.startswith(after[:n])), "")
    if common[:1] in ("'", '"'):
        return common[0], True
    tag = re.match(r"\s*(<[^<>]*>)", common)
    return (tag[1] if tag else common), False
