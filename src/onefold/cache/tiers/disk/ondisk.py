"""What of a node is on disk.

- The records that hold a node's tokens, in order from its start; they may end before the node does, and the first and
  the last may reach beyond it. When a node is split or joined, its records go along; nothing is written again.
- A point: the record of the checkpoint at the node's end.
- A hollow record has tokens and no KV. It does not count as a copy of a node that has KV in memory: the node is still
  written, and the record with KV comes first.

No MLX in this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from onefold.cache.memory.tree import Node, TierPayload
from onefold.cache.tiers.records.entry import Record


class OnDisk:
    __slots__ = ("hollow", "node", "point", "records", "thinned")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.records: list[Record] = []
        self.point: Record | None = None
        self.hollow = False
        """Whether there has been a hollow one among them."""
        self.thinned = 0
        """If the checkpoint at the node's end was on disk, and was surplus there: how many children the node had then,
        at least 1. It is not written again before another conversation branches off, or ends there."""

    @property
    def covered(self) -> int:
        """Up to here what memory has of the node is on disk, or being written."""
        return self._reach(self._with_kv, ready=False) if self.hollow and self._in_memory else self.reaches

    @property
    def readable(self) -> int:
        """Up to here what memory has of the node is on disk."""
        return self.kv if self._in_memory else self.known

    @property
    def kv(self) -> int:
        """Up to here the node's KV is on disk."""
        return self._reach(self._with_kv if self.hollow else self.records, ready=True)

    @property
    def fetchable(self) -> int:
        """Up to here its KV can be read, in the order of its records: the first that is not there ends it."""
        at = self.node.start
        for record in self.records:
            if not record.ready or record.hollow:
                break
            at = min(self.node.end, record.end)
        return at

    @property
    def known(self) -> int:
        """Up to here the node's tokens are on disk, with KV or without."""
        return self._reach(self.records, ready=True)

    @property
    def reaches(self) -> int:
        """Up to here the node's tokens are on disk, or being written."""
        if self.hollow:
            return self._reach(self.records, ready=False)
        return min(self.node.end, self.records[-1].end) if self.records else self.node.start

    @property
    def _in_memory(self) -> bool:
        span = self.node.span
        return span is not None and span.slab.store.token_bytes > 0

    @property
    def _with_kv(self) -> list[Record]:
        return list(itertools.takewhile(lambda r: not r.hollow, self.records))

    def _reach(self, records: Iterable[Record], *, ready: bool) -> int:
        at = self.node.start
        for record in records:
            if record.start <= at and (record.ready or not ready):
                at = max(at, min(self.node.end, record.end))
        return at

    def reaches_beyond(self, lower: Node) -> bool:
        """Whether its last record continues into another node than `lower`."""
        if not self.records:
            return False
        last = max(self.records, key=lambda r: r.end) if self.hollow else self.records[-1]
        if last.end <= self.node.end:
            return False
        return records_of(lower)[:1] != [last]

    @property
    def has_point(self) -> bool:
        """Whether the checkpoint at the node's end is on disk, or being written."""
        return self.point is not None

    @property
    def has_saved_point(self) -> bool:
        """Whether the checkpoint at the node's end is on disk."""
        return self.point is not None and self.point.ready

    @property
    def point_bytes(self) -> int:
        """The size of the record of the checkpoint at the node's end; 0 if it is not on disk."""
        return self.point.size if self.point is not None and self.point.ready else 0

    @property
    def all(self) -> list[Record]:
        return self.records if self.point is None else [*self.records, self.point]

    def add(self, record: Record) -> list[Record]:
        """Add a record of the node's tokens. Returns those that it makes superfluous."""
        gone: list[Record] = []
        if self.hollow and not record.hollow:
            first = len(self._with_kv)
            behind = self.records[first:]
            gone = [r for r in behind if r.ready and min(r.end, self.node.end) <= record.end]
            self.records[first:] = [record, *(r for r in behind if r not in gone)]
            for other in gone:
                other.nodes.discard(self.node)
        else:
            self.records.append(record)
        self.hollow = self.hollow or record.hollow
        record.nodes.add(self.node)
        return gone

    def set_point(self, record: Record) -> None:
        self.point = record
        record.nodes.add(self.node)

    def lose(self, record: Record) -> None:
        """Take out a record that was removed, with its descendants among the node's records."""
        if record is self.point:
            self.point = None
            record.nodes.discard(self.node)
        elif record in self.records:
            at = self.records.index(record)
            behind = self.records[at:]
            del self.records[at:]
            for other in behind:
                if other is not record and other.start <= self.reaches < other.end:
                    self.records.append(other)
                else:
                    other.nodes.discard(self.node)

    # -- as the tree asks ------------------------------------------------------------------------

    def cut(self, at: int, upper: Node, lower: Node) -> tuple[OnDisk | None, OnDisk | None]:
        position = upper.end
        above = OnDisk(upper)
        above.hollow = self.hollow
        reach = upper.start
        for record in self.records:
            if reach < position:
                above.records.append(record)
                record.nodes.add(upper)
                reach = max(reach, record.end)
        self.node = lower
        for record in self.records:
            if record.end <= position:
                record.nodes.discard(lower)
        self.records = [r for r in self.records if r.end > position]
        return (above if above.records else None), (self if self.records or self.point else None)

    def join(self, upper: TierPayload | None) -> None:
        """Take over the records of the node above, whose edge this node has taken over."""
        assert upper is None or isinstance(upper, OnDisk)
        above = [] if upper is None else upper.records
        for record in above:
            if upper is not None:
                record.nodes.discard(upper.node)
            record.nodes.add(self.node)
        self.records = above + [r for r in self.records if r not in above]
        self.hollow = self.hollow or (upper is not None and upper.hollow)

    def moved(self, node: Node) -> OnDisk:
        """Returns the same for `node`, which has taken over this one's node."""
        found = OnDisk(node)
        found.join(self)
        return found


