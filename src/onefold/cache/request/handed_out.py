"""The layers that a lease gave to its caller, and whether its list of them is still what it was.

Once the caller has dropped the lease, the layers are referred to weakly: they die with the caller's last reference.
"""

from __future__ import annotations

import weakref
from typing import Any


class HandedOut:
    def __init__(self) -> None:
        self.layers: list[Any] = []
        """The caller's list."""
        self._given: list[Any] = []
        self._parts: list[slice] = []
        """Each model's layers among them all."""
        self._dropped: list[weakref.ref[Any]] = []

    def give(self, layers: list[Any]) -> None:
        """Hand out one more model's layers, behind the others'."""
        start = len(self.layers)
        self._parts.append(slice(start, start + len(layers)))
        self.layers += layers
        self._given += layers

    @property
    def changed(self) -> bool:
        """Whether the caller has changed its list."""
        if len(self.layers) != len(self._given):
            return True
        return any(a is not b for a, b in zip(self.layers, self._given, strict=True))

    def of_model(self, i: int) -> list[Any]:
        """The layers that model `i` takes as its cache; none if the list was changed."""
        return [] if self.changed else self.layers[self._parts[i]]

    def are(self, layers: list[Any]) -> bool:
        """Whether these are the layers that were handed out, all of them."""
        own = self._given or [ref() for ref in self._dropped]
        return len(own) == len(layers) and all(a is b for a, b in zip(own, layers, strict=True))

    def drop(self) -> None:
        """The caller has dropped the lease: refer to its layers weakly."""
        self._dropped = [weakref.ref(layer) for layer in self._given]
        self.layers, self._given = [], []

    def forget(self) -> None:
        """Refer to none of them: caches that are not ours are freed with the caller's last reference."""
        self.layers, self._given, self._dropped = [], [], []
