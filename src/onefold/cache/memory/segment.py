"""Slabs and spans: where the KV of sliceable layers lies, and which node owns which range of it.

- A slab is one allocation: for each sliceable layer its arrays `[1, heads, capacity, dim]`, all with the same capacity.
  The ledger counts slabs. No other object refers to a slab's arrays, so a write to them happens in place.
- A span is a range of one slab that a node owns. Spans are never written again.
- A slab is written by one track (see `track`), and only while no other track reads it: a second reader seals it, and
  the writer continues in a new slab.
- Copies (growing, compacting, merging) are made and evaluated layer by layer, so that the transient is one layer, or
  one array where bytes are short; it is reserved as in flight. Long operations are `Work`, which may release the lock
  between two layers.
- A slab notifies its store of every change to its size, spans and readers, so that no call iterates over all slabs.

Knows nothing of models, tokens, or when to free.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import join, own_bytes
from onefold.cache.memory.copying import Copying
from onefold.cache.memory.ledger import Ledger, Purpose
from onefold.cache.memory.lock import Work, run_through
from onefold.cache.memory.ranking import Ranking
from onefold.cache.memory.shapes import Arrays, LayerSpec, most_padding
from onefold.cache.memory.tree import Node
from onefold.errors import BudgetError, DeviceError
from onefold.sizes import show_size

STEP = 256
"""Capacities of new slabs are multiples of this while bytes are not short."""
GROWTH_STEP = 128
"""The same for slabs that grow: `STEP` would be a quarter of a conversation of a thousand tokens."""
FINE_STEP = 8
"""The same at rest, and where bytes are short."""
FEW = 32
"""A new slab for at most so many tokens has this capacity: each of several requests on one prefix has such a slab."""
ROOM_SHARE = 8
"""Room to grow is an eighth of a slab: an eighth more when it grows, and at most about that at rest."""


def round_up(n: int, to: int = STEP) -> int:
    return (n + to - 1) // to * to


def rest_capacity(owned: int) -> int:
    """Returns the capacity that a slab at rest keeps for `owned` tokens."""
    return round_up(owned + owned // ROOM_SHARE, FINE_STEP)


class Store:
    """All slabs of a cache, the shapes of their layers, and the ledger that counts them."""

    def __init__(self, specs: Iterable[LayerSpec], ledger: Ledger, page_bytes: int = 0) -> None:
        """`page_bytes` is what the device rounds each array up to; 0: nothing."""
        self.specs = tuple(specs)
        self.ledger = ledger
        self.slabs: set[Slab] = set()
        self.busy: set[Slab] = set()
        """Slabs that are not idle: a track reads them, or they are being copied."""
        self.capacity = 0
        """The capacities of all slabs together, in tokens."""
        self.owned = 0
        """Tokens that nodes own, in all slabs together."""
        self.roomy: Ranking[Slab] = Ranking()
        """Slabs with tokens that no node owns, those with the most first."""
        self._idle: Ranking[Slab] = Ranking()
        """Slabs that are not busy, the largest first."""
        self._counted: dict[Slab, tuple[int, int]] = {}
        self.allocate: Callable[..., mx.array] = mx.zeros
        self.run: Callable[[Work[Any]], Any] = run_through
        """Runs all steps of some work while the caller holds the lock."""
        self.token_bytes = sum(s.token_bytes for s in self.specs)
        self.layer_token_bytes = max((s.token_bytes for s in self.specs), default=0)
        arrays = [a.token_bytes for s in self.specs for a in s.arrays]
        self.array_token_bytes = max(arrays, default=0)
        self.slab_arrays = len(arrays)
        """The arrays of one slab: so many buffers of the device."""
        self.padding_bytes = sum(most_padding(FINE_STEP * n, page_bytes) for n in arrays)
        """The most that the arrays of one slab are rounded up by."""

    def slab(self, capacity: int, *, reserved: int | None = None) -> Slab:
        """Returns a new slab. Its bytes are reserved now, layers allocated at their first write. Raises BudgetError."""
        return Slab(self, capacity, self.token_bytes * capacity if reserved is None else reserved)

    def capacities(self, need: int, held: int = 0, spare: int = 0) -> Iterator[int]:
        """Yields the capacities to try for `need` tokens, for a slab of `held`: with room to grow, if memory is free;
        rounded up, if evicting makes room for that and `spare` bytes more; the least."""
        step = GROWTH_STEP if held else FEW if need <= FEW else STEP
        roomy, rounded = (round_up(n, step) for n in (max(need, held + held // ROOM_SHARE), need))
        if roomy > rounded and self.ledger.fits((roomy - held) * self.token_bytes + spare):
            yield roomy
        if self.ledger.attainable((rounded - held) * self.token_bytes + spare):
            yield rounded
        yield from sorted({round_up(need, FINE_STEP), need}, reverse=True)

    def making_room_for(self, need: int) -> Work[None]:
        """Make room for a slab of `need` tokens, which the caller makes afterwards."""
        sizes = round_up(need, FEW if need <= FEW else STEP), need
        wanted = [n for n in sizes if self.ledger.attainable(n * self.token_bytes)]
        if wanted:
            yield from self.ledger.granting(Purpose.LIVE, wanted[0] * self.token_bytes)

    def finishing_copies(self) -> Work[None]:
        """Finish the copies that other threads have begun of slabs that no request uses. This frees bytes."""
        for slab in [s for s in self.busy if s.copying is not None and not s.tracks]:
            if slab.copying is not None and slab.copying.is_suspended:
                yield from slab.copying.finishing()

    def slab_for(self, need: int, *, spare: int = 0) -> Slab:
        """Returns a new slab for `need` tokens, with room to grow if possible. Raises BudgetError."""
        for capacity, refusal in attempts(self.capacities(need, spare=spare)):
            with refusal:
                return self.slab(capacity)
        raise AssertionError("the last refusal is raised")

    @property
    def largest(self) -> int:
        """The capacity of the largest idle slab."""
        slab = self._idle.first()
        return 0 if slab is None else slab.capacity

    def note(self, slab: Slab) -> None:
        """Update sums and orders. A slab calls this after each change of its capacity, spans, tracks, writers or
        copies, and when it is freed."""
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
        """Recounts from all slabs; returns a sentence for each difference."""
        found = []
        if self.busy != {s for s in self.slabs if not s.idle}:
            found.append(f"{len(self.busy)} slabs are counted as busy, and they are not the ones that are")
        counted = self.capacity, self.owned
        real = sum(s.capacity for s in self.slabs), sum(s.owned for s in self.slabs)
        if counted != real:
            found.append(f"capacity and owned tokens of all slabs are counted as {counted}, and are {real}")
        if self.roomy.keys() != {s: s.owned - s.capacity for s in self.slabs if s.capacity > s.owned}:
            found.append("the order of slabs with room does not match the slabs")
        if self._idle.keys() != {s: -s.capacity for s in self.slabs if s.idle}:
            found.append("the order of idle slabs does not match the slabs")
        for slab in self.slabs:
            owned, used = sum(s.hi - s.lo for s in slab.spans), max((s.hi for s in slab.spans), default=0)
            if (slab.owned, slab.used) != (owned, used):
                difference = f"counts {slab.owned} tokens up to {slab.used}, not {owned} up to {used}"
                found.append(f"slab of {slab.capacity} {difference}")
        return found

    def zeros(self, index: int, n: int) -> Arrays:
        specs = self.specs[index].arrays
        try:
            return tuple(self.allocate((1, s.heads, n, s.dim), s.dtype) for s in specs)
        except (MemoryError, RuntimeError) as error:
            needed = n * sum(s.token_bytes for s in specs)
            raise BudgetError(
                f"{show_size(needed)} are within the budget, but the device cannot allocate them: {error}",
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
        "padding",
        "spans",
        "store",
        "tracks",
        "writers",
    )

    def __init__(self, store: Store, capacity: int, reserved: int) -> None:
        self.store = store
        self.capacity = capacity
        self.padding, self.account = store.ledger.open_both(
            (Purpose.PADDING, store.padding_bytes), (Purpose.LIVE, reserved), f"a buffer of {capacity} tokens"
        )
        self.layers: list[list[mx.array] | None] = [None] * len(store.specs)
        self.spans: list[Span] = []
        """The ranges that nodes own, by index. Only `add`, `discard`, `cut` and `joined` change it."""
        self.owned = 0
        """Tokens that nodes own; the rest is room or waste."""
        self.tracks: set[Any] = set()
        """The tracks that read it. Only `enter` and `leave` change it."""
        self.foreign = False
        """Its arrays came from a caller, who may still refer to them: a copy of them would not free them."""
        self.writers: set[Any] = set()
        """The track that writes it, or the rows of a batch, each in its own regions: see `arena`."""
        self._rewriting = False
        self._copies = 0
        self.copying: Copying[Any] | None = None
        """The copy that is replacing its arrays, step by step."""
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
        """Whether its arrays are being replaced: meanwhile no thread may read, copy, compact or evict from it."""
        return self._rewriting

    @rewriting.setter
    def rewriting(self, is_so: bool) -> None:
        self._rewriting = is_so
        self.store.note(self)

    @property
    def copies(self) -> int:
        """How many of its ranges the disk writer is copying at this moment."""
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
        """Add the range of a node, which owns it from now on."""
        bisect.insort(self.spans, span, key=_start)
        self.owned += span.hi - span.lo
        self.store.note(self)

    def finish_copy(self) -> None:
        """Finish the copy of its arrays that another thread has begun, if there is one."""
        if self.copying is not None and self.copying.is_suspended:
            self.store.run(self.copying.finishing())

    def discard(self, span: Span) -> None:
        """Remove the range of a node, which no longer owns it. Call `finish_copy` first."""
        del self.spans[self._index(span)]
        self.owned -= span.hi - span.lo
        self.store.note(self)

    def _index(self, span: Span) -> int:
        at = bisect.bisect_left(self.spans, span.lo, key=_start)
        return at if self.spans[at] is span else self.spans.index(span)

    def cut(self, span: Span, upper: Span) -> None:
        """Add `upper`, which has taken over the first tokens of `span`."""
        self.spans.insert(self._index(span), upper)

    def joined(self, upper: Span) -> None:
        """Remove `upper`, whose range the span after it has taken over."""
        del self.spans[self._index(upper)]

    def enter(self, track: Hashable, *, writes: bool = False) -> None:
        """Add a track that reads it, and with `writes` also writes it."""
        self.tracks.add(track)
        if writes:
            self.writers.add(track)
        self.store.note(self)

    def leave(self, track: Hashable) -> None:
        """Remove a track that read or wrote it. Call `settle` afterwards."""
        self.tracks.discard(track)
        self.writers.discard(track)
        self.store.note(self)

    def arrays(self, index: int) -> list[mx.array]:
        layer = self.layers[index]
        if layer is None:
            layer = self.layers[index] = list(self.store.zeros(index, self.capacity))
        return layer

    def settle(self) -> None:
        """Free the slab if no span, track or copy refers to it; else count its bytes under the right purpose."""
        if not self.spans and not self.tracks and not self.copies:
            if self in self.store.slabs:
                self.store.slabs.remove(self)
                self.layers = []
                self.account.close()
                self.padding.close()
        else:
            self.account.move(Purpose.LIVE if self.writers else Purpose.STORED)
        self.store.note(self)

    def evaluate(self) -> None:
        device.evaluate([a for layer in self.layers if layer for a in layer])

    def rewrite(self, ranges: list[tuple[int, int]], capacity: int) -> None:
        """`rewriting_to` in one go."""
        self.finish_copy()
        self.store.run(Copying(self.rewriting_to(ranges, capacity), [self]).steps())

    def rewriting_to(self, ranges: list[tuple[int, int]], capacity: int) -> Work[None]:
        """Copy `ranges`, in that order from index 0, to arrays of `capacity`, layer by layer, and drop the rest.

        Growing, trimming and compacting all use this. The caller updates spans and pieces. Raises BudgetError before
        anything has changed, and DeviceError if the device fails half-way while shrinking.
        """
        ledger, per_token = self.store.ledger, self.store.token_bytes
        self.rewriting = True  # making room for this must not compact this slab, or evict from it
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
                for first, stop in [(0, len(layer))] if by_layer else [(j, j + 1) for j in range(len(layer))]:
                    new = self._rewritten(index, layer, range(first, stop), ranges, capacity)
                    device.evaluate(new)
                    layer[first:stop] = new
                    del new
                    done += 1
                    yield 0.0
            device.require_clean()  # or a copy that failed would be stored
        except (BudgetError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
            if capacity > self.capacity:
                self._shrink_back()
            elif done and not isinstance(error, KeyboardInterrupt):
                raise DeviceError(f"the copy failed after {done} steps: {error}") from error
            raise

    def _rewritten(
        self, index: int, layer: list[mx.array], which: range, ranges: list[tuple[int, int]], capacity: int
    ) -> list[mx.array]:
        kept = sum(hi - lo for lo, hi in ranges)
        room = self.store.zeros(index, capacity - kept) if capacity > kept else None
        new = []
        for j in which:
            parts: list[mx.array | None] = [layer[j][..., lo:hi, :] for lo, hi in ranges]
            new.append(join([*parts, None if room is None else room[j]]))
        return new

    def _shrink_back(self) -> None:
        """Give the arrays that were grown their former size again, after growing failed half-way."""
        for layer in self.layers:
            for j, array in enumerate(layer or ()):
                if layer is not None and array.shape[2] != self.capacity:
                    layer[j] = own_bytes(array[..., : self.capacity, :])
                    device.evaluate(layer[j])
        self.account.resize(self.capacity * self.store.token_bytes)


def attempts(capacities: Iterable[int]) -> Iterator[tuple[int, contextlib.AbstractContextManager[None]]]:
    """Yields each capacity with a context manager that suppresses BudgetError; the last one does not. No exception is
    kept, because its traceback would refer to frames, and so to arrays."""
    candidates = iter(capacities)
    capacity = next(candidates)
    for following in candidates:
        yield capacity, contextlib.suppress(BudgetError)
        capacity = following
    yield capacity, contextlib.nullcontext()


@dataclass(eq=False, slots=True)
class Span:
    """A node's range [lo, hi) of a slab."""

    slab: Slab
    lo: int
    hi: int
    node: Node

    @classmethod
    def own(cls, slab: Slab, lo: int, hi: int, node: Node) -> Span:
        """Makes the span of a range that `node` owns from now on."""
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
        """Point to `slab` at `lo`, where its content was copied. The caller settles the former slab."""
        self.slab.discard(self)
        self.slab, self.lo, self.hi = slab, lo, lo + self.hi - self.lo
        slab.add(self)

    def drop(self) -> None:
        self.slab.discard(self)
        self.slab.settle()


def _start(span: Span) -> int:
    return span.lo
