"""mlx-lm's affine quantisation: groups of a vector have a scale and a bias each."""

from __future__ import annotations

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec
from onefold.cache.model.formats.packing import words_of
from onefold.cache.model.formats.sides import Packed, as_scale


class Affine(Packed):
    n_arrays = 3

    def __init__(self, dim: int, bits: int, group_size: int, dtype: mx.Dtype) -> None:
        """`dtype` is that of scales and biases."""
        super().__init__(dim, bits, group_size)
        self._dtype = dtype

    def spec(self, made: ArraySpec) -> tuple[ArraySpec, ...]:
        scale = ArraySpec(made.heads, made.dim // self.group_size, self._dtype)
        return ArraySpec(made.heads, words_of(made.dim, self.bits), mx.uint32), scale, scale

    def encode(self, x: mx.array) -> tuple[mx.array, ...]:
        words, scales, biases = mx.quantize(x, group_size=self.group_size, bits=self.bits)
        return words, as_scale(scales, self._dtype), as_scale(biases, self._dtype)

    def turn(self, x: mx.array) -> mx.array:
        return x

    def turn_back(self, x: mx.array) -> mx.array:
        return x
