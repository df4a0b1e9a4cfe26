"""Attention of one row over several pieces, composed of MLX's operations.

- In a decode step on a GPU each piece is attended separately, and the results are weighted by their log-sum-exps. K and
  V are read in place, and nothing as long as a piece is concatenated or cut. On a CPU, where each operation costs some
  10 µs, the scores of all pieces are concatenated for one softmax.
- For a prefill chunk one layer's pieces are concatenated temporarily, and decoded, for the stock fused kernel.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.shapes import View
from onefold.cache.model.blocks import Block, cat, for_products, weigh
from onefold.cache.model.formats.codec import Codec

FEW_DECODED = 8
"""Queries up to which stored codes are read by MLX's quantised product. For more, and on CUDA, a layer is decoded."""


def attend_row(
    q: mx.array, row: list[View], codec: Codec, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    n_q, length = q.shape[1], q.shape[2]
    n_kv = row[0].arrays[0].shape[1]
    widths = sum(a.shape[1] * a.shape[3] * a.dtype.size for a in row[0].arrays)
    if length * n_q * 8 > widths if codec.plain else length > FEW_DECODED or device.on_cuda():
        return _attend_joined(for_products(q, codec.plain), row, codec, scale, mask, sinks).astype(q.dtype)
    folded = (for_products(q, codec.plain) * scale).reshape(1, n_kv, n_q // n_kv * length, q.shape[3])
    if mask is None and device.on_gpu():
        blocks = []
        for v in row:
            block = Block(codec.scores(folded, v.arrays, v.lo, v.hi))
            block.out = codec.mix(block.probs, v.arrays, v.lo, v.hi)
            blocks.append(block)
        column = None if sinks is None else mx.repeat(sinks.reshape(1, n_kv, -1, 1), length, axis=2)
        out = weigh(blocks, column)
        return out.reshape(1, n_q, length, out.shape[-1]).astype(q.dtype)
    return _attend_at_once(q, folded, row, codec, mask, sinks)


def _attend_at_once(
    q: mx.array, folded: mx.array, row: list[View], codec: Codec, mask: Any, sinks: mx.array | None
) -> mx.array:
    """Attends all pieces with one softmax, whose columns are those of the pieces side by side, and that of the sinks.
    The outputs are added up in fp32: a row may have hundreds of pieces."""
    n_q, length = q.shape[1:3]
    n_kv, total = folded.shape[1], sum(v.hi - v.lo for v in row)
    scores = [codec.scores(folded, v.arrays, v.lo, v.hi) for v in row]
    if mask is None:
        if sinks is not None:
            column = mx.repeat(sinks.reshape(1, n_kv, -1, 1), length, axis=2)
            scores.append(column.astype(scores[0].dtype))
        probs = mx.softmax(cat(scores), axis=-1, precise=True)
    else:
        masked = _masked(cat(scores).reshape(1, n_kv, n_q // n_kv, length, total), mask)
        probs = _softmax(masked, sinks).reshape(1, n_kv, n_q // n_kv * length, total)
    widths = [x.shape[-1] for x in scores[:-1]]
    parts = zip(mx.split(probs, list(itertools.accumulate(widths)), axis=-1), row, strict=False)
    outs = [codec.mix(p, v.arrays, v.lo, v.hi) for p, v in parts]
    out = outs[0] if len(outs) == 1 else functools.reduce(operator.add, [x.astype(mx.float32) for x in outs])
    return out.reshape(1, n_q, length, out.shape[-1]).astype(q.dtype)


def _attend_joined(
    q: mx.array, row: list[View], codec: Codec, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    """Attends a prefill chunk: concatenates this layer's pieces, decoded, for the stock fused kernel."""
    if codec.plain:
        k, v = (_side_by_side(row, j) for j in (0, 1))
    else:
        pieces = [codec.decode([a[..., p.lo : p.hi, :] for a in p.arrays], q.dtype) for p in row]
        k, v = (cat([piece[j] for piece in pieces], 2) for j in (0, 1))
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    if not codec.plain or not _starts_a_buffer(row):
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
