"""`PrefixCache`, the public class: opens leases, stores the KV that they computed, and keeps it under one budget.

Continue is a move, share is a borrow, commit is a move. One lock guards the bookkeeping: any thread may lease, commit
and read statistics. A lease may change threads between two forwards.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any, Unpack

import mlx.nn as nn

from onefold.cache import stats
from onefold.cache.budget import Budget
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
from onefold.cache.model import linear, stock
from onefold.cache.model.fingerprint import lasting_digest, model_digest, model_name
from onefold.cache.model.formats.registry import kv_of
from onefold.cache.model.survey import read_off, survey
from onefold.cache.parts import Parts
from onefold.cache.pins import Pin, Pins
from onefold.cache.request.arena import Arena
from onefold.cache.request.batch import Batch
from onefold.cache.request.lease import Lease
from onefold.cache.stats import Stats
from onefold.cache.tiers.identity import Identity
from onefold.cache.tiers.registry import open_tier
from onefold.cache.view import View
from onefold.errors import AddedTo, ConfigError, IntegrityError
from onefold.options import shown_as
from onefold.sizes import parse_size, show_count, show_size

log = logging.getLogger("onefold")

AUTO = "auto"
"""The budget that follows the machine."""


class PrefixCache:
    """Holds the KV of many conversations with one model, each token's once."""

    kv = "16"
    """The format of stored KV, as `CacheConfig.kv` names it."""
    inventory: Inventory
    """Queries for servers: how many tokens are known, held, or would fit."""
    view: View
    """What is held, node by node, for people."""
    budget: Budget
    """The memory budget, which may follow the machine. Servers call its `look` between two steps."""
    ending: Ending
    """Closes the cache. Servers ask it how long that may take."""
    state: CacheState
    """The state that all parts of the cache share, for the engine and the drop-in."""
    parts: Parts
    """For tests and benchmarks: its models, its state, the tier below memory."""
    _leasing: Leasing
    _pins: Pins
    _clearing: Clearing

    @shown_as(CacheConfig.signature())
    def __init__(
        self,
        model: nn.Module,
        budget: int | float | str | None = None,
        **options: Unpack[CacheOptions],
    ) -> None:
        """Makes a cache for `model`, which it does not keep alive, under `budget`: bytes, "8GB" or "60%" of the
        device's memory. The default, None or "auto", is four fifths of that memory less the weights, and follows the
        machine: it is lowered while memory is short (see `Budget`).

        The keywords are explained in `CacheConfig`: `draft_model`, `kv`, `max_kv_size`, `keep`, `adapter`,
        `min_checkpoint_tokens`, `high_water`, `low_water`, `elastic`, `logit_tokens`, `disk`, `disk_budget`,
        `disk_mode`, `disk_daily_limit`, `remote`, `tokenizer`, `label`.

        On a GPU, a quantised format is tried and its kernels are compiled, which takes some seconds.

        Raises ConfigError for a value that cannot be used, and Unbounded, a ConfigError, if `max_kv_size` is given for
        a model with a cache class that grows and takes no bound."""
        config = CacheConfig.of(options)
        models = config.models(model)
        form, bound = config.format(), config.bound()
        given = None if budget is None or budget == AUTO else parse_size(budget, total_bytes=device.memory_bytes())
        budget_bytes = device.default_budget(*models) if given is None else given
        stock.evaluate_kept(models)
        anatomies = [survey(m, kv=form, bound=bound) for m in models]
        for anatomy in anatomies:
            anatomy.logit_tokens = config.logit_tokens
            if not form.plain:
                anatomy.compile_kernels()  # MLX's own operations take ten times as long to read such KV
        below = config.tier_settings()
        lock = CacheLock()
        ledger = (ElasticLedger if config.elastic else Ledger)(budget_bytes, lock.inner)
        digest = model_digest(*models)
        tag = form.tag(anatomies[0].made_type)
        _assemble(self, Parts(models, anatomies, ledger, (digest, config.adapter, tag, bound), lock))
        self.parts.log_limits()
        with contextlib.ExitStack() as undo:
            undo.push(self.__exit__)
            if given is None:
                self.budget = Budget(self.parts, self.inventory, device.gauge())
                _announce(self.budget, models)
            else:
                _refuse_tiny(self.parts, budget_bytes)
            self.kv = str(form)
            self.state.min_checkpoint_tokens = config.min_checkpoint_tokens
            self.state.water = (config.low_water, config.high_water)
            if below is not None and not self.state.uncached_reason:
                about = {"adapter": config.adapter, "tokenizer": config.tokenizer, "kv": tag, "bound": bound}
                about["model"] = lasting_digest(digest, *models)
                names = partial(kv_of, anatomies[0].made_type)
                _open_tier(self, below, Identity(about, self.parts.models.describe(), config.label, names))
            undo.pop_all()

    @classmethod
    def of_layers(cls, layers: list[Any], budget: int) -> PrefixCache:
        """Returns a cache for an unknown model, made from caches of that model that hold something. Its layers are
        contiguous, and its budget is elastic."""
        self = cls.__new__(cls)
        lock = CacheLock()
        _assemble(self, Parts([], [read_off(layers)], ElasticLedger(budget, lock.inner), (), lock))
        self.parts.log_limits()
        return self

    @property
    def uncached_reason(self) -> str:
        """Why KV of this model is not cached; empty if it is."""
        return self.state.uncached_reason

    @property
    def model(self) -> nn.Module | None:
        return self.parts.refs[0]() if self.parts.refs else None

    @property
    def draft_model(self) -> nn.Module | None:
        return self.parts.refs[1]() if len(self.parts.refs) > 1 else None

    @property
    def max_kv_size(self) -> int | None:
        """The most tokens of a conversation that are kept; None if there is no bound."""
        return None if (bound := self.parts.models.anatomies[0].bound) is None else bound.max_size

    @property
    def keep(self) -> int:
        """How many of its first tokens a bounded conversation always keeps; 0 without a bound."""
        return 0 if (bound := self.parts.models.anatomies[0].bound) is None else bound.keep

    # -- requests -------------------------------------------------------------------------

    def lease(
        self,
        tokens: Any,
        *,
        namespace: Hashable = "",
        checkpoints: Iterable[int] = (),
        reserve_tokens: int = 0,
        after: Fetch | Iterable[Fetch] | None = None,
    ) -> Lease:
        """Open a lease on the cached prefix of `tokens`, with room for the rest and `reserve_tokens` more.

        `checkpoints` are positions where a later request will branch off, such as the end of the prompt as the next
        turn will render it. KV of the tokens that is on disk is read first, unless the caller did that with `restore`:
        `after` is the result, or a list of results, which may be empty. Raises BudgetError if there is no room for the
        rest, TokenError for invalid tokens, and ConfigError for other invalid arguments or if the cache is closed.
        """
        self.budget.look()
        return self._leasing.lease(
            frozen(as_tokens(tokens)),  # the caller may change its own array
            namespace,
            checkpoints=checkpoints,
            reserve_tokens=reserve_tokens,
            after=after,
            owner=self,
        )

    def batch(self, leases: list[Lease], *, pooled: bool = True) -> Batch:
        """Returns a batch that decodes one token per row and step: see `Batch`. With `pooled`, the default, the rows'
        newest tokens lie in one slab, which needs fewer operations. On a GPU the first call for a model tries and
        compiles its kernels, which takes some seconds."""
        self.parts.refuse_closed()
        arena = Arena(self.state.store, self.state.placement) if pooled else None
        if self.model is None:
            raise ConfigError("the model of this cache was deleted: keep a reference to it while the cache is open")
        anatomy = self.parts.models.anatomies[0]
        anatomy.compile_kernels()
        linear.compile_kernels(self.model)
        return Batch(self.model, anatomy, leases, arena, self.state)

    def pin(self, tokens: Any, *, namespace: Hashable = "") -> Pin:
        """Keep the cached prefix of `tokens` in memory until the pin is released. Raises ConfigError if no token of
        them is cached."""
        found = as_tokens(tokens)
        with self.state.lock:
            self.parts.refuse_closed()
            node, matched = self.parts.tree(namespace).reach(found)
            if matched == 0:
                given = show_count(len(found), "token")
                raise ConfigError(f"no prefix of these {given} is cached: commit them first, then pin")
            return self._pins.pin(node, self)

    def restore(self, tokens: Any, *, namespace: Hashable = "", reserve_tokens: int = 0) -> Fetch | None:
        """Begin to read KV of `tokens` from disk in steps, for a caller that does other work in between: call `step()`
        until it returns False, then pass the result to `lease`. Returns None if nothing is worth reading. Raises
        BudgetError if there is no room for it now."""
        return self._leasing.fetch(as_tokens(tokens), namespace, reserve_tokens, owner=self)

    def flush(self, timeout: float | None = None, *, everything: bool = False) -> bool:
        """Block until all dirty data that is due is on disk, and all that was written survives a power loss. In
        write-back mode none is due before `close`, except with `everything`, which writes all dirty data now. Do not
        call it during a forward. Returns False if `timeout` seconds were not enough, if something could not be written
        or flushed, or if the disk failed."""
        if self.parts.tier is None:
            return not self.parts.no_tier.failed
        until = time.monotonic() + (timeout if timeout is not None else 1e9)
        self.state.lock.refuse_elsewhere()
        with self.state.lock.inner:  # so that requests continue meanwhile
            return self.parts.tier.flush(everything=everything, until=until, reports=True)

    def durable(self, tokens: Any, *, namespace: Hashable = "") -> int:
        """Returns how many of these tokens, from the first on, would survive the end of this process; on macOS a power
        loss may take those of the last seconds before a `flush` returned True. Does not count as a use."""
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
            return resumable if self.state.model.needs_checkpoints else max(resumable, min(kv, matched))

    def clear(self, *, disk: bool = True, pins: bool = True) -> None:
        """Drop everything that no lease holds, and all pins; with `pins=False` what is pinned stays. Also deletes the
        files of this model from disk, in every namespace; with `disk=False` they stay, and dirty data is written first,
        for at most some seconds."""
        self._clearing.run(disk=disk, pins=pins)

    def set_budget(self, budget: int | float | str) -> None:
        """Change the budget while running. Evicts what no longer fits; raises BudgetError if that is not possible now.
        With a budget below what a forward needs, requests are refused until it is raised again. A budget that followed
        the machine stays as it is set from now on."""
        self.budget.fix(parse_size(budget, total_bytes=device.memory_bytes()))

    def close(self) -> None:
        """Close all leases, write dirty data so that it survives a power loss, free everything, and remove the
        attention seam. Does nothing in a child of the process that made the cache: neither MLX nor the folder works
        there."""
        self.ending.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with AddedTo(error):
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
        held, budget = show_size(ledger.held_bytes), show_size(ledger.budget_bytes)  # without closing dropped leases
        uncached = f", uncached: {self.state.uncached_reason}" if self.state.uncached_reason else ""
        return f"<PrefixCache of {model_name(self.model)}, {held} of {budget} held{uncached}>"

    @property
    def nbytes(self) -> int:
        """The bytes of KV and states that the cache holds now: live, stored and in checkpoints."""
        return self.inventory.held_bytes

    def stats(self) -> Stats:
        with self.state.lock:
            self.state.sweep()
            if self.parts.tier is None:
                return stats.count(self.state, self.parts.no_tier, Counter())
            return stats.count(self.state, self.parts.tier.stats(), self.parts.tier.reasons())

    def check(self) -> None:
        """Recount everything from scratch. Raises IntegrityError with every finding."""
        with self.state.lock:
            if found := recount(self.state):
                raise IntegrityError(found)

    @property
    def closed(self) -> bool:
        """Whether the cache is closed, or being closed."""
        return self.state.closing


