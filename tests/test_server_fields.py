"""Every field of a request of the installed `openai` and `anthropic` packages is honoured, ignored or refused: the
schemas of the server are compared with the packages' own types, however deep."""

from __future__ import annotations

import importlib
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import typing_extensions
from pydantic import BaseModel

from onefold.errors import BadRequest
from onefold.server.anthropic.schemas import Conversation, MessagesRequest
from onefold.server.body import Fields, parse
from onefold.server.openai.schemas import ChatRequest, CompletionRequest
from onefold.server.responses.schemas import InputTokensRequest, ResponsesRequest

DOCS = (Path(__file__).resolve().parents[1] / "docs" / "server.md").read_text()
USER = {"role": "user", "content": "hi"}
LEAST: dict[type[Fields], dict[str, Any]] = {
    ChatRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "so"},
    MessagesRequest: {"messages": [USER], "max_tokens": 9},
    Conversation: {"messages": [USER]},
    ResponsesRequest: {"input": "hi"},
    InputTokensRequest: {"input": [USER]},
}
ROOTS = {
    "chat": ("openai.types.chat.completion_create_params.CompletionCreateParams", ChatRequest),
    "completions": ("openai.types.completion_create_params.CompletionCreateParams", CompletionRequest),
    "responses": ("openai.types.responses.response_create_params.ResponseCreateParams", ResponsesRequest),
    "input_tokens": ("openai.types.responses.input_token_count_params.InputTokenCountParams", InputTokensRequest),
    "messages": ("anthropic.types.message_create_params.MessageCreateParams", MessagesRequest),
    "beta messages": ("anthropic.types.beta.message_create_params.MessageCreateParams", MessagesRequest),
    "count_tokens": ("anthropic.types.message_count_tokens_params.MessageCountTokensParams", Conversation),
    "beta count_tokens": ("anthropic.types.beta.message_count_tokens_params.MessageCountTokensParams", Conversation),
}


def theirs_of(api: str) -> Any:
    """The package's own type of a request. The packages are large, so they are imported when they are asked for."""
    module, _, name = ROOTS[api][0].rpartition(".")
    return getattr(importlib.import_module(module), name)


def inside(annotation: Any) -> Iterator[type]:
    """The classes that an annotation is made of, out of its unions, lists and marks."""
    origin = get_origin(annotation)
    if origin is Literal:
        return
    if origin is None:
        if isinstance(annotation, type):
            yield annotation
        return
    if origin in (dict, typing.Mapping):
        return
    arguments = get_args(annotation)
    marked = origin in (typing.Annotated, typing_extensions.Required, typing_extensions.NotRequired)
    for argument in arguments[:1] if marked else arguments:
        yield from inside(argument)


def literals(annotation: Any) -> set[Any]:
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*(literals(a) for a in get_args(annotation)))
    return set()


def taken(schema: type[Fields], theirs: dict[str, Any]) -> bool:
    """Whether an object of theirs can get by the schema at all: by its type and by its role."""
    for tag in ("type", "role"):
        values = literals(theirs.get(tag))
        if tag == "type" and schema.kinds is not None:
            mine = set(schema.kinds.taken)
        else:
            mine = literals(schema.model_fields[tag].annotation) if tag in schema.model_fields else set()
        if values and mine and not values & mine:
            return False
    return True


def unknown(theirs: Any, schema: type[Fields], path: str = "", seen: frozenset[Any] = frozenset()) -> Iterator[str]:
    """Where the package has a field that the schema does not know."""
    for their in inside(theirs):
        if not typing_extensions.is_typeddict(their) or (their, schema) in seen:
            continue
        hints = typing_extensions.get_type_hints(their)
        if not taken(schema, hints):
            continue
        honoured = {field.alias or name: field for name, field in schema.model_fields.items()}
        for name, hint in hints.items():
            if name in schema.ignored or name in schema.refused:
                assert name not in honoured, f"{schema.__name__}.{name} is honoured as well"
            elif name not in honoured:
                yield f"{path}.{name} ({their.__name__})"
            else:
                for own in inside(honoured[name].annotation):
                    if issubclass(own, BaseModel):
                        assert issubclass(own, Fields)
                        yield from unknown(hint, own, f"{path}.{name}", seen | {(their, schema)})


def schemas(root: type[Fields]) -> set[type[Fields]]:
    found, todo = set[type[Fields]](), [root]
    while todo:
        at = todo.pop()
        found.add(at)
        more = [own for field in at.model_fields.values() for own in inside(field.annotation)]
        todo += [own for own in more if issubclass(own, Fields) and own not in found]
    return found


