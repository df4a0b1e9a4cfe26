"""Repeats the steps of a batch as a compiled graph, without running the model's Python code.

On a fast GPU a decode step takes less time than Python needs to call the model. Steps of the same rows differ only in
the content of a few arrays: tokens, positions, the work table of the decode kernel, and the buffers. So after some
equal steps the forward is traced with `mx.compile`, as a function of these arrays, and its graph is used from then on.

- The model's weights are constants of the graph. Before each use it is checked that the model has the same ones, and
  the same numbers as attributes. (As inputs, `mx.compile` would replace weights in the model while it traces.) What is
  written into a weight in place is not noticed; a batch that begins with other rows than it had makes new graphs.
- Layers are given stand-ins for their arrays while they are traced (`StepPlan.standing_in`), so a trace that fails
  has changed nothing. Such a batch is not compiled: the decode kernel must compute all attention, and the model's code
  may not evaluate an array, nor depend on how long the rows are.

Knows nothing of leases.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from onefold.cache.model.kernels import current
from onefold.cache.model.kernels.work_table import WorkTable
from onefold.cache.model.step_plan import NotTraceable, StandIns, StepPlan

log = logging.getLogger("onefold")

AFTER = 2
"""Steps of one shape before it is compiled: a trace takes as long as a few steps, and saves a third of each."""
MOST = 8
"""Graphs that are kept."""

Forward = Callable[[mx.array], Any]


class CompiledSteps:
    """The compiled steps of one batch, by their shape. Keeps the model's weights alive."""

    def __init__(self) -> None:
        self._steps: dict[tuple[Any, ...], _Step] = {}
        self._shape: tuple[Any, ...] | None = None
        self._repeats = 0
        self._refused = False

    def run(self, model: nn.Module, forward: Forward, tokens: mx.array, plan: StepPlan) -> Any:
        """Returns `forward(tokens)`, a step that `plan` has prepared; from a compiled graph if there is one."""
        kernel = current.kernel()
        if self._refused or kernel is None or not kernel.compiles_steps:
            return forward(tokens)
        table, written = plan.next_table(), plan.one_slab
        if table is None or table.shape is None or written is None:
            return forward(tokens)
        shape = (*table.shape, table.slabs.index(written.slab), tokens.dtype)
        step = self._steps.pop(shape, None)
        if step is None or not step.is_of(model):
            if step is not None:
                self._steps, self._shape = {}, None  # the model has other weights now
            self._repeats = self._repeats + 1 if shape == self._shape else 1
            self._shape = shape
            if self._repeats <= AFTER:
                return forward(tokens)
            step = _Step(model)
        before = kernel.counts[""]
        try:
            out = step(forward, tokens, plan, table)
        except ValueError as error:  # also MLX's, where an array is evaluated
            step.put_back()
            log.debug("decode steps are not compiled: %s", error)
            self._refused = True
            return forward(tokens)
        counted = kernel.counts[""] - before
        if step.calls is None:
            step.calls = counted
            if step.put_back():
                log.debug("decode steps are not compiled: the model's code changes its weights")
                self._refused = True
                return out
        elif not counted:
            kernel.counts[""] += step.calls
        self._steps[shape] = step
        while len(self._steps) > MOST:
            del self._steps[next(iter(self._steps))]
        return out


class _Call:
    """What a trace needs beside its arrays. Set during a call only, because the graph refers to it."""

    forward: Forward
    plan: StepPlan
    table: WorkTable


