"""Attention that reads KV in place, from several buffers.

- A layer that reads several pieces returns *handles* instead of arrays. The seam binds `attention` in place of mlx-lm's
  function. It dispatches on the keys: handles are attended here, anything else goes to the stock function unchanged.
- In a decode step each piece is attended separately, and the results are weighted by their log-sum-exps. This is exact;
  K and V are read in place, and nothing as long as a piece is concatenated or cut.
- For a prefill chunk one layer's pieces are concatenated temporarily, for the stock fused kernel.
- Rows of a batch are ragged. A piece that several rows share is read once, with the rows folded into the query
  dimension; so is a slab that holds the tails of all rows.

Knows nothing of trees, leases or budgets.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.shapes import ArraySpec, View
from onefold.cache.model import stock
from onefold.cache.model.kernels import current
from onefold.cache.model.kernels.decode import Format, Shape
from onefold.cache.model.step_plan import Core, NotTraceable, Ranges, ReadingPlan, Rows, StepPlan, lowest


class Codec(Protocol):
    """How a layer's arrays encode its keys and values, and how attention reads them without decoding."""

    plain: bool
    kernel_format: Format | None
    """How the decode kernel reads them; None if it cannot."""

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array: ...

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array: ...

    def n_keys(self) -> int:
        """Returns how many of a layer's arrays belong to its keys; the values' follow them."""
        ...

    def dim(self, first: Any) -> int:
        """Returns the dimension of a head, given the spec of the first array of the keys or values."""
        ...


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
        k, v = specs[0], specs[n]
        shape = Shape(codec.dim(k), codec.dim(v), specs[n - 1].dtype, codec.kernel_format)
        return cls(codec, k.heads, v.heads, shape)

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
    attended = _attend_in_kernel(queries, keys, scale, mask, sinks)
    if attended is not None:
        return attended
    if keys.plan is not None and keys.plan.is_traced:
        raise NotTraceable("a layer's attention is not computed by the decode kernel")
    rows, codec = keys.rows, keys.codec
    if len(rows) == 1:
        return _attend_row(queries, rows[0], codec, scale, mask, sinks)
    if mask is None and queries.shape[2] == 1:
        return _attend_rows(queries, rows, codec, scale, sinks, keys.plan or StepPlan())
    parts = []
    for i, row in enumerate(rows):
        total = sum(v.hi - v.lo for v in row)
        own = mask[i : i + 1, ..., :total] if isinstance(mask, mx.array) and mask.ndim == 4 else mask
        parts.append(_attend_row(queries[i : i + 1], row, codec, scale, own, sinks))
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
    n_kv = keys.dims[1]
    table, index = plan.table(kernel, rows.layout, q, n_kv, shape), rows.index
    arrays = [plan.arrays(slab, index) for slab in table.slabs]
    return kernel.attend(q, arrays, table, shape, n_kv, scale, sinks)


# -- one row --------------------------------------------------------------------------------


