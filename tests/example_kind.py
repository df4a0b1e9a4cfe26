"""An example of a kind of layer: the running mean of what a layer was fed, which some models use in place of attention.

`RunningMean` is the cache object that a model makes. `MeanLeaf` recognises it and makes `MeanLayer`, the live layer of
one request. `kinds.registry.KINDS` gets one line: see docs/extending.md.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from onefold.cache.memory.arrays import own_bytes
from onefold.cache.model import stock
from onefold.cache.model.kinds.base import ForwardListener, NoListener, Point, Snapshot
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.leaf import Leaf, Making, forms


class RunningMean:
    """As the model makes it: the sum of all vectors so far, and how many there were."""

    def __init__(self) -> None:
        self.total: mx.array | None = None
        self.offset = 0

    def mean(self, x: mx.array) -> mx.array:
        """The mean up to each of these vectors."""
        totals = mx.cumsum(x, axis=1) + (0 if self.total is None else self.total)
        counts = self.offset + mx.arange(1, x.shape[1] + 1)[None, :, None]
        self.total, self.offset = totals[:, -1:], self.offset + x.shape[1]
        return totals / counts

    @property
    def state(self) -> list[mx.array]:
        return [] if self.total is None else [self.total]


class MeanLayer(Point, RunningMean):
    """Its state is one sum, good for one position: a snapshot can be put back there, and nowhere else."""

    kind = "running mean"

    def __init__(self, listener: ForwardListener | None) -> None:
        RunningMean.__init__(self)
        self.epoch = 0
        self._listener = listener or NoListener()

    def mean(self, x: mx.array) -> mx.array:
        self._listener.enter(self, x.shape[1])  # room is reserved, or the forward refused, before anything is written
        found = super().mean(x)
        self.total = own_bytes(self.total)  # a slice would keep all of the forward's sums alive
        return found

    def snapshot(self, from_offset: int = 0) -> Snapshot | None:
        if self.total is None or self.offset <= from_offset:
            return None
        mx.eval(self.total)
        return Snapshot([self.total], max(0, from_offset), self.offset)

    def can_restore(self, snapshot: Snapshot | None, target: int) -> bool:
        return target == (self.offset if snapshot is None else snapshot.end)

    def restore(self, snapshot: Snapshot | None, target: int) -> bool:
        if not self.can_restore(snapshot, target):
            return False
        if snapshot is not None:
            self.total, self.offset = snapshot.arrays[0], snapshot.end
        return True

    def free(self) -> None:
        self.total, self.offset = None, 0

    def mark(self) -> tuple[Any, ...]:
        return self.total, self.offset

    def reset(self, mark: tuple[Any, ...]) -> None:
        self.total, self.offset = mark

    def live_arrays(self) -> list[mx.array]:
        return self.state

    def is_trimmable(self) -> bool:
        return False

    def as_stock(self) -> RunningMean:
        copy = RunningMean()
        copy.total, copy.offset = None if self.total is None else own_bytes(self.total), self.offset
        return copy


class MeanLeaf(Leaf):
    """What is known of such a layer before there is a request."""

    kind = "running mean"
    one_point = True

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        return stock.has(cache, "total", "mean", "offset")

    def state_of(self, cache: Any) -> dict[str, mx.array | None]:
        return {"total": cache.total}

    def read(self, cache: Any) -> None:
        self.used = cache.total is not None
        self.state_bytes = 0 if cache.total is None else cache.total.nbytes

    def make(self, given: Making) -> MeanLayer:
        return MeanLayer(given.listener)

    def point_bytes(self, offset: int, n_tokens: int) -> int:
        return self.state_bytes

    def fits(self, cache: Any) -> bool:
        return cache.total is not None and cache.total.shape[0] == 1

    def describe(self, bound: Bound | None) -> dict[str, Any]:
        return {"in_ranges": False, "slots": [forms(seen) for seen in self.seen.values()]}


class MeanModel(nn.Module):
    """Two such layers between an embedding and its transpose."""

    def __init__(self, vocab: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.mixing = [nn.Linear(dim, dim) for _ in range(2)]

    @property
    def layers(self) -> list[nn.Module]:
        return self.mixing

    def make_cache(self) -> list[RunningMean]:
        return [RunningMean() for _ in self.mixing]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        x = self.embedding(inputs)
        for linear, layer in zip(self.mixing, cache or self.make_cache(), strict=True):
            x = x + mx.tanh(linear(layer.mean(x)))
        return self.embedding.as_linear(x)
