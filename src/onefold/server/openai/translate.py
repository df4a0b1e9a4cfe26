"""From OpenAI's messages and tools to those that a chat template takes. Pure; order and text are kept as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onefold.errors import BadRequest
from onefold.server import normalise
from onefold.server.body import Fields, parse_arguments
from onefold.server.openai.schemas import Call, ChatRequest, Message, Part
from onefold.server.options import TEXT_ONLY, for_the_template


def messages(given: Sequence[Message]) -> list[dict[str, Any]]:
    """Content is text, arguments of calls are objects, and an answer of a tool says which tool it is of."""
    names: dict[str, str] = {}
    made = []
    for i, message in enumerate(given):
        made.append(_message(message, names, f"messages.{i}"))
        names |= {call.id: call.function.name for call in message.tool_calls or () if call.id}
    return made


def _message(message: Message, names: Mapping[str, str], where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = text(message.content, f"{where}.content")
    if content is None and role in ("system", "user"):
        raise BadRequest(f"A message of the role {message.role} needs content.", where=f"{where}.content")
    made: dict[str, Any] = {"role": role, "content": content or ""}
    if role == "system":
        made["content"] = normalise.without_billing(made["content"])
    if role == "assistant":
        thought = message.reasoning_content or message.reasoning
        if isinstance(thought, str) and thought:
            made["reasoning_content"] = thought
        if message.tool_calls:
            made["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.name:
        made["name"] = message.name
    if role == "tool" and message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
        if not message.name and message.tool_call_id in names:
            made["name"] = names[message.tool_call_id]
    return made


def text(content: str | Sequence[Part] | None, where: str) -> str | None:
    """Parts become lines."""
    if content is None or isinstance(content, str):
        return content
    lines = []
    for i, part in enumerate(content):
        if part.type == "text" and part.text is not None:
            lines.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            lines.append(part.refusal)
        elif part.type in ("text", "refusal"):
            raise BadRequest("This field is required.", where=f"{where}.{i}.{part.type}")
        else:
            raise BadRequest(TEXT_ONLY.format(f"content of the type {part.type[:40]!r}"), where=f"{where}.{i}.type")
    return "\n".join(lines)


def _call(call: Call) -> dict[str, Any]:
    made: dict[str, Any] = {"id": call.id} if call.id else {}
    function = {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)}
    return made | {"type": "function", "function": function}


def tools(asked: ChatRequest) -> list[dict[str, Any]] | None:
    """None without tools, and with a tool_choice of "none"."""
    if not asked.tools or asked.tool_choice == "none":
        return None
    offered = [tool.function.name for tool in asked.tools]
    if isinstance(asked.tool_choice, Fields) and asked.tool_choice.function.name not in offered:
        raise BadRequest("tool_choice names a tool that is not among the tools.", where="tool_choice")
    return [normalise.tool(tool.model_dump()) for tool in asked.tools]


def template_options(asked: ChatRequest) -> dict[str, Any]:
    """reasoning_effort is for templates that know it; "none" is also said in the way that most of them understand."""
    options: dict[str, Any] = {}
    if asked.reasoning_effort is not None:
        options["reasoning_effort"] = asked.reasoning_effort
        if asked.reasoning_effort == "none":
            options["enable_thinking"] = False
    return options | for_the_template(asked.chat_template_kwargs)
