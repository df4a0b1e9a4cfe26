"""Those who look at the page: each gets a whole picture first, and then once a second what has changed.

One task draws for all of them. It runs while there is a viewer, and ends with the last one. A viewer that does not read
gets a new picture instead of the changes that it missed. Runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from onefold.errors import Busy, OnefoldError
from onefold.page.changes import Picture, changes
from onefold.page.page import Page

log = logging.getLogger("onefold.server")

MOST_VIEWERS = 32
BACKLOG = 5
"""Changes that wait for a viewer that does not read."""
EVERY_SECONDS = 1.0


class Viewers:
    def __init__(self, page: Page, over: Callable[[], bool], every_seconds: float = EVERY_SECONDS) -> None:
        """`over` says that the server is about to end."""
        self._page = page
        self._over = over
        self._every_seconds = every_seconds
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._picture: Picture = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        return len(self._queues)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields events for one viewer until the server ends. Raises Busy at the first step if there are too many."""
        if self.count >= MOST_VIEWERS:
            raise Busy(f"{MOST_VIEWERS} viewers look at the page already; close one", retry_after=10)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._draw())
        elif self._picture:  # before anything else is sent: what changes later is compared with it
            queue.put_nowait(_event("picture", self._picture))
        try:
            yield b": one picture, and then what changes\n\n"
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._queues.discard(queue)

    async def _draw(self) -> None:
        """Send pictures while there are viewers."""
        try:
            while self._queues and not self._over():
                try:
                    drawn = await asyncio.to_thread(self._page.picture)
                except OnefoldError as error:  # the engine has stopped
                    log.debug("the page is not drawn any more: %s", error)
                    break
                self._send(drawn)
                await self._pause()
        finally:
            for queue in self._queues:
                queue.put_nowait(None)
            self._task, self._picture = None, {}
            self._page.rest()

    async def _pause(self) -> None:
        """Wait until the next picture is due; less if there is no viewer, or the server ends."""
        until = asyncio.get_running_loop().time() + self._every_seconds
        while self._queues and not self._over() and (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left, 0.1))

    def _send(self, drawn: Picture) -> None:
        before, self._picture = self._picture, drawn
        changed = _event("changes", changes(before, drawn)) if before else None
        whole: bytes | None = None
        for queue in self._queues:
            if changed is not None and queue.qsize() < BACKLOG:
                queue.put_nowait(changed)
                continue
            while not queue.empty():
                queue.get_nowait()
            whole = whole or _event("picture", drawn)
            queue.put_nowait(whole)


def _event(name: str, value: Any) -> bytes:
    data = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode()
