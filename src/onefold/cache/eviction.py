"""Who goes first when bytes are short.

Leaves of the tree (nodes below which nothing is in memory) that nobody leases or pins, least recently used first; among
those used together the deeper goes first. A victim is ranked by what it would really free: a range whose buffer a lease
still reads frees nothing. A long leaf is not thrown away whole where cutting its end is enough.

No MLX in this file: what a node would free is asked of the caller.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from onefold.cache.tree import Node

SMALLEST_CUT = 64
"""Tokens: less than this is not worth keeping of a leaf that is being cut."""


class Victim(NamedTuple):
    node: Node
    keep_tokens: int
    """How much of its head may stay; 0 takes it whole."""


class Leaves:
    """In which order they go. The nodes are looked through once; a parent follows when its last leaf was given up."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._below: Counter[Node] = Counter()
        """For nodes that have something in memory below them: in how many of their branches."""
        found = [n for n in nodes if n.in_memory]
        for node in found:
            while (above := node.parent) is not None:
                self._below[above] += 1
                if self._below[above] > 1 or above.in_memory:  # it is counted already, or counts for itself
                    break
                node = above
        self._queue: list[tuple[float, int, int, Node]] = []
        for node in found:
            self._push(node)

    def _push(self, node: Node) -> None:
        if node.idle and not self._below[node]:
            heapq.heappush(self._queue, (node.last_use, -node.end, id(node), node))

    def __iter__(self) -> Iterator[Node]:
        while self._queue:
            yield heapq.heappop(self._queue)[-1]

    def gave_up(self, above: Node | None) -> None:
        """A leaf whose parent this was has nothing in memory any more."""
        while above is not None and not above.is_root:
            self._below[above] -= 1
            if self._below[above]:
                return
            if above.in_memory:
                self._push(above)
                return
            above = above.parent


def leaves(nodes: Iterable[Node]) -> list[Node]:
    return list(Leaves(nodes))


def choose(
    order: Leaves,
    missing: int,
    frees: Callable[[Node], int],
    token_bytes: int,
    *,
    may_cut: bool,
    may: Callable[[Node], bool] = lambda node: True,
) -> Victim | None:
    """The next leaf to give up, or None if none would free anything. Leaves that may not go are passed over."""
    for node in order:
        freed = frees(node)
        if freed <= 0 or not may(node):
            continue
        length = node.end - node.start
        if may_cut and freed > missing and token_bytes and node.checkpoint is None:
            keep = length - -(-missing // token_bytes)
            if keep >= SMALLEST_CUT:
                return Victim(node, keep)
        return Victim(node, 0)
    return None
