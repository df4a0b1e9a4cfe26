"""Attention that reads KV in place, from several buffers.

- A layer that reads several pieces returns *handles* instead of arrays. The seam binds `attention` in place of mlx-lm's
  function. It dispatches on the keys: handles are attended here, anything else goes to the stock function unchanged.
- Attention is computed by the device's decode kernel, or composed of MLX's operations: for one row in `composed_row`,
  for the rows of a batch, which are ragged, in `composed_rows`.

Knows nothing of trees, leases or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec, View
from onefold.cache.model import stock
from onefold.cache.model.composed_row import attend_row
from onefold.cache.model.composed_rows import attend_rows
from onefold.cache.model.formats.codec import Codec
from onefold.cache.model.kernels import current
from onefold.cache.model.kernels.decode import Shape
from onefold.cache.model.step_plan import NotTraceable, Rows, StepPlan


@dataclass(frozen=True, slots=True)
class Handle:
    """Passed through a model's attention code in place of the keys, or the values, of some rows."""

    rows: Rows | list[list[View]]
    codec: Codec
    dims: tuple[int, int, int, int]
    dtype: mx.Dtype
    consumed: list[int]
    """Counts the attention calls that read it, for the survey."""
    plan: StepPlan | None = None
    """The batch's, which its layers share."""
    kernel_shape: Shape | None = None
    """What the decode kernel is compiled for to read it; None if that is not known."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the array that a model would have; for the model's code."""
        if self.plan is not None:
            self.plan.is_read_by_length = True
        return self.dims

    @property
    def ndim(self) -> int:
        return 4

    def within(self, window: int) -> Handle:
        """Returns a handle for the last `window` tokens of each row of a batch. Raises NotTraceable while its step is
        traced: the next step reads other ranges."""
        plan, rows = self.plan, self.rows
        assert plan is not None and isinstance(rows, Rows)
        if plan.is_traced:
            raise NotTraceable("a layer attends within a window")
        if self.dims[2] <= window:
            return self
        cut = plan.within(window, rows.layout)
        return replace(self, rows=Rows(cut.layout, rows.index), plan=cut)


@dataclass(frozen=True, slots=True)
class WindowMask:
    """The mask of one query of each row of a batch, which the model passes to attention unchanged: each row sees its
    last `size` tokens."""

    size: int


@dataclass(frozen=True, slots=True)
class Forms:
    """The shapes of one layer's keys and values, for its handles."""

    codec: Codec
    heads: int
    value_heads: int
    shape: Shape

    @classmethod
    def of(cls, codec: Codec, specs: Sequence[ArraySpec]) -> Forms:
        """`specs` are those of the layer's arrays."""
        n = codec.n_keys()
        shape = Shape(*codec.made(specs), codec.kernel_format)
        return cls(codec, specs[0].heads, specs[n].heads, shape)

    def handles(
        self, rows: Rows | list[list[View]], longest: int, plan: StepPlan | None, consumed: list[int]
    ) -> tuple[Handle, Handle]:
        """Returns handles for the keys and the values of some rows, the longest of which has so many tokens."""
        n, shape = len(rows), self.shape
        k = (n, self.heads, longest, shape.key_dim), shape.dtype
        v = (n, self.value_heads, longest, shape.value_dim), shape.dtype
        return Handle(rows, self.codec, *k, consumed, plan, shape), Handle(rows, self.codec, *v, consumed, plan)


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    **options: Any,
) -> mx.array:
    """Replaces mlx-lm's `scaled_dot_product_attention`. Raises TypeError for values or options that it does not
    support with handles."""
    if not isinstance(keys, Handle):
        return stock.stock_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks, **options)
    if not isinstance(values, Handle) or options:
        raise TypeError(
            f"keys are a handle, but values are {type(values).__name__} with options {list(options)}: the model must "
            "pass both unchanged, without options"
        )
    keys.consumed[0] += 1
    if isinstance(mask, WindowMask):
        keys, mask = keys.within(mask.size), None
    attended = _attend_in_kernel(queries, keys, scale, mask, sinks)
    if attended is not None:
        return attended
    if keys.plan is not None and keys.plan.is_traced:
        raise NotTraceable("a layer's attention is not computed by the decode kernel")
    codec = keys.codec
    return codec.turn_back(_attend_composed(codec.turn(queries), keys, scale, mask, sinks))


def _attend_composed(queries: mx.array, keys: Handle, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    rows, codec = keys.rows, keys.codec
    if len(rows) == 1:
        return attend_row(queries, rows[0], codec, scale, mask, sinks)
    if mask is None and queries.shape[2] == 1:
        return attend_rows(queries, rows, codec, scale, sinks, keys.plan or StepPlan())
    parts = []
    for i, row in enumerate(rows):
        total = sum(v.hi - v.lo for v in row)
        own = mask[i : i + 1, ..., :total] if isinstance(mask, mx.array) and mask.ndim == 4 else mask
        parts.append(attend_row(queries[i : i + 1], row, codec, scale, own, sinks))
    return mx.concatenate(parts, axis=0)


def _attend_in_kernel(
    q: mx.array, keys: Handle, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array | None:
    """Returns the attention computed by the device's decode kernel; None, and counts the reason, if it cannot be."""
    kernel = current.kernel()
    if kernel is None:
        return None
    rows, plan, shape = keys.rows, keys.plan, keys.kernel_shape
    if not isinstance(rows, Rows) or plan is None or shape is None:
        kernel.counts["windows"] += 1
        return None
    reason = kernel.reason(q, shape, mask)
    kernel.counts[reason] += 1
    if reason:
        return None
    n_kv, codec = keys.dims[1], keys.codec
    turns = shape.format is not None and shape.format.turns
    q = q if turns else codec.turn(q)
    table, index = plan.table(kernel, rows.layout, q, n_kv, shape), rows.index
    arrays = [plan.arrays(slab, index) for slab in table.slabs]
    if turns:
        return kernel.attend(q, arrays, table, shape, n_kv, scale, sinks, codec.signs)
    return codec.turn_back(kernel.attend(q, arrays, table, shape, n_kv, scale, sinks))
