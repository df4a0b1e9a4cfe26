"""The OpenAPI document. Bodies are parsed by `body.py`, not by FastAPI, so their schemas are put in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"

EVENT = {
    "type": "object",
    "description": "One of the events of a stream.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
STATUSES = {
    400: "The request is invalid; the message names the field that is wrong.",
    401: "An API key is required.",
    403: "The origin or the host is not allowed.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    500: "The server failed.",
    503: "The engine is busy or has stopped; Retry-After says when to try again.",
}


def described(schema: type[BaseModel], *, streams: bool) -> dict[str, Any]:
    """Returns the description of a route, for FastAPI's `openapi_extra`."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": EVENT}
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": REF.format(model=schema.__name__)}}}}
    return {"requestBody": body, "responses": {"200": {"description": "The answer.", "content": content}}}


def errors(shape: Mapping[str, Any], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the error responses of a route, for FastAPI's `responses`."""
    content = {"application/json": {"schema": dict(shape)}}
    always = (401, 403, 408, 413, 500)
    return {status: {"description": STATUSES[status], "content": content} for status in sorted({*always, *statuses})}


def document(app: FastAPI, schemas: Sequence[type[BaseModel]]) -> Callable[[], dict[str, Any]]:
    """Returns the OpenAPI document, for `app.openapi`."""
    made: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not made:
            made.update(get_openapi(title=app.title, version=app.version, routes=app.routes))
            _, found = models_json_schema([(schema, "validation") for schema in schemas], ref_template=REF)
            made["components"] = {"schemas": found["$defs"]}
            for operations in made["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's own shape, which nothing here has
        return made

    return openapi
