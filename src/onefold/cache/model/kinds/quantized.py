"""Layers that a model quantises by itself, with mlx-lm's affine quantisation."""

from __future__ import annotations

from typing import Any

from onefold.cache.memory.track import Track
from onefold.cache.model import stock
from onefold.cache.model.formats.codec import Codec, StockForm
from onefold.cache.model.kinds.base import ForwardListener
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.full import FullLeaf, SegmentedLayer
from onefold.cache.model.kinds.leaf import Making


class PackedLayer(SegmentedLayer, stock.QuantizedKVCache):  # type: ignore[misc, valid-type]
    """For a model that reads its quantised layers with mlx-lm's own attention: a `QuantizedKVCache` in one buffer."""

    def __init__(
        self, track: Track, index: int, codec: Codec, *, listener: ForwardListener | None = None
    ) -> None:
        SegmentedLayer.__init__(self, track, index, codec, listener=listener)
        assert codec.stock_form is not None
        self.bits, self.group_size = codec.stock_form

    def keys_and_values(self) -> tuple[Any, Any]:
        self.track.gather()
        parts = [a[..., : self.offset, :] for a in self.track.pieces[0].slab.arrays(self.index)]
        return tuple(parts[:3]), tuple(parts[3:])


class QuantizedLeaf(FullLeaf):
    """A layer that the model quantises by itself."""

    kind = "quantized"

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        return stock.keeps_kv(cache) and stock.has(cache, "bits", "group_size")

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        self.native = StockForm(cache.bits, cache.group_size)

    def make(self, given: Making) -> SegmentedLayer:
        if self.packed:
            return PackedLayer(given.track, self._index_in(given), self.codec, listener=given.listener)
        return super().make(given)

    def bounded(self, cache: Any, bound: Bound) -> Any:
        return cache
