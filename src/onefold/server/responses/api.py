"""OpenAI's Responses API, for the registry."""

from __future__ import annotations

from onefold.server.api import Api, Endpoint
from onefold.server.openai.errors import SCHEMA
from onefold.server.responses import create, errors
from onefold.server.responses.schemas import InputTokensRequest, ResponsesRequest

RESPONSES = Api(
    name="responses",
    endpoints=(
        Endpoint("/v1/responses", ResponsesRequest, "Answer a chat (Responses)", plan=create.plan),
        Endpoint("/v1/responses/input_tokens", InputTokensRequest, "Count tokens (OpenAI)", answer=create.input_tokens),
    ),
    error_shape=errors.shape,
    error_schema=SCHEMA,
    prefixes=("/v1/responses",),
)
