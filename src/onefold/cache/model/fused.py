"""Which shapes of attention MLX computes without storing their scores, on each backend.

`benchmarks/fused.py` measures it. A shape that counts as unfused and is fused costs memory that is reserved and not
used, and shorter chunks; the reverse costs memory that was not reserved.
"""

from __future__ import annotations

from onefold.cache.memory import device
from onefold.cache.model import metal

FEW_QUERIES = 16
"""Scores of so many queries are always reserved: kernels for few queries keep partial results of about that size."""
_CUDA_LARGEST = 128
"""The largest head that CUDA fuses; queries and values must have the same size. Measured with MLX 0.32.4 on an H200."""


def is_fused(n_queries: int, query_dim: int, value_dim: int, queries_per_key_head: int = 1) -> bool:
    """Whether MLX's attention stores no scores for this shape on the default device."""
    if not device.on_gpu():
        return False
    if device.on_metal():
        return metal.fuses(n_queries, query_dim, value_dim, queries_per_key_head)
    return query_dim == value_dim <= _CUDA_LARGEST
