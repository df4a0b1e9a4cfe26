"""Waiting until dirty nodes are on disk.

`flush` returns False if something that was queued is not on disk, or would not survive a power loss. A node that was to
be written through and was evicted unwritten counts as lost; a `flush` reports it once.

Called with the cache's lock held, of which the inner part is enough: only the writing thread changes anything here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from onefold.cache.memory.lock import CacheLock
from onefold.cache.memory.payloads import Node
from onefold.cache.tiers.disk.backlog import Backlog
from onefold.cache.tiers.disk.jobs import Jobs
from onefold.cache.tiers.disk.writing import LOOK_AGAIN, Writer


class Flusher:
    def __init__(
        self,
        lock: CacheLock,
        backlog: Backlog,
        writer: Writer,
        jobs: Jobs,
        nodes: Callable[[], Iterable[Node]],
        *,
        through: bool,
    ) -> None:
        self._lock, self._backlog, self._writer, self._jobs, self._nodes = lock, backlog, writer, jobs, nodes
        self._through = through
        self._waiting = 0
        self._given_up = False
        self._lost = self._reported = 0
        """Nodes that were to be written through and were evicted before; and how many of them `flush` has reported."""

    @property
    def is_waiting(self) -> bool:
        """Whether a caller waits for a flush."""
        return self._waiting > 0

    def count_lost(self, node: Node) -> None:
        """The node leaves memory as it is; the next `flush` reports it, if it was to be written through and is not on
        disk."""
        self._lost += self._through and self._jobs.is_dirty(node)

    def flush(self, *, everything: bool, until: float, reports: bool = False) -> bool:
        """Write the queued nodes, or with `everything` all nodes, and wait until that is durable. Returns False if it
        took too long, or if a node could not be written. With `reports`, a lost node makes no later flush return
        False."""
        written = self.write(everything=everything, until=until, reports=reports)
        return self._sync(until) and written

    def _sync(self, until: float) -> bool:
        """Wait until the records that were written are durable. Returns False if they are not."""
        syncing = self._writer.syncing
        failures, wanted = syncing.failures, syncing.ask()
        self._lock.notify_all()
        while syncing.is_pending and syncing.covered < wanted:
            if not self._writer.alive or self._given_up or time.monotonic() > until or syncing.failures > failures:
                return False
            self._lock.wait(LOOK_AGAIN)
        return syncing.failures == failures

    def write(self, *, everything: bool, until: float, reports: bool = False) -> bool:
        """The same as `flush`, without waiting until the records are durable: on macOS a power loss may take the
        latest."""
        reported = self._reported
        if everything:
            self._backlog.want_all(sorted(self._nodes(), key=lambda n: -n.last_use))
        self._waiting += 1
        self._lock.notify_all()
        try:
            while self._backlog.next(None) is not None or self._backlog.more or not self._writer.idle:
                if not self._writer.alive or self._given_up or time.monotonic() > until:
                    return False
                self._lock.wait(LOOK_AGAIN)
        finally:
            self._waiting -= 1
        if self._lost > reported:
            self._reported = self._lost if reports else reported
            return False
        if everything and self.unsaved():
            return False
        return not (self._through or everything) or not self._backlog.left_over()

    def give_up(self) -> None:
        """End all flushes now, and later ones at once. Does not need the lock."""
        self._given_up = True

    def unsaved(self) -> int:
        """Returns how many tokens are in memory and not on disk."""
        dirty = [n for n in self._nodes() if n.span is not None and self._jobs.has_place(n)]
        return sum(n.end - max(n.start, n.below.readable if n.below is not None else 0) for n in dirty)

    def left(self, until: float) -> int:
        """Flush, and return how many tokens are in memory and not on disk; 0 if nothing is written any more."""
        if not self._writer.alive or self._writer.failed:
            return 0
        self.flush(everything=False, until=until)
        return self.unsaved()
