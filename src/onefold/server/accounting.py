"""One record, one log line and one count for every request, however it ends. The outermost middleware."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onefold.server.metrics import Metrics
from onefold.server.record import Record

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/cache",
    "/health",
    "/metrics",
    "/openapi.json",
)
QUIET = frozenset({"/health", "/metrics"})
"""Asked every few seconds, by machines."""


class Accounting:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = endpoint_of(scope["path"])
        record = Record(scope["method"], endpoint)
        scope.setdefault("state", {})["record"] = record

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                there = {name for name, _ in message["headers"]}
                own = [(name.encode(), value.encode("latin-1")) for name, value in record.headers().items()]
                message = {**message, "headers": [*message["headers"], *(h for h in own if h[0] not in there)]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.ended(record, endpoint)
            record.write(logging.DEBUG if endpoint in QUIET and record.status == 200 else logging.INFO)


def endpoint_of(path: str) -> str:
    """One of a few names: a path is a client's own text, which neither a log nor a metric is to be filled with."""
    if path in ENDPOINTS:
        return path
    return "/v1/models" if path.startswith("/v1/models/") else "other"
