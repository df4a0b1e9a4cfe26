"""The server: `make_app(engine, settings)` gives an ASGI application for one engine, which it does not stop.

    Paths ── Accounting ── Hosts ── CORS ── Origins ── Keys ── BodyLimit ── HangUp ── routes

Whatever goes wrong in there leaves in the shape of the API that the client speaks.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from onefold import __version__
from onefold.engine.engine import Engine
from onefold.errors import OnefoldError
from onefold.server import info
from onefold.server.accounting import Accounting
from onefold.server.anthropic import messages
from onefold.server.anthropic.schemas import Conversation, MessagesRequest
from onefold.server.errors import BROKEN, Problem, problem_of, respond
from onefold.server.hang_up import HangUp
from onefold.server.hosts import Hosts
from onefold.server.limits import BodyLimit, Keys, Origins
from onefold.server.openai import chat, completions
from onefold.server.openai.schemas import ChatRequest, CompletionRequest
from onefold.server.openapi import ANTHROPIC_ERROR, OPENAI_ERROR, described, document, errors
from onefold.server.paths import Paths
from onefold.server.reply import Plan, Reply
from onefold.server.service import Service
from onefold.server.settings import Settings


def make_app(engine: Engine, settings: Settings = Settings()) -> ASGIApp:  # noqa: B008  frozen
    service = Service(engine, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="Onefold", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.include_router(generation(service))
    app.include_router(info.routes(service))
    app.openapi = document(app, [ChatRequest, CompletionRequest, MessagesRequest, Conversation])  # type: ignore[method-assign]
    app.add_exception_handler(OnefoldError, _ours)
    app.add_exception_handler(HTTPException, _starlettes)
    app.add_exception_handler(Exception, _bug)

    wrapped: ASGIApp = HangUp(app, settings.send_timeout_seconds)
    wrapped = BodyLimit(wrapped, settings.body_limit, settings.send_timeout_seconds)
    wrapped = Keys(wrapped, settings.api_keys)
    wrapped = Origins(wrapped, settings.cors_origins)
    if settings.cors_origins:
        anything = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["*"]}
        wrapped = CORSMiddleware(wrapped, allow_origins=list(settings.cors_origins), **anything)  # type: ignore[arg-type]
    wrapped = Hosts(wrapped, settings.host, settings.allowed_hosts)
    return Paths(Accounting(wrapped, service.metrics))


def generation(service: Service) -> APIRouter:
    router = APIRouter()

    async def answer(request: Request, plan: Callable[[Service, bytes, str], Plan]) -> Response:
        body, namespace = await request.body(), service.namespace(request.state.api_key)
        return Reply(service, partial(plan, service, body, namespace), request.state.record)

    openai, anthropic = errors(OPENAI_ERROR, 400, 404, 503), errors(ANTHROPIC_ERROR, 400, 404, 503)
    chats, texts = described(ChatRequest, streams=True), described(CompletionRequest, streams=True)
    talks, counts = described(MessagesRequest, streams=True), described(Conversation, streams=False)

    @router.post("/v1/chat/completions", response_class=Response, openapi_extra=chats, responses=openai)
    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat.plan)

    @router.post("/v1/completions", response_class=Response, openapi_extra=texts, responses=openai)
    async def text_completions(request: Request) -> Response:
        return await answer(request, completions.plan)

    @router.post("/v1/messages", response_class=Response, openapi_extra=talks, responses=anthropic)
    async def anthropic_messages(request: Request) -> Response:
        return await answer(request, messages.plan)

    @router.post("/v1/messages/count_tokens", response_class=Response, openapi_extra=counts, responses=anthropic)
    async def count_tokens(request: Request) -> Response:
        body = await request.body()
        counted = await service.prepare(partial(messages.count_tokens, service, body))
        return JSONResponse({"input_tokens": counted})

    return router


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, OnefoldError)
    request.state.record.error = type(error).__name__
    return respond(request.scope, problem_of(error))


async def _starlettes(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "Not found.", 405: "Method not allowed."}
    message = said.get(error.status_code, str(error.detail))
    return respond(request.scope, Problem(error.status_code, message, allow=(error.headers or {}).get("Allow")))


async def _bug(request: Request, error: Exception) -> Response:
    request.state.record.error = type(error).__name__
    return respond(request.scope, BROKEN)
