"""The plan of a decode step, which the first layer computes and the other layers reuse.

The positions of the rows and the layout of their pieces are the same for every layer of a step. A batch has one
`StepPlan`; `begin` resets what is valid for one step only.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from onefold.cache.memory.segment import Slab
from onefold.cache.memory.shapes import View
from onefold.cache.memory.track import Track
from onefold.cache.model.kernels import current
from onefold.cache.model.kernels.decode import DecodeKernel, Shape
from onefold.cache.model.kernels.work_table import WorkTable
from onefold.cache.model.reading_plan import Core, CoreKey, ReadingPlan, make_plan
from onefold.cache.model.region_plan import RegionPlan, layout_of, plan_regions

Layout = list[list[tuple[Slab, int, int]]]
"""For each row its slabs, and the range of each."""


class Rows:
    """The views of a batch's rows in one layer, made on access from a layout that all layers of a step share."""

    __slots__ = ("index", "layout")

    def __init__(self, layout: list[list[tuple[Any, int, int]]], index: int) -> None:
        self.layout = layout
        self.index = index

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, i: int) -> list[View]:
        return [View(slab.arrays(self.index), lo, hi, id(slab)) for slab, lo, hi in self.layout[i]]

    def __iter__(self) -> Iterator[list[View]]:
        return (self[i] for i in range(len(self)))


def _last(row: list[tuple[Slab, int, int]], n: int) -> list[tuple[Slab, int, int]]:
    """Returns the ranges of the last `n` tokens of a row."""
    found = []
    for slab, lo, hi in reversed(row):
        if n > 0:
            found.append((slab, max(lo, hi - n), hi))
        n -= hi - lo
    return found[::-1]


@dataclass(slots=True)
class OneSlab:
    """The slab to which all rows of a step append: a layer then needs one write per array."""

    slab: Slab
    spots: mx.array
    """Each row's index there."""
    where: dict[tuple[int, ...], mx.array]
    """The indices, broadcast to the shape of a write, by that shape."""

    @classmethod
    def of(cls, tracks: list[Track], positions: list[int]) -> OneSlab | None:
        """Returns the slab to which all tracks write these positions; None if there are several."""
        lasts = [t.pieces[-1] if t.pieces else None for t in tracks]
        spots, slab = [], None
        for track, last, position in zip(tracks, lasts, positions, strict=True):
            if last is None or position < track.floor or position < last.pos or slab not in (None, last.slab):
                return None
            slab = last.slab
            spots.append(last.lo + position - last.pos)
        return None if slab is None else cls(slab, mx.array(spots), {})


class NotTraceable(ValueError):
    """A step cannot be compiled. Raised while it is traced."""


@dataclass(slots=True)
class StandIns:
    """The arrays that layers use while a step is traced."""

    table: WorkTable
    arrays: dict[tuple[Slab, int], list[mx.array]]
    """Those of a slab and a layer."""


