"""Which thread is using a lease now. One at a time; whoever else comes is told, and never blocks its user."""

from __future__ import annotations

import threading


class Turn:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._depth = 0

    def take(self) -> bool:
        """This thread uses the lease until it gives the turn back as often; False if another thread does."""
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
        """Wait until no other thread has it; False if that took longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_elsewhere, seconds)
