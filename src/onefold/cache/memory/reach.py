"""How far a path of the tree reaches: what can be read, fetched, and resumed.

    tokens     |<-------------- matched: the tree knows them ---------------->|
    KV         |<-- readable: in memory -->|<-- kv_reach: below it, on disk -->|
    resumable  |<-- resume_point: every layer can be put back here -->|

Called with the cache's lock held. Changes nothing.
"""

from __future__ import annotations

import itertools

from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tree import Node

NEAR = 16
"""Descendants of a path's end that are looked at for a checkpoint that can be clamped."""


def readable_length(state: CacheState, path: list[Node], matched: int) -> tuple[int, Reason]:
    """How far the path's segments can be read by this thread now, and why no further."""
    if not state.store.specs:
        return matched, Reason.NONE
    at = 0
    for node in path:
        if node.span is None:
            return at, Reason.ROTATED if node.below is None else Reason.LEFT_BELOW
        if node.span.slab.writers and state.busy_writer(node) is not None:
            return at, Reason.BUSY
        at = min(node.end, matched)
    return at, Reason.NONE


def resume_point(
    state: CacheState, path: list[Node], readable: int, usable: int
) -> tuple[int, Checkpoint | None, Reason]:
    """The deepest point at which every layer can be put back."""
    if usable == 0:
        return 0, None, Reason.NOTHING_KNOWN
    for node in reversed(path):
        found = node.checkpoint
        if found is None or node.end > usable or not (found.spanless or node.end <= readable):
            continue
        if state.model.pointwise or node.end > readable:
            clamped = _clampable(state, path, readable) if node.end < readable else None
            if clamped is not None:
                return readable, clamped, Reason.NONE
            return node.end, found, Reason.NONE if node.end == usable else Reason.NO_CHECKPOINT
    if not state.model.pointwise:
        return readable, None, Reason.NONE if readable else Reason.NOTHING_KNOWN
    clamped = _clampable(state, path, readable)
    return (0, None, Reason.NO_CHECKPOINT) if clamped is None else (readable, clamped, Reason.NONE)


def _clampable(state: CacheState, path: list[Node], target: int) -> Checkpoint | None:
    """A checkpoint at or behind `target` whose windows still hold everything before it."""
    if not path or not target or state.model.recurrent:
        return None
    near = [*path, *itertools.islice(path[-1].walk(), NEAR)]
    for node in near:
        found: Checkpoint | None = node.checkpoint
        if found is None or node.end < target or (found.spanless and state.store.specs):
            continue
        if state.model.accepts(state.store, found.snapshots, target):
            return found
    return None


def kv_reach(state: CacheState, path: list[Node], matched: int) -> int:
    """How far the path's KV can be had, from memory and then from disk."""
    if not state.store.specs:
        return matched
    at = 0
    for node in path:
        if node.span is not None:
            at = node.end
        elif node.below is not None:
            at = node.below.fetchable
        if at < node.end:
            break
    return min(at, matched)
