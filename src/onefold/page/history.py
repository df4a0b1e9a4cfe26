"""The requests that the page lists: those that run, and the last 200 that ended; and hit rates over time.

The server adds a request when it begins and when it ends; that costs some microseconds, and nothing else happens until
somebody looks. Holds counts and names, and of prompts only what a `Request` holds. Thread safe.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from onefold.engine.request import Hit

MOST_ENDED = 200
RECENT = 50
"""Requests whose first tokens, and lengths, are averaged."""


class Request(Protocol):
    """A request as the server knows it."""

    id: str
    method: str
    path: str
    status: int
    error: str
    conversation: str
    began: float
    """Seconds since 1970."""
    excerpt: str
    """Where a prompt diverged, with what is stored there; empty unless text is shown."""
    place: weakref.ref[Any] | None
    """Where its path ends in the tree."""

    def hit(self) -> Hit | None:
        """How much of its prompts was reused; None before it was admitted."""
        ...

    @property
    def seconds(self) -> float:
        """Since it began."""
        ...

    @property
    def generated(self) -> int: ...
    @property
    def time_to_first_token(self) -> float | None: ...
    @property
    def tokens_per_second(self) -> float | None: ...
    @property
    def finishes(self) -> str:
        """Why its answers ended, with commas; empty if none has."""
        ...


class Ended(NamedTuple):
    request: Request
    seconds: float


class HitRates:
    """The share of prompt tokens that was cached, over the last minutes."""

    SLOT_SECONDS = 5.0
    SLOTS = 180

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots: deque[list[int]] = deque()
        """The number of a slot of time, prompt tokens and cached tokens."""

    def add(self, prompt: int, cached: int) -> None:
        now = int(self._clock() / self.SLOT_SECONDS)
        if not self._slots or self._slots[-1][0] != now:
            self._slots.append([now, 0, 0])
        self._slots[-1][1] += prompt
        self._slots[-1][2] += cached
        while self._slots[0][0] <= now - self.SLOTS:
            self._slots.popleft()

    def share(self, seconds: float) -> float | None:
        """Returns the share over the last `seconds`; None if there was no prompt."""
        after = int((self._clock() - seconds) / self.SLOT_SECONDS)
        recent = [slot for slot in list(self._slots) if slot[0] > after]
        prompt = sum(slot[1] for slot in recent)
        return sum(slot[2] for slot in recent) / prompt if prompt else None


class History:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, Request] = {}
        self._ended: deque[Ended] = deque(maxlen=MOST_ENDED)
        self._admitted: deque[Request] = deque(maxlen=RECENT)
        """Those of the ended ones that were admitted."""
        self._rates = HitRates()
        self.from_disk = self.from_remote = 0
        """Requests for which KV was read from the disk, and from a shared store."""
        self.refused = 0
        """Requests that were refused because the server or its memory was full."""

    def began(self, request: Request) -> None:
        with self._lock:
            self._live[request.id] = request

    def ended(self, request: Request) -> None:
        hit = request.hit()
        with self._lock:
            self._live.pop(request.id, None)
            self.refused += request.status in (429, 503)
            if hit is not None:
                self._rates.add(hit.prompt_tokens, hit.cached)
                self._admitted.append(request)
                self.from_disk += hit.restored > 0
                self.from_remote += hit.remote > 0
            if hit is not None or request.status >= 400:
                self._ended.append(Ended(request, request.seconds))

    def rates(self, *seconds: float) -> list[float | None]:
        """Returns the hit rates over so many last seconds each."""
        with self._lock:
            return [self._rates.share(n) for n in seconds]

    def known(self) -> tuple[list[Request], list[Ended]]:
        """Returns the requests that run, and those that ended, the oldest first."""
        with self._lock:
            return list(self._live.values()), list(self._ended)

    def typical(self) -> tuple[float | None, int | None]:
        """Returns the median time to the first token, and the median length of a conversation, of the last requests
        that were admitted."""
        with self._lock:
            last = list(self._admitted)
        first = [t for r in last if (t := r.time_to_first_token) is not None]
        lengths = [hit.prompt_tokens + r.generated for r in last if (hit := r.hit()) is not None]
        return (
            statistics.median(first) if first else None,
            round(statistics.median(lengths)) if lengths else None,
        )
