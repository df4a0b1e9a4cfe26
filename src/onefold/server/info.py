"""The endpoints that run no model: the model's name, health, metrics, and the cache."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from onefold.server import page_routes, registry
from onefold.server.openapi import errors
from onefold.server.service import Service


def routes(service: Service) -> APIRouter:
    """Plain functions where the engine is asked: FastAPI runs those on threads."""
    router = APIRouter()
    shape = registry.APIS[0].error_schema
    since = int(time.time())

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    def root(request: Request) -> Response:
        """Answers clients that check whether a server is there, and browsers with the page."""
        if service.settings.page and page_routes.wants_page(request):
            return page_routes.index(request)
        return JSONResponse({"server": "onefold"}, headers={"vary": "accept"})

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", summary="List the model", responses=errors(shape))
    async def models() -> dict[str, Any]:
        """Lists the one model, with the fields of OpenAI's and of Anthropic's API."""
        found = model_shape(service, since)
        return {"object": "list", "data": [found], "has_more": False, "first_id": found["id"], "last_id": found["id"]}

    @router.head("/v1/models/{name:path}", include_in_schema=False)
    @router.get("/v1/models/{name:path}", summary="Get the model by its name", responses=errors(shape, 404))
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model_shape(service, since)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Check the engine", responses={503: {"description": "The engine has stopped."}})
    async def health() -> JSONResponse:
        alive = service.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopped", "model": service.model}, 200 if alive else 503)

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", summary="Get metrics for Prometheus", response_class=Response, responses=errors(shape))
    def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @router.head("/v1/cache", include_in_schema=False)
    @router.get("/v1/cache", summary="Get the counts of the engine and the cache", responses=errors(shape))
    def cache() -> dict[str, Any]:
        """Returns the counts of the engine and its cache, and what the cache holds."""
        return dataclasses.asdict(service.engine.stats())

    @router.delete("/v1/cache", summary="Clear the cache", responses=errors(shape, 503))
    def clear() -> dict[str, int]:
        """Drops all KV that no running request uses, in memory and on disk, in every namespace."""
        memory, disk = service.engine.clear()
        return {"freed_bytes": memory, "freed_disk_bytes": disk}

    return router


def model_shape(service: Service, since: int) -> dict[str, Any]:
    """The model's own length by the name that most clients look for; by the others', what a prompt may have here."""
    name, engine = service.model, service.engine
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
    openai = {"id": name, "object": "model", "created": since, "owned_by": "onefold"}
    made = openai | {"type": "model", "display_name": name, "created_at": at}
    fits = min(engine.context_length or engine.most_tokens, engine.most_tokens)
    made |= {"max_model_len": fits, "max_input_tokens": fits}
    return made if engine.context_length is None else made | {"context_length": engine.context_length}
