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
import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import mlx.nn as nn

from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens, as_tokens_or_none
from onefold.cache.model import exporting, stock
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.request import chunking, closing, committing
from onefold.cache.request.held_leaves import HeldLeaves
from onefold.cache.request.hold import Hold
from onefold.cache.request.usage import Usage
from onefold.cache.request.watcher import ForwardWatcher, give_up
from onefold.errors import CommitError, ConfigError, DeviceError, LeaseError
from onefold.sizes import show_count

log = logging.getLogger("onefold")


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
        self.usage = Usage(self.hold)
        """Which thread is using it, for the rest of the package."""
        self.owner: object = None
        """Kept alive by this lease: the cache, which closes it."""
        first = 0
        for i, anatomy in enumerate(anatomies):
            watcher = ForwardWatcher(self, anatomy, models[i] if models else None)
            layers, leaves = anatomy.make(self.hold.track, watcher, first_index=first)
            watcher.held = HeldLeaves(leaves)
            first += len(anatomy.sliceable)
            self.hold.handed.give(layers)
            self.hold.watchers.append(watcher)
        target = models[0] if models else None
        self.hold.target = None if target is None else weakref.ref(target)

    # -- the request's side ----------------------------------------------------------------

    @property
    def layers(self) -> list[Any]:
        """What a model takes as its cache; behind the target's layers those of a draft model."""
        return self.hold.handed.layers

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
        return self.hold.reason.value

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
        be refused. Nothing is evicted for 16 tokens or more; for fewer, whatever can be."""
        return chunking.chunk_limit(self.hold, limit)

    def chunks(self, limit: int = 2048) -> Iterator[Tokens]:
        """The rest but for its last token, in chunks that end where checkpoints belong and that the budget has room
        for."""
        if limit < 1:
            raise ConfigError(f"a chunk has at least one token, got a limit of {limit}")
        start = self.cached
        while len(chunk := chunking.next_chunk(self.hold, start, limit)):
            yield chunk
            start += len(chunk)

    def commit(self, tokens: Any = None, *, close: bool = True) -> list[int]:
        """Keep what the layers hold: the KV of `tokens`, from the first on. Returns the tokens that were committed.

        Without `tokens` that is everything the layers were fed. (`generate_step` feeds a token before it yields it, so
        each token that it yielded is among them, the last one and an end marker too.) May be given fewer tokens than
        the layers hold (a stop token that will not come back), never more, and never others than they were fed:
        CommitError then says where they differ, and the lease stays open. With `close=False` the lease goes on, and
        others can borrow what was committed.
        """
        with self.usage.in_turn():
            if self.hold.handed.changed:
                raise CommitError("the list of layers was changed; what they hold cannot be known")
            for watcher in self.hold.watchers:
                watcher.undo()
            if tokens is None:
                found = committing.fed(self.hold)
            else:
                found = as_tokens_or_none(tokens)
                committing.check(self.hold, found)
            closing.say_unfed(self.hold)
            if not self.hold.uniform:
                offsets = sorted({leaf.offset for leaf in self.hold.leaves})
                raise CommitError(f"the layers disagree: they hold from {offsets[0]} to {offsets[-1]} tokens")
            closing.settle(self.hold, found, close=close)
            return found.tolist()

    def fed(self) -> list[int]:
        """The tokens that every model's layers were fed and hold now. Waits for forwards that are under way."""
        return committing.fed(self.hold).tolist()

    def agreement(self, tokens: Any) -> int:
        """Returns how many of `tokens`, from the first on, the layers were fed and hold now: as many as can be
        committed."""
        return committing.agreement(self.hold, tokens)

    def export(self) -> list[Any]:
        """Returns copies of the layers as mlx-lm's own caches, each holding exactly `offset` tokens: any model, loop or
        `save_prompt_cache` of mlx-lm's takes them, and they outlive the lease. Their bytes are in the ledger while they
        live; raises BudgetError if the budget has no room for them."""
        self.usage.require_usable()
        for watcher in self.hold.watchers:
            watcher.undo()
        if self.hold.uncached:
            return [_counted_copy(self.state, cache) for cache in self.layers]
        made = copy.deepcopy(self.layers)
        for layer, cache in zip(self.layers, made, strict=True):  # a target may be a token ahead of its draft
            ahead = layer.offset - self.offset
            if ahead > 0 and not (hasattr(cache, "trim") and cache.is_trimmable()):
                raise LeaseError(f"a layer holds {layer.offset} tokens and cannot be cut to the others' {self.offset}")
            if ahead > 0:
                cache.trim(ahead)
        return made

    def cancel(self) -> None:
        """Close without generated tokens: the part of the prompt that was prefilled is kept. From another thread
        during a forward it is done when that has returned."""
        self.usage.end(functools.partial(closing.cancel, self.hold))

    def discard(self) -> None:
        """Close, and keep nothing of what was done. What was stored before stays. During a forward, as `cancel`."""
        self.usage.end(functools.partial(closing.discard, self.hold))

    def __del__(self) -> None:
        """Dropped without being closed. Its layers keep it alive while somebody refers to them; then it is settled at
        the cache's next call."""
        hold = getattr(self, "hold", None)
        if hold is None or hold.closed:
            return
        for watcher in hold.watchers:
            watcher.keep(self)
        if hold.watchers:
            hold.handed.drop()
        else:
            hold.handed.forget()
        give_up(self)

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

    def __len__(self) -> int:
        """Tokens that the layers hold now."""
        return self.offset

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.offset}"
        return f"<Lease of {show_count(len(self.tokens), 'token')}, {self.cached} cached, {state}>"


def _counted_copy(state: CacheState, cache: Any) -> Any:
    """A copy of a cache of the model's own, whose bytes are in the ledger while it lives. Raises BudgetError."""
    size = sum(a.nbytes for a in stock.arrays_of(cache))
    account = state.ledger.open(Purpose.LIVE, size, "a copy of a layer")
    return exporting.counted(account, lambda: copy.deepcopy(cache))
