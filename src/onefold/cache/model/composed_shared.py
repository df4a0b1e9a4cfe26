"""Attention of a batch's rows over pieces that several of them read: one product for all of them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory.shapes import View
from onefold.cache.model.blocks import Block
from onefold.cache.model.codec import Codec
from onefold.cache.model.reading_plan import Ranges


def attend_shared(by_head: mx.array, arrays: Any, hidden: Any, ranges: Ranges, codec: Codec) -> list[Block]:
    """Returns a block over each of the pieces, which are given as their arrays and ranges. `by_head` are the queries,
    [kv heads, rows, repeats, dim]; `hidden` is added to the scores."""
    parts = []
    for held, low, (lo, hi, who) in zip(arrays, hidden, ranges, strict=True):
        view = View(held, lo, hi, 0)
        s = _shared_scores(by_head, view, who, codec)
        part = Block(s if low is None else s + low)
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
