"""What sliding windows and chunks have in common: the latest entries as keys and values, and snapshots that share them.

- A snapshot of a window is a chain of stretches of runs (`memory/runs.py`). One that overlaps an earlier one of the
  same conversation shares its runs, and copies only the entries since.
- A restored layer refers to the runs' arrays, and joins them when a forward first writes, which has reserved room, on
  the thread that computes: restoring allocates nothing, and a lazy array could not be computed by another thread.
- `_known` are the stretches that hold exactly the layer's entries before a position. A write before that position ends
  this, so a rewind needs no notice.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import own_bytes, own_name
from onefold.cache.memory.runs import Run, Stretch, shared
from onefold.cache.model.kinds.base import Point, Snapshot


class Part(NamedTuple):
    """Keys and values, of which the first `skipped` entries are left out."""

    skipped: int
    arrays: tuple[mx.array, mx.array]


class WindowSnapshot(Snapshot):
    """The entries [begin, end) of a window, in stretches of runs that belong to a checkpoint."""

    __slots__ = ("begin", "stretches")

    def __init__(self, stretches: tuple[Stretch, ...], begin: int, end: int, extra: tuple[int, ...]) -> None:
        self.stretches = stretches
        self.start, self.begin, self.end, self.extra = 0, begin, end, extra
        self.closed = False

    @property
    def arrays(self) -> list[mx.array | None]:  # type: ignore[override]
        """The arrays of the runs, whole."""
        return [a for s in self.stretches for a in s.arrays]

    @property
    def runs(self) -> tuple[Run, ...]:  # type: ignore[override]
        return tuple(s.run for s in self.stretches)

    @property
    def size(self) -> int:
        """Nothing: the runs count their bytes."""
        return 0

    def close(self) -> None:
        if self.closed:
            raise RuntimeError(f"snapshot [{self.start}, {self.end}) is closed already")
        self.closed = True
        self.stretches = ()

    def edges(self, since: int) -> list[list[int]]:
        """Returns where the entries from `since` on begin and end in each stretch, oldest first."""
        since = max(since, self.begin)
        return [[max(since, s.start), s.end] for s in self.stretches if s.end > since]

    def entries(self, since: int) -> list[mx.array]:
        """Returns keys and values of the entries from `since` on, of each stretch, oldest first."""
        since = max(since, self.begin)
        found = [
            a if s.start >= since else a[..., since - s.start :, :]
            for s in self.stretches
            if s.end > since
            for a in s.arrays
        ]
        device.evaluate(found)  # another thread may read them
        return found

    def describe_parts(self, since: int, *, parted: bool) -> dict[str, Any]:
        """Returns everything but the arrays of `entries`; without `parted`, as of a snapshot that shares none."""
        edges = self.edges(since)
        found = {"start": self.start, "end": self.end, "extra": list(self.extra), "slots": [True] * (2 * len(edges))}
        return found | {"runs": edges} if parted else found


def window_snapshot(stretches: tuple[Stretch, ...], begin: int, end: int, extra: tuple[int, ...]) -> WindowSnapshot:
    """Returns a snapshot of the entries [begin, end). Raises ValueError if the stretches do not have all of them."""
    kept = tuple(s for s in stretches if s.end > begin)
    gaps = [a.end != b.start for a, b in itertools.pairwise(kept)]
    if not kept or kept[0].start > begin or kept[-1].end != end or any(gaps):
        raise ValueError(f"entries of a window are missing between {begin} and {end}")
    return WindowSnapshot(kept, begin, end, extra)


class Window(Point):
    """A kind that keeps the latest entries as `keys` and `values`, derived from one of mlx-lm's cache classes."""

    _keys: Any = None
    _values: Any = None
    _parts: tuple[Part, ...] = ()
    """What `keys` and `values` are joined from, before the first write."""
    _known: tuple[Stretch, ...] = ()

    @property
    def keys(self) -> Any:
        return self._joined(0) if self._parts else self._keys

    @keys.setter
    def keys(self, array: Any) -> None:
        self._join()
        self._keys = array

    @property
    def values(self) -> Any:
        return self._joined(1) if self._parts else self._values

    @values.setter
    def values(self, array: Any) -> None:
        self._join()
        self._values = array

    def _joined(self, side: int) -> mx.array:
        """Returns the keys (0) or the values (1) of all parts."""
        found = [p.arrays[side][..., p.skipped :, :] if p.skipped else p.arrays[side] for p in self._parts]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=2)

    def _join(self) -> None:
        """Hold the entries in arrays of its own from now on."""
        if self._parts:
            self._keys, self._values = self._joined(0), self._joined(1)
            self._parts = ()

    # -- the contract --------------------------------------------------------------------------

    def take_over(self, cache: Any, upto: int) -> None:
        self.let_go()
        self.keys, self.values, self.offset = own_name(cache.keys), own_name(cache.values), cache.offset
        self.take_place(cache)
        if self.offset != upto and not self.restore(None, upto):
            raise ValueError(f"a layer at position {self.offset} cannot be cut at {upto}")

    def take_place(self, cache: Any) -> None:
        """Take over the write position of `cache`."""
        raise NotImplementedError

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._listener.enter(self, keys.shape[2])
        if self._known and self.offset < self._known[-1].end:
            self._known = ()
        self._join()
        if self._keys is not None:
            self._keys, self._values = own_name(self._keys), own_name(self._values)
        return super().update_and_fetch(keys, values)  # type: ignore[misc]

    def adopt_arrays(self, snapshot: Snapshot) -> int:
        """Share the snapshot's arrays; the first write copies them. Returns how many entries they have."""
        self.let_go()
        if isinstance(snapshot, WindowSnapshot):
            self._parts = tuple(Part(max(0, snapshot.begin - s.start), s.arrays) for s in snapshot.stretches)
            self._known = snapshot.stretches
            return snapshot.end - snapshot.begin
        self._keys, self._values = snapshot.arrays[0], snapshot.arrays[1]
        return int(self._keys.shape[2])

    def let_go(self) -> None:
        self._keys = self._values = None
        self._parts = self._known = ()

    @property
    def held(self) -> tuple[Any, ...]:
        """References to the entries, for `mark`."""
        return self._keys, self._values, self._parts, self._known

    @held.setter
    def held(self, held: tuple[Any, ...]) -> None:
        self._keys, self._values, self._parts, self._known = held

    def live_arrays(self) -> list[mx.array]:
        if self._parts:
            return [a for part in self._parts for a in part.arrays]
        return [] if self._keys is None else [self._keys, self._values]

    # -- snapshots that share ------------------------------------------------------------------

    def begin(self) -> int:
        """Returns the position of the first entry that a snapshot has."""
        raise NotImplementedError

    def entries(self, array: mx.array, start: int, end: int) -> mx.array:
        """Returns the entries [start, end) of keys or values; not before `begin`."""
        raise NotImplementedError

    def extra(self, begin: int) -> tuple[int, ...]:
        """Returns the `extra` of a snapshot that begins there."""
        raise NotImplementedError

    def _plan(self) -> tuple[int, tuple[Stretch, ...], list[tuple[int, int]]]:
        """Returns where a snapshot begins, the stretches that it shares, and the ranges that are to be copied."""
        begin, end = self.begin(), self.offset
        if self._known:
            begin = max(begin, min(end, self._known[0].start))
        kept = shared(self._known, begin, end)
        if not kept:
            return self.begin(), (), [(self.begin(), end)]
        copied = [(begin, kept[0].start), (kept[-1].end, end)]
        return begin, kept, [(a, b) for a, b in copied if a < b]

    def shared_bytes(self) -> int:
        """Returns the bytes that `share` will copy."""
        held = self.live_arrays()[:2]
        return sum(b - a for a, b in self._plan()[2]) * sum(a.nbytes // max(1, a.shape[2]) for a in held)

    def share(self, run: Run) -> WindowSnapshot | None:
        """Returns a snapshot that shares the stretches of the last one, or of the one that was restored. Copies the
        other entries into `run`."""
        if self.offset <= 0 or not self.live_arrays():
            return None
        begin, kept, ranges = self._plan()
        made: list[Stretch] = []
        for a, b in ranges:
            copies = [own_bytes(self.entries(array, a, b)) for array in (self.keys, self.values)]
            device.evaluate(copies)
            made.append(run.add(copies, a, b))
        stretches = tuple(sorted((*kept, *made), key=lambda s: s.start))
        self._known = stretches
        return WindowSnapshot(stretches, begin, self.offset, self.extra(begin))
