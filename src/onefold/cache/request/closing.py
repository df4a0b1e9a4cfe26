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
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.tree import Node, Tokens
from onefold.cache.model import stock
from onefold.cache.tiers.disk.restoring import kv_reach
from onefold.errors import BudgetError, DeviceError

if TYPE_CHECKING:
    from onefold.cache.prefix_cache import PrefixCache
    from onefold.cache.request.lease import Lease


log = logging.getLogger("onefold")


def settle(cache: PrefixCache, lease: Lease, tokens: Tokens, *, close: bool) -> None:
    """Store `tokens` of what a lease holds, and with `close` let go of the rest. The device is waited for without the
    lock. It is not held throughout while buffers are cut to size, and while room is made for what comes next."""
    if not cache.uncached_reason and not lease.closed:
        try:
            evaluate(cache, lease)
        finally:
            if lease.closed:  # it was lost
                _lower_water(cache, None)
    if not lease.closed and _takes_end(cache, lease, keep := _kept(lease, tokens)):
        make_room_for_checkpoint(cache, lease, gap=keep - lease._last_checkpoint)
    node, slabs = None, set[Slab]()
    with cache._lock:
        try:
            if not cache.uncached_reason and len(tokens) and not cache.closed:
                _store_work(cache, lease, tokens)
        finally:
            if close:
                node, slabs = lease._node, _release(cache, lease)
    if close:
        cache._lock.run(_trimming(cache, slabs))
        _lower_water(cache, node)


def evaluate(cache: PrefixCache, lease: Lease) -> None:
    """Wait until what the layers hold is computed: what goes into the tree may be read by other threads. Raises
    DeviceError if it cannot be; the buffers that the lease was writing are lost then, and it is closed."""
    try:
        mx.eval([a for b in lease._beats for leaf in b.leaves for a in leaf.live_arrays()])
    except RuntimeError as error:
        with cache._lock:
            lose(cache, lease, error)
        raise DeviceError(f"what the layers hold could not be evaluated: {error}") from error


def lose(cache: PrefixCache, lease: Lease, error: Exception) -> None:
    """Close a lease whose state cannot be computed, and give up the buffers that it was writing."""
    torn = [p.slab for p in lease._track.pieces if lease._track.writable(p)]
    cache._reasons["lost on the device"] += 1
    release(cache, lease)
    for slab in torn:
        cache._shelf.lose(slab, error)


def _store_work(cache: PrefixCache, lease: Lease, tokens: Tokens) -> None:
    shelf, tree, track = cache._shelf, cache._shelf.tree(lease.namespace), lease._track
    keep = _kept(lease, tokens)
    if _takes_end(cache, lease, keep):
        _take_end(cache, lease, keep)
    if cache._recurrent:
        # without a checkpoint behind it a segment could never be resumed: do not keep it
        last = max((c.position for c in lease._taken), default=0)
        if last < keep:
            cache._totals["discarded_tokens"] += max(0, keep - max(last, track.floor))
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
    _hold_deeper(cache, lease, node)
    if not lease._spanless:
        track.freeze(keep)
        if cache._contiguous:
            _adopt(cache, lease, node)
    reach = kv_reach(cache, node.path(), keep) if lease._spanless else keep
    for checkpoint in taken_here:
        if not checkpoint.spanless and checkpoint.position > reach:
            checkpoint.close()  # it goes with KV that was forgotten when the conversation rotated
        elif not shelf.place(tree, kept, checkpoint):
            cache._reasons["checkpoint already there"] += 1
    shelf.touch(node)
    shelf.thin(node)
    if cache._disk is not None:
        cache._disk.spiller.committed(node)


def say_unfed(cache: PrefixCache, lease: Lease) -> None:
    """Count, and log once, that nothing is stored because one of two models stands at the beginning, if that is so."""
    fed = [beat.position > 0 for beat in lease._beats]
    if all(fed) or not any(fed):
        return
    which = "draft model" if fed[0] else "target"
    if not cache._reasons["draft or target was fed nothing"]:
        log.warning(
            "a request that ran on one model alone is not stored: its %s was fed nothing. Feed both, or use a cache "
            "that is made without draft_model=",
            which,
        )
    cache._reasons["draft or target was fed nothing"] += 1


def _kept(lease: Lease, tokens: Tokens) -> int:
    """How many of these tokens can be stored."""
    keep = min(len(tokens), lease.offset)
    return keep if lease._spanless else min(keep, lease._rotated_at)  # from there on a model that rotated wrote nothing


def _takes_end(cache: PrefixCache, lease: Lease, keep: int) -> bool:
    """Whether the live state becomes the checkpoint at the end."""
    if keep == 0 or not (cache._pointwise or lease._spanless):
        return False
    return keep > lease._last_checkpoint and all(beat.position == keep for beat in lease._beats)


def _take_end(cache: PrefixCache, lease: Lease, position: int) -> None:
    """Makes the live state the checkpoint at the end. It is moved, not copied, where it lies right."""
    taken = take_checkpoint(cache, lease, position, gap=position - lease._last_checkpoint)
    if taken is not None:
        lease._taken.append(taken)


