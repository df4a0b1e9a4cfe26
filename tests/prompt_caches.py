"""The prompt caches that take each other's place behind mlx-lm's server: mlx-lm's, ours, and one that forgets."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

MODULES = {"stock": "mlx_lm.models.cache", "onefold": "onefold.mlx_lm"}
CHOICES = [*MODULES, "none"]

AVAILABLE = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]


class Forgetful:
    """A prompt cache that never has anything: what its answers are is what all answers have to be."""

    nbytes = 0

    def __len__(self) -> int:
        return 0

    def fetch_nearest_cache(self, model_key: object, tokens: list[int]) -> tuple[None, list[int]]:
        return None, tokens

    def insert_cache(self, *_: object, **__: object) -> None:
        pass

    def trim_to(self, **_: object) -> None:
        pass

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        return {}


def prompt_cache_class(name: str) -> type[Any]:
    """`LRUPromptCache`, by whose it is."""
    return Forgetful if name == "none" else importlib.import_module(MODULES[name]).LRUPromptCache
