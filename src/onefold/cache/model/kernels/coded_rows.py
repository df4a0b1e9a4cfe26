"""What kernels that rotate and encode are compiled for, and the rows that they write and read."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

WARP = 32
DIMS = (32, 64, 128, 256, 512)
"""Of heads for which there are kernels that rotate."""


class Coding(NamedTuple):
    """What a kernel is compiled for: a format, and the keys and values that it stores."""

    name: str
    """"rotated" or "turbo"."""
    key_dim: int
    value_dim: int
    key_bits: int
    value_bits: int
    dtype: mx.Dtype
    """Of keys, values and scales."""

    @property
    def key_words(self) -> int:
        return self.key_dim * self.key_bits // 32

    @property
    def value_words(self) -> int:
        return self.value_dim * self.value_bits // 32

    @property
    def value_groups(self) -> int:
        """Groups of a value, each with a scale of its own."""
        return value_groups(self.name, self.key_bits, self.value_dim, self.value_bits)

    @property
    def row(self) -> int:
        """Words of a token's row."""
        return row_words(self.key_dim, self.key_bits, self.value_dim, self.value_bits)


class Turning(NamedTuple):
    """What a kernel that rotates is compiled for."""

    dim: int
    dtype: mx.Dtype
    back: bool


def row_words(key_dim: int, key_bits: int, value_dim: int, value_bits: int) -> int:
    """Returns the words of a token's row: the codes of its key, those of its value, and in the last word both scales.
    A row with codes of 8 bits has an even number, so that they can be loaded eight at a time."""
    words = (key_dim * key_bits + value_dim * value_bits) // 32 + 1
    return words + words % 2 if key_bits == 8 else words


def value_groups(name: str, key_bits: int, value_dim: int, value_bits: int) -> int:
    """Returns how many groups of a value have a scale of their own: where keys have 8 bits and values 4, the word that
    makes a row even has them."""
    if name != "rotated" or (key_bits, value_bits) != (8, 4):
        return 1
    return next(n for n in (4, 3, 2, 1) if value_dim % (WARP * n) == 0)
