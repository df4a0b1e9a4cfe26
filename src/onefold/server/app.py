"""The server: `make_app(engine, settings)` gives an ASGI application for one engine, which it does not stop.

    Paths ── Accounting ── Hosts ── CORS ── Origins ── Keys ── Listing ── BodyLimit ── HangUp ── routes

The page's data passes `PageData` in place of CORS. Whatever goes wrong in there leaves in the shape of the API that
the client speaks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp

from onefold import __version__
from onefold.engine.engine import Engine
from onefold.errors import OnefoldError
from onefold.page.page import Page
from onefold.page.viewers import Viewers
from onefold.server import info, page_routes, registry
from onefold.server.accounting import Accounting, Listing
from onefold.server.api import Endpoint
from onefold.server.errors import BROKEN, Problem, problem_of
from onefold.server.hang_up import HangUp
from onefold.server.hosts import Hosts, Names, is_loopback
from onefold.server.limits import BodyLimit, Keys, Origins
from onefold.server.openapi import described, document, errors
from onefold.server.page_data import PageData
from onefold.server.paths import Paths
from onefold.server.reply import Reply
from onefold.server.respond import respond
from onefold.server.service import Service
from onefold.server.settings import Settings

METHODS = ("DELETE", "GET", "HEAD", "POST")
"""Those of all routes."""


def make_app(
    engine: Engine,
    settings: Settings = Settings(),  # noqa: B008  frozen
    ending: threading.Event | None = None,
) -> ASGIApp:
    """`ending` is set when the server is about to end, for those who only look."""
    service = Service(engine, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="Onefold", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.include_router(generation(service))
    app.include_router(info.routes(service))
    if settings.page:
        app.include_router(_page(service, ending or threading.Event()))
    schemas = [endpoint.schema for api in registry.APIS for endpoint in api.endpoints]
    app.openapi = document(app, schemas)  # type: ignore[method-assign]
    app.add_exception_handler(OnefoldError, _ours)
    app.add_exception_handler(HTTPException, _starlettes)
    app.add_exception_handler(Exception, _bug)

    wrapped: ASGIApp = HangUp(app, settings.send_timeout_seconds)
    wrapped = BodyLimit(wrapped, settings.body_limit, settings.send_timeout_seconds)
    wrapped = Keys(Listing(wrapped, service.history), settings.api_keys)
    names = Names(settings.host, settings.allowed_hosts)
    own = Origins(wrapped, (), names.have)
    wrapped = Origins(wrapped, settings.cors_origins, names.have)
    if settings.cors_origins:
        anything = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["*"]}
        wrapped = CORSMiddleware(wrapped, allow_origins=list(settings.cors_origins), **anything)  # type: ignore[arg-type]
    wrapped = Hosts(PageData(own, wrapped), names)
    return Paths(Accounting(wrapped, service.metrics))


def _page(service: Service, ending: threading.Event) -> APIRouter:
    """Returns the routes of the page."""
    engine, settings = service.engine, service.settings
    may_change = bool(settings.api_keys) or is_loopback(settings.host)
    page = Page(
        engine,
        service.history,
        show_text=settings.show_text,
        may_change=may_change,
        has_several_keys=len(settings.api_keys) > 1,
        has_spaces_of_keys=settings.namespace_per_key,
    )
    return page_routes.routes(page, Viewers(page, lambda: ending.is_set() or not engine.alive))


def generation(service: Service) -> APIRouter:
    """Returns the routes of all APIs."""
    router = APIRouter()
    for api in registry.APIS:
        for endpoint in api.endpoints:
            router.add_api_route(
                endpoint.path,
                _handler(service, endpoint),
                methods=["POST"],
                name=endpoint.path,
                summary=endpoint.summary or endpoint.path,
                response_class=Response,
                openapi_extra=described(endpoint.schema, streams=endpoint.plan is not None),
                responses=errors(api.error_schema, 400, 404, 503),
            )
    return router


def _handler(service: Service, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        body, namespace = await request.body(), service.namespace(request.state.api_key)
        if endpoint.plan is not None:
            return Reply(service, partial(endpoint.plan, service, body, namespace), request.state.record)
        assert endpoint.answer is not None
        return JSONResponse(await service.prepare(partial(endpoint.answer, service, body)))

    return handle


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, OnefoldError)
    request.state.record.error = type(error).__name__
    return respond(request.scope, problem_of(error))


async def _starlettes(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, message, allow = request.scope["path"], str(error.detail), ""
    if error.status_code == 404:
        message = registry.instead(path)
    elif error.status_code == 405:  # what Starlette says is of one of several routes
        allow = ", ".join(m for m in METHODS if any(_takes(route, request, m) for route in request.app.routes))
        message = f"{path[:200]!r} does not take {request.method[:20]}: use {' or '.join(allow.rsplit(', ', 1))}."
    return respond(request.scope, Problem(error.status_code, message, allow=allow))


def _takes(route: BaseRoute, request: Request, method: str) -> bool:
    return route.matches({**request.scope, "method": method})[0] is Match.FULL


async def _bug(request: Request, error: Exception) -> Response:
    request.state.record.error = type(error).__name__
    return respond(request.scope, BROKEN)
