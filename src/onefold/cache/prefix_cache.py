"""`PrefixCache`, the public face: it hands out leases, stores what they computed, and keeps it under one budget.

Continue is a move, share is a borrow, commit is a move. One lock guards the bookkeeping: any thread may lease, commit
and read statistics. A lease may change threads between two forwards.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn

from onefold.cache import stats
from onefold.cache.clearing import Clearing
from onefold.cache.config import CacheConfig, CacheOptions
from onefold.cache.ending import Ending
from onefold.cache.inventory import Inventory
from onefold.cache.leasing import Leasing
from onefold.cache.memory import device
from onefold.cache.memory.ledger import ElasticLedger, Ledger
from onefold.cache.memory.lock import CacheLock
from onefold.cache.memory.recount import recount
from onefold.cache.memory.segment import STEP
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import Fetch, TierStats
from onefold.cache.memory.tokens import as_tokens, frozen
from onefold.cache.model.fingerprint import lasting_digest, model_digest, model_name
from onefold.cache.model.survey import read_off, survey
from onefold.cache.parts import Parts
from onefold.cache.pins import Pin, Pins
from onefold.cache.request.arena import Arena
from onefold.cache.request.batch import Batch
from onefold.cache.request.lease import Lease
from onefold.cache.stats import Stats
from onefold.cache.tiers.identity import Identity
from onefold.cache.tiers.registry import open_tier
from onefold.errors import BudgetError, ConfigError, IntegrityError, OnefoldError
from onefold.sizes import parse_size, show_count, show_size

log = logging.getLogger("onefold")


class PrefixCache:
    """Holds the KV of many conversations with one model, each token's once."""

    kv_bits = 16
    """Of stored KV: 16 (as the model makes it), 8 or 4."""
    inventory: Inventory
    """What servers ask: how far tokens are known, what is held, what would fit."""
    ending: Ending
    """How long closing takes, for servers."""
    state: CacheState
    """What all parts of the cache share, for the engine and the drop-in."""
    parts: Parts
    """For tests and benchmarks: its models, its state, the tier below memory."""
    _leasing: Leasing
    _pins: Pins
    _clearing: Clearing

    def __init__(
        self,
        model: nn.Module,
        budget: int | float | str | None = None,
        **options: Unpack[CacheOptions],
    ) -> None:
        """Makes a cache for `model`, which it does not keep alive, under `budget`: bytes, "8GB" or "60%" of the
        device's memory; by default four fifths of that memory less the weights.

        The keywords are explained in `CacheConfig`: `draft_model`, `kv`, `max_kv_size`, `keep`, `adapter`,
        `min_checkpoint_tokens`, `high_water`, `low_water`, `elastic`, `logit_tokens`, `disk`, `disk_budget`,
        `disk_mode`, `disk_daily_limit`, `tokenizer`, `label`.

        Raises ConfigError for a value that cannot be used, and Unbounded, a ConfigError, if `max_kv_size` is given for
        a model with a cache class that grows and takes no bound."""
        config = CacheConfig.of(options)
        models = config.models(model)
        form, bound = config.format(), config.bound()
        budget_bytes = (
            device.default_budget(*models) if budget is None else parse_size(budget, total_bytes=device.memory_bytes())
        )
        mx.eval([m.parameters() for m in models])
        anatomies = [survey(m, kv=form, bound=bound) for m in models]
        for anatomy in anatomies:
            anatomy.logit_tokens = config.logit_tokens
        disk = config.disk_settings()
        lock = CacheLock()
        ledger = (ElasticLedger if config.elastic else Ledger)(budget_bytes, lock.inner)
        digest = model_digest(*models)
        _assemble(self, Parts(models, anatomies, ledger, (digest, config.adapter, form.bits, bound), lock))
        try:
            _refuse_tiny(self.parts, budget_bytes)
        except ConfigError:
            self.close()
            raise
        self.kv_bits = form.bits
        self.state.min_checkpoint_tokens = config.min_checkpoint_tokens
        self.state.water = (config.low_water, config.high_water)
        if disk is not None and not self.state.uncached_reason:
            about = {"adapter": config.adapter, "tokenizer": config.tokenizer, "kv": form.bits, "bound": bound}
            about["model"] = lasting_digest(digest, *models)
            try:
                _open_tier(self, disk, about, config.label)
            except (OnefoldError, ValueError):
                self.close()
                raise

    @classmethod
    def of_layers(cls, layers: list[Any], budget: int) -> PrefixCache:
        """A cache for a model that is not known but for the caches it uses, which hold something already. Its layers
        are contiguous, and it is elastic."""
        self = cls.__new__(cls)
        lock = CacheLock()
        _assemble(self, Parts([], [read_off(layers)], ElasticLedger(budget, lock.inner), (), lock))
        return self

    @property
    def uncached_reason(self) -> str:
        """Why nothing is kept for this model; empty if it is."""
        return self.state.uncached_reason

    @property
    def model(self) -> nn.Module | None:
        return self.parts.refs[0]() if self.parts.refs else None

    @property
    def draft_model(self) -> nn.Module | None:
        return self.parts.refs[1]() if len(self.parts.refs) > 1 else None

    @property
    def max_kv_size(self) -> int | None:
        """Tokens that a conversation is bounded to; None is no bound."""
        return None if (bound := self.parts.models.anatomies[0].bound) is None else bound.max_size

    @property
    def keep(self) -> int:
        """The first tokens of a bounded conversation, which stay; 0 without a bound."""
        return 0 if (bound := self.parts.models.anatomies[0].bound) is None else bound.keep

    # -- requests -------------------------------------------------------------------------

    def lease(
        self,
        tokens: Any,
        *,
        namespace: Hashable = "",
        checkpoints: Iterable[int] = (),
        reserve_tokens: int = 0,
        after: Fetch | Sequence[Fetch] | None = None,
    ) -> Lease:
        """Open a lease on what is cached of `tokens`, with room for the rest and `reserve_tokens` more.

        `checkpoints` are positions where a later request will branch off, such as the end of the prompt as the next
        turn will render it. What is on disk of the tokens is read first, unless the caller did that: `after` is its
        `restore`, or several, or none (`[]`). Raises BudgetError if there is no room for the rest; then nothing that is
        stored was lost.
        """
        return self._leasing.lease(
            frozen(as_tokens(tokens)),  # the caller may change its own array
            namespace,
            checkpoints=checkpoints,
            reserve_tokens=reserve_tokens,
            after=after,
            owner=self,
        )

    def batch(self, leases: list[Lease], *, pooled: bool | None = None) -> Batch:
        """Rows for one decode step at a time: see `Batch`. `pooled` keeps their tails in one slab, which saves
        operations at the price of some arithmetic: by default on a GPU, and not on a CPU."""
        self.parts.refuse_closed()
        pooled = device.on_gpu() if pooled is None else pooled
        arena = Arena(self.state.store) if pooled else None
        if self.model is None:
            raise ConfigError("the model of this cache is gone")
        return Batch(self.model, self.parts.models.anatomies[0], leases, arena, self.state)

    def pin(self, tokens: Any, *, namespace: Hashable = "") -> Pin:
        """Keep the cached part of `tokens` from being evicted, until the pin is released. Raises ConfigError if nothing
        of them is cached."""
        found = as_tokens(tokens)
        with self.state.lock:
            self.parts.refuse_closed()
            node, matched = self.parts.tree(namespace).reach(found)
            if matched == 0:
                given = show_count(len(found), "token")
                raise ConfigError(f"nothing of these {given} is cached; commit them once, then pin")
            return self._pins.pin(node, self)

    def restore(self, tokens: Any, *, namespace: Hashable = "", reserve_tokens: int = 0) -> Fetch | None:
        """Begin to read what is on disk of `tokens`, for a caller that has other things to do in between: `step()` it
        until that returns False, then give it to `lease`. Returns None if nothing is worth reading. Raises BudgetError
        if there is no room for it now."""
        return self._leasing.fetch(as_tokens(tokens), namespace, reserve_tokens, owner=self)

    def flush(self, timeout: float | None = None, *, everything: bool = False) -> bool:
        """Block until all dirty data that the mode wants written is on disk: with "back" there is none before `close`,
        unless `everything` in memory is to be written now. Not from within a lease's forward. Returns False if
        `timeout` seconds were not enough, if something could not be written, or if the disk failed."""
        if self.parts.tier is None:
            return not self.parts.no_tier.failed
        until = time.monotonic() + (timeout if timeout is not None else 1e9)
        self.state.lock.refuse_elsewhere()
        with self.state.lock.inner:  # requests go on meanwhile
            return self.parts.tier.flush(everything=everything, until=until, reports=True)

    def durable(self, tokens: Any, *, namespace: Hashable = "") -> int:
        """How many of these tokens, from the first on, would survive the end of this process. Touches nothing."""
        with self.state.lock:
            self.parts.refuse_closed()
            if self.parts.tier is None:
                return 0
            path, matched = self.parts.tree(namespace).match(as_tokens(tokens))
            kv = resumable = 0
            for node in path:
                if node.below is None:
                    break
                kv = node.below.kv if kv == node.start else kv
                if node.below.known < node.end:
                    break
                if node.below.has_saved_point and node.end <= matched:
                    resumable = node.end
            return resumable if self.state.model.pointwise else max(resumable, min(kv, matched))

    def clear(self, *, disk: bool = True) -> None:
        """Drop everything that no lease holds; pins too. When it returns, the files of this model are gone from disk as
        well, in every namespace; with `disk=False` what is on disk stays, and dirty data is written first, for some
        seconds at most."""
        self._clearing.run(disk=disk)

    def set_budget(self, budget: int | float | str) -> None:
        """Change the budget while running. Frees what no longer fits; refuses what cannot be freed now. Below what a
        forward needs, requests are refused until it is raised again."""
        n_bytes = parse_size(budget, total_bytes=device.memory_bytes())
        ledger, share = self.state.ledger, 0 if self.state.ledger.elastic else device.pool_bytes(n_bytes)
        if n_bytes > 0:
            self.state.reclaim(lambda: ledger.used_bytes - ledger.spare() + share + ledger.headroom() - n_bytes)
            if mx.get_cache_memory() > device.pool_bytes(n_bytes):
                mx.clear_cache()  # here, since it takes long where many buffers were freed
        with self.state.lock:
            self.parts.refuse_closed()
            self.state.sweep()
            before = self.state.ledger.budget_bytes
            self.state.pool.set_share(min(device.pool_bytes(n_bytes), device.pool_bytes(before)))
            try:
                self.state.ledger.set_budget(n_bytes)
            except BudgetError:
                self.state.pool.set_share(device.pool_bytes(before))
                raise
            self.state.pool.set_share(device.pool_bytes(n_bytes))

    def close(self) -> None:
        """Close all leases, write dirty data, free everything, and take the attention seam out again. In a child of the
        process that made it this does nothing: neither MLX nor the folder works there."""
        self.ending.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """Tokens whose KV is stored, each counted once."""
        with self.state.lock:
            return self.state.store.owned

    def __bool__(self) -> bool:
        return True  # an empty cache is still a cache

    def __repr__(self) -> str:
        if self.state.closed:
            return "<PrefixCache, closed>"
        ledger = self.state.ledger
        held, budget = show_size(ledger.held_bytes), show_size(ledger.budget_bytes)  # closes no dropped lease
        uncached = f", uncached: {self.state.uncached_reason}" if self.state.uncached_reason else ""
        return f"<PrefixCache of {model_name(self.model)}, {held} of {budget} held{uncached}>"

    @property
    def nbytes(self) -> int:
        """Bytes of KV and states that are held now: live, stored and in checkpoints."""
        return self.inventory.held_bytes

    def stats(self) -> Stats:
        with self.state.lock:
            self.state.sweep()
            if self.parts.tier is None:
                return stats.count(self.state, self.parts.no_tier, Counter())
            return stats.count(self.state, self.parts.tier.stats(), self.parts.tier.reasons())

    def check(self) -> None:
        """Recount everything from nothing; raises IntegrityError with every finding."""
        with self.state.lock:
            if found := recount(self.state):
                raise IntegrityError(found)

    @property
    def closed(self) -> bool:
        """Whether it is closed, or being closed."""
        return self.state.closing


PrefixCache.__signature__ = CacheConfig.signature()  # type: ignore[attr-defined]


def _assemble(cache: PrefixCache, parts: Parts) -> None:
    cache.parts = parts
    cache.state = parts.state
    cache._leasing = Leasing(parts)
    cache._pins = Pins(parts.state)
    cache._clearing = Clearing(parts, cache._pins)
    cache.inventory = Inventory(parts, cache._leasing)
    cache.ending = Ending(parts, cache._clearing)


def _refuse_tiny(parts: Parts, budget_bytes: int) -> None:
    """Raises ConfigError for a budget that no forward fits, where that is known beforehand."""
    state = parts.state
    if state.ledger.elastic or state.uncached_reason or not state.store.specs:
        return
    if 0 < budget_bytes < parts.need(1, states=1):
        raise ConfigError(
            f"a budget of {show_size(budget_bytes)} has no room for a forward of this model: give at least "
            f"{show_size(parts.need(STEP))}, which is {STEP} tokens of KV and the scratch of a forward"
        )


def _open_tier(cache: PrefixCache, settings: object, about: dict[str, Any], label: str) -> None:
    """Open the tier below memory. If it cannot be used, the cache runs without. Raises ConfigError."""
    parts = cache.parts
    opened = open_tier(settings, parts.state, Identity(about, parts.models.describe(), label))
    if isinstance(opened, TierStats):
        parts.no_tier = opened
        return
    parts.tier = parts.state.nodes.tier = opened
    weakref.finalize(cache, opened.abandon)
    parts.tree("")
