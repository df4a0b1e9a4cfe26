"""The trees as plain facts, for people: what is held, how large it is, who reads it, when it was used.

The walk is `Work` whose steps take some 0.1 ms, so a reader of thousands of nodes never holds the lock for long. The
trees may change between two steps: a node that was removed, split or joined meanwhile is left out or has its old range,
and the next walk is right again. No MLX in this file.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from onefold.cache.memory.lock import Work
from onefold.cache.memory.nodes import NodeStore
from onefold.cache.memory.payloads import Node, Tree

NODES_PER_STEP = 16


class NodeFacts(NamedTuple):
    number: int
    above: int
    """The number of its parent; 0 if it begins a conversation."""
    space: int
    """The place of its namespace in `Outline.spaces`."""
    start: int
    end: int
    kv_bytes: int
    """Of its own tokens, in memory."""
    checkpoint_bytes: int
    """What dropping the checkpoint at its end would free."""
    in_memory: bool
    stored_below: int
    """How many of its tokens' KV the tier below memory has."""
    is_below: bool
    """The tier below memory has something of it: KV, a checkpoint, or its tokens alone."""
    point_below_bytes: int
    """Of the checkpoint at its end, in that tier."""
    last_use: float
    """Seconds since 1970."""
    pause: float
    readers: int
    """Open leases whose path includes it."""
    pins: int
    node: weakref.ref[Node]


class Outline(NamedTuple):
    spaces: list[str]
    """The callers' names of the namespaces."""
    nodes: list[NodeFacts]
    """Parents before children."""
    now: float
    """The time that `last_use` is compared with."""
    trees: Sequence[Tree] = ()
    """Those of the namespaces, in their order."""


def outlining(store: NodeStore) -> Work[Outline]:
    """Returns an outline of all trees."""
    trees: list[Tree] = []
    made = Outline([], [], store.now(), trees)
    for key, tree in list(store.trees.items()):
        space = len(made.spaces)
        made.spaces.append(name_of(key))
        trees.append(tree)
        left: list[tuple[Node, Node, int]] = [(tree.root, child, 0) for child in tree.root.children.values()]
        while left:
            above, node, number = left.pop()
            found = _below(above, node)
            if found is None:
                continue
            made.nodes.append(_facts(found, number, space, store))
            left += [(found, child, found.number) for child in found.children.values()]
            if len(made.nodes) % NODES_PER_STEP == 0:
                yield 0.0
    return made


def _below(above: Node, node: Node) -> Node | None:
    """Returns the child of `above` on the way to `node`, which may have been split since; None if `node` is not below
    it any more."""
    at: Node | None = node
    while at is not None and at.parent is not above:
        at = at.parent
    return at


def _facts(node: Node, above: int, space: int, store: NodeStore) -> NodeFacts:
    span, checkpoint, below = node.span, node.checkpoint, node.below
    return NodeFacts(
        node.number,
        above,
        space,
        node.start,
        node.end,
        0 if span is None else (span.hi - span.lo) * store.store.token_bytes,
        0 if checkpoint is None else checkpoint.frees,
        node.in_memory,
        0 if below is None else max(0, min(below.kv, node.end) - node.start),
        below is not None,
        0 if below is None else below.point_bytes,
        node.last_use,
        node.pause,
        node.leases,
        node.pins,
        weakref.ref(node),
    )


def name_of(key: object) -> str:
    """Returns the caller's part of a tree's namespace."""
    first = key[0] if isinstance(key, tuple) and key else key
    return str(first)
