"""The device: its memory, the bytes of the weights, and MLX's own buffer pool."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from onefold.cache.memory.ledger import Ledger, Purpose
from onefold.errors import DeviceError
from onefold.machine import Reading, total_bytes
from onefold.machine import gauge as machine_gauge
from onefold.sizes import show_size

METAL_PAGE = 16 << 10
_OF_ONE = (
    "unable to allocate",
    "out of memory",
    "[malloc]",
    "::malloc]",
    "maximum allowed buffer size",
    "cannot allocate",
    "in current thread",
)
"""Messages of MLX about one allocation, or about arrays that only another thread can compute."""
_OF_COMMANDS = re.compile(r"\[metal|command buffer|cuda|cudnn|cublas|\bcu[a-z]\w+\(", re.IGNORECASE)
"""Messages of MLX about commands that failed, on Metal and on CUDA."""
POOL_SHARE = 16
POOL_MOST = 1 << 30
POOL_LEAST_ON_METAL = 256 << 20
"""A new buffer is expensive on Metal: a smaller pool makes some in every forward."""


WITHOUT_BFLOAT16 = {"applegpu_g13": "Apple M1", "applegpu_g14": "Apple M2"}
"""Apple GPUs without arithmetic in bf16, by the beginnings of MLX's `architecture` and `device_name`: Metal emulates it
there, which costs time. M3 (g15) and later have it, and all of them have fp16."""


def memory_bytes() -> int:
    """Returns how many bytes of the device this process may use: the recommended working set if there is one; all its
    memory if not; and no more than a control group allows where that is the machine's own memory."""
    if mx.metal.is_available() or _cuda():
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if info.get(key):
                return int(info[key])
    return total_bytes()


def on_gpu() -> bool:
    """Whether MLX's default device is a GPU."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def on_metal() -> bool:
    """Whether MLX's default device is an Apple GPU."""
    return on_gpu() and bool(mx.metal.is_available())


def on_cuda() -> bool:
    """Whether MLX's default device is a GPU with separate memory (CUDA)."""
    return on_gpu() and _cuda()


def emulates_bfloat16() -> bool:
    """Whether MLX's default device is a GPU on which bf16 is emulated, and fp16 is not."""
    if not on_metal():
        return False
    info = mx.device_info()
    known = str(info.get("architecture") or "")
    if known:
        return known.startswith(tuple(WITHOUT_BFLOAT16))
    name = str(info.get("device_name") or "")
    return any(name == chip or name.startswith(f"{chip} ") for chip in WITHOUT_BFLOAT16.values())


def _cuda() -> bool:
    return bool(hasattr(mx, "cuda") and mx.cuda.is_available())


def page_bytes() -> int:
    """Returns what a buffer of the device is rounded up to; 0 if that does not matter."""
    return METAL_PAGE if on_metal() else 0


def buffer_limit() -> int | None:
    """Returns how many buffers MLX makes at most: one more is an error in the middle of an evaluation. None if there is
    no limit."""
    limit = mx.device_info().get("resource_limit") if on_metal() else None
    return int(limit) if limit else None


_failed: list[str] = []
"""Failures of the device that may have spoilt the work of every request that was running, in the order they came."""
_pool_lock = threading.Lock()
"""Held by calls of MLX that wait for its CPU streams with Python's own lock held, and by loads that need that lock."""


def failures() -> int:
    """Returns how many commands of the device have failed, as far as that is known. What was being computed when the
    number rose cannot be trusted, in any cache of this process."""
    return len(_failed)


def last_failure() -> str:
    """Returns the message of the last failure; empty if there was none."""
    return _failed[-1] if _failed else ""


def note_failure(error: BaseException) -> None:
    """Count a failure, unless the error concerns the work alone whose evaluation raised it."""
    if isinstance(error, RuntimeError | DeviceError) and not names_its_cause(error):
        _failed.append(str(error))


def note_raised(error: BaseException) -> None:
    """Count a failure that a caller's own code raised. Such code may raise a RuntimeError for any reason: so it counts
    only if MLX says that a command failed."""
    if _OF_COMMANDS.search(str(error)):
        note_failure(error)


def evaluate(*arrays: Any) -> None:
    """Compute arrays, and wait for them. A failure of the device is counted before it is raised: MLX reports it once,
    to any caller."""
    try:
        mx.eval(*arrays)
    except RuntimeError as error:
        note_failure(error)
        raise


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """For loads from Python files: meanwhile no thread waits for them inside MLX with Python's own lock held."""
    with _pool_lock:
        yield


