"""The kernel seam: attention of a decode step over all pieces of all rows, as one kernel and one reduction.

- `reason` says why a call cannot be taken; the composed path computes it then, with the same result.
- Slabs are given to the kernel whole, so nothing is copied. They are always contiguous. A launch takes as many slabs as
  a variant has arguments for; more slabs are several launches, and one reduction.
- A device's `Maker` makes the kernel's variants for a shape (`Shape`). Each is compiled at its first use, which takes
  a second or two: `compile_all` does it before a server serves.

Knows nothing of leases, and nothing of how KV is stored but what a codec says.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.model.kernels.coded_rows import row_words, value_groups
from onefold.cache.model.kernels.work_table import MOST_QUERIES, WorkTable, most_partials

log = logging.getLogger("onefold")

BUCKETS = (4, 12, 36, 120)
"""Slabs of a variant, where the device has arguments for so many. The slots that a call does not use are given its
first slab again."""


MOST_SCORES = 1 << 22
"""Queries times keys of a chunk of a prompt up to which a kernel computes it: more are faster in MLX's own attention,
although CUDA plans that for each new pair of lengths, which takes as long as some hundred tokens in all layers."""


class Format(NamedTuple):
    """How a kernel decodes a tile of keys or values: the name of the functions that load it, and their parameters. A
    codec has one, or None if no kernel can read what it stores."""

    name: str
    arrays: int
    """Of a layer."""
    bits: int = 16
    group: int = 0
    value_bits: int = 0
    """Of the values, where keys and values are rows of one array (`formats.turned`); 0: they have arrays of their
    own."""
    turns: bool = False
    """Keys and values are stored rotated, and the kernel rotates queries, and outputs back."""

    @property
    def tag(self) -> str:
        """Tells formats apart in the names of kernels."""
        return f"{self.name}{self.bits}_{self.group}_{self.value_bits}{'t' if self.turns else ''}"

    @property
    def slots(self) -> list[str]:
        """The names of a layer's arrays in a kernel."""
        if self.value_bits:
            return ["x0"]
        return [f"{side}{j}" for side in "kv" for j in range(self.arrays // 2)]

    def arguments(self, side: str, key_dim: int) -> str:
        """Returns the first arguments of the functions that load keys ("k") or values ("v"): the arrays, or the one
        array with the bits, the first word of a row, and the half of its last word that is the scale."""
        if not self.value_bits:
            return ", ".join(slot for slot in self.slots if slot.startswith(side))
        if side == "k":
            return f"x0, of_side<{self.bits}, 0, 0>()"
        return f"x0, of_side<{self.value_bits}, {key_dim * self.bits // 32}, 1>()"

    def value_groups(self, value_dim: int) -> int:
        """Returns how many groups of a value have a scale of their own, in rows of one array."""
        return value_groups(self.name, self.bits, value_dim, self.value_bits)

    def row(self, key_dim: int, value_dim: int) -> int:
        """Returns the words of a row of the one array."""
        return row_words(key_dim, self.bits, value_dim, self.value_bits)


class Shape(NamedTuple):
    """What a variant is compiled for."""

    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    format: Format | None


class Partial(NamedTuple):
    """The arguments of a launch."""

    q: mx.array
    numbers: mx.array
    work: mx.array
    lists: mx.array
    scale: mx.array
    arrays: list[list[mx.array]]
    """Of each slab."""
    blocks: tuple[int, int]
    """Entries, each as often as it has tiles of queries; and heads of the keys."""
    partials: int
    signs: mx.array | None
    """Of the rotation of the queries, if the kernel rotates them."""


class Reduction(NamedTuple):
    """The arguments of a reduction."""

    numbers: mx.array
    lists: mx.array
    mixed: mx.array
    sums: mx.array
    sinks: mx.array | None
    shape: tuple[int, int, int, int]
    dtype: mx.Dtype
    signs: mx.array | None
    """Of the rotation of the values, if outputs are rotated back."""


class Launcher(Protocol):
    """The kernels of one shape on one device, for up to `slabs` slabs."""

    tile: int
    """Queries that one block attends."""

    def partial(self, given: Partial) -> tuple[mx.array, mx.array]:
        """Returns, for each partial and query, the weighted values (not divided by their sum), and the largest score,
        to the base 2, with the sum of the weights."""
        ...

    def reduce(self, given: Reduction) -> mx.array: ...


Maker = Callable[[Shape, int], Launcher]
Signs = tuple[mx.array, mx.array]
Judge = Callable[[Shape, int, int], str]
"""Returns why a shape may not serve, with heads of the queries and of the keys; empty if it may."""


MOST_SCHEDULED = 16 << 20
"""Bytes of partial results of a prompt's chunks that may be scheduled. Then the device is waited for: it would hold
those of all layers at once."""
BLANK = 8
"""Tokens of the slabs on which variants are compiled."""


class _Blank:
    """A slab on which variants are compiled."""

    capacity = BLANK


class DecodeKernel:
    """The decode kernel of one device."""

    def __init__(
        self,
        maker: Maker,
        takes: Callable[[Shape], str],
        most_arrays: int,
        *,
        judge: Judge | None = None,
        replaces_stock: bool = False,
        compiles_steps: bool = False,
        most_queries: int = MOST_QUERIES,
    ) -> None:
        """`takes` returns why a shape cannot be compiled; empty if it can. `most_arrays` of slabs go into one launch.
        `judge` returns why a shape that was compiled may not serve. `replaces_stock`: it is faster than MLX's own
        attention, also where a row is one slice of a buffer. `compiles_steps`: steps on it are compiled.
        `most_queries` of a row are computed at once."""
        self._maker, self.takes, self._most_arrays, self._judge = maker, takes, most_arrays, judge
        self.replaces_stock = replaces_stock
        self.compiles_steps = compiles_steps
        self.most_queries = most_queries
        self._launchers: dict[tuple[Shape, int], Launcher] = {}
        self._reasons: dict[Shape, str] = {}
        self._buckets: dict[Shape, tuple[int, ...]] = {}
        self._scales: dict[float, mx.array] = {}
        self._compiled: set[Shape] = set()
        self._scheduled = 0
        self.counts: Counter[str] = Counter()
        """Calls that were taken (""), and those that were not, by reason."""

    def buckets(self, shape: Shape) -> tuple[int, ...]:
        """Returns for how many slabs each a shape has variants."""
        if shape not in self._buckets:
            assert shape.format is not None
            most = self._most_arrays // shape.format.arrays
            self._buckets[shape] = tuple(sorted({min(n, most) for n in BUCKETS}))
        return self._buckets[shape]

    def table(self, layout: Any, queries: int, heads: int, shape: Shape) -> WorkTable:
        """Returns the work table for rows of so many queries each, on keys of so many heads."""
        return WorkTable(layout, queries, heads, self.buckets(shape)[-1])

    def reason(self, queries: mx.array, shape: Shape, mask: Any) -> str:
        """Returns why attention of these queries cannot be computed here; empty if it can."""
        if queries.shape[2] > self.most_queries:
            return "many queries"
        if isinstance(mask, mx.array) or (queries.shape[2] > 1 and mask != "causal"):
            return "a mask of the model's own"
        if queries.dtype != shape.dtype:
            return "queries of another type than the keys"
        return self.shape_reason(shape)

    def takes_chunk(self, n_tokens: int, total: int) -> bool:
        """Whether attention of so many tokens of one row, which then has `total`, is faster here than in MLX's own."""
        if not self.replaces_stock or n_tokens > self.most_queries:
            return False
        return n_tokens == 1 or n_tokens * total <= MOST_SCORES

    def shape_reason(self, shape: Shape) -> str:
        """Returns why no layer of this shape can be computed here; empty if it can."""
        if shape not in self._reasons:
            reason = self.takes(shape)
            if not reason and self._judge is not None:
                return "not compared yet"  # `compile_all` does that
            self._reasons[shape] = reason
        return self._reasons[shape]

    def attend(
        self,
        q: mx.array,
        arrays: list[list[mx.array]],
        table: WorkTable,
        shape: Shape,
        n_kv: int,
        scale: float,
        sinks: mx.array | None,
        signs: Signs | None = None,
    ) -> mx.array:
        """Returns the attention of `q`, [rows, heads, queries, dim], whose last query sees every key of its row, and
        the others one key less each. `arrays` are those of this layer, of each of the table's slabs. A format that
        turns needs `signs`, those of the rotations of keys and of values."""
        rows, heads, length, _ = q.shape
        if scale not in self._scales:
            self._scales[scale] = mx.array([scale], mx.float32)
        repeats = heads // n_kv
        mixed, sums = [], []
        for launch in table.launches():
            launcher = self._launcher(shape, launch.stop - launch.first)
            numbers = table.numbers(repeats, sinks is not None, launcher.tile)
            blocks = (launch.entries * table.tiles(repeats, launcher.tile), n_kv)
            own = arrays[launch.first : launch.stop]
            given = (q, numbers, launch.work, table.lists, self._scales[scale], own, blocks, launch.partials)
            a, b = launcher.partial(Partial(*given, None if signs is None else signs[0]))
            mixed.append(a)
            sums.append(b)
        all_mixed = mixed[0] if len(mixed) == 1 else mx.concatenate(mixed)
        all_sums = sums[0] if len(sums) == 1 else mx.concatenate(sums)
        out = (rows, heads, length, shape.value_dim)
        turned = None if signs is None else signs[1]
        attended = launcher.reduce(Reduction(numbers, table.lists, all_mixed, all_sums, sinks, out, q.dtype, turned))
        if length > MOST_QUERIES:
            self._scheduled += all_mixed.nbytes + all_sums.nbytes
            if self._scheduled >= MOST_SCHEDULED:
                self._scheduled = 0
                device.evaluate(attended)
        return attended

    def compile_all(self, shape: Shape, heads: int, n_kv: int, blank: list[mx.array]) -> None:
        """Try a shape, and compile every variant for it, unless that is done. `blank` are the arrays of a slab of
        `BLANK` tokens. A shape that fails the trial, or that cannot be compiled, is not used; this is logged."""
        if shape in self._compiled:
            return
        self._compiled.add(shape)
        heads = n_kv * max(1, heads // n_kv)
        if not self.takes(shape) and self._judge is not None:
            self._reasons[shape] = "its trial failed" if self._judge(shape, heads, n_kv) else ""
        if self.shape_reason(shape):
            return
        q = mx.zeros((1, heads, 1, shape.key_dim), shape.dtype)
        try:
            for n in self.buckets(shape):
                table = self.table([[(_Blank(), 0, 1) for _ in range(n)]], 1, n_kv, shape)
                device.evaluate(self.attend(q, [blank] * n, table, shape, n_kv, 1.0, None, _no_signs(shape)))
        except RuntimeError as error:
            log.warning("the decode kernel cannot be compiled, and MLX's own operations are used: %s", error)
            self._reasons[shape] = "the kernel cannot be compiled"

    def _launcher(self, shape: Shape, n_slabs: int) -> Launcher:
        bucket = next(n for n in self.buckets(shape) if n >= n_slabs)
        key = (shape, bucket)
        if key not in self._launchers:
            self._launchers[key] = self._maker(shape, bucket)
        return self._launchers[key]


def _no_signs(shape: Shape) -> Signs | None:
    """Returns signs that change nothing, for a format that turns."""
    assert shape.format is not None
    return (mx.ones((shape.key_dim,)), mx.ones((shape.value_dim,))) if shape.format.turns else None


def scratch_bytes(rows: int, queries: int, heads: int, n_kv: int, value_dim: int) -> int:
    """Returns the most bytes of one layer's partial results, for rows of any length."""
    return most_partials(rows, n_kv, queries) * heads * queries * (value_dim + 2) * 4
