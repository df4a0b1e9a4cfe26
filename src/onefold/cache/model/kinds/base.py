"""The contract of every kind of layer.

A layer is one layer's live state in one request, in the shape that mlx-lm's models expect of a cache.
Beyond that, every kind can be snapshotted, rewound, restored, joined and split:

- `snapshot(from_offset)`: the state from `from_offset` to the offset, in arrays of its own; the live state
  is unchanged. Nothing new since `from_offset` gives None.
- `restore(None, target)`: rewind the live state. `restore(snapshot, target)`: put the snapshot back, clamped
  to `target`. Either happens wholly and returns True, or not at all and returns False.
- `join(parent, child)` and `split(snapshot, at)` take ownership of what they are given and close it.
- `free()` releases everything; the offset is 0 afterwards.

A snapshot pins exactly the bytes it reports, and is closed exactly once.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from onefold.cache.memory.arrays import own_bytes, own_name
from onefold.cache.model.exporting import Exportable
from onefold.cache.model.step_plan import StepPlan


class ForwardListener(Protocol):
    """Who is told when a forward reaches a layer, and asked when a layer is to be rewound."""

    @property
    def rolls_back(self) -> bool:
        """Whether all layers of the model can be rewound to where the last round of forwards began, whatever their
        kind."""
        ...

    @property
    def verifies(self) -> bool:
        """Whether several tokens in the next forward are several steps in one: a draft model's, behind the prompt."""
        ...

    def enter(self, layer: Any, n_tokens: int | None) -> None:
        """Before a layer's first write of a forward; may refuse by raising, and then nothing was written."""
        ...

    def begun(self, model: Any, inputs: mx.array | None, row: int, *, n_layers: int, embedded: bool) -> None:
        """A forward of the whole model begins, with so many layers, on row `row` of `inputs` or on embeddings in their
        place; `ended` or `failed` will follow, then `left`. May refuse by raising."""
        ...

    def ended(self, n_tokens: int, stepped: bool) -> list[mx.array]:
        """Returns the arrays that the forward has written: they are scheduled before `left`. If it was a decode step
        (`stepped`), its output is scheduled too, and what that depends on may be left out."""
        ...

    def failed(self) -> list[mx.array]:
        """The forward raised half-way: put every layer back to where it began. Returns what `ended` does."""
        ...

    def left(self) -> None:
        """The forward's thread lets go of the layers."""
        ...

    def lost(self, error: RuntimeError) -> None:
        """What the forward has written cannot be computed."""
        ...

    def trim(self, layer: Any, n: int) -> int:
        """Rewind `layer` by `n` tokens; returns `n`, or 0 if that cannot be done, and then nothing has changed."""
        ...

    def dropped(self, layer: Any) -> None:
        """Nobody refers to this layer any more but its owner."""
        ...

    def reserve_copy(self, n_bytes: int) -> Any:
        """Reserves the bytes of a copy of a layer, and returns their account; None if nobody counts."""
        ...


class NoListener:
    """For a layer that stands alone."""

    rolls_back = False
    verifies = False

    def enter(self, layer: Any, n_tokens: int | None) -> None:
        pass

    def begun(self, model: Any, inputs: mx.array | None, row: int, *, n_layers: int, embedded: bool) -> None:
        pass

    def ended(self, n_tokens: int, stepped: bool) -> list[mx.array]:
        return []

    def failed(self) -> list[mx.array]:
        return []

    def left(self) -> None:
        pass

    def lost(self, error: RuntimeError) -> None:
        pass

    def trim(self, layer: Any, n: int) -> int:
        n = min(layer.offset, n)
        return n if n > 0 and layer.restore(None, layer.offset - n) else 0

    def dropped(self, layer: Any) -> None:
        pass

    def reserve_copy(self, n_bytes: int) -> None:
        pass


_ALONE = NoListener()


