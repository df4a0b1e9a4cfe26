"""What the machine has: memory, weights, and MLX's own buffer pool."""

from __future__ import annotations

import os

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

POOL_SHARE = 16
POOL_MOST = 1 << 30


def memory_bytes() -> int:
    """What a process may use of the device: the recommended working set if there is one, else its memory."""
    if mx.metal.is_available() or _cuda():
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if info.get(key):
                return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cuda() -> bool:
    return bool(hasattr(mx, "cuda") and mx.cuda.is_available())


def weight_bytes(*models: nn.Module | None) -> int:
    return sum(p.nbytes for m in models if m is not None for p in dict(tree_flatten(m.parameters())).values())


def default_budget(*models: nn.Module | None) -> int:
    """Four fifths of the device's memory, less the weights."""
    return max(1 << 20, memory_bytes() * 4 // 5 - weight_bytes(*models))


def limit_pool(budget_bytes: int) -> tuple[int, int]:
    """Bound the buffers that MLX keeps for reuse; returns the bound and what it was before."""
    bound = min(POOL_MOST, budget_bytes // POOL_SHARE)
    return bound, mx.set_cache_limit(bound)


def restore_pool(before: int) -> None:
    mx.set_cache_limit(before)
