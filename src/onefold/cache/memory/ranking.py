"""A ranking: items sorted by their keys, smallest first, while items and keys change.

- Every call takes about the same time, however many items there are: no work is deferred, and nothing is rebuilt.
- Items can be passed over: they keep their keys, and are in the order again after `put_back` or `place`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedList

T = TypeVar("T", bound=Hashable)


class Ranking(Generic[T]):
    def __init__(self) -> None:
        self._order = SortedList()
        self._entries: dict[T, tuple[Any, int, T]] = {}
        """The entry of each item in the order; the number keeps items from being compared."""
        self._numbers = itertools.count()
        self._passed: dict[T, Any] = {}

    def __len__(self) -> int:
        return len(self._entries) + len(self._passed)

    def place(self, item: T, key: Any) -> None:
        """Add an item, or move it to where `key` puts it."""
        entry = self._entries.get(item)
        if entry is None or entry[0] != key:
            self.remove(item)
            self._entries[item] = entry = (key, next(self._numbers), item)
            self._order.add(entry)

    def remove(self, item: T) -> None:
        """Remove an item, if it is there."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            self._order.remove(entry)
        elif self._passed:
            self._passed.pop(item, None)

    def first(self) -> T | None:
        """Returns the item with the smallest key; None if there is none."""
        return self._order[0][2] if self._order else None

    def pop(self) -> T | None:
        """Remove and return the item with the smallest key; None if there is none."""
        item = self.first()
        if item is not None:
            self._order.pop(0)
            del self._entries[item]
        return item

    def pass_over(self, item: T, key: Any) -> None:
        """Keep an item, popped or not, out of the order until `put_back`."""
        self.remove(item)
        self._passed[item] = key

    def put_back(self) -> None:
        """Add the items that were passed over to the order again."""
        passed, self._passed = self._passed, {}
        for item, key in passed.items():
            self.place(item, key)

    def keys(self) -> dict[T, Any]:
        """Returns every item with its key, in no order."""
        return {item: entry[0] for item, entry in self._entries.items()} | self._passed
