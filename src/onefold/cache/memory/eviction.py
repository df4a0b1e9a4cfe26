"""Who goes first when bytes are short.

Leaves of the tree (nodes below which nothing is in memory) that nobody leases or pins, least recently used first; among
those used together the deeper goes first. A victim is ranked by what it would really free: a range whose buffer a lease
still reads frees nothing. A long leaf is not thrown away whole where cutting its end is enough.

No MLX in this file: what a node would free is asked of the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from onefold.cache.memory.ranking import Ranking
from onefold.cache.memory.tree import Node

SMALLEST_CUT = 64
"""Tokens: less than this is not worth keeping of a leaf that is being cut."""


class Victim(NamedTuple):
    node: Node
    keep_tokens: int
    """How much of its head may stay; 0 takes it whole."""


class Leaves:
    """The nodes that may be evicted, in order. A watch of the trees: it hears of every change, and so never has to look
    through all nodes. `busy` are the nodes that a lease or a pin holds."""

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
        """Nothing: what has something in memory below it is told as a change."""

    def pop(self) -> Node | None:
        """Take out the next leaf; None if there is none. It comes again if it changes, or with `put_back`."""
        return self._queue.pop()

    def pass_over(self, node: Node) -> None:
        """This leaf was taken out and is not to go now."""
        self._queue.pass_over(node, _rank(node))

    def put_back(self) -> None:
        """Have the leaves that were passed over in the order again."""
        self._queue.put_back()

    def check(self, nodes: Iterable[Node]) -> list[str]:
        """Recount from all nodes and say what differs."""
        found, known = [], list(nodes)
        for node in known:
            below = sum(child.holds for child in node.children.values())
            if node.held_below != below:
                where = f"node [{node.start}, {node.end})"
                found.append(f"{where} counts {node.held_below} branches in memory, not {below}")
        queued = self._queue.keys()
        if queued != {n: _rank(n) for n in known if is_leaf(n)}:
            found.append(f"the order of eviction has {len(queued)} leaves, and not those of the tree")
        if self.busy != {n for n in known if not n.idle}:
            found.append(f"{len(self.busy)} nodes are noted as held, and others are")
        return found


def is_leaf(node: Node) -> bool:
    """Whether it may be evicted now."""
    return node.parent is not None and node.in_memory and not node.held_below and node.idle


def _rank(node: Node) -> tuple[float, int]:
    return node.last_use, -node.end


def leaves(nodes: Iterable[Node]) -> list[Node]:
    """The leaves among these nodes, in the order in which they would go."""
    return sorted((n for n in nodes if is_leaf(n)), key=_rank)


def consider(node: Node, missing: int, freed: int, token_bytes: int, *, may_cut: bool) -> Victim | None:
    """What of a leaf is to go for `missing` bytes, if all of it frees `freed`; None if it frees nothing."""
    if freed <= 0:
        return None
    if may_cut and freed > missing and token_bytes and node.checkpoint is None:
        keep = node.end - node.start - -(-missing // token_bytes)
        if keep >= SMALLEST_CUT:
            return Victim(node, keep)
    return Victim(node, 0)
