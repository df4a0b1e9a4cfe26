"""The tree as boxes of an icicle: how wide each is, where its KV lies, and when it would be evicted.

What is narrower than a thousandth of the whole is merged with its siblings into one box, so that a tree of any size is
a few hundred boxes. Works on an outline, without the cache's lock.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from typing import Any

from onefold.cache.memory.eviction import rank
from onefold.cache.memory.outline import NodeFacts, Outline

NARROWEST = 1 / 1000
"""Of the whole width."""
MOST_BOXES = 1000
"""In a deep tree boxes lie below one another: what is wider is merged too, until so many are left."""
MEMORY, DISK = "m", "d"

Box = dict[str, Any]


def boxes(outline: Outline, token_bytes: int) -> dict[str, Box]:
    """Returns the boxes by their names. A node is named by its number; what is merged below a node by `+` and that
    node's number, or by `+` and its namespace's place for what is merged at the top."""
    sizes = {n.number: size_of(n, token_bytes) for n in outline.nodes}
    totals = dict(sizes)
    for n in reversed(outline.nodes):
        if n.above:
            totals[n.above] += totals[n.number]
    whole = sum(totals[n.number] for n in outline.nodes if not n.above)
    least = whole * NARROWEST
    while sum(total >= least for total in totals.values()) > MOST_BOXES:
        least *= 2
    turn = evictions(outline)
    made: dict[str, Box] = {}
    merged: dict[tuple[int, int], list[NodeFacts]] = defaultdict(list)
    shown = {0}
    for n in outline.nodes:
        if n.above not in shown:
            continue
        if totals[n.number] < least:
            merged[n.above, n.space].append(n)
            continue
        shown.add(n.number)
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
            "where": (MEMORY if n.in_memory else "") + (DISK if n.stored_below else ""),
            "turn": turn.get(n.number),
        }
    for (above, space), nodes in merged.items():
        made[f"+{above}" if above else f"+s{space}"] = {
            "above": str(above) if above else "",
            "space": space,
            "merged": len(nodes),
            "bytes": 0,
            "total": sum(totals[n.number] for n in nodes),
            "used": round(max(n.last_use for n in nodes), 1),
            "readers": max(n.readers for n in nodes),
            "pins": max(n.pins for n in nodes),
            "where": "".join(sorted({w for n in nodes for w in (MEMORY if n.in_memory else DISK)})),
            "turn": min((t for n in nodes if (t := turn.get(n.number)) is not None), default=None),
        }
    return made


def size_of(n: NodeFacts, token_bytes: int) -> int:
    """Returns the bytes of a node itself in memory; on disk, if it is only there."""
    return n.kv_bytes + n.checkpoint_bytes if n.in_memory else n.stored_below * token_bytes


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
