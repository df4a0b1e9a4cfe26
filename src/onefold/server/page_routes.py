"""The page at `/`, its files, and the data that it shows.

The files are open, as the form for the key is one of them. The data needs a key like the API. A browser sends the
`Origin` of a page with what changes something: `limits.Origins` lets only this server's own page pass.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from onefold.errors import ConfigError
from onefold.page.page import Page
from onefold.page.viewers import Viewers
from onefold.server.limits import PAGE_DATA, PAGE_FILES

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
READ_ONLY = (
    "The page is read-only on this server: it listens on other addresses than the loopback, and needs no key. "
    "Start it with --api-key-file to pin and forget."
)


GONE = (
    "This is another server than the one that the page has shown, or the same one after a restart: its prefixes have "
    "other numbers. Look at the page again."
)
SERVER_HEADER = "x-onefold-server"
"""The `id` of the section `server`. A browser has to send it with what changes something; a program may."""
NUMBER = re.compile("[1-9][0-9]{0,18}")


def wants_page(request: Request) -> bool:
    """Whether a client of `/` is a browser. Others only look whether a server is there."""
    return "text/html" in request.headers.get("accept", "")


def index(request: Request) -> Response:
    return _file("index.html", request)


def routes(page: Page, viewers: Viewers) -> APIRouter:
    """Plain functions where the cache is asked: FastAPI runs those on threads."""
    router = APIRouter(include_in_schema=False)

    @router.head(PAGE_FILES + "{name:path}")
    @router.get(PAGE_FILES + "{name:path}")
    def file(name: str, request: Request) -> Response:
        return _file(name, request)

    @router.get(PAGE_DATA)
    def picture() -> dict[str, Any]:
        """Everything that the page shows, once."""
        return page.picture(now=True)

    @router.get(PAGE_DATA + "/events")
    async def events(request: Request) -> Response:
        """The same, and then what changes, once a second."""
        first = viewers.events()
        begun = await anext(first)  # or the refusal of one viewer too many would not be a response
        request.state.record.is_view = True

        async def stream() -> AsyncIterator[bytes]:
            try:
                yield begun
                async for event in first:
                    yield event
            finally:
                await first.aclose()

        return StreamingResponse(stream(), media_type="text/event-stream")

    @router.get(PAGE_DATA + "/nodes/{number}")
    def node(number: str) -> dict[str, Any]:
        return page.node(_number(number))

    @router.post(PAGE_DATA + "/nodes/{number}/{action}")
    async def change(number: str, action: str, request: Request) -> Response:
        actions: dict[str, Callable[[int], dict[str, Any]]] = {
            "pin": page.pin,
            "unpin": page.unpin,
            "forget": page.forget,
        }
        if action not in actions:
            raise HTTPException(404)
        if not page.may_change:
            raise HTTPException(403, READ_ONLY)
        named = request.headers.get(SERVER_HEADER)
        if named != page.id and (named is not None or "origin" in request.headers):
            raise HTTPException(409, GONE)
        try:
            return JSONResponse(await asyncio.to_thread(actions[action], _number(number)))
        except ConfigError as error:
            raise HTTPException(409, str(error)) from None

    return router


def _number(text: str) -> int:
    """Returns the number of a prefix. Raises HTTPException with 404 for any other text, such as `+5`."""
    if not NUMBER.fullmatch(text):
        raise HTTPException(404)
    return int(text)


def _file(name: str, request: Request) -> Response:
    found = _files().get(name)
    if found is None:
        raise HTTPException(404)
    kind = TYPES[name.rpartition(".")[2]]
    media_type = kind if kind.startswith("image") else f"{kind}; charset=utf-8"
    content = b"" if request.method == "HEAD" else found
    return Response(content, media_type=media_type, headers={**HEADERS, "vary": "accept"})


@cache
def _files() -> dict[str, bytes]:
    """Returns the files of the page by name. They are read when the first is asked for."""
    found: dict[str, bytes] = {}

    def read(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                read(entry, f"{prefix}{entry.name}/")
            elif entry.name.rpartition(".")[2] in TYPES:
                found[prefix + entry.name] = entry.read_bytes()

    read(files("onefold.page") / "static", "")
    return found
