"""How many bytes of records were written to a folder, on a day and ever; and the daily limit.

No MLX in this file, and no file is touched.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from onefold.sizes import show_size

log = logging.getLogger("onefold")

WRITTEN = "written.json"
_NOTE_EVERY = 64 << 20
"""Bytes that are written before they are noted on disk."""


class Written(NamedTuple):
    """Bytes of records that were written: on a day, and ever."""

    day: str
    today: int
    ever: int


def day_of(moment: float, later: int = 0) -> str:
    """Returns the day of a moment, or so many days later, as `Written` has it. Later days compare greater."""
    return (datetime.date.fromtimestamp(moment) + datetime.timedelta(later)).isoformat()


def parse_written(found: dict[str, Any]) -> Written:
    """Returns what a `written.json` says; zeros for what it does not say."""
    return Written(str(found.get("day", "")), _count(found.get("today")), _count(found.get("ever")))


def _count(found: Any) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else 0


class WriteCounter:
    """Counts the bytes of records that are written, and refuses those beyond a daily limit.

    The count of a day never goes back with the clock: it is that of the latest day there was, until that day is over.
    A stored day that is more than one day ahead is treated as today.
    """

    def __init__(self, written: Written, daily_bytes: int | None, clock: Callable[[], float]) -> None:
        self._day, self.today, self.ever = written
        self.daily_bytes = daily_bytes
        self.clock = clock
        self.coming = 0
        """Bytes of records that are about to be written."""
        self._noted = self.ever
        self._logged_on = ""
        """The day on which the limit was logged."""

    def refuses(self, n_bytes: int) -> bool:
        """Whether so many more bytes would pass today's limit."""
        if self.daily_bytes is None or self._count_today() + self.coming + n_bytes <= self.daily_bytes:
            return False
        if self._logged_on != self._day:
            self._logged_on = self._day
            log.warning(
                "writing to disk is paused until tomorrow: %s were written today, and another %s would pass the "
                "daily limit of %s",
                show_size(self.today + self.coming),
                show_size(n_bytes),
                show_size(self.daily_bytes),
            )
        return True

    def arrived(self, n_bytes: int) -> None:
        """So many bytes were written."""
        self._count_today()
        self.today += n_bytes
        self.ever += n_bytes

    def _count_today(self) -> int:
        now = self.clock()
        if day_of(now) > self._day:
            self._day, self.today = day_of(now), 0
        elif self._day > day_of(now, later=1):
            self._day = day_of(now)
        return self.today

    @property
    def is_unnoted(self) -> bool:
        """Whether bytes were written that a restart would not know of."""
        return self.ever != self._noted

    def take_note(self, *, force: bool) -> Written | None:
        """Returns the counts, if they are to be noted on disk now: not every time, unless that is forced."""
        if not self.is_unnoted or not (force or self.ever - self._noted >= _NOTE_EVERY):
            return None
        self._noted = self.ever
        return Written(self._day, self.today, self.ever)
