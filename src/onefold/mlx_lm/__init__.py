"""The drop-in for mlx-lm's server: its `LRUPromptCache`, on one `PrefixCache`."""

from __future__ import annotations

from onefold.mlx_lm.prompt_cache import DEVICE_LIMIT, UNLIMITED, LRUPromptCache, install, serve

__all__ = ["DEVICE_LIMIT", "UNLIMITED", "LRUPromptCache", "install", "serve"]
