"""A rotation that spreads what a few channels have over all of them, so that one scale fits a whole vector.

Signs, then a Hadamard transform. It keeps lengths and products: queries and keys that are turned alike have the same
scores. The signs are fixed for a dimension: stored KV depends on them. Computed in 32 bits: sums of 16 bits may be too
large for them before they are scaled.
"""

from __future__ import annotations

import hashlib

import mlx.core as mx
import numpy as np

_FACTORS = (1, 12, 20, 28)
"""A Hadamard matrix of m * 2^k rows is known to MLX for these m."""
_SYMMETRIC = (1, 12)
_MOST = 8192


def is_turnable(dim: int) -> bool:
    """Whether MLX has a Hadamard transform for this dimension. It does not check that itself on a CPU, where another
    dimension overwrites memory."""
    return 0 < dim <= _MOST and any(dim % m == 0 and _is_power_of_two(dim // m) for m in _FACTORS)


class Rotation:
    def __init__(self, dim: int, seed: int) -> None:
        """Raises ValueError for a dimension that has none."""
        if not is_turnable(dim):
            raise ValueError(f"a vector of {dim} cannot be rotated")
        drawn = np.frombuffer(hashlib.shake_256(b"onefold rotation %d" % seed).digest(-(-dim // 8)), np.uint8)
        self.signs = mx.array(1 - 2 * np.unpackbits(drawn)[:dim].astype(np.float32))
        self._scale = dim**-0.5
        self._back: mx.array | None = None
        """What undoes the transform, where that is not the transform itself."""
        if not any(dim % m == 0 and _is_power_of_two(dim // m) for m in _SYMMETRIC):
            self._back = mx.hadamard_transform(mx.eye(dim), scale=self._scale).T

    def turn(self, x: mx.array) -> mx.array:
        """Returns the vectors along the last axis, rotated."""
        return mx.hadamard_transform(x.astype(mx.float32) * self.signs, scale=self._scale).astype(x.dtype)

    def turn_back(self, x: mx.array) -> mx.array:
        """Returns rotated vectors as they were."""
        wide = x.astype(mx.float32)
        if self._back is not None:
            return ((wide @ self._back) * self.signs).astype(x.dtype)
        return (mx.hadamard_transform(wide, scale=self._scale) * self.signs).astype(x.dtype)


def _is_power_of_two(n: int) -> bool:
    return n > 0 and not n & (n - 1)
