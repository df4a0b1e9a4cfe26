"""How many tokens of a path can be read, fetched and resumed.

    tokens     |<-------------- matched: the tree knows them ---------------->|
    KV         |<-- readable: in memory -->|<-- kv_reach: in the tier below -->|
    resumable  |<-- resume_point: every layer can be restored here -->|

Called with the cache's lock held. Changes nothing.
"""

from __future__ import annotations

import itertools

from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.state import CacheState

NEAR = 16
"""How many descendants of a path's end are searched for a checkpoint that can be clamped."""


def readable_length(state: CacheState, path: list[Node], matched: int) -> tuple[int, Reason]:
    """Returns how many of the path's tokens this thread can read now, and the reason why not more."""
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
    """Returns the deepest point at which every layer can be restored, the checkpoint for it, and the reason why it is
    no deeper."""
    if usable == 0:
        return 0, None, Reason.NOTHING_KNOWN
    for node in reversed(path):
        found = node.checkpoint
        if found is None or node.end > usable or not (found.is_complete or node.end <= readable):
            continue
        if state.model.needs_checkpoints or node.end > readable:
            clamped = _clampable(state, path, readable) if node.end < readable else None
            if clamped is not None:
                return readable, clamped, Reason.NONE
            return node.end, found, Reason.NONE if node.end == usable else Reason.NO_CHECKPOINT
    if not state.model.needs_checkpoints:
        return readable, None, Reason.NONE if readable else Reason.NOTHING_KNOWN
    clamped = _clampable(state, path, readable)
    return (0, None, Reason.NO_CHECKPOINT) if clamped is None else (readable, clamped, Reason.NONE)


def _clampable(state: CacheState, path: list[Node], target: int) -> Checkpoint | None:
    """Returns a checkpoint at or behind `target` whose windows still hold everything before `target`; None if there is
    none."""
    if not path or not target or state.model.recurrent:
        return None
    near = [*path, *itertools.islice(path[-1].walk(), NEAR)]
    for node in near:
        found: Checkpoint | None = node.checkpoint
        if found is None or node.end < target or (found.is_complete and state.store.specs):
            continue
        if state.model.accepts(state.store, found.snapshots, target):
            return found
    return None


def kv_reach(state: CacheState, path: list[Node], matched: int) -> int:
    """Returns how many of the path's tokens have KV in memory or, from there on, in the tier."""
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
