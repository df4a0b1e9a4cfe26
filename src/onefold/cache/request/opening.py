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
import logging
from typing import TYPE_CHECKING

from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.reach import readable_length, resume_point
from onefold.cache.memory.segment import round_up
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tree import Node
from onefold.cache.model import stock
from onefold.errors import BudgetError

if TYPE_CHECKING:
    from onefold.cache.request.lease import Lease

log = logging.getLogger("onefold")

PREFILLED = 256
"""Tokens of a chunk that room to grow leaves scratch for."""


def begin(state: CacheState, lease: Lease) -> None:
    """Stand where the tokens can be resumed. Nothing is allocated."""
    tree = state.nodes.tree(lease.namespace)
    path, lease.matched = tree.match(lease.tokens)
    for node in path:
        if node.span is not None and state.busy_writer(node) is None:
            node.span.slab.finish_copy()
    usable = min(lease.matched, len(lease.tokens) - 1)
    readable, why = readable_length(state, path, lease.matched)
    point, checkpoint, reason = resume_point(state, path, min(usable, readable), usable)
    lease.reason = why if readable < usable and not state.model.pointwise else reason
    lease.cached = point
    floor = 0 if point == 0 else (point if checkpoint is not None and checkpoint.spanless else readable)
    if floor:
        node = next(n for n in path if n.end >= floor)
        if node.end > floor:
            node = tree.split(node, floor)
        lease.node = node
        state.nodes.hold(node)
        state.nodes.touch(node)
        if checkpoint is None or not checkpoint.spanless:
            _read_in_place(state, lease, node)
    if not _stand_at(state, lease, point, checkpoint):
        _begin_again(state, lease, checkpoint)
    for beat in lease._beats:
        beat.fed.begin_with(lease.tokens[: lease.cached])


def giving_room(state: CacheState, lease: Lease, reserve_tokens: int) -> Work[None]:
    """Room for the rest of the tokens, and for `reserve_tokens` more. Raises BudgetError."""
    if lease._spanless:
        return
    rest = len(lease.tokens) + reserve_tokens - lease.track.end
    for bound in state.model.bounds:
        rest = min(rest, max(1, bound - lease.track.end))  # from there on it rotates, and grows no more
    if not state.ledger.elastic:
        yield from state.ledger.granting(Purpose.LIVE, _needed(state, lease, rest))
        lease.refuse_closed()
        _require_room(state, lease, rest)
    writable = yield from _making_writable(state, lease, rest)
    if state.ledger.elastic:
        lease.unreserved = max(0, rest)  # a request that waits holds nothing yet
    elif writable and rest > 0:
        end = lease.track.end
        yield from lease.track.ensuring(end, rest, spare=_scratch(state, lease, min(rest, PREFILLED)))
        lease.refuse_closed()
        lease.track.shorten(end)


def _read_in_place(state: CacheState, lease: Lease, node: Node) -> None:
    spans = [n.span for n in node.path()]
    lease.track.borrow(spans)
    for slab in {p.slab for p in lease.track.pieces}:
        if slab.writers:  # sealed: its writer goes on elsewhere, and what it has scheduled can be read
            stock.schedule([a for layer in slab.layers if layer for a in layer])


def _stand_at(state: CacheState, lease: Lease, point: int, checkpoint: Checkpoint | None) -> bool:
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


def _begin_again(state: CacheState, lease: Lease, checkpoint: Checkpoint | None) -> None:
    """A checkpoint could not be put back: say so, give it up, and let the request prefill from the start."""
    log.warning("a checkpoint at %d could not be put back; prefilling from the start", lease.cached)
    for node in lease.node.path() if lease.node is not None else []:
        if node.checkpoint is checkpoint:
            state.nodes.drop_checkpoint(node)
    lease._restored, lease.cached, lease.reason = None, 0, "checkpoint refused"
    for beat in lease._beats:
        beat.rotated = not beat.anatomy.sliceable
        for leaf in beat.leaves:
            if leaf.kind in stock.SLICEABLE:
                leaf.ring, leaf.offset = None, 0
            else:
                leaf.free()


def _require_room(state: CacheState, lease: Lease, rest: int) -> None:
    """Refuse a rest that cannot be given room before anything is moved to make some."""
    try:
        _require(state, lease, rest)
    except BudgetError:
        if not lease.track.pieces or lease.node is None:
            raise
        # what lies in one buffer with what this lease reads can be freed only while nobody reads there
        lease.track.free()
        with contextlib.suppress(BudgetError):
            state.ledger.open(Purpose.LIVE, _needed(state, lease, rest)).close()
        _read_in_place(state, lease, lease.node)
        _require(state, lease, rest)


def _require(state: CacheState, lease: Lease, rest: int) -> None:
    state.ledger.open(Purpose.LIVE, _needed(state, lease, rest), f"{rest} more tokens").close()


def _needed(state: CacheState, lease: Lease, rest: int) -> int:
    """Bytes of the rest beyond what its buffer has room for already, and of a forward of one token; where all must lie
    in one buffer, also of the copy of one array that growing takes."""
    last = lease.track.pieces[-1] if lease.track.pieces else None
    held = used = 0
    if last is not None and last.slab.tracks == {lease.track} and last.slab.used <= last.hi:
        held, used = last.slab.capacity, last.hi  # nothing lies behind: it goes on in place
    capacity = max(held, used + rest)
    copied = state.store.array_token_bytes if state.model.contiguous else 0
    headroom = max(0, capacity * copied - state.ledger.headroom())
    return (capacity - held) * state.store.token_bytes + _scratch(state, lease, 1, rest) + headroom


def _scratch(state: CacheState, lease: Lease, n_tokens: int, rest: int = 0) -> int:
    """Bytes that a forward of so many tokens needs beyond what this thread has reserved, with `rest` tokens before."""
    total = lease.track.end + max(rest, n_tokens)
    needed = (b.anatomy.scratch_bytes(n_tokens, total, joins=b.joins(n_tokens)) for b in lease._beats)
    return max(0, max(needed, default=0) - state.scratch.bytes)


def _making_writable(state: CacheState, lease: Lease, rest: int) -> Work[bool]:
    """Continue in place if nobody else reads these buffers; else the first write opens a fresh one. False if room
    for the rest is better made then: a copy that need not be reserved now."""
    track = lease.track
    if not track.pieces:
        return True
    free = True
    if state.tier is not None:
        free = yield from state.tier.making_way(_path(lease), {p.slab for p in track.pieces})
        lease.refuse_closed()
    if free or state.model.contiguous:  # there going on elsewhere would be a copy of it all
        united = yield from state.nodes.uniting(track, _path(lease), round_up(max(rest, 1)))
        lease.refuse_closed()
        if not united and not track.take() and state.nodes.clear_behind(track):
            track.take()
    # else the disk writer could not read it while this lease writes: it is left as it is
    moved = track.writable(track.pieces[-1])
    state.totals["moves" if moved else "borrows"] += 1
    if state.model.contiguous and not (moved and track.whole):
        if state.ledger.elastic:
            return False
        yield from track.copying_whole(track.end + rest)
        lease.refuse_closed()
    return True


def _path(lease: Lease) -> list[Node]:
    """The nodes that it holds, as they are now."""
    return lease.node.path() if lease.node is not None else []
