"""Attention computed in blocks of columns, each with its own softmax, weighted by their log-sum-exps. This is exact."""

from __future__ import annotations

import functools
import operator

import mlx.core as mx

from onefold.cache.memory import device


def for_products(q: mx.array, plain: bool) -> mx.array:
    """Returns queries in the type in which they are multiplied with stored keys. With quantised keys on a CPU that is
    32 bits: MLX's quantised product in 16 bits is some ten times as slow there, and adds up in 16 bits."""
    return q if plain or device.on_gpu() else q.astype(mx.float32)


class Block:
    """Attention over one part of the columns: its softmax, its log-sum-exp, and (set later) its output."""

    __slots__ = ("logsum", "out", "probs")

    def __init__(self, scores: mx.array) -> None:
        self.probs = mx.softmax(scores, axis=-1, precise=True)
        self.logsum = log_sum(scores, self.probs)
        self.out: mx.array = self.probs


def log_sum(scores: mx.array, probs: mx.array) -> mx.array:
    """Returns the log-sum-exp of scores, given their softmax."""
    largest = scores.max(axis=-1, keepdims=True).astype(mx.float32)
    return largest - mx.log(probs.max(axis=-1, keepdims=True).astype(mx.float32))


def weigh(blocks: list[Block], sinks: mx.array | None) -> mx.array:
    """Returns the weighted sum of the blocks' outputs. A sink takes its share of the sum and has no output."""
    return merged([(b.out, b.logsum) for b in blocks], sinks)


def merged(blocks: list[tuple[mx.array, mx.array]], sinks: mx.array | None) -> mx.array:
    """`weigh`, of blocks that are given as their outputs and log-sum-exps."""
    if len(blocks) == 1 and sinks is None:
        return blocks[0][0]
    sums = [logsum for _, logsum in blocks]
    if sinks is not None:
        sums.append(sinks.astype(mx.float32))
    top = functools.reduce(mx.maximum, sums)
    shares = [mx.exp(x - top) for x in sums]
    total = functools.reduce(operator.add, shares)
    weighed = [out.astype(mx.float32) * w for (out, _), w in zip(blocks, shares, strict=False)]
    return (functools.reduce(operator.add, weighed) / total).astype(blocks[0][0].dtype)


def cat(parts: list[mx.array], axis: int = -1) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def lowest(dtype: mx.Dtype) -> float:
    """Returns the score of a hidden column: finite, because a row may see no column of a block."""
    return -6e4 if dtype == mx.float16 else -1e30
