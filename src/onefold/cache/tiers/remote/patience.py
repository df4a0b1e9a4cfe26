"""How long one fetch from a shared store may go on: no longer than computing would take, and a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from onefold.cache.tiers.pace import Pace

UNMEASURED_MOST = 4
"""Deadlines that values may take, where it is not known how long computing takes."""


class Patience:
    def __init__(
        self, computing: Pace, deadline: float, n_tokens: int, n_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Its time begins now. So many bytes are read, so that `n_tokens` are not computed."""
        self._computing, self._clock, self._left = computing, clock, n_bytes
        self._began, self._read = clock(), 0
        expected = computing.estimate(n_tokens)
        self._most = deadline * UNMEASURED_MOST if expected is None else deadline + expected

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    @property
    def is_over(self) -> bool:
        return self.seconds > self._most

    def took(self, n_bytes: int) -> None:
        """So many bytes are there."""
        self._read += n_bytes
        self._left -= n_bytes

    def is_slower(self, n_tokens: int, n_coming: int) -> bool:
        """Whether what is left takes longer to read, as quickly as it came until now, than `n_tokens` to compute.
        `n_coming` bytes are being read: they count as there, since several values come at the same time."""
        computing, read = self._computing.estimate(n_tokens), self._read + n_coming
        return computing is not None and read > 0 and self.seconds / read * (self._left - n_coming) > computing
