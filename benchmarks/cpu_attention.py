"""MLX's attention with the softmax in NumPy, for benchmarks that feed much text to a model on a CPU.

MLX's wheels for Linux compute one exponential at a time on x86-64 (22 ns each), which is most of a prompt's time; NumPy
computes eight or sixteen. The products stay MLX's. tests/test_benchmarks.py compares both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

_STOCK = mx.fast.scaled_dot_product_attention


def attend(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, **others: Any) -> mx.array:
    """Returns what `mx.fast.scaled_dot_product_attention` returns; calls it for what is no causal chunk."""
    *_, n, _ = q.shape
    if mask != "causal" or n == 1 or any(x is not None for x in others.values()):
        return _STOCK(q, k, v, scale=scale, mask=mask, **others)
    batch, heads, _, dim = q.shape
    groups = heads // k.shape[1]
    q = (q.astype(mx.float32) * scale).reshape(batch, k.shape[1], groups * n, dim)
    scores = q @ k.astype(mx.float32).swapaxes(-1, -2)
    mx.eval(scores)
    weights = np.array(scores, copy=False)
    _hide_later(weights.reshape(batch, heads, n, -1))
    _exponentials(weights.reshape(-1, weights.shape[-1]))
    with_ones = mx.concatenate([v.astype(mx.float32), mx.ones((*v.shape[:-1], 1))], axis=-1)
    found = scores @ with_ones
    mx.eval(found)
    return (found[..., :-1] / found[..., -1:]).reshape(batch, heads, n, v.shape[-1]).astype(v.dtype)


def _hide_later(scores: np.ndarray) -> None:
    """Replace the scores of keys that come after their query by minus infinity."""
    n = scores.shape[-2]
    scores[..., -n:][..., np.triu(np.ones((n, n), bool), 1)] = -np.inf


def _exponentials(rows: np.ndarray) -> None:
    """Replace each row by its exponentials, of which the largest is 1; in parts that stay in the processor's cache."""
    part = max(1, (1 << 18) // rows.shape[-1])
    for begin in range(0, len(rows), part):
        some = rows[begin : begin + part]
        some -= some.max(axis=-1, keepdims=True)
        np.exp(some, out=some)


@contextmanager
def numpy_softmax() -> Iterator[None]:
    """While this is open, attention of prompts on a CPU computes its softmax in NumPy."""
    if mx.default_device() != mx.cpu:
        yield
        return
    mx.fast.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = _STOCK
