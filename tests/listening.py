"""A server of ours on a free port of the loopback interface, in this process, by uvicorn as the command runs it.

    with listening(make_app(engine, settings), settings) as url: ...
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from onefold.server.running import uvicorn_config
from onefold.server.settings import Settings

WAIT = 60.0
"""Seconds after which something is wrong rather than slow."""


@contextmanager
def listening(app: ASGIApp, settings: Settings | None = None) -> Iterator[str]:
    server = uvicorn.Server(uvicorn_config(app, settings or Settings(grace_seconds=1.0)))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), name="server")
        thread.start()
        try:
            for _ in range(int(WAIT / 0.01)):
                if server.started or not thread.is_alive():
                    break
                threading.Event().wait(0.01)
            assert server.started
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive(), "the server does not end"
