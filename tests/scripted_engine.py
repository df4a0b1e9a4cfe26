"""An engine without a model: what it answers is written down by the test, and what it is asked is kept.

It has the interface of `onefold.engine.engine.Engine` as far as the server uses it. Scripts run on a thread of its own,
as the real one's events do.

    engine = ScriptedEngine(lambda request: [Started(...), Text("hello"), Done(...)])

A script is a list of events, a `threading.Event` in it is waited for, a number is a pause in seconds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onefold.cache.stats import Stats
from onefold.cache.tiers.disk.tier import DiskStats
from onefold.engine.engine import EngineStats
from onefold.engine.request import Done, Event, Hit, Prompt, Request, Sampling, Started, Text
from onefold.errors import EngineStopped

Script = Iterable[Event | threading.Event | float]

HIT = Hit(prompt_tokens=10, matched=7, cached=6, reason="short", diverged="token 7: known 'a', now 'é\n%'")


def says(*pieces: str, finish: Any = "stop") -> list[Event]:
    return [Started(HIT), *map(Text, pieces), Done(finish, len(pieces), HIT)]


class ScriptedEngine:
    def __init__(self, script: Callable[[Request], Script] = lambda request: says("hello")) -> None:
        self.model_id = "some/folder/scripted"
        self.context_length: int | None = 4096
        self.most_tokens = 1000
        self.defaults = Sampling(temperature=0.6, top_p=0.95, top_k=20)
        self.script = script
        self.chats: list[dict[str, Any]] = []
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.refuses: Exception | None = None
        self.alive = True
        self.lost: Exception | None = None
        self._numbers = itertools.count(1)
        self._threads: list[threading.Thread] = []

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        of_any_length: bool = False,
    ) -> Prompt:
        self.chats.append({"messages": messages, "tools": tools, "template_options": template_options})
        return Prompt(np.arange(10, dtype=np.int32))

    def text(self, prompt: str | Sequence[int]) -> Prompt:
        return Prompt(np.arange(max(1, len(prompt)), dtype=np.int32))

    def submit(self, request: Request, deliver: Callable[[list[Event]], None]) -> int:
        if self.refuses is not None:
            raise self.refuses
        if not self.alive:
            raise EngineStopped("the engine has stopped")
        number = next(self._numbers)
        self.requests.append(request)
        thread = threading.Thread(target=self._run, args=(number, self.script(request), deliver), daemon=True)
        self._threads.append(thread)
        thread.start()
        return number

    def _run(self, number: int, script: Script, deliver: Callable[[list[Event]], None]) -> None:
        for step in script:
            if isinstance(step, threading.Event):
                step.wait(60)
            elif isinstance(step, float):
                threading.Event().wait(step)
            elif number not in self.cancelled:
                deliver([step])

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def stats(self) -> EngineStats:
        zeros = {name: 0 for name in Stats.__dataclass_fields__}
        held: dict[str, Any] = {"bytes": {"live": 5, "stored": 7}, "reasons": {"nothing known": 1}, "budget_bytes": 100}
        held["disk"] = DiskStats(mode="back", used_bytes=11, spilled_tokens=13)
        held["remote"] = DiskStats(mode="remote", written_bytes=17)
        totals = {name: 0 for name in EngineStats.__dataclass_fields__}
        return EngineStats(**{**totals, "queued": 2, "cache": Stats(**{**zeros, **held})})

    def clear(self) -> tuple[int, int]:
        return 12, 34

    def stop(self, timeout_seconds: float | None = None) -> None:
        self.alive = False
