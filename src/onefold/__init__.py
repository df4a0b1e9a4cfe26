"""Onefold: every token's KV is held once."""

from __future__ import annotations

from onefold import blas as _blas

_blas.preload()

from onefold.cache.batch import Batch
from onefold.cache.lease import Lease
from onefold.cache.prefix_cache import Pin, PrefixCache, Stats
from onefold.errors import (
    BudgetError,
    CommitError,
    ConfigError,
    IntegrityError,
    LeaseClosed,
    LeaseError,
    OnefoldError,
    TokenError,
    WrongThread,
)

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BudgetError",
    "CommitError",
    "ConfigError",
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
]