class Watched(Exportable):
    """A live layer that has an owner: a listener that hears of forwards (see `seam.watch`) and decides on rewinds.
    What most kinds answer alike is answered here."""

    kind: str
    sliceable = False
    """Its state lies in the track until it rotates."""
    is_plain = False
    """Its keys and values are kept as the model made them, and read piece by piece where they lie."""
    _listener: Any
    offset: int

    @staticmethod
    def rows(layers: list[Any], plan: StepPlan) -> Any:
        """One layer over the rows of a batch, of which `layers` are this kind's. Raises NotImplementedError for a kind
        that cannot be batched."""
        raise NotImplementedError("layers of this kind are stepped row by row")

    @property
    def in_track(self) -> bool:
        """Whether its state lies in the track, and nowhere else."""
        return False

    def watchers(self) -> list[Any]:
        return [] if self._listener is None else [self._listener]

    def trim(self, n: int) -> int:
        """Rewind by `n` tokens. Returns how many were taken back: all of them, or none."""
        return self.listener.trim(self, n)

    def clear(self) -> None:
        """Hold nothing. What lies in the track stays there."""
        self.free()
        self.offset = 0

    def put_back(self, snapshot: Any, target: int) -> bool:
        """Restore an empty layer to `target` from a checkpoint's snapshot. Returns False, and changes nothing, if it
        cannot."""
        return bool(self.restore(snapshot, target))

    def passed(self, n_tokens: int) -> None:
        """A forward of `n_tokens` has ended, of a model that does not tell its layers so."""

    def take_over(self, cache: Any, upto: int) -> None:
        """Hold what a cache that mlx-lm made and filled holds of the positions [0, upto). Raises ValueError if it
        cannot be cut there."""
        raise NotImplementedError

    def free(self) -> None:
        raise NotImplementedError

    def restore(self, snapshot: Any, target: int) -> bool:
        raise NotImplementedError

    @property
    def listener(self) -> ForwardListener:
        found: ForwardListener = _ALONE if self._listener is None else self._listener
        return found

    def __del__(self) -> None:
        listener = getattr(self, "_listener", None)
        if listener is not None:
            listener.dropped(self)


class Ranged(Watched):
    """A kind whose state is a range of positions: snapshots can be joined and split at any of them."""

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

    # -- what every cache of mlx-lm's has --------------------------------------------------------

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

    def live_arrays(self) -> list[mx.array]:
        raise NotImplementedError


class Point(Watched):
    """A kind whose state is good for one point alone: a child supersedes its parent, and nothing can be split."""

    def join(self, parent: Any, child: Any) -> Any:
        close_all(parent)
        return child

    def split(self, snapshot: Any, at: int) -> tuple[Any, Any]:
        return None, snapshot


class Window(Point):
    """A kind that keeps its latest entries as `keys` and `values`, in a cache class of mlx-lm's."""

    keys: Any
    values: Any

    def take_over(self, cache: Any, upto: int) -> None:
        self.keys, self.values, self.offset = own_name(cache.keys), own_name(cache.values), cache.offset
        self.take_place(cache)
        if self.offset != upto and not self.restore(None, upto):
            raise ValueError(f"a layer that stands at {self.offset} cannot be cut at {upto}")

    def take_place(self, cache: Any) -> None:
        """Stand where `cache` stands among its entries."""
        raise NotImplementedError

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._listener.enter(self, keys.shape[2])
        if self.keys is not None:
            self.keys, self.values = own_name(self.keys), own_name(self.values)
        return super().update_and_fetch(keys, values)  # type: ignore[misc]


class Snapshot:
    """State of one layer over [start, end), or for window and recurrent kinds at `end`."""

    __slots__ = ("arrays", "closed", "end", "extra", "start")

    def __init__(self, arrays: list[mx.array | None], start: int, end: int, extra: tuple[int, ...] = ()) -> None:
        self.arrays = arrays
        self.start = start
        self.end = end
        self.extra = extra
        self.closed = False

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(a.nbytes for a in self.arrays if a is not None)

    def close(self) -> None:
        if self.closed:
            raise RuntimeError(f"snapshot [{self.start}, {self.end}) is closed already")
        self.closed = True
        self.arrays = []

    def describe(self) -> dict[str, Any]:
        """All of it but the arrays, in values that JSON has."""
        return {
            "start": self.start,
            "end": self.end,
            "extra": list(self.extra),
            "slots": [a is not None for a in self.arrays],
        }

    @classmethod
    def revive(cls, said: dict[str, Any], arrays: list[mx.array | None]) -> Snapshot:
        """The other way round; `arrays` by slot. Raises KeyError, TypeError or ValueError on nonsense."""
        return Snapshot(arrays, int(said["start"]), int(said["end"]), tuple(int(x) for x in said["extra"]))


class Layer(Protocol):
    """What leases and tests rely on, for every kind."""

    kind: str
    offset: int
    epoch: int

    def snapshot(self, from_offset: int = 0) -> Any: ...
    def can_restore(self, snapshot: Any, target: int) -> bool: ...
    def restore(self, snapshot: Any, target: int) -> bool: ...
    def free(self) -> None: ...
    def live_arrays(self) -> list[mx.array]: ...

    def mark(self) -> tuple[Any, ...]:
        """Where a forward began, as references: `reset` undoes a forward that failed half-way."""
        ...

    def reset(self, mark: tuple[Any, ...]) -> None: ...


def close_all(*snapshots: Any) -> None:
    for snapshot in snapshots:
        if snapshot is not None:
            snapshot.close()
