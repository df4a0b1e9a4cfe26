"""A cache class of the model's own, stored whole. It can be restored only at the position where it was taken.

- The meaning of its attributes is not known, only that each is an array, a number or None. So a snapshot has all of
  them, and setting them again restores the state.
- The live layer's class derives from the model's, so that the model's code finds every method that it calls.
- It is not known whether that code replaces its arrays or writes into them: snapshots are copies, and restored arrays
  are copies of the snapshot. An array that is set is copied to its own buffer.
- It counts its tokens itself. The watch on the model notifies it when a forward begins, since the methods that the
  model will call are not known.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import own_bytes, own_name
from onefold.cache.model import stock
from onefold.cache.model.kinds.base import ForwardListener, NoListener, Point, Snapshot
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.leaf import Leaf, Making, forms

_OURS = ("epoch", "_listener", "_pristine")


class OwnSnapshot(Snapshot):
    """The arrays, by name, and the other attributes."""

    __slots__ = ("names", "others")

    def __init__(self, attributes: dict[str, Any], start: int, end: int) -> None:
        arrays = {n: own_bytes(v) for n, v in attributes.items() if isinstance(v, mx.array)}
        device.evaluate(arrays)
        self.names = list(arrays)
        self.others = {n: v for n, v in attributes.items() if n not in arrays}
        super().__init__(list(arrays.values()), start, end)

    def attributes(self) -> dict[str, Any]:
        arrays = zip(self.names, self.arrays, strict=True)
        return self.others | {n: own_bytes(a) for n, a in arrays if a is not None}

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"names": self.names, "others": self.others}

    @classmethod
    def revive(cls, described: dict[str, Any], arrays: list[mx.array | None]) -> OwnSnapshot:
        named = dict(zip(described["names"], arrays, strict=True))
        return cls(dict(described["others"]) | named, int(described["start"]), int(described["end"]))


class _Entering:
    """Passes notifications on to a layer's listener, and calls its `enter` when a forward begins."""

    def __init__(self, layer: OwnLayer) -> None:
        self._layer = layer
        self._listener = layer._listener

    def begun(self, model: Any, inputs: mx.array | None, row: int, *, n_layers: int, embedded: bool) -> None:
        self._listener.begun(model, inputs, row, n_layers=n_layers, embedded=embedded)
        self._listener.enter(self._layer, None if inputs is None else inputs.shape[1])

    def ended(self, n_tokens: int, stepped: bool) -> list[mx.array]:
        return self._listener.ended(n_tokens, stepped)

    def failed(self) -> list[mx.array]:
        return self._listener.failed()

    def lost(self, error: RuntimeError) -> None:
        self._listener.lost(error)

    def left(self) -> None:
        self._listener.left()


@functools.cache
def _leased(cls: type) -> Any:
    return type(f"Leased{cls.__name__}", (OwnLayer, cls), {"model_class": cls})


class OwnLayer(Point):
    """Made by `like`, which derives a class from this one and the model's."""

    kind = "own"
    offset: int
    epoch: int
    model_class: Any
    _pristine: dict[str, Any]

    @staticmethod
    def like(pristine: Any, listener: ForwardListener | None = None) -> OwnLayer:
        """Returns a live layer with the state of `pristine`, which is as the model makes it."""
        base: Any = type(pristine)
        derived = _leased(base)
        layer: OwnLayer = derived.__new__(derived)
        attributes = dict(vars(pristine))
        vars(layer).update(attributes, epoch=0, _listener=listener or NoListener(), _pristine=attributes)
        return layer

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, own_bytes(value) if isinstance(value, mx.array) else value)

    def watchers(self) -> list[Any]:
        return [_Entering(self)]

    def is_trimmable(self) -> bool:
        return self.listener.rolls_back

    def snapshot(self, from_offset: int = 0) -> OwnSnapshot | None:
        if self.offset <= max(0, from_offset):
            return None
        return OwnSnapshot(self._attributes(), max(0, from_offset), self.offset)

    def can_restore(self, snapshot: OwnSnapshot | None, target: int) -> bool:
        return target == (self.offset if snapshot is None else snapshot.end)

    def restore(self, snapshot: OwnSnapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        if snapshot is not None:
            self._put(snapshot.attributes())
        return True

    def as_stock(self) -> Any:
        """Returns a copy of the model's own class."""
        copied = self.model_class.__new__(self.model_class)
        vars(copied).update(OwnSnapshot(self._attributes(), 0, self.offset).attributes())
        device.evaluate([v for v in vars(copied).values() if isinstance(v, mx.array)])
        return copied

    def take_over(self, cache: Any, upto: int) -> None:
        """Copy the state of an object of the model's class."""
        self._put({n: own_bytes(v) if isinstance(v, mx.array) else v for n, v in vars(cache).items()})

    def free(self) -> None:
        self._put(self._pristine)

    def mark(self) -> tuple[Any, ...]:
        return ({n: own_name(v) if isinstance(v, mx.array) else v for n, v in self._attributes().items()},)

    def reset(self, mark: tuple[Any, ...]) -> None:
        self._put(mark[0])

    def live_arrays(self) -> list[mx.array]:
        return [v for v in self._attributes().values() if isinstance(v, mx.array)]

    def _attributes(self) -> dict[str, Any]:
        return {n: v for n, v in vars(self).items() if n not in _OURS}

    def _put(self, attributes: dict[str, Any]) -> None:
        """Replace the whole state: delete attributes that are not among these."""
        for name in self._attributes():
            del vars(self)[name]
        vars(self).update(attributes)


class OwnLeaf(Leaf):
    kind = "own"
    one_point = True
    takes_bound = False
    of_the_model = True

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        return (
            not stock.has(cache, "update_and_fetch") and stock.has(cache, "offset", "state") and stock.is_plain(cache)
        )

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        self._pristine = copy.copy(cache)

    def state_of(self, cache: Any) -> dict[str, mx.array | None]:
        return {n: v for n, v in getattr(cache, "__dict__", {}).items() if isinstance(v, mx.array)}

    def refusal(self, cache: Any) -> str:
        if stock.is_plain(cache):
            return ""
        return f"cache class {self.class_name} keeps something else than arrays and numbers"

    def read(self, cache: Any) -> None:
        """Does nothing: `survey` measures its size by building longer forwards."""

    def make(self, given: Making) -> OwnLayer:
        return OwnLayer.like(self._pristine, given.listener)

    def point_bytes(self, offset: int, n_tokens: int) -> int:
        return self.state_bytes + self.token_bytes * (offset + n_tokens)

    def fits(self, cache: Any) -> bool:
        return type(cache) is type(self._pristine)

    def describe(self, bound: Bound | None) -> dict[str, Any]:
        return {"in_ranges": False, "slots": {name: forms(seen) for name, seen in self.seen.items()}}

    def revive(self, described: dict[str, Any], arrays: list[mx.array | None]) -> Snapshot:
        return OwnSnapshot.revive(described, arrays)
