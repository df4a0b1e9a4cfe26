"""Which record of a node is written next, and whether it has room on the disk.

- A path is written from its first token on, a record at a time: whatever is on disk can be resumed.
- A record that is on disk already, and that no node knew of, is not written again: the node has it from then on.
- A record that could not be read is written again, over its file, if memory has what it should hold.
- A checkpoint is written after the tokens before it. Of its windows, the record has only the entries that no earlier
  point of the path has on disk.

    path       [ node 0..900, on disk )[ node 900..1500, dirty, checkpoint at 1500 )
    records     the next range of the second node, from 900 on ... then the checkpoint

Called with the cache's lock held.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable

from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.segment import Store
from onefold.cache.tiers import host
from onefold.cache.tiers.disk.backlog import Refusals
from onefold.cache.tiers.disk.linking import Links
from onefold.cache.tiers.disk.ondisk import (
    covered_to,
    has_unwritten_point,
    is_covered,
    links,
    made_disk_of,
    point_of,
    records_of,
)
from onefold.cache.tiers.disk.writing import Job
from onefold.cache.tiers.records.entry import NO_TOKENS, Record
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import PARTED, VERSION, VERSIONS, Content, Tensor, What
from onefold.errors import RecordError
from onefold.sizes import show_size

log = logging.getLogger("onefold")

LINKS_MOST = 256
"""Points that are read for one whose windows continue theirs. One that would need more is written whole."""
HOLLOW_TOKENS = 1 << 16
"""The most tokens of a range that has no KV."""


class Jobs:
    def __init__(
        self,
        store: Store,
        links: Links,
        layout: Layout,
        refusals: Refusals,
        record_tokens: int,
        space_of: Callable[[Node], str | None],
    ) -> None:
        """`space_of` returns the name on disk of a node's namespace, None if it has none."""
        self.reasons: Counter[str] = Counter()
        """Why records were not written."""
        self.record_tokens = record_tokens
        self.version = VERSION
        """The format of new records."""
        self._store, self._links, self._layout, self._refusals = store, links, layout, refusals
        self._catalog, self._space_of = links.catalog, space_of
        self._logged_full = False

    def has_place(self, node: Node) -> bool:
        """Whether the node's namespace has a name on disk."""
        return self._space_of(node) is not None

    def is_writable(self, node: Node, *, points: bool = True) -> bool:
        """Whether a record of the node's path can be written now; without `points`, one of tokens."""
        if node.parent is None or self._catalog.failed or self._space_of(node) is None:
            return False
        first = self._first_dirty(node, points=points)
        if first is None or self._refusals.has(first):
            return False
        return first.span is None or host.is_quiet(first.span.slab) or is_covered(first)

    def is_dirty(self, node: Node) -> bool:
        """Whether the node's path has something that should be on disk and is not."""
        return node.parent is not None and self._space_of(node) is not None and self._first_dirty(node) is not None

    def _first_dirty(self, node: Node, *, points: bool = True) -> Node | None:
        """Returns the first node of the path that is not wholly on disk, if it has something that could be. Without
        `points`, checkpoints do not count."""
        path = node.path()
        deepest = max((i for i, n in enumerate(path) if n.checkpoint is not None), default=-1)
        for i, n in enumerate(path):
            if not is_covered(n):
                if n.span is None and self._store.specs and i > deepest:
                    return None  # a rotation left it without bytes, and no checkpoint behind it can be resumed
                return n
            if points and has_unwritten_point(n):
                return n
        return None

    def next_of(self, node: Node, *, points: bool = True) -> Job | None:
        """Returns the next record of a node's path, with its room on the disk reserved. None if nothing is left to
        write, or there is no room. Nodes get the records that are on disk already."""
        space = self._space_of(node)
        while space is not None and self.is_writable(node, points=points):
            first = self._first_dirty(node, points=points)
            assert first is not None
            if not is_covered(first):
                job = self._range_job(first, space)
            else:
                self._links.thin(node)
                if not has_unwritten_point(first):
                    continue  # it would be removed as soon as it was written
                job = self._point_job(first, space)
            if not isinstance(job, Record):
                return job
        return None

    def _range_job(self, first: Node, space: str) -> Job | Record | None:
        """Returns the next range of this node; the record alone if that is on disk already."""
        start = covered_to(first)
        span = first.span
        stop = min(first.end, start + (HOLLOW_TOKENS if span is None else self.record_tokens))
        tokens = first.tokens[start - first.start : stop - first.start]
        tensors = () if span is None else host.range_tensors(self._store.specs, stop - start)
        parent = _parent_at(first, start)
        above = b"" if parent is None else parent.address
        content = Content(What.RANGE, space, above, start, tokens, tensors, version=self.version)
        known = self._known(content)
        record = known or self._reserve(first, content, stop, parent)
        if record is None:
            return None
        for superfluous in made_disk_of(first).add(record):
            self._links.release(superfluous)
        if known is not None:
            return known
        if span is None:
            return Job(record, content, None, 0)
        span.slab.copies += 1
        return Job(record, content, span.slab, span.lo + start - first.start)

    def _point_job(self, node: Node, space: str) -> Job | Record | None:
        """Returns the checkpoint at this node's end; the record alone if that is on disk already."""
        parent, checkpoint = _parent_at(node, node.end), node.checkpoint
        if parent is None or checkpoint is None:
            return None
        after = _continued(node, checkpoint)
        since = 0 if after is None else after.start
        arrays = checkpoint.arrays(since)
        try:
            tensors: tuple[Tensor, ...] = tuple(host.tensor(n, a) for n, a in arrays.items())
            state, before = checkpoint.describe(since), b"" if after is None else after.address
            version = PARTED if checkpoint.parted(since) else self.version
            content = Content(What.POINT, space, parent.address, node.end, NO_TOKENS, tensors, state, version, before)
            self._layout.require(content)
        except (KeyError, TypeError, ValueError, RecordError) as error:
            self.reasons[DiskReason.UNWRITABLE_CHECKPOINT] += 1
            log.debug("a checkpoint at %d cannot be written, and stays in memory: %s", node.end, error)
            return None
        known = self._known(content)
        record = known or self._reserve(node, content, node.end, parent, after)
        if record is None:
            return None
        made_disk_of(node).set_point(record)
        if known is not None:
            return known
        checkpoint.hold()
        return Job(record, content, None, 0, checkpoint, since)

    def _known(self, content: Content) -> Record | None:
        """Returns the record of this content, in any format, if it is on disk and could be read when it was last
        tried."""
        for version in sorted(VERSIONS, key=lambda v: v != content.version):
            after = content.after if version == PARTED else b""
            same = content
            if (version, after) != (content.version, content.after):
                same = dataclasses.replace(content, version=version, after=after)
            there = self._catalog.find(content.namespace, same.address)
            if there is not None and there.ready and not there.unread:
                return there
        return None

    def _reserve(
        self, node: Node, content: Content, end: int, parent: Record | None, after: Record | None = None
    ) -> Record | None:
        """Reserve a record's room on the disk. Returns None if it has none, and counts the reason."""
        there = self._catalog.find(content.namespace, content.address)
        if there is not None and there.unread and there.ready and there.size != content.size:
            self._links.forget([there])  # that file is not this record
            there = None
        again = there is not None and there.unread and there.ready
        reason = self._catalog.refuses(content.size, content.namespace)
        if not reason and there is not None and not again:
            reason = DiskReason.ALREADY_THERE
        is_new = there is None
        if not reason and is_new and content.is_state and not self._links.make_room_for_state(content.size):
            reason = DiskReason.NO_ROOM
        if not reason and is_new:
            reason = self._make_room(content.size, node.last_use, [r for r in (parent, after) if r is not None])
        if reason:
            self.reasons[reason] += 1
            return None
        hollow = content.what is What.RANGE and not content.tensors
        if there is not None:  # it could not be read, and memory has what it should hold
            there.link(parent, end, after)
            there.hollow, there.used = hollow, node.last_use
            self._catalog.expect_again(there)
            return there
        record = Record(
            content.namespace,
            content.what,
            content.address,
            content.start,
            end,
            content.size,
            node.last_use,
            content.version,
            content.after,
        )
        record.parent, record.after = parent, after
        record.hollow = hollow
        self._catalog.expect(record)
        return record

    def _make_room(self, size: int, used: float, above: list[Record]) -> str:
        """Evict records, but not those `above` it, for one of this size. Returns why that cannot be; nothing if it
        could."""
        for record in above:
            record.pins += 1
        try:
            victims = self._catalog.make_room(size, used)
        finally:
            for record in above:
                record.pins -= 1
        for victim in victims or ():
            self._links.take_from_nodes(victim)
        if victims is not None:
            return ""
        if not self._logged_full:
            self._logged_full = True
            log.warning(
                "the disk budget of %s has no room for a new record: all records there were used later",
                show_size(self._catalog.budget_bytes),
            )
        return DiskReason.NO_ROOM


def _parent_at(node: Node, start: int) -> Record | None:
    """Returns the record that the node's next one, from `start` on, continues; one that has KV if there is any."""
    found: Record | None = None
    at: Node | None = node
    while at is not None and at.end >= start:
        for record in reversed(records_of(at)):
            if record.start < start <= record.end and (found is None or found.hollow):
                found = record
        at = at.parent if found is None or at.start == start else None
    return found


def _continued(node: Node, checkpoint: Checkpoint) -> Record | None:
    """Returns the point, on disk or being written, that has the entries before those which a record of this checkpoint
    needs; None if the record must have all."""
    begin = checkpoint.begin
    at = node.parent if checkpoint.is_windows else None
    while at is not None and at.end > begin:
        found = point_of(at)
        if found is not None and not found.unread:
            return found if len(links(found, begin)) < LINKS_MOST else None
        at = at.parent
    return None
