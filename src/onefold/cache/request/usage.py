"""Which thread is using a lease now, and how another thread closes it.

- One thread at a time uses a lease; any thread may, between two forwards.
- If another thread closes a lease during a forward, the forward's thread closes it after the forward has returned.

Refers to the hold, and not to the lease: nothing here keeps a dropped lease alive.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator

from onefold.cache.memory import device
from onefold.cache.request import closing
from onefold.cache.request.hold import Hold
from onefold.cache.request.turn import Turn
from onefold.errors import DeviceError, LeaseClosed, WrongThread

log = logging.getLogger("onefold")

CLOSING_MOST = 10.0
"""Seconds that a thread waits for another one that is closing the lease."""


class Usage:
    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self._turn = Turn()
        """Held by the thread that is in a forward, or is closing the lease."""
        self._closing = False
        """The thread that holds the turn is closing the lease."""
        self._ending: Callable[[], None] | None = None
        """How to close the lease after the forward, as another thread requested; None without a request."""

    def require_usable(self) -> None:
        """Raises LeaseClosed, WrongThread or DeviceError if this thread cannot use the lease now."""
        self.hold.refuse_closed()
        thread = self.hold.unscheduled
        if thread is None or thread is threading.current_thread():
            return
        try:
            device.evaluate([leaf.live_arrays() for leaf in self.hold.leaves])
        except RuntimeError as error:
            if thread.is_alive():
                raise WrongThread(
                    f"thread {thread.name!r} left lazy arrays in these layers, which only it can compute, because it "
                    "called a part of the model and not the model itself: evaluate the layers on that thread first"
                ) from error
            self.lose(error)
            raise DeviceError(
                f"thread {thread.name!r} ended before the arrays that it left in the layers were computed; they are "
                f"lost: {error}"
            ) from error
        self.hold.unscheduled = None

    def lose(self, error: Exception) -> None:
        """Close the lease and store nothing, because its layers' state cannot be computed."""
        with self.hold.state.lock:
            if not self.hold.closed:
                closing.lose(self.hold, error)

    def take_turn(self) -> None:
        """Give this thread the use of the lease until `end_turn`. Raises WrongThread if another thread is using it, and
        what `require_usable` raises."""
        if not self._turn.take():
            if self._closing and self._turn.wait(CLOSING_MOST) and self.hold.closed:
                raise LeaseClosed("another thread closed this lease: open another one")
            raise WrongThread("another thread is in a forward on this lease: wait until it has returned")
        usable = False
        try:
            if self.hold.state.closing:
                raise LeaseClosed("the cache of this lease is closed: open a lease on another cache")
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
        if self._ending is not None and self._turn.take():  # requested in between
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
        """Call `how` to close the lease: now, or after another thread's forward has returned."""
        if self.hold.closed:
            return
        if not self._turn.take():
            self._ending = how
            if not self._turn.take():
                return  # the thread that holds the turn checks `_ending` when it gives the turn back
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
        """Close the lease if another thread requested that. Called with the turn held."""
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
        """Close the lease and store nothing. Returns False if another thread is in a forward: that thread will close
        it."""
        self.end(functools.partial(closing.discard, self.hold))
        return self.hold.closed

    def close_dropped(self) -> bool:
        """Close a lease that was dropped without being closed, and store the prefilled part of its prompt. Returns
        False if its layers' state was lost. Raises WrongThread if only another thread can close it."""
        try:
            self.end(functools.partial(closing.cancel, self.hold))
        except DeviceError:
            log.debug("cannot evaluate a dropped lease", exc_info=True)
            return False
        return True

    def await_turn(self, seconds: float) -> bool:
        """Wait until no other thread is in a forward on this lease. Returns False after `seconds`."""
        return self._turn.wait(seconds)

    @property
    def busy_elsewhere(self) -> bool:
        """Whether another thread is in a forward on it, or has left lazy arrays that only that thread can compute."""
        return self.in_forward_elsewhere or self.hold.unscheduled not in (None, threading.current_thread())

    @property
    def in_forward_elsewhere(self) -> bool:
        return self._turn.is_elsewhere

    def recount(self) -> None:
        """Set the account of windows and states to exactly what they occupy, between forwards."""
        if not self.hold.closed and not self.in_forward_elsewhere:  # a running forward keeps its reservation
            self.hold.points.resize(self.hold.live_point_bytes(), force=True)
