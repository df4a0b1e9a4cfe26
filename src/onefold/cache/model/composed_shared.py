"""Attention of a batch's rows over pieces that several of them read: one product for all of them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.model.blocks import Block
from onefold.cache.model.formats.codec import Codec
from onefold.cache.model.reading_plan import Ranges


def attend_shared(by_head: mx.array, arrays: Any, hidden: Any, ranges: Ranges, codec: Codec) -> list[Block]:
    """Returns a block over each of the pieces, which are given as their arrays and ranges, and for each the rows that
    read it. `by_head` are the queries, [kv heads, rows, repeats, dim]; `hidden` is added to the scores."""
    n_kv, n_rows, repeats, dim = by_head.shape
    parts = []
    for held, low, (lo, hi, who) in zip(arrays, hidden, ranges, strict=True):
        picked = by_head if len(who) == n_rows else by_head[:, mx.array(who)]
        folded = picked.reshape(1, n_kv, len(who) * repeats, dim)
        scores = codec.scores(folded, held, lo, hi).reshape(n_kv, len(who), repeats, hi - lo)
        part = Block(scores if low is None else scores + low)
        out = codec.mix(part.probs.reshape(1, n_kv, len(who) * repeats, hi - lo), held, lo, hi)
        part.out = out.reshape(n_kv, len(who), repeats, -1)
        if len(who) < n_rows:
            part.out, part.logsum = _spread(part.out, who, n_rows, 0), _spread(part.logsum, who, n_rows, -1e30)
        parts.append(part)
    return parts


def _spread(x: mx.array, who: tuple[int, ...], n_rows: int, fill: float) -> mx.array:
    """Returns an array for all rows, given that of the rows `who`; the others have `fill`, no weight."""
    n_kv, n, repeats, width = x.shape
    places = [who.index(r) if r in who else n for r in range(n_rows)]
    padded = mx.concatenate([x, mx.full((n_kv, 1, repeats, width), fill, x.dtype)], axis=1)
    return mx.take(padded, mx.array(places), axis=1)
