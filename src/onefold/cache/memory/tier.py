"""What memory asks of the tier below it. `tiers/` implements this; memory knows no files.

    Tier          the tier as a whole: told of commits and uses, asked to save what must make way
    TierPayload   what hangs on a node (`Node.below`, in `tree`): how much of the node the tier has

All methods are called with the cache's lock held. What returns `Work` may let go of it between its steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from onefold.cache.memory.lock import Work
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.tree import Node, TierPayload, Tree

__all__ = ["Tier", "TierPayload"]


class Tier(Protocol):
    def attach(self, tree: Tree, namespace: Hashable) -> None:
        """Have the tree of a caller's namespace know what the tier has of it."""
        ...

    def touch(self, path: list[Node], used: float) -> None:
        """These nodes were used at that time."""
        ...

    def committed(self, node: Node) -> None:
        """The node may be written now."""
        ...

    def is_clean(self, node: Node) -> bool:
        """Whether the tier has all that memory has of the node."""
        ...

    def saving(self, node: Node, until: float) -> Work[bool]:
        """Write a node that is about to be evicted, and wait for that. False if the tier does not have it."""
        ...

    def count_lost(self, node: Node) -> None:
        """The node leaves memory, and the tier may not have it."""
        ...

    def awaiting_copies(self, slabs: Iterable[Slab]) -> Work[None]:
        """Wait, not for long, until nothing is being copied out of these."""
        ...

    def making_way(self, path: list[Node], slabs: Iterable[Slab]) -> Work[bool]:
        """A request wants to write behind these buffers. False if it had better write elsewhere."""
        ...

    @property
    def extra_bytes(self) -> int:
        """Memory that the tier uses for a while, and gives back."""
        ...

    def draining(self, until: float) -> Work[None]:
        """Wait, until then at most, for `extra_bytes` to come back."""
        ...

    def leave(self, node: Node) -> None:
        """The node is being removed from its tree."""
        ...

    def drop_below(self, node: Node) -> None:
        """Give up what the tier has of the node's descendants, because the node itself is not there."""
        ...

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """So many tokens were computed in so long: reading is worth it only if it is quicker."""
        ...

    def clear(self) -> None:
        """Give up everything of this model's that no node has."""
        ...

    def check(self) -> list[str]:
        """Recount; says what is not as it should be."""
        ...
