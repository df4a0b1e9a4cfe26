"""One slab for the newest tokens of a batch's rows.

- Each row has a region of `STEP` tokens, so a decode step writes all rows with one operation per array and layer.
- When a region is nearly full, its tokens are copied to the row's own slab, behind its others
  (`Placement.bring_home`), and the region is used again. So every token is copied once, and a conversation stays in one
  piece. Rows that joined together would fill their regions together: a few are copied early in each step.
- A commit copies the rest, at most a region.
- The arena is optional: if the budget has no room for it, rows continue in their own slabs.
"""

from __future__ import annotations

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.pieces import Piece
from onefold.cache.memory.placement import Placement
from onefold.cache.memory.segment import STEP, Slab, Store
from onefold.cache.memory.track import Track
from onefold.cache.model import seam
from onefold.errors import BudgetError

EARLY = STEP // 4
"""Tokens of room in a region from which on its row is brought home when it is its turn."""
ROWS_PER_MOVE = 16
"""In each step one row of so many is brought home early."""
FRONT = STEP // 2
"""On a CPU, where each piece of a row takes two products, a region begins with a copy of the row's tokens before it, if
they are so few."""


class Arena:
    def __init__(self, store: Store, placement: Placement) -> None:
        self._store = store
        self._placement = placement
        self._slab: Slab | None = None
        self._used: set[int] = set()
        """Where regions begin that a row has had."""

    @property
    def slab(self) -> Slab | None:
        """The slab in which the rows have their regions; None if there is none yet."""
        return self._slab

    def seat(self, tracks: list[Track]) -> None:
        """Give every row a place here for its next token. Leaves rows where they are if there is no room. Called
        between steps."""
        if not self._store.specs:
            return
        rooms = [self._room(t) for t in tracks]
        standing = [t for t, room in zip(tracks, rooms, strict=True) if room == 0]
        soon = sorted((room, i) for i, room in enumerate(rooms) if 0 < room < EARLY)
        for _, i in soon[: max(0, -(-len(tracks) // ROWS_PER_MOVE) - len(standing))]:
            standing.append(tracks[i])
        if not standing:
            return
        for track in standing:
            self._placement.bring_home(track)
        # now, or only this thread could compute the copies if the step is refused
        seam.schedule([a for track in standing for a in track.written()])
        standing = [t for t in standing if self._room(t) == 0]
        try:
            regions = self._regions(len(standing), len(tracks))
        except BudgetError:
            return
        assert self._slab is not None
        slab = self._slab
        for track, lo in zip(standing, regions, strict=True):
            slab.enter(track, writes=True)
            slab.settle()
            if lo in self._used:
                _clear(slab, lo)
            self._used.add(lo)
            front = 0 if device.on_gpu() else self._copy_front(track, slab, lo)
            track.pieces.append(Piece(slab, lo + front, lo + front, track.end, lo + STEP, front))
        seam.schedule([a for layer in slab.layers if layer for a in layer])

    def _copy_front(self, track: Track, slab: Slab, lo: int) -> int:
        """Copy a row's last pieces to the beginning of its region if they are short. Returns the number of tokens."""
        found: list[Piece] = []
        n = 0
        for piece in reversed(track.pieces):
            if n + piece.hi - piece.lo > FRONT:
                break
            found.insert(0, piece)
            n += piece.hi - piece.lo
        for index in range(len(self._store.specs) if n else 0):
            arrays, at = slab.arrays(index), lo
            for piece in found:
                for j, array in enumerate(piece.slab.arrays(index)):
                    arrays[j][..., at : at + piece.hi - piece.lo, :] = array[..., piece.lo : piece.hi, :]
                at += piece.hi - piece.lo
        return n

    def _room(self, track: Track) -> int:
        """Returns the room that is left in the row's region; 0 if it has none that it can write to."""
        last = track.pieces[-1] if track.pieces else None
        if last is None or last.slab is not self._slab or last.limit is None or not track.writable(last):
            return 0
        return last.room

    def _regions(self, n: int, rows: int) -> list[int]:
        """Returns the indices where `n` free regions begin. Makes or grows the slab if needed. Raises BudgetError."""
        if self._slab not in self._store.slabs:
            self._slab = None  # freed, when the last row was brought home
        slab = self._slab
        if slab is not None and (
            not slab.tracks <= slab.writers
            or any(p.slab is slab and p.limit is None for t in slab.writers for p in t.pieces)
        ):
            slab = self._slab = None  # sealed by a reader, or taken over by a lease: make a new one
        taken = set[int]()
        if slab is not None:
            ranges = [(s.lo, s.hi) for s in slab.spans]
            ranges += [(p.lo, p.limit or p.hi) for t in slab.tracks for p in t.pieces if p.slab is slab]
            taken = {r for lo, hi in ranges for r in range(lo // STEP, -(-hi // STEP))}
        free = [r for r in range(max(rows, len(taken) + n, max(taken, default=0) + 1) + n) if r not in taken][:n]
        capacity = max((max(free, default=0) + 1) * STEP, 0)
        if slab is None:
            self._slab, self._used = self._store.slab(max(capacity, rows * STEP)), set()
        elif capacity > slab.capacity:
            slab.rewrite([(0, slab.capacity)], capacity)
        return [r * STEP for r in free]


def _clear(slab: Slab, lo: int) -> None:
    """Overwrite a region that another row has had: composed attention multiplies hidden columns by zero, and what is
    not a number would reach this row."""
    blanks: dict[tuple[int, int, mx.Dtype], mx.array] = {}
    for array in (array for layer in slab.layers for array in layer or ()):
        key = array.shape[1], array.shape[3], array.dtype
        if key not in blanks:
            blanks[key] = mx.zeros((1, key[0], STEP, key[1]), key[2])
        array[..., lo : lo + STEP, :] = blanks[key]
