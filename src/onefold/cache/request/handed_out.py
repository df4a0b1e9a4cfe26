"""The layers that a lease gave to its caller, and whether the caller has changed the list.

After the caller has dropped the lease, references to the layers are weak: the caller's last reference frees them.
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
        """The range of each model's layers."""
        self._dropped: list[weakref.ref[Any]] = []

    def give(self, layers: list[Any]) -> None:
        """Append one more model's layers."""
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
        """Returns the layers of model `i`; none if the list was changed."""
        return [] if self.changed else self.layers[self._parts[i]]

    def are(self, layers: list[Any]) -> bool:
        """Whether these are exactly the layers that the caller was given."""
        own = self._given or [ref() for ref in self._dropped]
        return len(own) == len(layers) and all(a is b for a, b in zip(own, layers, strict=True))

    def drop(self) -> None:
        """Make the references to the layers weak, because the caller has dropped the lease."""
        self._dropped = [weakref.ref(layer) for layer in self._given]
        self.layers, self._given = [], []

    def forget(self) -> None:
        """Drop all references: the caller's last reference then frees caches that are not Onefold's."""
        self.layers, self._given, self._dropped = [], [], []
