"""Keys and values as the model made them, and the bound of a bounded conversation."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.model.kernels.decode import Format


class Bound(NamedTuple):
    max_size: int
    keep: int


class PlainCodec:
    """Stores keys and values as the model made them."""

    plain = True
    kind = "full"
    kernel_format: Format | None = Format("plain", 1)

    def spec(self, k: ArraySpec, v: ArraySpec) -> LayerSpec:
        return LayerSpec((k, v))

    def encode(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        return k, v

    def n_keys(self) -> int:
        return 1

    def dim(self, first: ArraySpec) -> int:
        return first.dim

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return q @ _part(arrays[0], lo, hi).swapaxes(-1, -2)

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return p @ _part(arrays[1], lo, hi)


def _part(array: mx.array, lo: int, hi: int) -> mx.array:
    return array if hi - lo == array.shape[2] else array[..., lo:hi, :]
