"""What attention needs to know of how a layer's keys and values are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.model.kernels.coded_rows import Coding
from onefold.cache.model.kernels.decode import Format, Signs


class StockForm(NamedTuple):
    """The parameters of mlx-lm's own quantised cache."""

    bits: int
    group_size: int


def across(arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """Returns arrays of one token of each row, [rows, heads, 1, ...], as [1, heads, rows, ...]."""
    return tuple(a.transpose(2, 1, 0, 3) for a in arrays)


class Codec(Protocol):
    """How a layer's arrays encode its keys and values, and how attention reads them without decoding the whole.

    Stored keys and values may be rotated. `scores`, `mix` and `decode` are in that space; `turn` brings queries there,
    and `turn_back` outputs back."""

    plain: bool
    kind: str
    kernel_format: Format | None
    """How the decode kernel reads them; None if it cannot."""
    coding: Coding | None
    """How a kernel encodes them; None if none does."""
    signs: Signs | None
    """Those of the rotations, for a kernel that rotates by itself; None if nothing is rotated."""
    stock_form: StockForm | None
    """Its arrays are those of mlx-lm's quantised cache with these parameters; None if they are not."""

    def spec(self, k: ArraySpec, v: ArraySpec) -> LayerSpec:
        """Returns the arrays of a token, given those of its keys and values as the model makes them."""
        ...

    def encode(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]: ...

    def encode_step(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        """Returns the arrays of one token of each row, as [1, heads, rows, ...]."""
        ...

    def decode(self, arrays: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Returns keys and values, rotated as they are stored."""
        ...

    def turn(self, q: mx.array) -> mx.array: ...

    def turn_back(self, out: mx.array) -> mx.array: ...

    def as_made(self, arrays: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Returns keys and values as the model made them, but for what was rounded."""
        ...

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array: ...

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array: ...

    def n_keys(self) -> int:
        """Returns how many of a layer's arrays belong to its keys; the values' follow them. 0: one array has both."""
        ...

    def made(self, specs: Sequence[ArraySpec]) -> tuple[int, int, mx.Dtype]:
        """Returns the dimensions of a head's keys and values, and their type, as the model makes them, given the specs
        of a layer's arrays."""
        ...
