"""Onefold: every token's KV is held once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onefold import backend as _backend
from onefold import blas as _blas
from onefold import cuda as _cuda

_backend.check()
_blas.preload()
_cuda.allow_many_shapes()

if TYPE_CHECKING:
    from onefold.cache.prefix_cache import Pin, PrefixCache
    from onefold.cache.request.batch import Batch
    from onefold.cache.request.lease import Lease
    from onefold.cache.stats import Stats
    from onefold.engine.loading import load
    from onefold.errors import (
        BudgetError,
        CommitError,
        ConfigError,
        DeviceError,
        IntegrityError,
        LeaseClosed,
        LeaseError,
        NoBackend,
        OnefoldError,
        TokenError,
        WrongThread,
    )
    from onefold.generation import async_stream_generate, generate, stream_generate

__version__ = "0.7.0.dev0"

_WHERE = {
    "Batch": "cache.request.batch",
    "Lease": "cache.request.lease",
    "Pin": "cache.prefix_cache",
    "PrefixCache": "cache.prefix_cache",
    "Stats": "cache.stats",
    "async_stream_generate": "generation",
    "generate": "generation",
    "load": "engine.loading",
    "stream_generate": "generation",
}
"""The others are exceptions."""


def __getattr__(name: str) -> Any:
    """Names are looked up when they are used: mlx-lm takes seconds to import, and a command's help does not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'onefold' has no attribute {name!r}")
    if name in _WHERE:
        _backend.require()
    found = getattr(importlib.import_module(f"onefold.{_WHERE.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Batch",
    "BudgetError",
    "CommitError",
    "ConfigError",
    "DeviceError",
    "IntegrityError",
    "Lease",
    "LeaseClosed",
    "LeaseError",
    "NoBackend",
    "OnefoldError",
    "Pin",
    "PrefixCache",
    "Stats",
    "TokenError",
    "WrongThread",
    "async_stream_generate",
    "generate",
    "load",
    "stream_generate",
]
