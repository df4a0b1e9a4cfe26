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


def on_gpu() -> bool:
    """Whether MLX computes on a GPU here and now."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def on_cuda() -> bool:
    """Whether MLX computes in a memory of the GPU's own here and now."""
    return on_gpu() and _cuda()


def _cuda() -> bool:
    return bool(hasattr(mx, "cuda") and mx.cuda.is_available())


def weight_bytes(*models: nn.Module | None) -> int:
    return sum(p.nbytes for m in models if m is not None for p in dict(tree_flatten(m.parameters())).values())


def default_budget(*models: nn.Module | None) -> int:
    """Four fifths of the device's memory, less the weights."""
    return max(1 << 20, memory_bytes() * 4 // 5 - weight_bytes(*models))


def pool_bytes(budget_bytes: int) -> int:
    """The share of a budget that is left to MLX's pool."""
    return min(POOL_MOST, budget_bytes // POOL_SHARE)


def limit_pool(budget_bytes: int) -> int:
    """Bound the buffers that MLX keeps for reuse; returns what the bound was before."""
    return mx.set_cache_limit(pool_bytes(budget_bytes))


def restore_pool(before: int) -> None:
    mx.set_cache_limit(before)
