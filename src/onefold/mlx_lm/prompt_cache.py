"""A drop-in for mlx-lm's `LRUPromptCache`, for `mlx_lm.server` and whoever else uses it.

    from onefold.mlx_lm import LRUPromptCache
    ResponseGenerator(model_provider, LRUPromptCache(max_size=10, max_bytes=8 << 30))

`install()` puts it in the place of mlx-lm's class in the whole process.

- The same constructor and methods. Behind them each token's KV is held once: a fetch moves what nobody else is using,
  and borrows what somebody is; what was fetched and never comes back loses nothing that was stored.
- Which model a key stands for is said (`model=`, `learn`), or heard when mlx-lm makes caches for it, in its server, in
  its batches or for a caller's own loop. The model's layers are then read in place, in batches too. Caches of a model
  that is not known are kept contiguous, and a second reader gets a copy.
- `max_bytes` is for all KV, that of running requests too. Stored KV makes way for them; they are not refused for it.
- `device_limit` is for weights and KV on the device. What does not fit is refused before it is allocated.
- What cannot be kept soundly is not kept: `reasons` counts why, and the log says each reason once.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar

import mlx.nn as nn
import numpy as np

from onefold.cache.memory import device
from onefold.cache.memory.segment import STEP
from onefold.cache.memory.tree import NAMED, Tokens, as_tokens, unboxed
from onefold.cache.model import stock
from onefold.cache.model.kinds.registry import opaque
from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.request import adopting
from onefold.cache.request.lease import Lease
from onefold.errors import BudgetError, ConfigError, LeaseError, OnefoldError, TokenError, WrongThread
from onefold.mlx_lm.entries import TYPES, Entries, Entry
from onefold.mlx_lm.models import ModelObserver, Models
from onefold.mlx_lm.room import Room
from onefold.mlx_lm.stand_ins import StandIn, Table
from onefold.sizes import parse_size, show_count, show_size

log = logging.getLogger("onefold")

UNLIMITED = 1 << 63
DEVICE_LIMIT = "95%"
"""Of the device's memory, for weights and KV; the rest is for activations."""
NO_ROOM = "no room on the device"
_FAULTS = (
    OnefoldError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model's code, or MLX, raises."""

_POSITIONAL = ("max_size", "max_bytes")

T = TypeVar("T")


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
        device_limit: int | float | str | None = DEVICE_LIMIT,
    ) -> None:
        """`max_bytes` may also be a size such as "8GB" or "60%"; None is no limit. Negative numbers are zero, as in
        mlx-lm: nothing is kept then.

        `model`, with `draft_model` if there is one, is what every key stands for that `learn` was not told of. Neither
        is kept alive.

        `max_kv_size` bounds each conversation whose model is known: the layers of full attention become rings of so
        many tokens, the first `keep` of which stay. `device_limit` is what weights and KV together may take of the
        device's memory, as a size or a share; None is no limit. Stored KV makes way before it. A request that does not
        fit then is refused with BudgetError, and a row that cannot grow is ended."""
        if not isinstance(max_size, int):
            raise ConfigError(f"max_size is a number of entries, got {max_size!r}")
        self.max_size = max(0, max_size)
        self.max_bytes = _bytes(max_bytes)
        self._closed = False
        self._admits = False
        """Requests are admitted before they are fetched."""
        self.reasons: Counter[str] = Counter()
        """Why something was not kept, or not all of it."""
        self._entries = Entries()
        self._stores: dict[Hashable, list[_Store]] = {}
        self.models = Models()
        self._names: dict[int, int] = {}
        self._uncached: dict[Hashable, tuple[str, weakref.ref[nn.Module]]] = {}
        self._clock = 0
        self._lock = threading.RLock()
        self.max_kv_size, self.keep = max_kv_size or None, keep
        _check_bound(self.max_kv_size, keep)
        self._room = Room(_device_bytes(device_limit))
        if draft_model is not None and model is None:
            raise ConfigError("draft_model requires model=: a draft's layers lie behind the target's")
        if model is not None:
            self.models.told_for_all(_models(model, draft_model))
        ears = ModelObserver(self)
        stock.listen(ears)
        self._finalizer = weakref.finalize(self, stock.unlisten, ears)

    @property
    def device_limit(self) -> int | None:
        """Bytes that weights and KV together may take; None is no limit."""
        return self._room.limit_bytes

    @device_limit.setter
    def device_limit(self, limit: int | float | str | None) -> None:
        self._room.limit_bytes = _device_bytes(limit)

    def close(self) -> None:
        """Let go of everything, and keep nothing from now on. Not needed by a server: a cache that is dropped does the
        same."""
        self._finalizer()
        with self._lock:
            self._closed = True
            self._entries = Entries()
            for store in self._all_stores():
                store.cache.close()
            self._stores.clear()

    def __del__(self) -> None:
        if hasattr(self, "_finalizer"):
            self.close()

    def __len__(self) -> int:
        with self._lock:
            self._catch_up()
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
    def nbytes(self) -> int:
        """KV held now, by running requests too."""
        with self._lock:
            self._catch_up()
            whole = sum(e.nbytes for e in self._entries)
            return whole + sum(store.cache.held_bytes for store in self._all_stores())

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        with self._lock:
            self._catch_up()
            found = {t: {"n_sequences": len(self._entries.of_type(t)), "n_bytes": 0} for t in TYPES}
            for entry in self._entries:
                found[entry.cache_type]["n_bytes"] += entry.nbytes
            counted = self._entries.own_tokens()
            for key, stores in self._stores.items():
                left = sum(store.cache.held_bytes for store in stores)
                by_type = counted.get(key, {})
                tokens = sum(by_type.values())
                for t, n in by_type.items():
                    share = left * n // tokens if tokens else 0
                    found[t]["n_bytes"] += share
                    left, tokens = left - share, tokens - n
                found[TYPES[0]]["n_bytes"] += left  # what running requests hold that nothing was put back of yet
            return found

    def learn(self, key: Hashable, model: nn.Module, draft_model: nn.Module | None = None) -> None:
        """Says which model the key stands for, from now on. What another model left under the key is dropped at the
        next fetch. The model is not kept alive."""
        with self._lock:
            self.models.told(key, _models(model, draft_model))

    # -- admitting ---------------------------------------------------------------------------

    def admit(self, key: Hashable, tokens: list[int], model: nn.Module, draft_model: nn.Module | None = None) -> None:
        """Learns the key's model, and makes room on the device for a request for these tokens. Raises BudgetError if
        that cannot be done. To be called for every request, before its fetch, where an exception reaches the client; a
        batch is not refused the request any more then."""
        with self._lock:
            self._admits = True
            self.learn(key, model, draft_model)
            found = self._as_tokens(tokens)
            if self._closed or found is None or not len(found):
                return
            store = self._attempt(lambda: self._served(key, self.models.of(key)), None)
            if store is not None:
                self._admit(store.cache, found)

    def _admit(self, cache: PrefixCache, tokens: Tokens) -> None:
        pin = cache.pin(tokens) if cache.matched(tokens) else None  # what it will read does not make way for it
        try:
            needed = cache.prompt_bytes(tokens) + cache.step_bytes
            self._require(needed, f"a prompt of {show_count(len(tokens), 'token')}")
        finally:
            if pin is not None:
                pin.release()

    def _require(self, n_bytes: int, what: str) -> None:
        try:
            self._room.require(n_bytes, what, self._caches(), self._give_way)
        except BudgetError as error:
            self._say(NO_ROOM, str(error))
            raise

    def take_on(self) -> None:
        """A batch is about to take on a row, with the layers that it will have: BudgetError if it has no room."""
        with self._lock:
            if not self._admits:
                self._require(0, "the next request")

    def is_short(self) -> bool:
        """Whether the device has no room for another step of all running rows, stored KV having made way."""
        with self._lock:
            missing = self._attempt(lambda: self._room.missing(0, self._caches(), self._give_way), 0)
        if missing > 0:
            self._say(NO_ROOM, "the newest row is ended by its length")
        return missing > 0

    def _caches(self) -> list[PrefixCache]:
        return [store.cache for store in self._all_stores()]

    def _give_way(self, n_bytes: int) -> int:
        """Evicts so many stored bytes, or what there is; returns how many."""
        before = self._stored_bytes()
        self._shrink(max(0, sum(e.nbytes for e in self._entries) + before - n_bytes))
        return before - self._stored_bytes()

    def _table(self, cache: PrefixCache) -> Table:
        """A row that is in no batch needs room where its prompt begins, unless it was admitted, and for each step of
        its buffer behind the prompt. Its caller hears of an exception."""
        me = weakref.ref(self)

        def before_alone(lease: Lease, n_tokens: int) -> None:
            owner, start, end = me(), lease.offset, lease.offset + n_tokens
            grows = end > len(lease.tokens) and start // STEP < end // STEP
            if owner is not None and (grows or (start == lease.cached and not owner._admits)):
                with owner._lock:
                    prompt = f"a prompt of {show_count(len(lease.tokens), 'token')}"
                    owner._require(0, "the next token" if grows else prompt)

        return Table(cache, before_alone)

    # -- fetching ----------------------------------------------------------------------------

    def fetch_nearest_cache(
        self, model: Hashable | nn.Module, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """The layers that hold the longest known part of `tokens`, and the rest; at least one token is left for the
        model to run on. If nothing is known of them: empty layers and all tokens where the key's model is known, else
        None and all tokens."""
        with self._lock:
            self._catch_up()
            found = self._as_tokens(tokens)
            key = self._key(model)
            fetched = None if found is None else self._attempt(lambda: self._fetch(key, tokens, found), None)
            if fetched is None:
                if found is not None:
                    self.models.missed(key, found)
                return None, tokens
            self.models.found()
            return fetched

    def _fetch(self, key: Hashable, tokens: list[int], found: Tokens) -> tuple[list[Any], list[int]] | None:
        nearest = self._entries.nearest(key, found)
        entry, longer = nearest.exact or nearest.shorter, nearest.longer
        if longer is not None and nearest.common > (entry.node.end if entry else 0) and _trimmable(longer):
            entry = longer
        if entry is not None:
            self._entries.touch(entry)
            if entry.whole is not None:
                return _copied(entry.whole, entry.node.end, nearest.common, tokens)
        store = self._nearest_store(key, found) if len(found) else None
        if store is None:
            return None
        store.used = self._tick()
        lease = store.cache.lease(found)
        if _inside_image(found, lease.cached):
            lease = self._before_image(store, lease)
        if store.table is not None:
            return store.table.serve(lease), tokens[lease.cached :]
        if lease.cached:
            return lease.layers, tokens[lease.cached :]
        lease.cancel()
        return None

    def _before_image(self, store: _Store, lease: Lease) -> Lease:
        """An image is cached whole or not at all: a server feeds the rest of one that was cut as plain tokens."""
        tokens, start = lease.tokens, lease.cached
        while start and tokens[start - 1] == tokens[lease.cached]:
            start -= 1
        lease.cancel()
        store.cache.forget(tokens, start)
        again = store.cache.lease(tokens)
        if again.cached > start:  # others share it, or use it now
            again.cancel()
            again = store.cache.lease(tokens, namespace="an image that was cut")
        return again

    def _nearest_store(self, key: Hashable, tokens: Tokens) -> _Store | None:
        """Of the key's stores (there are several only if KV came in several formats) the one that knows most."""
        if self.models.is_told(key) and (models := self.models.of(key)):
            self._served(key, models)
        latest = self.models.latest(key)
        stores = [s for s in self._stores.get(key, []) if s.table is None or s.stands_for(latest)]
        running = [s for s in stores if s.table is not None and s.cache.open_leases]
        stores = running or stores  # rows of one batch are of one make
        known = [store.cache.matched(tokens) for store in stores]
        if any(known):
            return stores[known.index(max(known))]
        # nothing is known: where formats differ, mlx-lm makes what it wants
        return stores[0] if len(stores) == 1 and stores[0].table is not None else None

    # -- inserting ---------------------------------------------------------------------------

    def insert_cache(
        self,
        model: Hashable | nn.Module,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep what these layers hold: the KV of `tokens`, as far as they really hold it."""
        if cache_type not in TYPES:
            raise ConfigError(f"cache_type is one of {', '.join(TYPES)}, got {cache_type!r}")
        with self._lock:
            found = self._as_tokens(tokens)
            if found is None or self._closed:
                return
            if not isinstance(prompt_cache, (list, tuple)):
                self._say("not layers", f"a list of caches is kept, not {type(prompt_cache).__name__}")
                return
            key = self._key(model)
            if prompt_cache and all(opaque(layer) for layer in prompt_cache):
                nbytes = sum(layer.nbytes for layer in prompt_cache)
                if not self._too_large(nbytes, self.max_bytes):
                    self._enter(key, found, cache_type, prompt_cache, nbytes)
            elif len(found):
                kept = self._attempt(lambda: self._keep(key, found, prompt_cache), 0)
                if kept:
                    self._enter(key, found[:kept], cache_type)
            self.models.found()
            self._catch_up()
            self._limit()

    def _keep(self, key: Hashable, tokens: Tokens, layers: list[Any]) -> int:
        """Move the layers' KV to where it is kept; returns how many tokens that are."""
        lease, ended = _lease_of(layers)
        if lease is not None:
            store = next((s for s in self._stores.get(key, []) if s.cache.state is lease.state), None)
            if store is None:
                self._say("another key", "these layers were fetched for another key, or from another cache")
                return 0
            store.used = self._tick()
            return self._settle(store, lease, tokens, ended=ended)
        if any(_is_ours(layer) for layer in layers):
            if all(_is_ours(layer) and _is_settled(layer) for layer in layers):
                self._say("already put back", "these layers were put back before")
                return 0
            self._say("layers were replaced", "some of these layers are not the ones that were fetched")
            return 0
        makers = stock.models_of(layers)
        self.models.filled(key, makers)
        if makers and (models := self.models.of(key)) and makers[0] is not models[0]:
            self._say(adopting.MISFIT, "these layers were made for another model than the key's")
            return 0
        store = self._store_for(key, layers)
        if store is None or self._outgrows(store.cache, len(tokens)):
            return 0
        store.used = self._tick()
        kept, reason = store.cache.adopt(tokens, layers)
        if reason:
            self._say(reason, f"of {show_count(len(tokens), 'token')} put in, {kept} could be kept")
        return kept

    def _settle(self, store: _Store, lease: Lease, tokens: Tokens, *, ended: bool) -> int:
        if lease.closed:
            self._say("already put back", "these layers were put back before")
            return 0
        held = lease.agreement(tokens)
        if not held:
            return self._misfit(store, lease, "the layers hold none of the tokens that were put back", ended=ended)
        if held < len(tokens):
            self._say(adopting.LONGER, f"{held} of {show_count(len(tokens), 'token')} could be kept")
        if self._outgrows(store.cache, held):
            if ended:
                store.discard(lease)
            return 0
        try:
            lease.commit(tokens[:held], close=ended)
        except WrongThread as error:
            self._say("another thread", str(error))
            return 0
        except LeaseError as error:
            return self._misfit(store, lease, str(error), ended=ended)
        return min(held, store.cache.matched(tokens[:held]))

    def _misfit(self, store: _Store, lease: Lease, why: str, *, ended: bool) -> int:
        """Keeps nothing of the lease. A request that is still running goes on with it: to close it under a batch would
        end the server's thread."""
        self._say("layers do not fit the tokens", why)
        if ended:
            store.discard(lease)
        return 0

    def _outgrows(self, cache: PrefixCache, n_tokens: int) -> bool:
        return self._too_large(n_tokens * cache.token_bytes, min(self.max_bytes, cache.budget_bytes))

    def _too_large(self, n_bytes: int, limit: int) -> bool:
        if n_bytes > limit:
            self._say("larger than the limit", f"{show_size(n_bytes)} of {show_size(limit)}: it is not kept")
        return n_bytes > limit

    def _store_for(self, key: Hashable, layers: list[Any]) -> _Store | None:
        """Where layers of this make are kept: the model's own cache, or one that goes by the layers alone."""
        models = self.models.of(key)
        if models:
            self._served(key, models)
        if key in self._uncached:
            self._say(self._uncached[key][0], "this model runs uncached")
            return None
        for store in self._stores.get(key, []):
            if store.takes(layers):
                return store
        cache = PrefixCache.of_layers(layers, max(1, min(self.max_bytes, device.default_budget())))
        if cache.uncached_reason:
            self._say(cache.uncached_reason, "this model runs uncached")
            cache.close()
            return None
        store = _Store(cache, None)
        self._stores.setdefault(key, []).append(store)
        return store

    def _served(self, key: Hashable, models: list[nn.Module]) -> _Store | None:
        """The store whose layers these models read in place; None if they cannot."""
        for store in [s for s in self._stores.get(key, []) if s.table is not None]:
            if store.stands_for(*models):
                return store
            self._stores[key].remove(store)  # another model has the key now
            store.cache.close()
            for entry in [e for e in self._entries if e.key == key and e.whole is None]:
                self._entries.remove(entry)
        if key in self._uncached:
            if self._uncached[key][1]() is models[0]:
                return None
            del self._uncached[key]
        draft = models[1] if len(models) > 1 else None
        budget = min(self.max_bytes, device.default_budget(*models))
        cache = PrefixCache(
            models[0],
            max(1, budget),
            draft_model=draft,
            elastic=True,
            low_water=1.0,
            high_water=1.0,
            max_kv_size=self.max_kv_size,
            keep=self.keep,
        )
        if cache.uncached_reason:
            self._say(cache.uncached_reason, "this model runs uncached")
            cache.close()
            self._uncached[key] = (cache.uncached_reason, weakref.ref(models[0]))
            return None
        store = _Store(cache, self._table(cache))
        for known in [s for s in self._stores.get(key, []) if self._takes_over(store, s, key)]:
            self._stores[key].remove(known)
            known.cache.close()
        self._stores.setdefault(key, []).insert(0, store)
        return store

    def _takes_over(self, store: _Store, known: _Store, key: Hashable) -> bool:
        """What was put in before the model was known goes to the model's own store, if it is of the same make."""
        for entry in [e for e in self._entries if e.key == key and e.whole is None]:
            tokens = entry.tokens
            with known.cache.lease([*tokens.tolist(), 0]) as lease:
                if not store.takes(lease.layers):
                    return False
                if lease.cached == len(tokens):
                    store.cache.adopt(tokens, lease.layers)
        return True

    def serve_row(self, model: nn.Module, tokens: list[int]) -> list[Any] | None:
        """A batch is about to make caches for a row that nothing was cached for: it gets ours. (A lone request may want
        a draft model's too; it makes its own, and what it fills is taken over when it is put back.)"""
        with self._lock:
            found = self._as_tokens(tokens)
            missed = self.models.row(model, found) if found is not None and len(found) else None
            if found is None or missed is None:
                return None
            (key,) = missed
            if any(s.table is None and s.cache.open_leases for s in self._stores.get(key, [])):
                return None  # rows of one batch are of one make
            return self._attempt(lambda: self._serve_new(key, model, found), None)

    def _serve_new(self, key: Hashable, model: nn.Module, tokens: Tokens) -> list[Any] | None:
        store = self._served(key, [model])
        if store is None or store.table is None:
            return None
        store.used = self._tick()
        return store.table.serve(store.cache.lease(tokens))

    # -- giving up ---------------------------------------------------------------------------

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Keep at most so many entries and so many stored bytes: those of running requests are not counted here."""
        with self._lock:
            if n_sequences is not None:
                while len(self) > max(0, n_sequences):
                    self._evict(self._entries.oldest())
            if n_bytes is not None:
                self._shrink(max(0, n_bytes))

    def _enter(
        self,
        key: Hashable,
        tokens: Tokens,
        cache_type: str,
        whole: list[Any] | None = None,
        nbytes: int = 0,
    ) -> None:
        entry = self._entries.add(key, tokens, cache_type, whole, nbytes)
        if _trimmable(entry):
            for prefix in self._entries.prefixes(entry):
                if (prefix.whole is None) == (whole is None):
                    self._entries.remove(prefix)
        while len(self._entries) > self.max_size:
            self._evict(self._entries.oldest())

    def _limit(self) -> None:
        """What is stored makes way for what is live, where that brings both below the limit."""
        live = sum(s.cache.held_bytes - s.cache.stored_bytes for s in self._all_stores())
        left = self.max_bytes - live if live <= self.max_bytes else self.max_bytes
        self._attempt(lambda: self._shrink(left), None)

    def _evict(self, entry: Entry) -> None:
        tokens = entry.tokens
        self._entries.remove(entry)
        if entry.whole is None and len(tokens):
            keep = self._entries.common(entry.key, tokens)
            for store in self._stores.get(entry.key, []):
                store.cache.forget(tokens, keep)

    def _shrink(self, n_bytes: int) -> None:
        """At most so many bytes that no request is using: whole entries first, in their order, then tails."""
        while (whole := sum(e.nbytes for e in self._entries)) + self._stored_bytes() > n_bytes and whole:
            self._evict(self._entries.oldest())
        excess = self._stored_bytes() - n_bytes
        for store in sorted(self._all_stores(), key=lambda s: s.used):
            if excess <= 0:
                break
            before = store.cache.stored_bytes
            store.cache.shrink(max(0, before - excess))
            excess -= before - store.cache.stored_bytes
        self._notice_evictions()

    def _catch_up(self) -> None:
        """What forgotten requests left behind becomes an entry; what was evicted is none any more."""
        for key, store in [(key, store) for key, stores in self._stores.items() for store in stores]:
            self._attempt(store.cache.sweep, None)
            while store.left_behind:
                tokens = store.left_behind.pop()
                known = store.cache.matched(tokens)
                if known > self._entries.common(key, tokens):
                    self._enter(key, tokens[:known], TYPES[0])
        self._notice_evictions()

    def _notice_evictions(self) -> None:
        """Entries of which nothing is left but what others have are no entries any more."""
        stores = self._all_stores()
        counts = [store.cache.evicted_tokens for store in stores]
        if counts == [store.evicted for store in stores]:
            return
        for store, n in zip(stores, counts, strict=True):
            store.evicted = n
        for entry in [e for e in self._entries if e.whole is None]:
            tokens = entry.tokens
            known = max((s.cache.matched(tokens) for s in self._stores.get(entry.key, [])), default=0)
            if known < len(tokens):
                self._entries.shorten(entry, known)

    def _stored_bytes(self) -> int:
        return sum(store.cache.stored_bytes for store in self._all_stores())

    def _all_stores(self) -> list[_Store]:
        return [store for stores in self._stores.values() for store in stores]

    # -- details -----------------------------------------------------------------------------

    def _key(self, key: Hashable | nn.Module) -> Hashable:
        """Some callers give the model itself as its key. It cannot be hashed, but nothing has to be learnt then."""
        if not isinstance(key, nn.Module):
            return key
        name = ("model", id(key))
        self.models.told(name, [key])
        return name

    def _as_tokens(self, tokens: list[int]) -> Tokens | None:
        """mlx-lm names images by large negative numbers: each gets an id that no token has."""
        try:
            if len(tokens) == 0:
                return np.empty(0, np.int32)
            wide = np.asarray(unboxed(tokens))
            if wide.ndim == 1 and wide.dtype.kind == "i" and wide.min() < 0:
                for name in np.unique(wide[wide < 0]).tolist():
                    self._names.setdefault(name, NAMED + len(self._names))
                wide = np.array([self._names.get(t, t) for t in wide.tolist()])
            return as_tokens(wide)
        except (TokenError, ValueError, TypeError, OverflowError) as error:
            self._say("not tokens", str(error))
            return None

    def _attempt(self, work: Callable[[], T], otherwise: T) -> T:
        """Whatever goes wrong in here costs a hit and is said. An exception would end the server's thread."""
        try:
            return work()
        except _FAULTS as error:
            self._say(f"failed: {type(error).__name__}", str(error))
            log.debug("prompt cache", exc_info=error)
            return otherwise

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _say(self, reason: str, more: str) -> None:
        """Count a reason; the first time, say it."""
        self.reasons[reason] += 1
        if self.reasons[reason] == 1:
            log.warning("prompt cache: %s (%s)", reason, more)


class _Store:
    """The KV of one key in one format. With a table, its model is known and its layers are served in batches."""

    def __init__(self, cache: PrefixCache, table: Table | None) -> None:
        self.cache = cache
        self.table = table
        self.evicted = 0
        self.used = 0
        self.left_behind: list[Tokens] = []
        cache.state.on_dropped = lambda lease: self.left_behind.append(lease.tokens)

    def discard(self, lease: Lease) -> None:
        """Keep nothing of a request. What was stored before it is looked at again: its entry may be gone."""
        lease.discard()
        self.left_behind.append(lease.tokens)

    def takes(self, layers: list[Any]) -> bool:
        return self.cache.fits(layers)

    def stands_for(self, *models: nn.Module | None) -> bool:
        """Whether these are the models whose KV this is. Those that were unloaded and loaded again are."""
        own = [m for m in (self.cache.model, self.cache.draft_model) if m is not None]
        if len(models) == 1 and own and (models[0] is None or any(models[0] is m for m in own)):
            return True
        if len(own) == len(models) and all(a is b for a, b in zip(own, models, strict=True)):
            return True
        return self.cache.rebind(*(m for m in models if m is not None))


def _lease_of(layers: list[Any]) -> tuple[Lease | None, bool]:
    """The lease that these layers are all of, and whether its request has ended."""
    first: Any = layers[0] if layers else None
    if isinstance(first, StandIn):
        row = first.rows[0]
        whole = len(layers) == len(row.lease.layers)
        same = all(isinstance(x, StandIn) and x.rows == [row] for x in layers)
        return (row.lease, row.seats == 0 and not first.is_copy) if whole and same else (None, False)
    watchers = first.watchers() if _is_ours(first) else []
    if not watchers or watchers[0].is_settled:
        return None, False
    lease = watchers[0].lease
    return (lease, True) if lease.owns(layers) else (None, False)


def _is_settled(layer: Any) -> bool:
    """Whether a layer is of a lease that was put back already."""
    watchers = [] if isinstance(layer, StandIn) else layer.watchers()
    return bool(watchers) and bool(watchers[0].is_settled)


def _models(model: nn.Module, draft_model: nn.Module | None) -> list[nn.Module]:
    models = [m for m in (model, draft_model) if m is not None]
    for m in models:
        if not isinstance(m, nn.Module):
            name = type(m).__name__
            raise ConfigError(f"a model is an mlx module (load() returns it with a tokenizer), not {name}")
    return models


def _device_bytes(limit: int | float | str | None) -> int | None:
    return None if limit is None else parse_size(limit, total_bytes=device.memory_bytes())


def _check_bound(max_kv_size: int | None, keep: int) -> None:
    if max_kv_size is None:
        return
    if not isinstance(max_kv_size, int) or not isinstance(keep, int) or not 0 <= keep < max_kv_size:
        raise ConfigError(
            f"max_kv_size is a number of tokens and keep one from 0 to below it, got {max_kv_size!r} and {keep!r}"
        )


def _trimmable(entry: Entry) -> bool:
    return entry.whole is None or all(layer.is_trimmable() for layer in entry.whole)


def _copied(whole: list[Any], length: int, common: int, tokens: list[int]) -> tuple[list[Any], list[int]]:
    """What is kept whole is copied and trimmed, as mlx-lm does: there is no KV in it."""
    layers = copy.deepcopy(whole)
    if length <= common:
        return layers, tokens[length:]
    at = min(len(tokens) - 1, common)
    for layer in layers:
        layer.trim(length - at)
    return layers, tokens[at:]


def _bytes(limit: int | float | str | None) -> int:
    if limit is None:
        return UNLIMITED
    if isinstance(limit, str):
        return parse_size(limit, total_bytes=device.memory_bytes())
    if not isinstance(limit, (int, float)) or limit != limit:
        raise ConfigError(f"max_bytes is a number of bytes or a size such as '8GB', got {limit!r}")
    return int(max(0, min(limit, UNLIMITED)))


def _inside_image(tokens: Tokens, at: int) -> bool:
    return bool(0 < at < len(tokens) and tokens[at] >= NAMED and tokens[at - 1] == tokens[at])


def _is_ours(layer: Any) -> bool:
    return isinstance(layer, StandIn) or hasattr(layer, "watchers")


class Installed:
    """This prompt cache in the place of mlx-lm's, until `uninstall` or the end of a `with` block."""

    _options: ClassVar[dict[str, Any]] = {}
    _count: ClassVar[int] = 0
    _restore: ClassVar[Callable[[], None]]

    def __init__(self, options: dict[str, Any]) -> None:
        if Installed._count and options != Installed._options:
            raise ConfigError(f"installed with the options {Installed._options}; uninstall before other options")
        if not Installed._count:
            Installed._options = options
            Installed._restore = stock.install_prompt_cache(_with_options(options))
        Installed._count += 1
        self._installed = True

    def uninstall(self) -> None:
        """Puts mlx-lm's class back, unless somebody else installed ours as well. Caches that were made stay."""
        if self._installed:
            self._installed = False
            Installed._count -= 1
            if not Installed._count:
                Installed._restore()

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in Installed._options.items())
        return f"<Installed: LRUPromptCache({options})>" if self._installed else "<Installed, uninstalled>"

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(**options: Any) -> Installed:
    """Binds a subclass of `LRUPromptCache` wherever a loaded module has bound mlx-lm's class, and for modules that are
    loaded later. Returns what undoes it. A server that makes its prompt cache after that makes one of ours, with
    `options` for what it does not say itself."""
    LRUPromptCache(**options).close()  # refuses what is wrong with them here, and not in the server
    return Installed(options)


def _with_options(options: dict[str, Any]) -> type[LRUPromptCache]:
    """A class of its own: when it is taken back, those who import `LRUPromptCache` from here keep theirs."""

    class InPlace(LRUPromptCache):
        def __init__(self, *args: Any, **given: Any) -> None:
            named = {name: value for name, value in options.items() if name not in _POSITIONAL[: len(args)]}
            super().__init__(*args, **(named | given))

    InPlace.__name__ = InPlace.__qualname__ = LRUPromptCache.__name__
    return InPlace


def serve(**options: Any) -> None:
    """Runs mlx-lm's server, with its own arguments, on this cache made with these options."""
    stock.run_server(functools.partial(LRUPromptCache, **options))
