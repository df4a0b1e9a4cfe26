"""How composed attention reads the pieces of a batch's rows: planned once per step, the same for every layer."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from onefold.cache.memory.shapes import View
from onefold.cache.model.blocks import lowest

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
    """A mask for each common and then each shared piece: 0 where a row sees a column, very low where not; None if all
    of its readers see all."""


def make_plan(
    rows: list[list[View]], dtype: mx.Dtype, capacities: dict[int, int] | None = None, *, sparse: bool = True
) -> ReadingPlan:
    """Returns how to read these pieces. `capacities` are those of the slabs, if the views have no arrays. `sparse`: a
    slab of which rows read different parts may be read whole although they see less than half of it."""
    n = len(rows)
    if capacities is None:
        capacities = {v.slab: v.capacity for row in rows for v in row}
    readers: dict[tuple[int, int, int], tuple[int, int, list[int]]] = {}
    slabs: dict[int, tuple[int, int, set[int]]] = {}
    for i, row in enumerate(rows):
        for j, v in enumerate(row):
            readers.setdefault((v.slab, v.lo, v.hi), (i, j, []))[2].append(i)
            slabs.setdefault(v.slab, (i, j, set()))[2].add(i)
    whole = {slab for slab, (i, j, who) in slabs.items() if len(who) > 1 and capacities[slab] <= n * COMMON_TOKENS}
    if not sparse:
        read = collections.Counter({slab: 0 for slab in whole})
        for row in rows:
            read.update({v.slab: v.hi - v.lo for v in row if v.slab in whole})
        whole = {slab for slab in whole if n * capacities[slab] <= 2 * read[slab]}
    whole -= {slab for (slab, _, _), (_, _, who) in readers.items() if len(who) == len(slabs[slab][2])}
    common = [slabs[slab][:2] for slab in whole]
    shared = [found for (slab, _, _), found in readers.items() if len(found[2]) > 1 and slab not in whole]
    taken = {(rows[i][j].slab, rows[i][j].lo, rows[i][j].hi) for i, j, _ in shared}
    taken |= {key for key in readers if key[0] in whole}
    own = [[j for j, v in enumerate(row) if (v.slab, v.lo, v.hi) not in taken] for row in rows]
    single = [(i, j) for i, js in enumerate(own) for j in js]

    hidden: list[mx.array | None] = []
    for i, j in common:
        seen = np.zeros((n, capacities[rows[i][j].slab]), dtype=bool)
        for r, row in enumerate(rows):
            for v in row:
                if v.slab == rows[i][j].slab:
                    seen[r, v.lo : v.hi] = True
        hidden.append(hide(seen, dtype))
    hidden += [None] * len(shared)
    return ReadingPlan(common, shared, single, hidden)


def hide(seen: npt.NDArray[np.bool_], dtype: mx.Dtype) -> mx.array:
    """Returns what is added to scores: 0 where a row sees a column, very low where not, [1, rows, 1, columns]. A plan
    keeps it for other threads, so it is made of numbers and is not lazy."""
    return mx.array(np.where(seen, np.float32(0), np.float32(lowest(dtype)))[None, :, None, :], dtype)


Ranges = tuple[tuple[int, int, tuple[int, ...]], ...]
"""For each piece that rows read together: its first index, its end, and the rows."""
Core = Callable[..., mx.array]
CoreKey = tuple[Ranges, int, float]
