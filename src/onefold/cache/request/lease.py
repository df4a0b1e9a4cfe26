"""A lease: one request's hold on a path of the tree, and its live layers.

- `layers` go to any mlx-lm model, `generate_step` or `speculative_generate_step` as their prompt cache.
- A forward is noticed at its first layer (`watcher`). There every layer stands at one position: growth is reserved
  for all of them, or refused before anything is written, and a checkpoint can be taken (`forward`).
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
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from onefold.cache.memory.checkpoints import GRID
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.segment import LEAST_CHUNK
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tree import Tokens, as_tokens_or_none, common_length
from onefold.cache.model import exporting, seam, stock
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.uncached import Uncached
from onefold.cache.request import closing, forward
from onefold.cache.request.hold import Hold, nothing
from onefold.cache.request.turn import Turn
from onefold.cache.request.watcher import ForwardWatcher
from onefold.errors import CommitError, ConfigError, DeviceError, LeaseClosed, LeaseError, WrongThread
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
        self.hold = Hold(state, tokens, namespace, asked)
        """What it holds, for the rest of the package."""
        self.owner: object = None
        """Kept alive by this lease: the cache, which settles it."""
        self.layers: list[Any] = []
        self._parts: list[slice] = []
        """Each model's layers among them all."""
        self._turn = Turn()
        """Of the thread that is in a forward, or settling."""
        self._settling = False
        """The thread that has the turn is ending the lease."""
        self._ending: Callable[[], None] | None = None
        """How another thread wanted it to end, during a forward."""
        first = 0
        for i, anatomy in enumerate(anatomies):
            watcher = ForwardWatcher(self, anatomy, models[i] if models else None)
            layers, watcher.leaves = anatomy.make(self.hold.track, watcher, first_index=first)
            first += len(anatomy.sliceable)
            self._parts.append(slice(len(self.layers), len(self.layers) + len(layers)))
            self.layers += layers
            self.hold.watchers.append(watcher)
        target = models[0] if models else None
        self._model = None if target is None else weakref.ref(target)
        self._handed_out = list(self.layers)
        self._given_up = False
        """Nobody refers to it or to its layers any more: the cache settles it."""
        self._let_go: list[weakref.ref[Any]] = []
        """The layers that were handed out, once the caller has dropped the lease."""

    # -- the request's side ----------------------------------------------------------------

    @property
    def tokens(self) -> Tokens:
        """That it was opened with."""
        return self.hold.tokens

    @property
    def matched(self) -> int:
        """How far the tree knows these tokens."""
        return self.hold.matched

    @property
    def cached(self) -> int:
        """How far the state could be put back: prefill `tokens[cached:]`. At most len(tokens) - 1."""
        return self.hold.cached

    @property
    def restored(self) -> int:
        """Of the cached tokens, those that were read from disk for this request."""
        return self.hold.from_disk

    @property
    def reason(self) -> str:
        """Why `cached` is less than it might be; empty for a whole hit."""
        return self.hold.reason

    @property
    def closed(self) -> bool:
        return self.hold.closed

    @property
    def offset(self) -> int:
        """Tokens that the layers hold now."""
        return self.hold.offset

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that this lease writes. What it only reads, such as a shared prefix, is the tree's."""
        held = sum(a.nbytes for leaf in self.hold.leaves for a in leaf.live_arrays())
        return held + sum(part.nbytes for part in self.hold.uncached)

    @property
    def rest(self) -> Tokens:
        """The tokens that are still to be prefilled, at least one."""
        return self.tokens[self.cached :]

    def chunk_limit(self, limit: int = 2048) -> int:
        """The largest chunk, up to `limit`, whose scratch the budget has room for: a `prefill_step_size` that will not
        be refused. Down to 16 tokens nothing is evicted for it; below that, what can be."""
        parts: list[Any] = [*self.hold.watchers, *self.hold.uncached]
        ledger, held = self.state.ledger, self.state.scratch.bytes - 2 * self.hold.points.bytes
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
        stops = {end, *self.hold.asked, (start // GRID + 1) * GRID}
        if self.state.model.pointwise and self.matched > self.cached:
            stops.add(self.matched)  # where this request was seen to branch off
        stop = min([start + self.chunk_limit(limit), *(s for s in stops if start < s <= end)])
        return self.tokens[start : min(stop, end)]

    def stop_at(self, position: int) -> None:
        """Another request will branch off here: a chunk ends at this position, with a checkpoint if one is needed."""
        self.hold.asked |= {position}

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
            for watcher in self.hold.watchers:
                watcher.undo()
            if tokens is None:
                found = self._fed()
            else:
                found = as_tokens_or_none(tokens)
                self._check_fed(found)
            closing.say_unfed(self.hold)
            if not self.hold.uniform:
                offsets = sorted({leaf.offset for leaf in self.hold.leaves})
                raise CommitError(f"the layers disagree: they hold from {offsets[0]} to {offsets[-1]} tokens")
            with self._noting_end():
                closing.settle(self.hold, found, close=close)
            return found.tolist()

    def fed(self) -> list[int]:
        """The tokens that every model's layers were fed and hold now. Waits for forwards that are under way."""
        return self._fed().tolist()

    def _fed(self) -> Tokens:
        if not self.hold.watchers:
            return self.tokens[:0]
        known = [w.fed.tokens()[: w.position] for w in self.hold.watchers]
        shortest = min(known, key=len)
        return shortest[: min(common_length(shortest, other) for other in known)]

    def agreement(self, tokens: Any) -> int:
        """How many of `tokens`, from the first on, the layers were fed and hold now: as many as can be committed."""
        found = as_tokens_or_none(tokens)
        held = [(w, found[: w.position]) for w in self.hold.watchers]
        return min((w.fed.agreement(h) if w.is_watched else len(h) for w, h in held), default=0)

    def _check_fed(self, tokens: Tokens) -> None:
        shared = min(len(tokens), len(self.tokens), self.hold.rewound)
        same = common_length(tokens[:shared], self.tokens[:shared])
        if same < shared:
            given, leased = int(tokens[same]), int(self.tokens[same])
            raise CommitError(f"token {same} of the commit is {given}, but the lease was opened with {leased}")
        if self.hold.watchers and len(tokens) > self.hold.watchers[0].position:
            committed = show_count(len(tokens), "token")
            raise CommitError(f"{committed} committed, but the layers hold {self.hold.watchers[0].position}")
        for watcher in (w for w in self.hold.watchers if w.is_watched):
            held = tokens[: watcher.position]
            same = watcher.fed.agreement(held)
            if same < len(held):
                fed = watcher.fed.tokens()
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
        return self._model is None or self._model() is model

    def owns(self, layers: list[Any]) -> bool:
        """Whether these are the layers that it handed out, all of them."""
        own = self._handed_out or [ref() for ref in self._let_go]
        return len(own) == len(layers) and all(a is b for a, b in zip(own, layers, strict=True))

    def export(self) -> list[Any]:
        """Returns copies of the layers as mlx-lm's own caches, each holding exactly `offset` tokens: any model, loop or
        `save_prompt_cache` of mlx-lm's takes them, and they outlive the lease. Their bytes are in the ledger while they
        live; raises BudgetError if the budget has no room for them."""
        self.require_usable()
        for watcher in self.hold.watchers:
            watcher.undo()
        if self.hold.uncached:
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

    def layers_of(self, watcher: ForwardWatcher) -> list[Any]:
        """The layers that a model takes as its cache; none where they are not what was handed out any more."""
        return [] if self._layers_changed() else self.layers[self._parts[self.hold.watchers.index(watcher)]]

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
                self.require_usable()
                how()
        finally:
            self._settling = False
            self._turn.give_back()

    def _cancel(self) -> None:
        for watcher in self.hold.watchers:
            watcher.undo()
        sound = self.hold.uniform and not self._layers_changed()
        keep = min(self.agreement(self.tokens), self.hold.rewound) if sound else 0
        with self._noting_end():
            closing.settle(self.hold, self.tokens[:keep], close=True)

    def _discard(self) -> None:
        with self._noting_end():
            closing.evaluate(self.hold)
            closing.release(self.hold)

    def release(self) -> None:
        """Let go of everything at once, whatever state it is in."""
        with self._noting_end():
            closing.release(self.hold)

    def _lose(self, error: Exception) -> None:
        with self._noting_end(), self.state.lock:
            closing.lose(self.hold, error)

    @contextlib.contextmanager
    def _noting_end(self) -> Iterator[None]:
        """Removes the lease from the open leases when this block closes its hold, with the lock held. The hold refers
        to the lease only during the block: a lasting reference would keep a dropped lease alive."""
        self.hold.on_closed = self._leave
        try:
            yield
        finally:
            self.hold.on_closed = nothing

    def _leave(self) -> None:
        """Removes the lease from the open leases. Called with the lock held."""
        self.state.leases.discard(self)
        if not self.hold.watchers:  # it ran uncached: its caches are not ours
            self.layers, self._handed_out = [], []

    def lost(self, error: RuntimeError) -> None:
        """What its last forward wrote cannot be computed: nothing of it is kept."""
        if not self.closed:
            self._lose(error)

    def end_now(self) -> bool:
        """Close without keeping anything, unless another thread is in a forward: then that thread will, and this is
        False."""
        self.discard()
        return self.closed

    def __del__(self) -> None:
        """Dropped without being closed. Its layers keep it alive while somebody refers to them; then it is settled at
        the cache's next call."""
        hold = getattr(self, "hold", None)
        if hold is None or hold.closed:
            return
        for watcher in self.hold.watchers:
            watcher.keep(self)
        self._let_go = [weakref.ref(layer) for layer in self._handed_out] if self.hold.watchers else []
        self.layers, self._handed_out = [], []
        self.layers_dropped()

    def layers_dropped(self) -> None:
        if all(watcher.is_dropped for watcher in self.hold.watchers) and not self._given_up:
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

        self.hold.watchers = []
        self.layers = [cache for _, caches in made for cache in caches]
        self._handed_out = list(self.layers)
        self.hold.uncached = [Uncached(anatomy, caches, admit) for anatomy, caches in made if caches]
        for part in self.hold.uncached:
            seam.attend(part.caches, part)

    def reserve_uncached(self, n_tokens: int) -> None:
        """Reserve a forward of the target, if it runs uncached. Raises BudgetError."""
        for part in self.hold.uncached[:1]:
            self._admit_uncached(part, n_tokens)

    def _admit_uncached(self, part: Uncached, n_tokens: int) -> None:
        """Growth and scratch of a forward on caches that are not ours; or BudgetError, before it runs."""
        if n_tokens == 0:
            self.recount()
            return
        self.require_usable()
        forward.admit_uncached(self.hold, part, n_tokens)

    # -- the layers' side, through ForwardWatcher ------------------------------------------------------

    def require_usable(self) -> None:
        """Raises if this thread cannot use the lease now."""
        self.hold.refuse_closed()
        thread = self.hold.unscheduled
        if thread is None or thread is threading.current_thread():
            return
        try:
            mx.eval([leaf.live_arrays() for leaf in self.hold.leaves])
        except RuntimeError as error:
            if thread.is_alive():
                raise WrongThread(
                    f"only thread {thread.name!r} can compute what it left in these layers, because it called a part "
                    "of the model and not the model itself: evaluate the layers there before another thread uses them"
                ) from error
            self._lose(error)
            raise DeviceError(f"what thread {thread.name!r} left in the layers is lost with it: {error}") from error
        self.hold.unscheduled = None

    def take_turn(self) -> None:
        """This thread uses the lease until `end_turn`; WrongThread if another one does."""
        if not self._turn.take():
            if self._settling and self._turn.wait(SETTLING_MOST) and self.closed:
                raise LeaseClosed("this lease was ended by another thread; its layers hold nothing any more")
            raise WrongThread("another thread is in the middle of a forward on this lease: wait until it has returned")
        usable = False
        try:
            if self.state.closing:
                raise LeaseClosed("the cache of this lease is closed: open a lease on one that is open")
            self.require_usable()
            usable = True
        finally:
            if not usable:
                self._turn.give_back()
        here, before = threading.get_ident(), self.hold.thread
        if here != before:
            self.hold.thread = here
            with self.state.lock:
                self.state.thread_left(before)

    def end_turn(self) -> None:
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
        self.take_turn()
        try:
            yield
        finally:
            self.end_turn()

    def await_turn(self, seconds: float) -> bool:
        """Wait until no other thread is in a forward on this lease; False if it took longer."""
        return self._turn.wait(seconds)

    @property
    def busy_elsewhere(self) -> bool:
        """Whether another thread is in a forward on it, or has left what only that thread can compute."""
        return self.in_forward_elsewhere or self.hold.unscheduled not in (None, threading.current_thread())

    @property
    def in_forward_elsewhere(self) -> bool:
        return self._turn.is_elsewhere

    def begin(self, watcher: ForwardWatcher) -> None:
        self.require_usable()
        forward.begin(self.hold, watcher)

    def recount(self) -> None:
        """Between steps: exactly what is there, for statistics and checks."""
        if not self.closed and not self.in_forward_elsewhere:  # what a forward has reserved stays reserved
            self.hold.points.resize(self.hold.live_point_bytes(), force=True)

    def __len__(self) -> int:
        """Tokens that the layers hold now."""
        return self.offset

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.offset}"
        return f"<Lease of {show_count(len(self.tokens), 'token')}, {self.cached} cached, {state}>"
