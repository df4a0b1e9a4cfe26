"""The turn: the right to use a lease, which one thread has at a time. `take` returns False to other threads at once."""

from __future__ import annotations

import threading


class Turn:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._depth = 0

    def take(self) -> bool:
        """Take the turn; call `give_back` as often. Returns False if another thread has it."""
        here = threading.get_ident()
        with self._changed:
            if self._holder not in (None, here):
                return False
            self._holder, self._depth = here, self._depth + 1
            return True

    def give_back(self) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._holder = None
                self._changed.notify_all()

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread has it."""
        return self._holder not in (None, threading.get_ident())

    def wait(self, seconds: float) -> bool:
        """Wait until no other thread has it. Returns False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_elsewhere, seconds)