def make_room_for_checkpoint(cache: PrefixCache, lease: Lease, *, gap: int) -> None:
    """Before `take_checkpoint`, and without the lock."""
    if not _too_short(cache, gap):
        size = _checkpoint_bytes(lease)
        if cache._lock.run(cache._shelf.admitting_checkpoint(size)):
            cache._lock.run(cache._ledger.granting(Purpose.CHECKPOINT, size))


def _too_short(cache: PrefixCache, gap: int) -> bool:
    """Whether so few tokens since the last checkpoint are not worth another."""
    return cache._recurrent and gap < cache.min_checkpoint_tokens


def _checkpoint_bytes(lease: Lease) -> int:
    return sum(lease._point_bytes(b, 1) for b in lease._beats)


def take_checkpoint(cache: PrefixCache, lease: Lease, position: int, *, gap: int) -> Checkpoint | None:
    if _too_short(cache, gap):
        cache._reasons["too short to keep"] += 1
        return None
    size = _checkpoint_bytes(lease)
    if not cache._shelf.admit_checkpoint(size):
        cache._reasons["checkpoint too large"] += 1
        return None
    try:
        account = cache._ledger.open(Purpose.CHECKPOINT, size, "a checkpoint")
    except BudgetError:
        cache._reasons["no room for a checkpoint"] += 1
        return None
    snapshots = lease.snapshots()
    spanless = all(s is not None for s in snapshots)
    checkpoint = Checkpoint(position, snapshots, account, spanless=spanless)
    account.resize(checkpoint.bytes, force=True)
    return checkpoint


def _hold_deeper(cache: PrefixCache, lease: Lease, node: Node) -> None:
    cache._shelf.hold(node)
    if lease._node is not None:
        cache._shelf.release(lease._node)
    lease._node = node


def _adopt(cache: PrefixCache, lease: Lease, node: Node) -> None:
    """A contiguous copy was made for this request: where nobody reads the original, the copy takes its place."""
    if not lease._track.whole:
        return
    slab = lease._track.pieces[-1].slab
    own = [n for n in node.path() if n.span is not None and n.span.slab is not slab and n.span.slab.idle]
    cache._shelf.repoint(own, slab)


def release(cache: PrefixCache, lease: Lease) -> None:
    """Let go of all that a lease holds. What it has put into the tree stays."""
    with cache._lock:
        slabs = _release(cache, lease)
    cache._lock.run(_trimming(cache, slabs))


def _trimming(cache: PrefixCache, slabs: set[Slab]) -> Work[None]:
    for slab in slabs:
        yield from cache._shelf.trimming_slack(slab)


def _release(cache: PrefixCache, lease: Lease) -> set[Slab]:
    """Returns the buffers that it used, which may have more room now than they need."""
    if lease.closed:
        return set()
    slabs = {p.slab for p in lease._track.pieces}
    if lease._node is not None:
        cache._shelf.evacuate(lease._node.path(), lease._track)
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
    lease._track.free()
    for checkpoint in lease._taken:
        checkpoint.close()
    lease._taken, lease._restored = [], None
    node, tree = lease._node, cache._shelf.tree(lease.namespace)
    let_go(cache, lease)
    if not lease._points.closed:
        lease._points.close()
    lease.closed = True
    cache._leases.discard(lease)
    if node is not None and node.parent is not None:
        cache._shelf.tidy(tree, node)
    cache.thread_left(lease._thread)
    return slabs


def let_go(cache: PrefixCache, lease: Lease) -> None:
    if lease._node is not None:
        cache._shelf.release(lease._node)
        lease._node = None


def abandon(cache: PrefixCache, lease: Lease) -> bool:
    """Give the tree's share of this lease's path up to the lease, if nobody else needs it. What is on disk of it stays
    there."""
    track = lease._track
    if any(p.slab.tracks != {track} for p in track.pieces):
        return False
    node, tree = lease._node, cache._shelf.tree(lease.namespace)
    let_go(cache, lease)
    while node is not None and node.parent is not None and node.idle and not any(n.in_memory for n in node.walk()):
        node, gone = node.parent, node
        if cache._disk is not None:
            cache._disk.spiller.count_lost(gone)
        cache._shelf.unload(tree, gone)
    return not any(p.slab.spans for p in track.pieces)


def _lower_water(cache: PrefixCache, node: Node | None) -> None:
    """Reclaim down to the low mark if more than the high mark is used; never from what was used as late as `node`,
    which was settled just now. MLX's pool, which gives way by itself, does not count, and gets what is free then."""
    low, high = cache._water
    ledger = cache._ledger

    def excess() -> int:
        held = ledger.used_bytes - ledger.spare()
        return min(int(held - low * ledger.budget_bytes), cache._shelf.reclaimable_bytes())

    with cache._lock:
        full = ledger.used_bytes - ledger.spare() > high * ledger.budget_bytes
        before = None if node is None else math.nextafter(node.last_use, 0)
    if full:
        cache.reclaim(excess, patience=0, before=before)
    with cache._lock:
        cache._pool.refill()
