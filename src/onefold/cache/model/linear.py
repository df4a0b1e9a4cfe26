"""Computes the linear layers of a forward of few rows on CUDA in less time than MLX does.

- Quantised layers: MLX computes an input of shape [rows, 1, dims] row by row: eight rows take six times as long as
  [1, rows, dims] does, and that takes no longer than one row. So rows are folded into one matrix. This gains nothing
  for fewer than eight rows; with affine weights of 4 and 8 bits they are padded to eight, which are faster
  (`benchmarks/gpu_quantised.py`).
- Others: a kernel of our own multiplies up to 32 rows. It costs the host less than cuBLAS does (`kernels.product`).

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
LENGTHS = range(product.MOST_ROWS + 1, 513)
"""Chunks beside streams are seldom longer, and cuBLAS has few kernels for longer ones."""
QUANTISED_LENGTHS = (16, 32, 64, 128, 256)
"""The last one of each range for which MLX has a kernel of quantised weights."""
MOST_WARMED_BYTES = 16 << 20
"""Of a product that is computed to warm the device."""

_Method = Callable[[Any, mx.array], mx.array]
_installed: dict[tuple[type[nn.Module], str], tuple[_Method, _Method]] = {}
"""The original methods, and those in their places."""
_count = 0


class _Forward(threading.local):
    """The forward that this thread is running."""

    products: frozenset[tuple[mx.Dtype, bool]] | None = None
    """For which products there is a kernel; None outside of a forward."""


_forward = _Forward()


@contextlib.contextmanager
def in_forward() -> Iterator[None]:
    """While it is entered, layers of this thread may be computed here."""
    before = _forward.products
    _forward.products = current.products() if _count else frozenset()
    try:
        yield
    finally:
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


def warm(model: nn.Module) -> None:
    """Run this model's linear layers once for every length of a prompt's chunk, unless MLX computes elsewhere. cuBLAS
    has another kernel for every few lengths, and takes 4 to 5 ms to load each; MLX compiles one for each of five ranges
    of lengths if weights are quantised, which takes up to 20 s on a machine that has none of them."""
    if not device.on_cuda():
        return
    layers = [layer for _, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.QuantizedLinear)]
    for layer in {_kind(layer): layer for layer in layers}.values():
        dims, dtype = _input_of(layer)
        for n in QUANTISED_LENGTHS if "scales" in layer else LENGTHS:
            if n * len(layer["weight"]) * dtype.size > MOST_WARMED_BYTES:
                break  # a head, whose logits are computed for short prompts only
            device.evaluate(layer(mx.zeros((1, n, dims), dtype)))


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Returns what a kernel for this layer depends on."""
    numbers = [getattr(layer, name, None) for name in ("group_size", "bits", "mode")]
    return layer["weight"].shape, layer["weight"].dtype, "bias" in layer, _input_of(layer), *numbers


def _input_of(layer: nn.Module) -> tuple[int, mx.Dtype]:
    """Returns the dimensions and the type of what this layer multiplies."""
    if "scales" not in layer:
        return layer["weight"].shape[1], layer["weight"].dtype
    scales = layer["scales"]
    floats = mx.issubdtype(scales.dtype, mx.floating)
    return scales.shape[1] * layer.group_size, scales.dtype if floats else mx.bfloat16


def _folded(original: _Method) -> _Method:
    @functools.wraps(original)
    def call(self: Any, x: mx.array) -> mx.array:
        if _forward.products is None or x.ndim != 3 or x.shape[1] != 1 or x.shape[0] == 1:
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
        if _forward.products:
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
