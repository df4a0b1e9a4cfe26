"""From Anthropic's messages and tools to OpenAI's, which chat templates take. Pure.

A user's turn may become several messages: each result of a tool is one of its own, and text between them stays in its
place. Thinking goes back to the template, which decides whether the model sees it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.engine.constraint import Shape
from onefold.errors import BadRequest
from onefold.server import constraints, normalise, tools
from onefold.server.anthropic.schemas import Block, Conversation, Message, ToolChoice
from onefold.server.anthropic.schemas import Tool as GivenTool
from onefold.server.options import for_the_template
from onefold.server.tools import Offer, Tool


def messages(asked: Conversation) -> list[dict[str, Any]]:
    made = []
    system = _system(asked.system)
    if system:
        made.append({"role": "system", "content": system})
    names: dict[str, str] = {}
    last_user = max((i for i, message in enumerate(asked.messages) if message.role == "user"), default=-1)
    for i, message in enumerate(asked.messages):
        where = f"messages.{i}.content"
        if message.role == "system" and message.clear_at == "next_user_message" and i < last_user:
            continue
        if message.content is None:
            if message.role != "system":
                raise BadRequest("This field is required.", where=where)
        elif isinstance(message.content, str):
            made += _said(message.role, [message.content])
        elif message.role == "assistant":
            made.append(_assistant(message.content, where, names))
        else:
            made += _user(message, where, names)
    return made


def _system(given: str | Sequence[Block] | None) -> str:
    texts = [given] if isinstance(given, str) else [_text(block, f"system.{i}") for i, block in enumerate(given or ())]
    return "\n".join(kept for text in texts if (kept := normalise.system_text(text)))


def _said(role: str, texts: Sequence[str]) -> list[dict[str, Any]]:
    """One message of these lines, or none if a client's countdown was all that they were."""
    clean = {"system": normalise.system_text, "user": normalise.user_text}.get(role, str)
    kept = [left for text in texts if (left := clean(text)) or not text]
    return [{"role": role, "content": "\n".join(kept)}] if kept else []


def _assistant(blocks: Sequence[Block], where: str, names: dict[str, str]) -> dict[str, Any]:
    """Text that calls of tools came between was one text when the model wrote it."""
    text, thought, calls = "", [], []
    for i, block in enumerate(blocks):
        here = f"{where}.{i}"
        if block.type == "thinking":
            thought.append(_needed(block.thinking, f"{here}.thinking"))
        elif block.type == "tool_use":
            name = _needed(block.name, f"{here}.name")
            call = {"id": _needed(block.id, f"{here}.id"), "type": "function"}
            calls.append(call | {"function": {"name": name, "arguments": block.input or {}}})
            names[call["id"]] = name
        elif block.type not in ("redacted_thinking", "fallback"):  # they cannot be read here
            text += _text(block, here)
    made: dict[str, Any] = {"role": "assistant", "content": text}
    if any(thought):
        made["reasoning_content"] = "\n".join(thought)
    if calls:
        made["tool_calls"] = calls
    return made


def _user(message: Message, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """Translates a message of the user, or a system message."""
    made: list[dict[str, Any]] = []
    lines: list[str] = []
    for i, block in enumerate(message.content or ()):
        assert isinstance(block, Block)
        here = f"{where}.{i}"
        if block.type == "tool_result" and message.role == "user":
            made += _said(message.role, lines)
            lines.clear()
            made.append(_result(block, here, names))
        else:
            lines.append(_text(block, here))
    made += _said(message.role, lines)
    return made if message.content else [{"role": message.role, "content": ""}]


def _result(block: Block, where: str, names: dict[str, str]) -> dict[str, Any]:
    given = block.content or ""
    parts = [given] if isinstance(given, str) else [_text(b, f"{where}.content.{i}") for i, b in enumerate(given)]
    text = "\n".join(kept for part in parts if (kept := normalise.user_text(part)) or not part)
    of = _needed(block.tool_use_id, f"{where}.tool_use_id")
    made = {"role": "tool", "tool_call_id": of, "content": text or ("error" if block.is_error else "")}
    return made | ({"name": names[of]} if of in names else {})


def _text(block: Block, where: str) -> str:
    if block.type != "text":
        raise BadRequest(f"A block of the type {block.type!r} is not allowed here.", where=f"{where}.type")
    return _needed(block.text, f"{where}.text")


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise BadRequest("This field is required.", where=where)
    return value


def offer(asked: Conversation) -> Offer:
    """Returns the tools for the template and the rule for the engine. Raises BadRequest for a choice that cannot be."""
    given = {f"tools.{i}": _tool(tool, f"tools.{i}") for i, tool in enumerate(asked.tools or ())}
    choice = asked.tool_choice
    return tools.offer(given, _choice(choice), parallel=not (choice and choice.disable_parallel_tool_use))


def _tool(tool: GivenTool, where: str) -> Tool:
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise BadRequest("This field is required.", where=f"{where}.{name}")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return Tool(function, strict=bool(tool.strict))


def _choice(given: ToolChoice | None) -> tools.Choice:
    if given is None or given.type == "auto":
        return tools.Choice()
    if given.type == "tool":
        return tools.Choice(only=_needed(given.name, "tool_choice.name"), where="tool_choice.name")
    return tools.Choice("required" if given.type == "any" else "none")


def shape(asked: Conversation) -> Shape | None:
    """Returns the shape of the answer's text; None if any will do. Raises BadRequest if two are asked for."""
    formats = {"output_format": asked.output_format}
    formats["output_config.format"] = asked.output_config.format if asked.output_config else None
    return constraints.only_one(
        constraints.json_schema(given.schema_, f"{where}.schema") for where, given in formats.items() if given
    )


def template_options(asked: Conversation) -> dict[str, Any]:
    """Thinking is off unless it is asked for, as in Anthropic's API; templates that cannot switch it ignore this."""
    thinking = asked.thinking is not None and asked.thinking.type != "disabled"
    return {"enable_thinking": thinking} | for_the_template(asked.chat_template_kwargs)
