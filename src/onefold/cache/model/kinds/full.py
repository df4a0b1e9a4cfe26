"""Sliceable layers: full attention KV in a track's slabs, plain or affine-quantised.

- Writes go to the track's tail in place; positions that the tree has already are not written again.
- If the track is one piece that starts at index 0, the layer returns plain slices: the stock path, at stock speed.
  Otherwise it returns handles, for the attention seam.
- A bounded layer (`max_kv_size`) is sliceable until it would outgrow its bound. Then `rotate` turns it into mlx-lm's
  own ring, or one of packed entries, and it is a window from then on.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import own_bytes
from onefold.cache.memory.shapes import ArraySpec
from onefold.cache.memory.track import Track
from onefold.cache.model import exporting, stock
from onefold.cache.model.attention import Forms, Handle
from onefold.cache.model.formats.plain import PlainCodec
from onefold.cache.model.formats.registry import affine_codec
from onefold.cache.model.kinds.base import ForwardListener, Ranged, Snapshot
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.leaf import Leaf, Making, arrays_of, window
from onefold.cache.model.kinds.packed_ring import PackedRing
from onefold.cache.model.kinds.rotating import RotatingLayer, steps_mask
from onefold.cache.model.rows import AttentionRows
from onefold.cache.model.step_plan import Rows, StepPlan


def _buffer(side: int) -> property:
    """Makes the property for the first array of the keys (0) or the values (1) in the buffer that the layer writes."""

    def slot(self: SegmentedLayer) -> int:
        return self.codec.n_keys() if side else 0

    def read(self: SegmentedLayer) -> mx.array | None:
        if self.ring is not None:
            return self.ring.values if side else self.ring.keys
        self.track.gather()
        return self.track.pieces[-1].slab.arrays(self.index)[slot(self)] if self.track.pieces else None

    def write(self: SegmentedLayer, array: mx.array) -> None:
        if self.ring is not None:
            setattr(self.ring, "values" if side else "keys", array)
            return
        piece = self.track.pieces[-1]
        if self.track.writable(piece):
            piece.slab.arrays(self.index)[slot(self)] = array

    return property(read, write)


def _forward(layer: SegmentedLayer) -> int | None:
    """Returns the number of the forward that is running; None for a layer without a listener, which numbers them."""
    return layer.epoch if layer.watchers() else None


def _in_kernel(layer: SegmentedLayer, n_tokens: int) -> bool:
    """Whether the device's decode kernel computes a forward of `n_tokens` in this layer, and is faster than MLX's own
    attention."""
    kernel = layer.plan.kernel(_forward(layer))
    if kernel is None or layer.track.contiguous or layer.forms is None:
        return False
    if not kernel.takes_chunk(n_tokens, layer.offset):
        return False
    return not kernel.shape_reason(layer.forms.shape)


def _handles(layer: SegmentedLayer) -> tuple[Handle, Handle]:
    """Returns handles for the keys and values of one sequence."""
    layout = layer.plan.lay_out(layer.track, layer.offset, _forward(layer))
    assert layer.forms is not None
    return layer.forms.handles(Rows(layout, layer.index), layer.offset, layer.plan, layer.consumed)


def _mask_ring(bound: Bound, offset: int) -> Any:
    """Returns a ring at `offset`, for its mask: models make the mask before the update that rotates the layer."""
    ring = stock.RotatingKVCache(bound.max_size, bound.keep)
    ring.offset = ring._idx = offset
    return ring


class SegmentedLayer(Ranged):
    """One sliceable layer of one sequence."""

    sliceable = True
    rows = staticmethod(AttentionRows)  # type: ignore[assignment]

    def __init__(
        self,
        track: Track,
        index: int,
        codec: Any = None,
        *,
        listener: ForwardListener | None = None,
        bound: Bound | None = None,
        always_handles: bool = False,
        plan: StepPlan | None = None,
    ) -> None:
        """`plan` is shared by the layers of a request."""
        self.track = track
        self.index = index
        self.codec = codec or PlainCodec()
        self.kind: str = self.codec.kind
        self.is_plain: bool = self.codec.plain
        self.offset = 0
        self.epoch = 0
        self.bound = bound
        self.ring: Any = None
        """The ring that holds its state, once it has outgrown its bound; None before."""
        self.consumed = [0]
        self._listener = listener
        self._always_handles = always_handles
        self.plan = StepPlan() if plan is None else plan
        self.forms = Forms.of(self.codec, track.store.specs[index].arrays) if track.store.specs else None

    # -- what mlx-lm's models call ---------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self.admit(keys.shape[2])
        fetched = self.store(keys, values)
        if fetched is not None:
            return fetched
        return _handles(self) if _in_kernel(self, keys.shape[2]) else self.keys_and_values()

    def admit(self, n: int) -> None:
        """Make room for a write of `n` tokens. Raises BudgetError, before anything is written."""
        if self._listener is not None:
            self._listener.enter(self, n)
            return
        if self.outgrows(n):
            self.rotate()
            self.track.free()
        if self.ring is None:
            self.track.ensure(self.offset, n, keep=self.offset)

    def store(self, keys: mx.array, values: mx.array) -> tuple[Any, Any] | None:
        """Write tokens that were admitted. Returns None; a ring returns its keys and values."""
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
        return _handles(self)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if self.bound is not None and (self.ring is not None or self.offset + N > self.bound.max_size):
            if N > 1 and self.bound.keep and self.listener.verifies:
                return steps_mask(N, self.offset, *self.bound)
            ring = self.ring or _mask_ring(self.bound, self.offset)
            return ring.make_mask(N, return_array=return_array, window_size=window_size)
        return stock.attention_mask(N, offset=self.offset, return_array=return_array, window_size=window_size)

    @staticmethod
    def merge(caches: list[Any]) -> Any:
        """Returns mlx-lm's own padded batch of these layers, a copy, for a server whose model is not known."""
        return stock.BatchKVCache.merge(caches)

    def is_trimmable(self) -> bool:
        return self.ring is None or self.ring.is_trimmable() or self.listener.rolls_back

    keys = _buffer(0)
    values = _buffer(1)

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
        device.evaluate(joined)
        return Snapshot(joined, start, self.offset)

    def can_restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if target < 0:
            return False
        ring = self._ring_for(snapshot)
        if ring is not None:
            whole = snapshot is None or snapshot.extra or snapshot.start == 0  # a later range lacks the tokens before
            return bool(whole) and ring.can_restore(self._as_window(snapshot), target)
        if snapshot is None:
            return target <= self.offset
        return target <= snapshot.end and self.offset >= snapshot.start

    def restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        ring = self._ring_for(snapshot)
        if ring is not None:
            ring.restore(self._as_window(snapshot), target)
            if self.ring is None and self._listener is None:
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

    @property
    def in_track(self) -> bool:
        return self.ring is None

    def clear(self) -> None:
        self.ring = None
        self.offset = 0

    def free(self) -> None:
        self.track.free()
        self.clear()

    @property
    def export_bytes(self) -> int:
        if self.ring is not None:
            return int(self.ring.plain_bytes)
        spec = self.track.store.specs[self.index]
        if self.codec.plain or self.codec.stock_form is not None:
            return self.offset * spec.token_bytes
        k, v = spec.arrays[0], spec.arrays[self.codec.n_keys()]
        k_dim, v_dim, dtype = self.codec.made(spec.arrays)
        return self.offset * (k.heads * k_dim + v.heads * v_dim) * dtype.size

    def as_stock(self) -> Any:
        if self.ring is not None:
            return exporting.ring(self.ring)
        held = self.snapshot(0)
        return exporting.of_codec(held, self.codec, self.track.store.specs[self.index].arrays)

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
        """Become a ring with the content of this layer. The owner frees the track."""
        assert self.bound is not None
        held = self.snapshot(0)
        self.ring = self._new_ring()
        if held is not None:
            self.ring.adopt(held)

    def put_back(self, snapshot: Snapshot, target: int) -> bool:
        """Become the ring of a checkpoint's snapshot. (A checkpoint has a snapshot of this layer only if it had
        rotated.) Returns False, and changes nothing, if `target` is not its end."""
        if snapshot.end != target:
            return False
        self.rotate()
        self.ring.adopt(snapshot)
        self.offset = target
        return True

    def _new_ring(self) -> Any:
        assert self.bound is not None
        return RotatingLayer(*self.bound) if self.codec.plain else PackedRing(*self.bound, self.codec)

    def _ring_for(self, snapshot: Snapshot | None) -> Any:
        """Returns the ring to restore: this layer's, or a new one for a ring's snapshot; None if there is none."""
        if self.ring is None and snapshot is not None and snapshot.extra and self.bound is not None:
            return self._new_ring()
        return self.ring

    def _as_window(self, snapshot: Snapshot | None) -> Snapshot | None:
        """Returns the snapshot of a range from 0, taken before the rotation, as a snapshot of a window."""
        if snapshot is None or snapshot.extra:
            return snapshot
        assert self.bound is not None
        return Snapshot(snapshot.arrays, 0, snapshot.end, (self.bound.keep, self.bound.max_size))