def disk_of(node: Node) -> OnDisk | None:
    """Returns what of the node is on disk, None if nothing is."""
    found = node.below
    assert found is None or isinstance(found, OnDisk)
    return found


def made_disk_of(node: Node) -> OnDisk:
    """Returns what of the node is on disk; gives the node an empty one if it has none."""
    found = disk_of(node)
    if found is None:
        node.below = found = OnDisk(node)
    return found


def records_of(node: Node) -> list[Record]:
    """Returns the records of the node's tokens, in order."""
    found = disk_of(node)
    return [] if found is None else found.records


def point_of(node: Node) -> Record | None:
    """Returns the record of the checkpoint at the node's end."""
    found = disk_of(node)
    return None if found is None else found.point


def links(point: Record, begin: int) -> list[Record]:
    """Returns the points that have the entries of `point`'s windows from `begin` on, oldest first: itself, and those
    that it continues."""
    found = [point]
    while (before := found[0].after) is not None and before.start > begin:
        found.insert(0, before)
    return found


def all_records_of(node: Node) -> list[Record]:
    """Returns the records of the node's tokens, and that of its checkpoint."""
    found = disk_of(node)
    return [] if found is None else found.all


def covered_to(node: Node) -> int:
    """Returns up to where what memory has of the node is on disk, or being written."""
    found = disk_of(node)
    return node.start if found is None else found.covered


def is_covered(node: Node) -> bool:
    """Whether all that memory has of the node's tokens is on disk, or being written."""
    return covered_to(node) >= node.end


def is_being_written(node: Node) -> bool:
    """Whether a record of the node's path is being written."""
    return any(not r.ready for n in node.path() for r in all_records_of(n))


def is_clean(node: Node) -> bool:
    """Whether all that the node has in memory is on disk too."""
    found = disk_of(node)
    if found is None or found.readable < node.end:
        return False
    return found.has_saved_point or not _is_point_wanted(node)


def has_unwritten_point(node: Node) -> bool:
    """Whether the node has a checkpoint that should be on disk, and neither is nor is being written."""
    found = disk_of(node)
    return _is_point_wanted(node) and (found is None or not found.has_point)


def _is_point_wanted(node: Node) -> bool:
    """Whether the node has a checkpoint that should be on disk. One that was taken in the middle of a turn should where
    another conversation branches off."""
    if node.checkpoint is None:
        return False
    if node.checkpoint.revisited:
        return True
    found = disk_of(node)
    thinned = 0 if found is None else found.thinned
    return len(node.children) > max(1, thinned) or not (node.checkpoint.passing or thinned)


def check_node(node: Node) -> list[str]:
    """Returns a sentence for each thing that is wrong with what a node has on disk."""
    disk = disk_of(node)
    if disk is None:
        return []
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
    above = None if node.parent is None else disk_of(node.parent)
    inner = node.parent is not None and node.parent.parent is not None
    if inner and disk.records and (above is None or above.reaches < above.node.end):
        found.append(f"{where} is on disk, but its parent is not")
    return found
