"""`onefold serve` in a process of its own, on a free port of the loopback interface.

- It has the settings that it is given here and none from the environment, and listens on 127.0.0.1 only.
- Ctrl-C on the terminal does not reach it: its parent ends it by its process id, and `stop` always does. However the
  parent ends, the server's standard input ends with it, and the server then ends by itself.
- Its last lines of output are kept: they name the reason if it fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from onefold.cli.client import Client
from onefold.cli.flags import FLAGS
from onefold.errors import ServerError

START_SECONDS = 300.0
STOP_SECONDS = 20.0
LOOK_SECONDS = 0.1
LAST_SECONDS = 1.0
LINES = 12

_URL = re.compile(r"http://127\.0\.0\.1:\d+")


class ServerProcess:
    def __init__(self, model: str, options: Sequence[str] = ()) -> None:
        """`options` are those of `onefold serve`. An API key among them is for the caller's clients, too."""
        command = [sys.executable, "-m", "onefold", "serve", model]
        command += ["--host", "127.0.0.1", "--port", "0", "--grace", "1", "--until-eof", *options]
        settings = {flag.variable for flag in FLAGS}
        environment = {name: value for name, value in os.environ.items() if name not in settings}
        self._lines: deque[str] = deque(maxlen=LINES)
        self.url = ""
        """Known before it listens."""
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if line.strip():
                    self._lines.append(line.rstrip())
                if not self.url and (found := _URL.search(line)):
                    self.url = found[0]

    def wait_until_up(self, show: Callable[[str], None]) -> None:
        """Waits until the server answers; calls `show` with its last line of output. Raises ServerError if it ends or
        takes too long."""
        give_up = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None:
                raise self._ended("it was ready")
            if time.monotonic() > give_up:
                raise ServerError(f"the server did not start within {START_SECONDS:.0f} seconds")
            if self._lines:
                show(self._lines[-1])
            time.sleep(LOOK_SECONDS)

    def _answers(self) -> bool:
        if not self.url:
            return False
        try:
            return Client(self.url, silence_seconds=5).get("/health").get("status") == "ok"
        except ServerError:  # it is on its way
            return False

    def wait(self) -> None:
        """Waits while the server runs. Raises ServerError when it ends."""
        self._process.wait()
        raise self._ended("it was stopped")

    def _ended(self, before: str) -> ServerError:
        return ServerError(f"the server ended before {before} (exit code {self._process.returncode})")

    def last_lines(self) -> list[str]:
        """Returns its last lines of output. Waits a moment for a server that has just failed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_SECONDS)
            self._reader.join(LAST_SECONDS)
        return list(self._lines)

    def stop(self) -> None:
        try:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:
            self._process.kill()  # does nothing to one that has ended
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._reader.join(LAST_SECONDS)
