"""Settling a lease: what it made becomes the tree's, by a move, and everything else is let go.

- What goes into the tree has been evaluated: other threads may read it.
- A segment of a recurrent model without a checkpoint behind it could never be resumed, and is not kept.
- If the device failed in the middle of a forward, the buffers that were being written are lost, and said to be.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import mlx.core as mx

from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.reach import kv_reach
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tree import Node, Tokens
from onefold.cache.model import stock
from onefold.errors import BudgetError, DeviceError

if TYPE_CHECKING:
    from onefold.cache.request.lease import Lease


log = logging.getLogger("onefold")


def settle(state: CacheState, lease: Lease, tokens: Tokens, *, close: bool) -> None:
    """Store `tokens` of what a lease holds, and with `close` let go of the rest. The device is waited for without the
    lock. It is not held throughout while buffers are cut to size, and while room is made for what comes next."""
    if not state.uncached_reason and not lease.closed:
        try:
            evaluate(state, lease)
        finally:
            if lease.closed:  # it was lost
                _lower_water(state, None)
    if not lease.closed and _takes_end(state, lease, keep := _kept(lease, tokens)):
        make_room_for_checkpoint(state, lease, gap=keep - lease._last_checkpoint)
    node, slabs = None, set[Slab]()
    with state.lock:
        try:
            if not state.uncached_reason and len(tokens) and not state.closing:
                _store_work(state, lease, tokens)
        finally:
            if close:
                node, slabs = lease.node, _release(state, lease)
    if close:
        state.lock.run(_trimming(state, slabs))
        _lower_water(state, node)


def evaluate(state: CacheState, lease: Lease) -> None:
    """Wait until what the layers hold is computed: what goes into the tree may be read by other threads. Raises
    DeviceError if it cannot be; the buffers that the lease was writing are lost then, and it is closed."""
    try:
        mx.eval([a for b in lease._beats for leaf in b.leaves for a in leaf.live_arrays()])
    except RuntimeError as error:
        with state.lock:
            lose(state, lease, error)
        raise DeviceError(f"what the layers hold could not be evaluated: {error}") from error


def lose(state: CacheState, lease: Lease, error: Exception) -> None:
    """Close a lease whose state cannot be computed, and give up the buffers that it was writing."""
    torn = [p.slab for p in lease.track.pieces if lease.track.writable(p)]
    state.reasons["lost on the device"] += 1
    release(state, lease)
    for slab in torn:
        state.nodes.lose(slab, error)


def _store_work(state: CacheState, lease: Lease, tokens: Tokens) -> None:
    shelf, tree, track = state.nodes, state.nodes.tree(lease.namespace), lease.track
    keep = _kept(lease, tokens)
    if _takes_end(state, lease, keep):
        _take_end(state, lease, keep)
    if state.model.recurrent:
        # without a checkpoint behind it a segment could never be resumed: do not keep it
        last = max((c.position for c in lease._taken), default=0)
        if last < keep:
            state.totals["discarded_tokens"] += max(0, keep - max(last, track.floor))
            keep = max(last, min(track.floor, keep))
    lease._taken, taken = [], lease._taken
    taken_here = [c for c in taken if c.position <= keep]
    for checkpoint in taken:
        if checkpoint.position > keep:
            checkpoint.close()
    if keep == 0:
        return
    kept = tokens[:keep]
    node = shelf.put(tree, kept, None if lease._spanless else track)
    _hold_deeper(state, lease, node)
    if not lease._spanless:
        track.freeze(keep)
        if state.model.contiguous:
            _adopt(state, lease, node)
    reach = kv_reach(state, node.path(), keep) if lease._spanless else keep
    for checkpoint in taken_here:
        if not checkpoint.spanless and checkpoint.position > reach:
            checkpoint.close()  # it goes with KV that was forgotten when the conversation rotated
        elif not shelf.place(tree, kept, checkpoint):
            state.reasons["checkpoint already there"] += 1
    shelf.touch(node)
    shelf.thin(node)
    if state.tier is not None:
        state.tier.committed(node)


def say_unfed(state: CacheState, lease: Lease) -> None:
    """Count, and log once, that nothing is stored because one of two models stands at the beginning, if that is so."""
    fed = [beat.position > 0 for beat in lease._beats]
    if all(fed) or not any(fed):
        return
    which = "draft model" if fed[0] else "target"
    if not state.reasons["draft or target was fed nothing"]:
        log.warning(
            "a request that ran on one model alone is not stored: its %s was fed nothing. Feed both, or use a cache "
            "that is made without draft_model=",
            which,
        )
    state.reasons["draft or target was fed nothing"] += 1


def _kept(lease: Lease, tokens: Tokens) -> int:
    """How many of these tokens can be stored."""
    keep = min(len(tokens), lease.offset)
    return keep if lease._spanless else min(keep, lease._rotated_at)  # from there on a model that rotated wrote nothing


def _takes_end(state: CacheState, lease: Lease, keep: int) -> bool:
    """Whether the live state becomes the checkpoint at the end."""
    if keep == 0 or not (state.model.pointwise or lease._spanless):
        return False
    return keep > lease._last_checkpoint and all(beat.position == keep for beat in lease._beats)


def _take_end(state: CacheState, lease: Lease, position: int) -> None:
    """Makes the live state the checkpoint at the end. It is moved, not copied, where it lies right."""
    taken = take_checkpoint(state, lease, position, gap=position - lease._last_checkpoint)
    if taken is not None:
        lease._taken.append(taken)


def make_room_for_checkpoint(state: CacheState, lease: Lease, *, gap: int) -> None:
    """Before `take_checkpoint`, and without the lock."""
    if not _too_short(state, gap):
        size = _checkpoint_bytes(lease)
        if state.lock.run(state.nodes.admitting_checkpoint(size)):
            state.lock.run(state.ledger.granting(Purpose.CHECKPOINT, size))


def _too_short(state: CacheState, gap: int) -> bool:
    """Whether so few tokens since the last checkpoint are not worth another."""
    return state.model.recurrent and gap < state.min_checkpoint_tokens


def _checkpoint_bytes(lease: Lease) -> int:
    return sum(lease._point_bytes(b, 1) for b in lease._beats)


def take_checkpoint(state: CacheState, lease: Lease, position: int, *, gap: int) -> Checkpoint | None:
    if _too_short(state, gap):
        state.reasons["too short to keep"] += 1
        return None
    size = _checkpoint_bytes(lease)
    if not state.nodes.admit_checkpoint(size):
        state.reasons["checkpoint too large"] += 1
        return None
    try:
        account = state.ledger.open(Purpose.CHECKPOINT, size, "a checkpoint")
    except BudgetError:
        state.reasons["no room for a checkpoint"] += 1
        return None
    snapshots = lease.snapshots()
    spanless = all(s is not None for s in snapshots)
    checkpoint = Checkpoint(position, snapshots, account, spanless=spanless)
    account.resize(checkpoint.bytes, force=True)
    return checkpoint


def _hold_deeper(state: CacheState, lease: Lease, node: Node) -> None:
    state.nodes.hold(node)
    if lease.node is not None:
        state.nodes.release(lease.node)
    lease.node = node


def _adopt(state: CacheState, lease: Lease, node: Node) -> None:
    """A contiguous copy was made for this request: where nobody reads the original, the copy takes its place."""
    if not lease.track.whole:
        return
    slab = lease.track.pieces[-1].slab
    own = [n for n in node.path() if n.span is not None and n.span.slab is not slab and n.span.slab.idle]
    state.nodes.repoint(own, slab)


def release(state: CacheState, lease: Lease) -> None:
    """Let go of all that a lease holds. What it has put into the tree stays."""
    with state.lock:
        slabs = _release(state, lease)
    state.lock.run(_trimming(state, slabs))


def _trimming(state: CacheState, slabs: set[Slab]) -> Work[None]:
    for slab in slabs:
        yield from state.nodes.trimming_slack(slab)


def _release(state: CacheState, lease: Lease) -> set[Slab]:
    """Returns the buffers that it used, which may have more room now than they need."""
    if lease.closed:
        return set()
    slabs = {p.slab for p in lease.track.pieces}
    if lease.node is not None:
        state.nodes.evacuate(lease.node.path(), lease.track)
    for beat in lease._beats:
        for leaf in beat.leaves:
            if leaf.kind not in stock.SLICEABLE:
                leaf.free()
            else:
                leaf.ring = None
            leaf.offset = 0
        beat.part()
    if lease._uncached:
        lease.layers, lease._handed_out, lease._uncached = [], [], []
    lease.track.free()
    for checkpoint in lease._taken:
        checkpoint.close()
    lease._taken, lease._restored = [], None
    node, tree = lease.node, state.nodes.tree(lease.namespace)
    let_go(state, lease)
    if not lease._points.closed:
        lease._points.close()
    lease.closed = True
    state.leases.discard(lease)
    if node is not None and node.parent is not None:
        state.nodes.tidy(tree, node)
    state.thread_left(lease.thread)
    return slabs


def let_go(state: CacheState, lease: Lease) -> None:
    if lease.node is not None:
        state.nodes.release(lease.node)
        lease.node = None


def abandon(state: CacheState, lease: Lease) -> bool:
    """Give the tree's share of this lease's path up to the lease, if nobody else needs it. What is on disk of it stays
    there."""
    track = lease.track
    if any(p.slab.tracks != {track} for p in track.pieces):
        return False
    node, tree = lease.node, state.nodes.tree(lease.namespace)
    let_go(state, lease)
    while node is not None and node.parent is not None and node.idle and not any(n.in_memory for n in node.walk()):
        node, gone = node.parent, node
        if state.tier is not None:
            state.tier.count_lost(gone)
        state.nodes.unload(tree, gone)
    return not any(p.slab.spans for p in track.pieces)


def _lower_water(state: CacheState, node: Node | None) -> None:
    """Reclaim down to the low mark if more than the high mark is used; never from what was used as late as `node`,
    which was settled just now. MLX's pool, which gives way by itself, does not count, and gets what is free then."""
    low, high = state.water
    ledger = state.ledger

    def excess() -> int:
        held = ledger.used_bytes - ledger.spare()
        return min(int(held - low * ledger.budget_bytes), state.nodes.reclaimable_bytes())

    with state.lock:
        full = ledger.used_bytes - ledger.spare() > high * ledger.budget_bytes
        before = None if node is None else math.nextafter(node.last_use, 0)
    if full:
        state.reclaim(excess, patience=0, before=before)
    with state.lock:
        state.pool.refill()
