"""References to the cache objects that hold one model's state.

While the caller has the lease, these references are strong. After the caller has dropped it, they are weak, so that
only the caller's own references keep a leaf alive. Each leaf is added here again when it is finalized, so that its
state can be stored.
"""

from __future__ import annotations

import weakref
from typing import Any


class HeldLeaves:
    def __init__(self, leaves: list[Any]) -> None:
        self._leaves = leaves
        self._weak: list[weakref.ref[Any]] | None = None
        self._order: dict[int, int] = {}
        """The index of each leaf that is still alive, by id."""
        self._finalized: set[int] = set()
        """Leaves that were finalized before their lease, by id: the collector may choose any order."""

    def all(self) -> list[Any]:
        """Returns the leaves that are alive, in their order."""
        if self._weak is None:
            return self._leaves
        alive = [ref() for ref in self._weak]
        return [leaf for leaf in alive if leaf is not None]

    def weaken(self) -> None:
        """Make the references weak, because the caller has dropped the lease."""
        leaves = self._leaves
        self._weak = [weakref.ref(leaf) for leaf in leaves]
        self._order = {id(leaf): i for i, leaf in enumerate(leaves) if id(leaf) not in self._finalized}
        self._leaves = [leaf for leaf in leaves if id(leaf) in self._finalized]

    def finalized(self, leaf: Any) -> bool:
        """Keep a leaf that is being finalized. Returns True if it was the last one that was alive."""
        if self._weak is None:
            self._finalized.add(id(leaf))
            return False
        if id(leaf) not in self._order:
            return False
        self._weak[self._order.pop(id(leaf))] = weakref.ref(leaf)
        self._leaves.append(leaf)
        return self.are_dropped

    @property
    def are_dropped(self) -> bool:
        """Whether the caller has dropped the lease, and every leaf too."""
        return self._weak is not None and not self._order

    @property
    def are_weak(self) -> bool:
        """Whether the caller has dropped the lease."""
        return self._weak is not None

    def forget(self) -> None:
        self._leaves, self._order = [], {}
        if self._weak is not None:
            self._weak = []
