"""Why a prompt cache did not keep something, or not all of it: counted, and logged the first time.

Every call of mlx-lm's server that can fail runs through `Reasons.attempt`, because an exception there ends the server's
thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from onefold import faults

log = logging.getLogger("onefold")

T = TypeVar("T")


class Reasons:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, reason: str, details: str, error: Exception | None = None) -> None:
        """Counts a reason. Logs it as a warning the first time, with the traceback of `error` if there is one; later
        tracebacks are logged at debug level."""
        self.counts[reason] += 1
        if self.counts[reason] == 1:
            log.warning("prompt cache: %s (%s)", reason, details, exc_info=error)
        elif error is not None:
            log.debug("prompt cache: %s (%s)", reason, details, exc_info=error)

    def attempt(self, work: Callable[[], T], otherwise: T, *, but: tuple[type[Exception], ...] = ()) -> T:
        """Returns what `work` returns, or `otherwise` if it raises any fault, which is counted and logged. Raises the
        faults `but`."""
        try:
            return work()
        except (*faults.NOT_CAUGHT, *but):
            raise
        except faults.EVERY_FAULT as error:  # broad on purpose: see there
            self.note(f"failed: {type(error).__name__}", str(error), error)
            return otherwise
