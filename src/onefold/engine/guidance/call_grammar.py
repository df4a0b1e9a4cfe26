"""The grammar of calls of the tools that a request offers, in the format of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onefold.engine.constraint import CUSTOM_INPUT, ToolRule
from onefold.engine.guidance.call_format import SLOT, CallFormat, JsonCalls, ListedCalls
from onefold.engine.guidance.escaping import escaped_grammar
from onefold.engine.guidance.lark import ANY_TEXT, Rules, expression, json_value, quoted
from onefold.engine.guidance.listed_grammar import ListedArguments
from onefold.engine.guidance.schema_forms import enforceable
from onefold.engine.tool_schemas import arguments_schema
from onefold.errors import PromptError


class CallGrammar:
    def __init__(self, rules: Rules, calls: CallFormat, rule: ToolRule, free: frozenset[str] = frozenset()) -> None:
        """`free`: the tools whose schemas are not enforced, because they cannot be."""
        rules.slots[SLOT] = calls.slot
        self._rules = rules
        self._format = calls
        self._rule = rule
        self._free = free

    def required(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Returns the expression for one call or more, and nothing else. Raises PromptError."""
        call = self._call(tools)
        literal, calls = self._rules.literal, self._format
        several = self._rule.parallel and self._rule.only is None and calls.between is not None
        more = f" ({literal(calls.between or '')} {call})*" if several else ""
        return f"{literal(calls.start + calls.head)} {call}{more} {literal(calls.close + calls.end)}"

    def allowed(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Returns the expression for text with calls in it. Without `parallel` the answer ends after a call. Raises
        PromptError."""
        call, literal, calls = self._call(tools), self._rules.literal, self._format
        begin = self._rules.until("text_to_call", calls.start)
        inner = calls.between if calls.between and not (calls.end and calls.end in calls.between) else None
        more = f" ({literal(inner)} {call})*" if inner and self._rule.parallel else ""
        one = self._rules.add(
            "text_with_call", f"{begin} {literal(calls.head)} {call}{more} {literal(calls.close + calls.end)}"
        )
        text = self._rules.add("TEXT", ANY_TEXT)
        if not calls.end:  # the format has no end: what follows a call would be part of it
            return f"{one} | {text}"
        return f"{one}* {text}" if self._rule.parallel else f"{text} | {one}"

    def _call(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """A call from its name to its end, without the markers."""
        names = [self._rules.add(f"tool_{i}", self._body(i, tool["function"])) for i, tool in enumerate(tools)]
        return self._rules.add("call", " | ".join(names))

    def _body(self, number: int, function: Mapping[str, Any]) -> str:
        """A call from the tool's name to its end."""
        name, calls, literal = function["name"], self._format, self._rules.literal
        if not calls.parses(name):
            where = f"{self._rule.where}.{number}.name"
            message = f"this model has no way to write a call of a tool with this name ({name[:40]!r}): rename the tool"
            raise PromptError(message, where=where)
        if isinstance(calls, ListedCalls):
            listed = ListedArguments(self._rules, calls, number)
            if name in self._free:
                return f"{literal(name)} {listed.anything()}"
            schema = enforceable(arguments_schema(function))
            written = listed.expression(schema, self._text(number, name), strict=name in self._rule.strict)
            return f"{literal(name)} {written}"
        assert isinstance(calls, JsonCalls)
        return f"{literal(name + calls.middle)} {self._object(number, function, calls)} {literal(calls.tail)}"

    def _text(self, number: int, name: str) -> str | None:
        """The expression for the text of a custom tool, if it has a grammar."""
        if name in self._rule.grammars:
            return self._rules.nested(f"input_{number}", self._rule.grammars[name])
        return expression(self._rule.regexes[name]) if name in self._rule.regexes else None

    def _object(self, number: int, function: Mapping[str, Any], calls: JsonCalls) -> str:
        """The arguments as one JSON object."""
        name = function["name"]
        if name in self._rule.grammars:
            inside = self._rules.nested(f"input_{number}", escaped_grammar(self._rule.grammars[name]))
            begin, end = f'{{"{CUSTOM_INPUT}"{calls.style["key_separator"]}"', '"}'
            return f"{quoted(begin)} {inside} {quoted(end)}"
        schema = enforceable(arguments_schema(function))
        if name in self._rule.regexes:
            text = {"type": "string", "pattern": f"^(?:{self._rule.regexes[name]})$"}
            schema = {**schema, "properties": {CUSTOM_INPUT: text}}
        if name in self._free:
            schema = {"type": "object"}
        return json_value(schema, calls.style, lenient=name not in self._rule.strict)

