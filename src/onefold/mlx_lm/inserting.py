"""Keeps the KV of layers that a server puts back: a lease's is committed, any other's is moved to a store."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from onefold.cache.memory.tokens import Tokens
from onefold.cache.model import stock
from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.request import adopting
from onefold.cache.request.lease import Lease
from onefold.errors import LeaseError, WrongThread
from onefold.mlx_lm.layers import is_ours, is_settled, lease_of
from onefold.mlx_lm.limits import Limits
from onefold.mlx_lm.models import Models
from onefold.mlx_lm.reasons import Reasons
from onefold.mlx_lm.stores import Store, Stores
from onefold.sizes import show_count, show_size


class Inserter:
    def __init__(self, stores: Stores, models: Models, limits: Limits, reasons: Reasons) -> None:
        self._stores = stores
        self._models = models
        self._limits = limits
        self._reasons = reasons

    def keep(self, key: Hashable, tokens: Tokens, layers: list[Any]) -> int:
        """Moves the layers' KV to a store. Returns how many tokens are kept; if not all, the reason is counted."""
        lease, ended = lease_of(layers)
        if lease is not None:
            store = self._stores.holding(key, lease)
            if store is None:
                self._reasons.note("another key", "these layers were fetched for another key, or from another cache")
                return 0
            self._stores.touch(store)
            return self._commit(store, lease, tokens, ended=ended)
        if any(is_ours(layer) for layer in layers):
            if all(is_ours(layer) and is_settled(layer) for layer in layers):
                self._reasons.note("already put back", "these layers were put back before")
                return 0
            self._reasons.note("layers were replaced", "some of these layers are not the ones that were fetched")
            return 0
        return self._adopt(key, tokens, layers)

    def exceeds(self, n_bytes: int, limit: int) -> bool:
        """Whether `n_bytes` are more than `limit`, which is counted."""
        if n_bytes > limit:
            self._reasons.note("larger than the limit", f"{show_size(n_bytes)} of {show_size(limit)}: it is not kept")
        return n_bytes > limit

    def _adopt(self, key: Hashable, tokens: Tokens, layers: list[Any]) -> int:
        makers = stock.models_of(layers)
        self._models.filled(key, makers)
        if makers and (models := self._models.of(key)) and makers[0] is not models[0]:
            self._reasons.note(adopting.MISFIT, "these layers were made for another model than the key's")
            return 0
        store = self._stores.for_layers(key, layers)
        if store is None or self._outgrows(store.cache, len(tokens)):
            return 0
        if store.cache.kv != self._limits.kv:
            self._reasons.note("another format", f"KV in 16 bits was put in, and is not kept: kv={self._limits.kv}")
            return 0
        self._stores.touch(store)
        kept, reason = store.cache.inventory.adopt(tokens, layers)
        if reason:
            self._reasons.note(reason, f"of {show_count(len(tokens), 'token')} put in, {kept} could be kept")
        return kept

    def _commit(self, store: Store, lease: Lease, tokens: Tokens, *, ended: bool) -> int:
        if lease.closed:
            self._reasons.note("already put back", "these layers were put back before")
            return 0
        held = lease.agreement(tokens)
        if not held:
            return self._misfit(store, lease, "the layers hold none of the tokens that were put back", ended=ended)
        if held < len(tokens):
            self._reasons.note(adopting.LONGER, f"{held} of {show_count(len(tokens), 'token')} could be kept")
        if self._outgrows(store.cache, held):
            if ended:
                store.discard(lease)
            return 0
        try:
            lease.commit(tokens[:held], close=ended)
        except WrongThread as error:
            self._reasons.note("another thread", str(error))
            return 0
        except LeaseError as error:
            return self._misfit(store, lease, str(error), ended=ended)
        return min(held, store.cache.inventory.matched(tokens[:held]))

    def _misfit(self, store: Store, lease: Lease, why: str, *, ended: bool) -> int:
        """Keeps nothing of the lease. The lease of a request that still runs stays open: closing it under a batch
        would end the server's thread."""
        self._reasons.note("layers do not fit the tokens", why)
        if ended:
            store.discard(lease)
        return 0

    def _outgrows(self, cache: PrefixCache, n_tokens: int) -> bool:
        known = cache.inventory
        return self.exceeds(n_tokens * known.token_bytes, min(self._limits.max_bytes, known.budget_bytes))
