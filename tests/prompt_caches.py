"""The two prompt caches that take each other's place: mlx-lm's, and ours."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

MODULES = {"stock": "mlx_lm.models.cache", "onefold": "onefold.mlx_lm"}

AVAILABLE = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]


def prompt_cache_class(name: str) -> type[Any]:
    """`LRUPromptCache`, by whose it is."""
    return importlib.import_module(MODULES[name]).LRUPromptCache
