"""The paths of the server and their aliases: some clients add `/v1` themselves and some do not.

`/chat/completions` is `/v1/chat/completions`, and so is `/v1/v1/chat/completions`. The outermost middleware: everything
further in sees the one name.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from onefold.server import registry
from onefold.server.limits import PAGE_DATA, PAGE_FILES, is_page_data

VERSION = "/v1"
OWN_VERSIONED = frozenset({"/v1/models", "/v1/cache"})
OWN = OWN_VERSIONED | {"/", "/health", "/metrics", "/openapi.json"}


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
    return versioned if endpoint_of(versioned) in versioned_paths() else path


def versioned_paths() -> set[str]:
    return {endpoint.path for api in registry.APIS for endpoint in api.endpoints} | OWN_VERSIONED


def endpoint_of(path: str) -> str:
    """One of a few names: a path is a client's own text, which is not to fill the metrics."""
    if path in OWN or path in versioned_paths():
        return path
    if path.startswith("/v1/models/"):
        return "/v1/models"
    if is_page_data(path):
        return PAGE_DATA
    return PAGE_FILES if path.startswith(PAGE_FILES) else "other"
