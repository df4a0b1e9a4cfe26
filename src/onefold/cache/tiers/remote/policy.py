"""What of a commit is written to a shared store, and when.

    all      every turn, at once
    shared   what two conversations have in common, at once; the ends of turns when they were not continued for a while
    none     nothing: the store is read only

In the middle of a conversation only this machine will use what it has just computed. Another one needs it when the
conversation has been moved, or when a conversation begins in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

from onefold.cache.memory.payloads import Node

WRITES = ("shared", "all", "none")
DELAY = 30.0
"""Seconds after which the end of a turn is written."""


class Policy:
    def __init__(self, write: str, delay: float = DELAY) -> None:
        self.write, self._delay = write, delay

    @property
    def writes(self) -> bool:
        return self.write != "none"

    def is_shared(self, node: Node) -> bool:
        """Whether conversations branch off at the node's end."""
        return self.write == "shared" and len(node.children) > 1

    def ends(self, node: Node) -> Iterator[tuple[Node, float]]:
        """Yields the ends of what is to be written of the path to this node, each with the seconds until then."""
        if self.write == "all":
            yield node, 0.0
        elif self.write == "shared":
            shared = next((n for n in reversed(node.path()[:-1]) if self.is_shared(n)), None)
            if shared is not None:
                yield shared, 0.0
            yield node, self._delay
