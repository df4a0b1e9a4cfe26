"""The order in which records are removed, so that no record is left whose parent was removed.

For objects with `used`, `start` and `parent`: the records of a catalog, and the entries of a census.
No MLX in this file.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar


class Chained(Protocol):
    @property
    def used(self) -> float: ...
    @property
    def start(self) -> int: ...
    @property
    def parent(self) -> Any:
        """The record that it continues, which begins before it; None at the start of a path."""
        ...


T = TypeVar("T", bound=Chained)


def oldest_tails_first(items: Iterable[T], may: Callable[[T], bool] = lambda item: True) -> Iterator[T]:
    """Yields, again and again, the least recently used item without children; of equals the one that begins last.
    An item for which `may` is False is not yielded, nor are its ancestors."""
    held = list(items)
    following = Counter(item.parent for item in held if item.parent is not None)
    number = {item: i for i, item in enumerate(held)}
    queue = [(item.used, -item.start, number[item], item) for item in held if not following[item] and may(item)]
    heapq.heapify(queue)
    while queue:
        item = heapq.heappop(queue)[-1]
        yield item
        parent = item.parent
        if parent in number:
            following[parent] -= 1
            if not following[parent] and may(parent):
                heapq.heappush(queue, (parent.used, -parent.start, number[parent], parent))


def below(items: Iterable[T], gone: Iterable[T]) -> set[T]:
    """Returns these items and all their descendants."""
    found = set(gone)
    for item in sorted(items, key=lambda item: item.start):
        if item.parent in found:
            found.add(item)
    return found
