"""The work table of the decode kernel: which chunk of which slab is read for which rows.

- A range of a slab that several rows read is one entry, so it is read once for all of them. Ranges that overlap are cut
  where they differ.
- A range is cut into chunks, which are read in parallel. Each (chunk, row) has a partial result; `lists` says which
  partials belong to a row.
- The table is the same for every layer. From one step to the next only the end of each row's last range changes
  (`follow`), unless a row joins, leaves, or begins another range.
- Its arrays are padded, so that a compiled step (`compiled_step`) can be given those of many layouts: an entry without
  members does nothing.

Knows nothing of MLX's kernels, and of slabs only their identity and capacity.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

COLUMNS = 8
"""Integers of an entry: slab, lo, hi, capacity, first member, members, keys of the row behind the chunk, first
partial."""
_SLAB, _LO, _HI, _CAPACITY, _MEMBER, _MEMBERS, _BEHIND, _PARTIAL = range(COLUMNS)
CHUNK = 256
"""The least length of a chunk. A region of a batch's common slab is never longer."""
BLOCKS, ROUNDED = 256, 64
"""About so many blocks run at once on a large GPU. Where there would be more, chunks are longer, by multiples of
`ROUNDED`: each has partial results to write and to read, and those of all layers may be in memory at once."""
READERS_OF_A_BLOCK = 16
"""A chunk has a partial result for each reader. It is therefore longer where it has more readers than this."""
PIECES = 4
"""Of a row, in an estimate."""
PADDING = 64
"""Entries, partials and the length of the lists are multiples of this where rows have one query. Of many rows one has
another chunk every few steps."""
MANY_PARTIALS = 512
"""Where rows have more queries than in a step, they have about so many partial results for each head."""
MOST_QUERIES = 8
"""Queries of a row in one step; a chunk of a prompt has more."""

Layout = Sequence[Sequence[tuple[Any, int, int]]]
"""For each row its slabs and the range of each, in order."""


class Launch(NamedTuple):
    """The entries of one launch, whose slabs are `slabs[first:stop]` of the table."""

    first: int
    stop: int
    work: mx.array
    entries: int
    partials: int


