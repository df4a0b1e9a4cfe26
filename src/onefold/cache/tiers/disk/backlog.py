"""The backlog: which node is written to disk next.

- Somebody waits for it; then, what was committed and is to be written through, in order; then everything, when all is
  to be written; then what is old, while memory is nearly full.
- A node that cannot be written now, because a request writes to its buffer, is passed over and comes again. One that
  was refused (no room on disk, say) is not tried again until it was used again, or everything is to be written.
- A look takes a bounded time, however many nodes there are: the cache's lock is held meanwhile.

Knows nothing of records. No MLX in this file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from onefold.cache.memory.tree import Node

LOOKS = 64
"""Nodes that are looked at in one go."""
OLD_EVERY = 1.0
"""Seconds after which the list of what is old is made again."""


class Backlog:
    def __init__(self, writable: Callable[[Node], bool], owed: Callable[[Node], bool]) -> None:
        """`writable`: some of it can be written now. `owed`: some of it is still to be."""
        self._writable, self._owed = writable, owed
        self._urgent: deque[Node] = deque()
        self._wanted: deque[Node] = deque()
        self._all: deque[Node] = deque()
        self._old: deque[Node] = deque()
        self._old_at = 0.0
        self._refused: dict[Node, float] = {}
        self.more = False
        """The last look was cut short: there may be something all the same."""

    def want(self, node: Node) -> None:
        self._wanted.append(node)

    def retry(self, node: Node) -> None:
        """It was refused, or what goes before it; that is no longer so."""
        for n in node.path():
            self._refused.pop(n, None)

    def hurry(self, node: Node) -> None:
        if node not in self._urgent:
            self._urgent.append(node)

    def want_all(self, nodes: Iterable[Node]) -> None:
        """In this order."""
        self._refused.clear()
        self._all = deque(nodes)

    def refuse(self, node: Node) -> None:
        if len(self._refused) > 10_000:
            self._refused.clear()
        self._refused[node] = node.last_use

    def is_asked_for(self, node: Node) -> bool:
        """Whether somebody waits for it, and it will be looked at."""
        return node in self._urgent and not self.is_refused(node)

    def is_refused(self, node: Node) -> bool:
        return self._refused.get(node) == node.last_use

    @property
    def is_urgent(self) -> bool:
        return bool(self._urgent)

    @property
    def pending(self) -> bool:
        return bool(self._urgent or self._wanted or self._all)

    def left_over(self) -> bool:
        """Whether something that was wanted is not written, and will not be for now."""
        return any(self._owed(n) for n in [*self._wanted, *self._refused])

    def next(self, old: Callable[[], Iterable[Node]] | None) -> Node | None:
        """`old` lists what is to be written ahead, if memory is nearly full."""
        self.more = False
        for queue in (self._urgent, self._wanted, self._all):
            if (found := self._look(queue)) is not None:
                return found
        if old is None:
            return None
        if not self._old and time.monotonic() - self._old_at > OLD_EVERY:
            self._old_at = time.monotonic()
            self._old = deque(old())
        return self._look(self._old)

    def _look(self, queue: deque[Node]) -> Node | None:
        for _ in range(min(LOOKS, len(queue))):
            node = queue[0]
            if not self.is_refused(node) and self._writable(node):
                return node
            queue.popleft()
            if not self.is_refused(node) and self._owed(node) and queue is self._wanted:
                queue.append(node)  # when its request has ended
        self.more = self.more or (bool(queue) and queue is not self._wanted)
        return None
