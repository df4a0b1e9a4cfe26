"""The paths of the server and their aliases: some clients add `/v1` themselves and some do not.

`/chat/completions` is `/v1/chat/completions`, and so is `/v1/v1/chat/completions`. The outermost middleware: everything
further in sees the one name.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"
VERSIONED = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/cache",
    }
)
ENDPOINTS = VERSIONED | {"/", "/health", "/metrics", "/openapi.json"}


class Paths:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := canonical(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


def canonical(path: str) -> str:
    """The path as the routes have it; one that is not known stays as it is."""
    while path.startswith(VERSION * 2 + "/"):
        path = path[len(VERSION) :]
    versioned = VERSION + path
    return versioned if endpoint_of(versioned) in VERSIONED else path


def endpoint_of(path: str) -> str:
    """One of a few names: a path is a client's own text, which neither a log nor a metric is to be filled with."""
    if path in ENDPOINTS:
        return path
    return "/v1/models" if path.startswith("/v1/models/") else "other"
