"""The lock of a cache. It has an outer and an inner part, so that a caller can wait for the disk writer.

A thread that calls the cache takes both parts, so that no other caller sees a change half done. The writer thread takes
the inner part alone. A caller that must wait for the writer in the middle of a change releases only the inner part
meanwhile.

Long work is a generator of steps (`Work`), which `run` advances with the lock held. At each `yield` everything is
consistent, and the lock may be released:

- `yield 0.0`   a step is done: a node is evicted, a layer is copied. `run` releases the lock after `STRETCH_SECONDS`.
- `yield s`     the work needs the writer to make progress: wait for that, at most `s` seconds.

After a `yield` other threads may have changed anything that the work does not hold.

A child process gets an error: after a fork, the thread that held the lock does not exist there to release it.
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
"""How long work holds the lock before it releases it for other threads; one step may take longer."""
GIVE_WAY_SECONDS = 0.0005
"""Enough time for a waiting thread to wake up and take the lock."""


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
        """Whether this is a child of the process that made the cache."""
        return os.getpid() != self._process

    def refuse_elsewhere(self) -> None:
        """Raises ConfigError in a child of the process that made the cache."""
        if self.is_elsewhere:
            raise ConfigError(
                f"a PrefixCache cannot be used after a fork: this one was made in process {self._process}. "
                "Make another one in the child"
            )

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
        """Whether this thread holds the lock."""
        if not self._outer.acquire(blocking=False):
            return False
        held = self._depth > 0
        self._outer.release()
        return held

    def _count(self, n: int) -> None:
        with self._counting:
            self._waiting += n

    def run(self, work: Work[Result], stretch_seconds: float | None = None) -> Result:
        """Runs all steps of some work and returns its result. Releases the lock after every `stretch_seconds`
        (`STRETCH_SECONDS` if None), so that waiting threads get it. If this thread held the lock before, it keeps it
        throughout."""
        if self.is_held_here:
            return self.run_held(work)
        try:
            while True:
                with self:
                    stop = time.monotonic() + (STRETCH_SECONDS if stretch_seconds is None else stretch_seconds)
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
        """Wait for the writer, or let waiting threads take the lock. Called without the lock, in the middle of work."""
        if pause:
            with self.inner:
                self._changed.wait(pause)
        elif self._waiting:
            time.sleep(GIVE_WAY_SECONDS)

    def run_held(self, work: Work[Result]) -> Result:
        """Runs all steps while the caller holds the lock. Only the disk writer can take its inner part, where the work
        waits for the writer."""
        return run_through(work, self.wait)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Releases the lock during a slow operation. Keeps it if a caller further up holds it too, because that
        caller's change may be half done."""
        if self._depth > 1:
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def wait(self, seconds: float) -> None:
        """Wait for `tell`, at most `seconds`. The writer, and callers that wait for it, call this with the inner part
        held."""
        self._changed.wait(seconds)

    def notify_all(self) -> None:
        """Wake the threads in `wait`. Called with the inner part held."""
        self._changed.notify_all()
