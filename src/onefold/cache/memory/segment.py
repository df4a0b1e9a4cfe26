"""Slabs, spans and tracks: where the KV of sliceable layers lies, and who may write it.

- A slab is one allocation: for each sliceable layer its arrays `[1, heads, capacity, dim]`, all with
  the same capacity. The ledger counts slabs. Nobody else keeps a reference to a slab's arrays, so a
  write to them happens in place.
- A span is what a node owns: a range of one slab. Spans are never written again.
- A track is what an open lease reads and writes: pieces that cover the positions [0, end). Positions
  below `floor` belong to the tree; recomputing them writes nothing. A slab is written by one track, and
  only while no other track reads it: a second reader seals it, and the writer goes on in a fresh slab.
- Whatever copies (growing, compacting, merging) goes layer by layer and evaluates each, so that the
  transient is one layer; it is reserved as in flight. Where bytes are short it is one array. Between two
  layers the lock may be let go: what takes long is `Work`, for `CacheLock.run`.
- A slab tells its store of every change to its size, spans and readers, so that nobody looks through all slabs.

    position   0 ............ floor ............. end
    pieces     [ slab A 0:900 )[ slab B 12:80 )[ slab C 0:31 ) ....room
    owner        tree            tree             this track

Knows nothing of models, tokens, or when to free.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from onefold.cache.memory.arrays import own_bytes
from onefold.cache.memory.copying import Copying
from onefold.cache.memory.ledger import Ledger, Purpose
from onefold.cache.memory.lock import Work, run_through
from onefold.cache.memory.ranking import Ranking
from onefold.cache.memory.tree import Node
from onefold.errors import BudgetError, DeviceError, LeaseClosed
from onefold.sizes import show_size

Arrays = tuple[mx.array, ...]

STEP = 256
"""Capacities of new slabs are multiples of this while bytes are not short."""
GROWTH_STEP = 128
"""The same for slabs that grow: a conversation of a thousand tokens should not grow by a quarter."""
FINE_STEP = 8
"""The same at rest, and where bytes are short."""
ROOM_SHARE = 8
"""Room to grow is an eighth of a slab: an eighth more when it grows, and at most about that at rest."""
LEAST_CHUNK = 16
"""Tokens of the smallest chunk that prefill is cut into while anything else can give way."""


def round_up(n: int, to: int = STEP) -> int:
    return (n + to - 1) // to * to


def rest_capacity(owned: int) -> int:
    """The capacity that a slab at rest keeps for so many tokens."""
    return round_up(owned + owned // ROOM_SHARE, FINE_STEP)


class ArraySpec(NamedTuple):
    """One array of one layer, per token."""

    heads: int
    dim: int
    dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * self.dim * self.dtype.size


class LayerSpec(NamedTuple):
    """The arrays that one sliceable layer keeps for a token: keys and values, or their quantised parts."""

    arrays: tuple[ArraySpec, ...]

    @property
    def token_bytes(self) -> int:
        return sum(a.token_bytes for a in self.arrays)


class View(NamedTuple):
    """The arrays of one layer in one slab, and the range of indices to read."""

    arrays: list[mx.array]
    lo: int
    hi: int
    slab: int
    """Names the slab, whatever the layer: equal views of two rows are read once."""

    @property
    def capacity(self) -> int:
        return self.arrays[0].shape[2]

    def all(self) -> View:
        return View(self.arrays, 0, self.capacity, self.slab)


class Store:
    """What slabs are made of and charged to: the layers' shapes and the ledger."""

    def __init__(self, specs: Iterable[LayerSpec], ledger: Ledger) -> None:
        self.specs = tuple(specs)
        self.ledger = ledger
        self.slabs: set[Slab] = set()
        self.busy: set[Slab] = set()
        """Those that are not idle: a track reads them, or they are being copied."""
        self.capacity = 0
        """Tokens that all slabs have room for together."""
        self.owned = 0
        """Tokens that nodes own, in all slabs together."""
        self.roomy: Ranking[Slab] = Ranking()
        """Slabs with room or waste, the most first."""
        self._idle: Ranking[Slab] = Ranking()
        """Slabs that are not busy, the largest first."""
        self._counted: dict[Slab, tuple[int, int]] = {}
        self.allocate: Callable[..., mx.array] = mx.zeros
        self.run: Callable[[Work[Any]], Any] = run_through
        """Runs all steps of some work while the caller holds the lock."""
        self.token_bytes = sum(s.token_bytes for s in self.specs)
        self.layer_token_bytes = max((s.token_bytes for s in self.specs), default=0)
        self.array_token_bytes = max((a.token_bytes for s in self.specs for a in s.arrays), default=0)

    def slab(self, capacity: int, *, reserved: int | None = None) -> Slab:
        """A new slab, reserved now; each layer is allocated at its first write."""
        return Slab(self, capacity, self.token_bytes * capacity if reserved is None else reserved)

    def capacities(self, need: int, held: int = 0, spare: int = 0) -> Iterator[int]:
        """Capacities to try for `need` tokens, for a slab that has `held` already: with room to grow while memory is
        free; then rounded up, if evicting makes room for that and `spare` bytes more; then as little as can be."""
        step = GROWTH_STEP if held else STEP
        roomy, rounded = round_up(max(need, held + held // ROOM_SHARE), step), round_up(need, step)
        if roomy > rounded and self.ledger.fits((roomy - held) * self.token_bytes + spare):
            yield roomy
        if self.ledger.attainable((rounded - held) * self.token_bytes + spare):
            yield rounded
        yield from sorted({round_up(need, FINE_STEP), need}, reverse=True)

    def making_room_for(self, need: int) -> Work[None]:
        """Make room for a slab of `need` tokens that is made afterwards."""
        wanted = [n for n in (round_up(need), need) if self.ledger.attainable(n * self.token_bytes)]
        if wanted:
            yield from self.ledger.granting(Purpose.LIVE, wanted[0] * self.token_bytes)

    def finishing_copies(self) -> Work[None]:
        """Do the rest of the copies that others have begun of buffers that no request uses: it frees bytes."""
        for slab in [s for s in self.busy if s.copying is not None and not s.tracks]:
            if slab.copying is not None and slab.copying.is_suspended:
                yield from slab.copying.finishing()

    def slab_for(self, need: int, *, spare: int = 0) -> Slab:
        """A new slab for `need` tokens, with room if there is some. Raises BudgetError."""
        for capacity, refusal in _attempts(self.capacities(need, spare=spare)):
            with refusal:
                return self.slab(capacity)
        raise AssertionError("the last refusal is raised")

    @property
    def largest(self) -> int:
        """The capacity of the largest slab that is not busy."""
        slab = self._idle.first()
        return 0 if slab is None else slab.capacity

    def note(self, slab: Slab) -> None:
        """Called after each change of a slab's capacity, spans, tracks, writers or copies, and when it has gone."""
        there = slab in self.slabs
        capacity = slab.capacity if there else 0
        owned = slab.owned if there else 0
        counted = self._counted.pop(slab, (0, 0))
        self.capacity += capacity - counted[0]
        self.owned += owned - counted[1]
        if there:
            self._counted[slab] = (capacity, owned)
        if there and not slab.idle:
            self.busy.add(slab)
        else:
            self.busy.discard(slab)
        if there and capacity > slab.owned:
            self.roomy.place(slab, slab.owned - capacity)
        else:
            self.roomy.remove(slab)
        if there and slab.idle:
            self._idle.place(slab, -capacity)
        else:
            self._idle.remove(slab)

    def check(self) -> list[str]:
        """Recount from all slabs and say what differs."""
        found = []
        if self.busy != {s for s in self.slabs if not s.idle}:
            found.append(f"{len(self.busy)} slabs are noted as busy, and others are")
        noted = self.capacity, self.owned
        real = sum(s.capacity for s in self.slabs), sum(s.owned for s in self.slabs)
        if noted != real:
            found.append(f"the slabs are noted to have room for and to hold {noted} tokens, and have {real}")
        if self.roomy.keys() != {s: s.owned - s.capacity for s in self.slabs if s.capacity > s.owned}:
            found.append("the slabs that have room are not those that are noted")
        if self._idle.keys() != {s: -s.capacity for s in self.slabs if s.idle}:
            found.append("the slabs that are not busy are not those that are noted")
        for slab in self.slabs:
            owned, used = sum(s.hi - s.lo for s in slab.spans), max((s.hi for s in slab.spans), default=0)
            if (slab.owned, slab.used) != (owned, used):
                said = f"counts {slab.owned} tokens up to {slab.used}, not {owned} up to {used}"
                found.append(f"slab of {slab.capacity} {said}")
        return found

    def zeros(self, index: int, n: int) -> Arrays:
        specs = self.specs[index].arrays
        try:
            return tuple(self.allocate((1, s.heads, n, s.dim), s.dtype) for s in specs)
        except (MemoryError, RuntimeError) as error:
            needed = n * sum(s.token_bytes for s in specs)
            raise BudgetError(
                f"{show_size(needed)} were within the budget, but the device has no room for them: {error}",
                needed_bytes=needed,
                available_bytes=0,
            ) from error


class Slab:
    __slots__ = (
        "_copies",
        "_rewriting",
        "account",
        "capacity",
        "copying",
        "foreign",
        "layers",
        "owned",
        "spans",
        "store",
        "tracks",
        "writers",
    )

    def __init__(self, store: Store, capacity: int, reserved: int) -> None:
        self.store = store
        self.capacity = capacity
        self.account = store.ledger.open(Purpose.LIVE, reserved, f"a buffer of {capacity} tokens")
        self.layers: list[list[mx.array] | None] = [None] * len(store.specs)
        self.spans: list[Span] = []
        """What nodes own of it, by index. Changed by `add` and `discard` alone."""
        self.owned = 0
        """Tokens that nodes own; the rest is room or waste."""
        self.tracks: set[Track] = set()
        """Changed by `enter` and `leave` alone."""
        self.foreign = False
        """Its arrays came from a caller, who may still refer to them: a copy of them would not free them."""
        self.writers: set[Track] = set()
        """One, or the rows of a batch that write to regions of their own: see `arena`."""
        self._rewriting = False
        self._copies = 0
        self.copying: Copying[Any] | None = None
        """What replaces its arrays, step by step."""
        store.slabs.add(self)
        store.note(self)

    @property
    def bytes(self) -> int:
        return self.account.bytes

    @property
    def idle(self) -> bool:
        return not self.tracks and not self._rewriting and not self._copies

    @property
    def rewriting(self) -> bool:
        """Its arrays are being replaced: nobody may read, copy, compact or evict from it."""
        return self._rewriting

    @rewriting.setter
    def rewriting(self, is_so: bool) -> None:
        self._rewriting = is_so
        self.store.note(self)

    @property
    def copies(self) -> int:
        """Ranges of it that are being copied out by another thread at this moment."""
        return self._copies

    @copies.setter
    def copies(self, n: int) -> None:
        self._copies = n
        self.store.note(self)

    @property
    def used(self) -> int:
        """One past the last index that a node owns."""
        return self.spans[-1].hi if self.spans else 0

    def add(self, span: Span) -> None:
        """A node owns this range from now on."""
        bisect.insort(self.spans, span, key=_start)
        self.owned += span.hi - span.lo
        self.store.note(self)

    def finish_copy(self) -> None:
        """See that its arrays are whole, if another thread has begun to replace them."""
        if self.copying is not None and self.copying.is_suspended:
            self.store.run(self.copying.finishing())

    def discard(self, span: Span) -> None:
        """No node owns this range any more. Its arrays must be whole: see `finish_copy`."""
        del self.spans[self._index(span)]
        self.owned -= span.hi - span.lo
        self.store.note(self)

    def _index(self, span: Span) -> int:
        at = bisect.bisect_left(self.spans, span.lo, key=_start)
        return at if self.spans[at] is span else self.spans.index(span)

    def cut(self, span: Span, upper: Span) -> None:
        """`upper` has taken over the head of `span`."""
        self.spans.insert(self._index(span), upper)

    def joined(self, upper: Span) -> None:
        """The span after `upper` has taken it over."""
        del self.spans[self._index(upper)]

    def enter(self, track: Track, *, writes: bool = False) -> None:
        """A track reads it from now on, or writes it as well."""
        self.tracks.add(track)
        if writes:
            self.writers.add(track)
        self.store.note(self)

    def leave(self, track: Track) -> None:
        """A track neither reads nor writes it any more. Call `settle` afterwards."""
        self.tracks.discard(track)
        self.writers.discard(track)
        self.store.note(self)

    def arrays(self, index: int) -> list[mx.array]:
        layer = self.layers[index]
        if layer is None:
            layer = self.layers[index] = list(self.store.zeros(index, self.capacity))
        return layer

    def settle(self) -> None:
        """Free it if nobody refers to it any more, else file its bytes under the right purpose."""
        if not self.spans and not self.tracks and not self.copies:
            if self in self.store.slabs:
                self.store.slabs.remove(self)
                self.layers = []
                self.account.close()
        else:
            self.account.move(Purpose.LIVE if self.writers else Purpose.STORED)
        self.store.note(self)

    def evaluate(self) -> None:
        mx.eval([a for layer in self.layers if layer for a in layer])

    def rewrite(self, ranges: list[tuple[int, int]], capacity: int) -> None:
        """`rewriting_to` in one go."""
        self.finish_copy()
        self.store.run(Copying(self.rewriting_to(ranges, capacity), [self]).steps())

    def rewriting_to(self, ranges: list[tuple[int, int]], capacity: int) -> Work[None]:
        """Keep just `ranges`, in that order from index 0, in arrays of `capacity`. Layer by layer.

        Growing, trimming and compacting are all this. Raises BudgetError before anything has changed;
        spans and pieces are for the caller to move.
        """
        ledger, per_token = self.store.ledger, self.store.token_bytes
        self.rewriting = True  # making room for this must not compact, or evict from, the very slab
        try:
            copied, growth = min(capacity, self.capacity), max(0, capacity - self.capacity) * per_token
            kept = copied * self.store.array_token_bytes
            yield from ledger.granting(Purpose.LIVE if growth else Purpose.INFLIGHT, growth + kept)
            by_layer = growth + copied * self.store.layer_token_bytes <= ledger.free_bytes
            at_once = copied * (self.store.layer_token_bytes if by_layer else self.store.array_token_bytes)
            transient = ledger.open(Purpose.INFLIGHT, at_once, "one layer's copy" if by_layer else "one array's copy")
            try:
                if capacity > self.capacity:
                    self.account.resize(capacity * per_token)
                yield from self._rewriting_layers(ranges, capacity, by_layer=by_layer)
                self.capacity = capacity
                self.store.note(self)
                self.account.resize(capacity * per_token)
            finally:
                transient.close()
        finally:
            self.rewriting = False

    def _rewriting_layers(self, ranges: list[tuple[int, int]], capacity: int, *, by_layer: bool) -> Work[None]:
        done = 0
        try:
            for index, layer in enumerate(self.layers):
                if layer is None:
                    continue
                n = len(layer)
                for first, stop in [(0, n)] if by_layer else [(j, j + 1) for j in range(n)]:
                    new = self._rewritten(index, layer, range(first, stop), ranges, capacity)
                    mx.eval(new)
                    layer[first:stop] = new
                    del new
                    done += 1
                    yield 0.0
        except (BudgetError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
            if capacity > self.capacity:
                self._shrink_back()
            elif done and not isinstance(error, KeyboardInterrupt):
                raise DeviceError(f"{done} copies were made, then: {error}") from error
            raise

    def _rewritten(
        self, index: int, layer: list[mx.array], which: range, ranges: list[tuple[int, int]], capacity: int
    ) -> list[mx.array]:
        kept = sum(hi - lo for lo, hi in ranges)
        room = self.store.zeros(index, capacity - kept) if capacity > kept else None
        new = []
        for j in which:
            parts: list[mx.array | None] = [layer[j][..., lo:hi, :] for lo, hi in ranges]
            new.append(_join([*parts, None if room is None else room[j]]))
        return new

    def _shrink_back(self) -> None:
        """Growing failed half-way: give the arrays that were grown the size of the others again."""
        for layer in self.layers:
            for j, array in enumerate(layer or ()):
                if layer is not None and array.shape[2] != self.capacity:
                    layer[j] = own_bytes(array[..., : self.capacity, :])
                    mx.eval(layer[j])
        self.account.resize(self.capacity * self.store.token_bytes)


def _attempts(capacities: Iterable[int]) -> Iterator[tuple[int, contextlib.AbstractContextManager[None]]]:
    """Each capacity with a context that suppresses a BudgetError, but for the last, whose BudgetError is raised. None
    is kept: its traceback would refer to frames, and so to arrays."""
    candidates = iter(capacities)
    capacity = next(candidates)
    for following in candidates:
        yield capacity, contextlib.suppress(BudgetError)
        capacity = following
    yield capacity, contextlib.nullcontext()


def _join(parts: list[mx.array | None]) -> mx.array:
    """One array of its own bytes: never a view of a larger buffer."""
    found = [p for p in parts if p is not None]
    return mx.concatenate(found, axis=2) if len(found) > 1 else own_bytes(found[0])


@dataclass(eq=False, slots=True)
class Span:
    """A node's range [lo, hi) of a slab."""

    slab: Slab
    lo: int
    hi: int
    node: Node

    @classmethod
    def own(cls, slab: Slab, lo: int, hi: int, node: Node) -> Span:
        """A span of a range that `node` owns from now on."""
        span = cls(slab, lo, hi, node)
        slab.add(span)
        return span

    def cut(self, at: int, upper: Node, lower: Node) -> tuple[Span, Span]:
        first = Span(self.slab, self.lo, self.lo + at, upper)
        self.slab.cut(self, first)
        self.lo += at
        self.node = lower
        return first, self

    def join(self, upper: Span) -> None:
        """Take over the range right before this one."""
        self.slab.joined(upper)
        self.lo = upper.lo

    def move(self, slab: Slab, lo: int) -> None:
        """What it holds was copied to `slab`. The caller settles the slab where it lay."""
        self.slab.discard(self)
        self.slab, self.lo, self.hi = slab, lo, lo + self.hi - self.lo
        slab.add(self)

    def drop(self) -> None:
        self.slab.discard(self)
        self.slab.settle()


def _start(span: Span) -> int:
    return span.lo


@dataclass(eq=False, slots=True)
class Piece:
    """A track's view of slab indices [lo, hi), which hold the positions from `pos` on."""

    slab: Slab
    lo: int
    hi: int
    pos: int
    limit: int | None = None
    """Where its region of the slab ends, if it may not have all of it."""

    @property
    def end(self) -> int:
        return self.pos + self.hi - self.lo

    @property
    def room(self) -> int:
        return (self.slab.capacity if self.limit is None else self.limit) - self.hi


class Track:
    """The storage of one sequence's sliceable layers."""

    def __init__(self, store: Store, *, contiguous: bool = False) -> None:
        self.store = store
        self.contiguous = contiguous
        """Models outside the seam: always one piece that starts at index 0."""
        self.pieces: list[Piece] = []
        self.floor = 0  # recomputing below here writes nothing
        self.frozen = 0  # positions below here are the tree's, wherever they lie

    @property
    def end(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    @property
    def whole(self) -> bool:
        """One piece that starts at index 0: it can be read as a plain slice."""
        return len(self.pieces) == 1 and self.pieces[0].lo == 0

    def gather(self) -> None:
        """See that a contiguous track is one piece, before it is read."""
        if self.contiguous and self.pieces and not self.whole:
            self.copy_whole(self.end)

    # -- reading ----------------------------------------------------------------------

    def read(self, index: int, upto: int) -> list[View]:
        """For layer `index`, the arrays and index ranges that hold the positions [0, upto)."""
        return [
            View(p.slab.arrays(index), p.lo, min(p.hi, p.lo + upto - p.pos), id(p.slab))
            for p in self.pieces
            if p.pos < upto and p.lo < p.hi
        ]

    def layout(self, upto: int) -> list[tuple[Slab, int, int]]:
        """The same, whatever the layer."""
        found = [p for p in self.pieces if p.pos < upto and p.lo < p.hi]
        return [(p.slab, p.lo, min(p.hi, p.lo + upto - p.pos)) for p in found]

    def written(self) -> list[mx.array]:
        """Every layer's arrays that this track may have written to."""
        slabs = {id(p.slab): p.slab for p in self.pieces if self.writable(p)}
        return [a for slab in slabs.values() for layer in slab.layers if layer for a in layer]

    # -- borrowing, from the tree ----------------------------------------------------------

    def borrow(self, spans: Iterable[Span]) -> None:
        """Read these spans in place, one after the other from position 0. Their arrays must be whole."""
        for span in spans:
            last = self.pieces[-1] if self.pieces else None
            if last is not None and last.slab is span.slab and last.hi == span.lo:
                last.hi = span.hi
            else:
                self.pieces.append(Piece(span.slab, span.lo, span.hi, self.end))
                span.slab.enter(self)
        self.floor = self.frozen = self.end

    def take(self) -> bool:
        """Become the writer of the last piece's slab, if nobody else reads it and nothing lies behind."""
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

        `keep` is the furthest position that any layer still needs. Room to grow leaves `spare` bytes free. May raise
        BudgetError; then nothing has been allocated and every layer reads what it read before.
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
            if not self._sealed_from(start):  # or somebody has come to read it meanwhile
                break
        if self.pieces and self.writable(self.pieces[-1]):
            last = self.pieces[-1]
            step = min(last.room, missing)
            last.hi += step
            missing -= step
        if missing > 0:
            if self.contiguous and self.pieces:
                yield from self._gathering(missing, spare)
            else:
                self.append(self.store.slab_for(missing, spare=spare), missing)

    def _sealed_from(self, start: int) -> bool:
        """Whether some position from `start` on lies where this track may not write."""
        return start < self.frozen or any(p.end > start and not self.writable(p) for p in self.pieces)

    @property
    def _can_grow(self) -> bool:
        """Whether its last buffer can be made larger in place."""
        return bool(self.pieces) and self.pieces[-1].limit is None and self.writable(self.pieces[-1])

    def write(self, index: int, start: int, new: Arrays) -> None:
        """Store `new` (arrays of some tokens from `start` on) for layer `index`, from `floor` up."""
        n = new[0].shape[2]
        last = self.pieces[-1]
        if start >= self.floor and start >= last.pos:  # nearly always
            lo = last.lo + start - last.pos
            arrays = last.slab.arrays(index)
            for j, x in enumerate(new):
                arrays[j][..., lo : lo + n, :] = x
            return
        low = max(start, self.floor)
        for piece in self.pieces:
            a, b = max(low, piece.pos), min(start + n, piece.end)
            if a >= b:
                continue
            lo = piece.lo + a - piece.pos
            arrays = piece.slab.arrays(index)
            for j, x in enumerate(new):
                part = x if b - a == n else x[..., a - start : b - start, :]
                arrays[j][..., lo : lo + b - a, :] = part

    def shorten(self, end: int) -> None:
        """Room that was made beyond `end` stays room: it is covered once a forward asks for it."""
        last = self.pieces[-1]
        if last.pos < end < last.end:
            last.hi -= last.end - end
        elif last.pos == end:
            last.hi = last.lo

    def rewind(self, to: int) -> None:
        """Positions from `to` on will be written anew, also those that the tree has (elsewhere, then)."""
        self.floor = min(self.floor, to)

    def freeze(self, upto: int) -> None:
        """The positions below `upto` have become the tree's."""
        self.floor = max(self.floor, upto)
        self.frozen = max(self.frozen, upto)

    def free(self) -> None:
        """Let go of everything. What nodes own stays with them."""
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
        """Make room for `n` more tokens in place; where there is none for one array's copy, a fresh slab will do."""
        last = self.pieces[-1]
        last.slab.finish_copy()
        yield from Copying(self._grown(last, n, spare), [last.slab]).steps()

    def _grown(self, last: Piece, n: int, spare: int) -> Work[None]:
        for capacity in self.store.capacities(last.hi + n, last.slab.capacity, spare):
            with contextlib.suppress(BudgetError):
                yield from last.slab.rewriting_to([(0, last.hi)], capacity)
                return

    def _reseat(self, start: int, keep: int) -> None:
        """The positions from `start` on lie where this track may not write: go on in a fresh slab."""
        if self.contiguous and self.pieces:
            self.copy_whole(self.end)
            self.frozen = min(self.frozen, start)
            return
        fresh = None
        if keep > start:
            fresh = self.store.slab_for(keep - start)
            for index in range(len(self.store.specs)):
                fresh.layers[index] = self._copy(index, start, keep, fresh.capacity)
        self._cut(start)
        self.frozen = min(self.frozen, start)
        if self.pieces and self.pieces[-1].slab.used > self.pieces[-1].hi:
            self.pieces[-1].slab.writers.discard(self)  # what lies behind is a node's
            self.store.note(self.pieces[-1].slab)
        if fresh is not None:
            self.append(fresh, keep - start)

    def _cut(self, at: int) -> None:
        """Read nothing from position `at` on."""
        dropped = [p for p in self.pieces if p.pos >= at]
        self.pieces = [p for p in self.pieces if p.pos < at]
        if self.pieces and self.pieces[-1].end > at:
            self.pieces[-1].hi -= self.pieces[-1].end - at
        left = {id(p.slab) for p in self.pieces}
        for piece in dropped:
            if id(piece.slab) not in left:
                piece.slab.leave(self)
                piece.slab.settle()

    def _drop_unread(self, slab: Slab) -> None:
        slab.rewriting = False
        slab.leave(self)
        slab.settle()

    def _copy(self, index: int, start: int, stop: int, capacity: int) -> list[mx.array]:
        parts: list[list[mx.array | None]] = [[] for _ in self.store.specs[index].arrays]
        for p in self.pieces:
            a, b = max(start, p.pos), min(stop, p.end)
            if a < b:
                for j, array in enumerate(p.slab.arrays(index)):
                    parts[j].append(array[..., p.lo + a - p.pos : p.lo + b - p.pos, :])
        if capacity > stop - start:
            for j, room in enumerate(self.store.zeros(index, capacity - (stop - start))):
                parts[j].append(room)
        new = [_join(p) for p in parts]
        mx.eval(new)
        return new

    def _gathering(self, missing: int, spare: int) -> Work[None]:
        """Bring everything into one slab of its own, layer by layer, with room for `missing` more."""
        yield from self.copying_whole(self.end + missing, spare)
        self.pieces[-1].hi += missing

    def copy_whole(self, need: int, spare: int = 0) -> None:
        """`copying_whole` in one go."""
        self.store.run(self.copying_whole(need, spare))

    def copying_whole(self, need: int, spare: int = 0) -> Work[None]:
        """Copy everything to one slab with room for `need` tokens. Raises BudgetError before anything has changed."""
        yield from self.store.making_room_for(need)
        for capacity, refusal in _attempts(self.store.capacities(need, spare=spare)):
            with refusal:
                yield from self.merging(capacity)
                return

    def merge(self, capacity: int) -> Slab:
        """`merging` in one go."""
        return self.store.run(self.merging(capacity))  # type: ignore[no-any-return]

    def merging(self, capacity: int, consume: frozenset[Slab] = frozenset()) -> Work[Slab]:
        """One slab with all that the pieces hold. The layers of the slabs in `consume`, which nobody
        else reads, are given up as soon as they are copied, so that the transient is one layer.
        Their spans are for the caller to move. Raises BudgetError before anything has changed."""
        for slab in consume:
            slab.rewriting = True  # while room is made, nobody may begin to copy what will be given up
        try:
            return (yield from self._merging(capacity, consume))
        finally:
            for slab in consume:
                slab.rewriting = False

    def _merging(self, capacity: int, consume: frozenset[Slab]) -> Work[Slab]:
        end, store = self.end, self.store
        fresh = store.slab(capacity, reserved=0)
        fresh.enter(self)  # not idle: reclaiming must not think it empty
        fresh.rewriting, pieces = True, self.pieces
        one_layer = store.layer_token_bytes * capacity if consume else 0
        slack = max(0, capacity - sum(s.capacity for s in consume)) * store.token_bytes
        with contextlib.ExitStack() as undo:
            undo.callback(self._drop_unread, fresh)
            yield from store.ledger.granting(Purpose.LIVE, one_layer + slack)
            transient = store.ledger.open(Purpose.INFLIGHT, one_layer, "one layer of a merge")
            with contextlib.closing(transient):
                fresh.account.resize(slack)
                for index in range(len(store.specs)):
                    try:
                        fresh.layers[index] = self._copy(index, 0, end, capacity)
                    except BudgetError as error:
                        if index and consume:
                            raise DeviceError(f"{index} layers were copied and given up, then: {error}") from None
                        raise
                    for slab in consume:
                        slab.layers[index] = None
                    yield 0.0
                    if self.pieces is not pieces:
                        raise LeaseClosed("this lease was closed while its buffers were copied")
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
