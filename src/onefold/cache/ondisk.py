"""What of a node is on disk.

- The records that hold a node's tokens, in order from its start; they may end before the node does, and the first and
  the last may reach beyond it. When a node is split or joined, its records go along; nothing is written again.
- A point: the record of the checkpoint at the node's end.

No MLX in this file.
"""

from __future__ import annotations

from onefold.cache.tiers.vault import Record
from onefold.cache.tree import Node


class OnDisk:
    __slots__ = ("node", "point", "records")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.records: list[Record] = []
        self.point: Record | None = None

    @property
    def covered(self) -> int:
        """Up to here the node's tokens are on disk, or on their way."""
        return min(self.node.end, self.records[-1].end) if self.records else self.node.start

    @property
    def readable(self) -> int:
        """Up to here they are there."""
        at = self.node.start
        for record in self.records:
            if not record.ready:
                break
            at = min(self.node.end, record.end)
        return at

    def reaches_beyond(self, lower: Node) -> bool:
        """Whether its last record goes on into something else than the node below."""
        if not self.records or self.records[-1].end <= self.node.end:
            return False
        return lower.disk is None or not lower.disk.records or lower.disk.records[0] is not self.records[-1]

    @property
    def all(self) -> list[Record]:
        return self.records if self.point is None else [*self.records, self.point]

    def add(self, record: Record) -> None:
        self.records.append(record)
        record.nodes.add(self.node)

    def set_point(self, record: Record) -> None:
        self.point = record
        record.nodes.add(self.node)

    def lose(self, record: Record) -> None:
        """It is gone, and whatever comes after it is of no use."""
        if record is self.point:
            self.point = None
            record.nodes.discard(self.node)
        elif record in self.records:
            at = self.records.index(record)
            for gone in self.records[at:]:
                gone.nodes.discard(self.node)
            del self.records[at:]

    # -- as the tree asks ------------------------------------------------------------------------

    def cut(self, at: int, upper: Node, lower: Node) -> tuple[OnDisk | None, OnDisk | None]:
        position = upper.end
        above = OnDisk(upper)
        for record in self.records:
            if record.start < position:
                above.add(record)
        self.node = lower
        for record in self.records:
            if record.end <= position:
                record.nodes.discard(lower)
        self.records = [r for r in self.records if r.end > position]
        return (above if above.records else None), (self if self.records or self.point else None)

    def join(self, upper: OnDisk | None) -> None:
        """Its node has taken over the edge before it."""
        above = [] if upper is None else upper.records
        for record in above:
            if upper is not None:
                record.nodes.discard(upper.node)
            record.nodes.add(self.node)
        self.records = above + [r for r in self.records if r not in above]

    def moved(self, node: Node) -> OnDisk:
        """The same, for the node that has taken over its own."""
        found = OnDisk(node)
        found.join(self)
        return found
