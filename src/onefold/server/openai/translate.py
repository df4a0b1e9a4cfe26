"""From OpenAI's messages and tools to those that a chat template takes. Pure; order and text are kept as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onefold.engine.constraint import CUSTOM_INPUT
from onefold.errors import BadRequest
from onefold.server import normalise, tools
from onefold.server.body import parse_arguments
from onefold.server.openai.schemas import Call, CalledFunction, ChatRequest, Choice, Message, Named, Part
from onefold.server.openai.schemas import Tool as GivenTool
from onefold.server.options import for_the_template
from onefold.server.tools import Offer, Tool


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
        name = "refusal" if part.type == "refusal" else "text"
        said: str | None = getattr(part, name)
        if said is None:
            raise BadRequest("This field is required.", where=f"{where}.{i}.{name}")
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


def offer(asked: ChatRequest) -> Offer:
    """Returns the tools for the template and the rule for the engine. Raises BadRequest for a choice that cannot be."""
    given = {f"tools.{i}": _tool(tool, f"tools.{i}") for i, tool in enumerate(asked.tools or ())}
    if asked.function_call != "none":
        functions = enumerate(asked.functions or ())
        given |= {f"functions.{i}": Tool(f.model_dump(), strict=bool(f.strict)) for i, f in functions}
    as_before = bool(asked.functions and not asked.tools)
    parallel = asked.parallel_tool_calls is not False and not as_before  # an answer has one function_call
    return tools.offer(given, _choice(asked), parallel=parallel, where="functions" if as_before else "tools")


def _tool(tool: GivenTool, where: str) -> Tool:
    if tool.type == "function" and tool.function is not None:
        return Tool(tool.function.model_dump(), strict=bool(tool.function.strict))
    if tool.type == "function" or tool.custom is None:
        raise BadRequest("This field is required.", where=f"{where}.{tool.type}")
    custom = tool.custom
    if custom.format is None or custom.format.type == "text":
        return tools.custom_tool(custom.name, custom.description)
    if custom.format.grammar is None:
        raise BadRequest("This field is required.", where=f"{where}.custom.format.grammar")
    grammar = custom.format.grammar
    return tools.custom_tool(custom.name, custom.description, grammar.syntax, grammar.definition)


def _choice(asked: ChatRequest) -> tools.Choice:
    """Raises BadRequest for a choice that is not whole."""
    given = asked.tool_choice
    if isinstance(given, str):
        return tools.Choice(given)
    if given is None:
        called = asked.function_call
        return tools.Choice(only=called.name, where="function_call") if isinstance(called, Named) else tools.Choice()
    inside = {"function": given.function, "custom": given.custom, "allowed_tools": given.allowed_tools}[given.type]
    if inside is None:
        raise BadRequest("This field is required.", where=f"tool_choice.{given.type}")
    if isinstance(inside, Named):
        return tools.Choice(only=inside.name)
    where = "tool_choice.allowed_tools.tools"
    names = [_allowed(one, f"{where}.{i}") for i, one in enumerate(inside.tools)]
    return tools.Choice(inside.mode, allowed=frozenset(names))


def _allowed(choice: Choice, where: str) -> str:
    if choice.type == "allowed_tools":
        raise BadRequest("This should be 'function' or 'custom'.", where=f"{where}.type")
    named = choice.function if choice.type == "function" else choice.custom
    if named is None:
        raise BadRequest("This field is required.", where=f"{where}.{choice.type}")
    return named.name


def template_options(asked: ChatRequest) -> dict[str, Any]:
    return effort_options(asked.reasoning_effort) | for_the_template(asked.chat_template_kwargs)


def effort_options(effort: str | None) -> dict[str, Any]:
    """reasoning_effort is for templates that know it; "none" is also said in the way that most of them understand."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
