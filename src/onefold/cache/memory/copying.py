"""A copy of a buffer that is made in steps, a layer at a time, and that any thread with the lock may continue.

Between two steps some layers are copied and others are not, so no thread can read the buffer. A thread that needs it
does the remaining steps itself (`finishing`), instead of waiting for the thread that began the copy. If a step fails
there, the thread that began the copy gets the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol

from onefold.cache.memory.lock import Result, Work
from onefold.errors import OnefoldError


class Copied(Protocol):
    """A buffer. It refers to the copy that is being made of it, so that other threads find it."""

    copying: Copying | None  # type: ignore[type-arg]


class Copying(Generic[Result]):
    def __init__(self, work: Work[Result], buffers: Sequence[Copied]) -> None:
        """`work` must leave everything consistent when it returns or raises."""
        self._work = work
        self._buffers = buffers
        self._running = False
        self._done = False
        self._result: Result | None = None
        self._error: Exception | None = None
        for buffer in buffers:
            buffer.copying = self

    @property
    def is_suspended(self) -> bool:
        """Whether steps are left, and none of them is running. (A running step is the calling thread's own.)"""
        return not self._done and not self._running

    def steps(self) -> Work[Result | None]:
        """Does the remaining steps, on the thread that began the copy; returns the result. Raises the error of a step
        that failed on another thread."""
        yield from self._rest()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

    def finishing(self) -> Work[None]:
        """Does the remaining steps, on another thread. Errors are kept for the thread that began the copy."""
        try:
            yield from self._rest()
        except (RuntimeError, MemoryError, OnefoldError) as error:
            self._error = error.with_traceback(None)  # which would keep arrays alive

    def _rest(self) -> Work[None]:
        while self.is_suspended:
            pause = self._advance()
            if not self._done:
                yield pause

    def _advance(self) -> float:
        self._running, has_more = True, False
        try:
            pause = next(self._work)
            has_more = True
            return pause
        except StopIteration as end:
            self._result = end.value
            return 0.0
        finally:
            self._running = False
            if not has_more:
                self._done = True
                for buffer in self._buffers:
                    buffer.copying = None
