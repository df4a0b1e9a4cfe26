"""Which model a key of a prompt cache has.

A prompt cache gets only keys and tokens. It learns the model in one of four ways, the surest first:

1. the caller assigns it (`assign`, `assign_default`);
2. layers are put in that mlx-lm was seen to make for a model (`stock.models_of`), on whatever thread;
3. a batch takes on a row whose tokens were asked for and not found, on whatever thread;
4. caches are made for a model on the thread that has just asked for a key's tokens and not found them.

Models are not kept alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import mlx.nn as nn

from onefold.cache.memory.tokens import Tokens
from onefold.errors import ConfigError

OPEN_MISSES = 64
"""Fetches that found nothing and whose row has not come yet; older ones are forgotten."""
MODELS = 2
"""A target and a draft."""

Refs = list[weakref.ref[nn.Module]]


class Observed(Protocol):
    """What `ModelObserver` reports to."""

    @property
    def models(self) -> Models: ...

    def serve_row(self, model: nn.Module, tokens: list[int]) -> list[Any] | None: ...
    def take_on(self) -> None: ...
    def is_short(self) -> bool: ...


class Miss(NamedTuple):
    thread: int
    key: Hashable
    tokens: int
    """Their hash."""


class Models:
    """What is known so far of a prompt cache's keys."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Refs] = {}
        self._assigned: set[Hashable] = set()
        self._for_all: Refs = []
        self._misses: list[Miss] = []
        self._asking: dict[int, Hashable] = {}
        """By thread: the key of its last fetch, if that found nothing."""
        self._latest: dict[int, weakref.ref[nn.Module]] = {}

    # -- what the caller assigns ------------------------------------------------------------------

    def assign(self, key: Hashable, models: list[nn.Module]) -> None:
        """Assigns models to a key. Nothing that is observed later changes that."""
        self._known[key] = [weakref.ref(m) for m in models]
        self._assigned.add(key)

    def assign_default(self, models: list[nn.Module]) -> None:
        """Assigns models to every other key."""
        self._for_all = [weakref.ref(m) for m in models]

    def key_of(self, key: Hashable | nn.Module) -> Hashable:
        """Returns a key that can be hashed. Some callers give the model itself as its key: it is its own model then."""
        if not isinstance(key, nn.Module):
            return key
        name = ("model", id(key))
        self.assign(name, [key])
        return name

    def is_assigned(self, key: Hashable) -> bool:
        """Whether the caller assigned models to the key, and they are still alive."""
        return (key in self._assigned or (bool(self._for_all) and key not in self._known)) and bool(self.of(key))

    # -- what is observed --------------------------------------------------------------------------

    def missed(self, key: Hashable, tokens: Tokens) -> None:
        """Notes a miss: caches that are made on this thread from now on belong to the key."""
        here = threading.get_ident()
        self._asking[here] = key
        self._misses = [*self._misses[1 - OPEN_MISSES :], Miss(here, key, _hash(tokens))]
        if not self.is_assigned(key):
            self._known.pop(key, None)
            self._assigned.discard(key)

    def found(self) -> None:
        """Ends a miss: caches that are made on this thread from now on do not belong to its key."""
        self._asking.pop(threading.get_ident(), None)

    def made(self, model: nn.Module) -> None:
        here = threading.get_ident()
        self._latest[here] = weakref.ref(model)
        key = self._asking.get(here)
        if here in self._asking and not self.is_assigned(key):
            known = self._known.setdefault(key, [])
            if len(known) < MODELS and not any(ref() is model for ref in known):
                known.append(weakref.ref(model))

    def filled(self, key: Hashable, models: list[nn.Module]) -> None:
        """Notes that layers of these models were put in under the key."""
        if models and not self.is_assigned(key):
            self._known[key] = [weakref.ref(m) for m in models[:MODELS]]

    def row(self, model: nn.Module, tokens: Tokens) -> tuple[Hashable] | None:
        """Returns the key whose tokens these are, or None: the key of a miss on this thread or, if only one key missed
        the same tokens, on another thread."""
        here, digest = threading.get_ident(), _hash(tokens)
        self._latest[here] = weakref.ref(model)
        found = [m for m in self._misses if m.tokens == digest and self._may_be(m.key, model)]
        own = [m for m in found if m.thread == here]
        if not own and len({m.key for m in found}) != 1:
            self.found()
            return None
        miss = (own or found)[-1]
        self._misses.remove(miss)
        self.found()
        return (miss.key,)

    def _may_be(self, key: Hashable, model: nn.Module) -> bool:
        models = self.of(key)
        return not models or models[0] is model or not self.is_assigned(key)

    # -- what is known ---------------------------------------------------------------------------

    def of(self, key: Hashable) -> list[nn.Module]:
        """Returns the models of a key, target first; empty if they are not known."""
        models = [ref() for ref in self._known.get(key, self._for_all)]
        return [m for m in models if m is not None] if None not in models else []

    def latest(self, key: Hashable) -> nn.Module | None:
        """Returns the model that this thread used last, if it may be the key's model loaded again."""
        ref = self._latest.get(threading.get_ident())
        model = ref() if ref is not None else None
        if model is None or self.is_assigned(key):
            return None
        known = list(self._known.items())  # other threads make caches meanwhile
        others = (ref for k, refs in known if k != key for ref in refs)
        return None if any(ref() is model for ref in others) else model


class ModelObserver:
    """Reports what mlx-lm does to a cache, without keeping the cache alive."""

    def __init__(self, cache: Observed) -> None:
        self._cache = weakref.ref(cache)

    def made(self, model: nn.Module) -> None:
        cache = self._cache()
        if cache is not None:
            cache.models.made(model)

    def row(self, model: nn.Module, tokens: list[int]) -> list[Any] | None:
        cache = self._cache()
        return None if cache is None else cache.serve_row(model, tokens)

    def take_on(self) -> None:
        cache = self._cache()
        if cache is not None:
            cache.take_on()

    def is_short(self) -> bool:
        cache = self._cache()
        return cache is not None and cache.is_short()


def checked_models(model: nn.Module, draft_model: nn.Module | None) -> list[nn.Module]:
    """Returns the target, and the draft if there is one. Raises ConfigError if one is no model."""
    models = [m for m in (model, draft_model) if m is not None]
    for m in models:
        if not isinstance(m, nn.Module):
            name = type(m).__name__
            raise ConfigError(f"a model is an mlx module (load() returns it with a tokenizer), not {name}")
    return models


def _hash(tokens: Tokens) -> int:
    return hash(tokens.tobytes())
