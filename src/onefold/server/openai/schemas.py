"""OpenAI's requests, as far as they are understood. What may be there and means nothing here is let pass."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from onefold.server.body import Fields
from onefold.server.options import LARGEST_TOKEN, MaxTokens, SamplingFields

MOST_CHOICES = 8

Token = Annotated[int, Field(ge=0, le=LARGEST_TOKEN)]


class Part(Fields):
    """Of a message's content. Only text is taken."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Fields):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(Fields):
    id: str | None = None
    function: CalledFunction


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """The same by another name, if it is text."""


class Function(Fields):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Fields):
    include_usage: bool | None = None


class ResponseFormat(Fields):
    type: str


class Common(SamplingFields):
    model: str | None = None
    max_tokens: MaxTokens | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Common):
    prompt: str | list[str] | list[Token] | list[list[Token]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
