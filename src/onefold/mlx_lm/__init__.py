"""The drop-in for mlx-lm's server: its `LRUPromptCache`, on one `PrefixCache` for each model."""

from __future__ import annotations

from onefold.mlx_lm.installing import install, serve
from onefold.mlx_lm.limits import DEVICE_LIMIT, UNLIMITED
from onefold.mlx_lm.prompt_cache import LRUPromptCache

__all__ = ["DEVICE_LIMIT", "UNLIMITED", "LRUPromptCache", "install", "serve"]
