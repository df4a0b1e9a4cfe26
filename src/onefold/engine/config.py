"""The settings of an engine: every keyword of `Engine`, checked."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypedDict

import mlx.nn as nn

from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.tiers.disk.tier import DiskSettings
from onefold.cache.tiers.remote.tier import RemoteSettings
from onefold.engine.limits import Limits
from onefold.engine.prefill import SHORT_REST
from onefold.engine.request import Sampling
from onefold.engine.tokenising import tokenizer_digest
from onefold.options import from_options, positional, signature


class EngineOptions(TypedDict, total=False):
    """The keywords of `Engine`, which `EngineConfig` explains."""

    model_id: str
    budget: int | float | str | None
    kv: str | int
    max_kv_size: int | None
    keep: int
    defaults: Sampling | None
    max_queue: int
    limits: Limits | None
    disk: DiskSettings | None
    remote: str | RemoteSettings | None
    ignore_context_length: bool
    warm: bool | None


@dataclass(frozen=True)
class EngineConfig:
    model_id: str = "local"
    """The model's name, for clients and for people who look at the cache folder."""
    budget: int | float | str | None = None
    """Memory for KV and forwards, as a size or a share of the device's memory. None or "auto": what the weights leave
    of four fifths of it, and less while the machine's memory is short."""
    kv: str | int = "16"
    """How KV is stored: "16" (as the model makes it), or a format of docs/kv-formats.md: "8", "k8v4", "4", "affine4",
    "turbo4", "turbo3"."""
    max_kv_size: int | None = None
    """The most tokens of a conversation that stay, in every cache that grows; 0 or None is no bound."""
    keep: int = 4
    """How many of the first tokens always stay, as a part of that bound."""
    defaults: Sampling | None = None
    """How tokens are chosen if a request does not say."""
    max_queue: int = 128
    """Requests that may wait; one more is refused with Busy."""
    limits: Limits | None = None
    """The limits of the scheduler; None is `Limits()`."""
    disk: DiskSettings | None = None
    """The folder where conversations survive a restart. Without it nothing is ever written."""
    remote: str | RemoteSettings | None = None
    """The URL of a store that several machines share, or its settings."""
    ignore_context_length: bool = False
    """Prompts and answers may be longer than the model was made for."""
    warm: bool | None = None
    """Whether the engine runs a few short requests of its own before it is ready, because the first use of a kernel
    takes long; None: on a GPU."""

    @classmethod
    def of(cls, options: EngineOptions) -> EngineConfig:
        """Checks the keywords that `Engine` was given. Raises TypeError for one that it does not have."""
        return from_options(cls, "Engine", options)

    @classmethod
    def signature(cls) -> inspect.Signature:
        """Returns the signature of `Engine`, with every keyword and its default, for `help` and for editors."""
        return signature(cls, [positional("model", "nn.Module"), positional("tokenizer", "Any")])

    def cache(self, model: nn.Module, tokenizer: Any) -> PrefixCache:
        """Makes the engine's cache. Raises ConfigError."""
        return PrefixCache(
            model,
            self.budget,
            kv=self.kv,
            max_kv_size=self.max_kv_size,
            keep=self.keep,
            logit_tokens=SHORT_REST,
            disk=self.disk,
            remote=self.remote,
            tokenizer="" if self.disk is None and self.remote is None else tokenizer_digest(tokenizer),
            label=self.model_id,
        )
