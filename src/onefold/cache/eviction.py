"""Who goes first when bytes are short.

Leaves of the tree (nodes below which nothing is in memory) that nobody leases or pins, least recently used first; among
those used together the deeper goes first. A victim is ranked by what it would really free: a range whose buffer a lease
still reads frees nothing. A long leaf is not thrown away whole where cutting its end is enough.

No MLX in this file: what a node would free is asked of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from onefold.cache.tree import Node

SMALLEST_CUT = 64
"""Tokens: less than this is not worth keeping of a leaf that is being cut."""


class Victim(NamedTuple):
    node: Node
    keep_tokens: int
    """How much of its head may stay; 0 takes it whole."""


def leaves(nodes: Iterable[Node]) -> list[Node]:
    found = [n for n in nodes if n.in_memory]
    inner = set[Node]()
    for node in found:
        above = node.parent
        while above is not None and above not in inner:
            inner.add(above)
            above = above.parent
    return sorted((n for n in found if n.idle and n not in inner), key=lambda n: (n.last_use, -n.end))


def choose(
    nodes: Iterable[Node],
    missing: int,
    frees: Callable[[Node], int],
    token_bytes: int,
    *,
    may_cut: bool,
    may: Callable[[Node], bool] = lambda node: True,
) -> Victim | None:
    """The next leaf to give up, or None if none would free anything. Leaves that may not go are passed over."""
    for node in leaves(nodes):
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
