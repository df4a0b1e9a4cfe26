"""Closes a lease: the tree takes ownership of what it computed, without a copy, and the rest is freed.

- Arrays that the tree owns are evaluated, so that other threads may read them.
- A segment of a recurrent model without a checkpoint behind it could never be resumed, and is not stored.
- If the device failed in the middle of a forward, the buffers that it was writing are lost; this is logged and counted.
"""

from __future__ import annotations

import logging
import math
import weakref

from onefold.cache.memory import device
from onefold.cache.memory.checkpoints import PER_PATH, POINTS_SHARE, Checkpoint, Place, surplus
from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.reach import kv_reach
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.runs import Run
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens
from onefold.cache.request import committing
from onefold.cache.request.hold import Hold
from onefold.errors import BudgetError, DeviceError

log = logging.getLogger("onefold")

BUFFERS_LOW, BUFFERS_HIGH = 0.7, 0.8
"""Shares of the device's limit of buffers: evicting begins above the second, and ends at the first. Beyond the limit an
evaluation fails, and nothing can be evicted there any more."""


def settle(hold: Hold, tokens: Tokens, *, close: bool, turn_over: bool = False) -> None:
    """Store the KV of `tokens`, and with `close` free the rest and close the lease. `turn_over`: a person is next, and
    not a tool. Waits for the device without the lock, and releases the lock in between while it trims buffers and makes
    room. Raises DeviceError if the state cannot be computed."""
    if not hold.state.uncached_reason and not hold.closed:
        with hold.state.lock:
            hold.state.placement.bring_home(hold.track, len(tokens))
        try:
            evaluate(hold)
        finally:
            if hold.closed:  # the device failed
                _lower_water(hold.state, None)
    if not hold.closed and _takes_end(hold, keep := _kept(hold, tokens)):
        make_room_for_checkpoint(hold, gap=keep - hold.last_checkpoint)
    node, slabs = None, set[Slab]()
    with hold.state.lock:
        try:
            if not hold.state.uncached_reason and len(tokens) and not hold.state.closing:
                _store_work(hold, tokens, turn_over=turn_over)
        finally:
            if close:
                node, slabs = hold.node, _release(hold)
                hold.ended_at = None if node is None else weakref.ref(node)
    if close:
        hold.state.lock.run(_trimming(hold.state, slabs))
        _lower_water(hold.state, node)


def cancel(hold: Hold) -> None:
    """Close the lease, and store the part of the prompt that was prefilled, without generated tokens."""
    for watcher in hold.watchers:
        watcher.undo()
    settle(hold, hold.tokens[: _agreed(hold) if hold.uniform else 0], close=True)


def keep_prompt(hold: Hold) -> None:
    """Store the part of the prompt that was prefilled, and leave the lease open: its layers become rings, and then
    nothing holds the first tokens any more. Called before the first of them is written in a forward, without the
    lock. Recurrent layers may be ahead by then, so what is stored ends at a checkpoint."""
    if hold.is_outside_track:
        return
    if hold.state.model.recurrent:
        keep = min(_agreed(hold), max((c.position for c in hold.taken), default=0))
    else:
        keep = _agreed(hold) if hold.uniform else 0
    if keep:
        settle(hold, hold.tokens[:keep], close=False)


def _agreed(hold: Hold) -> int:
    """Returns how many tokens of the prompt, from the first on, the layers were fed and hold now."""
    return 0 if hold.handed.changed else min(committing.agreement(hold, hold.tokens), hold.rewound)


def discard(hold: Hold) -> None:
    """Close the lease, and store nothing."""
    evaluate(hold)
    release(hold)


