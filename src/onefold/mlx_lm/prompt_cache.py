"""A drop-in for mlx-lm's `LRUPromptCache`, for `mlx_lm.server` and other programs that use that class.

    from onefold.mlx_lm import LRUPromptCache
    ResponseGenerator(model_provider, LRUPromptCache(max_size=10, max_bytes=8 << 30))

`install()` puts it in the place of mlx-lm's class in the whole process.

- It has the same constructor and methods. Behind them each token's KV is held once: a fetch moves KV that no other
  request uses, and borrows KV that another one does. A request that never puts its layers back loses nothing stored.
- A key's model is given by the caller (`model=`, `learn`), or observed when mlx-lm makes caches for it, in its server,
  in its batches or for a caller's own loop. The model's layers are then read in place, in batches too. Caches of an
  unknown model are kept contiguous, and a second reader gets a copy.
- `max_bytes` limits all KV, that of running requests included. Stored KV is evicted for them; they are not refused.
- `device_limit` limits weights and KV on the device. A request that does not fit is refused before it is allocated.
- KV that cannot be kept soundly is not kept: `reasons` counts why, and the log names each reason once.

This file is the public class. Its parts are in the other files of this package.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Hashable
from typing import Any

import mlx.nn as nn

from onefold.cache.model import stock
from onefold.cache.model.kinds.registry import opaque
from onefold.cache.request.lease import Lease
from onefold.errors import ConfigError, Unstorable
from onefold.mlx_lm.admission import Admission
from onefold.mlx_lm.batches import BatchRows
from onefold.mlx_lm.entries import TYPES, Entries
from onefold.mlx_lm.eviction import Eviction
from onefold.mlx_lm.fetching import Fetcher
from onefold.mlx_lm.inserting import Inserter
from onefold.mlx_lm.limits import DEVICE_LIMIT, UNLIMITED, Limits, device_bytes
from onefold.mlx_lm.models import ModelObserver, Models, checked_models
from onefold.mlx_lm.reasons import Reasons
from onefold.mlx_lm.room import Room
from onefold.mlx_lm.stores import BeforeAlone, Stores
from onefold.mlx_lm.tokens import TokenReader
from onefold.sizes import show_count, show_size


class LRUPromptCache:
    def __init__(
        self,
        max_size: int = 10,
        max_bytes: int | float | str | None = UNLIMITED,
        *,
        model: nn.Module | None = None,
        draft_model: nn.Module | None = None,
        max_kv_size: int | None = None,
        keep: int = 4,
        kv: str | int = "16",
        device_limit: int | float | str | None = DEVICE_LIMIT,
    ) -> None:
        """Raises ConfigError for a value that cannot be used.

        `max_bytes` may also be a size such as "8GB" or "60%"; None is no limit. Negative numbers are zero, as in
        mlx-lm: nothing is kept then.

        `model`, with `draft_model` if there is one, is the model of every key that `learn` was not called for. Neither
        is kept alive.

        `max_kv_size` bounds each conversation whose model is known: the layers of full attention become rings of so
        many tokens, the first `keep` of which stay. `kv` is the format in which their KV is held (`CacheConfig.kv`);
        requests for a model that it cannot store raise Unstorable, a ConfigError. `device_limit` is the share or size
        of the device's memory that weights and KV may take together; None is no limit. Stored KV is evicted before a
        request is refused. A request that still does not fit is refused with BudgetError, and a row that cannot grow is
        ended."""
        self._limits = Limits.of(max_size, max_bytes, max_kv_size, keep, kv)
        if draft_model is not None and model is None:
            raise ConfigError("draft_model requires model=: a draft's layers follow the target's")
        self._closed = False
        self._lock = threading.RLock()
        self._reasons = Reasons()
        self._entries = Entries()
        self.models = Models()
        self._tokens = TokenReader(self._reasons)
        self._stores = Stores(self._entries, self.models, self._reasons, self._limits, _before_alone(self))
        self._eviction = Eviction(self._entries, self._stores, self._limits, self._reasons)
        self._fetcher = Fetcher(self._entries, self._stores)
        self._inserter = Inserter(self._stores, self.models, self._limits, self._reasons)
        room = Room(device_bytes(device_limit))
        self._admission = Admission(room, self._stores, self._eviction, self._reasons, self._lock)
        if model is not None:
            self.models.assign_default(checked_models(model, draft_model))
        self._rows = BatchRows(self.models, self._stores, self._admission, self._tokens, self._reasons, self._lock)
        observer = ModelObserver(self._rows)
        stock.listen(observer)
        self._finalizer = weakref.finalize(self, stock.unlisten, observer)

    # -- limits --------------------------------------------------------------------------------

    @property
    def max_size(self) -> int:
        """The most entries that are kept."""
        return self._limits.max_size

    @max_size.setter
    def max_size(self, n: int) -> None:
        self._limits.max_size = n

    @property
    def max_bytes(self) -> int:
        """The most bytes of KV, that of running requests included."""
        return self._limits.max_bytes

    @max_bytes.setter
    def max_bytes(self, n: int) -> None:
        self._limits.max_bytes = n

    @property
    def max_kv_size(self) -> int | None:
        """The most tokens that a conversation's layers hold; None is no bound."""
        return self._limits.max_kv_size

    @max_kv_size.setter
    def max_kv_size(self, n: int | None) -> None:
        self._limits.max_kv_size = n

    @property
    def kv(self) -> str:
        """The format in which KV is held."""
        return self._limits.kv

    @property
    def keep(self) -> int:
        """The first tokens of a bounded conversation, which always stay."""
        return self._limits.keep

    @keep.setter
    def keep(self, n: int) -> None:
        self._limits.keep = n

    @property
    def device_limit(self) -> int | None:
        """Bytes that weights and KV together may take; None is no limit."""
        return self._admission.room.limit_bytes

    @device_limit.setter
    def device_limit(self, limit: int | float | str | None) -> None:
        self._admission.room.limit_bytes = device_bytes(limit)

    # -- contents ------------------------------------------------------------------------------

    def __len__(self) -> int:
        with self._lock:
            self._eviction.catch_up()
            return len(self._entries)

    def __repr__(self) -> str:
        if self._closed:
            return "<LRUPromptCache, closed>"
        with self._lock:
            entries = len(self._entries)  # settles nothing
            tokens = sum(n for by_type in self._entries.own_tokens().values() for n in by_type.values())
        limit = "" if self.max_bytes >= UNLIMITED else f", at most {show_size(self.max_bytes)}"
        return f"<LRUPromptCache, {entries} of {self.max_size} entries, {show_count(tokens, 'token')}{limit}>"

    @property
    def reasons(self) -> Counter[str]:
        """Counts why something was not kept, or not all of it."""
        return self._reasons.counts

    @property
    def nbytes(self) -> int:
        """Bytes of KV held now, that of running requests included."""
        with self._lock:
            self._eviction.catch_up()
            return sum(e.nbytes for e in self._entries) + self._stores.held_bytes

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Returns `n_sequences` and `n_bytes` of each cache type. KV that several types share is divided by tokens."""
        with self._lock:
            self._eviction.catch_up()
            found = {t: {"n_sequences": len(self._entries.of_type(t)), "n_bytes": 0} for t in TYPES}
            for entry in self._entries:
                found[entry.cache_type]["n_bytes"] += entry.nbytes
            counted = self._entries.own_tokens()
            for key, stores in self._stores.by_key():
                left = sum(store.cache.inventory.held_bytes for store in stores)
                by_type = counted.get(key, {})
                tokens = sum(by_type.values())
                for t, n in by_type.items():
                    share = left * n // tokens if tokens else 0
                    found[t]["n_bytes"] += share
                    left, tokens = left - share, tokens - n
                found[TYPES[0]]["n_bytes"] += left  # of running requests that have put nothing back yet
            return found

    # -- what a server calls -------------------------------------------------------------------

    def learn(self, key: Hashable, model: nn.Module, draft_model: nn.Module | None = None) -> None:
        """Assigns a model to the key from now on. KV that another model left under the key is dropped at the next
        fetch. The model is not kept alive. Raises ConfigError if it is no model."""
        with self._lock:
            self.models.assign(key, checked_models(model, draft_model))

    def admit(self, key: Hashable, tokens: list[int], model: nn.Module, draft_model: nn.Module | None = None) -> None:
        """Learns the key's model, and makes room on the device for a request for these tokens. Raises BudgetError if
        there is none, and Unstorable for a model whose KV cannot be held in the format `kv`. Call it for every request,
        before its fetch, where an exception reaches the client; a batch does not refuse the request any more then."""
        with self._lock:
            self._admission.in_advance = True
            self.learn(key, model, draft_model)
            found = self._tokens.read(tokens)
            if self._closed or found is None or not len(found):
                return
            served = functools.partial(self._stores.served, key, self.models.of(key))
            store = self._reasons.attempt(served, None, but=(Unstorable,))
            if store is not None:
                self._admission.admit(store.cache, found)

    def fetch_nearest_cache(self, model: Hashable | nn.Module, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Returns the layers that hold the longest known part of `tokens`, and the rest; at least one token is left for
        the model to run on. If nothing is known of them: empty layers and all tokens where the key's model is known,
        else None and all tokens. Raises Unstorable for a model whose KV cannot be held in the format `kv`."""
        with self._lock:
            self._eviction.catch_up()
            found = self._tokens.read(tokens)
            key = self.models.key_of(model)
            fetched = None
            if found is not None:
                fetch = functools.partial(self._fetcher.fetch, key, tokens, found)
                fetched = self._reasons.attempt(fetch, None, but=(Unstorable,))
            if fetched is None:
                if found is not None:
                    self.models.missed(key, found)
                return None, tokens
            self.models.found()
            return fetched

    def insert_cache(
        self,
        model: Hashable | nn.Module,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keeps the KV of `tokens` that these layers hold; if they do not hold all of it, `reasons` counts why. Raises
        ConfigError for an unknown `cache_type`."""
        if cache_type not in TYPES:
            raise ConfigError(f"cache_type is one of {', '.join(TYPES)}, got {cache_type!r}")
        with self._lock:
            found = self._tokens.read(tokens)
            if found is None or self._closed:
                return
            if not isinstance(prompt_cache, (list, tuple)):
                self._reasons.note("not layers", f"a list of caches is kept, not {type(prompt_cache).__name__}")
                return
            key = self.models.key_of(model)
            if prompt_cache and all(opaque(layer) for layer in prompt_cache):
                nbytes = sum(layer.nbytes for layer in prompt_cache)
                if not self._inserter.exceeds(nbytes, self.max_bytes):
                    self._eviction.enter(key, found, cache_type, prompt_cache, nbytes)
            elif len(found):
                kept = self._reasons.attempt(lambda: self._inserter.keep(key, found, prompt_cache), 0)
                if kept:
                    self._eviction.enter(key, found[:kept], cache_type)
            self.models.found()
            self._eviction.catch_up()
            self._eviction.apply_byte_limit()

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evicts until at most so many entries and so many stored bytes are left. Bytes of running requests are not
        counted."""
        with self._lock:
            if n_sequences is not None:
                while len(self) > max(0, n_sequences):
                    self._eviction.evict_oldest()
            if n_bytes is not None:
                self._eviction.shrink(max(0, n_bytes))

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees everything, and keeps nothing from now on. A server need not call it: a cache that is dropped does the
        same."""
        self._finalizer()
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._stores.close()

    def __del__(self) -> None:
        if hasattr(self, "_finalizer"):
            self.close()


def _before_alone(cache: LRUPromptCache) -> BeforeAlone:
    """Asks the cache for room before each forward of a row that is in no batch. Does not keep the cache alive."""
    ref = weakref.ref(cache)

    def ask(lease: Lease, n_tokens: int) -> None:
        owner = ref()
        if owner is not None:
            owner._admission.before_alone(lease, n_tokens)

    return ask
