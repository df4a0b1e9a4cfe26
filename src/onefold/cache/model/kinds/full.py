"""Sliceable layers: full attention KV, kept in a track's slabs, plain or affine-quantised.

- Writes go to the track's tail in place; positions that the tree holds already are not written again.
- With one piece that starts at index 0 the layer hands out plain slices: that is the stock path at stock
  speed. Otherwise it hands out handles, for the attention seam.
- A bounded layer (`max_kv_size`) is sliceable until it would outgrow its bound; then `rotate` turns it into
  mlx-lm's own ring, or one of packed entries, and from there on it is a window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from onefold.cache.memory.arrays import own_bytes
from onefold.cache.memory.segment import ArraySpec, LayerSpec
from onefold.cache.memory.track import Track
from onefold.cache.model import stock
from onefold.cache.model.attention import Codec, Handle
from onefold.cache.model.kinds.base import ForwardListener, Snapshot, Watched, close_all
from onefold.cache.model.kinds.rotating import RotatingLayer, steps_mask
from onefold.cache.model.stock import Kind


class Bound(NamedTuple):
    max_size: int
    keep: int


class PlainCodec:
    """Keys and values as the model made them."""

    plain = True
    kind = Kind.FULL

    def spec(self, k: ArraySpec, v: ArraySpec) -> LayerSpec:
        return LayerSpec((k, v))

    def encode(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        return k, v

    def n_keys(self) -> int:
        return 1

    def dim(self, first: ArraySpec) -> int:
        return first.dim

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return q @ arrays[0][..., lo:hi, :].swapaxes(-1, -2)

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array:
        return p @ arrays[1][..., lo:hi, :]

    def ring(self, bound: Bound) -> RotatingLayer:
        """What a bounded layer of this format becomes when it rotates."""
        return RotatingLayer(bound.max_size, bound.keep)


class SegmentedLayer(Watched):
    """One sliceable layer of one sequence."""

    def __init__(
        self,
        track: Track,
        index: int,
        codec: Any = None,
        *,
        pulse: ForwardListener | None = None,
        bound: Bound | None = None,
        always_handles: bool = False,
    ) -> None:
        self.track = track
        self.index = index
        self.codec = codec or PlainCodec()
        self.kind: Kind = self.codec.kind
        self.offset = 0
        self.epoch = 0
        self.bound = bound
        self.ring: Any = None
        """What it has become, once it has outgrown its bound."""
        self.consumed = [0]
        self._pulse = pulse
        self._always_handles = always_handles

    # -- what mlx-lm's models call ---------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self.admit(keys.shape[2])
        fetched = self.store(keys, values)
        return self.keys_and_values() if fetched is None else fetched

    def admit(self, n: int) -> None:
        """Before a write of `n` tokens: room for them is made, or refused."""
        if self._pulse is not None:
            self._pulse.enter(self, n)
        else:
            self._enter_alone(n)

    def store(self, keys: mx.array, values: mx.array) -> tuple[Any, Any] | None:
        """Write what was admitted, without reading back; a ring's write gives what there is to read."""
        if self.ring is not None:
            fetched: tuple[Any, Any] = self.ring.update_and_fetch(keys, values)
            self.offset = self.ring.offset
            return fetched
        self.track.write(self.index, self.offset, self.codec.encode(keys, values))
        self.offset += keys.shape[2]
        return None

    def keys_and_values(self) -> tuple[Any, Any]:
        if self.ring is not None:
            fetched: tuple[Any, Any] = self.ring.keys_and_values()
            return fetched
        self.track.gather()
        pieces, hi = self.track.pieces, self.offset
        if self.codec.plain and not self._always_handles and pieces and pieces[0].lo == 0 and hi <= pieces[0].hi:
            k, v = pieces[0].slab.arrays(self.index)
            return k[..., :hi, :], v[..., :hi, :]
        views = self.track.read(self.index, self.offset)
        codec: Codec = self.codec
        spec = self.track.store.specs[self.index].arrays
        k_spec, v_spec = spec[0], spec[codec.n_keys()]
        dtype = spec[codec.n_keys() - 1].dtype

        def handle(s: ArraySpec) -> Handle:
            return Handle([views], codec, (1, s.heads, self.offset, codec.dim(s)), dtype, self.consumed)

        return handle(k_spec), handle(v_spec)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if self.bound is not None and (self.ring is not None or self.offset + N > self.bound.max_size):
            if N > 1 and self.bound.keep and self.pulse.verifies:
                return steps_mask(N, self.offset, *self.bound)
            ring = self.ring or self._ring_to_be()
            return ring.make_mask(N, return_array=return_array, window_size=window_size)
        return stock.attention_mask(N, offset=self.offset, return_array=return_array, window_size=window_size)

    @staticmethod
    def merge(caches: list[Any]) -> Any:
        """mlx-lm's own padded batch of these, for a server whose model is not known. A copy."""
        return stock.BatchKVCache.merge(caches)

    def is_trimmable(self) -> bool:
        return self.ring is None or self.ring.is_trimmable() or self.pulse.rolls_back

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.live_arrays())

    @property
    def state(self) -> list[mx.array]:
        """What must be evaluated for this layer to be up to date."""
        return self.live_arrays()

    @property
    def keys(self) -> mx.array | None:
        return self._slot(0)

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self._set_slot(0, array)

    @property
    def values(self) -> mx.array | None:
        return self._slot(self.codec.n_keys())

    @values.setter
    def values(self, array: mx.array) -> None:
        self._set_slot(self.codec.n_keys(), array)

    # -- the contract --------------------------------------------------------------------

    def snapshot(self, from_offset: int = 0) -> Snapshot | None:
        start = max(0, from_offset)
        if self.ring is not None:
            return self.ring.snapshot(from_offset)
        if self.offset <= start:
            return None
        parts: list[list[mx.array]] = []
        at = 0
        for arrays, lo, hi, _ in self.track.read(self.index, self.offset):
            a, b = max(lo, lo + start - at), hi
            if a < b:
                parts.append([x[..., a:b, :] for x in arrays])
            at += hi - lo
        joined: list[mx.array | None] = [
            mx.concatenate(list(x), axis=2) if len(x) > 1 else own_bytes(x[0]) for x in zip(*parts, strict=True)
        ]
        mx.eval(joined)
        return Snapshot(joined, start, self.offset)

    def can_restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if target < 0:
            return False
        ring = self._ring_for(snapshot)
        if ring is not None:
            return self._is_whole(snapshot) and ring.can_restore(self._as_window(snapshot), target)
        if snapshot is None:
            return target <= self.offset
        return target <= snapshot.end and self.offset >= snapshot.start

    def restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        ring = self._ring_for(snapshot)
        if ring is not None:
            ring.restore(self._as_window(snapshot), target)
            if self.ring is None and self._pulse is None:
                self.track.free()
            self.ring, self.offset = ring, ring.offset
            return True
        if snapshot is not None:
            self.track.rewind(snapshot.start)
            self.track.ensure(snapshot.start, snapshot.end - snapshot.start, keep=self.offset)
            self.track.write(self.index, snapshot.start, tuple(a for a in snapshot.arrays if a is not None))
            self.offset = snapshot.end
        if target < self.offset:
            self.offset = target
            self.track.rewind(target)
        return True

    def join(self, parent: Snapshot | None, child: Snapshot | None) -> Snapshot | None:
        if child is not None and child.extra:  # a ring's
            close_all(parent)
            return child
        if parent is None or child is None:
            close_all(parent, child)
            return None
        arrays = [
            mx.concatenate([a, b], axis=2)
            for a, b in zip(parent.arrays, child.arrays, strict=True)
            if a is not None and b is not None
        ]
        mx.eval(arrays)
        merged = Snapshot(list(arrays), parent.start, child.end)
        close_all(parent, child)
        return merged

    def split(self, snapshot: Snapshot | None, at: int) -> tuple[Snapshot | None, Snapshot | None]:
        if snapshot is None or snapshot.extra or at <= snapshot.start:
            return None, snapshot
        if at >= snapshot.end:
            return snapshot, None
        k = at - snapshot.start
        arrays = [a for a in snapshot.arrays if a is not None]
        upper: list[mx.array | None] = [own_bytes(a[..., :k, :]) for a in arrays]
        lower: list[mx.array | None] = [own_bytes(a[..., k:, :]) for a in arrays]
        mx.eval(upper, lower)
        start, end = snapshot.start, snapshot.end
        snapshot.close()
        return Snapshot(upper, start, at), Snapshot(lower, at, end)

    def free(self) -> None:
        self.track.free()
        self.ring = None
        self.offset = 0

    def mark(self) -> tuple[Any, ...]:
        return self.offset, None if self.ring is None else self.ring.mark()

    def reset(self, mark: tuple[Any, ...]) -> None:
        self.offset = mark[0]
        if self.ring is not None and mark[1] is not None:
            self.ring.reset(mark[1])

    def live_arrays(self) -> list[mx.array]:
        if self.ring is not None:
            return self.ring.live_arrays()
        found: list[mx.array] = []
        for piece in self.track.pieces:
            layer = piece.slab.layers[self.index] if self.track.writable(piece) else None
            found.extend(layer or [])
        return found

    # -- bounded conversations -----------------------------------------------------------

    def outgrows(self, n: int) -> bool:
        return self.bound is not None and self.ring is None and self.offset + n > self.bound.max_size

    def rotate(self) -> None:
        """Become a ring that holds what this layer holds. The track is left to its owner."""
        assert self.bound is not None
        held = self.snapshot(0)
        self.ring = self.codec.ring(self.bound)
        if held is not None:
            self.ring.adopt(held)

    def _ring_for(self, snapshot: Snapshot | None) -> Any:
        """The ring that a restore goes to: this layer's, or a new one for a snapshot that a ring has made."""
        if self.ring is None and snapshot is not None and snapshot.extra and self.bound is not None:
            return self.codec.ring(self.bound)
        return self.ring

    def _is_whole(self, snapshot: Snapshot | None) -> bool:
        """Whether a ring finds all that it needs in the snapshot; a range relies on what goes before it."""
        return snapshot is None or bool(snapshot.extra) or snapshot.start == 0

    def _as_window(self, snapshot: Snapshot | None) -> Snapshot | None:
        """A range from 0, taken before the rotation, as the window that it is."""
        if snapshot is None or snapshot.extra:
            return snapshot
        assert self.bound is not None
        return Snapshot(snapshot.arrays, 0, snapshot.end, (self.bound.keep, self.bound.max_size))

    def _ring_to_be(self) -> Any:
        """A ring that stands where this layer stands, for its mask: the mask is made before the update that rotates."""
        assert self.bound is not None
        ring = stock.RotatingKVCache(self.bound.max_size, self.bound.keep)
        ring.offset = ring._idx = self.offset
        return ring

    # -- details -------------------------------------------------------------------------

    def _enter_alone(self, n: int) -> None:
        if self.outgrows(n):
            self.rotate()
            self.track.free()
        if self.ring is None:
            self.track.ensure(self.offset, n, keep=self.offset)

    def _slot(self, j: int) -> mx.array | None:
        if self.ring is not None:
            return self.ring.keys if j == 0 else self.ring.values
        self.track.gather()
        return self.track.pieces[-1].slab.arrays(self.index)[j] if self.track.pieces else None

    def _set_slot(self, j: int, array: mx.array) -> None:
        if self.ring is not None:
            setattr(self.ring, "keys" if j == 0 else "values", array)
            return
        piece = self.track.pieces[-1]
        if self.track.writable(piece):
            piece.slab.arrays(self.index)[j] = array