def evaluate(hold: Hold) -> None:
    """Wait until the layers' state is computed, so that other threads may read it. If that fails, or if the device has
    failed since the lease was opened, closes the lease, drops the buffers that it was writing, and raises
    DeviceError."""
    try:
        device.evaluate([a for leaf in hold.leaves for a in leaf.live_arrays()])
        device.require_clean()
    except RuntimeError as error:
        device.note_failure(error)
        with hold.state.lock:
            lose(hold, error)
        raise DeviceError(f"the device could not compute the layers' state: {error}") from error
    if hold.failures_before != device.failures():
        failed = DeviceError("the device failed while this lease was open, and may have spoilt what it wrote")
        with hold.state.lock:
            lose(hold, failed)
        raise failed


def lose(hold: Hold, error: Exception) -> None:
    """Close a lease whose state cannot be computed, and drop the buffers that it was writing."""
    torn = [p.slab for p in hold.track.pieces if hold.track.writable(p)]
    hold.state.reasons[Reason.LOST] += 1
    release(hold)
    for slab in torn:
        hold.state.nodes.lose(slab, error)


def _store_work(hold: Hold, tokens: Tokens, *, turn_over: bool) -> None:
    nodes, tree, track = hold.state.nodes, hold.state.nodes.tree(hold.namespace), hold.track
    keep = _kept(hold, tokens)
    if _takes_end(hold, keep):
        _take_end(hold, keep)
    if hold.state.model.recurrent:
        # a segment without a checkpoint behind it could never be resumed: do not store it
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
    node = nodes.put(tree, kept, None if hold.is_outside_track else track)
    _hold_deeper(hold, node)
    if not hold.is_outside_track:
        track.freeze(keep)
        if hold.state.model.contiguous:
            _adopt(hold, node)
    reach = kv_reach(hold.state, node.path(), keep) if hold.is_outside_track else keep
    for checkpoint in taken_here:
        if not checkpoint.is_complete and checkpoint.position > reach:
            checkpoint.close()  # it needs KV that was freed when the conversation rotated
        elif not nodes.place(tree, kept, checkpoint):
            hold.state.reasons[Reason.CHECKPOINT_THERE] += 1
    if node.checkpoint is not None and keep > hold.cached:
        node.checkpoint.passing, node.checkpoint.revisited = False, bool(node.children)
    if hold.state.model.recurrent:
        branched = {hold.matched} if hold.matched < len(hold.tokens) else set()
        _mark_passing(node, [c for c in taken_here if c.position not in hold.asked | branched])
    nodes.touch(node, turn_over=turn_over)
    nodes.points.crowd(node)
    if hold.state.tier is not None:
        hold.state.tier.committed(node)


def _mark_passing(end: Node, taken: list[Checkpoint]) -> None:
    """Mark the checkpoints that a request took on its way: not the last, and none before which there is no other that
    the disk has or will have."""
    fallback = False
    held = [n.checkpoint for n in end.path() if n.checkpoint is not None]
    for checkpoint in held[:-1]:
        checkpoint.passing = checkpoint.passing or (fallback and checkpoint in taken)
        fallback = fallback or not checkpoint.passing


def count_unfed(hold: Hold) -> None:
    """Count, and log once, if nothing can be stored because one of two models was fed nothing."""
    fed = [watcher.position > 0 for watcher in hold.watchers]
    if all(fed) or not any(fed):
        return
    which = "draft model" if fed[0] else "target"
    if not hold.state.reasons[Reason.HALF_FED]:
        log.warning(
            "a request is not stored, because its %s was fed nothing: feed both models, or make the cache without "
            "draft_model=",
            which,
        )
    hold.state.reasons[Reason.HALF_FED] += 1


def _kept(hold: Hold, tokens: Tokens) -> int:
    """Returns how many of these tokens can be stored."""
    keep = min(len(tokens), hold.offset)
    if hold.is_outside_track:
        return keep
    return min(keep, hold.rotated_at)  # a model that rotated wrote no later KV to the track


def _takes_end(hold: Hold, keep: int) -> bool:
    """Whether the live state becomes the checkpoint at the end."""
    if keep == 0 or not (hold.state.model.needs_checkpoints or hold.is_outside_track):
        return False
    return keep > hold.last_checkpoint and all(watcher.position == keep for watcher in hold.watchers)


