"""Sends an answer over HTTP, whole or streamed, in the format of the given API's writer.

Nothing is sent before the engine has admitted the request, so whatever fails until then is a real HTTP error (raised,
for the app's handlers). Afterwards a failure is an event of the stream, which then ends. Leaving by any way, also by
being cancelled because the client went, cancels what still runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onefold.engine.request import Event, Failed, Request, Started
from onefold.server.errors import Problem, problem_of
from onefold.server.outcome import Outcome, Tally, Usage
from onefold.server.record import Record
from onefold.server.service import Service
from onefold.server.stream import Stream


class Writer(Protocol):
    """Writes answers in the format of one API. Used for one request."""

    def feed(self, choice: int, event: Event) -> bytes:
        """Returns what a stream sends for an event, if anything."""

    def keep_alive(self) -> bytes:
        """Returns what a stream sends when there has been nothing to send for a while."""

    def end(self) -> bytes: ...

    def failed(self, problem: Problem) -> bytes:
        """Returns the last data of a stream that failed."""

    def whole(self, outcomes: list[Outcome], usage: Usage) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Plan:
    """What a request was made into: choices in their order, those of one prompt next to each other."""

    requests: tuple[Request, ...]
    writer: Writer
    stream: bool
    choices_per_prompt: int = 1


class Reply(Response):
    """`make` makes the plan, and may block; it runs on the thread for prompts."""

    def __init__(self, service: Service, make: Callable[[], Plan], record: Record) -> None:
        super().__init__()
        self._service = service
        self._make = make
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with Stream(self._service.engine) as stream:
            plan = await self._service.prepare(partial(self._begin, stream))
            self._record.choices_per_prompt = plan.choices_per_prompt
            try:
                if plan.stream:
                    await self._streamed(plan.writer, stream, send)
                else:
                    await self._whole(plan, stream, send)
            finally:
                for choice in range(len(plan.requests)):
                    self._record.finish.setdefault(choice, "failed" if self._record.error else "cancelled")

    def _begin(self, stream: Stream) -> Plan:
        plan = self._make()
        stream.submit(plan.requests)
        return plan

    async def _whole(self, plan: Plan, stream: Stream, send: Send) -> None:
        outcomes = [Outcome() for _ in plan.requests]
        tally = Tally(plan.choices_per_prompt)
        while not stream.over:
            for choice, event in await stream.next():
                self._note(choice, event)
                if isinstance(event, Failed):
                    raise event.error
                outcomes[choice].add(event)
                tally.add(choice, event)
        body = json_bytes(plan.writer.whole(outcomes, tally.usage))
        await _start(send, {"content-type": "application/json", "content-length": str(len(body))})
        await _body(send, body, more=False)

    async def _streamed(self, writer: Writer, stream: Stream, send: Send) -> None:
        events = await self._admitted(stream)
        await _start(send, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        loop, patience = asyncio.get_running_loop(), self._service.settings.keep_alive_seconds
        silent_until = loop.time() + patience
        while True:
            said: list[bytes] = []
            for choice, event in events:
                self._note(choice, event)
                if isinstance(event, Failed):
                    await _body(send, b"".join(said) + writer.failed(problem_of(event.error)), more=False)
                    return
                said.append(writer.feed(choice, event))
            if stream.over:
                break
            if any(said) or loop.time() >= silent_until:
                await _body(send, b"".join(said) or writer.keep_alive())
                silent_until = loop.time() + patience
            events = await stream.next(max(0.0, silent_until - loop.time()))
        await _body(send, b"".join(said) + writer.end(), more=False)

    async def _admitted(self, stream: Stream) -> list[tuple[int, Event]]:
        """Returns the events up to the first choice's start, which the headers describe."""
        events: list[tuple[int, Event]] = []
        while not any(isinstance(event, Started) for _, event in events):
            for choice, event in await stream.next():
                if isinstance(event, Failed):
                    self._note(choice, event)
                    raise event.error
                events.append((choice, event))
        for choice, event in events:
            if isinstance(event, Started):
                self._note(choice, event)
        return events

    def _note(self, choice: int, event: Event) -> None:
        if isinstance(event, Failed):
            self._record.error = type(event.error).__name__
            return
        if isinstance(event, Started):
            if self._service.settings.show_text:
                self._record.excerpt = self._record.excerpt or event.hit.diverged
            event = replace(event, hit=self._service.shown(event.hit))
        if (seconds := self._record.note(choice, event)) is not None:
            self._service.metrics.between(seconds)


async def _start(send: Send, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def sse(value: Any, event: str = "") -> bytes:
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + json_bytes(value) + b"\n\n"
