"""Which model a prompt cache's key stands for.

A prompt cache is only told keys and tokens. mlx-lm shows the model elsewhere: it asks for a key's tokens, and if there
are none it makes caches for the key's model, on the same thread (`stock.listen`). Models are not kept alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any, Protocol

import mlx.nn as nn


class Hearer(Protocol):
    models: Models

    def serve_row(self, model: nn.Module, tokens: list[int]) -> list[Any] | None: ...


class Models:
    """What mlx-lm has shown so far."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[weakref.ref[nn.Module]]] = {}
        self._missed: dict[int, tuple[Hashable, list[int]]] = {}
        self._latest: dict[int, weakref.ref[nn.Module]] = {}

    def missed(self, key: Hashable, tokens: list[int]) -> None:
        """Nothing is cached of these tokens: caches made on this thread from here on are the key's."""
        self._missed[threading.get_ident()] = (key, tokens)
        self._known.pop(key, None)

    def found(self) -> None:
        self._missed.pop(threading.get_ident(), None)

    def made(self, model: nn.Module) -> None:
        here = threading.get_ident()
        self._latest[here] = weakref.ref(model)
        if here in self._missed:
            self._known.setdefault(self._missed[here][0], []).append(weakref.ref(model))

    def row(self, model: nn.Module, tokens: list[int]) -> Hashable | None:
        """The key whose tokens these are."""
        here = threading.get_ident()
        self._latest[here] = weakref.ref(model)
        key, missed = self._missed.pop(here, (None, None))
        return key if missed == tokens else None

    def of(self, key: Hashable) -> list[nn.Module]:
        """The models that a key's layers belong to, target first; empty if not known."""
        models = [ref() for ref in self._known.get(key, [])]
        return [m for m in models if m is not None] if None not in models else []

    def latest(self) -> nn.Module | None:
        ref = self._latest.get(threading.get_ident())
        return ref() if ref is not None else None


class Ears:
    """Listens for a cache without keeping it alive."""

    def __init__(self, cache: Hearer) -> None:
        self._cache = weakref.ref(cache)

    def made(self, model: nn.Module) -> None:
        cache = self._cache()
        if cache is not None:
            cache.models.made(model)

    def row(self, model: nn.Module, tokens: list[int]) -> list[Any] | None:
        cache = self._cache()
        return None if cache is None else cache.serve_row(model, tokens)