class _Step:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parts = _Parts(model)
        self._call = _Call()
        self._compiled: Any = mx.compile(functools.partial(_traced, self._call))
        self.calls: int | None = None
        """Calls of attention in the graph; None: it is not traced yet."""

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model is the one that was traced, with the same parts and weights."""
        return model is self._model and self._parts.are_same()

    def put_back(self) -> bool:
        """Give the model the parts that it had. Returns whether it had others."""
        return self._parts.put_back()

    def __call__(self, forward: Forward, tokens: mx.array, plan: StepPlan, table: WorkTable) -> mx.array:
        written, call = plan.one_slab, self._call
        assert written is not None
        layers = range(len(written.slab.layers))
        buffers = [[plan.arrays(slab, i) for i in layers] for slab in table.slabs]
        call.forward, call.plan, call.table = forward, plan, table
        try:
            out, new = self._compiled(tokens, plan.positions, written.spots, table.arrays(), buffers)
        finally:
            del call.forward, call.plan, call.table
        for i in layers:
            written.slab.arrays(i)[:] = new[i]
        return out  # type: ignore[no-any-return]


def _traced(
    call: _Call,
    tokens: mx.array,
    positions: mx.array,
    spots: mx.array,
    tabled: list[mx.array],
    buffers: list[list[list[mx.array]]],
) -> tuple[mx.array, list[list[mx.array]]]:
    """Runs the forward on stand-ins. Returns its output, and the new arrays of the slab that it writes to."""
    plan, table = call.plan, call.table
    assert plan.one_slab is not None
    slab = plan.one_slab.slab
    arrays = {(s, i): list(layer) for s, held in zip(table.slabs, buffers, strict=True) for i, layer in enumerate(held)}
    plan.is_read_by_length = False
    with plan.standing_in(StandIns(table.standing_for(tabled), arrays), positions, spots):
        out = call.forward(tokens)
    if plan.is_read_by_length:
        raise NotTraceable("the model reads how long the keys are")
    if not isinstance(out, mx.array):
        raise NotTraceable("the model does not return an array")
    return out, [arrays[slab, i] for i in range(len(slab.layers))]


class _Parts:
    """The modules and containers of a model, with their members: weights, other modules, and settings. Compared before
    each step, so most of what is compared are lists that are made without a loop in Python."""

    def __init__(self, model: nn.Module) -> None:
        wholes: list[Any] = []
        waiting: list[Any] = [model]
        while waiting:
            wholes.append(waiting.pop())
            waiting += [x for _, x in _members(wholes[-1]) if not isinstance(x, mx.array)]
        self._held = [(whole, len(whole), _members(whole)) for whole in wholes]
        self._mixed = [part for part in self._held if len(part[2]) < part[1]]
        """Containers that also have members of other types, which are not compared."""
        pure = [whole for whole, n, held in self._held if len(held) == n]
        self._views = [whole.values() if isinstance(whole, dict) else whole for whole in pure]
        settings = [vars(whole) for whole in wholes if isinstance(whole, nn.Module)]
        self._named = [*(whole for whole in pure if isinstance(whole, dict)), *settings]
        self._attributes = [own.values() for own in settings]
        named = [([name for name, x in own.items() if isinstance(x, int | float | str)], own) for own in settings]
        self._getters = [(operator.itemgetter(*names), own) for names, own in named if names]
        self._known, self._values = self._seen(), self._numbers()

    def are_same(self) -> bool:
        """Whether every part has the same members, and every module attributes of the same names and types, and the
        same numbers and words."""
        if self._seen() != self._known or self._numbers() != self._values:
            return False
        return all(len(whole) == n and all(whole[k] is x for k, x in held) for whole, n, held in self._mixed)

    def put_back(self) -> bool:
        """Give the parts the members that they had. Returns whether they had others."""
        changed = False
        for whole, _, held in self._held:
            for key, part in held:
                if whole[key] is not part:  # not in a tuple, which nobody can have written to
                    whole[key], changed = part, True
        return changed

    def _seen(self) -> tuple[list[Any], ...]:
        """Returns the identities of the members, the names of members and attributes, and the types of attributes."""
        every = itertools.chain.from_iterable
        ids, lengths = list(map(id, every(self._views))), list(map(len, self._views))
        return ids, lengths, list(every(self._named)), list(map(type, every(self._attributes)))

    def _numbers(self) -> list[Any]:
        return [get(own) for get, own in self._getters]


def _members(whole: Any) -> list[tuple[Any, Any]]:
    """Returns the arrays, modules and containers that a module or a container has, with their keys."""
    items = whole.items() if isinstance(whole, dict) else enumerate(whole)
    return [(key, x) for key, x in items if isinstance(x, mx.array | dict | list | tuple)]
