"""Settling a lease: what it made becomes the tree's, by a move, and everything else is let go.

- What goes into the tree has been evaluated: other threads may read it.
- A segment of a recurrent model without a checkpoint behind it could never be resumed, and is not kept.
- If the device failed in the middle of a forward, the buffers that were being written are lost, and said to be.
"""

from __future__ import annotations

import logging
import math

import mlx.core as mx

from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.reach import kv_reach
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.tree import Node
from onefold.cache.request import committing
from onefold.cache.request.hold import Hold
from onefold.errors import BudgetError, DeviceError

log = logging.getLogger("onefold")


def settle(hold: Hold, tokens: Tokens, *, close: bool) -> None:
    """Store `tokens` of what a lease holds, and with `close` let go of the rest. The device is waited for without the
    lock. It is not held throughout while buffers are cut to size, and while room is made for what comes next."""
    if not hold.state.uncached_reason and not hold.closed:
        try:
            evaluate(hold)
        finally:
            if hold.closed:  # it was lost
                _lower_water(hold.state, None)
    if not hold.closed and _takes_end(hold, keep := _kept(hold, tokens)):
        make_room_for_checkpoint(hold, gap=keep - hold.last_checkpoint)
    node, slabs = None, set[Slab]()
    with hold.state.lock:
        try:
            if not hold.state.uncached_reason and len(tokens) and not hold.state.closing:
                _store_work(hold, tokens)
        finally:
            if close:
                node, slabs = hold.node, _release(hold)
    if close:
        hold.state.lock.run(_trimming(hold.state, slabs))
        _lower_water(hold.state, node)


def cancel(hold: Hold) -> None:
    """Close without generated tokens: the part of the prompt that was prefilled is kept."""
    for watcher in hold.watchers:
        watcher.undo()
    sound = hold.uniform and not hold.handed.changed
    keep = min(committing.agreement(hold, hold.tokens), hold.rewound) if sound else 0
    settle(hold, hold.tokens[:keep], close=True)


def discard(hold: Hold) -> None:
    """Close, and keep nothing of what was done."""
    evaluate(hold)
    release(hold)


def evaluate(hold: Hold) -> None:
    """Wait until what the layers hold is computed: what goes into the tree may be read by other threads. Raises
    DeviceError if it cannot be; the buffers that the lease was writing are lost then, and it is closed."""
    try:
        mx.eval([a for leaf in hold.leaves for a in leaf.live_arrays()])
    except RuntimeError as error:
        with hold.state.lock:
            lose(hold, error)
        raise DeviceError(f"what the layers hold could not be evaluated: {error}") from error


def lose(hold: Hold, error: Exception) -> None:
    """Close a lease whose state cannot be computed, and give up the buffers that it was writing."""
    torn = [p.slab for p in hold.track.pieces if hold.track.writable(p)]
    hold.state.reasons[Reason.LOST] += 1
    release(hold)
    for slab in torn:
        hold.state.nodes.lose(slab, error)


def _store_work(hold: Hold, tokens: Tokens) -> None:
    shelf, tree, track = hold.state.nodes, hold.state.nodes.tree(hold.namespace), hold.track
    keep = _kept(hold, tokens)
    if _takes_end(hold, keep):
        _take_end(hold, keep)
    if hold.state.model.recurrent:
        # without a checkpoint behind it a segment could never be resumed: do not keep it
        last = max((c.position for c in hold.taken), default=0)
        if last < keep:
            hold.state.totals["discarded_tokens"] += max(0, keep - max(last, track.floor))
            keep = max(last, min(track.floor, keep))
    hold.taken, taken = [], hold.taken
    taken_here = [c for c in taken if c.position <= keep]
    for checkpoint in taken:
        if checkpoint.position > keep:
            checkpoint.close()
    if keep == 0:
        return
    kept = tokens[:keep]
    node = shelf.put(tree, kept, None if hold.spanless else track)
    _hold_deeper(hold, node)
    if not hold.spanless:
        track.freeze(keep)
        if hold.state.model.contiguous:
            _adopt(hold, node)
    reach = kv_reach(hold.state, node.path(), keep) if hold.spanless else keep
    for checkpoint in taken_here:
        if not checkpoint.spanless and checkpoint.position > reach:
            checkpoint.close()  # it goes with KV that was forgotten when the conversation rotated
        elif not shelf.place(tree, kept, checkpoint):
            hold.state.reasons[Reason.CHECKPOINT_THERE] += 1
    shelf.touch(node)
    shelf.thin(node)
    if hold.state.tier is not None:
        hold.state.tier.committed(node)


def say_unfed(hold: Hold) -> None:
    """Count, and log once, that nothing is stored because one of two models stands at the beginning, if that is so."""
    fed = [watcher.position > 0 for watcher in hold.watchers]
    if all(fed) or not any(fed):
        return
    which = "draft model" if fed[0] else "target"
    if not hold.state.reasons[Reason.HALF_FED]:
        log.warning(
            "a request that ran on one model alone is not stored: its %s was fed nothing. Feed both, or use a cache "
            "that is made without draft_model=",
            which,
        )
    hold.state.reasons[Reason.HALF_FED] += 1


def _kept(hold: Hold, tokens: Tokens) -> int:
    """How many of these tokens can be stored."""
    keep = min(len(tokens), hold.offset)
    return keep if hold.spanless else min(keep, hold.rotated_at)  # from there on a model that rotated wrote nothing


