"""What is asked of a shared store for a prompt, and what it answers.

    tokens     0 ....... have ..... before ..................................... len(tokens)
    memory     [ KV in memory             )      `have`: where a request could be resumed with memory alone
    asked                          [ record ][ record ][ record ]  points at their ends, behind `have`

Functions of the state are called with the cache's lock held; `look` without it, on another thread.
"""

from __future__ import annotations

from typing import NamedTuple

from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.reach import resume_point
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers.remote.grid import name_of, point_address, tag_of
from onefold.cache.tiers.remote.points import Manifest, read_manifest
from onefold.cache.tiers.remote.sharing import POINT, Sharing
from onefold.cache.tiers.remote.stores.store import Point
from onefold.errors import RecordError

WORTH_ASKING = 16
"""Fewer tokens than this are computed without asking."""


class Wanted(NamedTuple):
    """What is asked of the store for a request."""

    tokens: Tokens
    tag: str
    before: int
    """Tokens whose KV memory has."""
    have: int
    """Where a request could be resumed with memory alone."""
    records: list[bytes]
    """Addresses, from the one in which `before` lies."""
    points: list[tuple[int, bytes]]
    """Positions and addresses of checkpoints behind `have`."""
    room: int
    """Tokens of the request, with those that are to come."""


class Found(NamedTuple):
    """What the store has of that."""

    n_records: int
    position: int = 0
    """Of the last checkpoint; 0 without one."""
    address: bytes = b""
    manifest: Manifest | None = None


class Unusable(RecordError):
    """A value that was found while the store was asked what it has, and that cannot be used."""

    def __init__(self, address: bytes, reason: str) -> None:
        super().__init__(reason)
        self.address, self.reason = address, reason


def look(shared: Sharing, wanted: Wanted) -> Found:
    """Asks the store. Raises StoreError, and Unusable if the checkpoint's manifest is of no use."""
    n, tag = shared.n_tokens, wanted.tag
    base = wanted.before // n
    names = [name_of(tag, a) for a in wanted.records]
    needs = (max(0, end // n - base) if names and end > wanted.before else 0 for end, _ in wanted.points)
    points = [Point(k, name_of(tag, a)) for k, (_, a) in zip(needs, wanted.points, strict=True)]
    look = shared.store.look(names, points)
    if look.point < 0:
        return Found(look.leading)
    position, address = wanted.points[look.point]
    try:
        manifest = read_manifest(shared.fetched(POINT, tag, address), position, shared.points)
    except RecordError as error:
        raise Unusable(address, str(error)) from error
    return Found(look.leading, position, address, manifest)


def wanted_of(
    state: CacheState, shared: Sharing, tree: Tree, root: bytes, tokens: Tokens, reserve_tokens: int
) -> tuple[Wanted | None, Node | None]:
    """Returns what to ask for, None if nothing is worth it, and the last node that memory has of the tokens."""
    path, matched = tree.match(tokens)
    before = _in_memory(path, matched) if state.store.specs else 0
    usable, n = len(tokens) - 1, shared.n_tokens
    have = before
    if shared.has_points:
        readable = min(before, usable) if state.store.specs else min(matched, usable)
        have, _, _ = resume_point(state, path, readable, min(matched, usable))
    if min(len(tokens) // n * n, usable) - have < WORTH_ASKING:
        return None, None
    chain = list(shared.addresses(root, tokens))
    points = [
        (end, point_address(address))
        for end, address in zip(range(n, len(tokens), n), chain, strict=False)
        if have + WORTH_ASKING <= end <= usable
    ]
    records = chain[before // n :] if state.store.specs else []
    if shared.has_points:
        asked = [address for _, address in points[:1]]
    else:
        points, asked = [], records[:1]
    if not asked or asked[0] in shared.missed:
        return None, None
    end = next((node for node in reversed(path) if node.start < max(before, have)), None)
    return Wanted(tokens, tag_of(root), before, have, records, points, len(tokens) + reserve_tokens), end


def _in_memory(path: list[Node], matched: int) -> int:
    """Returns how many of the path's tokens have KV in memory, whether or not another thread is writing there now."""
    end = 0
    for node in path:
        if node.span is None:
            break
        end = node.end
    return min(end, matched)
