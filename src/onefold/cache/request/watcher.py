"""Observes one model's forwards in a lease: the target's, or the draft's.

- It notices a forward at its first layer, where all layers are at one position. A forward that fails is undone.
- It records the tokens of each forward (`fed`): a commit stores nothing else.
- A rewind cuts the layers, or restores them to where a round began and feeds the accepted tokens again (`rounds`). If a
  rewind is refused, the next forward raises, since callers do not check the result of `trim`.
- A watcher's layers refer to it, and it refers to its lease weakly, so that reference counting frees a dropped lease.
  While the caller refers only to the layers, they keep the lease alive (`keep`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from onefold.cache.memory import device
from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.state import Holder
from onefold.cache.memory.tokens import Tokens
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.request import feeding, forward
from onefold.cache.request.fed import Fed
from onefold.cache.request.held_leaves import HeldLeaves
from onefold.cache.request.hold import Hold
from onefold.cache.request.rounds import Marks, Rounds
from onefold.cache.request.usage import Usage
from onefold.errors import BudgetError, LeaseClosed, LeaseError


class Owner(Holder, Protocol):
    """The lease of a watcher's layers."""

    hold: Hold
    usage: Usage


class ForwardWatcher:
    def __init__(self, lease: Owner, anatomy: Anatomy, model: nn.Module | None) -> None:
        self._lease: Callable[[], Owner | None] = weakref.ref(lease)
        self._model = None if model is None else weakref.ref(model)
        self.anatomy = anatomy
        self.fed = Fed()
        self.rounds = Rounds()
        self.held = HeldLeaves([])
        self.epoch = 0
        self.rotated = not anatomy.sliceable
        """No state of this model lies in the track: it has no sliceable layer, or they have become rings."""
        self.reached = 0
        """The position where the last forward ended. If a forward begins before it, there was a rewind."""
        self._sized = True
        self._entered = 0
        self._depth = 0
        """Nested watched calls in progress: a model's `__call__` may call that of its base class."""
        self._inputs: tuple[mx.array | Tokens, int] | None = None
        self._start = 0
        self.unfinished: Marks | None = None
        """Every leaf's state where a forward began that has not ended yet; None if there is none."""

    @property
    def lease(self) -> Owner:
        lease = self._lease()
        if lease is None:
            raise LeaseClosed("this lease was dropped, and its layers are empty: open another one")
        return lease

    @property
    def hold(self) -> Hold:
        return self.lease.hold

    @property
    def is_closed(self) -> bool:
        """Whether its lease is closed or deleted."""
        lease = self._lease()
        return lease is None or lease.hold.closed

    @property
    def leaves(self) -> list[Any]:
        """The cache objects that hold this model's state."""
        return self.held.all()

    def keep(self, lease: Owner) -> None:
        """Keep the dropped lease alive for as long as the caller refers to its layers."""
        self.held.weaken()
        self._lease = lambda: lease

    def dropped(self, layer: Any) -> None:
        if self.held.finalized(layer):
            give_up(self.lease)

    def part(self) -> None:
        """Drop all references, because the lease is closed: nothing then waits for the cyclic collector."""
        self.unfinished = self._inputs = None
        self.rounds.forget()
        self.fed = Fed()
        self.held.forget()
        if self.held.are_weak:
            self._lease = lambda: None

    @property
    def is_watched(self) -> bool:
        """Whether the model is known, so that its forwards are watched. For layers that came without a model, the
        caller names the tokens."""
        return self._model is not None

    # -- forwards ------------------------------------------------------------------------------

    def enter(self, layer: Any, n_tokens: int | None) -> None:
        if layer.epoch == self.epoch:  # the first layer of a new forward
            if self.anatomy.hides_offsets and not self._depth:
                raise LeaseError(
                    "this model's layers do not count their tokens: call the model itself, not a part of it"
                )
            self.lease.usage.require_usable()
            forward.begin(self.hold, self)
            self.epoch += 1
            self._entered, self._sized = 0, False
            another, self.hold.running = self.hold.running is not self, self
            if (self.anatomy.needs_checkpoints or self.anatomy.bound is not None) and self.verifies:
                self.rounds.mark(self.position, self.leaves, again=another)  # a round begins after the other model's
            self.unfinished = [leaf.mark() for leaf in self.leaves]
            if not self._depth:
                self.hold.unscheduled = threading.current_thread()
        layer.epoch = self.epoch
        self._entered += 1
        if n_tokens is not None and not self._sized:
            self._sized = True
            rotated = self.rotated
            try:
                forward.reserve_step(self.hold, self, n_tokens)
            except BudgetError as error:
                self.undo()
                raise error.advised("end other leases, release pins, or raise the budget") from None
            if self.unfinished is not None and self.rotated != rotated:  # mark those again that are rings now
                kept = zip(self.leaves, self.unfinished, strict=True)
                self.unfinished = [x.mark() if x.sliceable else m for x, m in kept]
        if not self._depth and self._entered == len(self.leaves):
            self.unfinished = None  # all layers were written: the forward is taken as complete

    @property
    def position(self) -> int:
        """The position of the layers."""
        return min((leaf.offset for leaf in self.leaves), default=0)

    @property
    def verifies(self) -> bool:
        return self.rolls_back and self.position >= len(self.hold.tokens) - 1

    def scratch_bytes(self, n_tokens: int) -> int:
        bound = self.anatomy.bound
        seen = self.position if bound is None else min(self.position, bound.max_size)
        return self.anatomy.scratch_bytes(n_tokens, seen + n_tokens, joins=self.joins(n_tokens))

    def joins(self, n_tokens: int) -> bool:
        """Whether a forward of `n_tokens` may concatenate a layer's pieces."""
        if self.anatomy.contiguous or not all(leaf.is_plain for leaf in self.leaves):
            return True
        return n_tokens > 1 and not self.hold.track.whole

    def begun(self, model: Any, inputs: mx.array | None, row: int, *, n_layers: int, embedded: bool) -> None:
        usage = self.lease.usage
        usage.take_turn()
        if self._depth:
            self._depth += 1
            return
        accepted = False
        try:
            feeding.require_model(self.anatomy, self._model, model, n_layers)
            self._start = self.position
            self._inputs = None
            self._inputs = feeding.recorded(usage.hold, self._start, self.reached, inputs, row, embedded)
            accepted = True
        finally:
            if accepted:
                self._depth = 1
            else:
                usage.end_turn()

    def ended(self, n_tokens: int, stepped: bool) -> list[mx.array]:
        if self._depth > 1:
            return []
        self.unfinished = None  # complete; and no second reference to a state is kept
        if self.anatomy.hides_offsets:
            for leaf in self.leaves:
                leaf.passed(n_tokens)
        self.reached = self.position
        inputs, row = (None, 0) if self._inputs is None else self._inputs
        self.fed.append(self._start, inputs, row, self.reached - self._start)
        earlier, self.hold.unscheduled = self.hold.unscheduled, None
        return self._written(attended=not stepped or earlier is not None)

    def failed(self) -> list[mx.array]:
        if self._depth > 1:
            return []
        self.undo()
        return self._written()

    def lost(self, error: RuntimeError) -> None:
        device.note_failure(error)
        self.lease.usage.lose(error)

    def left(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._inputs = None
        self.lease.usage.end_turn()

    def _written(self, *, attended: bool = True) -> list[mx.array]:
        """Returns the arrays that forwards write. Without `attended`, leaves out those on which a forward's output
        depends, because attention reads them after the write."""
        found: list[mx.array] = []
        if self.anatomy.needs_checkpoints or self.rotated:
            found = [a for leaf in self.leaves if not leaf.in_track for a in leaf.live_arrays()]
        return found + self.hold.track.written() if attended and not self.rotated else found

    def reserve_copy(self, n_bytes: int) -> Account:
        self.lease.usage.require_usable()
        return self.hold.state.ledger.open(Purpose.LIVE, n_bytes, "a copy of a layer")

    def undo(self) -> None:
        """Reset the layers to where an unfinished forward began, if there is one."""
        if self.unfinished is not None:
            for leaf, mark in zip(self.leaves, self.unfinished, strict=True):
                leaf.reset(mark)
            self.unfinished = None
            self.reached = self.position
        for leaf in self.leaves:
            leaf.epoch = self.epoch

    # -- rewinding -----------------------------------------------------------------------------

    @property
    def rolls_back(self) -> bool:
        """Whether the cache has a draft model, so that the state at the beginning of each round is kept."""
        return self._model is not None and len(self.hold.watchers) > 1

    def trim(self, layer: Any, n: int) -> int:
        moved = self.rounds.moved_already(layer)
        if moved is not None:
            return moved
        self.undo()
        n = min(layer.offset, n)
        if n <= 0:
            return 0
        to = layer.offset - n
        if all(leaf.can_restore(None, to) for leaf in self.leaves if leaf.offset > to):
            return n if layer.restore(None, to) else 0
        before = {id(leaf): leaf.offset for leaf in self.leaves if leaf is not layer}
        if not self._roll_back(to):
            self.rounds.refuse(to)
            return 0
        self.rounds.move(before)
        return n

    def _roll_back(self, to: int) -> bool:
        """Restore the state at the beginning of the round, and feed the accepted tokens up to `to` again. Returns False
        if that is not possible."""
        model = None if self._model is None else self._model()
        layers = self.hold.handed.of_model(self.hold.watchers.index(self))
        at = self.rounds.began_at
        if at is None or model is None or not layers:
            return False
        again = self.fed.tokens()[at:to]
        if (at < to and len(again) < to - at) or not self.rounds.put_back(self.leaves, to):
            return False
        self.reached = self.position
        self.fed.cut(self.position)
        if at < to:
            model(mx.array(again)[None], cache=layers)
        return True


def give_up(lease: Owner) -> None:
    """Have the cache close the lease, once, if the caller refers neither to it nor to its layers any more."""
    hold = lease.hold
    if not hold.given_up and all(watcher.held.are_dropped for watcher in hold.watchers):
        hold.given_up = True
        hold.state.drop(lease)
