"""A decode batch: several leases, one forward per step.

Rows are ragged, and each row's state stays in its lease: rows can be added and removed between any two steps, nothing
is padded, and no prefix is copied (see `arena` for the tails). A segment that several rows share is read once. For a
model that cannot carry rows at different positions, `step` runs one forward per row.
"""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import as_tokens_or_none
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.compiled_step import CompiledSteps
from onefold.cache.model.fingerprint import model_name
from onefold.cache.model.step_plan import StepPlan
from onefold.cache.request import forward, stock_caches
from onefold.cache.request.arena import Arena
from onefold.cache.request.lease import Lease
from onefold.cache.request.stepping import Stepping
from onefold.errors import LeaseError
from onefold.sizes import show_count


class Batch:
    """Made by `PrefixCache.batch`. Each row is a lease that is prefilled up to its last token."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        leases: list[Lease],
        arena: Arena | None,
        state: CacheState,
    ) -> None:
        self._model = weakref.ref(model)
        self._anatomy = anatomy
        self.ragged = anatomy.ragged
        self._n_layers = anatomy.n_layers
        self.leases: list[Lease] = []
        self._layers: list[Any] | None = None
        self._plan = StepPlan()
        self._stepping: Stepping | None = None
        self._compiled = CompiledSteps()
        self._decoded: weakref.WeakSet[Lease] = weakref.WeakSet()
        """The rows of the last step."""
        self._arena = arena
        self._state = state
        for lease in leases:
            self.add(lease)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise LeaseError("the model of this batch was deleted: keep a reference to it while the batch is used")
        return model

    def __repr__(self) -> str:
        how = "" if self.ragged else ", stepped row by row"
        return f"<Batch of {show_count(len(self.leases), 'row')} of {model_name(self._model())}{how}>"

    def add(self, lease: Lease) -> None:
        """Add a row: a lease of this cache that is prefilled up to its last token. Raises LeaseError if it is not a
        lease of this cache, or a row already."""
        if not isinstance(lease, Lease):
            raise LeaseError(f"a row of a batch must be a lease, got {type(lease).__name__}")
        lease.usage.require_usable()
        if lease.state is not self._state or not lease.hold.is_of(self.model):
            raise LeaseError("a lease of another cache cannot be a row of this batch: open it on the batch's cache")
        if any(lease is known for known in self.leases):
            raise LeaseError("this lease is a row of the batch already: add it once")
        self.leases.append(lease)
        self._layers = None

    def seat(self, leases: list[Lease]) -> None:
        """Replace the rows by these, in this order. Raises LeaseError like `add`."""
        if len(leases) != len(self.leases) or any(a is not b for a, b in zip(leases, self.leases, strict=True)):
            self.leases, self._layers = [], None
            for lease in leases:
                self.add(lease)

    def remove(self, lease: Lease) -> None:
        """Remove a row; the lease stays open. Raises LeaseError if it is not a row of this batch."""
        if not any(lease is known for known in self.leases):
            raise LeaseError("this lease is not a row of the batch: add it first, and remove it once")
        self.leases = [known for known in self.leases if known is not lease]
        self._layers = None

    @property
    def layers(self) -> list[Any]:
        """The layers to pass to the model as its cache, for one token per row."""
        if self._layers is None:
            own = [lease.layers[: self._n_layers] for lease in self.leases]
            if not any(lease in self._decoded for lease in self.leases):
                self._compiled = CompiledSteps()  # the model's weights may have been written to in between
            self._decoded = weakref.WeakSet(self.leases)
            self._plan = plan = StepPlan()
            self._stepping = None
            self._layers = [same[0].rows(list(same), plan) for same in zip(*own, strict=True)]
            if self.ragged and Stepping.serves(self._anatomy, [lease.hold for lease in self.leases]):
                rows = [(lease.hold, lease.usage, lease.hold.watchers[0]) for lease in self.leases]
                arena = self._arena if len(rows) > 1 else None
                stepping = Stepping(rows, plan, arena, self._anatomy, self._state, self._compiled)
                plan.watcher = self._stepping = stepping
        return self._layers

    def step(self, tokens: Any) -> mx.array:
        """Runs one forward with one more token per row. Returns the logits, `[rows, vocab]`. Raises LeaseError if there
        is not one token per row, and BudgetError before anything is written."""
        for lease in self.leases:
            lease.usage.require_usable()
        if not isinstance(tokens, mx.array):
            tokens = mx.array(as_tokens_or_none(tokens))
        tokens = tokens.reshape(-1, 1)
        if not self.leases or tokens.shape[0] != len(self.leases):
            given, seated = show_count(tokens.shape[0], "token"), show_count(len(self.leases), "row")
            raise LeaseError(f"{given} for {seated}: give one token per row")
        if len(self.leases) == 1:
            with self.leases[0].usage.in_turn(), self._state.lock:
                self._state.placement.bring_home(self.leases[0].hold.track)
            if self._layers is None and not self._anatomy.is_in_kernel:  # asked once, where it is
                return self.model(tokens, cache=self.leases[0].layers[: self._n_layers])[:, -1, :]
        if self.ragged and self.layers and self._plan.watcher is not None:
            return self.model(tokens, cache=self.layers)[:, -1, :]
        holds = [lease.hold for lease in self.leases]
        rows = [(hold, hold.watchers[0]) for hold in holds if hold.watchers]  # none where a model runs uncached
        with self._state.scratch.for_a_batch(sum(watcher.scratch_bytes(1) for _, watcher in rows)):
            if self.ragged:
                if self._arena is not None and len(self.leases) > 1:
                    with self._state.lock:
                        self._arena.seat([lease.hold.track for lease in self.leases if not lease.hold.is_outside_track])
                self._plan.begin()
                return self.model(tokens, cache=self.layers)[:, -1, :]
            for hold, watcher in rows:  # for all rows first, because a row that was stepped cannot be undone
                forward.reserve_step(hold, watcher, 1)
            for hold in holds:
                stock_caches.reserve(hold, 1)
            logits = [
                self.model(tokens[i : i + 1], cache=lease.layers[: self._n_layers])[:, -1, :]
                for i, lease in enumerate(self.leases)
            ]
            return mx.concatenate(logits, axis=0)
