"""Rotated vectors in whole steps of one scale: code c is the value (c + 1/2 - half of all codes) * scale.

After the rotation all channels of a vector are alike, so it needs no groups and no biases: 16 bits more than its codes,
an eighth of a bit for each of 128 values. MLX's `quantized_matmul` reads it, with biases that follow from the scales.

With few bits, steps that do not reach the largest channels are nearer to a vector as a whole: a few are tried for each
vector, and the best is stored (`levels.steps`). At 4 bits the squared error is 10 to 15 % less for it, at 5 bits 5 %.

A vector can be divided into up to four groups, each with a scale of its own. The largest of these is stored, and a word
whose byte g says which share of it group g has: (byte + 1) / 256.
"""

from __future__ import annotations

import mlx.core as mx

from onefold.cache.model.formats.packing import pack, unpack
from onefold.cache.model.formats.rotation import Rotation
from onefold.cache.model.formats.sides import Packed, as_scale, in_slices, scale_type
from onefold.cache.model.levels import steps

_LEAST = 1e-6
"""The least scale: of a vector of zeros."""
_LEAST_DIVISOR = 1e-30
"""Of the scales of groups: the largest of them is the divisor, and it may be 0."""
_MOST_GROUPS = 4
"""A word has a byte for each."""
_ENCODED = 256
"""Tokens that are encoded at once where several steps are tried: all take memory meanwhile."""


class Rotated(Packed):
    def __init__(self, dim: int, bits: int, seed: int, groups: int = 1) -> None:
        super().__init__(dim, bits, next(g for g in (128, 64, 32) if dim // groups % g == 0))
        self.groups = groups
        rotation = Rotation(dim, seed)
        self.turn, self.turn_back, self.signs = rotation.turn, rotation.turn_back, rotation.signs
        self._half = 1 << (bits - 1)
        self._shares = mx.array(steps(bits))[:, None]

    def encode(self, x: mx.array) -> tuple[mx.array, ...]:
        if x.shape[2] <= _ENCODED or self._shares.size == 1:
            return self._encoded(x)
        parts = [self._encoded(x[..., lo : lo + _ENCODED, :]) for lo in range(0, x.shape[2], _ENCODED)]
        return tuple(mx.concatenate(list(each), axis=2) for each in zip(*parts, strict=True))

    def _encoded(self, x: mx.array) -> tuple[mx.array, ...]:
        turned = self.turn(x.astype(mx.float32)).reshape(*x.shape[:-1], self.groups, 1, self.dim // self.groups)
        top = mx.abs(turned).max(axis=-1, keepdims=True) / (self._half - 0.5)
        step = mx.maximum(top * self._shares, _LEAST)
        middle = mx.clip(mx.floor(turned / step), -self._half, self._half - 1) + 0.5
        along = (middle * turned).sum(axis=-1, keepdims=True)
        length = (middle * middle).sum(axis=-1, keepdims=True)
        scale = along / length  # the one that is nearest to the vector, given its codes
        best = (along * scale).argmax(axis=-2, keepdims=True)
        middle, scale = (mx.take_along_axis(a, best, axis=-2).squeeze(-2) for a in (middle, scale))
        words = pack((middle + (self._half - 0.5)).astype(mx.uint8).reshape(x.shape), self.bits)
        scale = scale.squeeze(-1)
        if self.groups == 1:
            return words, as_scale(scale, scale_type(x.dtype))
        whole = scale.max(axis=-1, keepdims=True)
        shares = mx.clip(mx.floor(scale / mx.maximum(whole, _LEAST_DIVISOR) * 256 + 0.5), 1, 256) - 1
        unused = [(0, 0)] * (x.ndim - 1) + [(0, _MOST_GROUPS - self.groups)]
        word = mx.pad(shares.astype(mx.uint8), unused).view(mx.uint32)
        return words, as_scale(whole, scale_type(x.dtype)), word

    def decode(self, arrays: list[mx.array], dtype: mx.Dtype) -> mx.array:
        if dtype == mx.float32:
            return super().decode(arrays, dtype)

        # with a bias, codes times scales would be rounded where they are largest, before they cancel out
        def unpacked(part: list[mx.array]) -> mx.array:
            scales = self.scales(part, dtype)
            codes = unpack(part[0], self.bits).astype(dtype) + (0.5 - self._half)
            return (codes.reshape(*scales.shape, -1) * scales[..., None]).reshape(codes.shape)

        return in_slices(unpacked, arrays)

    def affine(self, arrays: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        scales = self.scales(arrays, dtype)
        repeats = self.dim // self.group_size // self.groups
        if repeats > 1:
            scales = mx.repeat(scales, repeats, axis=-1)
        return arrays[0], scales, scales * (0.5 - self._half)

    def scales(self, arrays: list[mx.array], dtype: mx.Dtype) -> mx.array:
        """Returns the scale of each group."""
        whole = arrays[1].astype(dtype)
        if self.groups == 1:
            return whole
        shares = arrays[2].view(mx.uint8)[..., : self.groups].astype(dtype)
        return whole * ((shares + 1) * (1 / 256))
