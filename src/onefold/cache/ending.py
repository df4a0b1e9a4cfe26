"""The end of a cache: leases are closed, dirty nodes written, and what was put into mlx-lm taken out again."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

import mlx.core as mx

from onefold.cache.clearing import Clearing
from onefold.cache.model import seam, stock
from onefold.cache.parts import Parts
from onefold.cache.request import closing
from onefold.errors import DeviceError, WrongThread

FORWARD_MOST = 60.0
"""Seconds that `close` waits for forwards: what they run on is taken out afterwards."""
WRITING_MOST = 600.0
"""Seconds that `close` waits for what is being written."""


class Ending:
    def __init__(self, parts: Parts, clearing: Clearing) -> None:
        self._parts = parts
        self._state = parts.state
        self._clearing = clearing
        self._endings: list[Callable[[], object]] = []
        """What `close` has begun, and has still to do."""

    @property
    def seconds(self) -> float:
        """How long `close` may take."""
        return 0.0 if self._parts.tier is None else WRITING_MOST

    def close(self) -> None:
        """Let go of everything, leases included, and take the attention seam out again. In a child of the process that
        made it there is nothing to let go of: neither MLX nor the folder works there."""
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
                    stock.unhook_saving,
                    self._close_accounts,
                    mx.clear_cache,
                ]
                self._state.closed = True
        if self._parts.tier is not None:
            self._parts.tier.stop(time.monotonic() + WRITING_MOST if self._endings else None)
        with self._state.lock:
            while self._endings:  # whoever is interrupted here may close once more
                self._endings[0]()
                del self._endings[0]

    def hurry(self) -> None:
        """Closing, on whatever thread, waits no longer for what is not on disk yet: that is lost."""
        if self._parts.tier is not None:
            self._parts.tier.give_up()

    def _end_leases(self) -> None:
        """Have leases that other threads are using settled by those threads, when their forwards have returned."""
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
            if not lease.closed:  # only a thread that is still there could compute what it holds
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
