"""Cancels the handler of a request whose client has closed the connection or does not read, wherever it waits.

This is what frees a row of the engine when a user presses Ctrl-C, also while the request is queued and also when the
answer is not streamed. Knows nothing of what handlers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

FIRST_REQUEST_SECONDS = 30.0
"""For the headers of a connection's first request."""


class Protocol(H11Protocol):
    """uvicorn's own protocol. In addition it lets an application drop the connection with unsent data: closing it in
    the usual way waits for a client that does not read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "drop_connection": self._drop}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """uvicorn waits for ever for a connection's first request; between two it has a timeout of its own."""
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST_SECONDS, self._drop_if_silent)

    def _drop_if_silent(self) -> None:
        if self.cycle is None:
            self._drop()

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class HangUp:
    def __init__(self, app: ASGIApp, send_timeout: float) -> None:
        self._app = app
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        drop: Callable[[], None] = scope.get("state", {}).get("drop_connection", lambda: None)
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        watcher: asyncio.Task[None] | None = None
        over = False

        def leave() -> None:
            gone.set()
            if not over and not cancelling.expired():
                cancelling.reschedule(loop.time())

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            leave()

        async def receive_body() -> Message:
            nonlocal watcher
            if watcher is not None:  # the body has been read; all that can come now is the end
                await gone.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                watcher = asyncio.create_task(watch())
            return message

        async def send_in_time(message: Message) -> None:
            nonlocal over
            try:
                async with asyncio.timeout(self._send_timeout) as sending:
                    await send(message)
            except TimeoutError:
                if not sending.expired():
                    raise
                drop()
                leave()
                await asyncio.sleep(self._send_timeout)  # until the handler, which this is part of, is cancelled
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                over = True  # from here on the server itself says that the client is gone

        cancelling = asyncio.timeout(None)
        try:
            async with cancelling:
                try:
                    await self._app(scope, receive_body, send_in_time)
                finally:
                    over = True
                    if watcher is not None:
                        watcher.cancel()
        except TimeoutError:
            if not cancelling.expired():
                raise
