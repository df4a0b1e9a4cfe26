"""OpenAI's Responses API, for the registry."""

from __future__ import annotations

from onefold.server.api import Api, Endpoint
from onefold.server.openai.errors import SCHEMA
from onefold.server.responses import create, errors
from onefold.server.responses.schemas import InputTokensRequest, ResponsesRequest

RESPONSES = Api(
    name="responses",
    endpoints=(
        Endpoint("/v1/responses", ResponsesRequest, plan=create.plan),
        Endpoint("/v1/responses/input_tokens", InputTokensRequest, answer=create.input_tokens),
    ),
    error_shape=errors.shape,
    error_schema=SCHEMA,
    prefixes=("/v1/responses",),
    not_found="This server keeps no responses: there is nothing to get, cancel or delete after an answer. "
    "Send the whole conversation to POST /v1/responses.",
)
