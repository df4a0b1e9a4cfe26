"""Folds the rows of a decode step into one matrix at quantised layers, on CUDA.

MLX's `quantized_matmul` computes an input of shape [rows, 1, dims] there row by row: eight rows take six times as long
as [1, rows, dims] does, and that takes no longer than one row. Below eight rows both take the same time, and nothing is
folded. `benchmarks/gpu_quantised.py` measures it.

The methods of MLX's quantised layers are replaced while a cache of a quantised model is open on CUDA. Counted like
`seam.install`; the last one puts the original methods back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from onefold.cache.memory import device

LEAST_ROWS = 8
"""From so many rows on MLX computes a matrix as a whole."""

_PLACES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.QuantizedLinear, "__call__"),
    (nn.QuantizedEmbedding, "as_linear"),
)
_installed: dict[tuple[type[nn.Module], str], Any] = {}
_count = 0


def install(models: Iterable[nn.Module]) -> bool:
    """Fold rows at quantised layers, if one of these models has any and MLX computes on CUDA. Returns whether it does,
    for `uninstall`."""
    global _count
    if not device.on_cuda() or not any(_is_quantised(model) for model in models):
        return False
    _count += 1
    if _count == 1:
        for cls, name in _PLACES:
            original = getattr(cls, name)
            _installed[cls, name] = original
            setattr(cls, name, _folded(original))
    return True


def uninstall(installed: bool) -> None:
    global _count
    if installed:
        _count -= 1
        if _count == 0:
            for (cls, name), original in _installed.items():
                setattr(cls, name, original)
            _installed.clear()


def _is_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, tuple(cls for cls, _ in _PLACES)) for _, module in model.named_modules())


def _folded(original: Callable[[Any, mx.array], mx.array]) -> Callable[[Any, mx.array], mx.array]:
    @functools.wraps(original)
    def call(self: Any, x: mx.array) -> mx.array:
        if x.ndim != 3 or x.shape[1] != 1 or x.shape[0] < LEAST_ROWS:
            return original(self, x)
        return original(self, x.reshape(1, x.shape[0], x.shape[2])).reshape(x.shape[0], 1, -1)

    return call
