"""The bytes of MLX arrays, as the processor sees them: how KV leaves for the disk, and comes back into its place.

- Where MLX computes in memory that the processor can address (its CPU, and Apple's GPU), the bytes are read and written
  where they lie: no copy of an array, no operation of MLX's, any thread.
- Elsewhere (CUDA) they go through a slice on the way out, and a slice update on the way in. The same bytes, by MLX's
  portable operations.
- Callers pass only evaluated arrays that no request is writing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from onefold.cache.memory import device
from onefold.cache.memory.arrays import Bytes, as_bytes, bytes_of, in_order
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.shapes import LayerSpec
from onefold.cache.tiers.records import record
from onefold.cache.tiers.records.record import TYPE_CODES, Tensor

_CODES = {getattr(mx, "bool_" if name == "bool" else name): code for name, code in TYPE_CODES.items()}
_TYPES = {code: dtype for dtype, code in _CODES.items()}


def tensor(name: str, array: mx.array) -> Tensor:
    return Tensor(name, _CODES[array.dtype], tuple(array.shape))


def range_tensors(specs: Iterable[LayerSpec], n_tokens: int) -> tuple[Tensor, ...]:
    """What a range of so many tokens is made of."""
    layout = [[(a.heads, a.dim, str(a.dtype).rpartition(".")[2]) for a in spec.arrays] for spec in specs]
    return record.range_tensors(layout, n_tokens)


def leave_thread() -> None:
    """The thread ends: what MLX leaves of a thread's streams can abort the process when it exits."""
    mx.clear_streams()


def rows(array: mx.array) -> Bytes:
    """Its memory as [heads, tokens, bytes of a token]."""
    _, heads, capacity, dim = array.shape
    return bytes_of(array).reshape(heads, capacity, dim * array.dtype.size)


def is_quiet(slab: Slab) -> bool:
    """Whether no request is writing there, and its arrays are not being replaced: then `copy_out` may be called."""
    return not slab.writers and not slab.rewriting


def copy_out(slab: Slab, lo: int, hi: int, into: Bytes, *, direct: bool) -> None:
    """The tokens [lo, hi) of every layer, in the order of `range_tensors`."""
    arrays = [array for layer in slab.layers for array in layer or ()]
    if not direct:
        parts = [mx.view(mx.contiguous(a[..., lo:hi, :]).reshape(-1), mx.uint8) for a in arrays]
        into[:] = np.array(mx.concatenate(parts))  # one transfer
        mx.synchronize()
        return
    at = 0
    for array in arrays:
        if in_order(array):
            found = rows(array)[:, lo:hi]
        else:  # a forward that filled it whole left it as the model made it
            _, heads, _, dim = array.shape
            found = as_bytes(array[..., lo:hi, :]).reshape(heads, hi - lo, dim * array.dtype.size)
        into[at : at + found.size].reshape(found.shape)[:] = found
        at += found.size
    if at != into.size:
        raise RuntimeError(f"only {at} of {into.size} bytes were there to be copied")


COPIED = 3
"""How many times the bytes of a record `copy_out` takes in addition to their place, unless it is `direct`."""


def places(slab: Slab, lo: int, hi: int) -> list[Any]:
    """Where the bytes of the tokens [lo, hi) belong, in the order of `range_tensors`: to be read into."""
    return [
        head[lo:hi].reshape(-1)
        for layer in slab.layers
        for array in layer or ()
        for head in rows(array)
    ]  # fmt: skip


def allocate(slab: Slab, n_tokens: int, *, direct: bool) -> None:
    """Make the arrays of a slab whose first tokens are about to be read into; the others are zero. Raises MemoryError
    and RuntimeError if the device cannot, and leaves the slab without arrays."""
    make = uninitialised if direct else mx.zeros
    try:
        for index, spec in enumerate(slab.store.specs):
            slab.layers[index] = [make((1, a.heads, slab.capacity, a.dim), a.dtype) for a in spec.arrays]
        slab.evaluate()
    except (MemoryError, RuntimeError):
        slab.layers = [None] * len(slab.layers)
        raise
    if direct:
        clear(slab, n_tokens, slab.capacity)