def clear_pool() -> None:
    """Free all buffers that MLX keeps for reuse."""
    with _pool_lock:
        mx.clear_cache()


def require_clean() -> None:
    """Wait for the device. Raises RuntimeError if a command failed of which no caller has been told yet: MLX reports a
    failed command of a GPU once, to the thread that encodes the next one, whatever that is for. So this encodes one."""
    mx.synchronize()
    evaluate([mx.zeros((1,)) + 1] if on_gpu() else [])


def names_its_cause(error: BaseException) -> bool:
    """Whether an error of MLX concerns only the arrays whose evaluation raised it: memory could not be allocated for
    them, or only another thread can compute them. Any other RuntimeError may be due to a command of another request;
    one of a derived class is not MLX's."""
    if type(error) not in (RuntimeError, DeviceError):
        return not isinstance(error, DeviceError)
    text = str(error).lower()
    return any(sign in text for sign in _OF_ONE)


def weight_bytes(*models: nn.Module | None) -> int:
    return sum(p.nbytes for m in models if m is not None for p in dict(tree_flatten(m.parameters())).values())


def gauge() -> Callable[[], Reading] | None:
    """Returns the function that reads whether the memory that KV lies in is short. None if nothing is known: a GPU with
    memory of its own does not say."""
    return None if on_cuda() else machine_gauge()


def default_budget(*models: nn.Module | None) -> int:
    """Returns four fifths of the device's memory, less the weights."""
    return max(1 << 20, memory_bytes() * 4 // 5 - weight_bytes(*models))


def way_out(weights: int, budget_bytes: int) -> str:
    """Returns what a user can do whose weights leave less than `budget_bytes` of the device, as sentences."""
    total = memory_bytes()
    taken = f"The weights take {show_size(weights)} of the {show_size(total)} that"
    smaller = "Use a smaller model, or one"
    if not on_metal():
        return f"{taken} this machine gives to programs. {smaller} with weights of fewer bits, or give a budget"
    wanted = -(-(weights + budget_bytes) * 5 // 4 // 1_000_000)
    return (
        f"{taken} macOS gives to the GPU. {smaller} with weights of fewer bits; or raise the limit (until the next "
        f"start): sudo sysctl iogpu.wired_limit_mb={wanted}; or give a budget, such as --budget "
        f"{max(1, budget_bytes // 500_000_000)}GB"
    )


def pool_bytes(budget_bytes: int) -> int:
    """Returns the share of a budget that is reserved for MLX's pool; on Metal up to a quarter of a small budget."""
    share = min(POOL_MOST, budget_bytes // POOL_SHARE)
    return max(share, min(POOL_LEAST_ON_METAL, budget_bytes // 4)) if on_metal() else share


class Pool:
    """Limits the buffers that MLX keeps for reuse to a share of the budget, and reserves that share in the ledger.

    The share shrinks where a reservation would be refused otherwise, and grows again from free bytes. The limit applies
    to the whole process until `close`.
    """

    def __init__(self, ledger: Ledger, share_bytes: int) -> None:
        self._ledger = ledger
        self._share = share_bytes
        self._account = ledger.open(Purpose.POOL, share_bytes)
        with _pool_lock:
            self._before = mx.set_cache_limit(share_bytes)
        if not ledger.elastic:  # an elastic ledger does not count it
            ledger.spare = lambda: self.bytes
            ledger.give_way = self.give_way

    @property
    def bytes(self) -> int:
        return self._account.bytes

    def give_way(self, n_bytes: int) -> None:
        """Shrink the pool by `n_bytes`, or to nothing."""
        self._set(max(0, self.bytes - n_bytes))

    def refill(self) -> None:
        """Grow to the whole share again, as far as bytes are free. Does nothing after `close`."""
        if self._account.closed:
            return
        free = self._ledger.free_bytes - self._ledger.headroom()
        if self.bytes < self._share and free > 0:
            self._set(min(self._share, self.bytes + free))

    def set_share(self, share_bytes: int) -> None:
        """Change the share. A smaller one applies at once, a larger one as far as bytes are free."""
        self._share = share_bytes
        if self.bytes > share_bytes:
            self._set(share_bytes)
        self.refill()

    def close(self) -> None:
        """Restore the process's former limit. May be called again."""
        if not self._account.closed:
            self._account.close()
            with _pool_lock:
                mx.set_cache_limit(self._before)

    def _set(self, n_bytes: int) -> None:
        self._account.resize(n_bytes)
        with _pool_lock:
            mx.set_cache_limit(n_bytes)
            if mx.get_cache_memory() > n_bytes:
                mx.clear_cache()
