"""The tiers that a cache can have below memory, by the settings that open them.

`PrefixCache(disk=...)` takes a path, which opens the disk tier, or an object of one of the types in `OPENERS`. A new
tier is one file, or folder, and one line here: see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import Tier, TierStats
from onefold.cache.tiers.disk.tier import DiskSettings, open_disk
from onefold.cache.tiers.identity import Identity
from onefold.cache.tiers.remote.tier import RemoteSettings, open_remote
from onefold.cache.tiers.stack import StackSettings, open_stack
from onefold.errors import ConfigError

Opener = Callable[[Any, CacheState, Identity], Tier | TierStats]
"""Opens a tier for a cache. Returns its statistics, with `failed`, if it cannot be used: the cache then runs without.
Raises ConfigError if its settings are wrong."""

OPENERS: dict[type, Opener] = {
    DiskSettings: open_disk,
    RemoteSettings: open_remote,
    StackSettings: open_stack,
}


def is_known(settings: object) -> bool:
    """Whether an object is the settings of a tier."""
    return _opener(settings) is not None


def open_tier(settings: object, state: CacheState, identity: Identity) -> Tier | TierStats:
    """Open the tier of these settings. Returns its statistics, with `failed`, if it cannot be used. Raises ConfigError,
    also for settings of no tier."""
    opener = _opener(settings)
    if opener is None:
        raise ConfigError(f"disk must be a path or the settings of a tier, got {type(settings).__name__}")
    return opener(settings, state, identity)


def _opener(settings: object) -> Opener | None:
    """Returns the opener for the settings' class, or for the nearest class that it is derived from."""
    return next((OPENERS[cls] for cls in type(settings).__mro__ if cls in OPENERS), None)
