"""Opens a lease: finds where its tokens can be resumed, and which buffers it continues in.

- It matches, then holds the path, then makes room: making room first could evict the matched nodes.
- A lease is resumed at the deepest position at which all layers can be restored: any position for sliceable layers, a
  checkpoint for the others.
- It continues in place if no other lease reads the buffers; else it reads them in place, and writes to a new one.

Called with the cache's lock held. `giving_room` is `Work`: other threads may take the lock while room is made and
buffers are copied. Meanwhile the lease holds its path, and its track reads the buffers that it will continue in.
"""

from __future__ import annotations

import contextlib
import logging

from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.reach import readable_length, resume_point
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.segment import Span, round_up
from onefold.cache.model import seam
from onefold.cache.request.hold import Hold
from onefold.errors import BudgetError

log = logging.getLogger("onefold")

PREFILLED = 256
"""Tokens. Room to grow leaves enough bytes free for the scratch of a chunk of this size."""


def begin(hold: Hold) -> None:
    """Match the tokens, hold their path, and restore the layers to the resume point. Allocates nothing."""
    tree = hold.state.nodes.tree(hold.namespace)
    path, hold.matched = tree.match(hold.tokens)
    for node in path:
        if node.span is not None and hold.state.busy_writer(node) is None:
            node.span.slab.finish_copy()
    usable = min(hold.matched, len(hold.tokens) - 1)
    readable, why = readable_length(hold.state, path, hold.matched)
    point, checkpoint, reason = resume_point(hold.state, path, min(usable, readable), usable)
    hold.reason = why if readable < usable and not hold.state.model.needs_checkpoints else reason
    hold.cached = point
    floor = 0 if point == 0 else (point if checkpoint is not None and checkpoint.is_complete else readable)
    if floor:
        node = next(n for n in path if n.end >= floor)
        if node.end > floor:
            node = tree.split(node, floor)
        hold.node = node
        hold.state.nodes.hold(node)
        hold.state.nodes.resume(node)
        if checkpoint is None or not checkpoint.is_complete:
            _read_in_place(hold, node)
    if not _stand_at(hold, point, checkpoint):
        _begin_again(hold, checkpoint)
    for watcher in hold.watchers:
        watcher.fed.begin_with(hold.tokens[: hold.cached])


def giving_room(hold: Hold, reserve_tokens: int) -> Work[None]:
    """Make room for the rest of the tokens, and for `reserve_tokens` more. Raises BudgetError, and LeaseClosed if the
    lease is closed meanwhile."""
    if hold.is_outside_track:
        return
    rest = len(hold.tokens) + reserve_tokens - hold.track.end
    for bound in hold.state.model.bounds:
        rest = min(rest, max(1, bound - hold.track.end))  # at the bound it rotates, and does not grow any more
    if not hold.state.ledger.elastic:
        yield from hold.state.ledger.granting(Purpose.LIVE, _needed(hold, rest))
        hold.refuse_closed()
        _require_room(hold, rest)
    writable = yield from _making_writable(hold, rest)
    if hold.state.ledger.elastic:
        hold.unreserved = max(0, rest)  # a request that waits holds no memory
    elif writable and rest > 0:
        end = hold.track.end
        yield from hold.track.ensuring(end, rest, spare=_scratch(hold, min(rest, PREFILLED)))
        hold.refuse_closed()
        hold.track.shorten(end)


def _read_in_place(hold: Hold, node: Node) -> None:
    hold.track.borrow(_kv_of(n) for n in node.path())
    for slab in {p.slab for p in hold.track.pieces}:
        if slab.writers:  # this seals it: its writer continues in another slab, and scheduled arrays can be read
            seam.schedule([a for layer in slab.layers if layer for a in layer])


def _kv_of(node: Node) -> Span:
    assert node.span is not None, "every node of a readable path has its KV in memory"
    return node.span


