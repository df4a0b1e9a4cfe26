"""Which leaf is evicted first when bytes are short.

Candidates are leaves of the tree (nodes with no descendant in memory) without a lease or a pin, least recently used
first; among those used together the deeper first. A victim is ranked by what it would really free: a range whose buffer
a lease still reads frees nothing. A long leaf is not evicted whole where cutting its end is enough.

No MLX in this file: the caller computes what a node would free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from onefold.cache.memory.ranking import Ranking
from onefold.cache.memory.tree import Node

SMALLEST_CUT = 64
"""Tokens. A leaf that is cut keeps at least this many, or it is evicted whole."""


class Victim(NamedTuple):
    node: Node
    keep_tokens: int
    """How many of its first tokens stay; 0 evicts it whole."""


class Leaves:
    """The nodes that may be evicted, in order. A watch of the trees: it is notified of every change, and so never
    iterates over all nodes. `busy` are the nodes that a lease or a pin holds."""

    def __init__(self) -> None:
        self.busy: set[Node] = set()
        self._queue: Ranking[Node] = Ranking()

    def changed(self, node: Node) -> None:
        if node.parent is None or node.idle:
            self.busy.discard(node)
        else:
            self.busy.add(node)
        if is_leaf(node):
            self._queue.place(node, _rank(node))
        else:
            self._queue.remove(node)

    def branched(self, node: Node) -> None:
        """Does nothing: the tree reports a descendant in memory as a change of the node."""

    def pop(self) -> Node | None:
        """Remove and return the next leaf; None if there is none. A change of the leaf adds it again."""
        return self._queue.pop()

    def pass_over(self, node: Node) -> None:
        """Keep a leaf that `pop` returned, and leave it out of the order until `put_back`."""
        self._queue.pass_over(node, _rank(node))

    def put_back(self) -> None:
        """Add the leaves that were passed over to the order again."""
        self._queue.put_back()

    def check(self, nodes: Iterable[Node]) -> list[str]:
        """Recounts from all nodes; returns a sentence for each difference."""
        found, known = [], list(nodes)
        for node in known:
            below = sum(child.holds for child in node.children.values())
            if node.held_below != below:
                where = f"node [{node.start}, {node.end})"
                found.append(f"{where} counts {node.held_below} children in memory, not {below}")
        queued = self._queue.keys()
        if queued != {n: _rank(n) for n in known if is_leaf(n)}:
            found.append(f"the order of eviction has {len(queued)} leaves, and they are not the tree's")
        if self.busy != {n for n in known if not n.idle}:
            found.append(f"{len(self.busy)} nodes are counted as held, and they are not the ones that are")
        return found


def is_leaf(node: Node) -> bool:
    """Whether the node may be evicted now."""
    return node.parent is not None and node.in_memory and not node.held_below and node.idle


def _rank(node: Node) -> tuple[float, int]:
    return node.last_use, -node.end


def leaves(nodes: Iterable[Node]) -> list[Node]:
    """Returns the leaves among these nodes, in the order of eviction."""
    return sorted((n for n in nodes if is_leaf(n)), key=_rank)


def consider(node: Node, missing: int, freed: int, token_bytes: int, *, may_cut: bool) -> Victim | None:
    """Returns which part of a leaf to evict for `missing` bytes, if the whole leaf frees `freed`; None if it frees
    nothing."""
    if freed <= 0:
        return None
    if may_cut and freed > missing and token_bytes and node.checkpoint is None:
        keep = node.end - node.start - -(-missing // token_bytes)
        if keep >= SMALLEST_CUT:
            return Victim(node, keep)
    return Victim(node, 0)
