"""From the engine's thread to the event loop: the events of one or several engine requests, in the order they came.

    with Stream(engine) as stream:
        await ...stream.submit(requests)...       # on a thread that may block; raises what Engine.submit raises
        while not stream.over:
            for choice, event in await stream.next(): ...

However the block is left, what is not over is cancelled, also what a thread submits after that. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from onefold.engine.engine import Engine
from onefold.engine.request import Done, Event, Failed, Request


class Stream:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """For what the submitting thread and the event loop both change: the two that follow."""
        self._numbers: list[int] = []
        self._left = False
        self._running: set[int] = set()
        self._waiting: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._left = True
            numbers = list(self._numbers)
        for choice, number in enumerate(numbers):
            if choice in self._running:
                self._engine.cancel(number)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submits the requests. Call it once, on any thread; it may block for long prompts."""
        self._running = set(range(len(requests)))
        for choice, request in enumerate(requests):
            if self._left:
                return
            number = self._engine.submit(request, partial(self._deliver, choice))
            with self._lock:
                self._numbers.append(number)
                left = self._left
            if left:
                self._engine.cancel(number)
                return

    @property
    def over(self) -> bool:
        """Whether every request has ended and all events were returned."""
        return not self._running and not self._waiting

    async def next(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        """Returns the events since the last call: at least one, or none after `timeout` seconds."""
        if not self._waiting:
            try:
                async with asyncio.timeout(timeout):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        self._arrived.clear()
        taken, self._waiting = self._waiting, []
        return taken

    def _deliver(self, choice: int, events: list[Event]) -> None:
        """Passes events to the event loop. Runs on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits any more
            self._loop.call_soon_threadsafe(self._take, choice, events)

    def _take(self, choice: int, events: list[Event]) -> None:
        self._waiting += [(choice, event) for event in events]
        if any(isinstance(event, (Done, Failed)) for event in events):
            self._running.discard(choice)
        self._arrived.set()
