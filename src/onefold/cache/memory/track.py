"""Tracks: the KV that an open lease reads and writes, as pieces that cover the positions [0, end).

The tree owns the positions below `floor`; recomputing them writes nothing. A slab is written by one track, and only
while no other track reads it: a second reader seals it, and the writer continues in a new slab.

    position   0 ............ floor ............. end
    pieces     [ slab A 0:900 )[ slab B 12:80 )[ slab C 0:31 ) ....room
    owner        tree            tree             this track

Knows nothing of models, tokens, or when to free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.copying import Copying
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.pieces import Piece, Pieces
from onefold.cache.memory.segment import Slab, Span, Store, attempts
from onefold.cache.memory.shapes import Arrays
from onefold.errors import BudgetError, DeviceError, LeaseClosed


class Track(Pieces):
    """The KV of one sequence's sliceable layers."""

    def __init__(self, store: Store, *, contiguous: bool = False) -> None:
        super().__init__(store)
        self.contiguous = contiguous
        """For models outside the seam: it must be one piece that starts at index 0."""
        self.floor = 0  # recomputing below this position writes nothing
        self.frozen = 0  # the tree owns the positions below this one

    def gather(self) -> None:
        """Copy a contiguous track into one piece, if it is not, before it is read. Raises BudgetError."""
        if self.contiguous and self.pieces and not self.whole:
            self.copy_whole(self.end)

    # -- reading ----------------------------------------------------------------------

    def written(self) -> list[mx.array]:
        """Returns every layer's arrays that this track may have written to."""
        slabs = {id(p.slab): p.slab for p in self.pieces if self.writable(p)}
        return [a for slab in slabs.values() for layer in slab.layers if layer for a in layer]

    # -- borrowing, from the tree ----------------------------------------------------------

    def borrow(self, spans: Iterable[Span]) -> None:
        """Read these spans in place, one after the other from position 0. None of their slabs may be in the middle of a
        copy."""
        for span in spans:
            last = self.pieces[-1] if self.pieces else None
            if last is not None and last.slab is span.slab and last.hi == span.lo:
                last.hi = span.hi
            else:
                self.pieces.append(Piece(span.slab, span.lo, span.hi, self.end))
                span.slab.enter(self)
        self.floor = self.frozen = self.end

    def take(self) -> bool:
        """Become the writer of the last piece's slab. Returns False if another track reads it, the disk writer is
        copying it, or a node owns a range behind the piece."""
        if not self.pieces:
            return False
        last = self.pieces[-1]
        if last.slab.tracks != {self} or last.slab.used > last.hi or last.slab.copies:
            return False
        last.slab.writers = {self}
        last.slab.foreign = False
        last.slab.settle()
        return True

    def writable(self, piece: Piece) -> bool:
        return self in piece.slab.writers and piece.slab.tracks <= piece.slab.writers

    # -- writing ------------------------------------------------------------------------

    def ensure(self, start: int, n: int, *, keep: int | None = None, spare: int = 0) -> None:
        """`ensuring` in one go."""
        self.store.run(self.ensuring(start, n, keep=keep, spare=spare))

    def ensuring(self, start: int, n: int, *, keep: int | None = None, spare: int = 0) -> Work[None]:
        """Make the positions [start, start + n) readable, and those not below `floor` writable.

        `keep` is the furthest position that any layer still needs. Room to grow leaves `spare` bytes free. Raises
        BudgetError if there is no room; then nothing has been allocated and every layer reads what it read before.
        """
        stop = start + n
        start = max(start, self.floor)
        if stop > self.end and not self._can_grow and not self.contiguous:
            yield from self.store.making_room_for(stop - self.end)
        while True:
            if self._sealed_from(start):
                self._reseat(start, self.end if keep is None else min(keep, self.end))
            missing = stop - self.end
            if missing <= 0:
                return
            if not self._can_grow or self.pieces[-1].room >= missing:
                break
            yield from self._growing(missing, spare)
            if not self._sealed_from(start):  # else another track has begun to read it meanwhile
                break
        if self.pieces and self.writable(self.pieces[-1]):
            last = self.pieces[-1]
            step = min(last.room, missing)
            last.hi += step
            missing -= step
        if missing > 0:
            if self.contiguous and self.pieces:
                yield from self.copying_whole(stop, spare)
                self.pieces[-1].hi += missing
            else:
                self.append(self.store.slab_for(missing, spare=spare), missing)

    def _sealed_from(self, start: int) -> bool:
        """Whether this track may not write to some position from `start` on."""
        return start < self.frozen or any(p.end > start and not self.writable(p) for p in self.pieces)

    @property
    def _can_grow(self) -> bool:
        """Whether its last slab can be made larger in place."""
        return bool(self.pieces) and self.pieces[-1].limit is None and self.writable(self.pieces[-1])

    def write(self, index: int, start: int, new: Arrays, *, low: int | None = None) -> None:
        """Write `new`, the arrays of some tokens from `start` on, for layer `index`; nothing below `floor`, or below
        `low` if that is given."""
        n = new[0].shape[2]
        last = self.pieces[-1]
        if start >= self.floor and start >= last.pos:  # nearly always
            lo = last.lo + start - last.pos
            arrays = last.slab.arrays(index)
            for j, x in enumerate(new):
                arrays[j][..., lo : lo + n, :] = x
            return
        low = max(start, self.floor if low is None else low)
        for piece in self.pieces:
            if piece.pos > low:
                piece.front = 0  # what it is a copy of is written again
            a, b = max(low, piece.pos), min(start + n, piece.end)
            if a >= b:
                continue
            lo = piece.lo + a - piece.pos
            arrays = piece.slab.arrays(index)
            for j, x in enumerate(new):
                part = x if b - a == n else x[..., a - start : b - start, :]
                arrays[j][..., lo : lo + b - a, :] = part

    def shorten(self, end: int) -> None:
        """Turn the positions from `end` on into room again; they stay reserved, and `ensure` covers them later."""
        last = self.pieces[-1]
        if last.pos < end < last.end:
            last.hi -= last.end - end
        elif last.pos == end:
            last.hi = last.lo

    def rewind(self, to: int) -> None:
        """Allow positions from `to` on to be written again. Those that the tree owns are written to another slab."""
        self.floor = min(self.floor, to)

    def freeze(self, upto: int) -> None:
        """Note that the tree owns the positions below `upto`."""
        self.floor = max(self.floor, upto)
        self.frozen = max(self.frozen, upto)

    def free(self) -> None:
        """Release all pieces. What nodes own stays with them."""
        for piece in self.pieces:
            piece.slab.finish_copy()
        for piece in self.pieces:
            piece.slab.leave(self)
        slabs = {id(p.slab): p.slab for p in self.pieces}
        self.pieces = []
        self.floor = self.frozen = 0
        for slab in slabs.values():
            slab.settle()

    # -- for ensure --------------------------------------------------------------------

    def append(self, slab: Slab, n: int) -> None:
        slab.enter(self, writes=True)
        self.pieces.append(Piece(slab, 0, n, self.end))

    def _growing(self, n: int, spare: int) -> Work[None]:
        """Grow the last slab by `n` tokens in place. Does nothing if there is no room for one array's copy: the caller
        opens a new slab then."""
        last = self.pieces[-1]
        last.slab.finish_copy()
        yield from Copying(self._grown(last, n, spare), [last.slab]).steps()

    def _grown(self, last: Piece, n: int, spare: int) -> Work[None]:
        for capacity in self.store.capacities(last.hi + n, last.slab.capacity, spare):
            with contextlib.suppress(BudgetError):
                yield from last.slab.rewriting_to([(0, last.hi)], capacity)
                return

    def _reseat(self, start: int, keep: int) -> None:
        """Continue in a new slab from `start` on, because this track may not write there. Copies the positions up to
        `keep`."""
        if self.contiguous and self.pieces:
            self.copy_whole(self.end)
            self.frozen = min(self.frozen, start)
            return
        fresh = None
        if keep > start:
            fresh = self.store.slab_for(keep - start)
            for index in range(len(self.store.specs)):
                fresh.layers[index] = self.copied(index, start, keep, fresh.capacity)
        self._cut(start)
        self.frozen = min(self.frozen, start)
        if self.pieces and self.pieces[-1].slab.used > self.pieces[-1].hi:
            self.pieces[-1].slab.writers.discard(self)  # a node owns the range behind
            self.store.note(self.pieces[-1].slab)
        if fresh is not None:
            self.append(fresh, keep - start)

    def _cut(self, at: int) -> None:
        """Release the pieces from position `at` on."""
        dropped = [p for p in self.pieces if p.pos >= at]
        self.pieces = [p for p in self.pieces if p.pos < at]
        if self.pieces and self.pieces[-1].end > at:
            self.pieces[-1].hi -= self.pieces[-1].end - at
        left = {id(p.slab) for p in self.pieces}
        for piece in dropped:
            if id(piece.slab) not in left:
                piece.slab.leave(self)
                piece.slab.settle()

    def copy_whole(self, need: int, spare: int = 0) -> None:
        """`copying_whole` in one go."""
        self.store.run(self.copying_whole(need, spare))

    def copying_whole(self, need: int, spare: int = 0) -> Work[None]:
        """Copy everything to one slab with room for `need` tokens. Raises BudgetError before anything has changed."""
        yield from self.store.making_room_for(need)
        for capacity, refusal in attempts(self.store.capacities(need, spare=spare)):
            with refusal:
                yield from self.merging(capacity)
                return

    def merge(self, capacity: int) -> Slab:
        """`merging` in one go."""
        return self.store.run(self.merging(capacity))  # type: ignore[no-any-return]

    def merging(self, capacity: int, consume: frozenset[Slab] = frozenset()) -> Work[Slab]:
        """Copy all pieces to one new slab, and return it. The layers of the slabs in `consume`, which no other track
        reads, are freed as soon as they are copied, so that the transient is one layer; the caller moves their spans.
        Raises BudgetError before anything has changed, DeviceError if a later layer cannot be copied, and
        LeaseClosed."""
        for slab in consume:
            slab.rewriting = True  # while room is made, no other thread may begin to copy a slab that will be freed
        try:
            return (yield from self._merging(capacity, consume))
        finally:
            for slab in consume:
                slab.rewriting = False

    def _merging(self, capacity: int, consume: frozenset[Slab]) -> Work[Slab]:
        end, store = self.end, self.store
        fresh = store.slab(capacity, reserved=0)
        fresh.enter(self)  # so that it is not idle, and reclaiming does not compact it
        fresh.rewriting, pieces = True, self.pieces

        def abandon() -> None:
            fresh.rewriting = False
            fresh.leave(self)
            fresh.settle()

        one_layer = store.layer_token_bytes * capacity if consume else 0
        slack = max(0, capacity - sum(s.capacity for s in consume)) * store.token_bytes
        with contextlib.ExitStack() as undo:
            undo.callback(abandon)
            yield from store.ledger.granting(Purpose.LIVE, one_layer + slack)
            transient = store.ledger.open(Purpose.INFLIGHT, one_layer, "one layer of a merge")
            with contextlib.closing(transient):
                fresh.account.resize(slack)
                for index in range(len(store.specs)):
                    try:
                        fresh.layers[index] = self.copied(index, 0, end, capacity)
                    except BudgetError as error:
                        if index and consume:
                            raise DeviceError(f"the merge failed after {index} layers: {error}") from None
                        raise
                    for slab in consume:
                        slab.layers[index] = None
                    yield 0.0
                    if self.pieces is not pieces:
                        raise LeaseClosed("this lease was closed while its buffers were being copied: open another")
                device.require_clean()  # or a copy that failed would be stored
                for slab in consume:
                    slab.account.resize(0)
                fresh.account.resize(capacity * store.token_bytes, force=True)
            undo.pop_all()
        fresh.rewriting = False
        floor, frozen = self.floor, self.frozen
        self.free()
        self.append(fresh, end)
        self.floor, self.frozen = floor, frozen
        return fresh
