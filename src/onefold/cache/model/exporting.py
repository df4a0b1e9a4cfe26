"""Leased layers as mlx-lm's own caches: copies that mlx-lm can save, continue and quantise.

- An export is a copy in arrays of its own. Its bytes are reserved before it is made, or BudgetError is raised. They
  leave the ledger when the exported cache dies. What it grows by afterwards is not counted.
- The copy is of the class that mlx-lm itself would use: a plain layer becomes a KVCache, a quantised one a
  QuantizedKVCache, a ring a RotatingKVCache. A quantised ring has no class in mlx-lm and becomes a RotatingKVCache of
  dequantised entries. A cache class of the model's own stays that class.

Dispatches on a layer's kind; knows nothing of leases or trees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from onefold.cache.memory.ledger import Account
from onefold.cache.model import stock
from onefold.cache.model.stock import Kind


class Exportable:
    """A layer that can be copied into one of mlx-lm's caches."""

    _pulse: Any

    def export(self) -> Any:
        """Returns a copy of this layer as mlx-lm's own cache; its bytes are in the ledger while it lives. Raises
        BudgetError, or LeaseClosed if the lease was settled."""
        account = None if self._pulse is None else self._pulse.reserve_copy(_bytes(self))
        return counted(account, lambda: _stock_cache(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.export()


def counted(account: Account | None, make: Callable[[], Any]) -> Any:
    """Makes a copy whose bytes are reserved: the account is closed when the copy dies, or if it cannot be made."""
    made = None
    try:
        made = make()
    finally:
        if account is not None and made is None:
            account.close()
    if account is not None:
        weakref.finalize(made, account.close_later)
    return made


def _bytes(layer: Any) -> int:
    """What a copy of the layer will occupy at most."""
    if layer.kind in stock.SLICEABLE:
        in_track = layer.offset * layer.track.store.specs[layer.index].token_bytes
        return int(in_track if layer.ring is None else layer.ring.plain_bytes)
    return sum(a.nbytes for a in layer.live_arrays())


def _stock_cache(layer: Any) -> Any:
    if layer.kind in stock.SLICEABLE:
        return _sliceable(layer) if layer.ring is None else _ring(layer.ring)
    if layer.kind is Kind.ROTATING:
        return _ring(layer)
    if layer.kind is Kind.CHUNKED:
        return _chunk(layer)
    if layer.kind is Kind.RECURRENT:
        return _states(layer)
    return layer.as_made_by_the_model()


def _sliceable(layer: Any) -> Any:
    held = layer.snapshot(0)
    if layer.kind is Kind.QUANTIZED:
        packed: Any = stock.QuantizedKVCache(group_size=layer.codec.group_size, bits=layer.codec.bits)
        if held is not None:
            packed.keys, packed.values, packed.offset = tuple(held.arrays[:3]), tuple(held.arrays[3:]), held.end
        return packed
    plain: Any = stock.KVCache()
    if held is not None:
        plain.keys, plain.values, plain.offset = held.arrays[0], held.arrays[1], held.end
    return plain


def _ring(layer: Any) -> Any:
    ring = stock.RotatingKVCache(layer.max_size, layer.keep)
    held = layer.plain_snapshot()
    if held is not None:
        ring.keys, ring.values = held.arrays
        ring.offset, ring._idx = held.end, held.arrays[0].shape[2]
    return ring


def _chunk(layer: Any) -> Any:
    chunk = stock.ChunkedKVCache(layer.chunk_size)
    held = layer.snapshot(0)
    if held is not None:
        chunk.keys, chunk.values = held.arrays
        chunk.offset, chunk.start_position = held.end, held.extra[1]
    return chunk


def _states(layer: Any) -> Any:
    states = stock.ArraysCache(len(layer.cache))
    states.cache = layer.copied_states()
    return states


def composite(members: list[Any]) -> Any:
    """Exported members as one layer."""
    return stock.CacheList(*members)
