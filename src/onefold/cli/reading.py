"""One answer as it comes in: what was said, what the prompt found, and when.

Times are the listener's: from when it asked to when it heard. Knows neither where the answer comes from nor where it
is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from onefold.engine.request import Done, Event, Hit, Reasoning, Started, Text


class Reading:
    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._asked_at = now()
        self._first_at: float | None = None
        self._last_at = self._asked_at
        self.text = ""
        self.reasoning = ""
        self.hit: Hit | None = None
        self.done: Done | None = None
        """None: it was stopped."""

    def add(self, event: Event) -> None:
        match event:
            case Started(hit):
                self.hit = hit
            case Text(text):
                self.text += text
                self._heard()
            case Reasoning(text):
                self.reasoning += text
                self._heard()
            case Done():
                self.done, self.hit = event, event.hit

    def _heard(self) -> None:
        self._last_at = self._now()
        if self._first_at is None:
            self._first_at = self._last_at

    @property
    def seconds_to_first(self) -> float | None:
        return None if self._first_at is None else self._first_at - self._asked_at

    @property
    def completion_tokens(self) -> int:
        """0 if the answer was stopped: then there is no count."""
        return 0 if self.done is None else self.done.completion_tokens

    @property
    def tokens_per_second(self) -> float | None:
        """From the first token on."""
        if self._first_at is None or self.completion_tokens < 2 or self._last_at <= self._first_at:
            return None
        return (self.completion_tokens - 1) / (self._last_at - self._first_at)
