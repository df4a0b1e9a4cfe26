"""A lease: one request's hold on a path of the tree, and its live layers.

- `layers` go to any mlx-lm model, `generate_step` or `speculative_generate_step` as their prompt cache.
- A forward is noticed at its first layer (`beat`): that is where growth is reserved for all layers (or refused, before
  anything is written) and where a checkpoint can be taken, since every layer stands at the same position there.
- A forward that fails half-way is undone at the next one, or when the lease is settled.
- Closing settles it, by commit, cancel or error: the sound part of the work is kept, everything else let go. A commit
  stores only tokens that the layers were fed.
- One thread at a time uses a lease; any thread may, between two forwards. A lease that is ended by another thread
  during a forward is settled by the forward's own when that has returned.

    tokens   |<------ cached ------>|<-- prefilled -->|<-- generated -->|
    layers   |<-- tree's, read in place -->|<---- this lease's own ---->|
                                           floor (matched)
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from onefold.cache.memory.checkpoints import GRID, Checkpoint, wanted
from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.segment import LEAST_CHUNK, Track
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import Tier
from onefold.cache.memory.tree import Node, Tokens, as_tokens_or_none, common_length
from onefold.cache.model import exporting, stock
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.kinds.full import SegmentedLayer
from onefold.cache.model.stock import SLICEABLE
from onefold.cache.model.uncached import Uncached
from onefold.cache.request import closing
from onefold.cache.request.forward import ForwardWatcher
from onefold.cache.request.turn import Turn
from onefold.errors import BudgetError, CommitError, ConfigError, DeviceError, LeaseClosed, LeaseError, WrongThread
from onefold.sizes import show_count

log = logging.getLogger("onefold")

SETTLING_MOST = 10.0
"""Seconds that a thread waits for another one that is ending the lease."""


class Lease:
    """Made by `PrefixCache.lease`; use it in a `with` block."""

    def __init__(
        self,
        state: CacheState,
        tokens: Tokens,
        namespace: Any,
        anatomies: list[Anatomy],
        models: Sequence[nn.Module | None],
        asked: frozenset[int],
    ) -> None:
        """`models`: those of the anatomies, as far as they are known."""
        self.state = state
        self.tokens = tokens
        self.namespace = namespace
        self.matched = 0
        """How far the tree knows these tokens."""
        self.cached = 0
        """How far the state could be put back: prefill `tokens[cached:]`. At most len(tokens) - 1."""
        self.restored = 0
        """Of the cached tokens, those that were read from disk for this request."""
        self.reason = ""
        """Why `cached` is less than it might be; empty for a whole hit."""
        self.owner: object = None
        """Kept alive by this lease: the cache, which settles it."""
        self.closed = False
        self.layers: list[Any] = []
        self.track = track = Track(state.store, contiguous=state.model.contiguous)
        self._beats: list[ForwardWatcher] = []
        self._parts: list[slice] = []
        """Each model's layers among them all."""
        self.node: Node | None = None
        self._points: Account = state.ledger.open(Purpose.LIVE, 0)
        self._restored: Checkpoint | None = None
        self._taken: list[Checkpoint] = []
        self._rotated_at = sys.maxsize  # the first position that a ring, not the track, holds
        self._rewound = sys.maxsize  # below here the layers hold what the lease was opened with
        self.unreserved = 0
        """Tokens of the prompt that room is made for at the first forward, and not before."""
        self._asked = asked
        self._uncached: list[Uncached] = []
        """Instead of beats, for a model that runs uncached."""
        self._chunk = (0, 0.0)
        """The last forward's tokens, and when it began."""
        self.thread = threading.get_ident()
        """That used it last: forwards' scratch is reserved by thread."""
        self._turn = Turn()
        """Of the thread that is in a forward, or settling."""
        self._settling = False
        """The thread that has the turn is ending the lease."""
        self._ending: Callable[[], None] | None = None
        """How another thread wanted it to end, during a forward."""
        self._unscheduled: threading.Thread | None = None
        """The thread of a forward that was not watched: what it wrote may be computable there alone."""
        self._running: ForwardWatcher | None = None
        """Whose forward was the last."""
        first = 0
        for i, anatomy in enumerate(anatomies):
            beat = ForwardWatcher(self, anatomy, models[i] if models else None)
            layers, beat.leaves = anatomy.make(track, beat, first_index=first)
            first += len(anatomy.sliceable)
            self._parts.append(slice(len(self.layers), len(self.layers) + len(layers)))
            self.layers += layers
            self._beats.append(beat)
        self._handed_out = list(self.layers)
        self._given_up = False
        """Nobody refers to it or to its layers any more: the cache settles it."""
        self._let_go: list[weakref.ref[Any]] = []
        """The layers that were handed out, once the caller has dropped the lease."""

    # -- the request's side ----------------------------------------------------------------

    @property
    def offset(self) -> int:
        """Tokens that the layers hold now."""
        if self._uncached:
            return min(part.position for part in self._uncached)
        return min((b.position for b in self._beats), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that this lease writes. What it only reads, such as a shared prefix, is the tree's."""
        held = sum(a.nbytes for b in self._beats for leaf in b.leaves for a in leaf.live_arrays())
        return held + sum(part.nbytes for part in self._uncached)

    @property
    def rest(self) -> Tokens:
        """The tokens that are still to be prefilled, at least one."""
        return self.tokens[self.cached :]

    def chunk_limit(self, limit: int = 2048) -> int:
        """The largest chunk, up to `limit`, whose scratch the budget has room for: a `prefill_step_size` that will not
        be refused. Down to 16 tokens nothing is evicted for it; below that, what can be."""
        parts: list[Any] = [*self._beats, *self._uncached]
        ledger, held = self.state.ledger, self.state.scratch.bytes - 2 * self._points.bytes
        while limit > LEAST_CHUNK and not all(ledger.fits(b.scratch_bytes(limit) - held) for b in parts):
            limit //= 2
        held += ledger.spare()
        while limit > 1 and not all(ledger.attainable(b.scratch_bytes(limit) - held) for b in parts):
            limit //= 2
        return limit

    def chunks(self, limit: int = 2048) -> Iterator[Tokens]:
        """The rest but for its last token, in chunks that end where checkpoints belong and that the budget has room
        for."""
        if limit < 1:
            raise ConfigError(f"a chunk has at least one token, got a limit of {limit}")
        start = self.cached
        while len(chunk := self.next_chunk(start, limit)):
            yield chunk
            start += len(chunk)

    def next_chunk(self, start: int, limit: int = 2048) -> Tokens:
        """The chunk that begins at `start`; empty where only the last token is left."""
        end = len(self.tokens) - 1
        stops = {end, *self._asked, (start // GRID + 1) * GRID}
        if self.state.model.pointwise and self.matched > self.cached:
            stops.add(self.matched)  # where this request was seen to branch off
        stop = min([start + self.chunk_limit(limit), *(s for s in stops if start < s <= end)])
        return self.tokens[start : min(stop, end)]

    def stop_at(self, position: int) -> None:
        """Another request will branch off here: a chunk ends at this position, with a checkpoint if one is needed."""
        self._asked |= {position}

    def commit(self, tokens: Any = None, *, close: bool = True) -> list[int]:
        """Keep what the layers hold: the KV of `tokens`, from the first on. Returns the tokens that were committed.

        Without `tokens` that is everything the layers were fed. (`generate_step` feeds a token before it yields it, so
        each token that it yielded is among them, the last one and an end marker too.) May be given fewer tokens than
        the layers hold (a stop token that will not come back), never more, and never others than they were fed:
        CommitError then says where they differ, and the lease stays open. With `close=False` the lease goes on, and
        others can borrow what was committed.
        """
        with self._in_turn():
            if self._layers_changed():
                raise CommitError("the list of layers was changed; what they hold cannot be known")
            for beat in self._beats:
                beat.undo()
            if tokens is None:
                found = self._fed()
            else:
                found = as_tokens_or_none(tokens)
                self._check_fed(found)
            closing.say_unfed(self.state, self)
            if not all(b.uniform for b in self._beats):
                offsets = sorted({leaf.offset for b in self._beats for leaf in b.leaves})
                raise CommitError(f"the layers disagree: they hold from {offsets[0]} to {offsets[-1]} tokens")
            closing.settle(self.state, self, found, close=close)
            return found.tolist()

    def fed(self) -> list[int]:
        """The tokens that every model's layers were fed and hold now. Waits for forwards that are under way."""
        return self._fed().tolist()

    def _fed(self) -> Tokens:
        if not self._beats:
            return self.tokens[:0]
        known = [b.fed.tokens()[: b.position] for b in self._beats]
        shortest = min(known, key=len)
        return shortest[: min(common_length(shortest, other) for other in known)]

    def agreement(self, tokens: Any) -> int:
        """How many of `tokens`, from the first on, the layers were fed and hold now: as many as can be committed."""
        found = as_tokens_or_none(tokens)
        held = [found[: b.position] for b in self._beats]
        return min(
            (b.fed.agreement(h) if b.is_watched else len(h) for b, h in zip(self._beats, held, strict=True)), default=0
        )

    def _check_fed(self, tokens: Tokens) -> None:
        shared = min(len(tokens), len(self.tokens), self._rewound)
        same = common_length(tokens[:shared], self.tokens[:shared])
        if same < shared:
            given, leased = int(tokens[same]), int(self.tokens[same])
            raise CommitError(f"token {same} of the commit is {given}, but the lease was opened with {leased}")
        if self._beats and len(tokens) > self._beats[0].position:
            committed = show_count(len(tokens), "token")
            raise CommitError(f"{committed} committed, but the layers hold {self._beats[0].position}")
        for beat in (b for b in self._beats if b.is_watched):
            held = tokens[: beat.position]
            same = beat.fed.agreement(held)
            if same < len(held):
                fed = beat.fed.tokens()
                what = (
                    f"the layers were fed {int(fed[same])} there"
                    if same < len(fed)
                    else ("what the layers were fed there is not known: call the model itself, with tokens")
                )
                raise CommitError(
                    f"token {same} of the commit is {int(held[same])}, but {what}: commit lease.fed(), or nothing "
                    "for all of it"
                )

    def is_of(self, model: nn.Module) -> bool:
        """Whether this is the model that its layers are of, or that is not known."""
        return not self._beats or self._beats[0].is_of(model)

    def owns(self, layers: list[Any]) -> bool:
        """Whether these are the layers that it handed out, all of them."""
        own = self._handed_out or [ref() for ref in self._let_go]
        return len(own) == len(layers) and all(a is b for a, b in zip(own, layers, strict=True))

    def export(self) -> list[Any]:
        """Returns copies of the layers as mlx-lm's own caches, each holding exactly `offset` tokens: any model, loop or
        `save_prompt_cache` of mlx-lm's takes them, and they outlive the lease. Their bytes are in the ledger while they
        live; raises BudgetError if the budget has no room for them."""
        self._usable()
        for beat in self._beats:
            beat.undo()
        if self._uncached:
            return [self._copy_uncached(cache) for cache in self.layers]
        made = copy.deepcopy(self.layers)
        for layer, cache in zip(self.layers, made, strict=True):  # a target may be a token ahead of its draft
            ahead = layer.offset - self.offset
            if ahead > 0 and not (hasattr(cache, "trim") and cache.is_trimmable()):
                raise LeaseError(f"a layer holds {layer.offset} tokens and cannot be cut to the others' {self.offset}")
            if ahead > 0:
                cache.trim(ahead)
        return made

    def _copy_uncached(self, cache: Any) -> Any:
        size = sum(a.nbytes for a in stock.arrays_of(cache))
        account = self.state.ledger.open(Purpose.LIVE, size, "a copy of a layer")
        return exporting.counted(account, lambda: copy.deepcopy(cache))

    def _layers_changed(self) -> bool:
        if len(self.layers) != len(self._handed_out):
            return True
        return any(a is not b for a, b in zip(self.layers, self._handed_out, strict=True))

    def _layers_of(self, beat: ForwardWatcher) -> list[Any]:
        """The layers that a model takes as its cache; none where they are not what was handed out any more."""
        return [] if self._layers_changed() else self.layers[self._parts[self._beats.index(beat)]]

    def cancel(self) -> None:
        """Close without generated tokens: the part of the prompt that was prefilled is kept. From another thread
        during a forward it is done when that has returned."""
        self._end(self._cancel)

    def discard(self) -> None:
        """Close, and keep nothing of what was done. What was stored before stays. During a forward, as `cancel`."""
        self._end(self._discard)

    def _end(self, how: Callable[[], None]) -> None:
        if self.closed:
            return
        if not self._turn.take():
            self._ending = how
            if not self._turn.take():
                return  # whoever has the turn looks when it ends
        self._settling = True
        try:
            self._ending = None
            if not self.closed:
                self._usable()
                how()
        finally:
            self._settling = False
            self._turn.give_back()

    def _cancel(self) -> None:
        for beat in self._beats:
            beat.undo()
        sound = all(b.uniform for b in self._beats) and not self._layers_changed()
        keep = min(self.agreement(self.tokens), self._rewound) if sound else 0
        closing.settle(self.state, self, self.tokens[:keep], close=True)

    def _discard(self) -> None:
        closing.evaluate(self.state, self)
        closing.release(self.state, self)

    def _lost(self, error: RuntimeError) -> None:
        """What its last forward wrote cannot be computed: nothing of it is kept."""
        if not self.closed:
            with self.state.lock:
                closing.lose(self.state, self, error)

    def end_now(self) -> bool:
        """Close without keeping anything, unless another thread is in a forward: then that thread will, and this is
        False."""
        self.discard()
        return self.closed

    def __del__(self) -> None:
        """Dropped without being closed. Its layers keep it alive while somebody refers to them; then it is settled at
        the cache's next call."""
        if getattr(self, "closed", True):
            return
        for beat in self._beats:
            beat.keep(self)
        self._let_go = [weakref.ref(layer) for layer in self._handed_out] if self._beats else []
        self.layers, self._handed_out = [], []
        self._layers_dropped()

    def _layers_dropped(self) -> None:
        if all(beat.is_dropped for beat in self._beats) and not self._given_up:
            self._given_up = True
            self.state.drop(self)

    def settle_dropped(self) -> None:
        """Settle it after it was dropped without being closed. Raises WrongThread if only another thread can."""
        try:
            self.cancel()
            self.state.on_dropped(self)
        except DeviceError:
            log.debug("a dropped lease could not be evaluated", exc_info=True)
        self.state.reasons["dropped"] += 1

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.cancel()
            return
        with contextlib.suppress(DeviceError):  # the error that is on its way says it already
            self.cancel()

    # -- a model that runs uncached ------------------------------------------------------------

    def run_uncached(self, made: list[tuple[Anatomy, list[Any]]]) -> None:
        """Hand out these caches, which are not ours, and count them."""
        lease = weakref.ref(self)

        def admit(part: Uncached, n_tokens: int) -> None:
            here = lease()
            if here is not None:
                here._admit_uncached(part, n_tokens)

        self._beats = []
        self.layers = [cache for _, caches in made for cache in caches]
        self._handed_out = list(self.layers)
        self._uncached = [Uncached(anatomy, caches, admit) for anatomy, caches in made if caches]
        for part in self._uncached:
            stock.attend(part.caches, part)

    def reserve_uncached(self, n_tokens: int) -> None:
        """Reserve a forward of the target, if it runs uncached. Raises BudgetError."""
        for part in self._uncached[:1]:
            self._admit_uncached(part, n_tokens)

    def _admit_uncached(self, part: Uncached, n_tokens: int) -> None:
        """Growth and scratch of a forward on caches that are not ours; or BudgetError, before it runs."""
        if n_tokens == 0:
            self.recount()
            return
        self._usable()
        self.state.lock.run(self._admitting_uncached(part, n_tokens))

    def _admitting_uncached(self, part: Uncached, n_tokens: int) -> Work[None]:
        yield from self.state.scratch.reserving(part.scratch_bytes(n_tokens))
        self.refuse_closed()
        needed = sum(p.nbytes for p in self._uncached if p is not part) + part.bytes_after(n_tokens)
        yield from self.state.ledger.granting(Purpose.LIVE, needed - self._points.bytes)
        self.refuse_closed()
        self._points.resize(needed)

    # -- the layers' side, through ForwardWatcher ------------------------------------------------------

    def refuse_closed(self) -> None:
        """Raises LeaseClosed if it is closed: by another thread, where the lock was let go in between."""
        if self.closed:
            raise LeaseClosed("this lease is closed; its layers hold nothing any more")

    def _usable(self) -> None:
        """Raises if this thread cannot use the lease now."""
        self.refuse_closed()
        thread = self._unscheduled
        if thread is None or thread is threading.current_thread():
            return
        try:
            mx.eval([leaf.live_arrays() for beat in self._beats for leaf in beat.leaves])
        except RuntimeError as error:
            if thread.is_alive():
                raise WrongThread(
                    f"only thread {thread.name!r} can compute what it left in these layers, because it called a part "
                    "of the model and not the model itself: evaluate the layers there before another thread uses them"
                ) from error
            with self.state.lock:
                closing.lose(self.state, self, error)
            raise DeviceError(f"what thread {thread.name!r} left in the layers is lost with it: {error}") from error
        self._unscheduled = None

    def _take_turn(self) -> None:
        """This thread uses the lease until `_end_turn`; WrongThread if another one does."""
        if not self._turn.take():
            if self._settling and self._turn.wait(SETTLING_MOST) and self.closed:
                raise LeaseClosed("this lease was ended by another thread; its layers hold nothing any more")
            raise WrongThread("another thread is in the middle of a forward on this lease: wait until it has returned")
        usable = False
        try:
            if self.state.closing:
                raise LeaseClosed("the cache of this lease is closed: open a lease on one that is open")
            self._usable()
            usable = True
        finally:
            if not usable:
                self._turn.give_back()
        here, before = threading.get_ident(), self.thread
        if here != before:
            self.thread = here
            with self.state.lock:
                self.state.thread_left(before)

    def _end_turn(self) -> None:
        self._end_as_asked()
        self._turn.give_back()
        if self._ending is not None and self._turn.take():  # asked for in between
            self._end_as_asked()
            self._turn.give_back()

    def _end_as_asked(self) -> None:
        """End the lease if another thread wanted it to. With the turn."""
        if self._ending is not None:
            how, self._ending = self._ending, None
            self._settling = True
            try:
                if not self.closed:
                    with contextlib.suppress(DeviceError):
                        how()
            finally:
                self._settling = False

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        self._take_turn()
        try:
            yield
        finally:
            self._end_turn()

    def await_turn(self, seconds: float) -> bool:
        """Wait until no other thread is in a forward on this lease; False if it took longer."""
        return self._turn.wait(seconds)

    @property
    def busy_elsewhere(self) -> bool:
        """Whether another thread is in a forward on it, or has left what only that thread can compute."""
        return self.in_forward_elsewhere or self._unscheduled not in (None, threading.current_thread())

    @property
    def in_forward_elsewhere(self) -> bool:
        return self._turn.is_elsewhere

    def _begin(self, beat: ForwardWatcher) -> None:
        """A forward begins: every layer stands at one position."""
        self._usable()
        beat.undo()
        beat.refuse_after_refused_rewind()
        if not beat.uniform:
            offsets = sorted({leaf.offset for leaf in beat.leaves})
            raise LeaseError(f"the layers disagree: they hold from {offsets[0]} to {offsets[-1]} tokens")
        if beat.position < beat.reached:
            self._note_rewind(beat.position)
        self._maybe_checkpoint()

    def _note_rewind(self, to: int) -> None:
        """What comes from here on need not be what the lease was opened with."""
        self._rewound = min(self._rewound, to)
        for beat in self._beats:
            if beat.position <= to:
                beat.fed.cut(to)
        for checkpoint in [c for c in self._taken if c.position > to]:
            self._taken.remove(checkpoint)
            checkpoint.close()

    def _reserve_step(self, beat: ForwardWatcher, n_tokens: int) -> None:
        """Growth for all layers, windows and states, and the forward's scratch; or BudgetError, and nothing."""
        self.state.lock.run(self._reserving_step(beat, n_tokens))

    def _reserving_step(self, beat: ForwardWatcher, n_tokens: int) -> Work[None]:
        state, start = self.state, beat.position
        self.refuse_closed()
        state.sweep()
        beat.reached = start + n_tokens
        offsets = [leaf.offset for b in self._beats for leaf in b.leaves]
        if state.tier is not None:
            self._time_prefill(state.tier, beat, n_tokens)
        yield from state.scratch.reserving(beat.scratch_bytes(n_tokens) + 2 * self._points.bytes)
        self.refuse_closed()
        if not beat.rotated and any(isinstance(x, SegmentedLayer) and x.outgrows(n_tokens) for x in beat.leaves):
            self._rotate(beat)
        if not self._spanless:
            if self.unreserved:
                end, rest, self.unreserved = self.track.end, self.unreserved, 0
                yield from self.track.ensuring(end, rest)
                self.refuse_closed()
                self.track.shorten(end)
            yield from self.track.ensuring(start, n_tokens, keep=max(offsets, default=0))
            self.refuse_closed()
        kept = sum(b.round_bytes() for b in self._beats)
        self._count_points(kept + sum(self._point_bytes(b, n_tokens) for b in self._beats))

    def _time_prefill(self, tier: Tier, beat: ForwardWatcher, n_tokens: int) -> None:
        """How long the chunk before this forward took, if it was one."""
        n, began = self._chunk
        if n >= LEAST_CHUNK:
            mx.eval([leaf.live_arrays() for leaf in beat.leaves])  # done already, unless the caller never waits
            tier.prefilled(n, time.perf_counter() - began)
        self._chunk = (n_tokens, time.perf_counter())

    @property
    def _spanless(self) -> bool:
        """No layer's state lies in the track (any more)."""
        return all(b.rotated for b in self._beats)

    def _point_bytes(self, beat: ForwardWatcher, n_tokens: int) -> int:
        start = beat.position
        total = beat.anatomy.point_bytes(start, n_tokens)
        if beat.rotated:
            total += beat.anatomy.ring_bytes(start, n_tokens)
        return total

    def _count_points(self, at_least: int = 0) -> None:
        """Bring the account of windows and states up to what they occupy (or will, after this forward)."""
        self._points.resize(max(self._live_point_bytes(), at_least))

    def _live_point_bytes(self) -> int:
        shared: set[int] = set()
        for checkpoint in [self._restored, *self._taken]:
            if checkpoint is not None:
                shared |= checkpoint.array_ids()
        total = sum(part.nbytes for part in self._uncached)
        for beat in self._beats:
            for leaf in beat.leaves:
                if leaf.kind not in SLICEABLE or leaf.ring is not None:
                    total += sum(a.nbytes for a in leaf.live_arrays() if id(a) not in shared)
            total += beat.round_bytes()
        return total

    def recount(self) -> None:
        """Between steps: exactly what is there, for statistics and checks."""
        if not self.closed and not self.in_forward_elsewhere:  # what a forward has reserved stays reserved
            self._points.resize(self._live_point_bytes(), force=True)

    def _rotate(self, beat: ForwardWatcher) -> None:
        """The bound is reached: this model's sliceable layers become rings."""
        bound = beat.anatomy.bound
        assert bound is not None
        start = beat.position
        need = beat.anatomy.ring_bytes(start, 1)
        alone = len(self._beats) == 1
        give_up = False
        try:
            self._points.resize(self._points.bytes + need)
        except BudgetError:
            if not alone or not closing.abandon(self.state, self):
                raise
            give_up = True
        for leaf in beat.leaves:
            if isinstance(leaf, SegmentedLayer):
                leaf.rotate()
                mx.eval(leaf.live_arrays())
                if give_up:
                    for piece in self.track.pieces:
                        piece.slab.layers[leaf.index] = None
        beat.rotated = True
        beat.rotates()
        self._rotated_at = min(self._rotated_at, start)
        self.state.note_rotation(beat.reached, bound.max_size)
        if self._spanless:
            self.track.free()
            closing.let_go(self.state, self)
        if give_up:
            self._points.resize(self._live_point_bytes())

    @property
    def _last_checkpoint(self) -> int:
        """The deepest point that this conversation could be resumed at as it stands."""
        restored = min(self._restored.position, self.cached) if self._restored is not None else 0
        exact = self._restored is not None and self._restored.position == self.cached
        return max([c.position for c in self._taken], default=restored if exact else 0)

    def _maybe_checkpoint(self) -> None:
        if not self.state.model.pointwise and not self._spanless:
            return
        position = self.offset
        if any(b.position != position for b in self._beats):
            return
        last = self._last_checkpoint
        asked = self._asked | {self.matched} if self.matched > self.cached else self._asked
        if position <= len(self.tokens) and wanted(position, last, len(self.tokens), asked):
            closing.make_room_for_checkpoint(self.state, self, gap=position - last)
            with self.state.lock:
                taken = closing.take_checkpoint(self.state, self, position, gap=position - last)
            if taken is not None:
                self._taken.append(taken)

    def snapshots(self) -> list[Any]:
        """Every leaf's own state, None where it lies in the track."""
        found: list[Any] = []
        for beat in self._beats:
            for leaf in beat.leaves:
                if leaf.kind in SLICEABLE and leaf.ring is None:
                    found.append(None)
                    continue
                found.append(leaf.snapshot(0))
        return found

    def __len__(self) -> int:
        """Tokens that the layers hold now."""
        return self.offset

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.offset}"
        return f"<Lease of {show_count(len(self.tokens), 'token')}, {self.cached} cached, {state}>"