ALL = {schema for root in LEAST for schema in schemas(root)}


@pytest.mark.parametrize("api", ROOTS)
def test_every_field_of_the_installed_types_is_known(api):
    assert not list(unknown(theirs_of(api), ROOTS[api][1]))


def test_the_comparison_goes_deep_and_finds_what_is_missing():
    class Part(Fields):
        type: str

    class Message(Fields):
        role: str
        content: str | list[Part]

    class Request(Fields):
        messages: list[Message]

    found = set(unknown(theirs_of("beta messages"), Request))
    assert ".thread (MessageCreateParamsNonStreaming)" in found
    assert ".messages.clear_at (BetaSystemMessageParam)" in found
    assert ".messages.content.citations (BetaTextBlockParam)" in found


def test_the_comparison_goes_into_items_and_tools_that_their_type_tells_apart():
    names = {schema.__name__ for schema in schemas(ResponsesRequest)}
    assert {"MessageItem", "Part", "ReasoningItem", "CustomCallOutput", "FunctionTool", "CustomFormat"} <= names

    class Call(Fields):
        type: Literal["function_call"]

    class Request(Fields):
        input: str | list[Annotated[Annotated[Call, "(call)"] | Annotated[dict[str, Any], "(other)"], "by type"]]

    found = set(unknown(theirs_of("responses"), Request))
    assert ".input.caller (ResponseFunctionToolCallParam)" in found
    assert ".input.call_id (ComputerCallOutput)" not in found


def test_the_documentation_names_all_that_is_ignored_and_refused():
    names = {name for schema in ALL for name in {*schema.ignored, *schema.refused}}
    assert not sorted(name for name in names - {"from", "to", "trigger"} if f"`{name}`" not in DOCS)


@pytest.mark.parametrize("root", LEAST, ids=lambda root: root.__name__)
def test_what_is_refused_is_refused_by_name_and_null_asks_for_nothing(root):
    for name in root.refused:
        with pytest.raises(BadRequest) as caught:
            parse(json.dumps({**LEAST[root], name: {"type": "create"}}).encode(), root)
        assert caught.value.where == name and str(caught.value).endswith(".")
        parse(json.dumps({**LEAST[root], name: None}).encode(), root)


@pytest.mark.parametrize(
    "root, fields, where",
    [
        (MessagesRequest, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (MessagesRequest, {"output_format": {"type": "grammar", "schema": {}}}, "output_format.type"),
        (MessagesRequest, {"tools": [{"name": "f", "allowed_callers": ["code"]}]}, "tools.0.allowed_callers"),
        (MessagesRequest, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type"),
        (MessagesRequest, {"tools": [{"type": "browser_toolset_20260801"}]}, "tools.0.type"),
        (Conversation, {"system": [{"type": "image"}]}, "system.0.type"),
        (ChatRequest, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages.0.audio"),
        (ChatRequest, {"modalities": ["text", "audio"]}, "modalities"),
        (ResponsesRequest, {"background": True}, "background"),
        (ResponsesRequest, {"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        (ResponsesRequest, {"input": [{**USER, "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        (
            InputTokensRequest,
            {"tools": [{"type": "function", "name": "f", "allowed_callers": ["programmatic"]}]},
            "tools.0.allowed_callers",
        ),
        (ChatRequest, {"web_search_options": {}}, "web_search_options"),
        (ChatRequest, {"response_format": {"type": "xml"}}, "response_format.type"),
        (ChatRequest, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
)
def test_what_is_further_in_is_refused_by_its_path(root, fields, where):
    with pytest.raises(BadRequest) as caught:
        parse(json.dumps({**LEAST[root], **fields}).encode(), root)
    assert caught.value.where == where


def test_what_asks_for_nothing_passes():
    for fields in ({"mcp_servers": []}, {"output_config": {"effort": "low"}}, {"output_config": {"format": None}}):
        parse(json.dumps({**LEAST[MessagesRequest], **fields}).encode(), MessagesRequest)
    tool = {"name": "f", "input_schema": {}, "allowed_callers": ["direct", "code_execution_20250825"]}
    parse(json.dumps({**LEAST[MessagesRequest], "tools": [tool]}).encode(), MessagesRequest)
    parse(json.dumps({**LEAST[ChatRequest], "modalities": ["text"]}).encode(), ChatRequest)
