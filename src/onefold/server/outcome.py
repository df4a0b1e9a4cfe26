"""The events of one choice, put together again; and what all choices of a request cost. Knows no API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onefold.engine.request import Done, Event, Hit, Logprob, Reasoning, Started, Text, ToolCall

Piece = Text | Reasoning | ToolCall


class Outcome:
    """Pieces in their order; text that follows text is one piece."""

    def __init__(self) -> None:
        self.done: Done | None = None
        self._pieces: list[tuple[type, list[Piece]]] = []

    def add(self, event: Event) -> None:
        if isinstance(event, Done):
            self.done = event
        elif isinstance(event, (Text, Reasoning, ToolCall)):
            kind = type(event)
            if kind is not ToolCall and self._pieces and self._pieces[-1][0] is kind:
                self._pieces[-1][1].append(event)
            else:
                self._pieces.append((kind, [event]))

    @property
    def pieces(self) -> list[Piece]:
        made: list[Piece] = []
        for kind, events in self._pieces:
            if kind is ToolCall:
                made += events
            else:
                text = "".join(e.text for e in events if not isinstance(e, ToolCall))
                logprobs = tuple(p for e in events if not isinstance(e, ToolCall) for p in e.logprobs)
                made.append(kind(text, logprobs))
        return made

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.pieces if isinstance(p, Text))

    @property
    def reasoning(self) -> str:
        return "".join(p.text for p in self.pieces if isinstance(p, Reasoning))

    @property
    def calls(self) -> list[ToolCall]:
        return [p for p in self.pieces if isinstance(p, ToolCall)]

    @property
    def logprobs(self) -> list[Logprob]:
        """The log probabilities of the text's tokens."""
        return [lp for p in self.pieces if isinstance(p, Text) for lp in p.logprobs]


@dataclass(frozen=True)
class Usage:
    prompt: int
    cached: int
    completion: int
    reasoning: int


class Tally:
    """Counts what choices cost. Those of one prompt share it: it is counted once, as it was found by the first."""

    def __init__(self, choices_per_prompt: int = 1) -> None:
        self._per_prompt = choices_per_prompt
        self._hits: dict[int, Hit] = {}
        self._done: dict[int, Done] = {}

    def add(self, choice: int, event: Event) -> None:
        if isinstance(event, Started):
            self._hits.setdefault(choice // self._per_prompt, event.hit)
        elif isinstance(event, Done):
            self._done[choice] = event

    @property
    def usage(self) -> Usage:
        hits: Mapping[int, Hit] = self._hits
        return Usage(
            prompt=sum(h.prompt_tokens for h in hits.values()),
            cached=sum(h.cached for h in hits.values()),
            completion=sum(d.completion_tokens for d in self._done.values()),
            reasoning=sum(d.reasoning_tokens for d in self._done.values()),
        )
