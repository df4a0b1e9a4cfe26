"""A real `redis-server` for tests, on loopback, with nothing on disk."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DEADLINE = 60


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class RedisServer:
    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.port = port or free_port()
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        end = time.monotonic() + DEADLINE
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise AssertionError("redis-server did not start")
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as s:
            s.sendall(b"PING\r\n")
            return bool(s.recv(64))
        return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)


@contextmanager
def redis_server(folder: Path, *options: str, port: int = 0) -> Iterator[RedisServer]:
    """`port` is free; 0 finds one."""
    server = RedisServer(folder, *options, port=port)
    try:
        yield server
    finally:
        server.stop()
