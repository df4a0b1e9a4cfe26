"""Caches that mlx-lm made and filled itself, taken over into a lease.

- Nothing is believed that the objects do not show: kinds and shapes must be the model's, and what is kept ends where
  the shortest layer ends. Recurrent layers do not say where they stand; they are believed where nothing contradicts.
- A buffer that grew the way mlx-lm's do is moved: from then on it is the lease's. What the tree has already is not
  looked at, and of anything else only the new part is copied, layer by layer.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory.arrays import own_bytes, own_name
from onefold.cache.memory.segment import STEP, ArraySpec
from onefold.cache.model import stock
from onefold.cache.model.anatomy import Anatomy, Leaf
from onefold.cache.model.stock import SLICEABLE, Kind
from onefold.cache.request.hold import Hold

MISFIT = "layers do not fit the model"
LONGER = "more tokens than KV"
SHORTER = "fewer tokens than KV"
DISAGREE = "layers disagree"


def fits(layers: list[Any], anatomies: list[Anatomy]) -> bool:
    """Whether the layers are of the kinds and shapes that the model makes."""
    expected, given = [leaf for a in anatomies for leaf in a.leaves], _leaves(layers)
    return len(given) == len(expected) and all(map(_fits, given, expected))


def sound_length(layers: list[Any], anatomies: list[Anatomy], n_tokens: int) -> tuple[int, str]:
    """How many of the tokens these layers really hold in a way that can be resumed, and why not all."""
    if not fits(layers, anatomies):
        return 0, MISFIT
    pairs = _pairs(layers, anatomies)
    offsets = {cache.offset for cache, leaf in pairs if leaf.kind is not Kind.RECURRENT}
    held = min(offsets, default=n_tokens)
    kept = min(held, n_tokens)
    reason = LONGER if n_tokens > held else DISAGREE if len(offsets) > 1 else SHORTER if n_tokens < held else ""
    if reason and not all(_rewinds(cache, leaf, kept) for cache, leaf in pairs):
        return 0, reason
    return kept, reason


def fill(hold: Hold, layers: list[Any], upto: int) -> None:
    """Have the lease's layers hold what these hold of the positions [0, upto)."""
    given = [cache for cache, _ in _pairs(layers, [b.anatomy for b in hold.watchers])]
    own = hold.leaves
    sliceable = [(x, _arrays(c)) for x, c in zip(own, given, strict=True) if x.kind in SLICEABLE]
    if sliceable:
        _fill_track(hold, sliceable, upto)
    for layer, cache in zip(own, given, strict=True):
        if layer.kind not in SLICEABLE:
            _fill_point(layer, cache, upto)
        layer.offset = upto
    for watcher in hold.watchers:
        watcher.reached = upto
        watcher.fed.begin_with(hold.tokens[:upto])
    hold.points.resize(hold.live_point_bytes(), force=True)


def _fill_track(hold: Hold, layers: list[tuple[Any, list[mx.array]]], upto: int) -> None:
    track = hold.track
    start = track.floor
    capacities = {a.shape[2] for _, arrays in layers for a in arrays}
    if start == 0 and len(capacities) == 1 and min(capacities) % STEP == 0:
        track.free()
        slab = track.store.slab(min(capacities))
        slab.foreign = True
        for layer, arrays in layers:
            slab.layers[layer.index] = [own_name(a) for a in arrays]
        slab.evaluate()
        track.append(slab, upto)
        return
    if start < upto:
        track.ensure(start, upto - start)
        for layer, arrays in layers:
            track.write(layer.index, start, tuple(a[..., start:upto, :] for a in arrays))
            mx.eval(track.pieces[-1].slab.arrays(layer.index))


def _fill_point(layer: Any, cache: Any, upto: int) -> None:
    if layer.kind is Kind.OWN:
        layer.take_over(cache)
    elif layer.kind is Kind.RECURRENT:
        layer.free()
        layer.cache = [None if a is None else own_bytes(a) for a in cache.cache]
    else:
        layer.keys, layer.values, layer.offset = own_name(cache.keys), own_name(cache.values), cache.offset
        if layer.kind is Kind.ROTATING:
            layer._idx = cache._idx
        else:
            layer.start_position = cache.start_position
        if layer.offset != upto and not layer.restore(None, upto):
            raise ValueError(f"a layer that stands at {layer.offset} cannot be cut at {upto}")
    mx.eval(layer.live_arrays())


def to_quantized(layer: Any, group_size: int = 64, bits: int = 4) -> Any:
    """What a plain layer holds as mlx-lm's own quantised cache: a copy of its own."""
    keys, values = [], []
    for arrays, lo, hi, _ in layer.track.read(layer.index, layer.offset):
        keys.append(arrays[0][..., lo:hi, :])
        values.append(arrays[1][..., lo:hi, :])
    packed = stock.QuantizedKVCache(group_size=group_size, bits=bits)
    if keys:
        packed.update_and_fetch(mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2))
        mx.eval(packed.keys, packed.values)
    return packed


def _pairs(layers: list[Any], anatomies: list[Anatomy]) -> list[tuple[Any, Leaf]]:
    """Each cache that holds state, with what the model's survey says of it."""
    expected = [leaf for a in anatomies for leaf in a.leaves]
    return [(cache, leaf) for cache, leaf in zip(_leaves(layers), expected, strict=True) if leaf.used]


def _leaves(layers: list[Any]) -> list[Any]:
    return [cache for layer in layers for _, cache in stock.flatten(layer)]


def _arrays(cache: Any) -> list[mx.array]:
    def parts(x: Any) -> list[mx.array]:
        return list(x) if isinstance(x, (tuple, list)) else [x]

    return parts(cache.keys) + parts(cache.values)


def _fits(cache: Any, leaf: Leaf) -> bool:
    if stock.kind_of(cache) is not leaf.kind:
        return False
    if not leaf.used:
        return True
    if leaf.kind is Kind.RECURRENT:
        return len(cache.cache) == leaf.size and all(a is None or a.shape[0] == 1 for a in cache.cache)
    if leaf.kind is Kind.OWN:
        return type(cache) is type(leaf.pristine)
    if cache.keys is None:
        return False
    if leaf.kind is Kind.ROTATING and (cache.max_size, cache.keep) != leaf.window:
        return False
    if leaf.kind is Kind.CHUNKED and cache.chunk_size != leaf.window[0]:
        return False
    arrays = _arrays(cache)
    if leaf.spec is None:
        return arrays[0].shape[0] == 1
    found = [ArraySpec(a.shape[1], a.shape[3], a.dtype) for a in arrays]
    return all(a.shape[0] == 1 for a in arrays) and found == list(leaf.spec.arrays)


def _rewinds(cache: Any, leaf: Leaf, to: int) -> bool:
    """Whether a layer that does not end at `to` can be cut there."""
    if leaf.kind in SLICEABLE:
        return True
    if leaf.kind is Kind.RECURRENT:
        return False
    whole = leaf.kind is Kind.ROTATING and cache.is_trimmable()  # a ring that has not wrapped
    return bool(whole or cache.offset == to)
