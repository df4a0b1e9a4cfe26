"""Finds the layers that hold the longest known part of a request's tokens."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from onefold.cache.memory.tokens import Tokens
from onefold.cache.request.lease import Lease
from onefold.mlx_lm import layers
from onefold.mlx_lm.entries import Entries
from onefold.mlx_lm.stores import Store, Stores
from onefold.mlx_lm.tokens import image_start, inside_image


class Fetcher:
    def __init__(self, entries: Entries, stores: Stores) -> None:
        self._entries = entries
        self._stores = stores

    def fetch(self, key: Hashable, tokens: list[int], found: Tokens) -> tuple[list[Any], list[int]] | None:
        """Returns the layers and the tokens that they do not hold, or None if nothing is known of the tokens and the
        key's model is not known either. `found` is `tokens` as an array."""
        nearest = self._entries.nearest(key, found)
        entry, longer = nearest.exact or nearest.shorter, nearest.longer
        if longer is not None and nearest.common > (entry.node.end if entry else 0) and longer.is_trimmable:
            entry = longer
        if entry is not None:
            self._entries.touch(entry)
            if entry.whole is not None:
                return layers.copied(entry.whole, entry.node.end, nearest.common, tokens)
        store = self._stores.nearest(key, found) if len(found) else None
        if store is None:
            return None
        self._stores.touch(store)
        lease = store.cache.lease(found)
        if inside_image(found, lease.cached):
            lease = self._before_image(store, lease)
        if store.table is not None:
            return store.table.serve(lease), tokens[lease.cached :]
        if lease.cached:
            return lease.layers, tokens[lease.cached :]
        lease.cancel()
        return None

    def _before_image(self, store: Store, lease: Lease) -> Lease:
        """Opens the lease again, resumed before the image that it ends in. An image is cached whole or not at all: a
        server feeds the rest of an image that was cut as plain tokens."""
        tokens, start = lease.tokens, image_start(lease.tokens, lease.cached)
        lease.cancel()
        store.cache.inventory.forget(tokens, start)
        again = store.cache.lease(tokens)
        if again.cached > start:  # other requests share the image, or use it now
            again.cancel()
            again = store.cache.lease(tokens, namespace="an image that was cut")
        return again
