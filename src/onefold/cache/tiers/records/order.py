"""The order in which records are removed, so that no record is left whose parent was removed.

For objects with `used`, `start` and `above`: the records of a catalog, and the entries of a census.
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
    def above(self) -> list[Any]:
        """The records that it continues, which begin before it: its parent, and the point whose windows its own
        continue."""
        ...


T = TypeVar("T", bound=Chained)


def oldest_tails_first(items: Iterable[T], may: Callable[[T], bool] = lambda item: True) -> Iterator[T]:
    """Yields, again and again, the least recently used item without children; of equals the one that begins last.
    An item for which `may` is False is not yielded, nor are its ancestors."""
    held = list(items)
    following = Counter(above for item in held for above in item.above)
    number = {item: i for i, item in enumerate(held)}
    queue = [(item.used, -item.start, number[item], item) for item in held if not following[item] and may(item)]
    heapq.heapify(queue)
    while queue:
        item = heapq.heappop(queue)[-1]
        yield item
        for above in item.above:
            if above in number:
                following[above] -= 1
                if not following[above] and may(above):
                    heapq.heappush(queue, (above.used, -above.start, number[above], above))


def below(items: Iterable[T], gone: Iterable[T]) -> set[T]:
    """Returns these items and all their descendants."""
    found = set(gone)
    for item in sorted(items, key=lambda item: item.start):
        if not found.isdisjoint(item.above):
            found.add(item)
    return found
