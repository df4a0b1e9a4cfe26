"""Attention of a ragged batch, one query each, composed of MLX's operations.

On a CPU `composed_step` computes it. On a GPU, a piece that several rows share is read once, with the rows folded into
the query dimension; so is a slab that holds the tails of all rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.shapes import View
from onefold.cache.model.blocks import Block, cat, for_products, lowest, weigh
from onefold.cache.model.composed_shared import attend_shared
from onefold.cache.model.composed_step import attend_step
from onefold.cache.model.formats.codec import Codec
from onefold.cache.model.reading_plan import Core, Ranges, ReadingPlan
from onefold.cache.model.step_plan import Rows, StepPlan


def attend_rows(
    q: mx.array,
    rows: Rows | list[list[View]],
    codec: Codec,
    scale: float,
    sinks: mx.array | None,
    step: StepPlan,
) -> mx.array:
    """Returns the attention of one query of each row over its pieces."""
    if not device.on_gpu():
        index = rows.index if isinstance(rows, Rows) else 0
        queries = for_products(q, codec.plain)
        regions = step.regions(rows, queries.dtype, codec.plain)
        return attend_step(queries, regions, index, codec, scale, sinks).astype(q.dtype)
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
    if not plan.single and not step.is_cut:
        core = _core(step, ranges, codec, scale)
        out = core(q, *given, column)
        return out.transpose(1, 0, 2, 3).reshape(n_rows, n_q, 1, out.shape[-1]).astype(q.dtype)

    if not groups and _one_buffer_each(rows, codec):
        return _attend_alone(q, rows, scale, sinks)
    by_row = (q * scale).reshape(n_rows, n_kv, repeats, dim)
    parts = attend_shared(by_row.transpose(1, 0, 2, 3), *given, ranges, codec)
    if plan.single:
        parts += _attend_own(by_row, rows, plan, codec)
    out = weigh(parts, column)
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


def _attend_own(by_row: mx.array, rows: Rows | list[list[View]], plan: ReadingPlan, codec: Codec) -> list[Block]:
    """Attends the pieces that only one row reads. The scores of all rows are padded to one array, for one softmax,
    unless one row is so much longer than the others that most of it would be padding."""
    own = [[row[j] for r, j in plan.single if r == i] for i, row in enumerate(rows)]
    widths = [sum(v.hi - v.lo for v in views) for views in own]
    if max(widths) * len(widths) > 2 * sum(widths) + 4096:
        chosen = [i for i, views in enumerate(own) if views]
        return [_own_block(by_row, [views if i == k else [] for k, views in enumerate(own)], codec) for i in chosen]
    return [_own_block(by_row, own, codec)]


def _own_block(by_row: mx.array, own: list[list[View]], codec: Codec) -> Block:
    """Returns one block over all rows; a row that has no piece here has no weight in it."""
    n_rows, n_kv, repeats, _ = by_row.shape
    widest = max(sum(v.hi - v.lo for v in views) for views in own)
    low = lowest(by_row.dtype)
    scores = []
    for i, views in enumerate(own):
        parts = [codec.scores(by_row[i : i + 1], v.arrays, v.lo, v.hi) for v in views]
        found = cat(parts) if parts else mx.full((1, n_kv, repeats, widest), low, by_row.dtype)
        missing = widest - found.shape[-1]
        scores.append(mx.pad(found, [(0, 0)] * 3 + [(0, missing)], constant_values=low) if missing else found)
    block = Block(mx.concatenate(scores, axis=0))
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
    """Returns the attention over pieces that rows read together. Its shapes stay the same from step to step, so it is
    compiled, once for a batch."""
    key = (ranges, id(codec), scale)
    known = step.cores.get(key)
    if known is None:

        def core(q: mx.array, arrays: Any, hidden: Any, sinks: Any) -> mx.array:
            n_kv = arrays[0][0].shape[1]
            by_row = (q * scale).reshape(q.shape[0], n_kv, -1, q.shape[3])
            return weigh(attend_shared(by_row.transpose(1, 0, 2, 3), arrays, hidden, ranges, codec), sinks)

        known = step.cores[key] = mx.compile(core)
    return known
