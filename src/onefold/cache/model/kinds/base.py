"""The contract of every kind of layer.

A live layer is the state of one of the model's layers in one request, with the interface that mlx-lm's models expect of
a cache. In addition, every kind can be snapshotted, rewound, restored, joined and split:

- `snapshot(from_offset)` returns the state from `from_offset` to the offset, in its own arrays; the live state is
  unchanged. It returns None if there is nothing new since `from_offset`.
- `restore(None, target)` rewinds the live state. `restore(snapshot, target)` restores the snapshot, clamped to
  `target`. Either returns True, or changes nothing and returns False.
- `join(parent, child)` and `split(snapshot, at)` take ownership of their snapshots and close them.
- `free()` releases everything; the offset is 0 afterwards.

A snapshot pins exactly the bytes it reports, and is closed exactly once.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import own_bytes
from onefold.cache.model.exporting import Exportable
from onefold.cache.model.step_plan import StepPlan


class ForwardListener(Protocol):
    """The owner of a layer: is notified when a forward reaches the layer, and decides on rewinds."""

    @property
    def rolls_back(self) -> bool:
        """Whether all layers of the model, of any kind, can be rewound to where the last round of forwards began."""
        ...

    @property
    def verifies(self) -> bool:
        """Whether a forward of several tokens after the prompt is a verification of a draft's tokens."""
        ...

    def enter(self, layer: Any, n_tokens: int | None) -> None:
        """Called before a layer's first write of a forward. May raise to refuse it; then nothing has been written."""
        ...

    def begun(self, model: Any, inputs: mx.array | None, row: int, *, n_layers: int, embedded: bool) -> None:
        """Called when a forward of the whole model begins, with `n_layers` layers, on row `row` of `inputs` or, if
        `embedded`, on embeddings. `ended` or `failed` will follow, then `left`. May raise to refuse it."""
        ...

    def ended(self, n_tokens: int, stepped: bool) -> list[mx.array]:
        """Called after a forward. Returns the arrays that it has written, which are scheduled before `left`. If it was
        a decode step (`stepped`), its output is scheduled too, and arrays on which that depends may be left out."""
        ...

    def failed(self) -> list[mx.array]:
        """Reset every layer to where the forward began, because it raised. Returns what `ended` does."""
        ...

    def left(self) -> None:
        """Called when the forward's thread has finished with the layers."""
        ...

    def lost(self, error: RuntimeError) -> None:
        """Called if the arrays that the forward has written cannot be computed."""
        ...

    def trim(self, layer: Any, n: int) -> int:
        """Rewind `layer` by `n` tokens, or to its beginning. Returns how many were removed; 0, and changes nothing, if
        that is not possible."""
        ...

    def dropped(self, layer: Any) -> None:
        """Called when the layer is finalized: only its owner refers to it."""
        ...

    def reserve_copy(self, n_bytes: int) -> Any:
        """Reserves the bytes of a copy of a layer, and returns their account; None if there is no ledger. Raises
        BudgetError."""
        ...


class NoListener:
    """For a layer without an owner."""

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
    """A live layer with an owner: a listener that is notified of forwards (see `seam.watch`) and decides on rewinds.
    Has the defaults that most kinds share."""

    kind: str
    sliceable = False
    """Its state lies in the track until it rotates."""
    is_plain = False
    """Its keys and values are stored as the model made them, and attended in place, piece by piece."""
    shares_runs = False
    """Its snapshots can share runs: see `window.Window`."""
    _listener: Any
    offset: int

    @staticmethod
    def rows(layers: list[Any], plan: StepPlan) -> Any:
        """Returns one layer for the rows of a batch; `layers` are the rows' layers of this kind. Raises
        NotImplementedError for a kind that cannot be batched."""
        raise NotImplementedError("layers of this kind are stepped row by row")

    @property
    def in_track(self) -> bool:
        """Whether its whole state lies in the track."""
        return False

    def watchers(self) -> list[Any]:
        return [] if self._listener is None else [self._listener]

    def trim(self, n: int) -> int:
        """Rewind by `n` tokens, or to the beginning. Returns how many were removed; 0, and changes nothing, if that is
        not possible."""
        return self.listener.trim(self, n)

    def clear(self) -> None:
        """Empty the layer. The track is unchanged."""
        self.free()
        self.offset = 0

    def put_back(self, snapshot: Any, target: int) -> bool:
        """Restore an empty layer to `target` from a checkpoint's snapshot. Returns False, and changes nothing, if that
        is not possible."""
        return bool(self.restore(snapshot, target))

    def passed(self, n_tokens: int) -> None:
        """Called after a forward of `n_tokens`, for models that do not report to their layers how many tokens
        passed."""

    def take_over(self, cache: Any, upto: int) -> None:
        """Take over the positions [0, upto) of a cache that mlx-lm made and filled. Raises ValueError if it cannot be
        cut there."""
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
        device.evaluate(arrays)
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
        device.evaluate(upper, lower)
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
        """The arrays to evaluate so that this layer is up to date."""
        return self.live_arrays()

    def live_arrays(self) -> list[mx.array]:
        raise NotImplementedError


class Point(Watched):
    """A kind whose state belongs to one position: a child's snapshot supersedes its parent's, and none can be split."""

    def join(self, parent: Any, child: Any) -> Any:
        close_all(parent)
        return child

    def split(self, snapshot: Any, at: int) -> tuple[Any, Any]:
        return None, snapshot


class Snapshot:
    """The state of one layer over [start, end), or for window and recurrent kinds at `end`."""

    __slots__ = ("arrays", "closed", "end", "extra", "start")
    runs: tuple[Any, ...] = ()
    """The runs that it shares with other snapshots (`window.WindowSnapshot`)."""

    def __init__(self, arrays: list[mx.array | None], start: int, end: int, extra: tuple[int, ...] = ()) -> None:
        self.arrays = arrays
        self.start = start
        self.end = end
        self.extra = extra
        self.closed = False

    @property
    def size(self) -> int:
        """The bytes of its arrays."""
        return sum(a.nbytes for a in self.arrays if a is not None)

    def close(self) -> None:
        if self.closed:
            raise RuntimeError(f"snapshot [{self.start}, {self.end}) is closed already")
        self.closed = True
        self.arrays = []

    def describe(self) -> dict[str, Any]:
        """Returns everything but the arrays, in values that JSON has."""
        return {
            "start": self.start,
            "end": self.end,
            "extra": list(self.extra),
            "slots": [a is not None for a in self.arrays],
        }

    @classmethod
    def revive(cls, described: dict[str, Any], arrays: list[mx.array | None]) -> Snapshot:
        """Makes a snapshot from its description and its arrays, by slot. Raises KeyError, TypeError or ValueError if
        the description is invalid."""
        extra = tuple(int(x) for x in described["extra"])
        return Snapshot(arrays, int(described["start"]), int(described["end"]), extra)


class Layer(Protocol):
    """The interface of every kind of layer, for leases and tests."""

    kind: str
    offset: int
    epoch: int

    def snapshot(self, from_offset: int = 0) -> Any: ...
    def can_restore(self, snapshot: Any, target: int) -> bool: ...
    def restore(self, snapshot: Any, target: int) -> bool: ...
    def free(self) -> None: ...
    def live_arrays(self) -> list[mx.array]: ...

    def mark(self) -> tuple[Any, ...]:
        """Returns references to the state, so that `reset` can undo a forward that failed."""
        ...

    def reset(self, mark: tuple[Any, ...]) -> None: ...


def close_all(*snapshots: Any) -> None:
    for snapshot in snapshots:
        if snapshot is not None:
            snapshot.close()
