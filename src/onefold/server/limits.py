"""Checks origin, API key and size of a request. Pure ASGI middleware: a refused request never reaches an endpoint.

    Origins     a web page that was not named may not ask, whether or not it could read the answer; the server's own may
                (of a host that was named: see `hosts.Names.have`)
    Keys        an API key, if the settings have any; /, /health and the files of the page are open
    BodyLimit   a body is counted as it comes, whatever its headers say, and never held beyond the limit
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onefold.server.errors import Problem
from onefold.server.respond import respond

OPEN_PATHS = frozenset({"/", "/health"})
PAGE_FILES = "/page/"
"""Files of the page, which are open, too: they hold nothing of this server."""
PAGE_DATA = "/v1/page"
"""What the page shows, and what it does, begins so."""


class Origins:
    def __init__(self, app: ASGIApp, origins: Iterable[str], is_own_host: Callable[[str], bool]) -> None:
        """`is_own_host` tells whether a Host is one of the server's own."""
        self._app = app
        self._is_own_host = is_own_host
        self._allowed = {origin.rstrip("/").lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope, b"origin") if scope["type"] == "http" else ""
        if origin and not self._allowed & {"*", origin.lower()} and not self._is_own(origin, header(scope, b"host")):
            said = (
                "Origin not allowed. Start the server with --cors-origin to allow it, or with --allowed-host NAME for "
                "the page of this server under another name."
            )
            await respond(scope, Problem(403, said, "origin_not_allowed"))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether a page of this server asks: its origin has the Host that it asks, and that is the server's own. Only
        the page that this server serves has that origin. A proxy may speak HTTPS in front of it."""
        scheme, separator, name = origin.lower().partition("://")
        same = bool(host and separator) and scheme in ("http", "https") and name == host.lower()
        return same and self._is_own_host(host)


class Keys:
    """Also puts the key that was sent into the request's state, as `api_key`; "" if there was none."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = presented(scope)
        known = [key for key in given if self._known(key)]
        scope.setdefault("state", {})["api_key"] = next(iter(known or given), "")
        if self._digests and not _is_open(scope["path"]) and not known:
            said = "The API key is not valid." if given else "An API key is required."
            said += " Send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
            await respond(scope, Problem(401, said, "invalid_api_key"))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, key: str) -> bool:
        """Takes as long for a wrong key as for a right one."""
        digest = _digest(key)
        return any([hmac.compare_digest(digest, own) for own in self._digests])


class BodyLimit:
    """Reads the body before anything else. Does not wait for a client that sends nothing for `timeout` seconds."""

    def __init__(self, app: ASGIApp, limit: int, timeout: float) -> None:
        self._app = app
        self._limit = limit
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = await self._read(scope, receive)
        if isinstance(found, Problem):
            await respond(scope, found)(scope, receive, send)
        elif found is not None:
            read: Message | None = {"type": "http.request", "body": found, "more_body": False}

            async def once() -> Message:
                nonlocal read
                message, read = read, None
                return await receive() if message is None else message

            await self._app(scope, once, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | Problem | None:
        """Returns the body, or the problem; None if the client has left."""
        large = Problem(413, f"The body is larger than this server's limit of {self._limit} bytes.", "too_large")
        length = header(scope, b"content-length")
        if length.isdigit() and int(length) > self._limit:
            return large  # what is on its way is read and thrown away by uvicorn, while the client may read the answer
        chunks: list[bytes] = []
        seen = 0
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    message = await receive()
            except TimeoutError:
                return Problem(408, f"No data of the body arrived for {self._timeout:g} seconds.", "body_timeout")
            if message["type"] == "http.disconnect":
                return None
            more = message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self._limit:
                return large
            chunks.append(message.get("body", b""))
            if not more:
                return b"".join(chunks)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)


def is_page_data(path: str) -> bool:
    return path == PAGE_DATA or path.startswith(PAGE_DATA + "/")


def presented(scope: Scope) -> list[str]:
    """The API keys of a request: clients of the one API sometimes send a placeholder where the other has its key."""
    kind, _, rest = header(scope, b"authorization").partition(" ")
    return [key for key in (rest.strip() if kind.lower() == "bearer" else "", header(scope, b"x-api-key")) if key]


def header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1").strip() for key, value in scope["headers"] if key == name), "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
