"""Recurrent states (Mamba, gated delta nets, short convolutions), which can be restored only where they were taken.

- The layer is an `ArraysCache`, because some models check the class.
- Models replace states and never write into them, so a snapshot is a second reference and costs nothing until the state
  changes.
- States are often slices of a whole forward's activations: each is copied to its own buffer when it is set.
- Most models report how many tokens passed (`advance`); for the others the layer's owner does, after each forward.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import own_bytes
from onefold.cache.model import exporting, stock
from onefold.cache.model.kinds.base import ForwardListener, NoListener, Point, Snapshot
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.leaf import Leaf, Making, forms
from onefold.cache.model.rows import RowsOf
from onefold.cache.model.step_plan import StepPlan


class RecurrentLayer(Point, stock.ArraysCache):  # type: ignore[misc, valid-type]
    kind = "recurrent"
    cache: list[mx.array | None]  # type: ignore[assignment]

    def __init__(self, size: int, *, listener: ForwardListener | None = None) -> None:
        super().__init__(size)
        self.offset = 0
        self.epoch = 0
        self._listener: ForwardListener = listener or NoListener()
        self._written: set[int] | None = None

    def __setitem__(self, slot: int, value: mx.array | None) -> None:
        if self._written is None or slot in self._written:
            self._listener.enter(self, None)  # the second write to a slot belongs to the next forward
            self._written = set()
        self._written.add(slot)
        self.cache[slot] = None if value is None else own_bytes(value)

    @staticmethod
    def rows(layers: list[Any], plan: StepPlan) -> Any:
        return RecurrentRows(layers)

    def advance(self, N: int) -> None:
        super().advance(N)
        self.offset += N

    def passed(self, n_tokens: int) -> None:
        self.offset += n_tokens

    def take_over(self, cache: Any, upto: int) -> None:
        self.free()
        self.cache = [None if a is None else own_bytes(a) for a in cache.cache]

    def as_stock(self) -> Any:
        return exporting.states(self.copied_states())

    def snapshot(self, from_offset: int = 0) -> Snapshot | None:
        if self.empty() or self.offset <= from_offset:
            return None
        device.evaluate([a for a in self.cache if a is not None])
        return Snapshot(list(self.cache), max(0, from_offset), self.offset)

    def copied_states(self) -> list[mx.array | None]:
        """Returns the states, each copied to its own buffer."""
        copies = [None if a is None else own_bytes(a) for a in self.cache]
        device.evaluate([a for a in copies if a is not None])
        return copies

    def can_restore(self, snapshot: Snapshot | None, target: int) -> bool:
        return target == (self.offset if snapshot is None else snapshot.end)

    def restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        if snapshot is not None:
            self.cache = list(snapshot.arrays)
            self.offset = snapshot.end
        self._written = None
        return True

    def is_trimmable(self) -> bool:
        return self.listener.rolls_back

    def empty(self) -> bool:
        return all(a is None for a in self.cache)

    def free(self) -> None:
        self.cache = [None] * len(self.cache)
        self.left_padding = self.lengths = None
        self.offset = 0
        self._written = None

    def mark(self) -> tuple[Any, ...]:
        return list(self.cache), self.offset

    def reset(self, mark: tuple[Any, ...]) -> None:
        self.cache, self.offset = list(mark[0]), mark[1]
        self._written = None

    def live_arrays(self) -> list[mx.array]:
        return [a for a in self.cache if a is not None]


class RecurrentRows(RowsOf, stock.ArraysCache):  # type: ignore[misc, valid-type]
    """Reads the rows' states as one array, and writes each row's state back to its layer."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(len(layers[0].cache))
        self.layers = layers

    def __getitem__(self, slot: int) -> mx.array | None:
        parts = [layer.cache[slot] for layer in self.layers]
        known = next((p for p in parts if p is not None), None)
        if known is None:
            return None
        # a row that has not begun starts from zeros, as the models themselves do
        return mx.concatenate([mx.zeros_like(known) if p is None else p for p in parts], axis=0)

    def __setitem__(self, slot: int, value: mx.array) -> None:
        for i, layer in enumerate(self.layers):
            layer[slot] = value[i : i + 1]

    @property
    def batch_size(self) -> int:
        return len(self.layers)

    def advance(self, N: int) -> None:
        for layer in self.layers:
            layer.advance(N)


class RecurrentLeaf(Leaf):
    kind = "recurrent"
    one_point = True
    says_offset = False

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        return stock.has(cache, "cache", "__setitem__") and not stock.has(cache, "update_and_fetch")

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        self.n_slots = len(cache.cache)

    def state_of(self, cache: Any) -> dict[str, mx.array | None]:
        return {str(slot): array for slot, array in enumerate(cache.cache)}

    def read(self, cache: Any) -> None:
        arrays = [a for a in cache.cache if a is not None]
        self.used, self.state_bytes = bool(arrays), sum(a.nbytes for a in arrays)

    def make(self, given: Making) -> RecurrentLayer:
        return RecurrentLayer(self.n_slots, listener=given.listener)

    def point_bytes(self, offset: int, n_tokens: int) -> int:
        return self.state_bytes

    def fits(self, cache: Any) -> bool:
        return len(cache.cache) == self.n_slots and all(a is None or a.shape[0] == 1 for a in cache.cache)

    def rewinds(self, cache: Any, to: int) -> bool:
        return False

    def describe(self, bound: Bound | None) -> dict[str, Any]:
        return {"in_ranges": False, "slots": [forms(seen) for seen in self.seen.values()]}
