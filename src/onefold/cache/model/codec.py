"""What attention needs to know of how a layer's keys and values are stored."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from onefold.cache.model.kernels.decode import Format


class Codec(Protocol):
    """How a layer's arrays encode its keys and values, and how attention reads them without decoding."""

    plain: bool
    kernel_format: Format | None
    """How the decode kernel reads them; None if it cannot."""

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array: ...

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array: ...

    def n_keys(self) -> int:
        """Returns how many of a layer's arrays belong to its keys; the values' follow them."""
        ...

    def dim(self, first: Any) -> int:
        """Returns the dimension of a head, given the spec of the first array of the keys or values."""
        ...
