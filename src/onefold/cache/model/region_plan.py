"""How a decode step on a CPU reads the pieces of a batch's rows, planned once per step for all layers.

- **Regions.** Where the last piece of every row lies in a region of its own of one slab (an arena), the slab is read as
  a batch of regions: one product for all rows, in which each row reads its own region.
- **Own pieces** are read one by one. A row's columns are padded to those of the longest row of its group, so that a
  group has one softmax, over its own columns and those of the regions. Rows of very different lengths are in different
  groups.
- **Shared** and **common** pieces are as in `reading_plan`.

Only what a row sees is read of its own pieces: a hidden column that is not a number would reach it. From step to step
only the ends of the last pieces change; the rest of the plan is kept.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from onefold.cache.memory.segment import STEP, round_up
from onefold.cache.memory.shapes import View
from onefold.cache.model.reading_plan import Ranges, hide, make_plan

COLUMNS = 32
"""Of the regions so many columns are read, or a multiple: up to the longest fill."""
SHORT = 512
"""Rows of up to so many own columns are in one group."""


def padding(rows: int, tokens: int) -> int:
    """Returns the most columns that no row sees, in the scores of all rows: those of other rows' widths, of slabs that
    rows read together, and of the regions."""
    return rows * (SHORT + STEP) + 2 * tokens


class Source(Protocol):
    """A slab: its arrays in each layer."""

    capacity: int

    def arrays(self, index: int) -> list[mx.array]: ...


Layout = list[list[tuple[Any, int, int]]]


class Held:
    """The arrays of one layer in place of a slab, for rows that are given as views."""

    def __init__(self, arrays: list[mx.array]) -> None:
        self._arrays = arrays
        self.capacity = arrays[0].shape[2]

    def arrays(self, index: int) -> list[mx.array]:
        return self._arrays


def layout_of(rows: list[list[View]]) -> Layout:
    known: dict[int, Held] = {}
    return [[(known.setdefault(v.slab, Held(v.arrays)), v.lo, v.hi) for v in row] for row in rows]


@dataclass(slots=True)
class Regions:
    """A slab in which the newest tokens of each row lie in a region of its own."""

    slab: Source
    first: int
    """The region from which on it is read, and how many are read."""
    n: int
    numbers: list[int]
    """Each row's region."""


@dataclass(slots=True)
class Own:
    """One piece of a row, and how many columns are left empty behind it."""

    row: int
    slab: Source | None
    lo: int
    hi: int
    is_whole: bool
    """Whether that is the whole slab."""
    gap: int


@dataclass(slots=True)
class Group:
    rows: list[int]
    width: int
    """Columns of a row's own pieces."""
    pieces: list[Own]
    cuts: list[int]
    """Where the columns of all rows, one after the other, are cut into those of the pieces and the gaps."""
    seen: npt.NDArray[np.bool_]
    """Whether a row sees an own column, [rows, width]."""
    hidden: mx.array
    """0 where a row sees a column, of its own or of the regions, very low where not; added to the scores."""


