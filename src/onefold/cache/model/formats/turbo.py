"""TurboQuant: rotated vectors in the steps that fit a normal distribution best (Lloyd and Max), and their lengths.

After the rotation the channels of a vector are nearly normal. The scale that is stored makes the decoded vector as long
as the vector was. Steps differ, so no product of MLX's reads the codes: they are looked up, one layer at a time.
"""

from __future__ import annotations

import functools
import operator

import mlx.core as mx
import numpy as np

from onefold.cache.model.formats.packing import pack, unpack
from onefold.cache.model.formats.rotation import Rotation
from onefold.cache.model.formats.sides import as_scale, in_slices, scale_type
from onefold.cache.model.levels import levels

_LEAST = 1e-6


class Turbo:
    def __init__(self, dim: int, bits: int, seed: int) -> None:
        self.dim, self.bits = dim, bits
        rotation = Rotation(dim, seed)
        self.turn, self.turn_back, self.signs = rotation.turn, rotation.turn_back, rotation.signs
        found = np.array(levels(bits), np.float32)
        self._levels = mx.array(found)
        self._edges = [float(x) for x in (found[1:] + found[:-1]) / 2]

    def encode(self, x: mx.array) -> tuple[mx.array, ...]:
        turned = self.turn(x.astype(mx.float32))
        length = mx.sqrt((turned * turned).sum(axis=-1, keepdims=True))
        unit = turned * (self.dim**0.5 / mx.maximum(length, _LEAST))
        codes = functools.reduce(operator.add, [(unit > edge).astype(mx.uint8) for edge in self._edges])
        found = mx.take(self._levels, codes)
        scale = length / mx.sqrt((found * found).sum(axis=-1, keepdims=True))
        return pack(codes, self.bits), as_scale(scale, scale_type(x.dtype))

    def decode(self, arrays: list[mx.array], dtype: mx.Dtype) -> mx.array:
        levels = self._levels.astype(dtype)

        def unpacked(part: list[mx.array]) -> mx.array:
            return mx.take(levels, unpack(part[0], self.bits)) * self.scales(part, dtype)

        return in_slices(unpacked, arrays)

    def scales(self, arrays: list[mx.array], dtype: mx.Dtype) -> mx.array:
        """Returns the scale of each vector."""
        return arrays[1].astype(dtype)

    def times_tokens(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return q @ self._part(arrays, lo, hi, q.dtype).swapaxes(-1, -2)

    def weighted(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return p @ self._part(arrays, lo, hi, p.dtype)

    def _part(self, arrays: list[mx.array], lo: int, hi: int, dtype: mx.Dtype) -> mx.array:
        return self.decode([a[..., lo:hi, :] for a in arrays], dtype)
