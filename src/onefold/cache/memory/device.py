"""What the machine has: memory, weights, and MLX's own buffer pool."""

from __future__ import annotations

import os

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from onefold.cache.memory.ledger import Ledger, Purpose

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


class Pool:
    """The buffers that MLX keeps for reuse: bounded by their share of a budget, and the bound is counted.

    The share gives way where a reservation would be refused otherwise, and comes back out of free bytes. The bound is
    the process's, from here to `close`.
    """

    def __init__(self, ledger: Ledger, share_bytes: int) -> None:
        self._ledger = ledger
        self._share = share_bytes
        self._account = ledger.open(Purpose.POOL, share_bytes)
        self._before = mx.set_cache_limit(share_bytes)
        if not ledger.elastic:  # an elastic ledger does not count it
            ledger.spare = lambda: self.bytes
            ledger.give_way = self.give_way

    @property
    def bytes(self) -> int:
        return self._account.bytes

    def give_way(self, n_bytes: int) -> None:
        """Have so many bytes less, or none."""
        self._set(max(0, self.bytes - n_bytes))

    def refill(self) -> None:
        """Have the whole share again, as far as bytes are free. Nothing once it is closed."""
        if self._account.closed:
            return
        free = self._ledger.free_bytes - self._ledger.headroom()
        if self.bytes < self._share and free > 0:
            self._set(min(self._share, self.bytes + free))

    def set_share(self, share_bytes: int) -> None:
        """Have another share: at once if that is less, else as far as bytes are free."""
        self._share = share_bytes
        if self.bytes > share_bytes:
            self._set(share_bytes)
        self.refill()

    def close(self) -> None:
        """Give the bound back to the process. May be called again."""
        if not self._account.closed:
            self._account.close()
            mx.set_cache_limit(self._before)

    def _set(self, n_bytes: int) -> None:
        self._account.resize(n_bytes)
        mx.set_cache_limit(n_bytes)
        if mx.get_cache_memory() > n_bytes:
            mx.clear_cache()
