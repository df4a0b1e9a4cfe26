"""Observes the forwards of a batch once per step, not once per row and layer.

For models all of whose state lies in tracks: before a step, room for one token of each row is reserved, and where each
row writes and reads is laid out for all layers (`StepPlan`). The rows' layers move on when the forward has ended, so
that nothing has to be undone if it fails. Batches of other models, and rows with a draft, are observed row by row
(`watcher.ForwardWatcher`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from onefold.cache.memory.arrays import own_name
from onefold.cache.memory.lock import Work
from onefold.cache.memory.state import CacheState
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.compiled_step import CompiledSteps
from onefold.cache.model.step_plan import StepPlan
from onefold.cache.request import feeding, forward
from onefold.cache.request.arena import Arena
from onefold.cache.request.hold import Hold
from onefold.cache.request.usage import Usage
from onefold.cache.request.watcher import ForwardWatcher
from onefold.errors import BudgetError, LeaseError


class Stepping:
    """The watcher of a batch's layers; see `seam.watch`."""

    def __init__(
        self,
        rows: list[tuple[Hold, Usage, ForwardWatcher]],
        plan: StepPlan,
        arena: Arena | None,
        anatomy: Anatomy,
        state: CacheState,
        compiled: CompiledSteps,
    ) -> None:
        self._rows = rows
        self._plan = plan
        self._arena = arena
        self._compiled = compiled
        self._anatomy = anatomy
        self._state = state
        self.n_rows = len(rows)
        self._scratch = anatomy.step_bytes(self.n_rows)
        self._turns = 0
        """Rows whose turn this thread has."""
        self._depth = 0
        self._starts: list[int] = []
        self._fed: list[Any] = []
        self._embedded = False

    @staticmethod
    def serves(anatomy: Anatomy, holds: list[Hold]) -> bool:
        """Whether all state of the rows lies in their tracks, and each has one model."""
        if anatomy.needs_checkpoints or anatomy.bound is not None or anatomy.hides_offsets or not anatomy.sliceable:
            return False
        return all(len(hold.watchers) == 1 and hold.watchers[0].is_watched for hold in holds)

    # -- what `seam.watch` calls ---------------------------------------------------------------

    def begun(self, model: Any, inputs: mx.array | None, row: int, *, n_layers: int, embedded: bool) -> None:
        self._rows[0][1].take_turn()  # raises for another thread, before it reads what this one has noted
        if self._depth:
            self._depth += 1
            return
        try:
            self._turns = 1
            for _, usage, _ in self._rows[1:]:
                usage.take_turn()
                self._turns += 1
            if inputs is None or tuple(inputs.shape) != (self.n_rows, 1):
                raise LeaseError(f"a batch of {self.n_rows} rows is given one token per row, and all rows at once")
            feeding.require_model(self._anatomy, self._rows[0][0].target, model, n_layers)
            self._starts = [self._begin_row(hold, watcher) for hold, _, watcher in self._rows]
            shared, self._embedded = own_name(inputs), embedded
            self._fed = [
                feeding.recorded(hold, start, watcher.reached, inputs, row, embedded)
                if embedded or feeding.is_prompt(hold, start, watcher.reached)
                else (shared, row)
                for row, ((hold, _, watcher), start) in enumerate(zip(self._rows, self._starts, strict=True))
            ]
            try:
                self._state.lock.run(self._preparing())
            except BudgetError as error:
                raise error.advised("end other leases, release pins, or raise the budget") from None
            self._depth = 1
        finally:
            if not self._depth:
                self._end_turns()

    def compute(self, model: Any, inputs: mx.array, forward: Callable[[mx.array], Any]) -> Any:
        if self._depth > 1 or self._embedded:
            return forward(inputs)
        return self._compiled.run(model, forward, inputs, self._plan)

    def ended(self, n_tokens: int, stepped: bool) -> list[mx.array]:
        if self._depth > 1:
            return []
        found: list[mx.array] = []
        for (hold, _, watcher), start, fed in zip(self._rows, self._starts, self._fed, strict=True):
            for leaf in watcher.leaves:
                leaf.offset = start + 1
            watcher.reached = start + 1
            inputs, row = (None, 0) if fed is None else fed
            watcher.fed.append(start, inputs, row, 1)
            earlier, hold.unscheduled, hold.running = hold.unscheduled, None, watcher
            if not stepped or earlier is not None:
                found += hold.track.written()
        self._state.totals["batch_tokens"] += self.n_rows
        return found

    def failed(self) -> list[mx.array]:
        if self._depth > 1:
            return []
        return [a for hold, _, _ in self._rows for a in hold.track.written()]

    def lost(self, error: RuntimeError) -> None:
        for _, _, watcher in self._rows:
            watcher.lost(error)

    def left(self) -> None:
        self._depth -= 1
        if self._depth:
            self._rows[0][1].end_turn()
            return
        self._plan.is_prepared = False
        self._fed = []
        self._end_turns()

    def _end_turns(self) -> None:
        held, self._turns = self._turns, 0
        for _, usage, _ in reversed(self._rows[:held]):  # the first one last: another thread may begin then
            usage.end_turn()

    def _begin_row(self, hold: Hold, watcher: ForwardWatcher) -> int:
        """Begin a row's step. Returns its position. Raises LeaseError like a forward of its own."""
        leaves, start = watcher.leaves, watcher.reached
        if watcher.unfinished is not None or any(leaf.offset != start for leaf in leaves):
            forward.begin(hold, watcher)
            return watcher.position
        watcher.rounds.check_refused(start)
        return start

    # -- reserving -----------------------------------------------------------------------------

    def _preparing(self) -> Work[None]:
        """Reserve room for the next token of each row, and lay out where it is written and what is read."""
        state, starts = self._state, self._starts
        state.sweep()
        for hold, _, watcher in self._rows:
            hold.refuse_closed()
            forward.time_prefill(hold, watcher, 1)
        longest = max(starts) + 1
        yield from state.scratch.reserving(self._scratch.at(sum(starts), longest))
        tracks = [hold.track for hold, _, _ in self._rows]
        if self._arena is not None:
            self._arena.seat(tracks)
        else:
            for hold, _, _ in self._rows:
                yield from forward.reserving_rest(hold)
        for track, start in zip(tracks, starts, strict=True):
            last = track.pieces[-1] if track.pieces else None
            if last is not None and last.end == start >= track.floor and last.room and track.writable(last):
                last.hi += 1
            else:
                yield from track.ensuring(start, 1, keep=start)
        for hold, _, _ in self._rows:
            hold.refuse_closed()
        self._plan.prepare(starts, tracks)