def _take_end(hold: Hold, position: int) -> None:
    """Take the live state as the checkpoint at the end."""
    taken = take_checkpoint(hold, position, gap=position - hold.last_checkpoint)
    if taken is not None:
        hold.taken.append(taken)


def make_room_for_checkpoint(hold: Hold, *, gap: int) -> None:
    """Make room for `take_checkpoint`. Called before it, without the lock."""
    if not _too_short(hold, gap):
        size = _checkpoint_bytes(hold)
        if hold.state.lock.run(hold.state.reclaiming.admitting_checkpoint(size)):
            hold.state.lock.run(hold.state.ledger.granting(Purpose.CHECKPOINT, size))


def _too_short(hold: Hold, gap: int) -> bool:
    """Whether a gap of so few tokens since the last checkpoint, or since the start, is not worth another one. Behind a
    checkpoint it is while bytes are free: people come back to the end of a short turn."""
    if not hold.state.model.recurrent or gap >= hold.state.min_checkpoint_tokens:
        return False
    return not hold.last_checkpoint or not _has_plenty(hold)


def _has_plenty(hold: Hold) -> bool:
    """Whether another checkpoint needs no eviction soon: with it, half of the checkpoints' share and an eighth of the
    budget are free. A full cache, too, has a little less than that free for a moment."""
    state, size = hold.state, _checkpoint_bytes(hold)
    held, budget = state.ledger.bytes_for(Purpose.CHECKPOINT), state.ledger.budget_bytes
    return 2 * (held + size) <= budget // POINTS_SHARE and state.ledger.free_bytes - size >= budget // 8


def _checkpoint_bytes(hold: Hold) -> int:
    """Returns the most bytes that a checkpoint takes now."""
    if hold.shares_windows:
        return sum(x.shared_bytes() for x in hold.leaves if not x.in_track)
    return sum(hold.point_bytes(b, 1) for b in hold.watchers)


def take_checkpoint(hold: Hold, position: int, *, gap: int) -> Checkpoint | None:
    """Returns a checkpoint of the live state. Returns None, and counts the reason, if the gap is too short or there is
    no room. Called with the lock held."""
    if _too_short(hold, gap):
        hold.state.reasons[Reason.TOO_SHORT] += 1
        return None
    account = _reserve_checkpoint(hold)
    if account is None:
        return None
    run = Run(hold.state.ledger.open(Purpose.CHECKPOINT, 0, "a run of windows"))
    try:
        checkpoint = Checkpoint.of(position, hold.snapshots(run), account)
        account.resize(checkpoint.bytes, force=True)
        run.account.resize(run.bytes, force=True)
    finally:
        if not run.holders:
            run.close()
    return checkpoint


def _reserve_checkpoint(hold: Hold) -> Account | None:
    """Reserve the room of a checkpoint. Returns None, and counts the reason, if there is none. Making room may close
    runs that it was to share; then it takes more."""
    size = 0
    while True:
        size = max(size, _checkpoint_bytes(hold))
        if not hold.state.reclaiming.admit_checkpoint(size):
            if not hold.taken:
                hold.state.reasons[Reason.CHECKPOINT_TOO_LARGE] += 1
                return None
            _drop_taken(hold, limit=len(hold.taken) - 1)  # the newest is needed most
            continue
        try:
            account = hold.state.ledger.open(Purpose.CHECKPOINT, size, "a checkpoint")
        except BudgetError:
            hold.state.reasons[Reason.NO_ROOM_FOR_CHECKPOINT] += 1
            return None
        if _checkpoint_bytes(hold) <= size:
            return account
        account.close()


def thin_taken(hold: Hold) -> None:
    """Drop the surplus of the checkpoints that this request took, if they take room from stored KV. Called with the
    lock held."""
    if not _has_plenty(hold):
        _drop_taken(hold, limit=PER_PATH)


