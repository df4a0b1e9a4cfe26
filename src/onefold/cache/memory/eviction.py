"""Which leaf is evicted first when bytes are short.

Candidates are leaves of the tree (nodes with no descendant in memory) without a lease or a pin. First is the one that
is expected to be left alone for longest: for as long as it was between the last two requests that used it, a minute at
most, or, if it has been idle for half of that already, for twice as long as it has been idle. So a conversation that
comes back every few seconds stays while others wait for a person; what was not used for half a minute goes in the order
of last use. Among those of which the same is expected the least recently used goes first, and of those used together
the deeper. docs/eviction.md has the figures.

A victim is ranked by what it would really free: a range whose buffer a lease still reads frees nothing. A long leaf is
not evicted whole where cutting its end is enough.

No MLX in this file: the caller computes what a node would free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from onefold.cache.memory.ranking import Ranking
from onefold.cache.memory.tree import Node

LONGEST_PAUSE = 60.0
"""Seconds: the longest pause that is expected because there was one, and the pause that is expected of what one request
has used. After a longer one, shorter ones follow as often as after this."""
PERSON_PAUSE = 240.0
"""Seconds: the least that is expected if an answer ended the turn, so that a person is next, and not a tool."""
IDLE_FACTOR = 2.0
"""What has been idle for some time is expected to be left alone for so many times that."""
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
        self._by_use: Ranking[Node] = Ranking()
        """The least recently used first."""
        self._by_pause: Ranking[Node] = Ranking()
        """Those with the longest pause first."""

    def changed(self, node: Node) -> None:
        if node.parent is None or node.idle:
            self.busy.discard(node)
        else:
            self.busy.add(node)
        if is_leaf(node):
            self._by_use.place(node, _use_rank(node))
            self._by_pause.place(node, _pause_rank(node))
        else:
            self._by_use.remove(node)
            self._by_pause.remove(node)

    def branched(self, node: Node) -> None:
        """Does nothing: the tree reports a descendant in memory as a change of the node."""

    def pop(self, now: float) -> Node | None:
        """Remove and return the leaf that goes first at this time; None if there is none. A change of the leaf adds it
        again. The longest pause that is expected of any leaf is that of the oldest, or of the one with the longest."""
        oldest, slowest = self._by_use.first(), self._by_pause.first()
        if oldest is None or slowest is None:
            return None
        node = oldest if IDLE_FACTOR * (now - oldest.last_use) >= slowest.pause else slowest
        self._by_use.remove(node)
        self._by_pause.remove(node)
        return node

    def pass_over(self, node: Node) -> None:
        """Keep a leaf that `pop` returned, and leave it out of the order until `put_back`."""
        self._by_use.pass_over(node, _use_rank(node))
        self._by_pause.pass_over(node, _pause_rank(node))

    def put_back(self) -> None:
        """Add the leaves that were passed over to the order again."""
        self._by_use.put_back()
        self._by_pause.put_back()

    def check(self, nodes: Iterable[Node]) -> list[str]:
        """Recounts from all nodes; returns a sentence for each difference."""
        found, known = [], list(nodes)
        for node in known:
            below = sum(child.holds for child in node.children.values())
            if node.held_below != below:
                where = f"node [{node.start}, {node.end})"
                found.append(f"{where} counts {node.held_below} children in memory, not {below}")
        for queue, rank in ((self._by_use, _use_rank), (self._by_pause, _pause_rank)):
            queued = queue.keys()
            if queued != {n: rank(n) for n in known if is_leaf(n)}:
                found.append(f"the order of eviction has {len(queued)} leaves, and they are not the tree's")
        if self.busy != {n for n in known if not n.idle}:
            found.append(f"{len(self.busy)} nodes are counted as held, and they are not the ones that are")
        return found


def is_leaf(node: Node) -> bool:
    """Whether the node may be evicted now."""
    return node.parent is not None and node.in_memory and not node.held_below and node.idle


def _use_rank(node: Node) -> tuple[float, int]:
    return node.last_use, -node.end


def _pause_rank(node: Node) -> tuple[float, float, int]:
    return -node.pause, node.last_use, -node.end


def leaves(nodes: Iterable[Node], now: float) -> list[Node]:
    """Returns the leaves among these nodes, in the order of eviction at this time."""

    return sorted((n for n in nodes if is_leaf(n)), key=lambda n: rank(n.pause, n.last_use, n.end, now))


def rank(pause: float, last_use: float, end: int, now: float) -> tuple[float, float, int]:
    """Returns the key by which leaves are ordered at this time: the smallest is evicted first."""
    return -max(pause, IDLE_FACTOR * (now - last_use)), last_use, -end


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
