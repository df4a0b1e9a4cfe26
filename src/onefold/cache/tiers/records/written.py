"""How many bytes of records were written to a folder, on a day and ever. No MLX in this file."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple

WRITTEN = "written.json"


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
