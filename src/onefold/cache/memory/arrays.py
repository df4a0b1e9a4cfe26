"""Copies MLX arrays to their own buffers, and gives access to their bytes as the processor sees them.

Where MLX computes in memory that the processor can address (its CPU, and Apple's GPU), bytes are read and written in
place, on any thread, without a copy and without an MLX operation. Pass only evaluated arrays that no thread is writing.
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
"""`mx.contiguous` may keep up to 16 KiB of the parent's buffer: negligible from this size on, much for a small
array."""


def own_bytes(array: mx.array) -> mx.array:
    """Returns the same values in their own buffer. A slice would pin the whole buffer of its parent."""
    if array.nbytes < _SLOP and array.ndim:
        return mx.concatenate([array, array[:0]], axis=0)  # always a new, exact allocation
    return mx.contiguous(array)


def own_name(array: mx.array) -> mx.array:
    """Returns another Python object for the same values. A write `array[...] = x` changes the Python object that it is
    made on, and every holder of that object (a snapshot, an undo mark) would see it."""
    return copy.copy(array)


def addressable() -> bool:
    """Whether the processor can read and write MLX's memory in place."""
    return not device.on_cuda()


def bytes_of(array: mx.array) -> Bytes:
    """Returns the array's memory: a write to it changes the array. The array must outlive its use. Raises ValueError
    for an array that is not contiguous."""
    if not in_order(array):
        raise ValueError("the array is not contiguous: copy it with mx.contiguous first")
    return np.frombuffer(array, np.uint8)  # type: ignore[call-overload, no-any-return]


def in_order(array: Any) -> bool:
    return memoryview(array).c_contiguous


class Payload:
    """Iterates over the bytes of some arrays, in their order, any number of times. Contiguous arrays are read in place
    if `direct`; the others are copied, at most `most` bytes at a time."""

    def __init__(self, arrays: Iterable[mx.array], most: int, *, direct: bool) -> None:
        self._arrays, self._most, self._direct = list(arrays), most, direct

    def __iter__(self) -> Iterator[Bytes]:
        for array in self._arrays:
            if self._direct and in_order(array):
                yield bytes_of(array)
            else:
                yield from map(as_bytes, _pieces(array, self._most))


def _pieces(array: mx.array, most: int) -> Iterator[mx.array]:
    """Yields slices of the array, at most `most` bytes each, in the order of their bytes."""
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


def join(parts: list[mx.array | None]) -> mx.array:
    """Returns the parts as one array in its own buffer, never a view of a larger one."""
    found = [p for p in parts if p is not None]
    return mx.concatenate(found, axis=2) if len(found) > 1 else own_bytes(found[0])
