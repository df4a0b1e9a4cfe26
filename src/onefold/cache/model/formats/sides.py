"""A quantised format as two sides, the keys' and the values', which need not be stored alike.

A side encodes vectors token by token: what is stored of a token depends on that token alone, so it can be cut, shared,
rewound and continued anywhere, and reused KV is what a cold run would store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.model.formats.codec import StockForm, across
from onefold.cache.model.kernels.coded_rows import Coding
from onefold.cache.model.kernels.decode import Format, Signs


class Decoding(Protocol):
    """How stored vectors are decoded. Arrays are [1, heads, tokens, ...]."""

    def decode(self, arrays: list[mx.array], dtype: mx.Dtype) -> mx.array: ...

    def turn_back(self, x: mx.array) -> mx.array:
        """Returns vectors of the space in which they are stored as the model made them."""
        ...


class Side(Decoding, Protocol):
    """How the keys, or the values, of a layer are stored."""

    n_arrays: int
    dim: int
    """Of a head."""

    def spec(self, made: ArraySpec) -> tuple[ArraySpec, ...]: ...

    def encode(self, x: mx.array) -> tuple[mx.array, ...]: ...

    def turn(self, x: mx.array) -> mx.array:
        """Returns vectors in the space in which they are stored."""
        ...

    def times_tokens(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        """Returns the products of queries with the tokens [lo, hi)."""
        ...

    def weighted(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        """Returns the sums of the tokens [lo, hi), weighted by `p`."""
        ...


class Sides:
    """The codec of a layer whose keys and values are stored as these sides say."""

    plain = False
    kind = "quantized"
    coding: Coding | None = None
    signs: Signs | None = None

    def __init__(
        self,
        keys: Side,
        values: Side,
        dtype: mx.Dtype,
        kernel_format: Format | None = None,
        stock_form: StockForm | None = None,
    ) -> None:
        """`dtype` is that of keys and values as the model makes them. Both sides have as many arrays."""
        assert keys.n_arrays == values.n_arrays
        self.keys, self.values, self._dtype = keys, values, dtype
        self.kernel_format, self.stock_form = kernel_format, stock_form

    def spec(self, k: ArraySpec, v: ArraySpec) -> LayerSpec:
        return LayerSpec(self.keys.spec(k) + self.values.spec(v))

    def encode(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        return self.keys.encode(k) + self.values.encode(v)

    def encode_step(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        return across(self.encode(k, v))

    def decode(self, arrays: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        n = self.keys.n_arrays
        return self.keys.decode(arrays[:n], dtype), self.values.decode(arrays[n:], dtype)

    def as_made(self, arrays: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        n = self.keys.n_arrays
        return vectors_made(self.keys, arrays[:n], dtype), vectors_made(self.values, arrays[n:], dtype)

    def turn(self, q: mx.array) -> mx.array:
        return self.keys.turn(q)

    def turn_back(self, out: mx.array) -> mx.array:
        return self.values.turn_back(out)

    def n_keys(self) -> int:
        return self.keys.n_arrays

    def made(self, specs: Sequence[ArraySpec]) -> tuple[int, int, mx.Dtype]:
        return self.keys.dim, self.values.dim, self._dtype

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return self.keys.times_tokens(q, arrays[: self.keys.n_arrays], lo, hi)

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return self.values.weighted(p, arrays[self.keys.n_arrays :], lo, hi)


class Packed:
    """A side whose codes are MLX's own affine ones, so that MLX's `quantized_matmul` reads them.

    That copies a slice of a longer buffer, so it gets the whole buffer: products beyond the range are cut off, and
    weights are padded with zeros. A range shorter than half of its buffer is sliced, and so copied.

    On CUDA that product exists for some shapes only, so the range is decoded there."""

    def __init__(self, dim: int, bits: int, group_size: int) -> None:
        self.dim, self.bits, self.group_size = dim, bits, group_size

    def affine(self, arrays: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        """Returns words, scales and biases, of this type."""
        words, scales, biases = arrays
        return words, scales.astype(dtype), biases.astype(dtype)

    def decode(self, arrays: list[mx.array], dtype: mx.Dtype) -> mx.array:
        words, scales, biases = self.affine(arrays, dtype)
        return mx.dequantize(words, scales, biases, group_size=self.group_size, bits=self.bits)

    def times_tokens(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        if device.on_cuda():
            return q @ self.decode([a[..., lo:hi, :] for a in arrays], q.dtype).swapaxes(-1, -2)
        arrays, lo, hi = _whole_or_slice(arrays, lo, hi)
        return self._product(q, arrays, transpose=True)[..., lo:hi]

    def weighted(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        if device.on_cuda():
            return p @ self.decode([a[..., lo:hi, :] for a in arrays], p.dtype)
        arrays, lo, hi = _whole_or_slice(arrays, lo, hi)
        capacity = arrays[0].shape[2]
        if (lo, hi) != (0, capacity):
            p = mx.pad(p, [(0, 0), (0, 0), (0, 0), (lo, capacity - hi)])
        return self._product(p, arrays, transpose=False)

    def _product(self, x: mx.array, arrays: list[mx.array], *, transpose: bool) -> mx.array:
        words, scales, biases = self.affine(arrays, x.dtype)
        size, bits = self.group_size, self.bits
        return mx.quantized_matmul(x, words, scales, biases, transpose=transpose, group_size=size, bits=bits)


def _whole_or_slice(arrays: list[mx.array], lo: int, hi: int) -> tuple[list[mx.array], int, int]:
    capacity = arrays[0].shape[2]
    if 2 * (hi - lo) >= capacity:
        return arrays, lo, hi
    return [a[..., lo:hi, :] for a in arrays], 0, hi - lo


def scale_type(dtype: mx.Dtype) -> mx.Dtype:
    """Returns the type of scales: 16 bits, whatever the model's type."""
    return dtype if dtype.size == 2 else mx.float16


def as_scale(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Returns scales, or biases, in this type. What is too large for it becomes the largest that it has."""
    if x.dtype == dtype:
        return x
    most = mx.finfo(dtype).max
    return mx.clip(x, -most, most).astype(dtype)


SLICE = 4096
"""Tokens that are unpacked at once: the codes are 32 bits each meanwhile."""


def in_slices(unpack: Callable[[list[mx.array]], mx.array], arrays: list[mx.array]) -> mx.array:
    """Returns what `unpack` makes of the tokens of these arrays, slice by slice."""
    tokens = arrays[0].shape[2]
    if tokens <= SLICE:
        return unpack(arrays)
    parts = [[a[..., lo : lo + SLICE, :] for a in arrays] for lo in range(0, tokens, SLICE)]
    return mx.concatenate([unpack(part) for part in parts], axis=2)


def vectors_made(side: Decoding, arrays: list[mx.array], dtype: mx.Dtype) -> mx.array:
    """Returns stored vectors as the model made them, but for what was rounded; decoded slice by slice, in 32 bits."""
    return in_slices(lambda part: side.turn_back(side.decode(part, mx.float32)).astype(dtype), arrays)
