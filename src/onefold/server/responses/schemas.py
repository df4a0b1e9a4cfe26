"""The requests of OpenAI's Responses API: each field of theirs is honoured, ignored or refused. Others' fields are let
pass.

Items and tools are told apart by their `type`. One of a type that is not listed here stays a plain object: `translate`
refuses such an item, and leaves out such a tool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from onefold.server.body import Fields, Kinds, Refusal
from onefold.server.openai.schemas import FormatFields
from onefold.server.openai.schemas import Part as ChatPart
from onefold.server.options import TEXT_ONLY, MaxTokens, SamplingFields

STATELESS = "This server keeps no conversations: leave this out, and send the whole conversation in input."
OTHER = "(of another type)"

Named = Annotated[str, Field(min_length=1)]
JsonSchema = Annotated[dict[str, Any] | bool | None, Field(alias="schema")]


class Part(ChatPart):
    """A part of an item's content. Only text is accepted."""

    kinds = Kinds(
        frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"}),
        TEXT_ONLY.format("content of the type {}"),
    )
    ignored = ChatPart.ignored | {"annotations", "logprobs"}


class MessageItem(Fields):
    ignored = frozenset({"id", "status", "phase"})

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class ReasoningItem(Fields):
    ignored = frozenset({"id", "status", "encrypted_content"})

    type: Literal["reasoning"]
    summary: list[Part] | None = None
    content: list[Part] | None = None


class FunctionCall(Fields):
    ignored = frozenset({"id", "status", "caller", "namespace", "async"})

    type: Literal["function_call"]
    call_id: Named
    name: Named
    arguments: str


class FunctionCallOutput(Fields):
    ignored = frozenset({"id", "status", "caller", "namespace"})

    type: Literal["function_call_output"]
    call_id: Named | None = None
    """Needed, unless there is a name."""
    name: Named | None = None
    output: str | list[Part]


class CustomCall(Fields):
    ignored = frozenset({"id", "status", "caller", "namespace", "async"})

    type: Literal["custom_tool_call"]
    call_id: Named
    name: Named
    input: str


class CustomCallOutput(Fields):
    ignored = frozenset({"id", "status", "caller"})

    type: Literal["custom_tool_call_output"]
    call_id: Named
    name: Named | None = None
    output: str | list[Part]


class LocalShellCall(Fields):
    """Needs one of the two ids, as its output does."""

    ignored = frozenset({"status"})

    type: Literal["local_shell_call"]
    id: Named | None = None
    call_id: Named | None = None
    action: dict[str, Any]


class LocalShellCallOutput(Fields):
    ignored = frozenset({"status"})

    type: Literal["local_shell_call_output"]
    id: Named | None = None
    call_id: Named | None = None
    output: str | list[Part]


class FunctionTool(Fields):
    ignored = frozenset({"async", "defer_loading", "output_schema"})
    refused: ClassVar[Mapping[str, Refusal]] = {
        "allowed_callers": Refusal(
            "Only the model can call tools here: include 'direct' in the callers, or leave this out.",
            lambda value: isinstance(value, list) and "direct" in value,
        )
    }

    type: Literal["function"]
    name: Named
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Fields):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Fields):
    """A tool that takes text."""

    ignored = frozenset({"async", "defer_loading"})
    refused: ClassVar[Mapping[str, Refusal]] = FunctionTool.refused

    type: Literal["custom"]
    name: Named
    description: str | None = None
    format: CustomFormat | None = None


def _tagged(*kinds: str) -> Callable[[Any], str]:
    """Returns what tells objects of these types apart. Tags are in parentheses, as no field of a body is, so that no
    error names one. An object with a role and no type is a message."""

    def tag(given: Any) -> str:
        found = given.get("type") if isinstance(given, dict) else None
        if found is None and isinstance(given, dict) and "role" in given:
            found = "message"
        return f"({found})" if isinstance(found, str) and found in kinds else OTHER

    return tag


Item = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")]
    | Annotated[FunctionCall, Tag("(function_call)")]
    | Annotated[FunctionCallOutput, Tag("(function_call_output)")]
    | Annotated[CustomCall, Tag("(custom_tool_call)")]
    | Annotated[CustomCallOutput, Tag("(custom_tool_call_output)")]
    | Annotated[LocalShellCall, Tag("(local_shell_call)")]
    | Annotated[LocalShellCallOutput, Tag("(local_shell_call_output)")]
    | Annotated[dict[str, Any], Tag(OTHER)],
    Discriminator(
        _tagged(
            *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
            *("custom_tool_call_output", "local_shell_call", "local_shell_call_output"),
        )
    ),
]
Tool = Annotated[
    Annotated[FunctionTool, Tag("(function)")]
    | Annotated[CustomTool, Tag("(custom)")]
    | Annotated[dict[str, Any], Tag(OTHER)],
    Discriminator(_tagged("function", "custom")),
]


class AllowedTool(Fields):
    type: str
    name: str | None = None
    """Tools of other types, which are left out, may have none."""


class ToolChoice(Fields):
    """The choice of a tool, or of several tools, one of which is to be used."""

    kinds = Kinds(
        frozenset({"function", "custom", "allowed_tools"}),
        "A tool of the type {} cannot be chosen: this server only runs the model. Choose a function or a custom tool.",
    )

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class Reasoning(Fields):
    ignored = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: str | None = None


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonSchema = None
    """Needed for the type json_schema."""
    strict: bool | None = None


class TextConfig(Fields):
    ignored = frozenset({"verbosity"})

    format: TextFormat | None = None


class InputTokensRequest(Fields):
    """What is rendered, and what input_tokens takes."""

    ignored = frozenset({"personality"})
    refused: ClassVar[Mapping[str, Refusal]] = {
        "previous_response_id": Refusal(STATELESS),
        "conversation": Refusal(STATELESS),
    }

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Given back; a prompt that is too long is an error."""
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(InputTokensRequest, SamplingFields, FormatFields):
    ignored = frozenset(
        {
            "access_programs",
            "client_metadata",
            "context_management",
            "image",
            "prompt_cache_options",
            "prompt_cache_retention",
            "service_tier",
            "store",
            "stream_options",
        }
    )
    refused: ClassVar[Mapping[str, Refusal]] = {
        **InputTokensRequest.refused,
        "response_format": Refusal("Responses have their format in text.format: put it there."),
        "background": Refusal(STATELESS, lambda value: value is False),
        "prompt": Refusal("This server keeps no prompts: send the prompt's text in instructions and input."),
        "moderation": Refusal("Moderation is not supported: leave this out, or use another service for it."),
    }

    max_output_tokens: MaxTokens | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    """Given back, as are the next four."""
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
