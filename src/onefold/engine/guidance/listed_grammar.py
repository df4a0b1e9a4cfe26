"""The grammar of a call's arguments where each of them is written by itself, as XML-like formats do.

Strings are raw text up to what closes them; other values are JSON. Arguments come in the order of the schema, and those
that are not required may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onefold.engine.guidance.call_format import ListedCalls
from onefold.engine.guidance.lark import SPACED, Rules, json_value
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

    def expression(self, schema: Mapping[str, Any], grammar: str | None = None) -> str:
        """Returns the expression from behind the tool's name to the call's end. `grammar`: of the one argument."""
        given, required = schema.get("properties"), schema.get("required")
        properties: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
        literal, calls = self._rules.literal, self._format
        kinds = (RAW, WORD, *KINDS.values())
        # From the last argument to the first: what may follow a value of each kind, and what may follow the name.
        after = {kind: literal(self._behind(calls.tails, kind)) for kind in kinds}
        first = literal(calls.empty)
        for i, (key, inside) in reversed([*enumerate(properties.items())]):
            kind, value = self._value(i, inside, schema, grammar)
            link = literal(key + calls.links["string" if kind in (RAW, WORD) else kind])
            argument = self._rules.add(f"argument_{self._number}_{i}", f"{link} {value} {after[kind]}")
            here = {k: f"{literal(self._behind(calls.glue, k))} {argument}" for k in kinds}
            begun = f"{literal(calls.middle)} {argument}"
            if key in needed:
                after, first = here, begun
            else:
                after = {k: self._either(f"rest_{i}_{k}", here[k], after[k]) for k in kinds}
                first = self._either(f"first_{i}", begun, first)
        return first

    def _either(self, name: str, one: str, other: str) -> str:
        return self._rules.add(f"{name}_{self._number}", f"{one} | {other}")

    def _behind(self, texts: Mapping[str, str], kind: str) -> str:
        """What follows a value of a kind. Raw text in tags has taken its closing tag already."""
        text = texts["string" if kind in (RAW, WORD) else kind]
        return text.partition(self._close)[2] if kind == RAW and not self._quote else text

    def _value(self, i: int, inside: Any, root: Mapping[str, Any], grammar: str | None) -> tuple[str, str]:
        kind, schema = _kind(inside, root)
        if kind == WORD:
            words = [str(word) for word in _words(schema) or ()]
            return WORD, "(" + " | ".join(self._rules.literal(word) for word in words) + ")"
        if kind != RAW:
            definitions = {name: root[name] for name in DEFINITIONS if name in root}
            return kind, json_value({**definitions, **schema}, SPACED, lenient=True)
        if grammar is not None:
            return WORD, self._rules.nested(f"input_{self._number}", grammar)
        if self._quote:
            return WORD, rf"/[^{self._close}\\\x00-\x1f\x7f]*/"
        return RAW, self._rules.until(f"text_{self._number}_{i}", self._close)


def _kind(inside: Any, root: Mapping[str, Any], depth: int = 0) -> tuple[str, Mapping[str, Any]]:
    """The kind of a value, and its schema. What may be a string is raw text."""
    if not isinstance(inside, Mapping) or depth > 8:
        return RAW, {}
    if _words(inside):
        return WORD, inside
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
