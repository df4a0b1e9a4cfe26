"""OpenAI's requests: each field of theirs is honoured, ignored or refused. Others' fields are let pass; those
that give the answer a format are honoured too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from onefold.server.body import Fields, Kinds, Refusal
from onefold.server.options import LARGEST_TOKEN, TEXT_ONLY, MaxTokens, SamplingFields

MOST_CHOICES = 8

Token = Annotated[int, Field(ge=0, le=LARGEST_TOKEN)]


class Part(Fields):
    """A part of a message's content. Only text is accepted."""

    kinds = Kinds(frozenset({"text", "refusal"}), TEXT_ONLY.format("content of the type {}"))
    ignored = frozenset({"prompt_cache_breakpoint", "cache_control"})

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Fields):
    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustom(Fields):
    name: str
    input: str


class Call(Fields):
    """A call of a function or of a custom tool."""

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class Message(Fields):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "audio": Refusal("Audio is not supported: send the assistant's message as text.")
    }

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None
    """What `tool_calls` was before there were tools; its result has the role "function"."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """The same by another name, if it is text."""


class Function(Fields):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(Fields):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(Fields):
    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class Custom(Fields):
    """A tool that takes text."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    format: CustomFormat | None = None


class Tool(Fields):
    type: Literal["function", "custom"]
    function: Function | None = None
    custom: Custom | None = None


class Named(Fields):
    name: str


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: list[Choice]


class Choice(Fields):
    """The choice of a tool, or of several tools, one of which is to be used."""

    type: Literal["function", "custom", "allowed_tools"]
    function: Named | None = None
    custom: Named | None = None
    allowed_tools: AllowedTools | None = None


class StreamOptions(Fields):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


class JsonSchema(Fields):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    """None: any object."""
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    """As llama.cpp has it."""


class StructuredOutputs(Fields):
    """vLLM's; exactly one of the fields is set."""

    ignored = frozenset({"disable_any_whitespace", "disable_fallback", "whitespace_pattern"})
    refused: ClassVar[Mapping[str, Refusal]] = {
        "structural_tag": Refusal("Structural tags are not supported: offer tools, or give a grammar."),
        "disable_additional_properties": Refusal(
            'This is not supported: write "additionalProperties": false into the schema.', lambda value: value is False
        ),
    }

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Common(SamplingFields):
    ignored = frozenset({"user"})

    model: str | None = None
    max_tokens: MaxTokens | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    """What `structured_outputs` was before, as are the next three."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    """llama.cpp's; "" is none."""
    json_schema: dict[str, Any] | bool | None = None
    """llama.cpp's."""


class ChatRequest(Common):
    ignored = Common.ignored | {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
    refused: ClassVar[Mapping[str, Refusal]] = {
        "audio": Refusal("This model answers in text only: leave audio out."),
        "modalities": Refusal("This model answers in text only.", lambda value: value == ["text"]),
        "moderation": Refusal("Moderation is not supported: leave this out, or use another service for it."),
        "web_search_options": Refusal("Web search is not supported: give the model a tool, and run it yourself."),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    """What `tools` was before."""
    function_call: Literal["none", "auto"] | Named | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Common):
    prompt: str | list[str] | list[Token] | list[list[Token]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
