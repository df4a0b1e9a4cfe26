"""Windows: mlx-lm's ring, with snapshots that restore it exactly.

- A snapshot holds exactly min(offset, max_size) entries in temporal order (after the kept first tokens), in its own
  arrays. With the offset that is the whole state: the write position follows from it.
- Until the window is full nothing is lost, so a snapshot can be clamped and the live state rewound. After it has
  wrapped, a snapshot cannot be clamped; the live state can be rewound by less than the tokens of its last forward (see
  `_left`).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import own_bytes
from onefold.cache.memory.runs import Stretch
from onefold.cache.model import exporting, stock
from onefold.cache.model.kinds.base import ForwardListener, NoListener, Snapshot
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.leaf import Leaf, Making, window
from onefold.cache.model.kinds.window import Window, window_snapshot
from onefold.cache.model.rows import AttentionRows


class RotatingLayer(Window, stock.RotatingKVCache):  # type: ignore[misc, valid-type]
    kind = "rotating"
    rows = staticmethod(AttentionRows)  # type: ignore[assignment]

    def __init__(self, max_size: int, keep: int = 0, *, listener: ForwardListener | None = None) -> None:
        super().__init__(max_size, keep)
        self.epoch = 0
        self._listener: ForwardListener = listener or NoListener()

    # hides mlx-lm's method: a ring is restored and trimmed through the contract, and not quantised in place
    to_quantized = property()  # type: ignore[assignment]

    def snapshot(self, from_offset: int = 0) -> Snapshot | None:
        if self.keys is None or self.offset <= max(0, from_offset):
            return None
        arrays: list[mx.array | None] = [self._canonical(a) for a in (self.keys, self.values)]
        device.evaluate(arrays)
        return Snapshot(arrays, max(0, from_offset), self.offset, (self.keep, self.max_size))

    def plain_snapshot(self) -> Snapshot | None:
        """Returns the entries as keys and values of the model's type."""
        return self.snapshot(0)

    @property
    def plain_bytes(self) -> int:
        return sum(a.nbytes for a in self.live_arrays())

    def can_restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if target < 0:
            return False
        if snapshot is None:
            return target == self.offset or (target < self.offset <= self.max_size) or self._left(target) > 0
        if snapshot.extra != (self.keep, self.max_size) or target > snapshot.end:
            return False
        return target == snapshot.end or snapshot.end <= self.max_size

    def restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        if snapshot is not None:
            self.adopt(snapshot)
        if target < self.offset:
            if self.offset <= self.max_size:
                self._straighten()
                left = target
            else:
                left = self._left(target)
                self.keys, self.values = (own_bytes(a[..., :left, :]) for a in (self.keys, self.values))
            self.offset, self._idx = target, left
        return True

    def is_trimmable(self) -> bool:
        """Whether it can be rewound by at least one token."""
        return self.offset < self.max_size or self.can_restore(None, self.offset - 1) or self.listener.rolls_back

    def _left(self, target: int) -> int:
        """Returns how many entries are left after a rewind of a full window to `target`; 0 if they would not fill it. A
        forward of several tokens leaves more entries than the window has, in temporal order, so its last tokens can be
        removed."""
        if self.keys is None or not 0 < target < self.offset or self._idx != self.keys.shape[2]:
            return 0
        left: int = self._idx - (self.offset - target)
        return left if left >= min(target, self.max_size) else 0

    def adopt(self, snapshot: Snapshot) -> None:
        """Share the snapshot's arrays; the first write copies them."""
        self._idx = self.adopt_arrays(snapshot)
        self.offset = snapshot.end

    def free(self) -> None:
        self.let_go()
        self.offset = self._idx = 0

    def mark(self) -> tuple[Any, ...]:
        return self.held, self.offset, self._idx

    def reset(self, mark: tuple[Any, ...]) -> None:
        self.held, self.offset, self._idx = mark

    # -- snapshots that share runs, of windows that keep no first tokens --------------------------

    @property
    def shares_runs(self) -> bool:  # type: ignore[override]
        return not self.keep

    def begin(self) -> int:
        return max(0, int(self.offset - self.max_size))

    def extra(self, begin: int) -> tuple[int, ...]:
        return self.keep, self.max_size

    def entries(self, array: mx.array, start: int, end: int) -> mx.array:
        hi = self._idx - (self.offset - end)
        lo = hi - (end - start)
        if lo >= 0:
            return array[..., lo:hi, :]
        size = array.shape[2]  # the ring has wrapped between the two
        if hi <= 0:
            return array[..., size + lo : size + hi, :]
        return mx.concatenate([array[..., size + lo :, :], array[..., :hi, :]], axis=2)

    def take_place(self, cache: Any) -> None:
        self._idx = cache._idx

    def as_stock(self) -> Any:
        return exporting.ring(self)

    def _straighten(self) -> None:
        """Sort the entries by time, so that a rewind cuts the newest ones."""
        self.keys, self.values = self._canonical(self.keys), self._canonical(self.values)
        self._idx = self.keys.shape[2]

    def _canonical(self, v: mx.array) -> mx.array:
        v = self._temporal_order(v) if self._idx < self.offset else v[..., : self._idx, :]
        extra = v.shape[2] - self.max_size
        if extra > 0:
            v = mx.concatenate([v[..., : self.keep, :], v[..., extra + self.keep :, :]], axis=2)
        return own_bytes(v)


