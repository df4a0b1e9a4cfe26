"""The lock of a cache, which one thread holds while it changes something, and which the disk writer can still get past.

A thread that calls the cache goes through both doors, so that no other caller sees a change half done. The writer
thread uses the inner one alone. A caller that must wait for the writer in the middle of a change opens the inner door
for that long, and not the outer.

Long work is a generator of steps (`Work`), which `run` advances with the lock held. At each `yield` everything is in
order, and the lock may be let go:

- `yield 0.0`   a step is done: evicting a node, copying a layer. The lock is let go once a stretch is over.
- `yield s`     there is nothing to do before the writer has done something: wait for that, at most `s` seconds.

After a `yield` other threads may have changed anything that the work does not hold.

A child of the process is refused: the thread that held the lock when it was forked is not there to let go of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from onefold.errors import ConfigError

Result = TypeVar("Result")
Work = Generator[float, None, Result]

STRETCH_SECONDS = 0.005
"""That work holds the lock for at a stretch; a step that takes longer is a stretch of its own."""
GIVE_WAY_SECONDS = 0.0005
"""Enough for a thread that waits to be woken and to take the lock."""


def run_through(work: Work[Result], wait: Callable[[float], object] = lambda seconds: None) -> Result:
    """Runs all steps of some work and returns its result."""
    while True:
        try:
            pause = next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if pause:
            wait(pause)


class CacheLock:
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

    def run(self, work: Work[Result]) -> Result:
        """Runs all steps of some work and returns its result. The lock is let go after each stretch, so that threads
        that wait get it. A thread that has the lock already keeps it throughout."""
        if self.is_held_here:
            return self.run_held(work)
        try:
            while True:
                with self:
                    stop = time.monotonic() + STRETCH_SECONDS
                    while True:
                        try:
                            pause = next(work)
                        except StopIteration as end:
                            return end.value  # type: ignore[no-any-return]
                        if pause or time.monotonic() > stop:
                            break
                self.between(pause)
        finally:
            with self:
                work.close()  # if it was interrupted in between: cleaning up needs the lock

    def between(self, pause: float) -> None:
        """Called without the lock, between two stretches of one piece of work."""
        if pause:
            with self.inner:
                self._changed.wait(pause)
        elif self._waiting:
            time.sleep(GIVE_WAY_SECONDS)

    def run_held(self, work: Work[Result]) -> Result:
        """Runs all steps while the caller holds the lock; only the disk writer gets in, where the work waits for it."""
        return run_through(work, self.wait)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Lets go of the lock for something slow, in the middle of what else needs it; not where a caller further up
        has it too, whose change may be half done."""
        if self._depth > 1:
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def wait(self, seconds: float) -> None:
        """Until something has changed, or so long. Both the writer and those who wait for it call this, inside."""
        self._changed.wait(seconds)

    def tell(self) -> None:
        """Something has changed. Called inside."""
        self._changed.notify_all()
