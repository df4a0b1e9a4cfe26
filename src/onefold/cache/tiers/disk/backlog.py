"""The backlog: which node is written to disk next.

- First the nodes that a caller waits for; then those committed in write-through mode, in order; then all, when all are
  to be written; then old ones, while memory is nearly full.
- A node that cannot be written now, because a request writes to its buffer, is passed over and tried again. One that
  was refused (no room on disk, say) is not tried again before it was used again, or all nodes are to be written.
- A search takes a bounded time, however many nodes there are: the cache's lock is held meanwhile.

Knows nothing of records. No MLX in this file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from onefold.cache.memory.tree import Node

LOOKS = 64
"""Nodes that are looked at in one search."""
OLD_EVERY = 1.0
"""Seconds after which the list of old nodes is made again."""
REFUSED_MOST = 10_000


class Refusals:
    """Nodes that could not be written, and when they had last been used then."""

    def __init__(self) -> None:
        self._last_use: dict[Node, float] = {}

    def add(self, node: Node) -> None:
        """Do not write this node before it is used again."""
        if len(self._last_use) > REFUSED_MOST:
            self._last_use.clear()
        self._last_use[node] = node.last_use

    def has(self, node: Node) -> bool:
        """Whether the node was refused, and not used since."""
        return self._last_use.get(node) == node.last_use

    def retry(self, node: Node) -> None:
        """Allow a node and its ancestors to be written again."""
        for n in node.path():
            self._last_use.pop(n, None)

    def nodes(self) -> list[Node]:
        """Returns all nodes that were refused."""
        return list(self._last_use)

    def clear(self) -> None:
        """Allow all nodes to be written again."""
        self._last_use.clear()


class Backlog:
    def __init__(
        self, refusals: Refusals, is_writable: Callable[[Node], bool], is_dirty: Callable[[Node], bool]
    ) -> None:
        """`is_writable`: some of the node can be written now. `is_dirty`: some of it is still to be written."""
        self._refusals, self._is_writable, self._is_dirty = refusals, is_writable, is_dirty
        self._urgent: deque[Node] = deque()
        self._wanted: deque[Node] = deque()
        self._all: deque[Node] = deque()
        self._old: deque[Node] = deque()
        self._old_at = 0.0
        self.more = False
        """The last search was cut short: there may be a node to write though it found none."""

    def want(self, node: Node) -> None:
        """Queue a node that is to be written through."""
        self._wanted.append(node)

    def hurry(self, node: Node) -> None:
        """Queue a node that a caller waits for."""
        if node not in self._urgent:
            self._urgent.append(node)

    def want_all(self, nodes: Iterable[Node]) -> None:
        """Queue all nodes, in this order, refused ones included."""
        self._refusals.clear()
        self._all = deque(nodes)

    def is_asked_for(self, node: Node) -> bool:
        """Whether a caller waits for the node, and it will be tried."""
        return node in self._urgent and not self._refusals.has(node)

    @property
    def is_urgent(self) -> bool:
        """Whether a caller waits for a node."""
        return bool(self._urgent)

    @property
    def pending(self) -> bool:
        """Whether any node is queued, old ones aside."""
        return bool(self._urgent or self._wanted or self._all)

    def left_over(self) -> bool:
        """Whether a node that was queued is still dirty, and will not be written for now."""
        return any(self._is_dirty(n) for n in [*self._wanted, *self._refusals.nodes()])

    def next(self, old: Callable[[], Iterable[Node]] | None) -> Node | None:
        """Returns the next node to write, None if none was found. `old` lists the nodes to write ahead, if memory is
        nearly full."""
        self.more = False
        for queue in (self._urgent, self._wanted, self._all):
            if (found := self._search(queue)) is not None:
                return found
        if old is None:
            return None
        if not self._old and time.monotonic() - self._old_at > OLD_EVERY:
            self._old_at = time.monotonic()
            self._old = deque(old())
        return self._search(self._old)

    def _search(self, queue: deque[Node]) -> Node | None:
        for _ in range(min(LOOKS, len(queue))):
            node = queue[0]
            if not self._refusals.has(node) and self._is_writable(node):
                return node
            queue.popleft()
            if not self._refusals.has(node) and self._is_dirty(node) and queue is self._wanted:
                queue.append(node)  # it can be written when its request has ended
        self.more = self.more or (bool(queue) and queue is not self._wanted)
        return None
