"""Compiles grammars in a child process first, so that none can hang the server, fill its memory or end it.

One child is started when the first grammar comes, and used for all others, one at a time. A grammar that takes too
long, or that ends the child, is refused, and the next grammar gets a new child. Knows nothing of MLX.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, Any

from onefold.engine import wanted
from onefold.engine.guidance.limits import MOST_SECONDS
from onefold.engine.guidance.vocabulary import Vocabulary
from onefold.errors import Busy, EngineStopped

START_SECONDS = 60.0
"""To import llguidance and read a vocabulary, on a slow machine."""
WAIT_SECONDS = 20.0
"""How long a grammar may wait for others."""


@dataclass(frozen=True)
class Verdict:
    error: str
    """Why the grammar cannot be used, in llguidance's words where it has some; empty if it can."""
    warnings: tuple[str, ...] = ()
    lasting: bool = True
    """False: the machine may have been busy, and the same grammar may pass another time."""


class Trials:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._turn = threading.Lock()
        self._child: _Child | None = None
        self._closed = False

    def run(self, grammar: str) -> Verdict:
        """Compiles the grammar in the child process. Raises Busy if other grammars take too long; EngineStopped."""
        said = self._ask({"grammar": grammar})
        return Verdict(said["error"], tuple(said.get("warnings", ())), said.get("lasting", True))

    def convert(self, grammar: str) -> tuple[str, str]:
        """Returns a Lark or GBNF grammar as Lark, and why it cannot be. Raises Busy."""
        said = self._ask({"convert": grammar})
        return said.get("lark", ""), said["error"]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + WAIT_SECONDS
        while not self._turn.acquire(timeout=0.2):
            wanted.check()
            if time.monotonic() > until:
                raise Busy("other requests' schemas are being compiled; try again in 5 s", retry_after=5)
        try:
            if self._closed:
                raise EngineStopped("the engine has stopped")
            return self._run(question)
        finally:
            self._turn.release()

    def close(self) -> None:
        """Ends the child process. A grammar that is being compiled is refused."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._turn:
            self._end()

    def _run(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._child is not None and not self._child.running:  # something ended it meanwhile
            self._end()
        if self._child is None:
            self._child = _Child()
            vocabulary = self._vocabulary
            about = {"vocabulary": vocabulary.text, "size": vocabulary.size, "ends": vocabulary.ends}
            begun = self._child.ask(about, START_SECONDS)
            if begun is None or begun["error"]:
                self._end()
                return {"error": "this model's tokenizer cannot be used for it", "lasting": False}
        said = self._child.ask(question, MOST_SECONDS)
        if said is None and self._closed:
            raise EngineStopped("the engine has stopped")
        if said is None:
            slow = self._child.running
            self._end()
            took = f"it takes more than {MOST_SECONDS:.0f} s to compile"
            return {"error": took if slow else "it is too complex", "lasting": False}
        return said

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "onefold.engine.guidance.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server
        )
        self._held = b""

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Returns the answer; None if there was none in time, or the child has ended."""
        try:
            self._stdin.write(json.dumps(question).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            return None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._held:
                if not selector.select(max(0.0, until - time.monotonic())):
                    return None
                some = self._stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not some:
                    self._process.wait()
                    return None
                self._held += some
        line, _, self._held = self._held.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # what it did not read
            self._stdin.close()
        self._stdout.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout
