"""A lease: one request's path in the tree, and its live layers.

- `layers` are the prompt cache for any mlx-lm model, `generate_step` or `speculative_generate_step`.
- The watcher notices a forward at its first layer, where all layers are at one position. There growth is reserved for
  all of them, or refused before anything is written, and a checkpoint can be taken (`forward`).
- A forward that fails half-way is undone at the next one, or when the lease is closed.
- A lease is closed by commit, cancel or error: complete forwards are stored, everything else is freed. A commit stores
  only tokens that the layers were fed.
- One thread at a time uses a lease; any thread may, between two forwards. If another thread closes a lease during a
  forward, the forward's thread closes it after the forward has returned.

    tokens   |<------ cached ------>|<-- prefilled -->|<-- generated -->|
    layers   |<-- tree's, read in place -->|<---- this lease's own ---->|
                                           floor (matched)
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.nn as nn

from onefold.cache.memory import device
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
from onefold.errors import AddedTo, CommitError, ConfigError, LeaseError
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
        """`models` are those of the anatomies, as far as they are known. `asked` are positions for checkpoints."""
        self.state = state
        self.hold = Hold(state, tokens, namespace, asked)
        """Its state, for the rest of the package."""
        self.usage = Usage(self.hold)
        """Which thread is using it, for the rest of the package."""
        self.owner: object = None
        """The cache, which this lease keeps alive."""
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
        """The layers to pass to the model as its cache; the draft model's follow the target's."""
        return self.hold.handed.layers

    @property
    def tokens(self) -> Tokens:
        """The tokens with which it was opened."""
        return self.hold.tokens

    @property
    def matched(self) -> int:
        """How many of these tokens, from the first on, the tree knows."""
        return self.hold.matched

    @property
    def cached(self) -> int:
        """The position to which all layers were restored: prefill `tokens[cached:]`. At most len(tokens) - 1."""
        return self.hold.cached

    @property
    def restored(self) -> int:
        """How many of the cached tokens were read from disk for this request."""
        return self.hold.from_disk

    @property
    def reason(self) -> str:
        """Why `cached` is less than possible; empty for a full hit."""
        return self.hold.reason.value

    @property
    def closed(self) -> bool:
        return self.hold.closed

    @property
    def offset(self) -> int:
        """The number of tokens that the layers hold now."""
        return self.hold.offset

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers that this lease writes; not those that it only reads, such as a shared prefix."""
        held = sum(a.nbytes for leaf in self.hold.leaves for a in leaf.live_arrays())
        return held + sum(part.nbytes for part in self.hold.uncached)

    @property
    def rest(self) -> Tokens:
        """The tokens that are still to be prefilled, at least one."""
        return self.tokens[self.cached :]

    def chunk_limit(self, limit: int = 2048) -> int:
        """Returns the largest chunk, up to `limit`, whose scratch fits in the budget: a `prefill_step_size` that will
        not be refused. For a chunk of more than 16 tokens, stored KV is evicted only if its scratch is at most a 64th
        of the budget. On Metal chunks become shorter as the context grows, because macOS ends commands that take too
        long."""
        return chunking.chunk_limit(self.hold, limit)

    def chunks(self, limit: int = 2048) -> Iterator[Tokens]:
        """Yields the rest except its last token, in chunks that fit in the budget and end where checkpoints belong.
        Raises ConfigError for a limit below 1."""
        if limit < 1:
            raise ConfigError(f"limit must be at least one token, got {limit}")
        start = self.cached
        while len(chunk := chunking.next_chunk(self.hold, start, limit)):
            yield chunk
            start += len(chunk)

    def commit(self, tokens: Any = None, *, close: bool = True, turn_over: bool = False) -> list[int]:
        """Store the KV of `tokens`, from the first on, and close the lease. Returns the tokens that were committed.

        Without `tokens` it commits everything that the layers were fed. (`generate_step` feeds a token before it yields
        it, so this includes every token that it yielded, the last one and an end marker too.) You may pass fewer tokens
        than the layers hold (without a stop token that will not be in the next prompt), but not more, and only tokens
        that they were fed. Otherwise CommitError names the first difference, and the lease stays open. With
        `close=False` the lease stays open, and other leases can borrow what was committed. `turn_over` says that a
        person continues the conversation, and not a program that is about to return a tool's result: it is evicted
        before those.
        """
        with self.usage.in_turn():
            if self.hold.handed.changed:
                raise CommitError(
                    "the list of layers was changed, so their content is not known: pass lease.layers to the model "
                    "unchanged"
                )
            for watcher in self.hold.watchers:
                watcher.undo()
            if tokens is None:
                found = committing.fed(self.hold)
            else:
                found = as_tokens_or_none(tokens)
                committing.check(self.hold, found)
            closing.count_unfed(self.hold)
            if not self.hold.uniform:
                offsets = sorted({leaf.offset for leaf in self.hold.leaves})
                raise CommitError(
                    f"the layers are at different positions, from {offsets[0]} to {offsets[-1]}: pass all of them to "
                    "each forward, and trim all by the same number"
                )
            closing.settle(self.hold, found, close=close, turn_over=turn_over)
            return found.tolist()

    def fed(self) -> list[int]:
        """Returns the tokens that every model's layers were fed and hold now. Waits for forwards in progress."""
        return committing.fed(self.hold).tolist()

    def agreement(self, tokens: Any) -> int:
        """Returns how many of `tokens`, from the first on, can be committed: the layers were fed them and hold them
        now."""
        return committing.agreement(self.hold, tokens)

    def export(self) -> list[Any]:
        """Returns copies of the layers as mlx-lm's own caches, each with exactly `offset` tokens, for any model, loop
        or `save_prompt_cache` of mlx-lm's. They outlive the lease, and their bytes are in the ledger while they live.
        Raises BudgetError if there is no room for them."""
        self.usage.require_usable()
        for watcher in self.hold.watchers:
            watcher.undo()
        if self.hold.uncached:
            return [_counted_copy(self.state, cache) for cache in self.layers]
        made = copy.deepcopy(self.layers)
        for layer, cache in zip(self.layers, made, strict=True):  # the target may be one token ahead of the draft
            ahead = layer.offset - self.offset
            if ahead > 0 and not (hasattr(cache, "trim") and cache.is_trimmable()):
                raise LeaseError(
                    f"a layer holds {layer.offset} tokens and cannot be cut to {self.offset}, as the others: feed both "
                    "models the same tokens before export()"
                )
            if ahead > 0:
                cache.trim(ahead)
        return made

    def cancel(self) -> None:
        """Close the lease, and store the part of the prompt that was prefilled, without generated tokens. If another
        thread is in a forward, that thread closes the lease after it."""
        self.usage.end(functools.partial(closing.cancel, self.hold))

    def discard(self) -> None:
        """Close the lease, and store nothing. What was committed before stays. During another thread's forward, like
        `cancel`."""
        self.usage.end(functools.partial(closing.discard, self.hold))

    def __del__(self) -> None:
        """Keep the lease alive while the caller refers to its layers, if it was dropped without being closed. After
        that, the cache's next call closes it."""
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            device.note_raised(error)  # the caller's own evaluation may have been told
        with AddedTo(error):
            self.cancel()

    def __len__(self) -> int:
        """The number of tokens that the layers hold now."""
        return self.offset

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.offset}"
        return f"<Lease of {show_count(len(self.tokens), 'token')}, {self.cached} cached, {state}>"


def _counted_copy(state: CacheState, cache: Any) -> Any:
    """Returns a copy of a cache of the model's own, whose bytes are in the ledger while it lives. Raises
    BudgetError."""
    size = sum(a.nbytes for a in stock.arrays_of(cache))
    account = state.ledger.open(Purpose.LIVE, size, "a copy of a layer")
    return exporting.counted(account, lambda: copy.deepcopy(cache))
