"""How a tree learns what is on disk: nodes for the records of a namespace."""

from __future__ import annotations

import numpy as np

from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.tiers.disk.ondisk import disk_of, made_disk_of
from onefold.cache.tiers.records.entry import Loaded, Record
from onefold.cache.tiers.records.record import What


def grow(tree: Tree, loaded: list[Loaded]) -> None:
    """Add the nodes of these records to a tree. Records may have tokens in common, when a conversation was removed in
    part and written again: a node keeps the first, and one with KV before a hollow one. Nodes that are in memory get
    the records that hold their tokens."""
    members = {found.record for found in loaded}
    following: dict[Record | None, list[Loaded]] = {}
    for found in loaded:
        following.setdefault(found.record.parent, []).append(found)
    ends: dict[Record, Node] = {}
    points: list[Record] = []
    todo = list[Loaded]()
    for above, after in following.items():
        if above is None:
            todo += after
        elif above not in members and above.nodes:
            ends[above] = max(above.nodes, key=lambda n: n.end)
            todo += after
    hollow: list[Loaded] = []
    while todo or hollow:
        found = todo.pop() if todo else hollow.pop()
        if found.record.hollow and todo:
            hollow.append(found)
            continue
        if found.record.what is What.POINT:
            points.append(found.record)
            continue
        chain = [found]
        while _continues(chain[-1].record, after := following.get(chain[-1].record, [])):
            chain.append(after[0])
        tokens = np.concatenate([c.tokens for c in chain]) if len(chain) > 1 else found.tokens
        node, known = tree.reach(tokens, _node_at(tree, ends, found.record))
        used = max(c.record.used for c in chain)
        if known:
            _claim(node, [member.record for member in chain])
        if known < len(tokens):
            node = tree.add(node, tokens[known:])
            held = made_disk_of(node)
            for member in chain:
                if member.record.end > node.start:
                    held.add(member.record)
        node.last_use = max(node.last_use, used)
        ends |= dict.fromkeys((member.record for member in chain), node)
        todo += following.get(chain[-1].record, ())
    # of several points in one place, the node gets the whole one
    for record in sorted(points, key=lambda r: 0 if r.after is None else r.after.start):
        node = _node_at(tree, ends, record)
        disk = disk_of(node)
        if node.parent is not None and disk is not None and disk.point is None:
            disk.set_point(record)


def _claim(node: Node, records: list[Record]) -> None:
    """Give these records, each of which continues the one before, to the nodes down to this one that lack them."""
    nodes: list[Node] = []
    while node.parent is not None and node.end > records[0].start:
        nodes.append(node)
        node = node.parent
    for n in reversed(nodes):
        for record in records:
            disk = disk_of(n)
            at = n.start if disk is None else disk.reaches
            if record.start <= at < min(n.end, record.end):
                made_disk_of(n).add(record)


def _continues(record: Record, after: list[Loaded]) -> bool:
    """Whether exactly one range continues the record, from its end, and nothing else continues it."""
    if len(after) != 1 or after[0].record.what is not What.RANGE:
        return False
    return after[0].record.start == record.end and after[0].record.hollow == record.hollow


def _node_at(tree: Tree, ends: dict[Record, Node], record: Record) -> Node:
    """Returns the node that ends where this record begins; splits one if need be."""
    if record.parent is None:
        return tree.root
    node = ends[record.parent]
    while node.start >= record.start and node.parent is not None:
        node = node.parent
    return tree.split(node, record.start) if record.start < node.end else node
