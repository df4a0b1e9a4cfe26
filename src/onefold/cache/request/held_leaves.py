"""The cache objects that hold one model's state, and who keeps them alive.

While the lease is the caller's, its watcher refers to them. When the caller has dropped the lease, only the caller's
own references keep them alive: each comes back here when it is finalized, so that what it holds can be stored.
"""

from __future__ import annotations

import weakref
from typing import Any


class HeldLeaves:
    def __init__(self, leaves: list[Any]) -> None:
        self._leaves = leaves
        self._weak: list[weakref.ref[Any]] | None = None
        self._order: dict[int, int] = {}
        """Where each leaf that is still alive belongs, by id."""
        self._finalized: set[int] = set()
        """Leaves that were finalized before their lease was, by id: the collector has an order of its own."""

    def all(self) -> list[Any]:
        """Those that are alive, in their order."""
        if self._weak is None:
            return self._leaves
        alive = [ref() for ref in self._weak]
        return [leaf for leaf in alive if leaf is not None]

    def let_go(self) -> None:
        """The caller has dropped the lease: refer to the leaves weakly."""
        leaves = self._leaves
        self._weak = [weakref.ref(leaf) for leaf in leaves]
        self._order = {id(leaf): i for i, leaf in enumerate(leaves) if id(leaf) not in self._finalized}
        self._leaves = [leaf for leaf in leaves if id(leaf) in self._finalized]

    def finalized(self, leaf: Any) -> bool:
        """Take back a leaf that is being finalized. Returns True if it was the last one that was alive."""
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
