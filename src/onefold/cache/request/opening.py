"""Opening a lease: how far its tokens can be resumed, and whose buffers it goes on in.

- Match, then pin the path, then make room: evicting before the match would lose the very hit.
- Where every layer can be put back is the deepest point at which all of them can: any position for sliceable layers, a
  checkpoint for the others.
- Continue in place if nobody else reads the buffers; else read them where they lie, and write elsewhere.

Called with the cache's lock held. `giving_room` is `Work`: while room is made and buffers are copied, others may have
the lock. The lease holds its path then, and reads what it will go on in.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import TYPE_CHECKING

from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.segment import Track, round_up
from onefold.cache.memory.tree import Node
from onefold.cache.model import stock
from onefold.errors import BudgetError

if TYPE_CHECKING:
    from onefold.cache.prefix_cache import PrefixCache
    from onefold.cache.request.lease import Lease

log = logging.getLogger("onefold")

PREFILLED = 256
"""Tokens of a chunk that room to grow leaves scratch for."""
NEAR = 16
"""Descendants of a path's end that are looked at for a checkpoint that can be clamped."""


def begin(cache: PrefixCache, lease: Lease) -> None:
    """Stand where the tokens can be resumed. Nothing is allocated."""
    tree = cache._shelf.tree(lease.namespace)
    path, lease.matched = tree.match(lease.tokens)
    for node in path:
        if node.span is not None and busy_writer(cache, node) is None:
            node.span.slab.finish_copy()
    usable = min(lease.matched, len(lease.tokens) - 1)
    readable, why = readable_length(cache, path, lease.matched)
    point, checkpoint, reason = resume_point(cache, path, min(usable, readable), usable)
    lease.reason = why if readable < usable and not cache._pointwise else reason
    lease.cached = point
    floor = 0 if point == 0 else (point if checkpoint is not None and checkpoint.spanless else readable)
    if floor:
        node = next(n for n in path if n.end >= floor)
        if node.end > floor:
            node = tree.split(node, floor)
        lease._node = node
        cache._shelf.hold(node)
        cache._shelf.touch(node)
        if checkpoint is None or not checkpoint.spanless:
            _read_in_place(cache, lease, node)
    if not _stand_at(cache, lease, point, checkpoint):
        _begin_again(cache, lease, checkpoint)
    for beat in lease._beats:
        beat.fed.begin_with(lease.tokens[: lease.cached])


def giving_room(cache: PrefixCache, lease: Lease, reserve_tokens: int) -> Work[None]:
    """Room for the rest of the tokens, and for `reserve_tokens` more. Raises BudgetError."""
    if lease._spanless:
        return
    rest = len(lease.tokens) + reserve_tokens - lease._track.end
    for bound in (a.bound for a in cache._anatomies if a.bound is not None):
        rest = min(rest, max(1, bound.max_size - lease._track.end))  # from there on it rotates, and grows no more
    if not cache._ledger.elastic:
        yield from cache._ledger.granting(Purpose.LIVE, _needed(cache, lease, rest))
        lease.refuse_closed()
        _require_room(cache, lease, rest)
    writable = yield from _making_writable(cache, lease, rest)
    if cache._ledger.elastic:
        lease._unreserved = max(0, rest)  # a request that waits holds nothing yet
    elif writable and rest > 0:
        end = lease._track.end
        yield from lease._track.ensuring(end, rest, spare=_scratch(cache, lease, min(rest, PREFILLED)))
        lease.refuse_closed()
        lease._track.shorten(end)


def readable_length(cache: PrefixCache, path: list[Node], matched: int) -> tuple[int, str]:
    """How far the path's segments can be read by this thread now, and why no further."""
    if not cache._store.specs:
        return matched, ""
    at = 0
    for node in path:
        if node.span is None:
            return at, "rotated" if node.disk is None else "left on disk"
        if node.span.slab.writers and busy_writer(cache, node) is not None:
            return at, "held by another thread"
        at = min(node.end, matched)
    return at, ""


def busy_writer(cache: PrefixCache, node: Node) -> Lease | None:
    """The lease that another thread is using at this moment to write where this node lies."""
    writers = node.span.slab.writers if node.span is not None else ()
    return next((x for x in cache._leases if x._track in writers and x.busy_elsewhere), None) if writers else None


def resume_point(
    cache: PrefixCache, path: list[Node], readable: int, usable: int
) -> tuple[int, Checkpoint | None, str]:
    """The deepest point at which every layer can be put back."""
    if usable == 0:
        return 0, None, "nothing known"
    for node in reversed(path):
        found = node.checkpoint
        if found is None or node.end > usable or not (found.spanless or node.end <= readable):
            continue
        if cache._pointwise or node.end > readable:
            clamped = _clampable(cache, path, readable) if node.end < readable else None
            if clamped is not None:
                return readable, clamped, ""
            return node.end, found, "" if node.end == usable else "no checkpoint"
    if not cache._pointwise:
        return readable, None, "" if readable else "nothing known"
    clamped = _clampable(cache, path, readable)
    return (0, None, "no checkpoint") if clamped is None else (readable, clamped, "")


def _clampable(cache: PrefixCache, path: list[Node], target: int) -> Checkpoint | None:
    """A checkpoint at or behind `target` whose windows still hold everything before it."""
    if not path or not target or cache._recurrent:
        return None
    near = [*path, *itertools.islice(path[-1].walk(), NEAR)]
    layers = [leaf for a in cache._anatomies for leaf in a.make(Track(cache._store))[1]]
    for node in near:
        found: Checkpoint | None = node.checkpoint
        if found is None or node.end < target or (found.spanless and cache._store.specs):
            continue
        if all(s is None or x.can_restore(s, target) for x, s in zip(layers, found.snapshots, strict=True)):
            return found
    return None