class FullLeaf(Leaf):
    kind = "full"
    sliceable = True

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        if not stock.keeps_kv(cache) or not stock.has(cache, "is_trimmable", "trim"):
            return False
        return bool(cache.is_trimmable()) and isinstance(cache.offset, int)

    def set_codec(self, codec: Any) -> None:
        """Encode its keys and values with `codec`, unless the model quantises them itself."""
        assert self.plain is not None
        self.codec = codec if self.native is None else affine_codec(*self.plain, *self.native, native=True)
        self.spec = self.codec.spec(*self.plain)
        self.kind = self.codec.kind
        self.token_bytes = self.spec.token_bytes

    def make(self, given: Making) -> SegmentedLayer:
        return SegmentedLayer(
            given.track,
            self._index_in(given),
            self.codec,
            listener=given.listener,
            bound=given.bound,
            always_handles=given.always_handles,
            plan=given.plan,
        )

    def _index_in(self, given: Making) -> int:
        return given.first_index + max(0, self.index)

    def fits(self, cache: Any) -> bool:
        if not super().fits(cache):
            return False
        found = tuple(ArraySpec(a.shape[1], a.shape[3], a.dtype) for a in arrays_of(cache))
        return self.spec is None or found == tuple(self.spec.arrays)

    def rewinds(self, cache: Any, to: int) -> bool:
        return True

    def bounded(self, cache: Any, bound: Bound) -> Any:
        return stock.RotatingKVCache(*bound)

    def describe(self, bound: Bound | None) -> dict[str, Any]:
        layout: dict[str, Any] = {"in_ranges": True, "slots": []}
        if bound is not None and self.spec is not None:
            layout |= window(bound.keep, bound.max_size, self.spec.arrays)
        return layout
