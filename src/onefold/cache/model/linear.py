"""Computes the linear layers of a forward of few rows on CUDA in less time than MLX does.

- Quantised layers: MLX computes an input of shape [rows, 1, dims] row by row: eight rows take six times as long as
  [1, rows, dims] does, and that takes no longer than one row. So rows are folded into one matrix. Of 4 and 8 bits fewer
  than eight rows are padded to eight, which take a third to a half of the time (`benchmarks/gpu_quantised.py`).
- Others: up to 32 rows are multiplied by a kernel of our own, which costs the host less (`kernels.product`).

The methods of MLX's layers are replaced while a cache is open on CUDA, and act in the forwards that the seam watches
only: elsewhere, in training say, they call the original. Counted like `seam.install`; the last one puts the original
methods back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from onefold.cache.memory import device
from onefold.cache.model.kernels import current, product

WHOLE_ROWS = 8
"""From so many rows on MLX computes a quantised matrix as a whole."""
PADDED_BITS = (4, 8)

_Method = Callable[[Any, mx.array], mx.array]
_installed: dict[tuple[type[nn.Module], str], tuple[_Method, _Method]] = {}
"""The original methods, and those in their places."""
_count = 0


class _Forward(threading.local):
    """The forwards that this thread is running."""

    depth = 0
    products: frozenset[tuple[mx.Dtype, bool]] = frozenset()
    """For which products there is a kernel; none outside of a forward."""


_forward = _Forward()


@contextlib.contextmanager
def in_forward() -> Iterator[None]:
    """While it is entered, layers of this thread may be computed here."""
    before = _forward.products
    _forward.products = current.products() if _count else before
    _forward.depth += 1
    try:
        yield
    finally:
        _forward.depth -= 1
        _forward.products = before


def install(models: Iterable[nn.Module]) -> bool:
    """Replace the methods, if MLX computes on CUDA. Returns whether it does, for `uninstall`."""
    global _count
    if not device.on_cuda() or not list(models):
        return False
    _count += 1
    if _count == 1:
        for cls, name, replaced in _PLACES:
            original = getattr(cls, name)
            _installed[cls, name] = original, replaced(original)
            setattr(cls, name, _installed[cls, name][1])
    return True


def uninstall(installed: bool) -> None:
    global _count
    if installed:
        _count -= 1
        if _count == 0:
            for (cls, name), (original, ours) in _installed.items():
                if getattr(cls, name) is ours:  # not what somebody else has put there
                    setattr(cls, name, original)
            _installed.clear()


def compile_kernels(model: nn.Module) -> None:
    """Try and compile the kernel for this model's linear layers, unless that is done, or MLX computes elsewhere."""
    if not device.on_cuda():
        return
    layers = [module for _, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    for dtype, biased in {(layer["weight"].dtype, "bias" in layer) for layer in layers if "weight" in layer}:
        current.compile_products(dtype, biased)


def _folded(original: _Method) -> _Method:
    @functools.wraps(original)
    def call(self: Any, x: mx.array) -> mx.array:
        if not _forward.depth or x.ndim != 3 or x.shape[1] != 1 or x.shape[0] == 1:
            return original(self, x)
        rows, _, dims = x.shape
        if rows >= WHOLE_ROWS:
            return original(self, x.reshape(1, rows, dims)).reshape(rows, 1, -1)
        if self.mode != "affine" or self.bits not in PADDED_BITS:
            return original(self, x)
        padded = mx.pad(x.reshape(1, rows, dims), [(0, 0), (0, WHOLE_ROWS - rows), (0, 0)])
        return original(self, padded)[:, :rows].reshape(rows, 1, -1)

    return call


def _multiplied(original: _Method, *, biased: bool) -> _Method:
    """`biased`: a layer that has a bias adds it."""

    @functools.wraps(original)
    def call(self: Any, x: mx.array) -> mx.array:
        weight, bias = self["weight"], self.get("bias") if biased else None
        if (x.dtype, bias is not None) in _forward.products and product.takes(x, weight, bias):
            return product.multiply(x, weight, bias)
        return original(self, x)

    return call


_PLACES: tuple[tuple[type[nn.Module], str, Callable[[_Method], _Method]], ...] = (
    (nn.QuantizedLinear, "__call__", _folded),
    (nn.QuantizedEmbedding, "as_linear", _folded),
    (nn.Linear, "__call__", functools.partial(_multiplied, biased=True)),
    (nn.Embedding, "as_linear", functools.partial(_multiplied, biased=False)),
)