def _read_in_place(cache: PrefixCache, lease: Lease, node: Node) -> None:
    spans = [n.span for n in node.path()]
    lease._track.borrow(spans)
    for slab in {p.slab for p in lease._track.pieces}:
        if slab.writers:  # sealed: its writer goes on elsewhere, and what it has scheduled can be read
            stock.schedule([a for layer in slab.layers if layer for a in layer])


def _stand_at(cache: PrefixCache, lease: Lease, point: int, checkpoint: Checkpoint | None) -> bool:
    """Put every layer at `point`; False if one of them will not have its snapshot."""
    lease._restored = checkpoint
    leaves = [(beat, leaf) for beat in lease._beats for leaf in beat.leaves]
    snapshots = [None] * len(leaves) if checkpoint is None else checkpoint.snapshots
    for (beat, leaf), snapshot in zip(leaves, snapshots, strict=True):
        if snapshot is None:
            leaf.offset = point
        elif leaf.kind in stock.SLICEABLE:
            if snapshot.end != point:
                return False
            leaf.rotate()
            leaf.ring.adopt(snapshot)
            leaf.offset = point
            beat.rotated = True
        elif not leaf.restore(snapshot, point):
            return False
    return True


def _begin_again(cache: PrefixCache, lease: Lease, checkpoint: Checkpoint | None) -> None:
    """A checkpoint could not be put back: say so, give it up, and let the request prefill from the start."""
    log.warning("a checkpoint at %d could not be put back; prefilling from the start", lease.cached)
    for node in lease._node.path() if lease._node is not None else []:
        if node.checkpoint is checkpoint:
            cache._shelf.drop_checkpoint(node)
    lease._restored, lease.cached, lease.reason = None, 0, "checkpoint refused"
    for beat in lease._beats:
        beat.rotated = not beat.anatomy.sliceable
        for leaf in beat.leaves:
            if leaf.kind in stock.SLICEABLE:
                leaf.ring, leaf.offset = None, 0
            else:
                leaf.free()


def _require_room(cache: PrefixCache, lease: Lease, rest: int) -> None:
    """Refuse a rest that cannot be given room before anything is moved to make some."""
    try:
        _require(cache, lease, rest)
    except BudgetError:
        if not lease._track.pieces or lease._node is None:
            raise
        # what lies in one buffer with what this lease reads can be freed only while nobody reads there
        lease._track.free()
        with contextlib.suppress(BudgetError):
            cache._ledger.open(Purpose.LIVE, _needed(cache, lease, rest)).close()
        _read_in_place(cache, lease, lease._node)
        _require(cache, lease, rest)


def _require(cache: PrefixCache, lease: Lease, rest: int) -> None:
    cache._ledger.open(Purpose.LIVE, _needed(cache, lease, rest), f"{rest} more tokens").close()


def _needed(cache: PrefixCache, lease: Lease, rest: int) -> int:
    """Bytes of the rest beyond what its buffer has room for already, and of a forward of one token; where all must lie
    in one buffer, also of the copy of one array that growing takes."""
    last = lease._track.pieces[-1] if lease._track.pieces else None
    held = used = 0
    if last is not None and last.slab.tracks == {lease._track} and last.slab.used <= last.hi:
        held, used = last.slab.capacity, last.hi  # nothing lies behind: it goes on in place
    capacity = max(held, used + rest)
    copied = cache._store.array_token_bytes if cache._contiguous else 0
    headroom = max(0, capacity * copied - cache._ledger.headroom())
    return (capacity - held) * cache._store.token_bytes + _scratch(cache, lease, 1, rest) + headroom


def _scratch(cache: PrefixCache, lease: Lease, n_tokens: int, rest: int = 0) -> int:
    """Bytes that a forward of so many tokens needs beyond what this thread has reserved, with `rest` tokens before."""
    total = lease._track.end + max(rest, n_tokens)
    needed = (b.anatomy.scratch_bytes(n_tokens, total, joins=b.joins(n_tokens)) for b in lease._beats)
    return max(0, max(needed, default=0) - cache._scratch.bytes)


def _making_writable(cache: PrefixCache, lease: Lease, rest: int) -> Work[bool]:
    """Continue in place if nobody else reads these buffers; else the first write opens a fresh one. False if room
    for the rest is better made then: a copy that need not be reserved now."""
    track = lease._track
    if not track.pieces:
        return True
    free = True
    if cache._disk is not None:
        free = yield from cache._disk.spiller.making_way(_path(lease), {p.slab for p in track.pieces})
        lease.refuse_closed()
    if free or cache._contiguous:  # there going on elsewhere would be a copy of it all
        united = yield from cache._shelf.uniting(track, _path(lease), round_up(max(rest, 1)))
        lease.refuse_closed()
        if not united and not track.take() and cache._shelf.clear_behind(track):
            track.take()
    # else the disk writer could not read it while this lease writes: it is left as it is
    moved = track.writable(track.pieces[-1])
    cache._totals["moves" if moved else "borrows"] += 1
    if cache._contiguous and not (moved and track.whole):
        if cache._ledger.elastic:
            return False
        yield from track.copying_whole(track.end + rest)
        lease.refuse_closed()
    return True


def _path(lease: Lease) -> list[Node]:
    """The nodes that it holds, as they are now."""
    return lease._node.path() if lease._node is not None else []
