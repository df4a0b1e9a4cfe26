"""A server of ours on a free port of the loopback interface, in this process, by uvicorn as the command runs it.

    with listening(engine, settings) as url: ...

It does not stop the engine unless requests are still running at the end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onefold.server.addresses import bind
from onefold.server.app import make_app
from onefold.server.running import Server
from onefold.server.settings import Settings

WAIT = 60.0
"""Seconds after which something is wrong rather than slow."""


@contextmanager
def listening(engine: Any, settings: Settings | None = None, port: int = 0) -> Iterator[str]:
    settings = settings or Settings(grace_seconds=1.0)
    leaving = threading.Event()
    server = Server(make_app(engine, settings, leaving), engine, settings, leaving=leaving.set)
    (sock,) = bind("127.0.0.1", port)
    port = sock.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), name="server")
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server does not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(WAIT)
        sock.close()
        assert not thread.is_alive(), "the server does not end"


def wait_until(true: Any, otherwise: str, seconds: float = WAIT) -> None:
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError(otherwise)
