"""The bound of a bounded conversation."""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    max_size: int
    keep: int
