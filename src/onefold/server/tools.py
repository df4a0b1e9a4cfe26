"""The tools of a request, whichever API's: which of them the model is offered, and how it may call them.

A custom tool, which takes text instead of arguments, is offered as a function of one string. Pure; knows no API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from onefold.engine.constraint import CUSTOM_INPUT, ToolRule
from onefold.errors import BadRequest
from onefold.server import normalise
from onefold.server.body import parse_arguments
from onefold.server.constraints import grammar_text


@dataclass(frozen=True)
class Tool:
    function: Mapping[str, Any]
    """Name, description, parameters, as OpenAI's chat writes them."""
    strict: bool = False
    custom: bool = False
    syntax: Literal["lark", "regex"] | None = None
    """Of the grammar that a custom tool's text follows, if there is one."""
    definition: str = ""

    @property
    def name(self) -> str:
        return str(self.function["name"])


@dataclass(frozen=True)
class Choice:
    mode: Literal["none", "auto", "required"] = "auto"
    only: str | None = None
    """The one tool that is to be called."""
    allowed: frozenset[str] | None = None
    """The tools that are offered; None: all."""
    where: str = "tool_choice"
    """The field that says so, for error messages."""


@dataclass(frozen=True)
class Offer:
    """What the template and the engine get."""

    tools: list[dict[str, Any]] | None = None
    rule: ToolRule | None = None
    custom: frozenset[str] = frozenset()
    """The tools whose calls are answered with text instead of arguments."""


def custom_tool(
    name: str, description: str | None, syntax: Literal["lark", "regex"] | None = None, definition: str = ""
) -> Tool:
    """Returns the tool as a function of one string, whose description tells the model the grammar."""
    told = "The whole input of the tool, as plain text."
    if syntax is not None:
        told += f" It follows this grammar ({syntax}):\n{definition}"
    schema = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", "description": told}},
        "required": [CUSTOM_INPUT],
    }
    function = {"name": name, "description": description, "parameters": schema}
    return Tool(function, custom=True, syntax=syntax, definition=definition)


def custom_input(arguments: str) -> str:
    """Returns the text that a custom tool is called with; all of the arguments, if a model wrote others."""
    found = parse_arguments(arguments)
    said = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return said if isinstance(said, str) else arguments


def offer(given: Mapping[str, Tool], choice: Choice, *, parallel: bool = True, where: str = "tools") -> Offer:
    """Returns what is offered of these tools, by the place of each in the request; nothing with a choice of "none".
    Raises BadRequest if the choice names a tool that is not there, or requires a call and there is no tool."""
    if choice.mode == "none":
        return Offer()
    named = {choice.only} if choice.only is not None else choice.allowed or frozenset()
    if missing := named - {tool.name for tool in given.values()}:
        said = f"This names a tool that is not in the list of tools: {min(missing)[:40]!r}."
        raise BadRequest(said, where=choice.where)
    kept = {at: tool for at, tool in given.items() if choice.allowed is None or tool.name in choice.allowed}
    if not kept:
        if choice.mode == "required":
            said = "A call is required, but no tool is offered: add tools, or leave this out."
            raise BadRequest(said, where=choice.where)
        return Offer()
    rule = replace(_rule(kept), required=choice.mode == "required", only=choice.only, parallel=parallel, where=where)
    made = [normalise.tool({"type": "function", "function": tool.function}) for tool in kept.values()]
    return Offer(made, rule, frozenset(tool.name for tool in kept.values() if tool.custom))


def _rule(given: Mapping[str, Tool]) -> ToolRule:
    texts = {at: tool for at, tool in given.items() if tool.syntax is not None}
    found = {at: grammar_text(tool.definition, at) for at, tool in texts.items()}
    return ToolRule(
        strict=frozenset(tool.name for tool in given.values() if tool.strict),
        grammars={tool.name: found[at] for at, tool in texts.items() if tool.syntax == "lark"},
        regexes={tool.name: found[at] for at, tool in texts.items() if tool.syntax == "regex"},
    )
