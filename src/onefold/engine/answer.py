"""Reading an answer: tokens become text, reasoning, tool calls and an end.

- Text is given out as soon as it cannot be part of a marker or of a stop string any more, and whole characters at a
  time. What comes back as part of the next prompt is what was generated, leading space included.
- A stop string is looked for in the text as it is read, however its tokens are cut; it is not part of the answer.
- A tool call is given out whole. One that cannot be parsed is given out as the text it is.

Markers and parsers are mlx-lm's, which knows them by the model's vocabulary and template.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from typing import Any

from onefold.engine import stock
from onefold.engine.request import Event, Logprob, Reasoning, Request, Text, ToolCall
from onefold.engine.tool_schemas import for_parsers

log = logging.getLogger("onefold.engine")

_UNPARSED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,
)
"""What mlx-lm's parsers raise for text that is not a call, or is nested without end."""


class StopStrings:
    """Finds the first of several strings in text that comes in pieces."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = tuple(s for s in strings if s)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Returns the text that can be sent. Returns nothing more once a stop string was found."""
        if not self._strings or self.found is not None:
            return "" if self.found is not None else text
        held = self._held + text
        hits = [(at, s) for s in self._strings if (at := held.find(s)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return held[:at]
        keep = max(_overlap(held, s) for s in self._strings)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Returns the length of the longest end of `text` that `string` begins with."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)


class Answer:
    def __init__(
        self, tokenizer: Any, request: Request, calls: Callable[[str], list[tuple[str, Any]]] | None = None
    ) -> None:
        """`calls`: parses the whole text, which is calls of tools, and nothing else is."""
        self._tokenizer = tokenizer
        self._ends = set(tokenizer.eos_token_ids)
        self._tools = for_parsers(request.tools) if request.tools else None
        self._stops = StopStrings(request.stop)
        self._detokenizer = tokenizer.detokenizer
        # mlx-lm drops the space that a text begins with: let this one begin with something else
        for token in tokenizer.encode("a", add_special_tokens=False):
            self._detokenizer.add_token(token)
        _ = self._detokenizer.last_segment
        machine = None if request.plain else stock.make_text_state_machine(tokenizer)
        self._machine = None if machine is None else machine.make_state(request.prompt.state)
        self._unread = ""
        """Text that might have been the beginning of a marker."""
        self._state: str | None = request.prompt.state
        self._call: str | None = None
        self._parse_calls = calls
        self._whole = ""
        """The text so far, if all of it is calls."""
        self._logprobs: list[Logprob] = []
        self.calls = 0
        self.reasoning_tokens = 0

    @property
    def state(self) -> str | None:
        """What the answer is in now: "normal", "reasoning", "tool", or another state of the model's format."""
        return self._state

    @property
    def calls_tools(self) -> bool:
        """Whether it has a call of a tool, ends in one, or consists of them."""
        return self.calls > 0 or self._state == "tool" or self._parse_calls is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return self._stops.found

    def read_as_text(self) -> None:
        """Takes all that follows for text: it looks for no thought and no call any more."""
        if self._machine is not None and self._state == "normal":
            _, rest, _ = stock.TextStateMachine.flush(self._machine)
            self._unread, self._machine = rest, None

    def read(self, token: int, logprob: Logprob | None = None) -> tuple[list[Event], bool]:
        """Returns the events that this token completes, and whether the answer ends with it."""
        if token in self._ends:
            return [], True
        if logprob is not None:
            self._logprobs.append(logprob)
        self.reasoning_tokens += self._state == "reasoning"
        self._detokenizer.add_token(token)
        events = self._split(self._detokenizer.last_segment)
        return events, self._stops.found is not None

    def close(self, *, ended: bool = True) -> list[Event]:
        """Returns the events that were held back. Call it once, at the end. `ended`: the model ended its answer."""
        if self._stops.found is not None:
            return []
        self._detokenizer.finalize()
        events = self._split(self._detokenizer.last_segment)
        if self._machine is not None and self._state is not None:
            self._machine, rest, state = stock.TextStateMachine.flush(self._machine)
            events += self._in_state(state, rest)
        if self._call is not None:  # a model may end without the marker, and some have none
            events += self._end_call(whole=ended and not self._tokenizer.tool_call_end)
        if self._parse_calls is not None:
            events += self._end_whole(self._parse_calls, whole=ended)
        return events + self._text(self._stops.flush(), flushed=True)

    def _split(self, text: str) -> list[Event]:
        if self._machine is None:
            text, self._unread = self._unread + text, ""
            return self._in_state("normal", text)
        events: list[Event] = []
        if text:
            self._machine, segments = stock.TextStateMachine.split(self._machine, text)
            for state, part in segments:
                events += self._in_state(state, part)
        return events

    def _in_state(self, state: str | None, text: str) -> list[Event]:
        events: list[Event] = []
        if self._call is not None and state != "tool":
            events += self._end_call(whole=True)
        self._state = state
        if state == "tool":
            self._call = (self._call or "") + text
        elif state == "reasoning" and text and self._stops.found is None:
            events.append(Reasoning(text, self._take_logprobs()))
        elif state == "normal" and self._parse_calls is not None:
            self._whole += text
        elif state == "normal":
            events += self._text(text)
        return events

    def _text(self, text: str, *, flushed: bool = False) -> list[Event]:
        text = text if flushed else self._stops.feed(text)
        return [Text(text, self._take_logprobs())] if text else []

    def _take_logprobs(self) -> tuple[Logprob, ...]:
        taken, self._logprobs = tuple(self._logprobs), []
        return taken

    def _end_whole(self, parse: Callable[[str], list[tuple[str, Any]]], *, whole: bool) -> list[Event]:
        """Parses the whole text as calls. What was cut off is returned as text."""
        try:
            found = parse(self._whole) if whole else []
        except _UNPARSED as error:
            log.warning("a forced call could not be parsed and is sent as text: %s", error)
            found = []
        self.calls += len(found)
        calls = [_call({"name": name, "arguments": arguments}) for name, arguments in found]
        return [*calls] if calls else self._text(self._whole)

    def _end_call(self, *, whole: bool) -> list[Event]:
        """`whole`: the model wrote the end of the call. A call that was cut off is returned as text."""
        text, self._call = self._call or "", None
        raw = f"{self._tokenizer.tool_call_start}{text}" + (self._tokenizer.tool_call_end if whole else "")
        if self._tools is None or not whole:  # no tools were offered, or the call was cut off: it is text
            return self._text(raw)
        try:
            parsed = self._tokenizer.tool_parser(text, self._tools)
            calls = [_call(c) for c in (parsed if isinstance(parsed, list) else [parsed])]
        except _UNPARSED as error:
            log.warning("a tool call could not be parsed and is sent as text: %s: %s", type(error).__name__, error)
            return self._text(raw)
        self.calls += len(calls)
        return list(calls)


def _call(parsed: dict[str, Any]) -> ToolCall:
    arguments = parsed.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = parsed["name"]
    if not isinstance(name, str):
        raise TypeError(f"the name of a function is text, not {name!r}")
    return ToolCall(str(parsed.get("id") or f"call_{uuid.uuid4().hex[:24]}"), name, text)
