"""Chooses the next job: the one with the least left to do, unless another was passed over too often.

So short work need not wait for long work, and long work is never starved by short work that keeps coming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

PASSED_OVER = 4
"""Turns of shorter work, after which longer work gets one of its own."""


class Ages(Protocol):
    passed_over: int
    """Turns that others got since its own last one."""


Waiting = TypeVar("Waiting", bound=Ages)


def next_of(waiting: Sequence[Waiting], left: Callable[[Waiting], int]) -> Waiting:
    """Returns the job whose turn it is. `left` returns how much a job has to do. There must be at least one job."""
    neglected = max(waiting, key=lambda one: one.passed_over)
    return neglected if neglected.passed_over >= PASSED_OVER else min(waiting, key=left)


def note_turn(chosen: Ages, others: Iterable[Ages]) -> None:
    """Counts a turn of `chosen`, for which the others were passed over."""
    for one in others:
        one.passed_over += 1
    chosen.passed_over = 0
