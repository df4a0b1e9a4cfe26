"""Lets one thread at a time do a piece of work, in the order of `ageing`: the one that has the least left comes first.

For work in pieces that must not take more than one core, nor delay short work behind long work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from onefold.engine.ageing import next_of, note_turn


class Visitor:
    """One task in several pieces that passes a turnstile."""

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
            note_turn(visitor, self._waiting)
        try:
            yield
        finally:
            with self._changed:
                self._inside = False
                self._changed.notify_all()

    def _next(self) -> Visitor:
        return next_of(self._waiting, lambda visitor: visitor.left)
