"""Our command in a process of its own, on a terminal or on pipes, as a person or a script runs it.

Whoever runs the tests may have Ctrl-C or SIGHUP ignored, as shells and `nohup` do, and that is inherited: the command
is started with them as they usually are.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

WAIT = 60.0
"""Seconds after which something is wrong rather than slow."""

_BEGIN = """
import fcntl, os, signal, sys, termios
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "onefold", *sys.argv[1:]])
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", _BEGIN, *arguments]


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ONEFOLD_")}
    return {**ours, "TERM": "xterm", "COLUMNS": "300", **more}


@contextmanager
def piped(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    started = subprocess.Popen(
        command(*arguments), env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    with started as process:
        try:
            yield process
        finally:
            process.kill()


class Terminal:
    """What a person sees and types."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.seen = ""
        self._master: int | None = master
        self._read_to = 0

    def type(self, text: str) -> None:
        assert self._master is not None
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Until this comes after what was waited for before; everything up to its end."""
        give_up = time.monotonic() + WAIT
        while (found := re.compile(pattern).search(self.seen, self._read_to)) is None:
            assert time.monotonic() < give_up and self._more(), f"no {pattern!r} in {self.seen[self._read_to :]!r}"
        before, self._read_to = self._read_to, found.end()
        return self.seen[before : found.end()]

    def close(self) -> None:
        """As a window that is closed: what runs on it gets SIGHUP, and can neither read nor write any more."""
        if self._master is not None:
            os.close(self._master)
        self._master = None

    def end(self) -> int:
        while self._more():
            pass
        return self.process.wait(WAIT)

    def _more(self) -> bool:
        assert self._master is not None
        if not select.select([self._master], [], [], WAIT)[0]:
            return False
        try:
            read = os.read(self._master, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.seen += read.decode("utf-8", "replace")
        return bool(read)


@contextmanager
def on_terminal(*arguments: str, **variables: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        env=environment(**variables),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    terminal = Terminal(master, process)
    with process:
        try:
            yield terminal
        finally:
            process.kill()
            terminal.close()
