"""What every endpoint needs: the engine, the settings, the metrics, and threads for work that blocks.

Each request is parsed, rendered and tokenised on a thread of its own, never on the event loop, so that none waits for
another that is longer. The tokeniser sees to it that all of them together take one core at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from onefold.engine import wanted
from onefold.engine.engine import Engine
from onefold.engine.request import Hit, Sampling
from onefold.errors import BadRequest, Busy, UnknownModel
from onefold.page.history import History
from onefold.server.metrics import Metrics
from onefold.server.settings import Settings

log = logging.getLogger("onefold.server")

T = TypeVar("T")

MOST_PREPARING = 256
"""Requests whose bodies are held before the engine, which has a queue of its own, knows of them. Each has a thread."""
MOST_TOLD = 100
"""Texts that are logged once."""


class Service:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics(engine.stats)
        self.history = History()
        self._threads: ThreadPoolExecutor | None = None
        self._preparing = 0
        self._counting = threading.Lock()
        self._told: set[str] = set()

    async def prepare(self, make: Callable[[], T]) -> T:
        """Runs `make` on a thread for prompts; if this is cancelled, `make` ends at its next piece of text. Raises Busy
        if there are too many of them."""
        if self._preparing >= MOST_PREPARING:
            raise Busy(f"{self._preparing} requests are waiting to be tokenised; try again.", retry_after=1)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MOST_PREPARING, thread_name_prefix="onefold-prompt")
        unwanted = threading.Event()
        work = self._threads.submit(wanted.run, unwanted, make)
        with self._counting:
            self._preparing += 1
        work.add_done_callback(self._prepared)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            unwanted.set()
            raise
        except RecursionError:  # a template may go down into a tool's schema by calling itself
            raise BadRequest("The request is nested too deeply.") from None

    def _prepared(self, _: object) -> None:
        """Called when the thread is free, not when the client has left: until then the body is held."""
        with self._counting:
            self._preparing -= 1

    def close(self) -> None:
        """Ends the threads for prompts; others are made if they are needed again."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    @property
    def model(self) -> str:
        return self.engine.model_id

    def serves(self, name: str | None) -> bool:
        """Whether a request may name the model so. A model of a folder may be named by any path that ends in its
        name, as clients may have kept one."""
        own = {self.model, _last_part(self.model), "default", "", *self.settings.aliases}
        return name is None or name in own or "*" in own or _last_part(name) == self.model

    def check_model(self, name: str | None) -> None:
        if not self.serves(name):
            raise UnknownModel(f"The model {str(name)[:100]!r} is not served here; use {self.model!r}.")

    def log_once(self, told: str) -> None:
        """Logs this, unless it was logged before. Of what clients can vary, the first hundred are logged."""
        with self._counting:
            if told in self._told or len(self._told) >= MOST_TOLD:
                return
            self._told.add(told)
        log.info("%s", told)

    def defaults(self) -> Sampling:
        return self.settings.defaults(self.engine.defaults)

    def namespace(self, key: str) -> str:
        """Returns the namespace of requests with this API key. KV is shared only within a namespace."""
        return hashlib.sha256(key.encode()).hexdigest()[:32] if self.settings.namespace_per_key and key else ""

    def shown(self, hit: Hit) -> Hit:
        """What a client may be told of a hit. Where its prompt diverged, the engine also quotes what is stored, which
        may be another client's if KV is shared among several API keys."""
        if len(self.settings.api_keys) < 2 or self.settings.namespace_per_key:
            return hit
        return replace(hit, diverged=hit.diverged.partition(": known ")[0])


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
