"""From items and tools of the Responses API to messages and tools that chat templates take. Pure.

An answer comes back as several items: reasoning, a message, calls. They are one turn of the assistant again, as the
model generated it, so that the next prompt goes on from what is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from onefold.engine.constraint import CUSTOM_INPUT, Shape
from onefold.errors import BadRequest
from onefold.server import constraints, normalise, tools
from onefold.server.body import parse_arguments
from onefold.server.openai.constraints import others
from onefold.server.openai.translate import effort_options, text
from onefold.server.options import for_the_template
from onefold.server.responses.schemas import (
    STATELESS,
    CustomCall,
    CustomCallOutput,
    CustomTool,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputTokensRequest,
    LocalShellCall,
    LocalShellCallOutput,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
    ToolChoice,
)
from onefold.server.tools import Offer, Tool

LOCAL_SHELL = "local_shell"
"""The function that calls of OpenAI's own shell are shown to the model as."""


def messages(asked: InputTokensRequest) -> list[dict[str, Any]]:
    """Returns the conversation, its instructions first. Raises BadRequest for an item that cannot be read."""
    turns = Turns()
    if asked.instructions and (kept := normalise.system_text(asked.instructions)):
        turns.made.append({"role": "system", "content": kept})
    given = asked.input or ""
    if isinstance(given, str):
        turns.made.append({"role": "user", "content": normalise.user_text(given)})
        return turns.made
    for i, item in enumerate(given):
        turns.add(item, f"input.{i}")
    return turns.made


