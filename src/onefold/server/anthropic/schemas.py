"""Anthropic's requests, as far as they are understood. What may be there and means nothing here is let pass."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from onefold.server.body import Fields
from onefold.server.options import MaxTokens, SamplingFields


class Block(Fields):
    """Of a message's content: text, thinking, redacted_thinking, tool_use or tool_result. Which fields are needed
    depends on the type."""

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
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Fields):
    name: Annotated[str, Field(min_length=1)]
    type: str | None = None
    """"custom", if anything: others are tools that Anthropic's own servers run."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]


class Conversation(Fields):
    """What is rendered, and what count_tokens takes."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(Conversation, SamplingFields):
    max_tokens: MaxTokens
    stop_sequences: list[str] | None = None
    stream: bool | None = None
