"""The arrays that a token's KV consists of in each sliceable layer, and the view of a range of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

Arrays = tuple[mx.array, ...]


class ArraySpec(NamedTuple):
    """One array of one layer, per token."""

    heads: int
    dim: int
    dtype: mx.Dtype
    scales: mx.Dtype | None = None
    """Of the two numbers of 16 bits in the last word of a token's row; None if it has none there."""

    @property
    def token_bytes(self) -> int:
        return self.heads * self.dim * self.dtype.size


class LayerSpec(NamedTuple):
    """The arrays that one sliceable layer keeps for a token: keys and values, or their quantised parts."""

    arrays: tuple[ArraySpec, ...]

    @property
    def token_bytes(self) -> int:
        return sum(a.token_bytes for a in self.arrays)


class View(NamedTuple):
    """The arrays of one layer in one slab, and the range of indices to read."""

    arrays: list[mx.array]
    lo: int
    hi: int
    slab: int
    """Identifies the slab, the same in every layer: equal views of two rows are read once."""

    @property
    def capacity(self) -> int:
        return self.arrays[0].shape[2]

    def all(self) -> View:
        return View(self.arrays, 0, self.capacity, self.slab)


def most_padding(step_bytes: int, page_bytes: int) -> int:
    """Returns the most that an array whose size is a multiple of `step_bytes` is rounded up by to whole pages; 0 if
    `page_bytes` is 0."""
    return page_bytes - math.gcd(step_bytes, page_bytes) if page_bytes else 0
