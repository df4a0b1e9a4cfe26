"""An answer as HTTP: whole or streamed, in the words of whichever API's writer is given.

Nothing is sent before the engine has admitted the request, so whatever fails until then is a real HTTP error (raised,
for the app's handlers). Afterwards a failure is an event of the stream, which then ends. Leaving by any way, also by
being cancelled because the client went, cancels what still runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    """One API's words. Used for one request."""

    keep_alive: bytes

    def feed(self, choice: int, event: Event) -> bytes:
        """What a stream says of an event, if anything."""

    def end(self) -> bytes: ...

    def failed(self, problem: Problem) -> bytes:
        """The last thing that a stream says."""

    def whole(self, outcomes: list[Outcome], usage: Usage) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Plan:
    """What a request was made into: choices in their order, those of one prompt next to each other."""

    requests: tuple[Request, ...]
    writer: Writer
    stream: bool
    choices_per_prompt: int = 1


class Reply(Response):
    def __init__(self, service: Service, plan: Plan, record: Record) -> None:
        super().__init__()
        self._service = service
        self._plan = plan
        self._record = record
        record.choices_per_prompt = plan.choices_per_prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with Stream(self._service.engine, self._plan.requests) as stream:
            try:
                if self._plan.stream:
                    await self._streamed(stream, send)
                else:
                    await self._whole(stream, send)
            finally:
                for choice in range(len(self._plan.requests)):
                    self._record.finish.setdefault(choice, "failed" if self._record.error else "cancelled")

    async def _whole(self, stream: Stream, send: Send) -> None:
        outcomes = [Outcome() for _ in self._plan.requests]
        tally = Tally(self._plan.choices_per_prompt)
        while not stream.over:
            for choice, event in await stream.next():
                self._note(choice, event)
                if isinstance(event, Failed):
                    raise event.error
                outcomes[choice].add(event)
                tally.add(choice, event)
        body = json_bytes(self._plan.writer.whole(outcomes, tally.usage))
        await _begin(send, {"content-type": "application/json", "content-length": str(len(body))})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _streamed(self, stream: Stream, send: Send) -> None:
        writer = self._plan.writer
        events = await self._admitted(stream)
        await _begin(send, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        while True:
            said = b""
            for choice, event in events:
                self._note(choice, event)
                if isinstance(event, Failed):
                    said += writer.failed(problem_of(event.error))
                    await send({"type": "http.response.body", "body": said, "more_body": False})
                    return
                said += writer.feed(choice, event)
            if stream.over:
                break
            if said:
                await send({"type": "http.response.body", "body": said, "more_body": True})
            events = await stream.next(self._service.settings.keep_alive_seconds)
            if not events:
                await send({"type": "http.response.body", "body": writer.keep_alive, "more_body": True})
        await send({"type": "http.response.body", "body": said + writer.end(), "more_body": False})

    async def _admitted(self, stream: Stream) -> list[tuple[int, Event]]:
        """The events up to the first choice's start, which the headers tell of."""
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
            event = Started(self._service.shown(event.hit))
        if (seconds := self._record.note(choice, event)) is not None:
            self._service.metrics.between(seconds)


async def _begin(send: Send, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def sse(value: Any, event: str = "") -> bytes:
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + json_bytes(value) + b"\n\n"
