"""Lets one thread at a time do a piece of work: the one that has the least left, unless another waited too often.

For work in pieces that must not take more than one core, nor hold up what is short behind what is long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PASSED_OVER = 4
"""Pieces of shorter work, after which longer work gets one of its own."""


class Visitor:
    """One work of several pieces, on its way through a turnstile."""

    def __init__(self) -> None:
        self.left = 0
        self.passed_over = 0


class Turnstile:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Visitor] = []
        self._inside = False

    @contextmanager
    def turn(self, visitor: Visitor, left: int) -> Iterator[None]:
        """Waits for this visitor's turn, and ends it with the block. `left`: how much it has to do, this included."""
        visitor.left = left
        with self._changed:
            self._waiting.append(visitor)
            try:
                while self._inside or self._next() is not visitor:
                    self._changed.wait()
                self._inside = True
            finally:
                self._waiting.remove(visitor)
            visitor.passed_over = 0
            for other in self._waiting:
                other.passed_over += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside = False
                self._changed.notify_all()

    def _next(self) -> Visitor:
        neglected = max(self._waiting, key=lambda v: v.passed_over)
        return neglected if neglected.passed_over >= PASSED_OVER else min(self._waiting, key=lambda v: v.left)
