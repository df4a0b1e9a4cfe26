"""Prepares a forward before it writes anything: reserves growth, takes a checkpoint, applies the bound.

- The watcher notices a forward at its first layer, where all layers are at one position. There a checkpoint can be
  taken, and growth is reserved for all layers, or refused before anything is written.
- When a conversation reaches its bound, its sliceable layers become rings.

Functions of a hold and of one of its watchers.
"""

from __future__ import annotations

import time

from onefold.cache.memory import device
from onefold.cache.memory.checkpoints import wanted
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.model.uncached import Uncached
from onefold.cache.request import closing
from onefold.cache.request.chunking import LEAST_CHUNK
from onefold.cache.request.hold import Hold, Watcher
from onefold.errors import BudgetError, LeaseError


def begin(hold: Hold, watcher: Watcher) -> None:
    """Begin a forward: undo an unfinished one, handle a rewind, and take a checkpoint if one is due. Raises LeaseError
    if the model's layers are at different positions, or hold tokens that a refused rewind should have removed."""
    watcher.undo()
    offsets = sorted({leaf.offset for leaf in watcher.leaves})
    position = offsets[0] if offsets else 0
    watcher.rounds.check_refused(position)
    if len(offsets) > 1:
        raise LeaseError(
            f"the layers are at different positions, from {offsets[0]} to {offsets[-1]}: pass all of them to each "
            "forward, and trim all by the same number"
        )
    if position < watcher.reached:
        _note_rewind(hold, position)
    _maybe_checkpoint(hold)


def _note_rewind(hold: Hold, to: int) -> None:
    """Note a rewind to `to`: later tokens may differ from those with which the lease was opened, so drop what was
    recorded and the checkpoints taken behind `to`."""
    hold.rewound = min(hold.rewound, to)
    for watcher in hold.watchers:
        if watcher.position <= to:
            watcher.fed.cut(to)
    for checkpoint in [c for c in hold.taken if c.position > to]:
        hold.taken.remove(checkpoint)
        checkpoint.close()


def _maybe_checkpoint(hold: Hold) -> None:
    if not hold.state.model.needs_checkpoints and not hold.is_outside_track:
        return
    position = hold.offset
    if any(w.position != position for w in hold.watchers):
        return
    last = hold.last_checkpoint
    asked = hold.asked | hold.edges | ({hold.matched} if hold.matched > hold.cached else set())
    if position <= len(hold.tokens):
        is_due = wanted(position, last, len(hold.tokens), asked)
    else:
        is_due = hold.grid > 0 and position > last and position % hold.grid == 0
    if is_due:
        closing.make_room_for_checkpoint(hold, gap=position - last)
        with hold.state.lock:
            taken = closing.take_checkpoint(hold, position, gap=position - last)
            if taken is not None:
                if position > len(hold.tokens):
                    closing.drop_passed(hold)
                hold.taken.append(taken)
                closing.thin_taken(hold)


def reserve_step(hold: Hold, watcher: Watcher, n_tokens: int) -> None:
    """Reserve growth for all layers, windows and states, and the forward's scratch. Where the layers are about to
    become rings, stores the prompt first. Raises BudgetError before anything is written."""
    if _outgrows_bound(watcher, n_tokens) and not hold.closed:
        closing.keep_prompt(hold)
    hold.state.lock.run(_reserving_step(hold, watcher, n_tokens))


def _reserving_step(hold: Hold, watcher: Watcher, n_tokens: int) -> Work[None]:
    state, start = hold.state, watcher.position
    hold.refuse_closed()
    state.sweep()
    watcher.reached = start + n_tokens
    offsets = [leaf.offset for leaf in hold.leaves]
    time_prefill(hold, watcher, n_tokens)
    yield from state.scratch.reserving(watcher.scratch_bytes(n_tokens) + 2 * hold.points.bytes)
    hold.refuse_closed()
    if _outgrows_bound(watcher, n_tokens):
        _rotate(hold, watcher)
    if not hold.is_outside_track:
        yield from reserving_rest(hold)
        yield from hold.track.ensuring(start, n_tokens, keep=max(offsets, default=0))
        hold.refuse_closed()
    if hold.has_points:
        kept = sum(w.rounds.bytes(w.leaves) for w in hold.watchers)
        hold.count_points(kept + sum(hold.point_bytes(w, n_tokens) for w in hold.watchers))


def _outgrows_bound(watcher: Watcher, n_tokens: int) -> bool:
    """Whether so many more tokens turn this model's sliceable layers into rings."""
    if watcher.anatomy.bound is None or watcher.rotated:
        return False
    return any(leaf.sliceable and leaf.outgrows(n_tokens) for leaf in watcher.leaves)


def reserving_rest(hold: Hold) -> Work[None]:
    """Reserve the room that the lease was opened with and that was not reserved yet."""
    if hold.unreserved:
        end, rest, hold.unreserved = hold.track.end, hold.unreserved, 0
        yield from hold.track.ensuring(end, rest)
        hold.refuse_closed()
        hold.track.shorten(end)


def time_prefill(hold: Hold, watcher: Watcher, n_tokens: int) -> None:
    """Report to the tier, if there is one, how long the chunk before this forward took, if it was a chunk."""
    tier = hold.state.tier
    if tier is None:
        return
    n, began = hold.chunk
    if n >= LEAST_CHUNK:
        # computed already, unless the caller never waits
        device.evaluate([leaf.live_arrays() for leaf in watcher.leaves])
        tier.prefilled(n, time.perf_counter() - began)
    hold.chunk = (n_tokens, time.perf_counter())


def _rotate(hold: Hold, watcher: Watcher) -> None:
    """Turn this model's sliceable layers into rings, because the bound is reached. Raises BudgetError."""
    bound = watcher.anatomy.bound
    assert bound is not None
    start = watcher.position
    need = watcher.anatomy.ring_bytes(start, 1)
    alone = len(hold.watchers) == 1
    give_up = False
    try:
        hold.points.resize(hold.points.bytes + need)
    except BudgetError:
        if not alone or not closing.abandon(hold):
            raise
        give_up = True
    for leaf in watcher.leaves:
        if leaf.sliceable:
            leaf.rotate()
            device.evaluate(leaf.live_arrays())
            if give_up:
                for piece in hold.track.pieces:
                    piece.slab.layers[leaf.index] = None
    watcher.rotated = True
    watcher.rounds.rotated(watcher.leaves)
    hold.rotated_at = min(hold.rotated_at, start)
    hold.state.note_rotation(watcher.reached, bound.max_size)
    if hold.is_outside_track:
        hold.track.free()
        closing.release_path(hold)
    if give_up:
        hold.points.resize(hold.live_point_bytes())


def admit_uncached(hold: Hold, part: Uncached, n_tokens: int) -> None:
    """Reserve growth and scratch of a forward on caches that are not Onefold's. Raises BudgetError before it runs."""
    hold.state.lock.run(_admitting_uncached(hold, part, n_tokens))


def _admitting_uncached(hold: Hold, part: Uncached, n_tokens: int) -> Work[None]:
    yield from hold.state.scratch.reserving(part.scratch_bytes(n_tokens))
    hold.refuse_closed()
    needed = sum(p.nbytes for p in hold.uncached if p is not part) + part.bytes_after(n_tokens)
    yield from hold.state.ledger.granting(Purpose.LIVE, needed - hold.points.bytes)
    hold.refuse_closed()
    hold.points.resize(needed)
