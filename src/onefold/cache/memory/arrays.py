"""Arrays of MLX's: buffers of their own, and their bytes as the processor sees them.

Where MLX computes in memory that the processor can address (its CPU, and Apple's GPU), bytes are read and written where
they lie: no copy of an array, no operation of MLX's, any thread. Only evaluated arrays that no thread is writing may be
given to these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from onefold.cache.memory import device

Bytes = npt.NDArray[np.uint8]

_SLOP = 1 << 20
"""`mx.contiguous` leaves up to 16 KiB of a parent behind an array: nothing for one of this size, much for a
small one."""


def own_bytes(array: mx.array) -> mx.array:
    """The same values in a buffer of their own: a slice would pin all of its parent."""
    if array.nbytes < _SLOP and array.ndim:
        return mx.concatenate([array, array[:0]], axis=0)  # always a new, exact allocation
    return mx.contiguous(array)


def own_name(array: mx.array) -> mx.array:
    """Another Python object for the same values. A write through `array[...] = x` changes the Python object
    that it is made on; whoever else holds that object (a snapshot, an undo mark) would see it."""
    return copy.copy(array)


def addressable() -> bool:
    """Whether the processor can read and write MLX's memory where it lies."""
    return not device.on_cuda()


def bytes_of(array: mx.array) -> Bytes:
    """An array's own memory. What is written there is written into the array; the array must outlive its use."""
    if not in_order(array):
        raise ValueError("an array whose bytes do not lie in order")
    return np.frombuffer(array, np.uint8)  # type: ignore[call-overload, no-any-return]


def in_order(array: Any) -> bool:
    return memoryview(array).c_contiguous


class Payload:
    """The bytes of some arrays, in their order, to be gone through as often as needed. They are read where they lie;
    what cannot be is copied, no more than `most` bytes at a time."""

    def __init__(self, arrays: Iterable[mx.array], most: int, *, direct: bool) -> None:
        self._arrays, self._most, self._direct = list(arrays), most, direct

    def __iter__(self) -> Iterator[Bytes]:
        for array in self._arrays:
            if self._direct and in_order(array):
                yield bytes_of(array)
            else:
                yield from map(as_bytes, _pieces(array, self._most))


def _pieces(array: mx.array, most: int) -> Iterator[mx.array]:
    """Slices of it, in the order of their bytes."""
    if array.nbytes <= most or not array.ndim:
        yield array
        return
    n, row = len(array), array.nbytes // len(array)
    if row > most:
        for i in range(n):
            yield from _pieces(array[i], most)
    else:
        step = most // row
        for i in range(0, n, step):
            yield array[i : i + step]


def as_bytes(array: mx.array) -> Bytes:
    flat = mx.contiguous(array).reshape(-1)
    if flat.dtype == mx.bool_:
        return np.array(flat).view(np.uint8)
    found: Bytes = np.array(mx.view(flat, mx.uint8))
    return found
