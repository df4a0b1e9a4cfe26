"""mlx-lm's affine quantisation, attended without dequantising.

`quantized_matmul` copies a slice of a longer buffer, so it gets the whole buffer: scores beyond the range are cut off,
and weights are padded with zeros. A range shorter than half of its buffer is sliced, and so copied.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.memory.track import Track
from onefold.cache.model import stock
from onefold.cache.model.kernels.decode import Format
from onefold.cache.model.kinds.base import ForwardListener
from onefold.cache.model.kinds.full import FullLeaf, SegmentedLayer
from onefold.cache.model.kinds.leaf import Making
from onefold.cache.model.kinds.plain import Bound


class AffineCodec:
    plain = False
    kind = "quantized"

    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size
        self.kernel_format: Format | None = Format("affine", 3, bits, group_size) if bits in (4, 8) else None

    def spec(self, k: ArraySpec, v: ArraySpec) -> LayerSpec:
        def parts(a: ArraySpec) -> tuple[ArraySpec, ...]:
            scale = ArraySpec(a.heads, a.dim // self.group_size, a.dtype)
            return (ArraySpec(a.heads, a.dim * self.bits // 32, mx.uint32), scale, scale)

        return LayerSpec(parts(k) + parts(v))

    def encode(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        quantize = mx.quantize
        return (
            *quantize(k, group_size=self.group_size, bits=self.bits),
            *quantize(v, group_size=self.group_size, bits=self.bits),
        )

    def n_keys(self) -> int:
        return 3

    def dim(self, first: ArraySpec) -> int:
        return first.dim * 32 // self.bits

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        (w, scales, biases), lo, hi = _whole_or_slice(arrays[:3], lo, hi)
        s = mx.quantized_matmul(q, w, scales, biases, transpose=True, group_size=self.group_size, bits=self.bits)
        return s[..., lo:hi]

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        (w, scales, biases), lo, hi = _whole_or_slice(arrays[3:], lo, hi)
        capacity = w.shape[2]
        if (lo, hi) != (0, capacity):
            p = mx.pad(p, [(0, 0), (0, 0), (0, 0), (lo, capacity - hi)])
        return mx.quantized_matmul(p, w, scales, biases, transpose=False, group_size=self.group_size, bits=self.bits)

    def decode(self, words: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.dequantize(words, scales, biases, group_size=self.group_size, bits=self.bits)


class PackedLayer(SegmentedLayer, stock.QuantizedKVCache):  # type: ignore[misc, valid-type]
    """For a model that reads its quantised layers with mlx-lm's own attention: a `QuantizedKVCache` in one buffer."""

    def __init__(
        self, track: Track, index: int, codec: AffineCodec, *, listener: ForwardListener | None = None
    ) -> None:
        SegmentedLayer.__init__(self, track, index, codec, listener=listener)
        self.bits = codec.bits
        self.group_size = codec.group_size

    def keys_and_values(self) -> tuple[Any, Any]:
        self.track.gather()
        parts = [a[..., : self.offset, :] for a in self.track.pieces[0].slab.arrays(self.index)]
        return tuple(parts[:3]), tuple(parts[3:])


def _whole_or_slice(arrays: list[mx.array], lo: int, hi: int) -> tuple[list[mx.array], int, int]:
    capacity = arrays[0].shape[2]
    if 2 * (hi - lo) >= capacity:
        return arrays, lo, hi
    return [a[..., lo:hi, :] for a in arrays], 0, hi - lo


class QuantizedLeaf(FullLeaf):
    """A layer that the model quantises by itself."""

    kind = "quantized"

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        return stock.keeps_kv(cache) and stock.has(cache, "bits", "group_size")

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        self.native: AffineCodec = AffineCodec(cache.bits, cache.group_size)

    def make(self, given: Making) -> SegmentedLayer:
        if self.packed:
            return PackedLayer(given.track, self._index_in(given), self.codec, listener=given.listener)
        return super().make(given)

    def bounded(self, cache: Any, bound: Bound) -> Any:
        return cache
