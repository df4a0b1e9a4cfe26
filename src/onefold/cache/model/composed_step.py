"""Attention of a decode step of a batch on a CPU, composed of as few of MLX's operations as possible.

Each of a row's own pieces takes two products, and everything else is done for all rows at once: see `region_plan`. All
scores of a group of rows are of the shape [kv heads, rows, repeats, columns].
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import mlx.core as mx

from onefold.cache.memory.segment import STEP
from onefold.cache.model.blocks import cat, log_sum, merged
from onefold.cache.model.composed_shared import attend_shared
from onefold.cache.model.formats.codec import Codec
from onefold.cache.model.region_plan import Group, Own, RegionPlan, Regions


def attend_step(
    q: mx.array, plan: RegionPlan, index: int, codec: Codec, scale: float, sinks: mx.array | None
) -> mx.array:
    """Returns the attention of one query of each row over its pieces in layer `index`."""
    n_rows, n_q, _, dim = q.shape
    n_kv = plan.any_slab.arrays(index)[0].shape[1]
    repeats = n_q // n_kv
    by_row = (q * scale).reshape(n_rows, n_kv, repeats, dim)
    by_head = by_row.transpose(1, 0, 2, 3)
    merges = bool(plan.shared) or sinks is not None
    blocks = [_own_block(by_row, by_head, plan, index, codec, merges)] if plan.groups else []
    if plan.shared:
        arrays = [s[0].arrays(index) for s in plan.shared]
        found = attend_shared(by_head, arrays, plan.hidden, plan.ranges, codec)
        blocks += [(block.out, block.logsum) for block in found]
    out = merged(blocks, None if sinks is None else sinks.reshape(n_kv, 1, repeats, 1))
    return out.transpose(1, 0, 2, 3).reshape(n_rows, n_q, 1, out.shape[-1]).astype(q.dtype)


def _own_block(
    by_row: mx.array, by_head: mx.array, plan: RegionPlan, index: int, codec: Codec, merges: bool
) -> tuple[mx.array, mx.array]:
    """Returns the output over the regions and the own pieces of all rows, and its log-sum-exps, which are not computed
    unless `merges`."""
    regions = None if plan.regions is None else _views(plan.regions, plan.columns, index, codec)
    in_regions: list[Any] = [None] * len(plan.groups)
    if regions is not None:
        ordered = _picked(_picked(by_head, plan.order), plan.seats)
        scores = _picked(codec.scores(ordered, regions, 0, plan.columns), plan.places)
        in_regions = list(mx.split(scores, plan.sizes, axis=1)) if plan.sizes else [scores]
    queries = _each_query(by_row, codec) if any(group.width for group in plan.groups) else []
    outs, probs, logsums = [], [], []
    for group, last in zip(plan.groups, in_regions, strict=True):
        scores = last
        if group.width:
            own = _own_scores(group, plan, queries, index, codec)
            scores = own if last is None else mx.concatenate([own, last], axis=-1)
        scores = scores + group.hidden
        found = mx.softmax(scores, axis=-1, precise=True)
        if merges:
            logsums.append(log_sum(scores, found))
        if group.width and last is not None:
            found, last = mx.split(found, [group.width], axis=-1)
            probs.append(last)
        elif last is not None:
            probs.append(found)
        outs.append(_own_mix(found, group, index, codec) if group.width else None)
    mixed = None
    if regions is not None:
        mixed = codec.mix(_picked(cat(probs, 1), plan.seats), regions, 0, plan.columns)
        mixed = _picked(mixed, plan.places)
    out = _picked(_sum(outs, mixed, plan), plan.back)
    return out, _picked(cat(logsums, 1), plan.back) if merges else out


def _picked(x: mx.array, which: mx.array | None) -> mx.array:
    return x if which is None else mx.take(x, which, axis=1)


def _views(regions: Regions, columns: int, index: int, codec: Codec) -> list[mx.array]:
    """Returns the slab's arrays as [kv heads, regions, columns, dim], not copied."""
    found = []
    for array in regions.slab.arrays(index):
        _, heads, capacity, dim = array.shape
        if codec.plain:
            strides = (capacity * dim, STEP * dim, dim, 1)
            shape = (heads, regions.n, columns, dim)
            found.append(mx.as_strided(array, shape, strides, regions.first * STEP * dim))
        else:
            found.append(array.reshape(heads, regions.n, STEP, dim))
    return found


