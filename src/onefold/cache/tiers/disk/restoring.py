"""Restoring: a path that goes on on disk comes back into memory, record by record, each into its place.

- What a request can use of it is known from the tree; nothing is read to find out.
- One buffer is reserved for all of it, with room for the request to go on in. A record is read straight into its place
  there, and believed only when its checksum agrees; the first that does not ends the restore, and is a miss from there.
- Where computing the tokens would be quicker than reading them, they are not read: both are measured as they happen.
- What was restored is a hit in memory from then on, and is on disk still.

A restore can be taken in steps, between the steps of other requests. Called with the cache's lock held.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from onefold.cache.memory import arrays
from onefold.cache.memory.arrays import Bytes
from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.reach import kv_reach, readable_length, resume_point
from onefold.cache.memory.segment import Slab, Span
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.track import Track
from onefold.cache.memory.tree import Node, Tokens, Tree
from onefold.cache.tiers.disk import host
from onefold.cache.tiers.disk.linking import Links
from onefold.cache.tiers.disk.ondisk import point_of, records_of
from onefold.cache.tiers.disk.pace import Pace
from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.faults import is_passing, reason_of
from onefold.cache.tiers.records.files import read_all
from onefold.cache.tiers.records.heads import read_content
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.record import Content, Tensor
from onefold.errors import BudgetError, RecordError

log = logging.getLogger("onefold")

READ_ELSEWHERE_SECONDS = 0.05
"""Seconds between two looks at what another thread reads."""
AHEAD = 2
"""Records that are read while one is being looked at."""


@dataclass
class Reading:
    """What the restores of a tier share."""

    links: Links
    layout: Layout
    reader: concurrent.futures.ThreadPoolExecutor
    """Reads the next records while one is being looked at."""
    dirtied: Callable[[Node], None]
    """Told of nodes that memory has, and the disk no longer."""
    read_pace: Pace = field(default_factory=Pace)
    """Seconds a byte takes to restore."""
    prefill_pace: Pace = field(default_factory=Pace)
    """Seconds a token takes to compute."""
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


class Loaded(NamedTuple):
    """A record that has been read, and is still to be believed."""

    content: Content
    checksum: str
    places: list[Bytes]


class Wanted(NamedTuple):
    path: list[Node]
    """Down to the node in which the target lies."""
    target: int
    """How far the path is to be had in memory."""
    records: list[Record]
    point: Record | None
    before: int
    """How far a request could begin with memory alone."""
    saves: int
    """Tokens that need not be computed then."""
    matched: int


def wanted(state: CacheState, tree: Tree, tokens: Tokens) -> Wanted | None:
    """What of the disk would let a request of these tokens begin further on than memory alone."""
    path, matched = tree.match(tokens)
    usable = min(matched, len(tokens) - 1)
    if usable <= 0 or all(n.below is None for n in path):
        return None
    in_memory, _ = readable_length(state, path, matched)
    have, _, _ = resume_point(state, path, min(usable, in_memory), usable)
    reach = kv_reach(state, path, matched)
    target, point = min(reach, matched), None
    node = next((n for n in reversed(path) if n.end <= usable and _resumable(n, reach)), None)
    if node is not None and (state.model.pointwise or node.end > reach):
        target, point = node.end, None if node.checkpoint is not None else point_of(node)
        path = path[: path.index(node) + 1]
    elif state.model.pointwise:
        return None
    if min(target, usable) <= have:
        return None
    path = [n for n in path if n.start < target]
    records = _records(path, target) if state.store.specs and target <= reach else []
    return Wanted(path, target, records, point, have, min(target, usable) - have, matched)


def _resumable(node: Node, reach: int) -> bool:
    """Whether a request can begin at its end, with KV that reaches so far."""
    if node.checkpoint is not None:
        return node.end <= reach or node.checkpoint.spanless
    if node.below is None or not node.below.has_saved_point:
        return False
    return node.end <= reach or _rotated(node)


def _rotated(node: Node) -> bool:
    """Whether it lies behind tokens without KV: then its checkpoint does without as well."""
    return any(r.hollow for n in node.path() for r in records_of(n))


def _records(path: list[Node], target: int) -> list[Record]:
    """Of the first run of nodes that are not in memory, up to the target; each once, and each begins after the one
    before: what was written again from further up makes up for what it has in common with others."""
    first = next((i for i, n in enumerate(path) if n.span is None), len(path))
    found: list[Record] = []
    for node in path[first:]:
        if node.span is not None:
            break
        for record in records_of(node):
            if record.start < target and not record.hollow and record not in found[-1:]:
                while found and found[-1].start >= record.start:
                    found.pop()
                found.append(record)
    return found


def planning(
    state: CacheState, shared: Reading, tree: Tree, tokens: Tokens, reserve_tokens: int
) -> Work[Restore | None]:
    """A restore that has begun, if one is worth it. Raises BudgetError if there is no room."""
    found = wanted(state, tree, tokens)
    if found is None or not (found.records or found.point):
        return None
    size = sum(r.size for r in found.records) + (0 if found.point is None else found.point.size)
    reading, computing = shared.read_pace.estimate(size), shared.prefill_pace.estimate(found.saves)
    if reading is not None and computing is not None and reading >= computing and shared.read_pace.passed_over():
        shared.counts["skipped_tokens"] += found.saves
        shared.reasons["slower than prefill"] += 1
        return None
    room = max(0, len(tokens) + reserve_tokens - found.matched)
    if found.records:
        first, end = found.records[0].start, found.path[-1]
        for node in end.path():
            node.pins += 1  # or what it goes on from might make way
        try:
            yield from state.store.making_room_for(max(r.end for r in found.records) + room - first)
        finally:
            for node in end.path():
                node.pins = max(0, node.pins - 1)
        found = wanted(state, tree, tokens)  # others had the lock meanwhile
        if found is None or not (found.records or found.point):
            return None
    restore = Restore(state, shared, tree, found, max(0, len(tokens) + reserve_tokens - found.matched))
    restore.begin()
    return restore


def awaiting_others(state: CacheState, tree: Tree, tokens: Tokens) -> Work[None]:
    """Wait while another thread, which does nothing else meanwhile, reads something that these tokens want."""
    while (found := wanted(state, tree, tokens)) is not None and any(
        restore.is_read_elsewhere and restore.reads(found.records) for restore in state.restores
    ):
        yield READ_ELSEWHERE_SECONDS


class Restore:
    """Made by `plan`. Call `step` until it returns False, or `finish` to leave it at that."""

    def __init__(self, state: CacheState, shared: Reading, tree: Tree, found: Wanted, room: int) -> None:
        self._state, self._shared, self._tree = state, shared, tree
        self._wanted = found
        self._left: list[Record] = [*found.records, *([] if found.point is None else [found.point])]
        self._held = list(self._left)
        self._end = found.path[-1]
        self._tokens = np.concatenate([n.tokens for n in self._end.path()])
        self._room = room
        self._base = found.records[0].start if found.records else 0
        self._stop = max((r.end for r in found.records), default=0)
        """Of all that is read: a branch's record begins inside another, which may end later."""
        self._reached = self._base
        self._slab: Slab | None = None
        self._buffers: Account | None = None
        self._holder = Track(state.store)
        self._read_bytes = 0
        self._seconds = 0.0
        self._direct = arrays.addressable()
        self._loading: deque[concurrent.futures.Future[Loaded]] = deque()
        self._layouts: dict[int, tuple[Tensor, ...]] = {}
        self.done = False
        self.driver: threading.Thread | None = None
        """The thread that reads all of it, if one does."""
        self.rejected = False
        """A record was not what it should be: what is left may be worth another plan."""
        self.tokens = 0
        """Of the path, that came from disk."""
        self.owner: object = None
        """Kept alive by this restore: the cache."""
        self.before = found.before
        """How far a request could have begun without."""

    def __del__(self) -> None:
        """Dropped before it was done: what it holds is let go at the cache's next call."""
        if not getattr(self, "done", True):
            self._state.drop_restore(self)

    @property
    def is_read_elsewhere(self) -> bool:
        """Whether another thread will read all of it."""
        driver = self.driver
        return not self.done and driver not in (None, threading.current_thread()) and driver.is_alive()  # type: ignore[union-attr]

    def reads(self, records: list[Record]) -> bool:
        """Whether some of these are among what it reads."""
        return any(record in self._held for record in records)

    def holds(self, track: Track) -> bool:
        return track is self._holder

    def begin(self) -> None:
        """Reserve the buffer, and hold on to the path. Raises BudgetError."""
        for node in self._end.path():
            node.pins += 1
        for record in self._held:
            record.pins += 1
        with contextlib.ExitStack() as undo:
            undo.callback(self._not_begun)
            self._reserve(self._wanted.records)
            undo.pop_all()
        self._state.restores.add(self)

    def _not_begun(self) -> None:
        self.done = True
        self._let_go()

    def _reserve(self, records: list[Record]) -> None:
        if not records:
            return
        if not self._direct:
            self._buffers = self._on_the_way((AHEAD + 1 + host.TWICE_MORE) * max(r.size for r in records))
        stop = max(self._stop, self._wanted.target + self._room)
        self._slab = self._state.store.slab_for(stop - self._base)
        self._slab.enter(self._holder)

    def _on_the_way(self, n_bytes: int) -> Account:
        """For bytes that cannot be read straight into their place. Raises BudgetError."""
        return self._state.ledger.open(Purpose.DISK, n_bytes, "records on their way from the disk")

    def step(self) -> bool:
        """Read one record; False when there is nothing more to do. The disk is waited for without the lock."""
        with self._state.lock:
            reading = self._begin_reading()
        if reading is not None:
            concurrent.futures.wait([reading])
        with self._state.lock:
            return self._step()

    def _begin_reading(self) -> concurrent.futures.Future[Loaded] | None:
        """Have the next record read on another thread. None where that must be said, or done, in the step itself."""
        if self.done or self._left[0] is self._wanted.point:
            return None
        with contextlib.suppress(BudgetError, RuntimeError, MemoryError):
            self._prepare(self._left[0])
        return self._loading[0] if self._loading else None

    def _prepare(self, record: Record) -> None:
        """See that there is a place for the record, and that it is being read."""
        if self._slab is not None and self._slab.layers[0] is None:
            self._allocate(self._slab)
        self._load_ahead([record, *(r for r in self._left if r not in (record, self._wanted.point))])

    def _step(self) -> bool:
        if self.done:
            return False
        with contextlib.ExitStack() as undo:
            undo.callback(self._break_off)
            self._read_one()
            undo.pop_all()
        if not self._left:
            self._finish()
        return not self.done

    def _break_off(self) -> None:
        """Interrupted: what was read so far is right, and no more is read."""
        self._left.clear()
        self._finish()

    def _read_one(self) -> None:
        began = time.perf_counter()
        record = self._left.pop(0)
        try:
            self._take(record)
            self._read_bytes += record.size
        except (OSError, RecordError) as error:
            self._left.clear()
            self.rejected = True
            if is_passing(error):
                for node in self._shared.links.set_apart(record, error):
                    self._shared.dirtied(node)
            else:
                self._shared.links.reject(record, reason_of(error))
        except BudgetError:
            self._left.clear()
            self._shared.reasons["no room to restore"] += 1
        except (RuntimeError, MemoryError) as error:  # of the device, or no more threads
            self._left.clear()
            self._reached = self._base  # arrays that are still to be computed may never be
            self._shared.reasons["failed to restore"] += 1
            log.warning("what is on disk could not be restored, and is computed: %s", error)
        self._seconds += time.perf_counter() - began

    def _take(self, record: Record) -> None:
        """Have one record; the next are read meanwhile."""
        if record is self._wanted.point:
            self._read_point(record)
            return
        self._prepare(record)
        following = self._left[0] if self._left and self._left[0] is not self._wanted.point else None
        # a branch's record may begin inside this one, which is another conversation's from there on
        upto = record.end if following is None else min(record.end, following.start)
        self._believe(record, self._loading[0].result(), upto)
        self._loading.popleft()  # not before: who is interrupted has to wait for it, since it is being read into
        self._reached = upto

    def _load_ahead(self, records: list[Record]) -> None:
        """Have these records, or the first few of them, read on other threads; not one that begins inside another."""
        for i, record in enumerate(records[: AHEAD + 1]):
            if i and record.start != records[i - 1].end:
                return
            if i >= len(self._loading):
                self._loading.append(self._shared.reader.submit(self._load, record))

    def finish(self) -> None:
        """What was read is memory's from here on."""
        with self._state.lock:
            self._finish()

    def _finish(self) -> None:
        if self.done:
            return
        self.done = True
        with self._state.lock.released():
            concurrent.futures.wait(self._loading)  # what is still being read into
        self._loading.clear()
        if self._slab is not None:
            if self._direct and self._slab.layers[0] is not None:  # no garbage behind what is right
                host.clear(self._slab, self._reached - self._base, self._stop - self._base)
            self._attach(self._slab)
            self._slab.leave(self._holder)
            self._slab.settle()
        self._let_go()
        self._shared.read_pace.took(self._seconds, self._read_bytes)
        self._shared.counts["restored_tokens"] += self.tokens
        self._shared.counts["restored_bytes"] += self._read_bytes

    def _let_go(self) -> None:
        self._state.restores.discard(self)
        if self._buffers is not None:
            self._buffers.close()
        for record in self._held:
            record.pins -= 1
        for node in self._end.path():
            node.pins = max(0, node.pins - 1)
        self._shared.links.prune(self._end)

    # -- ranges ------------------------------------------------------------------------------------------

    def _load(self, record: Record) -> Loaded:
        """On the reading thread: a record's bytes into their place; or into a buffer, where they cannot be."""
        slab = self._slab
        assert slab is not None
        lo = record.start - self._base
        n = record.end - record.start
        with self._shared.links.catalog.folder.reading(record.namespace, record.name) as file:
            content, data_at, checksum = self._content(file, record)
            if content.tensors != self._tensors(n):
                raise RecordError("of another layout")
            if self._direct:
                places = host.places(slab, lo, lo + n)
            else:
                places = [np.empty(content.payload_bytes - content.tokens.nbytes, np.uint8)]
            _fill(file, places, data_at)
        return Loaded(content, checksum, places)

    def _tensors(self, n: int) -> tuple[Tensor, ...]:
        if n not in self._layouts:
            self._layouts[n] = host.range_tensors(self._state.store.specs, n)
        return self._layouts[n]

    def _believe(self, record: Record, loaded: Loaded, upto: int) -> None:
        """Raises RecordError if what was read is not what was written, or is not of this path up to there."""
        if loaded.content.checksum(loaded.places) != loaded.checksum:
            raise RecordError("checksum")
        n = min(self._wanted.target, upto) - record.start
        if (loaded.content.tokens[:n] != self._tokens[record.start : record.start + n]).any():
            raise RecordError("of other tokens")
        if not self._direct:
            assert self._slab is not None
            lo = record.start - self._base
            host.copy_in(self._slab, lo, lo + record.end - record.start, loaded.places[0])

    def _allocate(self, slab: Slab) -> None:
        """The arrays: memory that nobody wrote before, but for what no record will fill. Raises BudgetError."""
        make = host.uninitialised if self._direct else mx.zeros
        try:
            for index, spec in enumerate(slab.store.specs):
                slab.layers[index] = [make((1, a.heads, slab.capacity, a.dim), a.dtype) for a in spec.arrays]
            slab.evaluate()
        except (MemoryError, RuntimeError) as error:
            slab.layers = [None] * len(slab.layers)
            raise _no_room(error, slab.bytes) from error
        if self._direct:
            host.clear(slab, self._stop - self._base, slab.capacity)

    def _attach(self, slab: Slab) -> None:
        """The nodes of what was read and found right own it."""
        stop = min(self._reached, self._wanted.target)
        for node in self._end.path():
            if node.span is None and node.start < stop and node.start >= self._base:
                at = self._tree.split(node, stop) if node.end > stop else node
                at.span = Span.own(slab, at.start - self._base, at.end - self._base, at)
                self.tokens += at.end - at.start

    # -- points -------------------------------------------------------------------------------------------

    def _read_point(self, record: Record) -> None:
        node, state = self._end, self._state
        with self._shared.links.catalog.folder.reading(record.namespace, record.name) as file:
            content, data_at, checksum = self._content(file, record)
            self._shared.layout.require(content)
            size = content.payload_bytes
            if node.end != record.start or node.checkpoint is not None:
                return
            if not state.nodes.admit_checkpoint(size):
                raise BudgetError("a checkpoint", needed_bytes=size, available_bytes=0)
            account = state.ledger.open(Purpose.CHECKPOINT, size, "a checkpoint from disk")
            kept = False
            try:
                largest = max((t.nbytes for t in content.tensors), default=0)
                with contextlib.closing(self._on_the_way(0 if self._direct else largest)):
                    with state.lock.released():
                        found = self._revive(file, content, data_at, checksum, account)
                    if self.done or node.checkpoint is not None:  # others had the lock meanwhile
                        return
                    node.checkpoint, kept = found, True
            except (MemoryError, RuntimeError) as error:
                raise _no_room(error, size) from error
            finally:
                if not kept:
                    account.close()
        if not self._wanted.records:
            self.tokens += self._wanted.saves

    def _revive(self, file: int, content: Content, data_at: int, checksum: str, account: Account) -> Checkpoint:
        read: dict[str, mx.array] = {}

        def tensors(at: int) -> Iterator[Bytes]:
            """One after the other: no more than one is there twice."""
            for tensor in content.tensors:

                def fill(place: Bytes, at: int = at) -> None:
                    _fill(file, [place], at)

                read[tensor.name], data = host.array_in(tensor, fill, direct=self._direct)
                at += tensor.nbytes
                yield data

        if content.checksum(tensors(data_at)) != checksum:
            raise RecordError("checksum")
        try:
            position, snapshots = self._state.model.revive(content.state, read)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RecordError("no header of ours") from error
        if position != content.start or not self._state.model.accepts(self._state.store, snapshots, position):
            raise RecordError("of another layout")
        return Checkpoint.of(position, snapshots, account)

    def _content(self, file: int, record: Record) -> tuple[Content, int, str]:
        """What the file holds, where its tensors begin, and the checksum that all of it must have."""
        head, content = read_content(file, record.namespace, record.named, os.fstat(file).st_size)
        if content.parent != (b"" if record.parent is None else record.parent.address):
            raise RecordError("misnamed")
        return content, head.data_at + content.tokens.nbytes, head.checksum


def _no_room(error: Exception, n_bytes: int) -> BudgetError:
    return BudgetError(f"no room on the device: {error}", needed_bytes=n_bytes, available_bytes=0)


def _fill(file: int, places: list[np.ndarray], at: int) -> None:  # type: ignore[type-arg]
    if read_all(file, places, at) != sum(p.nbytes for p in places):
        raise RecordError("truncated")
