"""From the engine's thread to the event loop: the events of one or several engine requests, in the order they came.

    with Stream(engine, requests) as stream:     # queued; raises what Engine.submit raises
        while not stream.over:
            for choice, event in await stream.next(): ...

However the block is left, what is not over is cancelled. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from onefold.engine.engine import Engine
from onefold.engine.request import Done, Event, Failed, Request


class Stream:
    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._numbers: list[int] = []
        self._waiting: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()
        self._running = set(range(len(requests)))

    def __enter__(self) -> Stream:
        with contextlib.ExitStack() as undo:
            undo.callback(self.cancel)
            for choice, request in enumerate(self._requests):
                self._numbers.append(self._engine.submit(request, partial(self._deliver, choice)))
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        for choice, number in enumerate(self._numbers):
            if choice in self._running:
                self._engine.cancel(number)
        self._running.clear()

    @property
    def over(self) -> bool:
        """Every request has ended, and all of it has been handed out."""
        return not self._running and not self._waiting

    async def next(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        """What came since the last call: at least one event, or nothing after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._arrived.wait()
        except TimeoutError:
            return []
        self._arrived.clear()
        taken, self._waiting = self._waiting, []
        return taken

    def _deliver(self, choice: int, events: list[Event]) -> None:
        """On the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening any more
            self._loop.call_soon_threadsafe(self._take, choice, events)

    def _take(self, choice: int, events: list[Event]) -> None:
        if choice not in self._running:
            return
        self._waiting += [(choice, event) for event in events]
        if any(isinstance(event, (Done, Failed)) for event in events):
            self._running.discard(choice)
        self._arrived.set()
