"""`onefold serve` as a process of its own on a free port of the loopback interface, and what its log says.

    with serving(folder, log_file) as server:
        server.url             # "http://127.0.0.1:40123"
        server.requests()      # one entry per line of the log about a request of a model
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WAIT = 120.0
"""Seconds after which something is wrong rather than slow."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

_LISTENS = re.compile(r"(http://127\.0\.0\.1:\d+)")
_REQUEST = re.compile(r"POST (\S+) (\d+|hung up)(?: prompt=(\d+) matched=(\d+) cached=(\d+) generated=(\d+))?")
_DIVERGED = re.compile(r'diverged="(.*)" seconds=')


@dataclass(frozen=True)
class Request:
    path: str
    status: str
    prompt: int
    cached: int
    generated: int
    diverged: str


@dataclass
class Server:
    url: str
    log: Path

    def requests(self) -> list[Request]:
        """Requests that have ended, in the order in which they ended."""
        return [found for line in self.log.read_text().splitlines() if (found := _request(line))]

    def settled(self) -> list[Request]:
        """The same, when the log has the lines of all answers that were sent."""
        before, pause = -1, threading.Event()
        while before != (before := len(self.requests())):
            pause.wait(0.3)
        return self.requests()


def _request(line: str) -> Request | None:
    found = _REQUEST.search(line)
    if found is None:
        return None
    path, status, *counts = found.groups()
    prompt, _, cached, generated = (int(n or 0) for n in counts)
    diverged = _DIVERGED.search(line)
    return Request(path, status, prompt, cached, generated, diverged[1] if diverged else "")


@contextmanager
def serving(folder: Path, log: Path, *flags: str) -> Iterator[Server]:
    """Starts the server and yields when it listens. Ends it, and raises RuntimeError if it did not end well."""
    command = [sys.executable, "-m", "onefold", "serve", str(folder), "--port", "0", "--until-eof", *flags]
    environment = {**os.environ, **OFFLINE}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment)
    assert process.stdin is not None
    try:
        yield Server(_url(process, log), log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            ended = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            ended = process.wait()
        process.stdin.close()
    if ended != 0:
        raise RuntimeError(f"the server ended with {ended}:\n{log.read_text()[-3000:]}")


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + WAIT
    while process.poll() is None and time.monotonic() < until:
        found = _LISTENS.search(log.read_text())
        if found and _answers(found[1]):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server does not start:\n{log.read_text()[-3000:]}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as found:
            return bool(found.status == 200)
    except OSError:
        return False
