"""Reading the KV of a restore: records into one buffer, each into its place.

- One buffer is reserved for all records, with room for the request to continue in. A record is read straight into its
  place there, or by way of another buffer where the processor cannot address the device's memory.
- The next records are read on other threads while one is being checked. A record counts only when its checksum and its
  tokens agree; nodes get what was read up to the first that does not.

Called with the cache's lock held.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from typing import NamedTuple

import numpy as np

from onefold.cache.memory import arrays
from onefold.cache.memory.arrays import Bytes
from onefold.cache.memory.ledger import Account
from onefold.cache.memory.payloads import Tree
from onefold.cache.memory.segment import Slab, Span
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track
from onefold.cache.tiers import host
from onefold.cache.tiers.disk.plan import Plan
from onefold.cache.tiers.disk.reading import Reading, fill, no_room, open_buffers, read_header
from onefold.cache.tiers.records import system
from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import Content, Tensor
from onefold.errors import RecordError

AHEAD = 2
"""Records that are read while one is being checked."""


class Loaded(NamedTuple):
    """A record that has been read, and not yet checked."""

    content: Content
    checksum: str
    places: list[Bytes]


class RangeReader:
    def __init__(self, state: CacheState, shared: Reading, plan: Plan, tokens: Tokens) -> None:
        """`tokens` are those of the plan's path."""
        self._state, self._shared, self._plan, self._tokens = state, shared, plan, tokens
        self._base, self._stop = plan.first, plan.stop
        self._reached = self._base
        self._slab: Slab | None = None
        self._buffers: Account | None = None
        self._holder = Track(state.store)
        self.direct = arrays.addressable()
        """Files are read straight into arrays."""
        self._loading: deque[concurrent.futures.Future[Loaded]] = deque()
        self._layouts: dict[int, tuple[Tensor, ...]] = {}

    def holds(self, track: Track) -> bool:
        """Whether this is the track that holds the buffer."""
        return track is self._holder

    def reserve(self, room: int) -> None:
        """Reserve the buffer, with room for so many tokens behind the target. Raises BudgetError."""
        records = self._plan.records
        if not records:
            return
        largest = max(r.size for r in records)
        n_bytes = AHEAD * system.chosen.staged_bytes(largest)  # so many threads read
        if not self.direct:
            n_bytes += (AHEAD + 1 + host.TWICE_MORE) * largest
        if n_bytes:
            self._buffers = open_buffers(self._state, n_bytes)
        self._slab = self._state.store.slab_for(max(self._stop, self._plan.target + room) - self._base)
        self._slab.enter(self._holder)

    @property
    def loading(self) -> concurrent.futures.Future[Loaded] | None:
        """The record that is being read for the next `take`."""
        return self._loading[0] if self._loading else None

    def prepare(self, records: list[Record]) -> None:
        """Have the first of these records, and a few after it, read on other threads. Raises BudgetError, and
        RuntimeError if no thread can be started."""
        if self._slab is not None and self._slab.layers[0] is None:
            self._allocate(self._slab)
        for i, record in enumerate(records[: AHEAD + 1]):
            if i and record.start != records[i - 1].end:
                return  # it begins inside the one before
            if i >= len(self._loading):
                self._loading.append(self._shared.reader.submit(self._load, record))

    def take(self, record: Record, following: list[Record]) -> None:
        """Wait for a record and check it, while the following ones are read. Raises RecordError, OSError, BudgetError
        and RuntimeError."""
        self.prepare([record, *following])
        # a branch's record may begin inside this one, which is another conversation's from there on
        upto = min(record.end, following[0].start) if following else record.end
        self._believe(record, self._loading[0].result(), upto)
        self._loading.popleft()  # not before: an interrupted caller waits for it, since it is being read into
        self._reached = upto

    def distrust(self) -> None:
        """Use nothing of what was read: the device failed, and its arrays may never be computed."""
        self._reached = self._base

    def finish(self, tree: Tree) -> int:
        """Wait for the records that are being read, and give the nodes what was read and checked. Returns how many
        tokens that is."""
        with self._state.lock.released():
            concurrent.futures.wait(self._loading)
        self._loading.clear()
        if self._slab is None:
            return 0
        if self.direct and self._slab.layers[0] is not None:  # no garbage behind what was checked
            host.clear(self._slab, self._reached - self._base, self._stop - self._base)
        n_tokens = self._attach(tree, self._slab)
        self._slab.leave(self._holder)
        self._slab.settle()
        return n_tokens

    def release(self) -> None:
        """Release the memory for bytes that were not read straight into their place."""
        if self._buffers is not None:
            system.chosen.free_stages()
            self._buffers.close()

    def _load(self, record: Record) -> Loaded:
        """On a reading thread: read a record into its place, or into a buffer. Raises RecordError and OSError."""
        slab = self._slab
        assert slab is not None
        lo = record.start - self._base
        n = record.end - record.start
        with self._shared.links.catalog.folder.reading(record.namespace, record.name) as file:
            content, data_at, checksum = read_header(file, record)
            if content.tensors != self._tensors(n):
                raise RecordError(DiskReason.OTHER_LAYOUT)
            if self.direct:
                places = host.places(slab, lo, lo + n)
            else:
                places = [np.empty(content.payload_bytes - content.tokens.nbytes, np.uint8)]
            fill(file, places, data_at)
        return Loaded(content, checksum, places)

    def _tensors(self, n: int) -> tuple[Tensor, ...]:
        if n not in self._layouts:
            self._layouts[n] = host.range_tensors(self._state.store.specs, n)
        return self._layouts[n]

    def _believe(self, record: Record, loaded: Loaded, upto: int) -> None:
        """Check a record. Raises RecordError if it is not what was written, or not of this path up to there."""
        if loaded.content.checksum(loaded.places) != loaded.checksum:
            raise RecordError(DiskReason.CHECKSUM)
        n = min(self._plan.target, upto) - record.start
        if (loaded.content.tokens[:n] != self._tokens[record.start : record.start + n]).any():
            raise RecordError(DiskReason.OTHER_TOKENS)
        if not self.direct:
            assert self._slab is not None
            lo = record.start - self._base
            host.copy_in(self._slab, lo, lo + record.end - record.start, loaded.places[0])

    def _allocate(self, slab: Slab) -> None:
        """Make the arrays. Raises BudgetError."""
        try:
            host.allocate(slab, self._stop - self._base, direct=self.direct)
        except (MemoryError, RuntimeError) as error:
            raise no_room(error, slab.bytes) from error

    def _attach(self, tree: Tree, slab: Slab) -> int:
        """Give the nodes their ranges of the buffer. Returns how many tokens that is."""
        n_tokens, stop = 0, min(self._reached, self._plan.target)
        for node in self._plan.path[-1].path():
            if node.span is None and node.start < stop and node.start >= self._base:
                at = tree.split(node, stop) if node.end > stop else node
                at.span = Span.own(slab, at.start - self._base, at.end - self._base, at)
                n_tokens += at.end - at.start
        return n_tokens