class Turns:
    """Messages as they are made out of items, in their order."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self._spoken = False
        """Whether the last item was a message of the assistant's. Another one is a turn of its own."""
        self._calls: dict[str, tuple[str, str]] = {}
        """The id and the name of each call, by its ids."""

    def add(self, item: object, where: str) -> None:
        """Raises BadRequest."""
        spoken = False
        match item:
            case MessageItem(role="assistant"):
                said = text(item.content, f"{where}.content") or ""
                self._assistant(another=self._spoken)["content"] += said
                spoken = True
            case MessageItem():
                self._message(item, where)
            case ReasoningItem():
                self._reasoning(item, where)
            case FunctionCall():
                self._call(item.name, parse_arguments(item.arguments), item.call_id)
            case CustomCall():
                self._call(item.name, {CUSTOM_INPUT: item.input}, item.call_id)
            case LocalShellCall():
                action = {name: value for name, value in item.action.items() if name != "type" and value is not None}
                self._call(LOCAL_SHELL, action, *_ids(item, where))
            case FunctionCallOutput():
                if item.call_id is None and item.name is None:
                    raise BadRequest("This field is required.", where=f"{where}.call_id")
                self._result(item, where, item.call_id, item.name)
            case CustomCallOutput():
                self._result(item, where, item.call_id, item.name)
            case LocalShellCallOutput():
                self._result(item, where, _ids(item, where)[0], LOCAL_SHELL)
            case _:
                raise _unreadable(item, where)
        self._spoken = spoken

    def _assistant(self, *, another: bool = False) -> dict[str, Any]:
        """Returns the turn that the assistant's next piece belongs to."""
        if another or not self.made or self.made[-1]["role"] != "assistant":
            self.made.append({"role": "assistant", "content": ""})
        return self.made[-1]

    def _message(self, item: MessageItem, where: str) -> None:
        if item.role == "user":
            said = text(item.content, f"{where}.content", normalise.user_text) or ""
            self.made.append({"role": "user", "content": said})
            return
        said = normalise.system_text(text(item.content, f"{where}.content") or "")
        if said or not item.content:  # else a client's countdown was all that it said
            self.made.append({"role": "system", "content": said})

    def _reasoning(self, item: ReasoningItem, where: str) -> None:
        """The text itself, else its summary. An item that has neither, as other servers send them, says nothing."""
        thought = text(item.content, f"{where}.content") or text(item.summary, f"{where}.summary")
        if thought:
            turn = self._assistant()
            before = [turn["reasoning_content"]] if "reasoning_content" in turn else []
            turn["reasoning_content"] = "\n".join([*before, thought])

    def _call(self, name: str, arguments: Any, *ids: str) -> None:
        call = {"id": ids[0], "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)
        self._calls |= dict.fromkeys(ids, (ids[0], name))

    def _result(
        self,
        item: FunctionCallOutput | CustomCallOutput | LocalShellCallOutput,
        where: str,
        of: str | None,
        name: str | None,
    ) -> None:
        of, name = self._calls.get(of, (of, name)) if of is not None else (of, name)
        made = {"role": "tool", "content": text(item.output, f"{where}.output", normalise.user_text) or ""}
        made |= {"tool_call_id": of} if of is not None else {}
        self.made.append(made | ({"name": name} if name is not None else {}))


def _ids(item: LocalShellCall | LocalShellCallOutput, where: str) -> list[str]:
    found = [one for one in (item.call_id, item.id) if one is not None]
    if not found:
        raise BadRequest("This field is required.", where=f"{where}.call_id")
    return found


def _unreadable(item: object, where: str) -> BadRequest:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "item_reference" or (kind is None and isinstance(item, Mapping) and "id" in item):
        return BadRequest(f"An item cannot be referred to by its id. {STATELESS}", where=where)
    if not isinstance(kind, str):
        return BadRequest("This field is required.", where=f"{where}.type")
    return BadRequest(f"Items of the type {kind[:40]!r} are not supported: leave them out.", where=f"{where}.type")


def offer(asked: InputTokensRequest) -> Offer:
    """Returns the tools for the template and the rule for the engine. Raises BadRequest for a choice that cannot be."""
    made = {}
    for i, tool in enumerate(asked.tools or ()):
        if not isinstance(tool, dict):
            made[f"tools.{i}"] = _tool(tool, f"tools.{i}")
        elif not isinstance(tool.get("type"), str):
            raise BadRequest("This field is required.", where=f"tools.{i}.type")
    return tools.offer(made, _choice(asked.tool_choice), parallel=asked.parallel_tool_calls is not False)


def left_out(asked: InputTokensRequest) -> list[str]:
    """Returns the types of the tools that the model is not offered, as only OpenAI could run them."""
    return [tool["type"][:40] for tool in asked.tools or () if isinstance(tool, dict)]


def _tool(tool: FunctionTool | CustomTool, where: str) -> Tool:
    if isinstance(tool, FunctionTool):
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return Tool(function, strict=bool(tool.strict))
    if tool.format is None or tool.format.type == "text":
        return tools.custom_tool(tool.name, tool.description)
    for name in ("syntax", "definition"):
        if getattr(tool.format, name) is None:
            raise BadRequest("This field is required.", where=f"{where}.format.{name}")
    return tools.custom_tool(tool.name, tool.description, tool.format.syntax, tool.format.definition or "")


def _choice(given: Literal["none", "auto", "required"] | ToolChoice | None) -> tools.Choice:
    if not isinstance(given, ToolChoice):
        return tools.Choice(given or "auto")
    if given.type == "allowed_tools":
        if given.tools is None:
            raise BadRequest("This field is required.", where="tool_choice.tools")
        names = [one.name for one in given.tools if one.type in ("function", "custom") and one.name is not None]
        return tools.Choice(given.mode or "auto", allowed=frozenset(names))
    if given.name is None:
        raise BadRequest("This field is required.", where="tool_choice.name")
    return tools.Choice(only=given.name)


def shape(asked: ResponsesRequest) -> Shape | None:
    """Returns the shape of the answer's text; None if any will do. Raises BadRequest if two are asked for."""
    given = asked.text.format if asked.text else None
    own = [] if given is None or given.type == "text" else [_format(given)]
    return constraints.only_one([*own, *others(asked)])


def _format(given: TextFormat) -> Shape:
    if given.type == "json_object":
        return constraints.json_schema(constraints.ANY_OBJECT, "text.format")
    if given.schema_ is None:
        raise BadRequest("This field is required.", where="text.format.schema")
    return constraints.json_schema(given.schema_, "text.format.schema")


def template_options(asked: InputTokensRequest) -> dict[str, Any]:
    effort = asked.reasoning.effort if asked.reasoning else None
    return effort_options(effort) | for_the_template(asked.chat_template_kwargs)
