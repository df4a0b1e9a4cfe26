"""Attention computed in blocks of columns, each with its own softmax, weighted by their log-sum-exps. This is exact."""

from __future__ import annotations

import functools
import operator

import mlx.core as mx


class Block:
    """Attention over one part of the columns: its softmax, its log-sum-exp, and (set later) its output."""

    __slots__ = ("logsum", "out", "probs")

    def __init__(self, scores: mx.array) -> None:
        self.probs = mx.softmax(scores, axis=-1, precise=True)
        largest = scores.max(axis=-1, keepdims=True).astype(mx.float32)
        self.logsum = largest - mx.log(self.probs.max(axis=-1, keepdims=True).astype(mx.float32))
        self.out: mx.array = self.probs


def weigh(blocks: list[Block], sinks: mx.array | None) -> mx.array:
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


def cat(parts: list[mx.array], axis: int = -1) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def lowest(dtype: mx.Dtype) -> float:
    """Returns the score of a hidden column: finite, because a row may see no column of a block."""
    return -6e4 if dtype == mx.float16 else -1e30
