"""Spilling: which dirty nodes are written to disk, when, and who waits for it.

- A buffer that a request writes to is not copied before the request has ended. A request that wants to continue in a
  buffer that is still dirty has it copied first, or continues in another one.
- Write-through: at commit. Write-back: the least recently used nodes, when memory is nearly full; then nodes that are
  evicted while dirty, and the eviction waits for that; and everything, when the cache is closed.

    node     committed -> queued -> room reserved -> copied out -> written, renamed -> settled
                         (backlog)   (jobs; lock)    (writing)       (writing)        (outcomes; lock)

All methods are called with the cache's lock held, but for `stop`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from onefold.cache.memory import arrays
from onefold.cache.memory.checkpoints import POINTS_SHARE
from onefold.cache.memory.eviction import leaves
from onefold.cache.memory.ledger import Ledger, Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.segment import Slab, Store
from onefold.cache.memory.state import CacheState
from onefold.cache.tiers import host
from onefold.cache.tiers.disk import jobs
from onefold.cache.tiers.disk.backlog import Backlog, Refusals
from onefold.cache.tiers.disk.flushing import Flusher
from onefold.cache.tiers.disk.linking import Links
from onefold.cache.tiers.disk.ondisk import check_node, covered_to, is_being_written, is_clean, is_covered
from onefold.cache.tiers.disk.outcomes import Outcomes
from onefold.cache.tiers.disk.staging import Staging
from onefold.cache.tiers.disk.syncing import Syncing
from onefold.cache.tiers.disk.writing import LOOK_AGAIN, Job, Writer
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.reasons import DiskReason

RECORD_BYTES = 8 << 20
"""The most KV of a range record."""
BUFFERS_MOST = 8
BUFFER_LEAST = 1 << 16
BUFFERS_SHARE = 32
"""Share of the budget that is always reserved for records that are being written."""
STAGED_SHARE = 16
"""Share of the budget that they may take for a while, if it is free."""
PIECE_MOST = 1 << 20
"""Bytes that are reserved for reading a checkpoint that does not lie in order."""
POINTS_MOST = 8
"""Checkpoints that wait to be written ahead of their turn."""
YIELD_SECONDS = 0.02
"""How long a request copies out dirty buffers that it wants to write to."""
COPY_SECONDS = 1.0
"""How long a copy is waited for; it takes a few thousandths of that."""
CLEAN_FROM = 0.15
"""A share of the budget: this far below the level where reclaiming begins, the oldest nodes are written ahead."""
TRIES = 16
"""Nodes that are tried in one go, with the lock held."""


class Sizes(NamedTuple):
    """How large records are, and the buffers through which they leave memory."""

    record_bytes: int
    record_tokens: int
    buffer_bytes: int
    n_buffers: int
    piece_bytes: int
    """For a checkpoint that does not lie in order."""
    reserved_bytes: int

    @classmethod
    def for_cache(cls, store: Store, ledger: Ledger, layout: Layout) -> Sizes:
        """Returns the sizes that fit a cache's budget and its model."""
        record_bytes = min(RECORD_BYTES, max(1 << 16, ledger.budget_bytes // 64))
        per_token = store.token_bytes + 4
        record_tokens = max(1, record_bytes // per_token) if store.token_bytes else jobs.HOLLOW_TOKENS
        buffer_bytes = max(BUFFER_LEAST, record_tokens * store.token_bytes)
        n_buffers = max(2, min(BUFFERS_MOST, ledger.budget_bytes // BUFFERS_SHARE // buffer_bytes))
        copies = 0 if arrays.addressable() else host.COPIED
        piece_bytes = min(PIECE_MOST, buffer_bytes) if layout.has_points else 0
        reserved = (n_buffers + copies) * buffer_bytes + piece_bytes
        return cls(record_bytes, record_tokens, buffer_bytes, n_buffers, piece_bytes, reserved)


class Spiller:
    def __init__(
        self,
        state: CacheState,
        links: Links,
        layout: Layout,
        *,
        through: bool,
        space_of: Callable[[Node], str | None],
    ) -> None:
        """`space_of` returns the name on disk of a node's namespace, None if it has none."""
        self.catalog = links.catalog
        self.through = through
        self._reasons: Counter[str] = Counter()
        self._leases = state.leases  # not the state: this outlives the cache, which the state may refer to
        store, ledger = state.store, state.ledger
        self._store, self._nodes, self._lock, self._ledger = store, state.nodes.nodes, state.lock, ledger
        self._now = state.nodes.now
        self._mark = max(0.0, state.water[1] - CLEAN_FROM)
        self._slow = False
        """The disk did not keep up: no eviction waits for it until a record was written."""
        sizes = Sizes.for_cache(store, ledger, layout)
        self.record_bytes = sizes.record_bytes
        self._refusals = Refusals()
        self.jobs = jobs.Jobs(store, links, layout, self._refusals, sizes.record_tokens, space_of)
        self._outcomes = Outcomes(links, self._refusals)
        self._backlog = Backlog(self._refusals, self.jobs.is_writable, self.jobs.is_dirty)
        self._account = ledger.open(Purpose.DISK, sizes.reserved_bytes, "records on their way to the disk")
        self._staging = Staging(ledger, sizes.buffer_bytes, sizes.n_buffers, ledger.budget_bytes // STAGED_SHARE)
        self.syncing = Syncing(self.catalog)
        self._writer = Writer(
            self.catalog,
            state.lock,
            self._staging,
            self.syncing,
            sizes.piece_bytes // 2,
            self._next,
            self._settle,
            self._hurries,
            lambda: self._backlog.more,
        )
        self.flusher = Flusher(
            state.lock, self._backlog, self._writer, self.jobs, state.nodes.nodes, through=through
        )
        self._writer.start()

    # -- asked by the cache, with its lock held ----------------------------------------------------

    def committed(self, node: Node) -> None:
        """Queue a committed node in write-through mode, and notify the writer."""
        if self.through:
            self._backlog.want(node)
        self._lock.notify_all()

    def saving(self, node: Node, until: float) -> Work[bool]:
        """Write a node that is to be evicted, and wait for that until then. Returns False if it is not on disk."""
        asked = False
        self._refusals.retry(node)
        while not is_clean(node):
            if not self._writer.alive or not (self.jobs.is_writable(node) or is_being_written(node)):
                return False
            if asked and not self._backlog.is_asked_for(node) and not is_being_written(node):
                return False  # refused; or written, and the next one has taken its room on the disk
            left = until - time.monotonic()
            if left <= 0 or self._slow:
                self._slow = True
                self._reasons[DiskReason.TOO_SLOW] += 1
                return False
            if not asked:
                self._backlog.hurry(node)
                asked = True
            self._lock.notify_all()
            yield min(left, LOOK_AGAIN)
        yield from self.awaiting_copies(self._store.busy)
        return is_clean(node)

    def awaiting_copies(self, slabs: Iterable[Slab]) -> Work[None]:
        """Wait, not for long, until nothing is being copied out of these."""
        until = time.monotonic() + COPY_SECONDS
        while any(s.copies for s in slabs) and time.monotonic() < until:
            yield 0.05

    def making_way(self, path: list[Node], slabs: Iterable[Slab]) -> Work[bool]:
        """Copy the path's dirty nodes out, because a request wants to write to these buffers. Returns False if there
        is no room for all of them or it takes too long: the request then writes elsewhere, and leaves them to the
        writer."""
        if self.through and path and not self.catalog.failed and not (yield from self._copying_out(path)):
            return False
        yield from self.awaiting_copies(slabs)
        return True

    def _copying_out(self, path: list[Node]) -> Work[bool]:
        """Stage the path's dirty nodes. Returns False if not all of them could be."""
        until = time.monotonic() + YIELD_SECONDS
        points = self._writer.staged_points < POINTS_MOST
        if not self._staging.fits(self._dirty_bytes(path, points=points)):
            return False
        while dirty := self._dirty_bytes(path, points=points):
            if time.monotonic() >= until or not self._staging.fits(min(dirty, self._staging.buffer_bytes)):
                return False
            job = self.jobs.next_of(path[-1], points=points)
            if job is None:
                if self.jobs.is_writable(path[-1]):
                    self._refusals.add(path[-1])
                return True
            self._writer.stage(job)
            yield 0.0
            points = self._writer.staged_points < POINTS_MOST
        return True

    def _dirty_bytes(self, path: list[Node], *, points: bool) -> int:
        """Returns how many dirty bytes of the path could be copied out now."""
        dirty = [n for n in path if not is_covered(n) and n.span is not None]
        if not dirty or self._refusals.has(path[-1]) or not self.jobs.is_writable(path[-1], points=points):
            return 0
        tokens = sum(n.end - max(n.start, covered_to(n)) for n in dirty)
        return tokens * self._store.token_bytes

    @property
    def extra_bytes(self) -> int:
        """Memory that records take for a while until they are written, beyond what is always reserved."""
        return self._staging.extra_bytes

    def draining(self, until: float) -> Work[None]:
        """Wait, until then at most, for `extra_bytes` to come back."""
        while self._staging.extra_bytes and self._writer.alive and time.monotonic() < until:
            yield 0.05

    @property
    def pending(self) -> bool:
        """Whether anything is being written, or waits for it."""
        return self._writer.alive and (self._backlog.pending or not self._writer.idle)

    @property
    def writes(self) -> bool:
        """Whether the thread that writes has not ended."""
        return self._writer.working

    @property
    def writes_here(self) -> bool:
        """Whether this is the thread that writes."""
        return self._writer.is_this_thread

    def _hurries(self) -> bool:
        """Whether to write at full speed: a caller waits, no request is running, or the buffers are not enough."""
        return self._backlog.is_urgent or self.flusher.is_waiting or self._staging.extra_bytes > 0 or not self._leases

    def stop(self) -> None:
        """End the thread that writes, and release its memory. Called without the lock."""
        self._writer.stop()
        with self._lock.inner:
            if not self._account.closed:
                self._account.close()

    # -- choosing, with the lock held ------------------------------------------------------------------

    def _next(self) -> Job | None:
        """Returns the next record to write, with its room reserved; None if none was found. Then `Backlog.more` may be
        set, which means: ask again soon."""
        for _ in range(TRIES):
            node = self._backlog.next(self._old())
            if node is None:
                return None
            job = self.jobs.next_of(node)
            if job is not None:
                return job
            if self.jobs.is_writable(node):  # else it is tried again when its request has ended
                self._refusals.add(node)
            self._lock.notify_all()
        self._backlog.more = True
        return None

    def _old(self) -> Callable[[], Iterable[Node]] | None:
        """Returns what lists the nodes to write ahead, if memory, or the checkpoints' share of it, is nearly full."""
        if self.catalog.failed:
            return None
        nearly_full = self._mark * self._ledger.budget_bytes
        if self._ledger.used_bytes > nearly_full:
            return lambda: leaves(self._nodes(), self._now())
        if self._ledger.by_purpose()[Purpose.CHECKPOINT.value] > nearly_full / POINTS_SHARE:
            return lambda: sorted((n for n in self._nodes() if n.checkpoint is not None), key=lambda n: n.last_use)
        return None

    def _settle(self, job: Job, error: Exception | None, written: bool) -> None:
        if self._outcomes.settle(job, error, written):
            self._slow = False

    @property
    def spilled_tokens(self) -> int:
        """Tokens whose KV was written."""
        return self._outcomes.counts["spilled_tokens"]

    @property
    def reasons(self) -> Counter[str]:
        """Why nodes were not written, and how often."""
        return self._reasons + self.jobs.reasons + self._outcomes.reasons + self.syncing.reasons

    def queue_parent(self, node: Node) -> None:
        """The node is being removed from its tree. Its ancestors were queued through it, so queue its parent."""
        above = node.parent
        if self.through and above is not None and self.jobs.is_dirty(above):
            self.committed(above)

    def check(self) -> list[str]:
        found = self.catalog.check()
        for node in self._nodes():
            found += check_node(node)
        return found
