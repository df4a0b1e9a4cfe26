"""What of the disk a request can use: which records, and the checkpoint, are to be read for its tokens.

The tree knows which records there are, so nothing is read to find out.

    memory     [ node, KV in memory )
    disk                             [ record ][ record ][ record ]..
    tokens     0 ................... before ........... target          `saves` = target - before

Called with the cache's lock held.
"""

from __future__ import annotations

from typing import NamedTuple

from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.reach import kv_reach, readable_length, resume_point
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers.disk.ondisk import links, point_of, records_of
from onefold.cache.tiers.records.entry import Record


class Plan(NamedTuple):
    """The records to read for a request."""

    path: list[Node]
    """Down to the node in which the target lies."""
    target: int
    """How far the path will be in memory."""
    records: list[Record]
    points: list[Record]
    """The checkpoint at the target, last; before it the points whose windows its own continue."""
    before: int
    """How far a request could be resumed with memory alone."""
    saves: int
    """Tokens that need not be computed then."""
    matched: int

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(r.size for r in (*self.records, *self.points))

    @property
    def point(self) -> Record | None:
        """The checkpoint at the target."""
        return self.points[-1] if self.points else None

    @property
    def first(self) -> int:
        """Where the first record begins."""
        return self.records[0].start if self.records else 0

    @property
    def stop(self) -> int:
        """Where the records end. A branch's record begins inside another, which may end later."""
        return max((r.end for r in self.records), default=0)


def plan_for(state: CacheState, tree: Tree, tokens: Tokens) -> Plan | None:
    """Returns what to read so that a request of these tokens can be resumed further on than with memory alone; None if
    nothing helps."""
    path, matched = tree.match(tokens)
    usable = min(matched, len(tokens) - 1)
    if usable <= 0 or all(n.below is None for n in path):
        return None
    in_memory, _ = readable_length(state, path, matched)
    have, _, _ = resume_point(state, path, min(usable, in_memory), usable)
    reach = kv_reach(state, path, matched)
    target, points = min(reach, matched), list[Record]()
    node = next((n for n in reversed(path) if n.end <= usable and _resumable(n, reach)), None)
    if node is not None and (state.model.needs_checkpoints or node.end > reach):
        target, point = node.end, None if node.checkpoint is not None else point_of(node)
        points = [] if point is None else links(point, max(0, target - state.model.window))
        path = path[: path.index(node) + 1]
    elif state.model.needs_checkpoints:
        return None
    if min(target, usable) <= have:
        return None
    path = [n for n in path if n.start < target]
    records = _records(path, target) if state.store.specs and target <= reach else []
    return Plan(path, target, records, points, have, min(target, usable) - have, matched)


def _resumable(node: Node, reach: int) -> bool:
    """Whether a request can be resumed at the node's end, with KV up to `reach`."""
    if node.checkpoint is not None:
        return node.end <= reach or node.checkpoint.is_complete
    if node.below is None or not node.below.has_saved_point:
        return False
    return node.end <= reach or _rotated(node)


def _rotated(node: Node) -> bool:
    """Whether the node lies behind tokens without KV: then its checkpoint needs none either."""
    return any(r.hollow for n in node.path() for r in records_of(n))


def _records(path: list[Node], target: int) -> list[Record]:
    """Returns the records of the first run of nodes that are not in memory, up to the target, each once and each
    beginning after the one before. A record that begins no later than the one before it replaces that one: it was
    written again from further up, and has its tokens too."""
    first = next((i for i, n in enumerate(path) if n.span is None), len(path))
    found: list[Record] = []
    for node in path[first:]:
        if node.span is not None:
            break
        for record in records_of(node):
            if record.start < target and not record.hollow and record not in found[-1:]:
                while found and found[-1].start >= record.start:
                    found.pop()
                found.append(record)
    return found
