"""Whether a shared store is asked at all: after a failure it is left alone for a while, and then tried once more."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from onefold.cache.tiers.remote.stores.store import StoreError

log = logging.getLogger("onefold")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds that a store is left alone after its first failure, and after many in a row."""


class Health:
    """Called from several threads; a lost update delays a try by one pause."""

    def __init__(
        self, use: str, shown: str, reasons: Counter[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`use` says what the store is used for: "read" or "written"."""
        self._use, self._shown, self._reasons, self._clock = use, shown, reasons, clock
        self._pause, self._until = 0.0, 0.0
        self.fault = ""
        """Why it was left alone at last; empty if it answers."""

    @property
    def usable(self) -> bool:
        return self._clock() >= self._until

    def failed(self, error: StoreError) -> None:
        """Note a failure. Logs the first in a row."""
        self._reasons[error.reason] += 1
        if not self.fault:
            log.warning("the shared store is not %s for now: %s", self._use, error)
        self.fault = str(error)
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._until = self._clock() + self._pause

    def answered(self) -> None:
        if self.fault:
            log.warning("the shared store %s is %s again", self._shown, self._use)
        self.fault, self._pause, self._until = "", 0.0, 0.0
