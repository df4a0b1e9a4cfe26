"""The recount: compares every sum and order that is updated with each change with one counted from scratch."""

from __future__ import annotations

import itertools
from collections import Counter

from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.nodes import NodeStore
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.state import CacheState


def recount(state: CacheState) -> list[str]:
    """Returns a sentence for each sum, order or owner that is wrong. Called with the lock held."""
    known, restores = list(state.leases), list(state.restores)  # keeps them alive meanwhile
    state.sweep()
    leases = [lease for lease in known if lease in state.leases]
    for lease in leases:
        lease.usage.recount()
    found = _recounted(state.nodes, state.ledger)
    through: Counter[int] = Counter()
    for lease in leases:
        if lease.hold.node is not None:
            through.update(id(n) for n in lease.hold.node.path())
    for node in state.nodes.nodes():
        if node.leases != through[id(node)]:
            found.append(f"node [{node.start}, {node.end}) counts {node.leases} leases, {through[id(node)]} are open")
    for slab in state.store.slabs:
        for track in slab.tracks:
            held = any(lease.hold.track is track for lease in leases)
            if not held and not any(restore.holds(track) for restore in restores):
                found.append(f"a slab of {slab.capacity} is held by a lease that is not open")
    return found


def _recounted(nodes: NodeStore, ledger: Ledger) -> list[str]:
    found = ledger.recount() + nodes.store.check()
    found += nodes.leaves.check(nodes.nodes()) + nodes.points.check(nodes.nodes())
    spans = set()
    for tree in nodes.trees.values():
        if tree.size != (real := sum(1 for _ in tree.root.walk())):
            found.append(f"a tree counts {tree.size} nodes, and has {real}")
        for node in tree.root.walk():
            found += _check_node(node)
            if node.span is not None:
                spans.add(id(node.span))
    for slab in nodes.store.slabs:
        found += _check_slab(slab)
        found += [f"a span [{s.lo}, {s.hi}) belongs to no node" for s in slab.spans if id(s) not in spans]
    return found + ([] if nodes.tier is None else nodes.tier.check())


def _check_node(node: Node) -> list[str]:
    found, where = [], f"node [{node.start}, {node.end})"
    if len(node.tokens) != node.end - node.start or node.parent is None or node.start != node.parent.end:
        found.append(f"{where} has {len(node.tokens)} tokens and does not follow its parent")
    if node.parent is not None and node.parent.children.get(int(node.tokens[0])) is not node:
        found.append(f"{where} is not its parent's child")
    if node.span is not None:
        if node.span.hi - node.span.lo != node.end - node.start:
            found.append(f"{where} owns [{node.span.lo}, {node.span.hi}), which has another length")
        if node.span.node is not node or node.span not in node.span.slab.spans:
            found.append(f"{where} and its span disagree")
    if node.checkpoint is not None:
        if node.checkpoint.position != node.end:
            found.append(f"{where} has a checkpoint at {node.checkpoint.position}")
        if node.checkpoint.bytes != node.checkpoint.account.bytes:
            found.append(
                f"{where}: checkpoint of {node.checkpoint.bytes} bytes counted as {node.checkpoint.account.bytes}"
            )
    return found


def _check_slab(slab: Slab) -> list[str]:
    if slab.rewriting:  # by a thread that has released the lock
        return []
    found, where = [], f"slab of {slab.capacity}"
    if slab.bytes != slab.capacity * slab.store.token_bytes:
        found.append(f"{where} is counted as {slab.bytes} bytes, not {slab.capacity * slab.store.token_bytes}")
    for index, layer in enumerate(slab.layers):
        if layer is not None:
            real = sum(a.nbytes for a in layer)
            if real != slab.capacity * slab.store.specs[index].token_bytes:
                found.append(f"{where}: layer {index} has {real} bytes")
    edges = sorted((s.lo, s.hi) for s in slab.spans)
    if any(a[1] > b[0] for a, b in itertools.pairwise(edges)) or (edges and edges[-1][1] > slab.capacity):
        found.append(f"{where}: spans overlap or overrun: {edges}")
    if not slab.spans and not slab.tracks and not slab.copies:
        found.append(f"{where} has no node, no track and no copy")
    return found
