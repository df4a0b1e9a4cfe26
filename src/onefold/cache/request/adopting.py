"""Takes over caches that mlx-lm made and filled itself into a lease.

- The objects are checked: kinds and shapes must be the model's, and only the tokens of the shortest layer are kept.
  Recurrent layers have no position; they are assumed to be at the position of the others.
- A buffer whose capacity is a multiple of mlx-lm's step is moved: from then on it is the lease's. Tokens that the tree
  has already are skipped, and of other buffers only the new part is copied, layer by layer.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import own_name
from onefold.cache.memory.segment import STEP
from onefold.cache.model import stock
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.kinds.leaf import Leaf, arrays_of
from onefold.cache.model.kinds.registry import kind_of
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
    """Returns how many of the tokens these layers hold in a way that can be resumed, and the reason why not all."""
    if not fits(layers, anatomies):
        return 0, MISFIT
    pairs = _pairs(layers, anatomies)
    offsets = {cache.offset for cache, leaf in pairs if leaf.says_offset}
    held = min(offsets, default=n_tokens)
    kept = min(held, n_tokens)
    reason = LONGER if n_tokens > held else DISAGREE if len(offsets) > 1 else SHORTER if n_tokens < held else ""
    if reason and not all(leaf.rewinds(cache, kept) for cache, leaf in pairs):
        return 0, reason
    return kept, reason


def fill(hold: Hold, layers: list[Any], upto: int) -> None:
    """Fill the lease's layers with the positions [0, upto) of these layers."""
    given = [cache for cache, _ in _pairs(layers, [b.anatomy for b in hold.watchers])]
    own = hold.leaves
    sliceable = [(x, arrays_of(c)) for x, c in zip(own, given, strict=True) if x.sliceable]
    if sliceable:
        _fill_track(hold, sliceable, upto)
    for layer, cache in zip(own, given, strict=True):
        if not layer.sliceable:
            layer.take_over(cache, upto)
            device.evaluate(layer.live_arrays())
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
            device.evaluate(track.pieces[-1].slab.arrays(layer.index))


def to_quantized(layer: Any, group_size: int = 64, bits: int = 4) -> Any:
    """Returns a copy of a plain layer as mlx-lm's own quantised cache."""
    keys, values = [], []
    for arrays, lo, hi, _ in layer.track.read(layer.index, layer.offset):
        keys.append(arrays[0][..., lo:hi, :])
        values.append(arrays[1][..., lo:hi, :])
    packed = stock.QuantizedKVCache(group_size=group_size, bits=bits)
    if keys:
        packed.update_and_fetch(mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2))
        device.evaluate(packed.keys, packed.values)
    return packed


def _pairs(layers: list[Any], anatomies: list[Anatomy]) -> list[tuple[Any, Leaf]]:
    """Returns each cache that holds state, with its leaf from the model's survey."""
    expected = [leaf for a in anatomies for leaf in a.leaves]
    return [(cache, leaf) for cache, leaf in zip(_leaves(layers), expected, strict=True) if leaf.used]


def _leaves(layers: list[Any]) -> list[Any]:
    return [cache for layer in layers for _, cache in stock.flatten(layer)]


def _fits(cache: Any, leaf: Leaf) -> bool:
    return kind_of(cache).kind == leaf.kind and (not leaf.used or leaf.fits(cache))
