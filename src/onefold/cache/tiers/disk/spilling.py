"""Spilling: what of memory is to lie on disk too, and in which order.

- A node is written prefix first, a record at a time: whatever is on disk can be gone on from.
- A buffer that a request writes to is not copied; it is, when the request has ended. A request that wants to go on in a
  buffer that is owed to the disk has it copied first, or goes on in another one.
- Written through: at commit. Written back: the least recently used, when memory is nearly full; then what must make way
  and is not on disk yet, and that is waited for; and everything, when the cache is closed.

    node     committed -> wanted -> a record expected -> copied out -> written, renamed -> there
                                          (lock)         (`writing`)      (`writing`)     (lock)

All methods are called with the cache's lock held, but for `stop`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from onefold.cache.memory import arrays
from onefold.cache.memory.checkpoints import POINTS_SHARE
from onefold.cache.memory.eviction import leaves
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tree import Node
from onefold.cache.tiers.disk import host
from onefold.cache.tiers.disk.backlog import Backlog
from onefold.cache.tiers.disk.linking import Links
from onefold.cache.tiers.disk.ondisk import OnDisk, all_records_of, disk_of, made_disk_of, point_of, records_of
from onefold.cache.tiers.disk.staging import Staging
from onefold.cache.tiers.disk.writing import LOOK_AGAIN, Job, Writer
from onefold.cache.tiers.records.entry import NO_TOKENS, Record
from onefold.cache.tiers.records.faults import MISPLACED, PASSING
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.order import below
from onefold.cache.tiers.records.record import Content, Tensor, What
from onefold.errors import RecordError
from onefold.sizes import show_size

log = logging.getLogger("onefold")

RECORD_BYTES = 8 << 20
"""The most KV of a range record."""
HOLLOW_TOKENS = 1 << 16
"""The most tokens of a range that has no KV."""
BUFFERS_MOST = 8
BUFFER_LEAST = 1 << 16
BUFFERS_SHARE = 32
"""Of the budget, that is always reserved for records on their way."""
STAGED_SHARE = 16
"""Of the budget, that they may take for a while, if nobody else uses it."""
PIECE_MOST = 1 << 20
"""Bytes that are reserved for reading a checkpoint that does not lie in order."""
POINTS_MOST = 8
"""Checkpoints that wait to be written ahead of their turn."""
YIELD_SECONDS = 0.02
"""That a request spends on copying out what it would otherwise hold up."""
COPY_SECONDS = 1.0
"""That a copy is waited for; it takes a few thousandths of that."""
CLEAN_FROM = 0.15
"""Of the budget, below the mark where reclaiming begins: from there on the oldest are written ahead."""
TRIES = 16
"""Nodes that are tried in one go, with the lock held."""


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
        """`space_of` says to which folder a node's records belong, None if to none."""
        self.catalog = links.catalog
        self.through = through
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._links, self._space_of = links, space_of
        self._leases = state.leases  # not the state: this outlives the cache, which the state may refer to
        store, ledger = state.store, state.ledger
        self._store, self._nodes, self._lock, self._ledger = store, state.nodes.nodes, state.lock, ledger
        self._layout = layout
        self._mark = max(0.0, state.water[1] - CLEAN_FROM)
        self._backlog = Backlog(self._writable, self._is_owed)
        self._flushing = 0
        self._given_up = False
        self._lost = self._told = 0
        """Nodes that were to be written through and made way without; and how many of them a `flush` has told of."""
        self._said_full = False
        self._slow = False
        """The disk did not keep up: nobody waits for it until a record has arrived."""
        self.record_bytes = min(RECORD_BYTES, max(1 << 16, ledger.budget_bytes // 64))
        per_token = store.token_bytes + 4
        self.record_tokens = max(1, self.record_bytes // per_token) if store.token_bytes else HOLLOW_TOKENS
        buffer_bytes = max(BUFFER_LEAST, self.record_tokens * store.token_bytes)
        n_buffers = max(2, min(BUFFERS_MOST, ledger.budget_bytes // BUFFERS_SHARE // buffer_bytes))
        copies = 0 if arrays.addressable() else host.COPIED
        piece_bytes = min(PIECE_MOST, buffer_bytes) if layout.has_points else 0
        reserved = (n_buffers + copies) * buffer_bytes + piece_bytes
        self._account = ledger.open(Purpose.DISK, reserved, "records on their way to the disk")
        self._staging = Staging(ledger, buffer_bytes, n_buffers, ledger.budget_bytes // STAGED_SHARE)
        self._writer = Writer(
            self.catalog,
            state.lock,
            self._staging,
            piece_bytes // 2,
            self._next,
            self._settle,
            self._hurries,
            lambda: self._backlog.more,
        )
        self._writer.start()

    # -- asked by the cache, with its lock held ----------------------------------------------------

    def committed(self, node: Node) -> None:
        if self.through:
            self._backlog.want(node)
        self._lock.tell()

    def is_clean(self, node: Node) -> bool:
        """Whether all that the node has in memory is on disk too."""
        disk = disk_of(node)
        if disk is None or disk.readable < node.end:
            return False
        return node.checkpoint is None or (disk.point is not None and disk.point.ready)

    def count_lost(self, node: Node) -> None:
        """It leaves memory as it is: if it was to be written through and is not there, `flush` tells."""
        self._lost += self.through and self._is_owed(node)

    def saving(self, node: Node, until: float) -> Work[bool]:
        """Write a node that must make way, and wait for it until then. False if it is not on disk."""
        asked = False
        self._backlog.retry(node)
        while not self.is_clean(node):
            if not self._writer.alive or not (self._writable(node) or self._on_its_way(node)):
                return False
            if asked and not self._backlog.is_asked_for(node) and not self._on_its_way(node):
                return False  # refused; or written, and the next one has taken its room on the disk
            left = until - time.monotonic()
            if left <= 0 or self._slow:
                self._slow = True
                self.reasons["disk too slow"] += 1
                return False
            if not asked:
                self._backlog.hurry(node)
                asked = True
            self._lock.tell()
            yield min(left, LOOK_AGAIN)
        yield from self.awaiting_copies(self._store.busy)
        return self.is_clean(node)

    def awaiting_copies(self, slabs: Iterable[Slab]) -> Work[None]:
        """Wait, not for long, until nothing is being copied out of these."""
        until = time.monotonic() + COPY_SECONDS
        while any(s.copies for s in slabs) and time.monotonic() < until:
            yield 0.05

    def making_way(self, path: list[Node], slabs: Iterable[Slab]) -> Work[bool]:
        """A request wants to go on in these buffers. What has to be on disk is copied out first, if there is room for
        all of it and that does not take long; False if the request had better go on elsewhere, and leave them to the
        writer."""
        if self.through and path and not self.catalog.failed and not (yield from self._copying_out(path)):
            return False
        yield from self.awaiting_copies(slabs)
        return True

    def _copying_out(self, path: list[Node]) -> Work[bool]:
        """Stage what is owed to the disk; False if that cannot be all of it."""
        until = time.monotonic() + YIELD_SECONDS
        points = self._writer.staged_points < POINTS_MOST
        if not self._staging.fits(self._owed_bytes(path, points=points)):
            return False
        while owed := self._owed_bytes(path, points=points):
            if time.monotonic() >= until or not self._staging.fits(min(owed, self._staging.buffer_bytes)):
                return False
            job = self._job(path[-1], points=points)
            if job is None:
                if self._writable(path[-1]):
                    self._backlog.refuse(path[-1])
                return True
            self._writer.stage(job)
            yield 0.0
            points = self._writer.staged_points < POINTS_MOST
        return True

    def _owed_bytes(self, path: list[Node], *, points: bool) -> int:
        """What of it should be on disk, and could be copied out."""
        owed = [n for n in path if not self._covered(n) and n.span is not None]
        if not owed or self._backlog.is_refused(path[-1]) or not self._writable(path[-1], points=points):
            return 0
        tokens = sum(n.end - max(n.start, _covered_to(n)) for n in owed)
        return tokens * self._store.token_bytes

    @property
    def extra_bytes(self) -> int:
        """That records on their way take for a while, beyond what is always theirs."""
        return self._staging.extra_bytes

    def draining(self, until: float) -> Work[None]:
        """Wait, until then at most, for `extra_bytes` to come back."""
        while self._staging.extra_bytes and self._writer.alive and time.monotonic() < until:
            yield 0.05

    @property
    def pending(self) -> bool:
        """Whether anything is being written, or waits for it."""
        return self._writer.alive and (self._backlog.pending or not self._writer.idle)

    def flush(self, *, everything: bool, until: float, tells: bool = False) -> bool:
        """Write what is wanted (or everything that memory has), and wait for it. False if that took too long, or if
        something that was wanted could not be written; what made way unwritten is told once, to whoever `tells` it on.
        The inner door is enough: what changes is the writer's."""
        told = self._told
        if everything:
            self._backlog.want_all(sorted(self._nodes(), key=lambda n: -n.last_use))
        self._flushing += 1
        self._lock.tell()
        try:
            while self._backlog.next(None) is not None or self._backlog.more or not self._writer.idle:
                if not self._writer.alive or self._given_up or time.monotonic() > until:
                    return False
                self._lock.wait(LOOK_AGAIN)
        finally:
            self._flushing -= 1
        if self._lost > told:
            self._told = self._lost if tells else told
            return False
        if everything and self.unsaved():
            return False
        return not (self.through or everything) or not self._backlog.left_over()

    def give_up(self) -> None:
        """Nobody waits any more. Without the lock."""
        self._given_up = True

    def left(self, until: float) -> int:
        """Tokens that are in memory and not on disk, after what is to be written through has been."""
        if not self._writer.alive or self.catalog.failed:
            return 0
        self.flush(everything=False, until=until)
        return self.unsaved()

    def unsaved(self) -> int:
        """Tokens that are in memory and not on disk."""
        dirty = [n for n in self._nodes() if n.span is not None and self._space_of(n) is not None]
        return sum(n.end - max(n.start, n.below.readable if n.below is not None else 0) for n in dirty)

    @property
    def writes(self) -> bool:
        """Whether the thread that writes has not ended."""
        return self._writer.working

    @property
    def writes_here(self) -> bool:
        """Whether this is the thread that writes."""
        return self._writer.is_this_thread

    def _hurries(self) -> bool:
        """Somebody waits, nobody is held up, or records come faster than the thread would take them at its ease."""
        return self._backlog.is_urgent or self._flushing > 0 or self._staging.extra_bytes > 0 or not self._leases

    def stop(self) -> None:
        """Without the lock."""
        self._writer.stop()
        with self._lock.inner:
            if not self._account.closed:
                self._account.close()

    # -- choosing, with the lock held ------------------------------------------------------------------

    def _next(self) -> Job | None:
        """The next record to write, its place in the books and on the disk reserved. None may mean: look again soon."""
        for _ in range(TRIES):
            node = self._backlog.next(self._old())
            if node is None:
                return None
            job = self._job(node)
            if job is not None:
                return job
            if self._writable(node):  # else it comes again when its request has ended
                self._backlog.refuse(node)
            self._lock.tell()
        self._backlog.more = True
        return None

    def _old(self) -> Callable[[], Iterable[Node]] | None:
        """What is to be written ahead, if memory is nearly full, or the checkpoints' share of it."""
        if self.catalog.failed:
            return None
        nearly_full = self._mark * self._ledger.budget_bytes
        if self._ledger.used_bytes > nearly_full:
            return lambda: leaves(self._nodes())
        if self._ledger.by_purpose()[Purpose.CHECKPOINT.value] > nearly_full / POINTS_SHARE:
            return lambda: sorted((n for n in self._nodes() if n.checkpoint is not None), key=lambda n: n.last_use)
        return None

    def _writable(self, node: Node, *, points: bool = True) -> bool:
        """Whether some of it, or of what goes before it, can be written now; without `points`, of ranges alone."""
        if node.parent is None or self.catalog.failed or self._space_of(node) is None:
            return False
        first = self._first_dirty(node, points=points)
        if first is None or self._backlog.is_refused(first):
            return False
        return first.span is None or _quiet(first.span.slab) or self._covered(first)

    def _is_owed(self, node: Node) -> bool:
        """Whether some of it should be on disk, and is not."""
        return node.parent is not None and self._space_of(node) is not None and self._first_dirty(node) is not None

    @staticmethod
    def _on_its_way(node: Node) -> bool:
        return any(not r.ready for n in node.path() for r in all_records_of(n))

    def _first_dirty(self, node: Node, *, points: bool = True) -> Node | None:
        """The first node of its path that is not wholly on disk, if it has something that could be; without `points`,
        checkpoints are left for later."""
        path = node.path()
        deepest = max((i for i, n in enumerate(path) if n.checkpoint is not None), default=-1)
        for i, n in enumerate(path):
            if not self._covered(n):
                if n.span is None and self._store.specs and i > deepest:
                    return None  # what a rotation left without bytes, and nothing to be resumed behind it
                return n
            if points and n.checkpoint is not None and point_of(n) is None:
                return n
        return None

    @staticmethod
    def _covered(node: Node) -> bool:
        return _covered_to(node) >= node.end

    def _job(self, node: Node, *, points: bool = True) -> Job | None:
        """The next record of a node's path. None if nothing is left to write, or it has no place on the disk. What is
        there already, and no node knew of, is not written: the node has it from then on."""
        space = self._space_of(node)
        while space is not None and self._writable(node, points=points):
            first = self._first_dirty(node, points=points)
            assert first is not None
            job = self._point_job(first, space) if self._covered(first) else self._range_job(first, space)
            if not isinstance(job, Record):
                return job
        return None

    def _range_job(self, first: Node, space: str) -> Job | Record | None:
        """The next range of this node; the record alone if that is there already."""
        start = _covered_to(first)
        span = first.span
        stop = min(first.end, start + (HOLLOW_TOKENS if span is None else self.record_tokens))
        tokens = first.tokens[start - first.start : stop - first.start]
        tensors = () if span is None else host.range_tensors(self._store.specs, stop - start)
        above = self._above(first, start)
        content = Content(What.RANGE, space, b"" if above is None else above.address, start, tokens, tensors)
        known = self._known(content)
        record = known or self._expect(first, content, stop, above)
        if record is None:
            return None
        for superfluous in made_disk_of(first).add(record):
            self._links.let_go(superfluous)
        if known is not None:
            return known
        if span is None:
            return Job(record, content, None, 0)
        span.slab.copies += 1
        return Job(record, content, span.slab, span.lo + start - first.start)

    def _point_job(self, node: Node, space: str) -> Job | Record | None:
        """The checkpoint at this node's end; the record alone if that is there already."""
        above = self._above(node, node.end)
        if above is None:
            return None
        arrays = node.checkpoint.arrays()
        try:
            tensors: tuple[Tensor, ...] = tuple(host.tensor(n, a) for n, a in arrays.items())
            content = Content(
                What.POINT, space, above.address, node.end, NO_TOKENS, tensors, node.checkpoint.describe()
            )
            self._layout.require(content)
        except (KeyError, TypeError, ValueError, RecordError) as error:
            self.reasons["checkpoint that cannot be written"] += 1
            log.debug("a checkpoint at %d stays in memory: %s", node.end, error)
            return None
        known = self._known(content)
        record = known or self._expect(node, content, node.end, above)
        if record is None:
            return None
        made_disk_of(node).set_point(record)
        if known is not None:
            return known
        node.checkpoint.hold()
        return Job(record, content, None, 0, node.checkpoint)

    def _known(self, content: Content) -> Record | None:
        """A record of this content that is there, and could be read when it was last looked at."""
        there = self.catalog.find(content.namespace, content.address)
        return there if there is not None and there.ready and not there.unread else None

    @staticmethod
    def _above(node: Node, start: int) -> Record | None:
        """The record that the node's next one, from there on, goes on from; one that has KV if there is any."""
        found: Record | None = None
        at: Node | None = node
        while at is not None and at.end >= start:
            for record in reversed(records_of(at)):
                if record.start < start <= record.end and (found is None or found.hollow):
                    found = record
            at = at.parent if found is None or at.start == start else None
        return found

    def _expect(self, node: Node, content: Content, end: int, above: Record | None) -> Record | None:
        """Reserve a record's place on the disk; None if it has none, for a reason."""
        catalog = self.catalog
        reason = catalog.refuses(content.size, content.namespace)
        victims: list[Record] | None = []
        there = catalog.find(content.namespace, content.address)
        if there is not None and there.unread and there.ready and there.size != content.size:
            self._links.forget([there])  # whatever that file is, it is not this record
            there = None
        if not reason and there is not None and not (there.unread and there.ready):
            reason = "record already there"
        if not reason and there is None:
            if above is not None:
                above.pins += 1
            try:
                victims = catalog.make_room(content.size, node.last_use)
            finally:
                if above is not None:
                    above.pins -= 1
            reason = "" if victims is not None else "no room on disk"
        for victim in victims or ():
            self._links.take_from_nodes(victim)
        if reason:
            self.reasons[reason] += 1
            if reason == "no room on disk" and not self._said_full:
                self._said_full = True
                log.warning(
                    "the disk budget of %s has no room for what is to be written: what is there was used later",
                    show_size(catalog.budget_bytes),
                )
            return None
        hollow = content.what is What.RANGE and not content.tensors
        if there is not None:  # it could not be read, and memory has what it should hold
            there.link(above, end)
            there.hollow, there.used = hollow, node.last_use
            catalog.expect_again(there)
            return there
        record = Record(
            content.namespace, content.what, content.address, content.start, end, content.size, node.last_use
        )
        record.parent = above
        record.hollow = hollow
        catalog.expect(record)
        return record

    # -- what became of it, with the lock held -----------------------------------------------------------

    def _settle(self, job: Job, error: Exception | None, written: bool) -> None:
        record, catalog = job.record, self.catalog
        if job.checkpoint is not None:
            job.checkpoint.release()
        if error is None:
            if written:
                catalog.arrived(record)
            if not record.nodes:  # no node needs it any more
                self._settle_unneeded(record)
                return
            for node in list(record.nodes) if record.what is What.POINT else ():
                self._links.thin(node)
            self.counts["spilled_tokens"] += record.end - record.start
            self._slow = False
            return
        tails = below(catalog.records(), [record])  # staged behind it, some of them
        for tail in tails:
            for node in tail.nodes:
                self._backlog.refuse(node)
        if record.unread:
            for tail in sorted(tails, key=lambda r: -r.start):
                self._links.take_from_nodes(tail)
            catalog.set_back(record, tails)
        else:
            self._links.forget([record])
            catalog.drop(record)
        if not isinstance(error, OSError):
            self.reasons["not yet computed"] += 1
            log.debug("a record could not be copied out: %s", error)
        elif error.errno in PASSING:
            self.reasons["not written for now"] += 1
            log.warning("a record could not be written, and will be tried again when it is used again: %s", error)
        elif error.errno in MISPLACED:
            self.reasons["something else in its place"] += 1
            log.warning("%s/%s cannot be written: %s", record.namespace, record.name, error)
        else:
            catalog.fail(error)

    def _settle_unneeded(self, record: Record) -> None:
        """A record that no node needs goes; unless it has descendants on disk, which are reached through it."""
        if record.unread:  # it was not written again
            self.catalog.set_back(record, ())
        elif record.ready and record.children:
            self.catalog.apart.keep(record)
        else:
            self.catalog.drop(record)
            if record.parent is not None:
                self._links.let_go(record.parent)

    def bequeath(self, node: Node) -> None:
        """It is going from the tree: what goes before it, and was wanted as part of it, is wanted still."""
        above = node.parent
        if self.through and above is not None and self._is_owed(above):
            self.committed(above)

    def check(self) -> list[str]:
        found = self.catalog.check()
        for node in self._nodes():
            if (disk := disk_of(node)) is not None:
                found += _check_node(node, disk)
        return found


def _quiet(slab: Slab) -> bool:
    """Whether nobody is writing there."""
    return not slab.writers and not slab.rewriting


def _covered_to(node: Node) -> int:
    """Up to here what memory has of the node is on disk, or on its way."""
    disk = disk_of(node)
    return node.start if disk is None else disk.covered


def _check_node(node: Node, disk: OnDisk) -> list[str]:
    where = f"node [{node.start}, {node.end})"
    found = [f"{where} has a record that does not know it" for r in disk.all if node not in r.nodes]
    if disk.node is not node:
        found.append(f"{where} has what another node has on disk")
    at = node.start
    for record in disk.records:
        if record.hollow and record.end <= at:  # one with KV overtook it while it was being written
            continue
        if not record.start <= at < record.end:
            found.append(f"{where}: {record} does not follow at {at}")
        at = record.end
    parent = node.parent
    above = None if parent is None else disk_of(parent)
    inner = parent is not None and parent.parent is not None
    if inner and disk.records and (above is None or above.reaches < above.node.end):
        found.append(f"{where} is on disk, but not what goes before it")
    return found