def _stand_at(hold: Hold, point: int, checkpoint: Checkpoint | None) -> bool:
    """Restore every layer to `point`. Returns False if a layer rejects its snapshot."""
    hold.restore_from(checkpoint)
    leaves = [(watcher, leaf) for watcher in hold.watchers for leaf in watcher.leaves]
    snapshots = [None] * len(leaves) if checkpoint is None else checkpoint.snapshots
    for (watcher, leaf), snapshot in zip(leaves, snapshots, strict=True):
        if snapshot is None:
            leaf.offset = point
        elif not leaf.put_back(snapshot, point):
            return False
        elif leaf.sliceable:
            watcher.rotated = True
    return True


def _begin_again(hold: Hold, checkpoint: Checkpoint | None) -> None:
    """Drop a checkpoint that a layer rejected, and empty the layers: the request prefills from the start."""
    log.warning("cannot restore the checkpoint at position %d: prefilling from the start", hold.cached)
    for node in hold.path:
        if node.checkpoint is checkpoint:
            hold.state.nodes.drop_checkpoint(node)
    hold.restore_from(None)
    hold.cached, hold.reason = 0, Reason.CHECKPOINT_REFUSED
    for watcher in hold.watchers:
        watcher.rotated = not watcher.anatomy.sliceable
    hold.empty_layers()


def _require_room(hold: Hold, rest: int) -> None:
    """Raises BudgetError, before anything is moved, if there is no room for the rest."""
    try:
        _require(hold, rest)
    except BudgetError:
        if not hold.track.pieces or hold.node is None:
            raise
        # other nodes in the slabs that this lease reads can be freed only while it does not read them
        hold.track.free()
        with contextlib.suppress(BudgetError):
            hold.state.ledger.open(Purpose.LIVE, _needed(hold, rest)).close()
        _read_in_place(hold, hold.node)
        _require(hold, rest)


def _require(hold: Hold, rest: int) -> None:
    hold.state.ledger.open(Purpose.LIVE, _needed(hold, rest), f"{rest} more tokens").close()


def _needed(hold: Hold, rest: int) -> int:
    """Returns the bytes that the rest needs beyond the room in its slab, with the scratch of a forward of one token.
    Includes the copy of one array, for growing, if the conversation must lie in one buffer."""
    last = hold.track.pieces[-1] if hold.track.pieces else None
    held = used = 0
    if last is not None and last.slab.tracks == {hold.track} and last.slab.used <= last.hi:
        held, used = last.slab.capacity, last.hi  # no node lies behind, so the track continues in place
    capacity = max(held, used + rest)
    copied = hold.state.store.array_token_bytes if hold.state.model.contiguous else 0
    headroom = max(0, capacity * copied - hold.state.ledger.headroom())
    return (capacity - held) * hold.state.store.token_bytes + _scratch(hold, 1, rest) + headroom


def _scratch(hold: Hold, n_tokens: int, rest: int = 0) -> int:
    """Returns the bytes that a forward of `n_tokens` needs beyond this thread's reservation, after `rest` tokens."""
    total = hold.track.end + max(rest, n_tokens)
    needed = (b.anatomy.scratch_bytes(n_tokens, total, joins=b.joins(n_tokens)) for b in hold.watchers)
    return max(0, max(needed, default=0) - hold.state.scratch.bytes)


def _making_writable(hold: Hold, rest: int) -> Work[bool]:
    """Take over the track's last slab, if no other lease reads it; else the first write opens a new slab. Returns False
    if room for the rest should be made at the first forward, with a copy that need not be reserved now."""
    track = hold.track
    if not track.pieces:
        return True
    free = True
    if hold.state.tier is not None:
        free = yield from hold.state.tier.making_way(hold.path, {p.slab for p in track.pieces})
        hold.refuse_closed()
    if free or hold.state.model.contiguous:  # a contiguous conversation would have to be copied whole
        united = yield from hold.state.placement.uniting(track, hold.path, round_up(max(rest, 1)))
        hold.refuse_closed()
        if not united and not track.take() and hold.state.placement.clear_behind(track):
            track.take()
    # else leave the slab to the disk writer, which cannot read it while this lease writes
    moved = track.writable(track.pieces[-1])
    hold.state.totals["moves" if moved else "borrows"] += 1
    if hold.state.model.contiguous and not (moved and track.whole):
        if hold.state.ledger.elastic:
            return False
        yield from track.copying_whole(track.end + rest)
        hold.refuse_closed()
    return True
