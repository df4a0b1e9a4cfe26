"""Makes one record, one log line and one count for every request, refused ones included.

Requests of the APIs are kept for the page, unless they had a wrong Host, Origin or key: anybody can send those, and
they would take the place of the others.
"""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onefold.page.history import History
from onefold.server import registry
from onefold.server.limits import PAGE_FILES
from onefold.server.metrics import Metrics
from onefold.server.paths import endpoint_of
from onefold.server.record import CONVERSATION, Record, header_text

QUIET = frozenset({"/health", "/metrics", PAGE_FILES})
"""Asked every few seconds, by machines, or many times at once, by a browser."""
LISTED = frozenset(endpoint.path for api in registry.APIS for endpoint in api.endpoints)
"""What the history has: requests of the APIs."""


class Listing:
    """Keeps the requests that have passed `Hosts`, `Origins` and `Keys`."""

    def __init__(self, app: ASGIApp, history: History) -> None:
        self._app = app
        self._history = history

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in LISTED:
            await self._app(scope, receive, send)
            return
        record: Record = scope["state"]["record"]
        self._history.began(record)
        try:
            await self._app(scope, receive, send)
        finally:
            self._history.ended(record)


class Accounting:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = endpoint_of(scope["path"])
        named = next((value for name, value in scope["headers"] if name == CONVERSATION.encode()), b"")
        method, path = (header_text(scope[name]).replace(" ", "%20") for name in ("method", "path"))
        record = Record(method, path, conversation=header_text(named.decode("latin-1")))
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
