"""Copies leased layers to mlx-lm's own caches, which mlx-lm can save, continue and quantise.

- An export is a copy in its own arrays. Its bytes are reserved before it is made, or BudgetError is raised. They leave
  the ledger when the exported cache is freed. Its growth is not counted.
- The copy is of the class that mlx-lm itself would use: a plain layer becomes a KVCache, a quantised one a
  QuantizedKVCache, a ring a RotatingKVCache. A quantised ring, and KV in a format that mlx-lm does not have, become
  a RotatingKVCache and a KVCache of decoded entries. A cache class of the model's own stays that class.

Each kind of layer chooses its class (`as_stock`). Knows nothing of leases or trees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.ledger import Account
from onefold.cache.memory.shapes import ArraySpec
from onefold.cache.model import stock
from onefold.cache.model.formats.codec import Codec


class Exportable:
    """A layer that can be copied into one of mlx-lm's caches."""

    _listener: Any

    def export(self) -> Any:
        """Returns a copy of this layer as mlx-lm's own cache; its bytes are in the ledger while it lives. Raises
        BudgetError if there is no room, and LeaseClosed if the lease is closed."""
        account = None if self._listener is None else self._listener.reserve_copy(self.export_bytes)
        return counted(account, self.as_stock)

    @property
    def export_bytes(self) -> int:
        """The most bytes that a copy of the layer occupies."""
        return sum(a.nbytes for a in self.live_arrays())

    def as_stock(self) -> Any:
        """Returns the copy, in its own arrays. Reserves nothing."""
        raise NotImplementedError

    def live_arrays(self) -> list[mx.array]:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.export()


def counted(account: Account | None, make: Callable[[], Any]) -> Any:
    """Makes a copy whose bytes are reserved. The account is closed when the copy is freed, or if `make` raises."""
    made = None
    try:
        made = make()
    finally:
        if account is not None and made is None:
            account.close()
    if account is not None:
        weakref.finalize(made, account.close_later)
    return made


def plain(held: Any) -> Any:
    """Returns a KVCache of a snapshot from 0; an empty one for None."""
    cache: Any = stock.KVCache()
    if held is not None:
        cache.keys, cache.values, cache.offset = held.arrays[0], held.arrays[1], held.end
    return cache


def of_codec(held: Any, codec: Codec, specs: Sequence[ArraySpec]) -> Any:
    """Returns a cache of a snapshot from 0, an empty one for None: a QuantizedKVCache if it can hold what the codec
    stores, else a KVCache."""
    if codec.stock_form is None:
        if held is not None and not codec.plain:
            held.arrays = list(codec.as_made(held.arrays, codec.made(specs)[2]))
            device.evaluate(held.arrays)
        return plain(held)
    bits, group_size = codec.stock_form
    cache: Any = stock.QuantizedKVCache(group_size=group_size, bits=bits)
    if held is not None:
        n = codec.n_keys()
        cache.keys, cache.values, cache.offset = tuple(held.arrays[:n]), tuple(held.arrays[n:]), held.end
    return cache


def ring(layer: Any) -> Any:
    """Returns a RotatingKVCache of a layer that is a ring."""
    cache = stock.RotatingKVCache(layer.max_size, layer.keep)
    held = layer.plain_snapshot()
    if held is not None:
        cache.keys, cache.values = held.arrays
        cache.offset, cache._idx = held.end, held.arrays[0].shape[2]
    return cache


def chunk(layer: Any) -> Any:
    """Returns a ChunkedKVCache of a chunked layer."""
    cache = stock.ChunkedKVCache(layer.chunk_size)
    held = layer.snapshot(0)
    if held is not None:
        cache.keys, cache.values = held.arrays
        cache.offset, cache.start_position = held.end, held.extra[1]
    return cache


def states(copies: list[Any]) -> Any:
    """Returns an ArraysCache of copied states."""
    cache = stock.ArraysCache(len(copies))
    cache.cache = copies
    return cache


def composite(members: list[Any]) -> Any:
    """Returns exported members as one layer."""
    return stock.CacheList(*members)
