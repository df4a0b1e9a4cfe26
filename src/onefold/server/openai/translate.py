"""From OpenAI's messages and tools to those that a chat template takes. Pure; order and text are kept as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onefold.errors import BadRequest
from onefold.server import normalise
from onefold.server.body import Fields, parse_arguments
from onefold.server.openai.schemas import Call, CalledFunction, ChatRequest, Choice, Message, Named, Part, Tool
from onefold.server.options import for_the_template

CUSTOM_INPUT = "input"
"""The argument that a custom tool's text is."""


def messages(given: Sequence[Message]) -> list[dict[str, Any]]:
    """Content is text, arguments of calls are objects, and an answer of a tool says which tool it is of."""
    names: dict[str, str] = {}
    made = []
    for i, message in enumerate(given):
        said = _message(message, names, f"messages.{i}")
        if said["role"] == "system" and message.content and not said["content"]:
            continue  # a client's countdown was all that it said
        made.append(said)
        calls = said.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    return made


def _message(message: Message, names: Mapping[str, str], where: str) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    clean = normalise.user_text if role in ("user", "tool") else str
    content = text(message.content, f"{where}.content", clean)
    if content is None and role in ("system", "user"):
        raise BadRequest(f"A message of the role {message.role} needs content.", where=f"{where}.content")
    if message.role == "function" and not message.name:
        raise BadRequest("A message of the role function needs the function's name.", where=f"{where}.name")
    made: dict[str, Any] = {"role": role, "content": content or ""}
    if role == "system":
        made["content"] = normalise.system_text(made["content"])
    if role == "assistant":
        made |= _answer(message, made["content"], where)
    if message.name:
        made["name"] = message.name
    if role == "tool" and message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
        if not message.name and message.tool_call_id in names:
            made["name"] = names[message.tool_call_id]
    return made


def _answer(message: Message, content: str, where: str) -> dict[str, Any]:
    """Returns an answer's fields other than its role. A refusal becomes text."""
    made: dict[str, Any] = {"content": "\n".join(part for part in (content, message.refusal) if part)}
    thought = message.reasoning_content or message.reasoning
    if isinstance(thought, str) and thought:
        made["reasoning_content"] = thought
    calls = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        calls.append({"type": "function", "function": _called(message.function_call)})
    return made | ({"tool_calls": calls} if calls else {})


def text(content: str | Sequence[Part] | None, where: str, clean: Callable[[str], str] = str) -> str | None:
    """Parts become lines, each as `clean` leaves it."""
    if content is None or isinstance(content, str):
        return content and clean(content)
    lines = []
    for i, part in enumerate(content):
        said = part.refusal if part.type == "refusal" else part.text
        if said is None:
            raise BadRequest("This field is required.", where=f"{where}.{i}.{part.type}")
        if (kept := clean(said)) or not said:
            lines.append(kept)
    return "\n".join(lines)


def _call(call: Call, where: str) -> dict[str, Any]:
    """A custom tool's input is the one argument of the function that it is offered as."""
    made: dict[str, Any] = {"id": call.id} if call.id else {}
    if call.custom is not None and call.type != "function":
        function = {"name": call.custom.name, "arguments": {CUSTOM_INPUT: call.custom.input}}
    elif call.function is not None:
        function = _called(call.function)
    else:
        raise BadRequest("This field is required.", where=f"{where}.{call.type or 'function'}")
    return made | {"type": "function", "function": function}


def _called(function: CalledFunction) -> dict[str, Any]:
    return {"name": function.name, "arguments": parse_arguments(function.arguments)}


def tools(asked: ChatRequest) -> list[dict[str, Any]] | None:
    """Functions, for the template; None without any, and with a choice of "none"."""
    offered = {f"tools.{i}": tool for i, tool in enumerate(asked.tools or ())}
    made = {where: _tool(tool, where) for where, tool in offered.items()}
    if asked.function_call != "none":
        functions = [{"type": "function", "function": f.model_dump()} for f in asked.functions or ()]
        made |= {f"functions.{i}": function for i, function in enumerate(functions)}
    if not made or asked.tool_choice == "none":
        return None
    names = _chosen(asked)
    there = {tool["function"]["name"] for tool in made.values()}
    if names is not None and (missing := names - there):
        where = "tool_choice" if isinstance(asked.tool_choice, Fields) else "function_call"
        raise BadRequest(f"This names a tool that is not in the list of tools: {min(missing)[:40]!r}.", where=where)
    if isinstance(asked.tool_choice, Choice) and asked.tool_choice.allowed_tools is not None and names is not None:
        made = {where: tool for where, tool in made.items() if tool["function"]["name"] in names}
    return [normalise.tool(tool) for tool in made.values()] or None


def custom_names(asked: ChatRequest) -> frozenset[str]:
    """The tools whose calls are answered with text instead of arguments."""
    return frozenset(tool.custom.name for tool in asked.tools or () if tool.type == "custom" and tool.custom)


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    """A custom tool is offered as a function of one string."""
    if tool.type == "function" and tool.function is not None:
        return {"type": "function", "function": tool.function.model_dump()}
    if tool.type == "function" or tool.custom is None:
        raise BadRequest("This field is required.", where=f"{where}.{tool.type}")
    custom, told = tool.custom, "The whole input of the tool, as plain text."
    if custom.format is not None and custom.format.grammar is not None:
        grammar = custom.format.grammar
        told += f" It follows this grammar ({grammar.syntax}):\n{grammar.definition}"
    schema = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", "description": told}},
        "required": [CUSTOM_INPUT],
    }
    function = {"name": custom.name, "description": custom.description, "parameters": schema}
    return {"type": "function", "function": function}


def _chosen(asked: ChatRequest) -> set[str] | None:
    """The tools that the choice names; None if it names none. Raises BadRequest for one that is not whole."""
    if isinstance(asked.tool_choice, Choice):
        return _names(asked.tool_choice, "tool_choice")
    return {asked.function_call.name} if isinstance(asked.function_call, Named) else None


def _names(choice: Choice, where: str) -> set[str]:
    inside = {"function": choice.function, "custom": choice.custom, "allowed_tools": choice.allowed_tools}[choice.type]
    if inside is None:
        raise BadRequest("This field is required.", where=f"{where}.{choice.type}")
    if isinstance(inside, Named):
        return {inside.name}
    found: set[str] = set()
    for i, one in enumerate(inside.tools):
        here = f"{where}.allowed_tools.tools.{i}"
        if one.type == "allowed_tools":
            raise BadRequest("This should be 'function' or 'custom'.", where=f"{here}.type")
        found |= _names(one, here)
    return found


def template_options(asked: ChatRequest) -> dict[str, Any]:
    """reasoning_effort is for templates that know it; "none" is also said in the way that most of them understand."""
    options: dict[str, Any] = {}
    if asked.reasoning_effort is not None:
        options["reasoning_effort"] = asked.reasoning_effort
        if asked.reasoning_effort == "none":
            options["enable_thinking"] = False
    return options | for_the_template(asked.chat_template_kwargs)
