"""Several caches in one layer (`CacheList`): all of them are restored, or none."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.model import exporting, stock
from onefold.cache.model.kinds.base import close_all
from onefold.cache.model.step_plan import StepPlan


class CompositeSnapshot:
    """One snapshot per member, closed together."""

    __slots__ = ("closed", "end", "members", "start")

    def __init__(self, members: list[Any]) -> None:
        self.members = members
        known = [m for m in members if m is not None]
        self.start = min(m.start for m in known)
        self.end = max(m.end for m in known)
        self.closed = False

    @property
    def size(self) -> int:
        return sum(m.size for m in self.members if m is not None)

    def close(self) -> None:
        if self.closed:
            raise RuntimeError(f"snapshot [{self.start}, {self.end}) is closed already")
        self.closed = True
        close_all(*self.members)
        self.members = []


def _composed(members: list[Any]) -> CompositeSnapshot | None:
    return CompositeSnapshot(members) if any(m is not None for m in members) else None


class CompositeLayer(stock.CacheList):  # type: ignore[misc, valid-type]
    kind = "composite"

    @staticmethod
    def rows(layers: list[Any], plan: StepPlan) -> Any:
        members = zip(*(layer.caches for layer in layers), strict=True)
        return CompositeRows(*(m[0].rows(list(m), plan) for m in members))

    @staticmethod
    def merge(caches: list[Any]) -> Any:
        """Returns mlx-lm's own batch of these layers, for a server whose model is not known."""
        return stock.CacheList.merge(caches)

    @property
    def offset(self) -> int:
        return max(c.offset for c in self.caches)

    @property  # type: ignore[misc]
    def state(self) -> list[mx.array]:
        return self.live_arrays()

    def snapshot(self, from_offset: int = 0) -> CompositeSnapshot | None:
        members = [c.snapshot(from_offset) for c in self.caches]
        return _composed(members)

    def can_restore(self, snapshot: CompositeSnapshot | None, target: int) -> bool:
        parts = [None] * len(self.caches) if snapshot is None else snapshot.members
        return all(c.can_restore(p, target) for c, p in zip(self.caches, parts, strict=True))

    def restore(self, snapshot: CompositeSnapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        parts = [None] * len(self.caches) if snapshot is None else snapshot.members
        for cache, part in zip(self.caches, parts, strict=True):
            cache.restore(part, target)
        return True

    def join(self, parent: CompositeSnapshot | None, child: CompositeSnapshot | None) -> CompositeSnapshot | None:
        if parent is None or child is None:
            close_all(parent, child)
            return None
        pairs = zip(self.caches, parent.members, child.members, strict=True)
        members = [c.join(p, k) for c, p, k in pairs]
        parent.members, child.members = [], []
        close_all(parent, child)
        return _composed(members)

    def split(self, snapshot: CompositeSnapshot | None, at: int) -> tuple[Any, Any]:
        if snapshot is None:
            return None, None
        halves = [c.split(m, at) for c, m in zip(self.caches, snapshot.members, strict=True)]
        snapshot.members = []
        snapshot.close()
        upper, lower = [h[0] for h in halves], [h[1] for h in halves]
        if at >= snapshot.end and any(m is not None for m in upper):  # members that cannot be split stay with the upper
            upper, lower = [u or m for u, m in halves], []
        return _composed(upper), _composed(lower)

    def export(self) -> Any:
        """Returns a CacheList of the members' copies; see `Exportable.export`."""
        return exporting.composite([c.export() for c in self.caches])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.export()

    def watchers(self) -> list[Any]:
        found: list[Any] = self.caches[0].watchers()
        return found

    def free(self) -> None:
        for cache in self.caches:
            cache.free()

    def live_arrays(self) -> list[mx.array]:
        return [a for c in self.caches for a in c.live_arrays()]


class CompositeRows(stock.CacheList):  # type: ignore[misc, valid-type]
    """The rows of each member."""

    def watchers(self) -> list[Any]:
        found: list[Any] = self.caches[0].watchers()
        return found
