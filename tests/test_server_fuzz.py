"""Anything that the OpenAPI document allows, and much that it does not: never a 500, never an undocumented answer.

The engine is the scripted one: what is fuzzed is the way from bytes to a request and back.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from effort import effort
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from scripted_engine import ScriptedEngine
from starlette.testclient import TestClient

from onefold.server.app import make_app
from onefold.server.settings import Settings

RESPONSES = ("ResponsesRequest", "InputTokensRequest")
PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/responses", "/v1/responses/input_tokens"),
)
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance, response_headers_conformance]

app = make_app(ScriptedEngine(), Settings(allowed_hosts=("*",)))  # type: ignore[arg-type]
schema = schemathesis.openapi.from_asgi("/openapi.json", app)
schema.config.generation.update(modes=[schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])


@schema.parametrize()
@settings(max_examples=effort(5, 20), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_whatever_is_sent(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(app)


def test_the_document_has_the_schemas_that_it_refers_to(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    text = str(document)
    for name in ("ChatRequest", "CompletionRequest", "MessagesRequest", "Conversation", *RESPONSES):
        assert f"#/components/schemas/{name}" in text and name in document["components"]["schemas"]
    assert "HTTPValidationError" not in text and "422" not in text
    for path in PATHS:
        assert "requestBody" in document["paths"][path]["post"]


OPERATIONS = {
    "_v1_chat_completions_v1_chat_completions_post": "Answer a chat (OpenAI)",
    "_v1_completions_v1_completions_post": "Complete a text (OpenAI)",
    "_v1_responses_v1_responses_post": "Answer a chat (Responses)",
    "_v1_responses_input_tokens_v1_responses_input_tokens_post": "Count tokens (OpenAI)",
    "_v1_messages_v1_messages_post": "Answer a chat (Anthropic)",
    "_v1_messages_count_tokens_v1_messages_count_tokens_post": "Count tokens (Anthropic)",
    "models_v1_models_get": "List the model",
    "model_v1_models__name__get": "Get the model by its name",
    "health_health_get": "Check the engine",
    "metrics_metrics_get": "Get metrics for Prometheus",
    "cache_v1_cache_get": "Get the counts of the engine and the cache",
    "clear_v1_cache_delete": "Clear the cache",
}


def test_every_operation_has_its_id_and_a_summary_that_a_person_wrote(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {op["operationId"]: op["summary"] for ops in paths.values() for op in ops.values()} == OPERATIONS
