"""Anthropic's requests: each field of theirs, of the beta API too, is honoured, ignored or refused. Others' fields are
let pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from onefold.server.body import Fields, Kinds, Refusal
from onefold.server.options import TEXT_ONLY, MaxTokens, SamplingFields


def _empty(value: Any) -> bool:
    return not value


class Block(Fields):
    """A block of a message's content. Which fields are needed depends on the type. redacted_thinking cannot be
    read here, and fallback only says that another model continued."""

    kinds = Kinds(
        frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "fallback"}),
        TEXT_ONLY.format("a block of the type {}"),
    )
    ignored = frozenset(
        {"cache_control", "citations", "signature", "data", "caller", "toolset_name", "from", "to", "trigger"}
    )

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class Message(Fields):
    ignored = frozenset({"output_config"})

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None
    """Only a system message may be without, if it is about something else."""
    clear_at: Literal["next_user_message", "never"] | None = None
    """When the model is to see a system message no more."""


class Tool(Fields):
    kinds = Kinds(
        frozenset({"custom"}),
        "Tools of the type {} are not supported: give a tool with a name and an input_schema, and run it yourself.",
    )
    ignored = frozenset({"cache_control", "defer_loading", "eager_input_streaming", "input_examples"})
    refused: ClassVar[Mapping[str, Refusal]] = {
        "allowed_callers": Refusal(
            "Only the model can call tools here: include 'direct' in the callers, or leave this out.",
            lambda value: isinstance(value, list) and "direct" in value,
        )
    }

    name: Annotated[str, Field(min_length=1)] | None = None
    """Needed; tools of Anthropic's own, which are refused, may have none."""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    ignored = frozenset({"budget_tokens", "display", "block_binding"})

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]


class OutputConfig(Fields):
    ignored = frozenset({"effort", "task_budget"})

    format: OutputFormat | None = None


class Conversation(Fields):
    """What is rendered, and what count_tokens takes."""

    ignored = frozenset(
        {
            "betas",  # it is sent as a header
            "billing_policy",
            "cache_control",
            "context_management",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )
    refused: ClassVar[Mapping[str, Refusal]] = {
        "thread": Refusal(
            "This server does not keep conversations: send all messages in each request, and leave thread out.",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        ),
        "compaction": Refusal("Compaction is not supported: ask the model for a summary in a message."),
        "container": Refusal("Containers and skills are not supported: leave this out."),
        **dict.fromkeys(
            ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            Refusal("Messages have their format in output_config.format: put it there."),
        ),
        "mcp_servers": Refusal("MCP servers are not supported: give the model their tools, and run them.", _empty),
    }

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """What `output_config.format` was before."""
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(Conversation, SamplingFields):
    max_tokens: MaxTokens
    stop_sequences: list[str] | None = None
    stream: bool | None = None
