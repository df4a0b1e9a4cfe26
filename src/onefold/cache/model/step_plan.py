"""The plan of a decode step, which the first layer computes and the other layers reuse.

The positions of the rows and the layout of their pieces are the same for every layer of a step. A batch has one
`StepPlan`; `begin` resets what is valid for one step only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from onefold.cache.memory.segment import Slab
from onefold.cache.memory.shapes import View


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


COMMON_TOKENS = 512
"""A slab of which each row reads a part is read whole for all of them if it has at most this many tokens per row."""


@dataclass(slots=True)
class ReadingPlan:
    """How to read the rows' pieces, each given as (row, index in the row). The same for every layer of a step."""

    common: list[tuple[int, int]]
    """Short slabs of which several rows read different parts: read whole, each row sees its own."""
    shared: list[tuple[int, int, list[int]]]
    """Pieces that several rows read, with these rows."""
    single: list[tuple[int, int]]
    """The remaining pieces, which one row reads."""
    hidden: list[mx.array | None]
    """A mask for each common and then each shared piece: 0 where a row sees a column, very low where not; None if every
    row sees all."""


def _make_plan(rows: Rows | list[list[View]], dtype: mx.Dtype) -> ReadingPlan:
    n = len(rows)
    readers: dict[tuple[int, int, int], tuple[int, int, list[int]]] = {}
    slabs: dict[int, tuple[int, int, set[int]]] = {}
    for i, row in enumerate(rows):
        for j, v in enumerate(row):
            readers.setdefault((v.slab, v.lo, v.hi), (i, j, []))[2].append(i)
            slabs.setdefault(v.slab, (i, j, set()))[2].add(i)
    whole = {slab for slab, (i, j, who) in slabs.items() if len(who) > 1 and rows[i][j].capacity <= n * COMMON_TOKENS}
    whole -= {slab for (slab, _, _), (_, _, who) in readers.items() if len(who) == len(slabs[slab][2])}
    common = [slabs[slab][:2] for slab in whole]
    shared = [found for (slab, _, _), found in readers.items() if len(found[2]) > 1 and slab not in whole]
    taken = {(rows[i][j].slab, rows[i][j].lo, rows[i][j].hi) for i, j, _ in shared}
    taken |= {key for key in readers if key[0] in whole}
    own = [[j for j, v in enumerate(row) if (v.slab, v.lo, v.hi) not in taken] for row in rows]
    single = [(i, j) for i, js in enumerate(own) for j in js]

    def hide(seen: Any) -> mx.array:
        return mx.where(mx.array(seen), mx.array(0, dtype), mx.array(lowest(dtype), dtype))[None, :, None, :]

    hidden: list[mx.array | None] = []
    for i, j in common:
        seen = np.zeros((n, rows[i][j].capacity), dtype=bool)
        for r, row in enumerate(rows):
            for v in row:
                if v.slab == rows[i][j].slab:
                    seen[r, v.lo : v.hi] = True
        hidden.append(hide(seen))
    hidden += [hide([[r in who] for r in range(n)]) if len(who) < n else None for _, _, who in shared]
    return ReadingPlan(common, shared, single, hidden)


def lowest(dtype: mx.Dtype) -> float:
    """Returns the score of a hidden column: finite, because a row may see no column of a block."""
    return -6e4 if dtype == mx.float16 else -1e30


Ranges = tuple[tuple[int, int, tuple[int, ...]], ...]
"""For each piece that rows read together: its first index, its end, and the rows."""
Core = Callable[..., mx.array]
CoreKey = tuple[Ranges, int, float]


@dataclass(slots=True)
class OneSlab:
    """The slab to which all rows of a step append: a layer then needs one write per array."""

    slab: Slab
    spots: mx.array
    """Each row's index there."""
    where: dict[tuple[int, ...], mx.array]
    """The indices, broadcast to the shape of a write, by that shape."""


class StepPlan:
    """Shared by the layers of one batch."""

    __slots__ = (
        "_dtype",
        "_offset",
        "_offsets",
        "_planned",
        "_reading",
        "admitted",
        "cores",
        "laid_out",
        "layout",
        "one_slab",
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

    def begin(self) -> None:
        """Reset what was computed for the last step's positions."""
        self.admitted = self.laid_out = self._offsets = None

    def offset(self, offsets: list[int]) -> mx.array:
        """Returns the rows' positions as an array."""
        if self._offsets != offsets:
            self._offsets, self._offset = offsets, mx.array(offsets)
        return self._offset

    def reading(self, rows: Rows | list[list[View]], dtype: mx.Dtype) -> ReadingPlan:
        """Returns how to read the rows' pieces. Computed once per layout."""
        if not isinstance(rows, Rows):
            return _make_plan(rows, dtype)
        if self._reading is None or self._planned is not rows.layout or self._dtype != dtype:
            self._planned, self._dtype, self._reading = rows.layout, dtype, _make_plan(list(rows), dtype)
        return self._reading
