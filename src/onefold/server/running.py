"""Runs the app: uvicorn's settings, and a shutdown that leaves no client without an answer.

When it is asked to end, the server accepts no more connections and gives running requests a little time; none, if it is
told once more. Then the engine is stopped, which tells each of those that are left, in the words of its API, that it
failed. The caller that runs the server waits for the engine to write dirty data.

Python's cyclic garbage collector takes some 90 ms, in the middle of a decode step, to go through the few hundred
thousand objects of a loaded model and its libraries. So it leaves these out while the server listens.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from onefold.engine.engine import Engine
from onefold.server.hang_up import Protocol
from onefold.server.settings import Settings
from onefold.sizes import show_count

log = logging.getLogger("onefold.server")

LONGEST_HEADERS = 64 << 10
"""Bytes."""
LAST_SECONDS = 600
"""After the engine was stopped, which ends when its forward does: then uvicorn cancels whatever is left."""


LOOK_SECONDS = 0.05


class Server(uvicorn.Server):
    """Stops the engine when it ends. Logging is the caller's: requests have a line of ours, and uvicorn's own loggers
    are left as they are. Calls `ready` when it listens, `leaving` when it begins to end, and `ending` before it stops
    the engine."""

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        settings: Settings,
        ready: Callable[[], None] = lambda: None,
        ending: Callable[[], None] = lambda: None,
        leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._ready = ready
        self._ending = ending
        self._leaving = leaving
        self._grace_seconds = settings.grace_seconds
        self._hurried = False
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=LONGEST_HEADERS,
            timeout_graceful_shutdown=round(settings.grace_seconds) + LAST_SECONDS,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            gc.collect()
            gc.freeze()
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._leaving()
        if running := len(self.server_state.tasks):
            told = "%s may take %g s to end; interrupt again to end %s now"
            log.info(told, show_count(running, "request"), self._grace_seconds, "it" if running == 1 else "them")
        stopping = asyncio.create_task(self._stop_engine())
        try:
            await super().shutdown(sockets)
        finally:
            stopping.cancel()
            gc.unfreeze()

    async def _stop_engine(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._grace_seconds
        while not self._hurried and (left := until - loop.time()) > 0:
            await asyncio.sleep(min(left, LOOK_SECONDS))
        self._ending()
        self._engine.stop(timeout_seconds=0)

    async def on_tick(self, counter: int) -> bool:
        """Ends the server, too, if the engine has ended because the device does not recover."""
        return await super().on_tick(counter) or self._engine.lost is not None

    def end(self) -> None:
        """Tells the server to end, whether it listens yet or not."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Does not cut connections on a second signal, as uvicorn does: clients would be left without an end. A second
        Ctrl-C ends the grace; SIGHUP comes twice by itself, from the terminal and from its shell."""
        if self.should_exit:
            self._hurried = self._hurried or sig == signal.SIGINT
        else:
            super().handle_exit(sig, frame)
