"""Makes the grammar of a whole answer of what a request asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onefold.engine.constraint import Constraint, Shape, ToolRule
from onefold.engine.guidance.call_format import CallFormat
from onefold.engine.guidance.call_grammar import CallGrammar
from onefold.engine.guidance.lark import SPACED, Convert, Rules, expression, json_value, quoted
from onefold.engine.guidance.messages import explained
from onefold.engine.guidance.schema_forms import enforceable
from onefold.engine.guidance.vocabulary import Vocabulary
from onefold.errors import PromptError

Tools = Sequence[Mapping[str, Any]]


def answer_grammar(
    asked: Constraint,
    tools: Tools,
    calls: CallFormat | None,
    vocabulary: Vocabulary,
    convert: Convert,
    free: frozenset[str] = frozenset(),
) -> str:
    """Returns the grammar of an answer: text of the shape, or calls of tools. `free`: tools whose schemas are left out.
    Raises PromptError for what cannot be made into one."""
    rules = Rules(vocabulary, convert)
    shape = None if asked.shape is None else shape_expression(rules, asked.shape)
    if asked.tools is None or calls is None:
        assert shape is not None
        return rules.text(shape)
    grammar = CallGrammar(rules, calls, asked.tools, free)
    if is_required(asked.tools):
        return rules.text(grammar.required(offered(tools, asked.tools)))
    if shape is not None:  # a call takes the place of the whole answer
        return rules.text(f"{shape} | {grammar.required(tools)}")
    return rules.text(grammar.allowed(tools))


def is_required(rule: ToolRule | None) -> bool:
    return rule is not None and (rule.required or rule.only is not None)


def enforced(rule: ToolRule) -> frozenset[str]:
    """The tools whose arguments must be enforced."""
    return rule.strict | rule.grammars.keys() | rule.regexes.keys()


def offered(tools: Tools, rule: ToolRule) -> Tools:
    """The tools that may be called."""
    return [tool for tool in tools if rule.only is None or tool["function"]["name"] == rule.only]


def shape_expression(rules: Rules, shape: Shape) -> str:
    """Returns the expression for text of a shape. Raises PromptError."""
    return SHAPES[shape.kind](rules, shape)


def _schema(_: Rules, shape: Shape) -> str:
    if shape.text == "false":
        raise PromptError("the schema is false: nothing can satisfy it", where=shape.where)
    return json_value(enforceable(json.loads(shape.text)), SPACED)


def _choice(rules: Rules, shape: Shape) -> str:
    choices = [choice for choice in json.loads(shape.text) if choice]
    if not choices:
        raise PromptError("a choice needs at least one text that is not empty", where=shape.where)
    return rules.add("choice", " | ".join(map(quoted, choices)))


def _grammar(rules: Rules, shape: Shape) -> str:
    lark, error = rules.convert(shape.text)
    if error:
        raise PromptError(f"the grammar can be read neither as Lark nor as GBNF: {explained(error)}", where=shape.where)
    return rules.nested("grammar", lark)


def _regex(rules: Rules, shape: Shape) -> str:
    """The regular expression always matches the whole text."""
    text = shape.text.removeprefix("^")
    if text.endswith("$") and not text.endswith(r"\$"):
        text = text[:-1]
    if not text:
        raise PromptError("the regular expression is empty", where=shape.where)
    return rules.add("PATTERN", expression(text))


SHAPES: dict[str, Callable[[Rules, Shape], str]] = {
    "json_schema": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
