"""Stand-ins: what a stock mlx-lm server holds in the place of layers.

- mlx-lm's batches merge, extend, filter, copy and extract caches; each of those copies KV there. Here they move
  references to rows, and a row is a lease: nothing is padded, and no byte is copied.
- The model never sees a stand-in. A forward that is given a list of them (`seam.watch`) is run by `drive`: prompts row
  by row, each on its own layers, and one decode step for all rows at once, where the model can.
- A row that the server forgets (a cancelled request, an error) is settled at the cache's next call.

    server     [stand-in 0, stand-in 1, ...]      each: rows A, B
    rows       A: lease -> its layers             B: lease -> its layers
    model      A's layers, or B's, or one ragged batch over both
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.request import adopting
from onefold.cache.request.batch import Batch
from onefold.cache.request.lease import Lease
from onefold.errors import ConfigError

Run = Callable[[mx.array, list[Any]], mx.array]


class Table:
    """The rows of one cache that decode together: one batch, re-seated as rows come and go."""

    def __init__(self, cache: PrefixCache, before_alone: Callable[[Lease, int], None] = lambda lease, n: None) -> None:
        """`before_alone` is called before each forward of a row that is in no batch, and may refuse it."""
        self.cache = cache
        self.before_alone = before_alone
        self._batches: dict[int, tuple[Any, Batch]] = {}
        """By thread, each with the model that it is for, held weakly."""

    def serve(self, lease: Lease) -> list[Any]:
        row = Row(self, lease)
        return [StandIn([row], i, seated=False) for i in range(len(lease.layers))]

    def step(self, leases: list[Lease], tokens: mx.array) -> mx.array:
        here, model = threading.get_ident(), self.cache.model
        if here not in self._batches or self._batches[here][0]() is not model:
            fresh = self.cache.batch([])
            self._batches[here] = (weakref.ref(fresh.model), fresh)
        batch = self._batches[here][1]
        batch.seat(leases)
        return batch.step(tokens)[:, None, :]


class Row:
    """One request: its lease, for as long as the server refers to it."""

    __slots__ = ("lease", "seats", "table", "waiting")

    def __init__(self, table: Table, lease: Lease) -> None:
        self.table = table
        self.lease = lease
        self.seats = 0
        """How many batches it is a row of now. One that the server takes out of all of them has ended."""
        self.waiting: int | None = None
        """Tokens of a padded prompt that are its own."""

    def __del__(self) -> None:
        if not self.lease.closed:  # the batch that it was a row of may refer to its lease for a while
            self.table.cache.state.drop(self.lease)


class StandIn:
    """One layer of some rows."""

    def __init__(self, rows: list[Row], index: int, *, seated: bool) -> None:
        self.rows = list(rows)
        self.index = index
        self._seated = seated and index == 0
        self.is_copy = False
        """A copy of a row that continues: putting it back does not end the row."""
        self._sit(self.rows, 1)

    def _sit(self, rows: list[Row], n: int) -> None:
        for row in rows if self._seated else ():
            row.seats += n

    def __del__(self) -> None:
        self._sit(self.rows, -1)

    def _own(self) -> list[Any]:
        return [row.lease.layers[self.index] for row in self.rows]

    # -- what a batch does with a layer --------------------------------------------------------

    @staticmethod
    def merge(layers: list[StandIn]) -> StandIn:
        return StandIn([row for x in layers for row in x.rows], layers[0].index, seated=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        copied = StandIn(self.rows, self.index, seated=self._seated)
        copied.is_copy = True
        return copied

    def extend(self, other: StandIn) -> None:
        self._sit(other.rows, 1)
        self.rows += other.rows

    def filter(self, keep: Iterable[int]) -> None:
        left = [self.rows[int(i)] for i in keep]
        self._sit(left, 1)
        self._sit(self.rows, -1)
        self.rows = left

    def extract(self, i: int) -> StandIn:
        return StandIn([self.rows[i]], self.index, seated=False)

    def prepare(self, *, lengths: list[int] | None = None, **_: Any) -> None:
        """Notes the lengths of the rows of the next prompt, which is padded."""
        if lengths is not None and self.index == 0:
            for row, n in zip(self.rows, lengths, strict=True):
                row.waiting = int(n)

    def finalize(self) -> None:
        for row in self.rows:
            row.waiting = None

    def export(self) -> Any:
        """Returns a copy of this layer as mlx-lm's own cache, for a list of one row. Raises ValueError for more."""
        if len(self.rows) != 1:
            raise ConfigError(f"a batch of {len(self.rows)} rows cannot be saved as one cache: extract a row first")
        return self._own()[0].export()

    # -- what a generation loop asks of a layer ------------------------------------------------

    @property
    def state(self) -> list[mx.array]:
        arrays = {id(a): a for layer in self._own() for a in layer.live_arrays()}  # rows may lie in one buffer
        return list(arrays.values())

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.state)

    @property
    def offset(self) -> Any:
        offsets = [layer.offset for layer in self._own()]
        return offsets[0] if len(offsets) == 1 else mx.array(offsets)

    def size(self) -> int:
        return max((layer.offset for layer in self._own()), default=0)

    def empty(self) -> bool:
        return self.size() == 0

    def is_trimmable(self) -> bool:
        return all(layer.is_trimmable() for layer in self._own())

    def trim(self, n: int) -> int:
        return min((layer.trim(n) for layer in self._own()), default=0)

    def __getattr__(self, name: str) -> Any:
        """Has `to_quantized` only for full attention: mlx-lm quantises every layer that has it."""
        if name == "to_quantized" and all(x.is_plain and x.in_track for x in self._own()):
            return functools.partial(adopting.to_quantized, self._own()[0])
        raise AttributeError(name)

    # -- what a model is given instead ------------------------------------------------------------

    def drive(self, run: Run, inputs: mx.array, n_layers: int) -> mx.array:
        """Runs a forward over stand-ins `index` to `index + n_layers`, with the rows' own layers."""
        rows, n = self.rows, inputs.shape[1]
        span = slice(self.index, self.index + n_layers)
        if len(rows) == 1 and rows[0].waiting is None:
            if rows[0].seats == 0:
                rows[0].table.before_alone(rows[0].lease, n)
            return run(inputs, rows[0].lease.layers[span])
        if n == 1 and self.index == 0 and all(row.waiting is None for row in rows):
            return rows[0].table.step([row.lease for row in rows], inputs[:, 0])
        outs: list[mx.array | None] = []
        for i, row in enumerate(rows):
            real = n if row.waiting is None else min(n, row.waiting)
            if row.waiting is not None:
                row.waiting -= real
            if real == 0:
                outs.append(None)
                continue
            out = run(inputs[i : i + 1, :real], row.lease.layers[span])
            # one row's activations at a time
            device.evaluate([layer.live_arrays() for layer in row.lease.layers[span]])
            outs.append(mx.pad(out, [(0, 0), (0, n - real), (0, 0)]))
        known = next(out for out in outs if out is not None)
        return mx.concatenate([mx.zeros_like(known) if out is None else out for out in outs], axis=0)
