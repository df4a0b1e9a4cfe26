"""Keys and values as the model made them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.model.formats.codec import StockForm, across
from onefold.cache.model.kernels.coded_rows import Coding
from onefold.cache.model.kernels.decode import Format, Signs


class PlainCodec:
    """Stores keys and values as the model made them."""

    plain = True
    kind = "full"
    kernel_format: Format | None = Format("plain", 2)
    coding: Coding | None = None
    signs: Signs | None = None
    stock_form: StockForm | None = None

    def spec(self, k: ArraySpec, v: ArraySpec) -> LayerSpec:
        return LayerSpec((k, v))

    def encode(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        return k, v

    def encode_step(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        return across((k, v))

    def decode(self, arrays: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return arrays[0], arrays[1]

    as_made = decode

    def turn(self, q: mx.array) -> mx.array:
        return q

    def turn_back(self, out: mx.array) -> mx.array:
        return out

    def n_keys(self) -> int:
        return 1

    def made(self, specs: Sequence[ArraySpec]) -> tuple[int, int, mx.Dtype]:
        return specs[0].dim, specs[1].dim, specs[0].dtype

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return q @ _part(arrays[0], lo, hi).swapaxes(-1, -2)

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return p @ _part(arrays[1], lo, hi)


def _part(array: mx.array, lo: int, hi: int) -> mx.array:
    return array if hi - lo == array.shape[2] else array[..., lo:hi, :]