@dataclass(slots=True)
class RegionPlan:
    made_for: Any
    any_slab: Source
    regions: Regions | None
    groups: list[Group]
    sizes: list[int]
    """The sizes of the groups, summed up."""
    order: mx.array | None
    """The rows in the order of the groups; None if that is their order in the batch."""
    back: mx.array | None
    """The inverse of `order`."""
    seats: mx.array | None
    """For each region that is read the row (in the order of the groups) that has it; None if they are the same."""
    places: mx.array | None
    """For each row its region."""
    shared: list[tuple[Source, int, int, tuple[int, ...]]]
    hidden: list[mx.array | None]
    """A mask for each shared piece, as in `ReadingPlan`."""
    columns: int = 0
    """So many columns of each region are read."""
    constants: dict[tuple[Any, ...], mx.array] = field(default_factory=dict)
    """Empty columns, by shape."""

    @property
    def ranges(self) -> Ranges:
        return tuple((lo, hi, who) for _, lo, hi, who in self.shared)

    def empty(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        key = (*shape, dtype)
        if key not in self.constants:
            self.constants[key] = mx.array(np.zeros(shape, np.float32), dtype)  # kept, so not lazy
        return self.constants[key]

    def follow(self, layout: Layout, dtype: mx.Dtype, whole: bool) -> None:
        """Set what changes from step to step: which columns of the regions each row sees. `whole`: all columns of a
        region are read."""
        if self.regions is None:
            return
        ends = [(row[-1][2] - 1) % STEP + 1 for row in layout]
        self.columns = STEP if whole else min(STEP, round_up(max(ends), COLUMNS))
        at = np.arange(self.columns)
        for group in self.groups:
            seen = at < np.array([ends[i] for i in group.rows])[:, None]
            begins = [0 if self.made_for[2][i] else layout[i][-1][1] % STEP for i in group.rows]
            seen &= at >= np.array(begins)[:, None]
            group.hidden = hide(np.concatenate([group.seen, seen], axis=1), dtype)


def plan_regions(
    layout: Layout, fronts: list[int], dtype: mx.Dtype, plain: bool, known: RegionPlan | None
) -> RegionPlan:
    """Returns the plan for these pieces: `known`, if only the ends of the last pieces have changed. `fronts` are the
    tokens of each row that its region has a copy of, before the row's piece; `plain`: slices of slabs are not
    copied."""
    regions = _regions(layout, plain)
    if regions is None:
        rest, fronts = layout, [0] * len(layout)
    else:
        found = [_rest(row, front) for row, front in zip(layout, fronts, strict=True)]
        rest, fronts = [row for row, _ in found], [front for _, front in found]
    made_for = (rest, [slab.capacity for row in rest for slab, _, _ in row], fronts, regions, dtype, plain)
    if known is None or known.made_for != made_for:
        known = _planned(made_for, rest, regions, dtype, plain)
    known.follow(layout, dtype, not plain)
    return known


def _regions(layout: Layout, plain: bool) -> Regions | None:
    slab = layout[0][-1][0]
    numbers = []
    for row in layout:
        last, lo, hi = row[-1]
        if last is not slab or (hi - 1) // STEP != lo // STEP:
            return None
        numbers.append(lo // STEP)
    if len(layout) < 2 or slab.capacity % STEP:
        return None
    ordered = sorted(numbers)
    if any(map(operator.eq, ordered, ordered[1:])):
        return None  # not by a set: its memory is the first large piece that malloc is asked for after an evaluation
    if not plain:
        return Regions(slab, 0, slab.capacity // STEP, numbers)
    first = min(numbers)
    return Regions(slab, first, max(numbers) + 1 - first, numbers)


def _rest(row: list[tuple[Any, int, int]], front: int) -> tuple[list[tuple[Any, int, int]], int]:
    """Returns the pieces before the last, less those at the end that its region has a copy of, `front` tokens; and
    `front`, or 0 if these are not whole pieces any more, and the copy cannot be used."""
    k, left = len(row) - 1, front
    while left > 0 and k:
        k -= 1
        left -= row[k][2] - row[k][1]
    return (row[:k], front) if left == 0 else (row[:-1], 0)


def _planned(made_for: Any, rest: Layout, regions: Regions | None, dtype: mx.Dtype, plain: bool) -> RegionPlan:
    n = len(rest)
    views = [[View([], lo, hi, id(slab)) for slab, lo, hi in row] for row in rest]
    capacities = {id(slab): slab.capacity for row in rest for slab, _, _ in row}
    reading = make_plan(views, dtype, capacities, sparse=False)
    shared = [(rest[i][j][0], 0, rest[i][j][0].capacity, tuple(range(n))) for i, j in reading.common]
    shared += [(*rest[i][j], tuple(who)) for i, j, who in reading.shared]
    own: list[list[tuple[Any, int, int]]] = [[] for _ in range(n)]
    for i, j in reading.single:
        own[i].append(rest[i][j])
    widths = [sum(hi - lo for _, lo, hi in row) for row in own]
    groups = []
    if regions is not None or any(widths):
        for rows in _grouped(widths, None if regions is None else regions.numbers):
            groups.append(_group(rows, own, max(widths[i] for i in rows), dtype))
    order = [i for group in groups for i in group.rows]
    any_slab = rest[0][0][0] if regions is None else regions.slab
    plan = RegionPlan(made_for, any_slab, regions, groups, [], None, None, None, None, shared, reading.hidden)
    plan.sizes = np.cumsum([len(group.rows) for group in groups])[:-1].tolist()
    if order != list(range(n)):
        plan.order, plan.back = mx.array(order), mx.array(np.argsort(order))
    if regions is not None:
        places = [regions.numbers[i] - regions.first for i in order]
        if places != list(range(regions.n)):
            seats = [0] * regions.n  # a region that no row has is read for the first row, and dropped
            for k, place in enumerate(places):
                seats[place] = k
            plan.seats, plan.places = mx.array(seats), mx.array(places)
    return plan


def _grouped(widths: list[int], regions: list[int] | None) -> list[list[int]]:
    """Returns the rows in groups of similar width, in each group by region. A row without columns, of its own or of a
    region, is in the last group."""
    keys = list(range(len(widths))) if regions is None else regions
    found: list[list[int]] = []
    widest = 0
    for i in sorted(range(len(widths)), key=lambda i: -widths[i]):
        if not found or (widest > SHORT and 2 * widths[i] < widest and (widths[i] or regions is not None)):
            found.append([])
            widest = widths[i]
        found[-1].append(i)
    return [sorted(rows, key=lambda i: keys[i]) for rows in found]


def _group(rows: list[int], own: Layout, width: int, dtype: mx.Dtype) -> Group:
    pieces: list[Own] = []
    cuts: list[int] = []
    seen = np.zeros((len(rows), width), dtype=bool)
    for k, i in enumerate(rows):
        at = 0
        for slab, lo, hi in own[i]:
            at += hi - lo
            cuts.append(k * width + at)
            pieces.append(Own(i, slab, lo, hi, hi - lo == slab.capacity, 0))
        seen[k, :at] = True
        if at == width:
            continue
        if not own[i]:
            pieces.append(Own(i, None, 0, 0, True, width))
        else:
            pieces[-1].gap = width - at
        cuts.append((k + 1) * width)
    return Group(rows, width, pieces, cuts[:-1], seen, hide(seen, dtype))
