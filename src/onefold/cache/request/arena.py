"""One slab for the tails of a batch's rows.

- Each row has a region of `STEP` tokens. A decode step then writes all rows with one operation per layer and reads all
  tails with one product, instead of several per row: on a GPU the number of operations determines a step's time.
- A tail of at most `BRINGS` tokens is copied here when its row joins; a longer one stays where it is. When a row
  leaves, what its nodes own here is copied to another slab (`Placement.evacuate`).
- Rows that share no slab stay where they are: each is one range for the stock kernel.
- The arena is optional: if the budget has no room for it, rows continue in their own slabs.
"""

from __future__ import annotations

from onefold.cache.memory import device
from onefold.cache.memory.pieces import Piece
from onefold.cache.memory.segment import STEP, Slab, Store
from onefold.cache.memory.track import Track
from onefold.errors import BudgetError

BRINGS = STEP // 2
"""Tokens. A tail up to this long is copied to the arena."""


class Arena:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._slab: Slab | None = None

    def seat(self, tracks: list[Track]) -> None:
        """Give every row a place here for its next token. Does nothing if rows share nothing, or if there is no room.
        Called between steps."""
        if not self._store.specs:
            return
        if self._slab is not None and self._slab not in self._store.slabs:
            self._slab = None
        standing = [t for t in tracks if not self._seated(t)]
        if not standing or (len(standing) == len(tracks) and not _share(tracks)):
            return
        try:
            regions = self._regions(len(standing), len(tracks))
        except BudgetError:
            return
        for track, lo in zip(standing, regions, strict=True):
            self._give(track, lo)

    def _seated(self, track: Track) -> bool:
        if not track.pieces:
            return False
        last = track.pieces[-1]
        return last.slab is self._slab and last.limit is not None and last.room > 0 and track.writable(last)

    def _regions(self, n: int, rows: int) -> list[int]:
        """Returns the indices where `n` free regions begin. Makes or grows the slab if needed. Raises BudgetError."""
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
        capacity = (max(free) + 1) * STEP
        if slab is None:
            self._slab = self._store.slab(max(capacity, rows * STEP))
        elif capacity > slab.capacity:
            slab.rewrite([(0, slab.capacity)], capacity)
        return [r * STEP for r in free]

    def _give(self, track: Track, lo: int) -> None:
        slab = self._slab
        assert slab is not None
        slab.enter(track, writes=True)
        slab.settle()
        last = track.pieces[-1] if track.pieces else None
        if last is None or not self._can_bring(track, last):
            track.pieces.append(Piece(slab, lo, lo, track.end, limit=lo + STEP))
            return
        n, old = last.hi - last.lo, last.slab
        for index in range(len(self._store.specs)):
            source, target = old.arrays(index), slab.arrays(index)
            for j, array in enumerate(source):
                target[j][..., lo : lo + n, :] = array[..., last.lo : last.hi, :]
            device.evaluate(target)
        for span in list(old.spans):
            span.move(slab, lo + span.lo - last.lo)
        old.leave(track)
        old.settle()
        track.pieces[-1] = Piece(slab, lo, lo + n, last.pos, limit=lo + STEP)

    def _can_bring(self, track: Track, last: Piece) -> bool:
        return (
            last.slab is not self._slab
            and last.hi - last.lo <= BRINGS
            and track.writable(last)
            and last.slab.tracks == {track}
            and sum(p.slab is last.slab for p in track.pieces) == 1
            and all(last.lo <= s.lo and s.hi <= last.hi for s in last.slab.spans)
        )


def _share(tracks: list[Track]) -> bool:
    """Whether two rows read one slab."""
    slabs = [slab for t in tracks for slab in {p.slab for p in t.pieces}]
    return len(set(slabs)) < len(slabs)
