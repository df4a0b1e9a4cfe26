"""OpenAI's API of chats and completions, for the registry."""

from __future__ import annotations

from onefold.server.api import Api, Endpoint
from onefold.server.openai import chat, completions, errors
from onefold.server.openai.schemas import ChatRequest, CompletionRequest

OPENAI = Api(
    name="openai",
    endpoints=(
        Endpoint("/v1/chat/completions", ChatRequest, "Answer a chat (OpenAI)", plan=chat.plan),
        Endpoint("/v1/completions", CompletionRequest, "Complete a text (OpenAI)", plan=completions.plan),
    ),
    error_shape=errors.shape,
    error_schema=errors.SCHEMA,
    prefixes=("/v1/chat", "/v1/completions"),
)
