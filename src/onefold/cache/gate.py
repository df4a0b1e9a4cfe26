"""The lock of a cache, which one thread holds while it changes something, and which the disk writer can still get past.

Whoever calls the cache goes through both doors, so that no other caller sees a change half done. The writer thread uses
the inner one alone. A caller that must wait for the writer opens the inner door for that long, and not the outer.

Long bookkeeping is done in stretches, each with the lock held; `between` them the threads that wait come first.

A child of the process is refused: whoever held the lock when it was forked is not there to let go of it.
"""

from __future__ import annotations

import os
import threading
import time

from onefold.errors import ConfigError

STRETCH_SECONDS = 0.005
"""That bookkeeping holds the lock at a stretch, where it can be interrupted."""
GIVE_WAY_SECONDS = 0.0005
"""Enough for a thread that waits to be woken and to take the lock."""


class Gate:
    def __init__(self) -> None:
        self._outer = threading.RLock()
        self.inner = threading.RLock()
        self._changed = threading.Condition(self.inner)
        self._process = os.getpid()
        self._depth = 0
        self._waiting = 0
        self._counting = threading.Lock()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a child of the process that the cache is of."""
        return os.getpid() != self._process

    def refuse_elsewhere(self) -> None:
        if self.is_elsewhere:
            raise ConfigError(f"this cache is process {self._process}'s: a child of that needs one of its own")

    def __enter__(self) -> None:
        self.refuse_elsewhere()
        self._count(1)
        try:
            self._outer.acquire()
        finally:
            self._count(-1)
        entered = False
        try:
            self.inner.acquire()
            entered = True
            self._depth += 1
        finally:
            if not entered:  # interrupted while the writer was inside
                self._outer.release()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        try:
            self.inner.release()
        finally:
            self._outer.release()

    @property
    def is_held_here(self) -> bool:
        """Whether this thread has the lock already."""
        if not self._outer.acquire(blocking=False):
            return False
        held = self._depth > 0
        self._outer.release()
        return held

    def _count(self, n: int) -> None:
        with self._counting:
            self._waiting += n

    def between(self) -> None:
        """Called outside, between two stretches of one long piece of work: lets those in who wait now."""
        if self._waiting:
            time.sleep(GIVE_WAY_SECONDS)

    def wait(self, seconds: float) -> None:
        """Until something has changed, or so long. Both the writer and those who wait for it call this, inside."""
        self._changed.wait(seconds)

    def tell(self) -> None:
        """Something has changed. Called inside."""
        self._changed.notify_all()