def empty_twin(cache: PrefixCache) -> PrefixCache:
    """Returns an empty cache for the same models, with the same settings and budget and without a tier. Nothing that it
    does shows in the first one. Close it. Raises ConfigError if the first one is closed, or its model was deleted."""
    cache.parts.refuse_closed()
    models = [m for ref in cache.parts.refs if (m := ref()) is not None]
    if len(models) < len(cache.parts.models.anatomies):
        raise ConfigError("the model of this cache was deleted: keep a reference to it while the cache is open")
    made, lock, ledger = PrefixCache.__new__(PrefixCache), CacheLock(), cache.state.ledger
    own = type(ledger)(ledger.budget_bytes, lock.inner)
    _assemble(made, Parts(models, cache.parts.models.anatomies, own, cache.parts.form, lock))
    made.kv = cache.kv
    made.state.min_checkpoint_tokens = cache.state.min_checkpoint_tokens
    made.state.water = cache.state.water
    return made


def _assemble(cache: PrefixCache, parts: Parts) -> None:
    cache.parts = parts
    cache.state = parts.state
    cache._leasing = Leasing(parts)
    cache._pins = Pins(parts.state)
    cache._clearing = Clearing(parts, cache._pins)
    cache.inventory = Inventory(parts, cache._leasing)
    cache.view = View(parts, cache._pins)
    cache.ending = Ending(parts, cache._clearing)
    cache.budget = Budget(parts, cache.inventory, None)


