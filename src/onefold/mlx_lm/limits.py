"""The limits of a prompt cache, and the format of its KV: how they are written, and what they are in numbers. Knows
nothing of models."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.cache.memory import device
from onefold.cache.model.formats.registry import KvFormat
from onefold.errors import ConfigError
from onefold.sizes import parse_size

UNLIMITED = 1 << 63
DEVICE_LIMIT = "95%"
"""The share of the device's memory for weights and KV; the rest is for activations."""


@dataclass
class Limits:
    """The limits of one prompt cache, which its parts share."""

    max_size: int
    """Entries."""
    max_bytes: int
    """The most bytes of all KV, that of running requests included."""
    max_kv_size: int | None
    """Tokens that a conversation's layers hold at most; None is no bound."""
    keep: int
    """How many of the first tokens always stay, as a part of that bound."""
    kv: str = "16"
    """The format of stored KV."""

    @classmethod
    def of(
        cls,
        max_size: int,
        max_bytes: int | float | str | None,
        max_kv_size: int | None,
        keep: int,
        kv: str | int = "16",
    ) -> Limits:
        """Parses what `LRUPromptCache` was given. Raises ConfigError for a value that it cannot use."""
        if not isinstance(max_size, int):
            raise ConfigError(f"max_size is a number of entries, got {max_size!r}")
        bound = max_kv_size or None
        _check_bound(bound, keep)
        return cls(max(0, max_size), _byte_limit(max_bytes), bound, keep, str(KvFormat.parse(kv)))


def device_bytes(limit: int | float | str | None) -> int | None:
    """Returns a size or a share of the device's memory in bytes, or None for no limit. Raises ConfigError."""
    return None if limit is None else parse_size(limit, total_bytes=device.memory_bytes())


def _byte_limit(limit: int | float | str | None) -> int:
    if limit is None:
        return UNLIMITED
    if isinstance(limit, str):
        return parse_size(limit, total_bytes=device.memory_bytes())
    if not isinstance(limit, (int, float)) or limit != limit:
        raise ConfigError(f"max_bytes is a number of bytes or a size such as '8GB', got {limit!r}")
    return int(max(0, min(limit, UNLIMITED)))


def _check_bound(max_kv_size: int | None, keep: int) -> None:
    if max_kv_size is None:
        return
    if not isinstance(max_kv_size, int) or not isinstance(keep, int) or not 0 <= keep < max_kv_size:
        raise ConfigError(f"keep must be from 0 to below max_kv_size, got keep={keep!r}, max_kv_size={max_kv_size!r}")