class WorkTable:
    def __init__(self, layout: Layout, queries: int, heads: int, slabs_per_launch: int) -> None:
        """`heads` are those of the keys: each entry is a block for each of them."""
        self.rows = len(layout)
        self.queries = queries
        """Of each row."""
        self.slabs_per_launch = slabs_per_launch
        self._layout = layout
        pieces = _pieces(layout)
        self.slabs: list[Any] = list(dict.fromkeys(p.slab for p in pieces))
        self._capacities = [slab.capacity for slab in self.slabs]
        order = {id(slab): i for i, slab in enumerate(self.slabs)}
        pieces.sort(key=lambda p: order[id(p.slab)])
        least = _chunk(pieces, heads, queries)
        entries: list[tuple[int, ...]] = []
        members: list[int] = []
        parts: list[list[int]] = [[] for _ in layout]
        last: dict[int, int] = {}
        partials, self.readers = 0, 1
        for p in pieces:
            first, n = len(members), len(p.rows)
            members += p.rows
            self.readers = max(self.readers, n)
            chunk = least * _times(n)
            for lo in range(p.lo, p.hi, chunk):
                hi = min(p.hi, lo + chunk)
                if n == 1 and p.behind == 0 and hi == p.hi:
                    last[p.rows[0]] = len(entries)
                behind = min(queries - 1, p.behind + p.hi - hi)
                entries.append((order[id(p.slab)], lo, hi, p.slab.capacity, first, n, behind, partials))
                for i, row in enumerate(p.rows):
                    parts[row].append(partials + i)
                partials += n
        self.partials = partials
        self._padded = np.zeros((self._padded_to(len(entries)), COLUMNS), np.int32)
        self._entries = self._padded[: len(entries)]
        self._entries[:] = np.array(entries, np.int32).reshape(-1, COLUMNS)
        self._grows = np.zeros(len(entries), np.int32)
        """1 for the last entry of each row, which gets one more key in the next step."""
        self._grows[list(last.values())] = 1
        self._room = min((least - entries[i][_HI] + entries[i][_LO] for i in last.values()), default=0)
        """Keys that every row's last entry has room for."""
        self._has_ends = len(last) == self.rows
        firsts = np.cumsum([0, *(len(p) for p in parts)])
        self.first_at, self.parts_at = len(members), len(members) + len(firsts)
        lists = np.concatenate([members, firsts, *parts]).astype(np.int32)
        self.lists = mx.array(np.pad(lists, (0, self._padded_to(len(lists)) - len(lists))))
        self._launches: list[Launch] | None = None
        self._numbers: dict[tuple[int, bool, int], mx.array] = {}

    def _padded_to(self, n: int) -> int:
        return _padded(n) if self.queries == 1 else n

    def follow(self, layout: Layout) -> bool:
        """Take on another layout of the same rows, if it is this very list, or each row has one more key at its end.
        Returns False, and changes nothing, if it is neither, or needs other chunks, or a slab has another capacity now:
        make another table then."""
        if layout is self._layout:
            return True
        if self.queries > 1 or self._capacities != [slab.capacity for slab in self.slabs]:
            return False
        if not self._has_ends or self._room <= 0 or len(layout) != self.rows:
            return False
        if not all(map(_is_next, self._layout, layout)):
            return False
        self._entries[:, _HI] += self._grows
        self._room -= 1
        self._layout, self._launches = layout, None
        return True

    def numbers(self, repeats: int, has_sinks: bool, tile: int) -> mx.array:
        """Returns what a launch needs to know beside the table: tiles, repeats, queries, sinks, and where the lists of
        partials begin."""
        key = (repeats, has_sinks, tile)
        if key not in self._numbers:
            numbers = (self.tiles(repeats, tile), repeats, self.queries, has_sinks, self.first_at, self.parts_at)
            self._numbers[key] = mx.array(numbers, mx.int32)
        return self._numbers[key]

    def tiles(self, repeats: int, tile: int) -> int:
        """Returns how many tiles of queries the chunk with the most readers has."""
        return -(-self.readers * repeats * self.queries // tile)

    def launches(self) -> list[Launch]:
        if self._launches is None:
            self._launches = [self._launch(i) for i in range(0, max(1, len(self.slabs)), self.slabs_per_launch)]
        return self._launches

    def _launch(self, first: int) -> Launch:
        stop = min(first + self.slabs_per_launch, len(self.slabs))
        if first == 0 and stop == len(self.slabs):
            return Launch(0, stop, mx.array(self._padded), len(self._padded), self._padded_to(self.partials))
        a, b = np.searchsorted(self._entries[:, _SLAB], [first, stop])
        own = self._entries[a:b].copy()
        base = int(own[0, _PARTIAL])
        end = int(self._entries[b, _PARTIAL]) if b < len(self._entries) else self.partials
        own[:, _SLAB] -= first
        own[:, _PARTIAL] -= base
        return Launch(first, stop, mx.array(own), len(own), end - base)

    # -- for a compiled step -------------------------------------------------------------------

    def like(self, other: WorkTable) -> WorkTable:
        """Give the table all numbers that the other one has, so that both have as many arrays. Returns this one."""
        for key in other._numbers:
            self.numbers(*key)
        return self

    @property
    def shape(self) -> tuple[Any, ...] | None:
        """What a compiled step depends on beside the content of `arrays`; None if the table needs several launches."""
        if len(self.slabs) > self.slabs_per_launch:
            return None
        sizes = len(self._padded), self._padded_to(self.partials), self.lists.shape[0]
        return self.rows, self.queries, self.readers, *sizes, tuple(self._numbers), tuple(self._capacities)

    def arrays(self) -> list[mx.array]:
        """Returns all arrays that launches are given."""
        return [self.lists, self.launches()[0].work, *self._numbers.values()]

    def standing_for(self, arrays: list[mx.array]) -> WorkTable:
        """Returns a table whose arrays are these, in the order of `arrays`."""
        twin = copy.copy(self)
        twin.lists, work, *numbers = arrays
        twin._launches = [self.launches()[0]._replace(work=work)]
        twin._numbers = dict(zip(self._numbers, numbers, strict=True))
        return twin


def most_partials(rows: int, heads: int, queries: int) -> int:
    """Returns the most partial results of a table of rows with a few pieces each, on keys of so many heads."""
    if queries > MOST_QUERIES:
        return rows * (MANY_PARTIALS // queries + 2)
    chunks = -(-BLOCKS // heads)
    return _padded(chunks * rows // _times(rows) + chunks + PIECES * rows)


def _padded(n: int) -> int:
    return -(-n // PADDING) * PADDING


def _times(readers: int) -> int:
    """Returns how many times as long a chunk with so many readers is."""
    return -(-readers // READERS_OF_A_BLOCK)


def _is_next(before: Sequence[tuple[Any, int, int]], after: Sequence[tuple[Any, int, int]]) -> bool:
    """Whether a row has one more key at its end, and is the same otherwise."""
    if len(before) != len(after) or before[:-1] != after[:-1]:
        return False
    (slab, lo, hi), (other, start, end) = before[-1], after[-1]
    return slab is other and lo == start and end == hi + 1


class _Piece(NamedTuple):
    slab: Any
    lo: int
    hi: int
    rows: list[int]
    behind: int
    """The fewest keys that one of the rows has behind it."""


def _pieces(layout: Layout) -> list[_Piece]:
    """Returns the ranges that are read, each with its rows; ranges of different rows are equal or do not overlap."""
    found: dict[int, tuple[Any, list[tuple[int, int, int, int]]]] = {}
    for row, ranges in enumerate(layout):
        behind = sum(hi - lo for _, lo, hi in ranges)
        for slab, lo, hi in ranges:
            behind -= hi - lo
            found.setdefault(id(slab), (slab, []))[1].append((lo, hi, row, behind))
    pieces: list[_Piece] = []
    for slab, read in found.values():
        if len(read) == 1:
            lo, hi, row, behind = read[0]
            pieces.append(_Piece(slab, lo, hi, [row], behind))
            continue
        for a, b in pairwise(sorted({edge for lo, hi, _, _ in read for edge in (lo, hi)})):
            readers = [(row, behind + hi - b) for lo, hi, row, behind in read if lo <= a and b <= hi]
            if not readers:
                continue
            # all queries of a row see what it shares with others, because it has written their tokens itself
            pieces.append(_Piece(slab, a, b, [row for row, _ in readers], min(behind for _, behind in readers)))
    return pieces


def _chunk(pieces: list[_Piece], heads: int, queries: int) -> int:
    """Returns the length of a chunk that one row reads."""
    chunk, total = CHUNK, sum(p.hi - p.lo for p in pieces)
    if queries > MOST_QUERIES:
        while total * queries > MANY_PARTIALS * chunk:
            chunk *= 2
        return chunk
    return max(chunk, -(-total * heads // (BLOCKS * ROUNDED)) * ROUNDED)
