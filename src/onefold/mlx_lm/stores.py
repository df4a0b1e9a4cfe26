"""The KV of a prompt cache: a store for each key and each format of KV.

- A store whose model is known has a table: its layers are read in place, in batches too. A store that knows only layers
  hands out one reader's layers, and copies for others.
- When a key's model becomes known, the KV that was put in before moves to the model's own store.
- When a key gets another model, the old model's store and its entries are dropped.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import mlx.nn as nn

from onefold.cache.memory import device
from onefold.cache.memory.tokens import Tokens
from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.request.lease import Lease
from onefold.errors import Unstorable
from onefold.mlx_lm.entries import Entries
from onefold.mlx_lm.limits import Limits
from onefold.mlx_lm.models import Models
from onefold.mlx_lm.reasons import Reasons
from onefold.mlx_lm.stand_ins import Table

log = logging.getLogger("onefold")

BeforeAlone = Callable[[Lease, int], None]
"""Called before each forward of a row that is in no batch, with the number of its tokens. May raise BudgetError."""


class Store:
    """The KV of one key in one format. With a table, its model is known and its layers are served in batches."""

    def __init__(self, cache: PrefixCache, table: Table | None) -> None:
        self.cache = cache
        self.table = table
        self.evicted = 0
        """Tokens that the cache had evicted when they were last counted."""
        self.used = 0
        """When it was last used, in calls."""
        self.left_behind: list[Tokens] = []
        """The tokens of requests that the server dropped."""
        cache.state.on_dropped = lambda lease: self.left_behind.append(lease.tokens)

    def discard(self, lease: Lease) -> None:
        """Keeps nothing of a request. Its tokens are matched again later, because their entry may be gone."""
        lease.discard()
        self.left_behind.append(lease.tokens)

    def belongs_to(self, *models: nn.Module | None) -> bool:
        """Whether these are the models whose KV this is, or the same models unloaded and loaded again."""
        own = [m for m in (self.cache.model, self.cache.draft_model) if m is not None]
        if len(models) == 1 and own and (models[0] is None or any(models[0] is m for m in own)):
            return True
        if len(own) == len(models) and all(a is b for a, b in zip(own, models, strict=True)):
            return True
        return self.cache.inventory.rebind(*(m for m in models if m is not None))


class Stores:
    def __init__(
        self, entries: Entries, models: Models, reasons: Reasons, limits: Limits, before_alone: BeforeAlone
    ) -> None:
        self._entries = entries
        self._models = models
        self._reasons = reasons
        self._limits = limits
        self._before_alone = before_alone
        self._by_key: dict[Hashable, list[Store]] = {}
        self._uncached: dict[Hashable, tuple[str, weakref.ref[nn.Module]]] = {}
        """Keys whose model runs uncached, and why."""
        self._clock = itertools.count(1)

    # -- all of them ---------------------------------------------------------------------------

    def all(self) -> list[Store]:
        return [store for stores in self._by_key.values() for store in stores]

    def of(self, key: Hashable) -> list[Store]:
        return self._by_key.get(key, [])

    def by_key(self) -> list[tuple[Hashable, list[Store]]]:
        return list(self._by_key.items())

    def caches(self) -> list[PrefixCache]:
        return [store.cache for store in self.all()]

    @property
    def held_bytes(self) -> int:
        """The bytes of all KV, that of running requests included."""
        return sum(cache.inventory.held_bytes for cache in self.caches())

    @property
    def stored_bytes(self) -> int:
        """The bytes of KV that no request uses."""
        return sum(cache.inventory.stored_bytes for cache in self.caches())

    def touch(self, store: Store) -> None:
        """Makes a store the most recently used one."""
        store.used = next(self._clock)

    def close(self) -> None:
        for cache in self.caches():
            cache.close()
        self._by_key.clear()

    # -- which one -------------------------------------------------------------------------------

    def nearest(self, key: Hashable, tokens: Tokens) -> Store | None:
        """Returns the key's store that matches most of the tokens. A key has several only if its KV came in several
        formats. None if no store can serve the tokens."""
        if self._models.is_assigned(key) and (models := self._models.of(key)):
            self.served(key, models)
        latest = self._models.latest(key)
        stores = [s for s in self.of(key) if s.table is None or s.belongs_to(latest)]
        running = [s for s in stores if s.table is not None and s.cache.inventory.open_leases]
        stores = running or stores  # all rows of one batch have one format
        known = [store.cache.inventory.matched(tokens) for store in stores]
        if any(known):
            return stores[known.index(max(known))]
        # no match: where formats differ, mlx-lm makes the layers that it wants
        return stores[0] if len(stores) == 1 and stores[0].table is not None else None

    def holding(self, key: Hashable, lease: Lease) -> Store | None:
        """Returns the key's store that opened this lease, or None."""
        return next((s for s in self.of(key) if s.cache.state is lease.state), None)

    def for_layers(self, key: Hashable, layers: list[Any]) -> Store | None:
        """Returns the store for layers of this format: the model's own, or one made from the layers. None if their
        model runs uncached."""
        models = self._models.of(key)
        if models:
            self.served(key, models)
        if key in self._uncached:
            self._reasons.note(self._uncached[key][0], "this model runs uncached")
            return None
        for store in self.of(key):
            if store.cache.inventory.fits(layers):
                return store
        budget = max(1, min(self._limits.max_bytes, device.default_budget()))
        cache = PrefixCache.of_layers(layers, budget)
        if cache.uncached_reason:
            self._reasons.note(cache.uncached_reason, "this model runs uncached")
            cache.close()
            return None
        store = Store(cache, None)
        self._by_key.setdefault(key, []).append(store)
        return store

    def served(self, key: Hashable, models: list[nn.Module]) -> Store | None:
        """Returns the store whose layers these models read in place, made if needed. None if they run uncached."""
        for store in [s for s in self.of(key) if s.table is not None]:
            if store.belongs_to(*models):
                return store
            self._drop(key, store)
        if key in self._uncached:
            if self._uncached[key][1]() is models[0]:
                return None
            del self._uncached[key]
        cache = self._cache_for(models)
        if cache.uncached_reason:
            self._reasons.note(cache.uncached_reason, "this model runs uncached")
            cache.close()
            self._uncached[key] = (cache.uncached_reason, weakref.ref(models[0]))
            return None
        store = Store(cache, Table(cache, self._before_alone))
        for known in [s for s in self.of(key) if self._takes_over(store, s, key)]:
            self._by_key[key].remove(known)
            known.cache.close()
        self._by_key.setdefault(key, []).insert(0, store)
        return store

    def _cache_for(self, models: list[nn.Module]) -> PrefixCache:
        budget = min(self._limits.max_bytes, device.default_budget(*models))
        try:
            return PrefixCache(
                models[0],
                max(1, budget),
                draft_model=models[1] if len(models) > 1 else None,
                elastic=True,
                low_water=1.0,
                high_water=1.0,
                max_kv_size=self._limits.max_kv_size,
                keep=self._limits.keep,
                kv=self._limits.kv,
            )
        except Unstorable as error:
            log.error("every request for this model is refused: %s", error)
            raise

    def _drop(self, key: Hashable, store: Store) -> None:
        """Closes a store whose key belongs to another model now, and removes its entries."""
        self._by_key[key].remove(store)
        store.cache.close()
        for entry in [e for e in self._entries if e.key == key and e.whole is None]:
            self._entries.remove(entry)

    def _takes_over(self, store: Store, known: Store, key: Hashable) -> bool:
        """Moves KV that was put in before the model was known to the model's own store. False if its format differs:
        then it stays where it is."""
        for entry in [e for e in self._entries if e.key == key and e.whole is None]:
            tokens = entry.tokens
            with known.cache.lease([*tokens.tolist(), 0]) as lease:
                if not store.cache.inventory.fits(lease.layers):
                    return False
                if lease.cached == len(tokens):
                    store.cache.inventory.adopt(tokens, lease.layers)
        return True
