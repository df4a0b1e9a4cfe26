"""The tree as boxes of an icicle: how wide each is, where its KV lies, and when it would be evicted.

What is narrower than a thousandth of the whole is merged with its siblings into one box, so that a tree of any size is
a few hundred boxes. Works on an outline, without the cache's lock.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from onefold.cache.memory.eviction import rank
from onefold.cache.memory.outline import NodeFacts, Outline

NARROWEST = 1 / 1000
"""Of the whole width."""
MOST_BOXES = 1000
"""In a deep tree boxes lie below one another, and there may be more that are wide enough: the widest are drawn."""
MEMORY, DISK = "m", "d"

Box = dict[str, Any]


def boxes(outline: Outline, token_bytes: int, shared: Callable[[NodeFacts], int] = lambda n: 0) -> dict[str, Box]:
    """Returns the boxes by their names. A node is named by its number; what is merged below a node by `+` and that
    node's number, or by `+` and its namespace's place for what is merged at the top. `shared` tells how many tokens of
    the path to a node, from the first on, a shared store has; it is asked for the deepest nodes that have a box."""
    sizes = {n.number: size_of(n, token_bytes) for n in outline.nodes}
    totals = dict(sizes)
    for n in reversed(outline.nodes):
        if n.above:
            totals[n.above] += totals[n.number]
    least = sum(totals[n.number] for n in outline.nodes if not n.above) * NARROWEST
    drawn = _largest(outline, totals, least)
    turn = evictions(outline)
    stored = _shared(outline, drawn, shared)
    made: dict[str, Box] = {}
    merged: dict[str, list[NodeFacts]] = defaultdict(list)
    inside: dict[int, str] = {}
    """The merged box that a node is in."""
    for n in outline.nodes:
        if n.number not in drawn:
            inside[n.number] = name = inside.get(n.above) or (f"+{n.above}" if n.above else f"+s{n.space}")
            merged[name].append(n)
            continue
        made[str(n.number)] = {
            "above": str(n.above) if n.above else "",
            "space": n.space,
            "start": n.start,
            "end": n.end,
            "bytes": sizes[n.number],
            "total": totals[n.number],
            "used": round(n.last_use, 1),
            "readers": n.readers,
            "pins": n.pins,
            "where": _where([n]),
            "shared": max(0, min(n.end, stored.get(n.number, 0)) - n.start),
            "turn": turn.get(n.number),
        }
    for name, nodes in merged.items():
        first = nodes[0]
        made[name] = {
            "above": str(first.above) if first.above else "",
            "space": first.space,
            "merged": len(nodes),
            "crowded": any(totals[n.number] >= least for n in nodes),
            "bytes": 0,
            "total": sum(sizes[n.number] for n in nodes),
            "used": round(max(n.last_use for n in nodes), 1),
            "readers": max(n.readers for n in nodes),
            "pins": max(n.pins for n in nodes),
            "where": _where(nodes),
            "turn": min((t for n in nodes if (t := turn.get(n.number)) is not None), default=None),
        }
    return made


def _largest(outline: Outline, totals: dict[int, int], least: float) -> set[int]:
    """Returns the nodes that get a box of their own: those that are wide enough, and of these the `MOST_BOXES` widest.
    A parent is as wide as its children at least, and comes before them, so that it is among them if they are."""
    wide = [(-totals[n.number], place, n.number) for place, n in enumerate(outline.nodes) if totals[n.number] >= least]
    return {number for _, _, number in heapq.nsmallest(MOST_BOXES, wide)}


def _shared(outline: Outline, drawn: set[int], shared: Callable[[NodeFacts], int]) -> dict[int, int]:
    """Returns how many tokens of the paths to the nodes that are drawn a shared store has."""
    found: dict[int, int] = {}
    above_others: set[int] = set()
    for n in reversed(outline.nodes):
        if n.number in drawn:
            here = found.get(n.number, 0) if n.number in above_others else shared(n)
            found[n.number] = here
            found[n.above] = max(found.get(n.above, 0), here)
            above_others.add(n.above)
    return found


def _where(nodes: list[NodeFacts]) -> str:
    """Returns letters for where these nodes lie, also those that take no bytes."""
    memory, disk = any(n.in_memory for n in nodes), any(n.is_below for n in nodes)
    return (MEMORY if memory else "") + (DISK if disk else "")


def size_of(n: NodeFacts, token_bytes: int) -> int:
    """Returns the bytes of a node itself in memory; on disk, if it is only there."""
    return n.kv_bytes + n.checkpoint_bytes if n.in_memory else n.stored_below * token_bytes + n.point_below_bytes


def evictions(outline: Outline) -> dict[int, int]:
    """Returns the place of each node in the order of eviction, from 1 on, if nothing is used meanwhile. Nodes that a
    lease or a pin holds, and those above them, have none."""
    facts = {n.number: n for n in outline.nodes}
    below: Counter[int] = Counter()
    """How many children have something in memory, or below them."""
    holds: set[int] = set()
    for n in reversed(outline.nodes):
        if n.in_memory or below[n.number]:
            holds.add(n.number)
            below[n.above] += 1
    ready: list[tuple[tuple[float, float, int], int]] = []

    def consider(number: int) -> None:
        """Add a node that is a leaf now, or whatever above it has become one."""
        while number:
            n = facts[number]
            if below[number] or n.readers or n.pins:
                return
            if n.in_memory:
                heapq.heappush(ready, (rank(n.pause, n.last_use, n.end, outline.now), number))
                return
            number = n.above
            below[number] -= 1

    for number in holds:
        if facts[number].in_memory:
            consider(number)
    places: dict[int, int] = {}
    while ready:
        _, number = heapq.heappop(ready)
        places[number] = len(places) + 1
        above = facts[number].above
        below[above] -= 1
        if above:
            consider(above)
    return places
