"""Rotated formats: the keys and values of a layer in one array, a row for each head and token.

A row has the codes of the key, those of the value, perhaps a spare word (`row_words`), and a word with both scales,
the key's in its lower half. The spare word has the shares of the value's groups (`rotated`), or is 0. So a step writes
one array of each layer, and a kernel is given one of each slab. Where the device has a kernel for it, that rotates and
encodes, and unpacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.model.formats.codec import StockForm, across
from onefold.cache.model.formats.rotated import Rotated
from onefold.cache.model.formats.sides import scale_type, vectors_made
from onefold.cache.model.formats.turbo import Turbo
from onefold.cache.model.kernels import coding, current
from onefold.cache.model.kernels.coded_rows import Coding, Turning
from onefold.cache.model.kernels.decode import Format, Signs

KEYS, VALUES = 1, 2
"""Seeds of the rotations."""
Parts = list[mx.array]
"""The words and the scales of keys, or of values, and perhaps the shares of groups."""


class TurnedSides:
    """The codec of a layer whose keys and values are rotated."""

    plain = False
    kind = "quantized"
    stock_form: StockForm | None = None

    def __init__(self, keys: Rotated | Turbo, values: Rotated | Turbo, how: Coding, form: Format) -> None:
        self.keys, self.values, self._how = keys, values, how
        self.coding: Coding | None = how
        self.kernel_format: Format | None = form
        self._signs = keys.signs, values.signs
        self.signs: Signs | None = self._signs
        self._to_keys = Turning(how.key_dim, how.dtype, back=False)
        self._from_values = Turning(how.value_dim, how.dtype, back=True)

    def spec(self, k: ArraySpec, v: ArraySpec) -> LayerSpec:
        return LayerSpec((ArraySpec(k.heads, self._how.row, mx.uint32, scale_type(self._how.dtype)),))

    def encode(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        if self._is_coded(k) and v.dtype == k.dtype:
            return (coding.encode(self._how, k, v, *self._signs),)
        k, v = k.astype(self._how.dtype), v.astype(self._how.dtype)
        (k_words, k_scales), (v_words, v_scales, *shares) = self.keys.encode(k), self.values.encode(v)
        scales = mx.concatenate([k_scales, v_scales], axis=-1).view(mx.uint32)
        if not shares and self._how.row > self._how.key_words + self._how.value_words + 1:
            shares = [mx.zeros_like(scales)]
        return (mx.concatenate([k_words, v_words, *shares, scales], axis=-1),)

    def encode_step(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        if self._is_coded(k) and v.dtype == k.dtype:
            return (coding.encode(self._how, k, v, *self._signs, across=True),)
        return across(self.encode(k, v))

    def decode(self, arrays: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        (rows,) = arrays
        if dtype == self._how.dtype and rows.size and current.codes(self._how):
            return coding.decode(self._how, rows)
        k, v = self.parts(rows)
        return self.keys.decode(k, dtype), self.values.decode(v, dtype)

    def parts(self, rows: mx.array) -> tuple[Parts, Parts]:
        """Returns what was stored of the keys, and of the values."""
        n, m = self._how.key_words, self._how.value_words
        scales = rows[..., -1:].view(scale_type(self._how.dtype))
        shares = [rows[..., n + m : n + m + 1]] if self._how.value_groups > 1 else []
        return [rows[..., :n], scales[..., :1]], [rows[..., n : n + m], scales[..., 1:], *shares]

    def as_made(self, arrays: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        k, v = self.parts(arrays[0])
        return vectors_made(self.keys, k, dtype), vectors_made(self.values, v, dtype)

    def turn(self, q: mx.array) -> mx.array:
        return coding.turn(self._to_keys, q, self._signs[0]) if self._is_coded(q) else self.keys.turn(q)

    def turn_back(self, out: mx.array) -> mx.array:
        if self._is_coded(out):
            return coding.turn(self._from_values, out, self._signs[1])
        return self.values.turn_back(out)

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return self.keys.times_tokens(q, self.parts(arrays[0][..., lo:hi, :])[0], 0, hi - lo)

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return self.values.weighted(p, self.parts(arrays[0][..., lo:hi, :])[1], 0, hi - lo)

    def n_keys(self) -> int:
        return 0

    def made(self, specs: Sequence[ArraySpec]) -> tuple[int, int, mx.Dtype]:
        return self._how.key_dim, self._how.value_dim, self._how.dtype

    def _is_coded(self, x: mx.array) -> bool:
        """Whether the kernel takes these vectors."""
        return x.dtype == self._how.dtype and x.ndim == 4 and x.size > 0 and current.codes(self._how)


def turned_sides(how: Coding, *, turns: bool) -> TurnedSides:
    """Returns the codec that stores keys and values so. `turns`: whether the decode kernel rotates queries itself."""
    form = Format(how.name, 1, how.key_bits, 0, how.value_bits, turns=turns)
    if how.name == "rotated":
        values = Rotated(how.value_dim, how.value_bits, VALUES, how.value_groups)
        return TurnedSides(Rotated(how.key_dim, how.key_bits, KEYS), values, how, form)
    return TurnedSides(Turbo(how.key_dim, how.key_bits, KEYS), Turbo(how.value_dim, how.value_bits, VALUES), how, form)
