"""Which shapes of attention store no scores, measured: `python benchmarks/fused.py`.

Attention that is not fused stores its scores whole, and Onefold must reserve bytes for them. For each shape this runs
MLX's attention once and compares its peak of memory with the bytes of the scores.
"""

from __future__ import annotations

import itertools

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx

from onefold.cache.model.fused import is_fused

DIMS = ((64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128), (576, 512))
"""Of queries and keys, and of values."""
QUERIES = (17, 32, 256)
"""For fewer, scores are reserved in any case."""
GROUPS = (1, 4)
"""Query heads for each head of keys."""
KEY_HEADS, KEYS = 4, 8192


def stores_scores(n_queries: int, query_dim: int, value_dim: int, group: int) -> bool:
    """Whether the scores of one causal call in 16 bits are stored, by the peak of memory."""
    heads = group * KEY_HEADS
    q = mx.zeros((1, heads, n_queries, query_dim), mx.float16)
    k = mx.zeros((1, KEY_HEADS, KEYS, query_dim), mx.float16)
    v = mx.zeros((1, KEY_HEADS, KEYS, value_dim), mx.float16)
    mx.eval(q, k, v)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask="causal"))
    return mx.get_peak_memory() - before > heads * n_queries * KEYS  # half of the scores in 16 bits


def compare() -> tuple[list[tuple[str, str, str]], list[str]]:
    """Returns a row for each shape (the shape, measured, as reserved), and the shapes whose scores are stored without
    being reserved."""
    rows, wrong = [], []
    for (query_dim, value_dim), group, n_queries in itertools.product(DIMS, GROUPS, QUERIES):
        shape = f"{n_queries} queries of {query_dim}, values of {value_dim}, {group} heads a key head"
        stored = stores_scores(n_queries, query_dim, value_dim, group)
        reserved = not is_fused(n_queries, query_dim, value_dim, group)
        rows.append((shape, "stored" if stored else "fused", "stored" if reserved else "fused"))
        if stored and not reserved:
            wrong.append(shape)
    return rows, wrong


def main() -> int:
    rows, wrong = compare()
    width = max(len(shape) for shape, _, _ in rows)
    for shape, measured, reserved in rows:
        print(f"{shape:<{width}}  {measured:<7} {'' if measured == reserved else 'reserved as ' + reserved}")
    print(f"{mx.default_device()}: {len(wrong)} of {len(rows)} shapes store scores that are not reserved")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