def _announce(budget: Budget, models: list[nn.Module]) -> None:
    """Raise an automatic budget that the weights leave too little for, and log what it is and what it does."""
    if budget.raise_to_least():
        least = budget.whole_bytes
        log.warning(
            "the budget is %s, the least for a conversation, and memory may be swapped. %s",
            show_size(least),
            device.way_out(device.weight_bytes(*models), least),
        )
    follows = "is lowered while memory is short" if budget.follows else "does not change"
    log.info("the automatic budget is %s, and %s", show_size(budget.whole_bytes), follows)


def _refuse_tiny(parts: Parts, budget_bytes: int) -> None:
    """Raises ConfigError if the budget has no room for a forward, as far as that is known in advance."""
    state = parts.state
    if state.ledger.elastic or state.uncached_reason or not state.store.specs:
        return
    if 0 < budget_bytes < parts.need(1, states=1):
        raise ConfigError(
            f"a budget of {show_size(budget_bytes)} has no room for a forward of this model: give at least "
            f"{show_size(parts.need(STEP))}, for {STEP} tokens of KV and the scratch of a forward"
        )


def _open_tier(cache: PrefixCache, settings: object, identity: Identity) -> None:
    """Open the tier below memory. If it cannot be used, the cache runs without one. Raises ConfigError."""
    parts = cache.parts
    opened = open_tier(settings, parts.state, identity)
    if isinstance(opened, TierStats):
        parts.no_tier = opened
        return
    parts.tier = parts.state.nodes.tier = opened
    weakref.finalize(cache, opened.abandon)
    parts.tree("")
