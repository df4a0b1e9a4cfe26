"""Asking an engine from a test: whole answers, several at once, and the answer of a cold run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from onefold.engine.engine import Engine
from onefold.engine.request import Done, Event, Failed, Hit, Prompt, Reasoning, Request, Sampling, Text, ToolCall

GREEDY = Sampling(temperature=0)


@dataclass
class Answer:
    events: list[Event]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Text))

    @property
    def reasoning(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Reasoning))

    @property
    def calls(self) -> list[ToolCall]:
        return [e for e in self.events if isinstance(e, ToolCall)]

    @property
    def tokens(self) -> list[int]:
        """If logprobs were asked for."""
        return [p.token for e in self.events if isinstance(e, Text | Reasoning) for p in e.logprobs]

    @property
    def done(self) -> Done:
        assert isinstance(self.events[-1], Done), self.events[-1]
        return self.events[-1]

    @property
    def hit(self) -> Hit:
        return self.done.hit

    @property
    def error(self) -> Exception:
        assert isinstance(self.events[-1], Failed), self.events[-1]
        return self.events[-1].error


def prompt_of(tokens: Sequence[int]) -> Prompt:
    return Prompt(np.array(tokens, np.int32))


def request(tokens: Sequence[int] | Prompt, max_tokens: int | None = 8, **options: Any) -> Request:
    prompt = tokens if isinstance(tokens, Prompt) else prompt_of(tokens)
    options = {"sampling": GREEDY, "top_logprobs": 0, "plain": True, **options}
    return Request(prompt=prompt, max_tokens=max_tokens, **options)


def ask(engine: Engine, tokens: Sequence[int] | Prompt, max_tokens: int | None = 8, **options: Any) -> Answer:
    return Answer(list(engine.ask(request(tokens, max_tokens, **options))))


class Pending:
    """A request that was submitted and not waited for."""

    def __init__(self, engine: Engine, asked: Request) -> None:
        self.events: list[Event] = []
        self._ended = threading.Event()
        self._some = threading.Semaphore(0)
        self.number = engine.submit(asked, self._deliver)

    def _deliver(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, Text | Reasoning):
                self._some.release()
            if isinstance(event, Done | Failed):
                self._ended.set()

    def wait_for_text(self, pieces: int = 1) -> None:
        for _ in range(pieces):
            assert self._some.acquire(timeout=60)

    def wait(self) -> Answer:
        assert self._ended.wait(120), "no answer"
        return Answer(self.events)


def ask_all(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """All of them are in the queue before the first is begun."""
    gate = threading.Event()
    engine._mailbox.put(lambda _: gate.wait(60) and None)
    pending = [Pending(engine, r) for r in requests]
    gate.set()
    return [p.wait() for p in pending]


def cold(model: nn.Module, tokens: Sequence[int], n: int) -> list[int]:
    """Greedy tokens on mlx-lm's own caches."""
    cache, fed, found = make_prompt_cache(model), mx.array(list(tokens))[None], list[int]()
    for _ in range(n):
        token = mx.argmax(model(fed, cache=cache)[0, -1]).item()
        found.append(int(token))
        fed = mx.array([[token]])
    return found