def scatter(places: Iterable[Bytes], data: Bytes | memoryview) -> None:
    """Copy bytes into their places, which are arrays of any shape, one after the other."""
    whole, at = np.frombuffer(data, np.uint8), 0
    for place in places:
        place[...] = whole[at : at + place.size].reshape(place.shape)
        at += place.size


def split(specs: Iterable[LayerSpec], n_tokens: int, data: Bytes) -> list[Bytes]:
    """Returns the arrays of a range of so many tokens, each as [heads, tokens, bytes of a token], of which these bytes
    are made."""
    found, at = [], 0
    for spec in specs:
        for a in spec.arrays:
            size = a.token_bytes * n_tokens
            found.append(data[at : at + size].reshape(a.heads, n_tokens, a.dim * a.dtype.size))
            at += size
    return found


def clear(slab: Slab, lo: int, hi: int) -> None:
    """Zeros where nothing is read into."""
    for layer in slab.layers:
        for array in layer or ():
            rows(array)[:, lo:hi] = 0


TWICE_MORE = 2
"""How many times the bytes of a record `copy_in` takes in addition to them and their place."""


def copy_in(slab: Slab, lo: int, hi: int, data: Bytes) -> None:
    """The same by slice updates, from bytes in that order."""
    whole, at = mx.array(data), 0  # one transfer
    arrays = [array for layer in slab.layers for array in layer or ()]
    for array in arrays:
        _, heads, _, dim = array.shape
        n = heads * (hi - lo) * dim * array.dtype.size
        array[..., lo:hi, :] = mx.view(whole[at : at + n], array.dtype).reshape(1, heads, hi - lo, dim)
        at += n
    device.evaluate(arrays)
    mx.synchronize()  # else the memory of one record may be freed later than that of the next is allocated


def array_in(tensor: Tensor, fill: Callable[[Bytes], None], *, direct: bool) -> tuple[mx.array, Bytes]:
    """An array of its own, and its bytes, which `fill` is given to be written; unless `direct` they are there twice."""
    dtype = _TYPES[tensor.dtype]
    if direct and tensor.nbytes:
        with device.loading():
            array = uninitialised(tensor.shape, dtype)
            device.evaluate(array)
        data = bytes_of(array)
        fill(data)
        return array, data
    data = np.empty(tensor.nbytes, np.uint8)
    fill(data)
    flat = mx.array(data.view(np.bool_)) if dtype == mx.bool_ else mx.view(mx.array(data), dtype)
    array = flat.reshape(tensor.shape)
    device.evaluate(array)
    return array, data


class _Untouched:
    """A file of zeros that is never read: `mx.load` allocates for it, and is left with what the memory held."""

    closed = False

    def __init__(self, head: bytes, n_bytes: int) -> None:
        self._head, self._size, self._at = head, len(head) + n_bytes, 0

    def readinto(self, view: memoryview) -> int:
        n = min(len(view), self._size - self._at)
        known = self._head[self._at : self._at + n]
        view[: len(known)] = known
        self._at += n
        return n

    def read(self, n: int) -> bytes:
        found = self._head[self._at : self._at + n]
        self._at += len(found)
        return found

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = at + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        pass


def uninitialised(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Memory that is about to be written, without writing zeros there first. Evaluated by the caller."""
    found = Tensor("a", _CODES[dtype], shape)
    text = f'{{"a":{{"dtype":"{found.dtype}","shape":{list(shape)},"data_offsets":[0,{found.nbytes}]}}}}'.encode()
    loaded: Any = mx.load(_Untouched(struct.pack("<Q", len(text)) + text, found.nbytes), format="safetensors")  # type: ignore[arg-type, unused-ignore]
    return loaded["a"]
