"""Closes a cache: closes leases, writes dirty nodes, and removes the hooks from mlx-lm."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

from onefold.cache.clearing import Clearing
from onefold.cache.memory import device
from onefold.cache.model import linear, seam, stock
from onefold.cache.parts import Parts
from onefold.cache.request import closing
from onefold.errors import DeviceError, WrongThread

FORWARD_MOST = 60.0
"""Seconds that `close` waits for forwards, before it removes the attention seam that they use."""
WRITING_MOST = 600.0
"""Seconds that `close` waits for dirty nodes to be written."""


class Ending:
    def __init__(self, parts: Parts, clearing: Clearing) -> None:
        self._parts = parts
        self._state = parts.state
        self._clearing = clearing
        self._endings: list[Callable[[], object]] = []
        """The steps of `close` that are still to be done, if it was interrupted."""

    @property
    def seconds(self) -> float:
        """The most seconds that `close` takes to write dirty nodes."""
        return 0.0 if self._parts.tier is None else WRITING_MOST

    def close(self) -> None:
        """See `PrefixCache.close`. If it is interrupted, it can be called again and continues."""
        if self._state.lock.is_elsewhere:
            return
        self._state.closing = True
        self._end_leases()
        with self._state.lock:
            if not self._state.closed:
                self._close_leases()
                self._endings = [
                    self._leave_tier,
                    lambda: self._state.lock.run_held(self._clearing.dropping(disk=True)),
                    functools.partial(seam.uninstall, self._parts.seam),
                    *(functools.partial(seam.unwatch, cls) for cls in self._parts.watched),
                    functools.partial(linear.uninstall, self._parts.linear),
                    stock.unhook_saving,
                    self._close_accounts,
                    device.clear_pool,
                ]
                self._state.closed = True
        if self._parts.tier is not None:
            self._parts.tier.stop(time.monotonic() + WRITING_MOST if self._endings else None)
        with self._state.lock:
            while self._endings:  # an interrupted call leaves the rest for the next
                self._endings[0]()
                del self._endings[0]

    def hurry(self) -> None:
        """Make `close`, on any thread, stop waiting for dirty nodes to be written: they are lost."""
        if self._parts.tier is not None:
            self._parts.tier.give_up()

    def _end_leases(self) -> None:
        """Wait until other threads have closed the leases that they are using, after their forwards have returned."""
        until = time.monotonic() + FORWARD_MOST
        while time.monotonic() < until:
            with self._state.lock:
                leases = [x for x in self._state.leases if x.usage.in_forward_elsewhere]
            if not leases:
                return
            for lease in leases:
                if not lease.usage.discard_now():
                    lease.usage.await_turn(max(0.0, until - time.monotonic()))

    def _close_leases(self) -> None:
        for lease in [*self._state.leases, *self._state.dropped]:
            with contextlib.suppress(DeviceError, WrongThread):
                if not lease.usage.discard_now():  # its thread closes it
                    continue
            if not lease.closed:  # another thread's lazy arrays cannot be computed here: drop them
                closing.release(lease.hold)
        self._state.dropped.clear()
        for restore in list(self._state.restores):
            restore.finish()

    def _leave_tier(self) -> None:
        if self._parts.tier is not None:
            self._parts.tier.close()
            self._state.nodes.tier = None

    def _close_accounts(self) -> None:
        self._state.scratch.close()
        self._state.pool.close()