class StepPlan:
    """Shared by the layers of one batch."""

    __slots__ = (
        "_asked",
        "_capacities",
        "_dtype",
        "_forward",
        "_kernel",
        "_offset",
        "_offsets",
        "_planned",
        "_reading",
        "_regions",
        "_stand_ins",
        "_table",
        "_watcher",
        "_windows",
        "admitted",
        "cores",
        "fronts",
        "is_cut",
        "is_prepared",
        "is_read_by_length",
        "laid_out",
        "layout",
        "longest",
        "one_slab",
        "positions",
    )

    def __init__(self) -> None:
        self.admitted: list[int] | None = None
        """The positions at which this step's first layer reserved room for all rows."""
        self.one_slab: OneSlab | None = None
        self.laid_out: list[int] | None = None
        """The positions that `layout` was made for."""
        self.layout: list[list[tuple[Any, int, int]]] = []
        self.cores: dict[CoreKey, Core] = {}
        """Attention functions over the pieces that rows read together, by their parameters."""
        self._offsets: list[int] | None = None
        self._offset = mx.array([])
        self._planned: Any = None
        self._dtype: mx.Dtype | None = None
        self._reading: ReadingPlan | None = None
        self._regions: tuple[Any, RegionPlan] | None = None
        self.fronts: list[int] = []
        """Tokens of each row that its region has a copy of, in a prepared step."""
        self._table: WorkTable | None = None
        self._asked: set[tuple[DecodeKernel, int, int, Shape]] = set()
        self._stand_ins: StandIns | None = None
        self._capacities: list[int] = []
        self._forward: tuple[int | None, int] | None = None
        self._kernel: tuple[int, DecodeKernel | None] | None = None
        self._watcher: Callable[[], Any] = lambda: None
        self._windows: dict[int, tuple[Layout, StepPlan]] = {}
        """By window: the plan of attention within it, and the layout that this plan was cut from."""
        self.is_cut = False
        """Whether `layout` is cut to a window: its ranges then begin elsewhere in the next step."""
        self.is_prepared = False
        """The fields below and `layout` and `one_slab` are those of the step that is running."""
        self.positions = self._offset
        """The rows' positions before the step."""
        self.longest = 0
        """Tokens of the longest row after it."""
        self.is_read_by_length = False
        """Whether the model has read how long the keys are: its code then differs from step to step."""

    @property
    def watcher(self) -> Any:
        """Observes the batch's forwards for all rows; None if each row's watcher does. The batch owns it: it refers to
        the plan."""
        return self._watcher()

    @watcher.setter
    def watcher(self, watcher: Any) -> None:
        self._watcher = weakref.ref(watcher)

    def prepare(self, starts: list[int], tracks: list[Track]) -> None:
        """Lay out a step in which the rows, at `starts`, write one token each."""
        self.one_slab = OneSlab.of(tracks, starts)
        self.layout = [track.layout(start + 1) for track, start in zip(tracks, starts, strict=True)]
        self.fronts = [track.front(start + 1) for track, start in zip(tracks, starts, strict=True)]
        self.longest, self.positions = max(starts) + 1, mx.array(starts)
        self.is_prepared = True

    def begin(self) -> None:
        """Reset what was computed for the last step's positions."""
        self.admitted = self.laid_out = self._offsets = None

    def offset(self, offsets: list[int]) -> mx.array:
        """Returns the rows' positions as an array."""
        if self._offsets != offsets:
            self._offsets, self._offset = offsets, mx.array(offsets)
        return self._offset

    def kernel(self, forward: int | None) -> DecodeKernel | None:
        """Returns the device's decode kernel. MLX is asked for its device once per `forward`, unless that is None."""
        if forward is None:
            return current.kernel()
        if self._kernel is None or self._kernel[0] != forward:
            self._kernel = forward, current.kernel()
        return self._kernel[1]

    def lay_out(self, track: Track, upto: int, forward: int | None) -> Layout:
        """Returns the layout of a row alone: the list of the layer before if it is the same. It is the same in all
        layers of one `forward`; None: of which it is not known."""
        if forward is not None and (forward, upto) == self._forward:
            return self.layout
        self._forward = forward, upto
        layout = [track.layout(upto)]
        capacities = [slab.capacity for slab, _, _ in layout[0]]
        if layout != self.layout or capacities != self._capacities:
            self.layout, self._capacities = layout, capacities
        return self.layout

    def within(self, window: int, layout: Layout) -> StepPlan:
        """Returns a plan whose layout is the last `window` tokens of each row of this one, the same for all layers."""
        known = self._windows.get(window)
        if known is None or known[0] is not layout:
            plan = StepPlan() if known is None else known[1]
            plan.layout, plan.is_cut = [_last(row, window) for row in layout], True
            self._windows[window] = known = layout, plan
        return known[1]

    def table(self, kernel: DecodeKernel, layout: Layout, q: mx.array, n_kv: int, shape: Shape) -> WorkTable:
        """Returns the work table of the decode kernel for this layout and these queries, on keys of so many heads.
        Layers of other shapes use the same if their variants have as many slabs."""
        if self._stand_ins is not None:
            return self._stand_ins.table
        self._asked.add((kernel, q.shape[2], n_kv, shape))
        table, per_launch = self._table, kernel.buckets(shape)[-1]
        same = table is not None and table.queries == q.shape[2] and table.slabs_per_launch == per_launch
        if table is None or not same or not table.follow(layout):
            table = self._table = kernel.table(layout, q.shape[2], n_kv, shape)
        return table

    # -- for a compiled step -------------------------------------------------------------------

    def next_table(self) -> WorkTable | None:
        """Returns the work table of the step that was prepared, before the model asks for it; None if it is not known
        what layers ask for, or they ask for several."""
        if not self.is_prepared or self._table is None or len({(k, n) for k, n, _, _ in self._asked}) != 1:
            return None
        if not self._table.follow(self.layout):
            kernel, queries, n_kv, shape = next(iter(self._asked))
            self._table = kernel.table(self.layout, queries, n_kv, shape).like(self._table)
        return self._table

    @property
    def is_traced(self) -> bool:
        """Whether layers use stand-ins for their arrays."""
        return self._stand_ins is not None

    @contextlib.contextmanager
    def standing_in(self, stand_ins: StandIns, positions: mx.array, spots: mx.array) -> Iterator[None]:
        """Have layers use these arrays in place of the real ones."""
        kept = self.positions, self.one_slab
        assert self.one_slab is not None
        self.positions, self.one_slab = positions, OneSlab(self.one_slab.slab, spots, {})
        self._stand_ins = stand_ins
        try:
            yield
        finally:
            self._stand_ins = None
            self.positions, self.one_slab = kept

    def arrays(self, slab: Slab, index: int) -> list[mx.array]:
        """Returns a slab's arrays of one layer: a list in which a layer replaces what it writes."""
        if self._stand_ins is None:
            return slab.layers[index] or slab.arrays(index)
        return self._stand_ins.arrays[slab, index]

    # -- for composed attention ----------------------------------------------------------------

    def reading(self, rows: Rows | list[list[View]], dtype: mx.Dtype) -> ReadingPlan:
        """Returns how to read the rows' pieces. Computed once per layout."""
        if not isinstance(rows, Rows):
            return make_plan(rows, dtype)
        if self._reading is None or self._planned is not rows.layout or self._dtype != dtype:
            self._planned, self._dtype, self._reading = rows.layout, dtype, make_plan(list(rows), dtype)
        return self._reading

    def regions(self, rows: Rows | list[list[View]], dtype: mx.Dtype, plain: bool) -> RegionPlan:
        """Returns how a step on a CPU reads the rows' pieces. Computed once per layout."""
        if not isinstance(rows, Rows):
            return plan_regions(layout_of(rows), [0] * len(rows), dtype, plain, None)
        layout, known = rows.layout, self._regions
        if known is None or known[0] is not layout or known[1].made_for[-2:] != (dtype, plain):
            fronts = self.fronts if self.is_prepared else [0] * len(layout)
            known = layout, plan_regions(layout, fronts, dtype, plain, None if known is None else known[1])
            self._regions = known
        return known[1]
