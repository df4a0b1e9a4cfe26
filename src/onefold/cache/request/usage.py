"""Which thread is using a lease now, and its end when another thread asks for it.

- One thread at a time uses a lease; any thread may, between two forwards.
- A lease that another thread ends during a forward is ended by the forward's own thread, when that has returned.

Knows the hold, and not the lease: nothing here keeps a dropped lease alive.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator

import mlx.core as mx

from onefold.cache.request import closing
from onefold.cache.request.hold import Hold
from onefold.cache.request.turn import Turn
from onefold.errors import DeviceError, LeaseClosed, WrongThread

log = logging.getLogger("onefold")

CLOSING_MOST = 10.0
"""Seconds that a thread waits for another one that is ending the lease."""


class Usage:
    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self._turn = Turn()
        """Of the thread that is in a forward, or ends the lease."""
        self._closing = False
        """The thread that has the turn is ending the lease."""
        self._ending: Callable[[], None] | None = None
        """How another thread wanted it to end, during a forward."""

    def require_usable(self) -> None:
        """Raises if this thread cannot use the lease now."""
        self.hold.refuse_closed()
        thread = self.hold.unscheduled
        if thread is None or thread is threading.current_thread():
            return
        try:
            mx.eval([leaf.live_arrays() for leaf in self.hold.leaves])
        except RuntimeError as error:
            if thread.is_alive():
                raise WrongThread(
                    f"only thread {thread.name!r} can compute what it left in these layers, because it called a part "
                    "of the model and not the model itself: evaluate the layers there before another thread uses them"
                ) from error
            self.lose(error)
            raise DeviceError(f"what thread {thread.name!r} left in the layers is lost with it: {error}") from error
        self.hold.unscheduled = None

    def lose(self, error: Exception) -> None:
        """What the layers hold cannot be computed: close the lease, and keep nothing of it."""
        with self.hold.state.lock:
            if not self.hold.closed:
                closing.lose(self.hold, error)

    def take_turn(self) -> None:
        """This thread uses the lease until `end_turn`; WrongThread if another one does."""
        if not self._turn.take():
            if self._closing and self._turn.wait(CLOSING_MOST) and self.hold.closed:
                raise LeaseClosed("this lease was ended by another thread; its layers hold nothing any more")
            raise WrongThread("another thread is in the middle of a forward on this lease: wait until it has returned")
        usable = False
        try:
            if self.hold.state.closing:
                raise LeaseClosed("the cache of this lease is closed: open a lease on one that is open")
            self.require_usable()
            usable = True
        finally:
            if not usable:
                self._turn.give_back()
        here, before = threading.get_ident(), self.hold.thread
        if here != before:
            self.hold.thread = here
            with self.hold.state.lock:
                self.hold.state.thread_left(before)

    def end_turn(self) -> None:
        self._end_as_asked()
        self._turn.give_back()
        if self._ending is not None and self._turn.take():  # asked for in between
            self._end_as_asked()
            self._turn.give_back()

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        self.take_turn()
        try:
            yield
        finally:
            self.end_turn()

    def end(self, how: Callable[[], None]) -> None:
        """Call `how` to end the lease: now, or when the forward of another thread has returned."""
        if self.hold.closed:
            return
        if not self._turn.take():
            self._ending = how
            if not self._turn.take():
                return  # the thread that has the turn looks when it gives it back
        self._closing = True
        try:
            self._ending = None
            if not self.hold.closed:
                self.require_usable()
                how()
        finally:
            self._closing = False
            self._turn.give_back()

    def _end_as_asked(self) -> None:
        """End the lease if another thread wanted it to. With the turn."""
        if self._ending is not None:
            how, self._ending = self._ending, None
            self._closing = True
            try:
                if not self.hold.closed:
                    with contextlib.suppress(DeviceError):
                        how()
            finally:
                self._closing = False

    def discard_now(self) -> bool:
        """Close without keeping anything. Returns False if another thread is in a forward: that thread will do it."""
        self.end(functools.partial(closing.discard, self.hold))
        return self.hold.closed

    def close_dropped(self) -> bool:
        """Close a lease that was dropped without being closed, and keep the prefilled part of its prompt. Returns False
        if what its layers held was lost. Raises WrongThread if only another thread can close it."""
        try:
            self.end(functools.partial(closing.cancel, self.hold))
        except DeviceError:
            log.debug("a dropped lease could not be evaluated", exc_info=True)
            return False
        return True

    def await_turn(self, seconds: float) -> bool:
        """Wait until no other thread is in a forward on this lease; False if it took longer."""
        return self._turn.wait(seconds)

    @property
    def busy_elsewhere(self) -> bool:
        """Whether another thread is in a forward on it, or has left what only that thread can compute."""
        return self.in_forward_elsewhere or self.hold.unscheduled not in (None, threading.current_thread())

    @property
    def in_forward_elsewhere(self) -> bool:
        return self._turn.is_elsewhere

    def recount(self) -> None:
        """Between steps: exactly what is there, for statistics and checks."""
        if not self.hold.closed and not self.in_forward_elsewhere:  # what a forward has reserved stays reserved
            self.hold.points.resize(self.hold.live_point_bytes(), force=True)