def _each_query(by_row: mx.array, codec: Codec) -> list[mx.array]:
    """Returns the queries of each row; for plain keys transposed, for a product with keys that are not."""
    return list(mx.split(by_row.swapaxes(-1, -2) if codec.plain else by_row, by_row.shape[0]))


def _part(array: mx.array, piece: Own) -> mx.array:
    """Returns the range of an array that is read for a piece, not copied."""
    _, heads, capacity, dim = array.shape
    shape = (1, heads, piece.hi - piece.lo, dim)
    return mx.as_strided(array, shape, (heads * capacity * dim, capacity * dim, dim, 1), piece.lo * dim)


def _own_scores(group: Group, plan: RegionPlan, queries: list[mx.array], index: int, codec: Codec) -> mx.array:
    """Returns the scores on the own pieces of a group's rows."""
    n, width, product, plain = len(group.rows), group.width, mx.matmul, codec.plain
    found: list[mx.array] = []
    _, heads, second, third = queries[0].shape
    repeats = third if plain else second
    for piece in group.pieces:
        row, slab, is_whole, gap = piece.row, piece.slab, piece.is_whole, piece.gap
        if slab is None:
            pass
        elif plain:
            keys = slab.arrays(index)[0]
            found.append(product(keys if is_whole else _part(keys, piece), queries[row]))
        else:
            found.append(codec.scores(queries[row], slab.arrays(index), piece.lo, piece.hi))
        if gap:
            empty = (1, heads, gap, repeats) if plain else (1, heads, repeats, gap)
            found.append(plan.empty(empty, queries[0].dtype))
    if plain and len(found) == n:
        return cat(found, 0).transpose(1, 0, 3, 2)
    if plain:
        return cat(found, 2).reshape(heads, n, width, repeats).swapaxes(-1, -2)
    return cat(found).reshape(heads, repeats, n, width).transpose(0, 2, 1, 3)


def _own_mix(probs: mx.array, group: Group, index: int, codec: Codec) -> mx.array:
    """Returns the outputs over the own pieces of a group's rows, [kv heads, rows, repeats, dim]."""
    heads, n, repeats, width = probs.shape
    product, plain = mx.matmul, codec.plain
    if len(group.cuts) == n - 1:
        parts = iter(mx.split(probs.transpose(1, 0, 2, 3), n))
    else:
        flat = probs.transpose(0, 2, 1, 3).reshape(1, heads, repeats, n * width)
        parts = iter(mx.split(flat, group.cuts, axis=-1))
    outs: list[Any] = []
    before = -1
    for piece in group.pieces:
        slab = piece.slab
        if slab is None:
            out = None
        elif plain:
            values = slab.arrays(index)[1]
            out = product(next(parts), values if piece.is_whole else _part(values, piece))
        else:
            out = codec.mix(next(parts), slab.arrays(index), piece.lo, piece.hi)
        if piece.row == before:
            outs[-1] = outs[-1] + out
        else:
            outs.append(out)
        before = piece.row
        if piece.gap:
            next(parts)
    if any(out is None for out in outs):
        known = next(out for out in outs if out is not None)
        outs = [mx.zeros_like(known) if out is None else out for out in outs]
    return cat(outs, 0).transpose(1, 0, 2, 3)


def _sum(outs: list[mx.array | None], mixed: mx.array | None, plan: RegionPlan) -> mx.array:
    """Returns the outputs over own pieces, which some groups do not have, and those over the regions, added up."""
    if all(out is None for out in outs):
        assert mixed is not None
        return mixed
    parts: list[Any] = [None] * len(outs)
    if mixed is not None:
        parts = list(mx.split(mixed, plan.sizes, axis=1)) if plan.sizes else [mixed]
    pairs = [[x for x in pair if x is not None] for pair in zip(outs, parts, strict=True)]
    return cat([functools.reduce(operator.add, pair) for pair in pairs], 1)
