"""Onefold: every token's KV is held once."""

from __future__ import annotations

from onefold import blas as _blas

_blas.preload()

from onefold.cache.batch import Batch  # noqa: E402
from onefold.cache.lease import Lease  # noqa: E402
from onefold.cache.prefix_cache import Pin, PrefixCache, Stats  # noqa: E402
from onefold.engine.loading import load  # noqa: E402
from onefold.errors import (  # noqa: E402
    BudgetError,
    CommitError,
    ConfigError,
    DeviceError,
    IntegrityError,
    LeaseClosed,
    LeaseError,
    OnefoldError,
    TokenError,
    WrongThread,
)

__version__ = "0.3.0"

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
    "OnefoldError",
    "Pin",
    "PrefixCache",
    "Stats",
    "TokenError",
    "WrongThread",
    "load",
]