def steps_mask(n: int, offset: int, max_size: int, keep: int) -> mx.array:
    """Returns the mask with which `n` tokens of one forward see what they would see if a ring that keeps its first
    tokens were fed one by one. mlx-lm's own mask hides the kept tokens from all but the first of them."""
    before = min(offset, max_size - 1)
    query, key = mx.arange(before, before + n)[:, None], mx.arange(before + n)[None]
    return (key <= query) & ((key < keep) | (key > query - (max_size - keep)))


def ring_entries(max_size: int, offset: int, n_tokens: int) -> int:
    """Returns the most entries that a ring's buffer can have after a forward of `n_tokens` at `offset`."""
    if n_tokens > 1:
        return min(offset, max_size + n_tokens) + n_tokens
    return max(max_size, min(offset, 2 * max_size)) if offset + 256 >= max_size else offset + 256


class RotatingLeaf(Leaf):
    kind = "rotating"

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        return stock.keeps_kv(cache) and stock.has(cache, "max_size", "keep")

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        self.max_size: int = cache.max_size
        self.keep: int = cache.keep

    def make(self, given: Making) -> RotatingLayer:
        return RotatingLayer(self.max_size, self.keep, listener=given.listener)

    def point_bytes(self, offset: int, n_tokens: int) -> int:
        return ring_entries(self.max_size, offset, n_tokens) * self.token_bytes

    def fits(self, cache: Any) -> bool:
        return super().fits(cache) and (cache.max_size, cache.keep) == (self.max_size, self.keep)

    def rewinds(self, cache: Any, to: int) -> bool:
        return bool(cache.is_trimmable()) or super().rewinds(cache, to)  # a ring that has not wrapped

    @property
    def window(self) -> int:
        return 0 if self.keep else self.max_size

    def revive_window(self, described: dict[str, Any], stretches: tuple[Stretch, ...]) -> Snapshot:
        end, extra = int(described["end"]), tuple(int(x) for x in described["extra"])
        begin = max(0, end - self.max_size)
        if extra != (self.keep, self.max_size) or stretches[0].start > begin:
            raise ValueError(f"a window of {extra} has no entries before {stretches[0].start}")
        return window_snapshot(stretches, begin, end, extra)

    def describe(self, bound: Bound | None) -> dict[str, Any]:
        return {"in_ranges": False} | window(self.keep, self.max_size, self.plain or ())