def drop_passed(hold: Hold) -> None:
    """Drop the checkpoints that this request took in its answer: the tier below wants only the last. Called with the
    lock held."""
    for checkpoint in [c for c in hold.taken if c.position > len(hold.tokens)]:
        hold.taken.remove(checkpoint)
        checkpoint.close()


def _drop_taken(hold: Hold, *, limit: int) -> None:
    """Drop those checkpoints that this request took which are missed least, until so many are left."""
    dropped = {*surplus([Place(c.position, c.position in hold.asked) for c in hold.taken], limit, min(limit, 1))}
    for checkpoint in [c for c in hold.taken if c.position in dropped]:
        hold.taken.remove(checkpoint)
        checkpoint.close()


def _hold_deeper(hold: Hold, node: Node) -> None:
    hold.state.nodes.hold(node)
    if hold.node is not None:
        hold.state.nodes.release(hold.node)
    hold.node = node


def _adopt(hold: Hold, node: Node) -> None:
    """Replace the slabs of the path's nodes by this request's contiguous copy, where no lease reads them."""
    if not hold.track.whole:
        return
    slab = hold.track.pieces[-1].slab
    own = [n for n in node.path() if n.span is not None and n.span.slab is not slab and n.span.slab.idle]
    hold.state.placement.repoint(own, slab)


def release(hold: Hold) -> None:
    """Close a lease, and free everything that it holds. What it has stored in the tree stays."""
    with hold.state.lock:
        slabs = _release(hold)
    hold.state.lock.run(_trimming(hold.state, slabs))


def _trimming(state: CacheState, slabs: set[Slab]) -> Work[None]:
    for slab in slabs:
        yield from state.placement.trimming_slack(slab)


def _release(hold: Hold) -> set[Slab]:
    """Close a lease. Returns the slabs that it used, which may have more room now than they need."""
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
    hold.taken = []
    hold.restore_from(None)
    node, tree = hold.node, hold.state.nodes.tree(hold.namespace)
    release_path(hold)
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


def release_path(hold: Hold) -> None:
    """Release the nodes of the path that the lease holds."""
    if hold.node is not None:
        hold.state.nodes.release(hold.node)
        hold.node = None


def abandon(hold: Hold) -> bool:
    """Evict the nodes of this lease's path, so that its slabs belong to the lease alone. What is on disk stays there.
    Returns False if another lease reads a slab, or another node owns a range of one."""
    track = hold.track
    if any(p.slab.tracks != {track} for p in track.pieces):
        return False
    node, tree = hold.node, hold.state.nodes.tree(hold.namespace)
    release_path(hold)
    while node is not None and node.parent is not None and node.idle and not any(n.in_memory for n in node.walk()):
        node, evicted = node.parent, node
        if hold.state.tier is not None:
            hold.state.tier.count_lost(evicted)
        hold.state.nodes.unload(tree, evicted)
    return not any(p.slab.spans for p in track.pieces)


def _lower_water(state: CacheState, node: Node | None) -> None:
    """Evict down to the low mark if more than the high mark is used, but never nodes that were used as late as `node`,
    the end of the lease that was just closed. MLX's pool does not count, because it shrinks on demand; it grows again
    from the bytes that are free afterwards."""
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
    if state.buffer_limit is not None and state.buffers > BUFFERS_HIGH * state.buffer_limit:
        state.reclaim(lambda: _bytes_of_buffers(state, int(BUFFERS_LOW * (state.buffer_limit or 0))), before=before)
    with state.lock:
        state.pool.refill()


def _bytes_of_buffers(state: CacheState, most: int) -> int:
    """Returns how many bytes to evict so that about `most` buffers are left, if these are all of one size."""
    stored, buffers = state.reclaiming.reclaimable_bytes(), state.buffers
    return stored * (buffers - most) // buffers if buffers > most else 0