def _takes_end(hold: Hold, keep: int) -> bool:
    """Whether the live state becomes the checkpoint at the end."""
    if keep == 0 or not (hold.state.model.pointwise or hold.spanless):
        return False
    return keep > hold.last_checkpoint and all(watcher.position == keep for watcher in hold.watchers)


def _take_end(hold: Hold, position: int) -> None:
    """Makes the live state the checkpoint at the end. It is moved, not copied, where it lies right."""
    taken = take_checkpoint(hold, position, gap=position - hold.last_checkpoint)
    if taken is not None:
        hold.taken.append(taken)


def make_room_for_checkpoint(hold: Hold, *, gap: int) -> None:
    """Before `take_checkpoint`, and without the lock."""
    if not _too_short(hold.state, gap):
        size = _checkpoint_bytes(hold)
        if hold.state.lock.run(hold.state.reclaiming.admitting_checkpoint(size)):
            hold.state.lock.run(hold.state.ledger.granting(Purpose.CHECKPOINT, size))


def _too_short(state: CacheState, gap: int) -> bool:
    """Whether so few tokens since the last checkpoint are not worth another."""
    return state.model.recurrent and gap < state.min_checkpoint_tokens


def _checkpoint_bytes(hold: Hold) -> int:
    return sum(hold.point_bytes(b, 1) for b in hold.watchers)


def take_checkpoint(hold: Hold, position: int, *, gap: int) -> Checkpoint | None:
    if _too_short(hold.state, gap):
        hold.state.reasons[Reason.TOO_SHORT] += 1
        return None
    size = _checkpoint_bytes(hold)
    if not hold.state.reclaiming.admit_checkpoint(size):
        hold.state.reasons[Reason.CHECKPOINT_TOO_LARGE] += 1
        return None
    try:
        account = hold.state.ledger.open(Purpose.CHECKPOINT, size, "a checkpoint")
    except BudgetError:
        hold.state.reasons[Reason.NO_ROOM_FOR_CHECKPOINT] += 1
        return None
    checkpoint = Checkpoint.of(position, hold.snapshots(), account)
    account.resize(checkpoint.bytes, force=True)
    return checkpoint


def _hold_deeper(hold: Hold, node: Node) -> None:
    hold.state.nodes.hold(node)
    if hold.node is not None:
        hold.state.nodes.release(hold.node)
    hold.node = node


def _adopt(hold: Hold, node: Node) -> None:
    """A contiguous copy was made for this request: where nobody reads the original, the copy takes its place."""
    if not hold.track.whole:
        return
    slab = hold.track.pieces[-1].slab
    own = [n for n in node.path() if n.span is not None and n.span.slab is not slab and n.span.slab.idle]
    hold.state.placement.repoint(own, slab)


def release(hold: Hold) -> None:
    """Let go of all that a lease holds. What it has put into the tree stays."""
    with hold.state.lock:
        slabs = _release(hold)
    hold.state.lock.run(_trimming(hold.state, slabs))


def _trimming(state: CacheState, slabs: set[Slab]) -> Work[None]:
    for slab in slabs:
        yield from state.placement.trimming_slack(slab)


def _release(hold: Hold) -> set[Slab]:
    """Returns the buffers that it used, which may have more room now than they need."""
    if hold.closed:
        return set()
    slabs = {p.slab for p in hold.track.pieces}
    if hold.node is not None:
        hold.state.placement.evacuate(hold.path, hold.track)
    hold.empty_layers()
    for watcher in hold.watchers:
        watcher.part()
    hold.uncached = []
    hold.track.free()
    for checkpoint in hold.taken:
        checkpoint.close()
    hold.taken, hold.checkpoint = [], None
    node, tree = hold.node, hold.state.nodes.tree(hold.namespace)
    let_go(hold)
    if not hold.points.closed:
        hold.points.close()
    hold.closed = True
    if not hold.watchers:  # it ran on the model's own caches
        hold.handed.forget()
    hold.state.leave(hold)
    if node is not None and node.parent is not None:
        hold.state.nodes.tidy(tree, node)
    hold.state.thread_left(hold.thread)
    return slabs


def let_go(hold: Hold) -> None:
    if hold.node is not None:
        hold.state.nodes.release(hold.node)
        hold.node = None


def abandon(hold: Hold) -> bool:
    """Give the tree's share of this lease's path up to the hold, if nobody else needs it. What is on disk of it stays
    there."""
    track = hold.track
    if any(p.slab.tracks != {track} for p in track.pieces):
        return False
    node, tree = hold.node, hold.state.nodes.tree(hold.namespace)
    let_go(hold)
    while node is not None and node.parent is not None and node.idle and not any(n.in_memory for n in node.walk()):
        node, gone = node.parent, node
        if hold.state.tier is not None:
            hold.state.tier.count_lost(gone)
        hold.state.nodes.unload(tree, gone)
    return not any(p.slab.spans for p in track.pieces)


def _lower_water(state: CacheState, node: Node | None) -> None:
    """Reclaim down to the low mark if more than the high mark is used; never from what was used as late as `node`,
    which was settled just now. MLX's pool, which gives way by itself, does not count, and gets what is free then."""
    low, high = state.water
    ledger = state.ledger

    def excess() -> int:
        held = ledger.used_bytes - ledger.spare()
        return min(int(held - low * ledger.budget_bytes), state.reclaiming.reclaimable_bytes())

    with state.lock:
        full = ledger.used_bytes - ledger.spare() > high * ledger.budget_bytes
        before = None if node is None else math.nextafter(node.last_use, 0)
    if full:
        state.reclaim(excess, patience=0, before=before)
    with state.lock:
        state.pool.refill()
