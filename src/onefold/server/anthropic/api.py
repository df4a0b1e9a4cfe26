"""Anthropic's API of messages, for the registry."""

from __future__ import annotations

from onefold.server.anthropic import errors, messages
from onefold.server.anthropic.schemas import Conversation, MessagesRequest
from onefold.server.api import Api, Endpoint

ANTHROPIC = Api(
    name="anthropic",
    endpoints=(
        Endpoint("/v1/messages", MessagesRequest, "Answer a chat (Anthropic)", plan=messages.plan),
        Endpoint("/v1/messages/count_tokens", Conversation, "Count tokens (Anthropic)", answer=messages.count_tokens),
    ),
    error_shape=errors.shape,
    error_schema=errors.SCHEMA,
    prefixes=("/v1/messages",),
    header=b"anthropic-version",
)