def _attend_row(
    q: mx.array, row: list[View], codec: Codec, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    n_q, length = q.shape[1], q.shape[2]
    n_kv = row[0].arrays[0].shape[1]
    if codec.plain:
        widths = sum(a.shape[1] * a.shape[3] * a.dtype.size for a in row[0].arrays)
        if length * n_q * 8 > widths:
            return _attend_joined(q, row, scale, mask, sinks)
    folded = (q * scale).reshape(1, n_kv, n_q // n_kv * length, q.shape[3])
    if mask is None:
        blocks = []
        for v in row:
            block = _Block(codec.scores(folded, v.arrays, v.lo, v.hi))
            block.out = codec.mix(block.probs, v.arrays, v.lo, v.hi)
            blocks.append(block)
        column = None if sinks is None else mx.repeat(sinks.reshape(1, n_kv, -1, 1), length, axis=2)
        out = _weigh(blocks, column)
        return out.reshape(1, n_q, length, out.shape[-1]).astype(q.dtype)
    total = sum(v.hi - v.lo for v in row)
    scores = _cat([codec.scores(folded, v.arrays, v.lo, v.hi) for v in row])
    scores = _masked(scores.reshape(1, n_kv, n_q // n_kv, length, total), mask)
    probs = _softmax(scores, sinks).reshape(1, n_kv, n_q // n_kv * length, total)
    out, at = mx.array(0, q.dtype), 0
    for v in row:
        out = out + codec.mix(probs[..., at : at + v.hi - v.lo], v.arrays, v.lo, v.hi)
        at += v.hi - v.lo
    return out.reshape(1, n_q, length, out.shape[-1]).astype(q.dtype)


class _Block:
    """Attention over one part of the columns: its softmax, its log-sum-exp, and (set later) its output."""

    __slots__ = ("logsum", "out", "probs")

    def __init__(self, scores: mx.array) -> None:
        self.probs = mx.softmax(scores, axis=-1, precise=True)
        largest = scores.max(axis=-1, keepdims=True).astype(mx.float32)
        self.logsum = largest - mx.log(self.probs.max(axis=-1, keepdims=True).astype(mx.float32))
        self.out: mx.array = self.probs


def _hidden(scores: mx.array, low: mx.array | None) -> mx.array:
    return scores if low is None else scores + low


def _weigh(blocks: list[_Block], sinks: mx.array | None) -> mx.array:
    """Returns the weighted sum of the blocks' outputs. A sink takes its share of the sum and has no output."""
    if len(blocks) == 1 and sinks is None:
        return blocks[0].out
    sums = [b.logsum for b in blocks]
    if sinks is not None:
        sums.append(sinks.astype(mx.float32))
    top = functools.reduce(mx.maximum, sums)
    shares = [mx.exp(x - top) for x in sums]
    total = functools.reduce(operator.add, shares)
    weighed = [b.out.astype(mx.float32) * w for b, w in zip(blocks, shares, strict=False)]
    return (functools.reduce(operator.add, weighed) / total).astype(blocks[0].out.dtype)


def _attend_joined(q: mx.array, row: list[View], scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    """Attends a prefill chunk: concatenates this layer's pieces, for the stock fused kernel."""
    k, v = (_side_by_side(row, j) for j in (0, 1))
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    if not _starts_a_buffer(row):
        device.evaluate(out)  # else the device would run ahead and hold several layers' copies
    return out


def _side_by_side(row: list[View], j: int) -> mx.array:
    """Returns the arrays `j` of a row's pieces, concatenated to one array that starts its buffer."""
    parts = [v.arrays[j][..., v.lo : v.hi, :] for v in row]
    if len(parts) > 1:
        return mx.concatenate(parts, axis=2)
    return parts[0] if _starts_a_buffer(row) else mx.contiguous(parts[0])


def _starts_a_buffer(row: list[View]) -> bool:
    """Whether the fused kernel can take a slice of the row: it is one range from the start of a buffer. On CUDA, with
    one query and a range that starts later, the kernel reads beyond its memory (`benchmarks/gpu_attention.py`)."""
    return len(row) == 1 and (row[0].lo == 0 or not device.on_cuda())


def _masked(scores: mx.array, mask: Any) -> mx.array:
    """Applies the mask. `scores` is [rows, kv heads, repeats, queries, keys]."""
    if mask is None:
        return scores
    _, n_kv, repeats, length, total = scores.shape
    if isinstance(mask, str):
        first = total - length
        mask = mx.arange(first, total)[:, None] >= mx.arange(total)[None]
    if mask.ndim == 4:
        heads = mask.shape[1]
        shape = (n_kv, repeats) if heads > 1 else (1, 1)
        mask = mask.reshape(mask.shape[0], *shape, *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    return scores + mask


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Returns the softmax over the last axis. A sink takes its share of the sum and has no value."""
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    rows, n_kv, repeats, length, total = scores.shape
    column = sinks.astype(scores.dtype).reshape(1, n_kv, repeats, 1, 1)
    column = mx.broadcast_to(column, (rows, n_kv, repeats, length, 1))
    both = mx.concatenate([scores, column], axis=-1)
    return mx.softmax(both, axis=-1, precise=True)[..., :total]


def _cat(parts: list[mx.array], axis: int = -1) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


# -- a ragged batch, one query each ------------------------------------------------------------


def _attend_rows(
    q: mx.array,
    rows: Rows | list[list[View]],
    codec: Codec,
    scale: float,
    sinks: mx.array | None,
    step: StepPlan,
) -> mx.array:
    n_rows, n_q, _, dim = q.shape
    n_kv = rows[0][0].arrays[0].shape[1]
    repeats = n_q // n_kv
    plan = step.reading(rows, q.dtype)

    everyone = tuple(range(n_rows))
    groups = [(rows[i][j].all(), everyone) for i, j in plan.common]
    groups += [(rows[i][j], tuple(who)) for i, j, who in plan.shared]
    ranges = tuple((v.lo, v.hi, who) for v, who in groups)
    given = [v.arrays for v, _ in groups], plan.hidden
    column = None if sinks is None else sinks.reshape(n_kv, 1, repeats, 1)
    if not plan.single:
        core = _core(step, ranges, codec, scale)
        out = core(q, *given, column)
        return out.transpose(1, 0, 2, 3).reshape(n_rows, n_q, 1, out.shape[-1]).astype(q.dtype)

    if not groups and _one_buffer_each(rows, codec):
        return _attend_alone(q, rows, scale, sinks)
    by_row = (q * scale).reshape(n_rows, n_kv, repeats, dim)
    parts = _attend_groups(by_row.transpose(1, 0, 2, 3), *given, ranges, codec) + _attend_own(by_row, rows, plan, codec)
    out = _weigh(parts, column)
    return out.transpose(1, 0, 2, 3).reshape(n_rows, n_q, 1, out.shape[-1]).astype(q.dtype)


def _one_buffer_each(rows: Rows | list[list[View]], codec: Codec) -> bool:
    """Whether every row is one range from the start of a buffer."""
    return codec.plain and all(len(row) == 1 and row[0].lo == 0 for row in rows)


def _attend_alone(q: mx.array, rows: Rows | list[list[View]], scale: float, sinks: mx.array | None) -> mx.array:
    """Attends each row separately, in the stock kernel: rows share nothing."""
    parts = []
    for i, (v,) in enumerate(rows):
        k, values = (a[..., : v.hi, :] for a in v.arrays)
        parts.append(mx.fast.scaled_dot_product_attention(q[i : i + 1], k, values, scale=scale, sinks=sinks))
    return mx.concatenate(parts, axis=0)


def _attend_own(by_row: mx.array, rows: Rows | list[list[View]], plan: ReadingPlan, codec: Codec) -> list[_Block]:
    """Attends the pieces that only one row reads. The scores of all rows are padded to one array, for one softmax,
    unless one row is so much longer than the others that most of it would be padding."""
    own = [[row[j] for r, j in plan.single if r == i] for i, row in enumerate(rows)]
    widths = [sum(v.hi - v.lo for v in views) for views in own]
    if max(widths) * len(widths) > 2 * sum(widths) + 4096:
        chosen = [i for i, views in enumerate(own) if views]
        return [_own_block(by_row, [views if i == k else [] for k, views in enumerate(own)], codec) for i in chosen]
    return [_own_block(by_row, own, codec)]


def _own_block(by_row: mx.array, own: list[list[View]], codec: Codec) -> _Block:
    """Returns one block over all rows; a row that has no piece here has no weight in it."""
    n_rows, n_kv, repeats, _ = by_row.shape
    widest = max(sum(v.hi - v.lo for v in views) for views in own)
    low = lowest(by_row.dtype)
    scores = []
    for i, views in enumerate(own):
        parts = [codec.scores(by_row[i : i + 1], v.arrays, v.lo, v.hi) for v in views]
        found = _cat(parts) if parts else mx.full((1, n_kv, repeats, widest), low, by_row.dtype)
        missing = widest - found.shape[-1]
        scores.append(mx.pad(found, [(0, 0)] * 3 + [(0, missing)], constant_values=low) if missing else found)
    block = _Block(mx.concatenate(scores, axis=0))
    outs: list[mx.array | None] = []
    for i, views in enumerate(own):
        at, out = 0, None
        for v in views:
            width = v.hi - v.lo
            part = codec.mix(block.probs[i : i + 1, ..., at : at + width], v.arrays, v.lo, v.hi)
            at, out = at + width, part if out is None else out + part
        outs.append(out)
    known = next(o for o in outs if o is not None)
    block.out = mx.concatenate([mx.zeros_like(known) if o is None else o for o in outs], axis=0).transpose(1, 0, 2, 3)
    block.logsum = block.logsum.transpose(1, 0, 2, 3)
    if any(not views for views in own):  # rows without a piece get no weight
        empty = mx.array([not views for views in own]).reshape(1, n_rows, 1, 1)
        block.logsum = mx.where(empty, mx.array(-1e30), block.logsum)
    return block


def _core(step: StepPlan, ranges: Ranges, codec: Codec, scale: float) -> Core:
    """Returns the attention over pieces that rows read together. Its shapes stay the same from step to step, so on a
    GPU it is compiled, once for a batch."""
    key = (ranges, id(codec), scale)
    known = step.cores.get(key)
    if known is None:

        def core(q: mx.array, arrays: Any, hidden: Any, sinks: Any) -> mx.array:
            n_kv = arrays[0][0].shape[1]
            by_row = (q * scale).reshape(q.shape[0], n_kv, -1, q.shape[3])
            return _weigh(_attend_groups(by_row.transpose(1, 0, 2, 3), arrays, hidden, ranges, codec), sinks)

        known = step.cores[key] = mx.compile(core) if device.on_gpu() else core
    return known


def _attend_groups(by_head: mx.array, arrays: Any, hidden: Any, ranges: Ranges, codec: Codec) -> list[_Block]:
    parts = []
    for held, low, (lo, hi, who) in zip(arrays, hidden, ranges, strict=True):
        view = View(held, lo, hi, 0)
        s = _shared_scores(by_head, view, who, codec)
        part = _Block(_hidden(s, low))
        part.out = _shared_mix(part.probs, view, who, by_head.shape[1], codec)
        parts.append(part)
    return parts


def _shared_scores(by_head: mx.array, v: View, who: tuple[int, ...], codec: Codec) -> mx.array:
    """Returns one product for all rows that read this piece: [kv heads, rows, repeats, tokens]."""
    n_kv, n_rows, repeats, dim = by_head.shape
    picked = by_head if len(who) == n_rows else by_head[:, mx.array(who)]
    folded = picked.reshape(1, n_kv, len(who) * repeats, dim)
    s = codec.scores(folded, v.arrays, v.lo, v.hi).reshape(n_kv, len(who), repeats, v.hi - v.lo)
    if len(who) == n_rows:
        return s
    places = [who.index(r) if r in who else 0 for r in range(n_rows)]  # other rows' columns are hidden
    return s[:, mx.array(places)]


def _shared_mix(p: mx.array, v: View, who: tuple[int, ...], n_rows: int, codec: Codec) -> mx.array:
    n_kv, _, repeats, n = p.shape
    picked = p if len(who) == n_rows else p[:, mx.array(who)]
    part = codec.mix(picked.reshape(1, n_kv, len(who) * repeats, n), v.arrays, v.lo, v.hi)
    part = part.reshape(n_kv, len(who), repeats, -1)
    if len(who) == n_rows:
        return part
    spread = mx.zeros((n_kv, n_rows, repeats, part.shape[-1]), part.dtype)
    spread[:, mx.array(who)] = part
    return spread
