"""The links between nodes and the records that hold them, kept right when either is removed.

- A record is removed: its nodes lose it, fall back to another with the same tokens if there is one, and are removed
  from the tree if nothing is left of them anywhere.
- A node is removed: its records lose it, and are removed if no node and no other record needs them.

Called with the cache's lock held.
"""

from __future__ import annotations

from collections.abc import Iterable

from onefold.cache.memory.checkpoints import DISK_PER_PATH, DISK_RECENT, conversation, superfluous
from onefold.cache.memory.nodes import NodeStore
from onefold.cache.memory.payloads import Node
from onefold.cache.tiers.disk.ondisk import (
    OnDisk,
    all_records_of,
    disk_of,
    has_unwritten_point,
    made_disk_of,
    point_of,
    records_of,
)
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.entry import Record, on_disk
from onefold.cache.tiers.records.order import below


class Links:
    def __init__(self, nodes: NodeStore, catalog: Catalog) -> None:
        self._nodes = nodes
        self.catalog = catalog

    def forget(self, records: Iterable[Record]) -> list[Record]:
        """Remove these records and all their descendants. Returns all that were removed."""
        gone = sorted(below(self.catalog.records(), records), key=lambda r: -r.start)
        for record in gone:
            self.take_from_nodes(record)
            if record.ready:
                self.catalog.drop(record)
        return gone

    def reject(self, record: Record, reason: str) -> None:
        """Remove a record that failed a check, with its descendants, and count it."""
        tails = [tail for tail in self.forget([record]) if tail is not record]
        self.catalog.count_rejected(record, reason, tails)

    def set_apart(self, record: Record, error: Exception) -> set[Node]:
        """The record cannot be read now. Takes it and its descendants from their nodes, and returns those whose state
        in memory is dirty again; the files stay, and are tried again later. A record that was given up meanwhile, or
        is being written again, is left alone."""
        if self.catalog.find(record.namespace, record.address) is not record or not record.ready:
            return set()
        tails = sorted(below(self.catalog.records(), [record]), key=lambda r: -r.start)
        nodes = {node for tail in tails for node in tail.nodes}
        for tail in tails:
            self.take_from_nodes(tail)
        self.catalog.apart.doubt(record, tails, error)
        return {n for n in nodes if n.parent is not None and (n.span is not None or n.checkpoint is not None)}

    def take_from_nodes(self, record: Record) -> None:
        """Take a record from its nodes, and remove the nodes that have nothing left."""
        nodes = sorted(record.nodes, key=lambda n: -n.start)
        for node in nodes:
            made_disk_of(node).lose(record)
        for node in nodes:
            self._fall_back(node, made_disk_of(node))
            if not all_records_of(node):
                node.below = None
            self.prune(node)

    def _fall_back(self, node: Node, disk: OnDisk) -> None:
        """Give a node that lost a record others with the same tokens, if its checkpoint or a child continues them."""
        if disk.reaches >= node.end:
            return
        firsts = [r for n in node.children.values() for r in records_of(n)[:1]]
        for first in [*([] if disk.point is None else [disk.point.parent]), *firsts]:
            found: list[Record] = []
            at: Record | None = first
            while at is not None and self.catalog.find(at.namespace, at.address) is at:
                found.insert(0, at)
                if at.start <= disk.reaches:
                    for record in found:
                        if record.start < node.end:
                            disk.add(record)
                    return
                at = at.parent

    def drop_below(self, node: Node) -> None:
        """Remove the records of the node's descendants: the node itself is not on disk, so nothing leads to them."""
        self.forget({r for n in node.walk() for r in all_records_of(n)})

    def prune(self, node: Node) -> None:
        """Remove a node from its tree if it has nothing in memory or on disk, and no children."""
        if (
            node.span is None
            and node.checkpoint is None
            and not node.children
            and node.idle
            and node.parent is not None
        ):
            disk = disk_of(node)
            if disk is not None and disk.readable >= node.end:
                return
            above = node.parent
            if disk is not None and disk.covered > node.start:
                above = self._nodes.tree_of(node).split(node, disk.covered)
            for record in all_records_of(node):
                record.nodes.discard(node)
            node.below = None
            self._nodes.tree_of(node).remove(node)
            if above.span is None and above.checkpoint is None and above.below is None and above.parent is not None:
                self.prune(above)

    def leave(self, node: Node) -> None:
        """Take a node, which is being removed from its tree, from its records."""
        records = all_records_of(node)
        node.below = None
        for record in reversed(records):
            record.nodes.discard(node)
            self.release(record)

    def thin(self, node: Node) -> None:
        """Keep the checkpoints of a conversation on disk that are worth most: the last few, and ever fewer of those
        before; and all whose windows continue each other's, which take no more bytes than the tokens between them. One
        that is not written yet, and is not worth it, is not written."""
        held = [n for n in conversation(node) if _has_state(n)]
        for n in superfluous(held, DISK_PER_PATH, DISK_RECENT):
            record = point_of(n)
            if record is None:
                if n.below is not None:  # else its tokens are written first
                    _mark_thinned(n)
            elif record.ready and not record.pins:  # else a restore reads it: the next checkpoint thins again
                self._drop_point(record, [n])

    def make_room_for_state(self, size: int) -> bool:
        """Remove whole points until another of this size keeps to their share of the disk. First those that a deeper
        one on the same path replaces, then the last ones of paths; of each the least recently used. Returns False, and
        removes none, if that is not enough."""
        missing = self.catalog.missing_for_state(size)
        if missing <= 0:
            return True
        states = self.catalog.states()
        replaced = {n for record in states for node in record.nodes for n in node.path()[:-1]}
        states.sort(key=lambda r: not (r.nodes and r.nodes <= replaced))
        if sum(on_disk(r.size) for r in states) < missing:
            return False
        for record in states:
            if missing <= 0:
                break
            missing -= on_disk(record.size)
            self._drop_point(record, list(record.nodes))
        return True

    def _drop_point(self, record: Record, nodes: list[Node]) -> None:
        """Take a point from these nodes, and remove it if no other node needs it."""
        for node in nodes:
            made_disk_of(node).lose(record)
            _mark_thinned(node)
        self.release(record)

    def release(self, record: Record) -> None:
        """Remove a record that no node and no other record needs, and its ancestors likewise. One that is being
        written is removed afterwards."""
        todo = [record]
        while todo:
            at = todo.pop()
            if at.ready and not at.nodes and not at.children:
                self.catalog.drop(at)
                todo += at.above


def _has_state(node: Node) -> bool:
    """Whether the node has a point on disk that may be thinned, or should have one: no part of a chain of windows, and
    none that a conversation came back to."""
    record = point_of(node)
    if node.checkpoint is not None and node.checkpoint.revisited:
        return False
    if record is not None:
        return record.after is None and not record.children
    return has_unwritten_point(node) and node.checkpoint is not None and not node.checkpoint.is_windows


def _mark_thinned(node: Node) -> None:
    """Note that the checkpoint at the node's end is surplus on disk."""
    made_disk_of(node).thinned = max(1, len(node.children))
