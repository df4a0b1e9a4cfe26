"""The settings of a cache: every keyword of `PrefixCache`, checked."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import Any, TypedDict

import mlx.nn as nn

from onefold.cache.model.formats.registry import KvFormat
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.tiers.disk.tier import DiskSettings
from onefold.cache.tiers.registry import is_known
from onefold.cache.tiers.remote.tier import RemoteSettings
from onefold.cache.tiers.stack import StackSettings
from onefold.errors import ConfigError
from onefold.options import from_options, positional, signature


class CacheOptions(TypedDict, total=False):
    """The keywords of `PrefixCache`; see `CacheConfig`."""

    draft_model: nn.Module | None
    kv: str | int
    max_kv_size: int | None
    keep: int
    adapter: str
    min_checkpoint_tokens: int
    high_water: float
    low_water: float
    elastic: bool
    logit_tokens: int | None
    disk: str | os.PathLike[str] | DiskSettings | None
    disk_budget: int | float | str | None
    disk_mode: str
    disk_daily_limit: int | float | str | None
    remote: str | RemoteSettings | None
    tokenizer: str
    label: str


@dataclass(frozen=True)
class CacheConfig:
    """The settings of a cache. Raises ConfigError for an invalid value."""

    draft_model: nn.Module | None = None
    """Leased together with the target, for speculative decoding."""
    kv: str | int = "16"
    """How KV is stored: "16" (as the model makes it), or a format of docs/kv-formats.md: "8", "k8v4", "4", "affine4",
    "turbo4", "turbo3"."""
    max_kv_size: int | None = None
    """The most tokens of a conversation that are kept, in every cache that grows; 0 or None is no bound."""
    keep: int = 4
    """How many of its first tokens a bounded conversation always keeps."""
    adapter: str = ""
    """The name of an adapter that does not show in the model's weights: its KV is not shared with others."""
    min_checkpoint_tokens: int = 64
    """A recurrent model takes no checkpoint with fewer tokens since the last one."""
    high_water: float = 1.0
    """A fraction of the budget: if more is used when a request ends, reclaiming begins. With 1, nothing is evicted
    before its bytes are needed."""
    low_water: float = 0.90
    """A fraction of the budget: reclaiming that began above `high_water` ends when no more is used."""
    elastic: bool = False
    """For servers that can neither wait nor refuse: the budget is for KV alone, and nothing is refused."""
    logit_tokens: int | None = None
    """The caller's promise that the logits of a forward with more tokens are never evaluated: no scratch is reserved
    for them."""
    disk: str | os.PathLike[str] | DiskSettings | None = None
    """A folder where conversations survive a restart; "auto" is the system's cache folder, and "./auto" a folder of
    that name. Without it nothing is written to disk."""
    disk_budget: int | float | str | None = None
    disk_mode: str = "back"
    """When dirty data is written: "back", on eviction and on close; "through", after each commit."""
    disk_daily_limit: int | float | str | None = None
    remote: str | RemoteSettings | None = None
    """The URL of a store that several machines share, redis:// or s3:// for example, or its settings. It lies below
    memory and the disk."""
    tokenizer: str = ""
    """A digest of the tokenizer. Conversations on disk are not shared between tokenizers."""
    label: str = ""
    """The model's name, for people who look at the folder."""

    def __post_init__(self) -> None:
        if not 0 < self.low_water <= self.high_water <= 1:
            raise ConfigError(f"water marks must be 0 < low <= high <= 1, got {self.low_water} and {self.high_water}")
        settings = self.disk_budget is not None or self.disk_daily_limit is not None or self.disk_mode != "back"
        if self.disk is None and settings:
            raise ConfigError("disk_budget, disk_mode and disk_daily_limit require a folder: give disk=")

    @classmethod
    def of(cls, options: CacheOptions) -> CacheConfig:
        """Checks the keywords of `PrefixCache`. Raises TypeError for an unknown one, ConfigError for an invalid
        value."""
        return from_options(cls, "PrefixCache", options)

    @classmethod
    def signature(cls) -> inspect.Signature:
        """Returns the signature of `PrefixCache`, with every keyword and its default, for `help` and for editors."""
        first = [positional("model", "nn.Module"), positional("budget", "int | float | str | None", None)]
        return signature(cls, first)

    def models(self, target: Any) -> list[nn.Module]:
        """Returns the target and the draft, if there is one. Raises ConfigError if one is not a model."""
        for given in (target, self.draft_model):
            if not isinstance(given, nn.Module) and (given is target or given is not None):
                name = type(given).__name__
                raise ConfigError(f"a model is an mlx module (load() returns it with a tokenizer), not {name}")
        return [m for m in (target, self.draft_model) if m is not None]

    def format(self) -> KvFormat:
        return KvFormat.parse(self.kv)

    def bound(self) -> Bound | None:
        max_kv_size, keep = self.max_kv_size, self.keep
        if not max_kv_size:
            return None
        if not isinstance(max_kv_size, int) or not isinstance(keep, int):
            raise ConfigError(f"max_kv_size and keep are numbers of tokens, got {max_kv_size!r} and {keep!r}")
        if max_kv_size < 0:
            raise ConfigError(f"max_kv_size must not be negative, got {max_kv_size}; 0 or None switches it off")
        if keep < 0 or keep >= max_kv_size:
            raise ConfigError(f"keep must be from 0 to below max_kv_size, got keep={keep}, max_kv_size={max_kv_size}")
        return Bound(max_kv_size, keep)

    def tier_settings(self) -> object | None:
        """Returns the settings of the tier below memory; None if there is no tier. Raises ConfigError."""
        disk: object | None = self.disk
        if self.disk is not None and not isinstance(self.disk, DiskSettings) and not is_known(self.disk):
            disk = DiskSettings(self.disk, self.disk_budget, self.disk_mode, self.disk_daily_limit)
        if self.remote is None:
            return disk
        remote = RemoteSettings(self.remote) if isinstance(self.remote, str) else self.remote
        if not isinstance(remote, RemoteSettings):
            raise ConfigError(f"remote is the URL of a shared store or a RemoteSettings, not {type(remote).__name__}")
        if disk is None:
            return remote
        if not isinstance(disk, DiskSettings):
            raise ConfigError(f"remote can be combined with a folder, not with {type(disk).__name__}")
        return StackSettings(disk, remote)
