"""Keeps the entries of a prompt cache in step with the stored KV, and both within the limits.

- Whole entries are evicted first, in mlx-lm's order; then tails of stored KV, least recently used store first.
- Stored KV is evicted for running requests, where that brings both below the limit.
- An entry of which nothing is stored but what other entries have too is no entry any more.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from onefold.cache.memory.tokens import Tokens
from onefold.mlx_lm.entries import TYPES, Entries, Entry
from onefold.mlx_lm.limits import Limits
from onefold.mlx_lm.reasons import Reasons
from onefold.mlx_lm.stores import Stores


class Eviction:
    def __init__(self, entries: Entries, stores: Stores, limits: Limits, reasons: Reasons) -> None:
        self._entries = entries
        self._stores = stores
        self._limits = limits
        self._reasons = reasons

    def enter(
        self,
        key: Hashable,
        tokens: Tokens,
        cache_type: str,
        whole: list[Any] | None = None,
        nbytes: int = 0,
    ) -> None:
        """Adds an entry, in place of the prefixes that it makes superfluous, and evicts entries beyond `max_size`."""
        entry = self._entries.add(key, tokens, cache_type, whole, nbytes)
        if entry.is_trimmable:
            for prefix in self._entries.prefixes(entry):
                if (prefix.whole is None) == (whole is None):
                    self._entries.remove(prefix)
        while len(self._entries) > self._limits.max_size:
            self.evict_oldest()

    def evict_oldest(self) -> None:
        """Evicts the entry that is first in mlx-lm's order, with the KV that no other entry has."""
        self._evict(self._entries.oldest())

    def apply_byte_limit(self) -> None:
        """Evicts stored KV for running requests, where that brings both below the limit."""
        live = self._stores.held_bytes - self._stores.stored_bytes
        limit = self._limits.max_bytes
        left = limit - live if live <= limit else limit
        self._reasons.attempt(lambda: self.shrink(left), None)

    def shrink(self, n_bytes: int) -> None:
        """Evicts until at most `n_bytes` are stored that no request uses: whole entries first, in their order, then
        tails."""
        while (whole := self._whole_bytes) + self._stores.stored_bytes > n_bytes and whole:
            self.evict_oldest()
        excess = self._stores.stored_bytes - n_bytes
        for store in sorted(self._stores.all(), key=lambda s: s.used):
            if excess <= 0:
                break
            before = store.cache.inventory.stored_bytes
            store.cache.inventory.shrink(max(0, before - excess))
            excess -= before - store.cache.inventory.stored_bytes
        self._notice_evictions()

    def free(self, n_bytes: int) -> int:
        """Evicts `n_bytes` of stored KV, or all there is. Returns the bytes that were freed."""
        before = self._stores.stored_bytes
        self.shrink(max(0, self._whole_bytes + before - n_bytes))
        return before - self._stores.stored_bytes

    def catch_up(self) -> None:
        """Makes entries of what dropped requests left, and removes entries whose KV was evicted."""
        for key, store in [(key, store) for key, stores in self._stores.by_key() for store in stores]:
            self._reasons.attempt(store.cache.state.sweep, None)
            while store.left_behind:
                tokens = store.left_behind.pop()
                known = store.cache.inventory.matched(tokens)
                if known > self._entries.common(key, tokens):
                    self.enter(key, tokens[:known], TYPES[0])
        self._notice_evictions()

    @property
    def _whole_bytes(self) -> int:
        return sum(e.nbytes for e in self._entries)

    def _evict(self, entry: Entry) -> None:
        tokens = entry.tokens
        self._entries.remove(entry)
        if entry.whole is None and len(tokens):
            keep = self._entries.common(entry.key, tokens)
            for store in self._stores.of(entry.key):
                store.cache.inventory.forget(tokens, keep)

    def _notice_evictions(self) -> None:
        """Shortens or removes the entries whose KV was evicted since the last call."""
        stores = self._stores.all()
        counts = [store.cache.inventory.evicted_tokens for store in stores]
        if counts == [store.evicted for store in stores]:
            return
        for store, n in zip(stores, counts, strict=True):
            store.evicted = n
        for entry in [e for e in self._entries if e.whole is None]:
            tokens = entry.tokens
            known = max((s.cache.inventory.matched(tokens) for s in self._stores.of(entry.key)), default=0)
            if known < len(tokens):
                self._entries.shorten(entry, known)
