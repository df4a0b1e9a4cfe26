"""A ranking: items in the order of their keys, smallest first, while items and keys change.

- `place`, `remove`, `first` and `pop` take logarithmic time on average, however many items there are.
- Items can be passed over for a while: they keep their keys, and come again with `put_back`, or when they are placed.
- An item that was removed or placed anew leaves a stale entry in the heap, which is skipped when it comes up. Stale
  entries are never more than items and some.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

STALE_LEAST = 64
"""Stale entries that are not worth a rebuilt heap."""


class Ranking(Generic[T]):
    def __init__(self) -> None:
        self._keys: dict[T, Any] = {}
        self._heap: list[tuple[Any, int, T]] = []
        self._passed: dict[T, Any] = {}

    def __len__(self) -> int:
        return len(self._keys) + len(self._passed)

    def place(self, item: T, key: Any) -> None:
        """Add an item, or move it to where `key` puts it."""
        self._passed.pop(item, None)
        if self._keys.get(item) != key:
            self._keys[item] = key
            heapq.heappush(self._heap, (key, id(item), item))
            self._drop_stale()

    def remove(self, item: T) -> None:
        """Take an item out, if it is there."""
        self._passed.pop(item, None)
        if self._keys.pop(item, None) is not None:
            self._drop_stale()

    def first(self) -> T | None:
        """The item with the smallest key; None if there is none."""
        while self._heap:
            key, _, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T | None:
        """Take out the item with the smallest key and return it; None if there is none."""
        item = self.first()
        if item is not None:
            heapq.heappop(self._heap)
            del self._keys[item]
        return item

    def pass_over(self, item: T, key: Any) -> None:
        """Have an item, whether it was taken out or not, but not in the order before `put_back`."""
        self.remove(item)
        self._passed[item] = key

    def put_back(self) -> None:
        """Have the items that were passed over in the order again."""
        passed, self._passed = self._passed, {}
        for item, key in passed.items():
            self.place(item, key)

    def keys(self) -> dict[T, Any]:
        """Every item with its key, in no order."""
        return self._keys | self._passed

    def _drop_stale(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + STALE_LEAST:
            self._heap = [(key, id(item), item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)
