"""An answer in the words of the Responses API, streamed and whole.

    created ── in_progress ── (added ── deltas ── done)* ── completed | incomplete | failed

Every event has a number, which counts up. Codex takes messages and calls from `response.output_item.done` alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onefold.engine.request import Done, Event, Logprob, Reasoning, Started, Text, ToolCall
from onefold.server.errors import Problem
from onefold.server.openai.chunks import token_logprobs
from onefold.server.outcome import Outcome, Tally, Usage
from onefold.server.reply import sse
from onefold.server.responses import errors, items
from onefold.server.responses.items import Item


@dataclass
class Open:
    """The message or the reasoning that was begun and not ended."""

    kind: type[Text] | type[Reasoning]
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def add(self, event: Text | Reasoning) -> None:
        self.texts.append(event.text)
        self.logprobs += event.logprobs

    def part(self) -> Item:
        text = "".join(self.texts)
        return items.output_text(text, self.logprobs) if self.kind is Text else items.reasoning_text(text)

    def item(self, status: str, *parts: Item) -> Item:
        return (items.message if self.kind is Text else items.reasoning)(self.id, status, *parts)


class ResponseWriter:
    def __init__(
        self, given: Mapping[str, Any], *, custom: frozenset[str] = frozenset(), logprobs: bool = False
    ) -> None:
        """`given`: the fields of the response that repeat the request. `custom`: tools that take text."""
        self._head = {"id": items.new_id("resp"), "object": "response", "created_at": int(time.time())}
        self._given = given
        self._custom = custom
        self._logprobs = logprobs
        self._tally = Tally()
        self._number = 0
        self._output: list[Item] = []
        """The items that are done."""
        self._open: Open | None = None

    def feed(self, choice: int, event: Event) -> bytes:
        self._tally.add(choice, event)
        match event:
            case Started():
                return self._event("response.created", response=self._progress()) + self.keep_alive()
            case Text() | Reasoning():
                return self._piece(event)
            case ToolCall():
                return self._close("completed") + self._call(event)
            case Done():
                said = self._close(_status(event))
                made = self._response(event, self._output, self._tally.usage)
                return said + self._event(f"response.{made['status']}", response=made)
            case _:
                return b""

    def keep_alive(self) -> bytes:
        """Clients of this API do not count comments as a sign of life."""
        return self._event("response.in_progress", response=self._progress())

    def end(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        made = self._progress() | {"status": "failed", "error": errors.of_response(problem)}
        return self._event("response.failed", response=made)

    def whole(self, outcomes: list[Outcome], usage: Usage) -> dict[str, Any]:
        (outcome,) = outcomes
        assert outcome.done is not None
        made: list[Item] = []
        for piece in outcome.pieces:
            if isinstance(piece, ToolCall):
                made.append(items.called(piece, custom=piece.name in self._custom))
            elif piece.text or piece.logprobs:
                whole = self._begun(piece)
                whole.add(self._shown(piece))
                made.append(whole.item("completed", whole.part()))
        if made and "content" in made[-1]:
            made[-1]["status"] = _status(outcome.done)
        return self._response(outcome.done, made, usage)

    def _piece(self, event: Text | Reasoning) -> bytes:
        if not event.text and not event.logprobs:
            return b""
        said = b""
        if self._open is None or self._open.kind is not type(event):
            said = self._close("completed")
            self._open = self._begun(event)
            said += self._item_event("added", self._open.item("in_progress"))
            said += self._event("response.content_part.added", **self._at(), part=self._open.part())
        shown = self._shown(event)
        self._open.add(shown)
        if isinstance(event, Reasoning):
            return said + self._event("response.reasoning_text.delta", **self._at(), delta=event.text)
        logprobs = token_logprobs(shown.logprobs)
        return said + self._event("response.output_text.delta", **self._at(), delta=event.text, logprobs=logprobs)

    def _begun(self, piece: Text | Reasoning) -> Open:
        return Open(type(piece), items.new_id("msg" if isinstance(piece, Text) else "rs"))

    def _shown(self, piece: Text | Reasoning) -> Text | Reasoning:
        """The piece with its logprobs only if they were asked for."""
        return piece if self._logprobs else type(piece)(piece.text)

    def _close(self, status: str) -> bytes:
        """Ends the open item, if there is one."""
        if self._open is None:
            return b""
        part, at = self._open.part(), self._at()
        if self._open.kind is Text:
            said = self._event("response.output_text.done", **at, text=part["text"], logprobs=part["logprobs"])
        else:
            said = self._event("response.reasoning_text.done", **at, text=part["text"])
        said += self._event("response.content_part.done", **at, part=part)
        item = self._open.item(status, part)
        self._open = None
        return said + self._done(item)

    def _call(self, call: ToolCall) -> bytes:
        item = items.called(call, custom=call.name in self._custom)
        name = "input" if "input" in item else "arguments"
        kind = "custom_tool_call_input" if name == "input" else "function_call_arguments"
        at = {"item_id": item["id"], "output_index": len(self._output)}
        said = self._item_event("added", item | {"status": "in_progress", name: ""})
        said += self._event(f"response.{kind}.delta", **at, delta=item[name])
        named = {} if name == "input" else {"name": call.name}
        said += self._event(f"response.{kind}.done", **at, **{name: item[name]}, **named)
        return said + self._done(item)

    def _done(self, item: Item) -> bytes:
        said = self._item_event("done", item)
        self._output.append(item)
        return said

    def _item_event(self, what: str, item: Item) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._output), item=item)

    def _at(self) -> dict[str, Any]:
        """Where the open part is."""
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self._output), "content_index": 0}

    def _progress(self) -> dict[str, Any]:
        """Returns the response as it is so far."""
        ends = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": "in_progress", **self._given, "output": list(self._output), **ends}

    def _response(self, done: Done, output: list[Item], usage: Usage) -> dict[str, Any]:
        """Returns the response at its end."""
        status = _status(done)
        made = self._progress() | {"status": status, "output": output, "usage": items.usage_shape(usage)}
        if status == "completed":
            return made | {"completed_at": int(time.time())}
        return made | {"incomplete_details": {"reason": "max_output_tokens"}}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)


def _status(done: Done) -> str:
    return "incomplete" if done.finish == "length" else "completed"
