"""What a cache asks of the tier below memory. `tiers/` implements this; memory knows no files.

    Tier          the tier as a whole: saves nodes that memory evicts, and gives them back
    Fetch         one return of KV to memory, in steps
    TierPayload   what hangs on a node (`Node.below`, in `tree`): how much of the node the tier has
    TierStats     what a tier counts
    NoTier        a tier that holds nothing: a base for small tiers, which override what they do

Methods are called with the cache's lock held, unless they say otherwise. What returns `Work` may let go of it between
its steps. docs/extending.md has a small tier as an example.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from onefold.cache.memory.lock import Work
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.track import Track
from onefold.cache.memory.tree import Node, TierPayload, Tokens, Tree

__all__ = ["Fetch", "NoTier", "Tier", "TierPayload", "TierStats"]


@dataclass(frozen=True)
class TierStats:
    """A tier at a moment. Counts are since the cache was made, unless they say otherwise."""

    mode: str = "off"
    """off, back or through."""
    folder: str = ""
    failed: str = ""
    """Why nothing is written any more, or was from the start."""
    budget_bytes: int = 0
    used_bytes: int = 0
    """On disk, in blocks of 4,096."""
    records: int = 0
    written_bytes: int = 0
    written_today_bytes: int = 0
    written_ever_bytes: int = 0
    """To this folder, by any process."""
    daily_limit_bytes: int = 0
    """0 is none."""
    pending: bool = False
    """Something is being written, or waits to be."""
    spilled_tokens: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    skipped_tokens: int = 0
    """In the tier, and not read because computing them is quicker."""
    rejected_records: int = 0
    evicted_records: int = 0
    left_tokens: int = 0
    """In memory and not in the tier, when the cache was closed."""


class Fetch(Protocol):
    """Tokens of one request on their way back into memory."""

    driver: threading.Thread | None
    """The thread that runs all steps, if one does."""
    owner: object
    """Kept alive by the fetch: the cache."""

    @property
    def done(self) -> bool: ...
    @property
    def rejected(self) -> bool:
        """Something failed a check: another `planning` may find what is left."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens that came from the tier so far."""
        ...

    @property
    def before(self) -> int:
        """How far the request could have been resumed without."""
        ...

    def step(self) -> bool:
        """Fetch a part. Returns False when there is nothing more to do. Called without the lock."""
        ...

    def finish(self) -> None:
        """End it: memory owns what was fetched. Called with or without the lock, any number of times."""
        ...

    def holds(self, track: Track) -> bool:
        """Whether this track holds the fetch's buffer."""
        ...


class Tier(Protocol):
    # -- nodes -----------------------------------------------------------------------------------

    def attach(self, tree: Tree, namespace: Hashable) -> None:
        """Give the tree of a caller's namespace the nodes that the tier has of it. Called at each use."""
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
        """Write a node that is about to be evicted, and wait for that. Returns False if the tier does not have it. The
        tier sets `Node.below`."""
        ...

    def count_lost(self, node: Node) -> None:
        """The node leaves memory, and the tier may not have it."""
        ...

    def leave(self, node: Node) -> None:
        """The node is being removed from its tree. The tier sets `Node.below` to None."""
        ...

    def drop_below(self, node: Node) -> None:
        """Drop the node's descendants, which the tier alone has, because it does not have the node itself. The tier
        removes them from their tree."""
        ...

    def clear(self) -> None:
        """Drop everything of this model that no node has."""
        ...

    # -- memory ----------------------------------------------------------------------------------

    def awaiting_copies(self, slabs: Iterable[Slab]) -> Work[None]:
        """Wait, not for long, until nothing is being copied out of these."""
        ...

    def making_way(self, path: list[Node], slabs: Iterable[Slab]) -> Work[bool]:
        """A request wants to write behind these buffers. Returns False if it had better write elsewhere."""
        ...

    @property
    def extra_bytes(self) -> int:
        """Memory that the tier uses for a while, and gives back."""
        ...

    def draining(self, until: float) -> Work[None]:
        """Wait, until then at most, for `extra_bytes` to come back."""
        ...

    # -- requests --------------------------------------------------------------------------------

    def planning(self, tree: Tree, tokens: Tokens, reserve_tokens: int) -> Work[Fetch | None]:
        """Returns a fetch of what a request of these tokens can use, None if nothing is worth it. Raises BudgetError if
        there is no room. The fetch is in `CacheState.restores` while it holds a buffer."""
        ...

    def awaiting_others(self, tree: Tree, tokens: Tokens) -> Work[None]:
        """Wait while another thread fetches something that these tokens need."""
        ...

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """So many tokens were computed in so long: fetching is worth it only if it is quicker."""
        ...

    # -- the whole of it -------------------------------------------------------------------------

    def flush(self, *, everything: bool, until: float, reports: bool = False) -> bool:
        """Write the dirty nodes that are due, or with `everything` all, and wait for that. Returns False if it took
        too long or failed. With `reports`, no later flush reports the same lost nodes. The inner lock is enough."""
        ...

    def give_up(self) -> None:
        """End all flushes now, and later ones at once. Called without the lock."""
        ...

    def stop(self, until: float | None) -> None:
        """Write all dirty nodes, until then, and end the tier's threads; with None, only end them. Called without the
        lock, before `close`, any number of times."""
        ...

    def close(self) -> None:
        """Release what the tier holds outside of memory. After `stop`."""
        ...

    def abandon(self) -> None:
        """The cache was dropped without `close`: stop and close. Called without the lock, on any thread."""
        ...

    @property
    def written_bytes(self) -> int:
        """Bytes that this process has written. Needs no lock."""
        ...

    def stats(self) -> TierStats: ...
    def reasons(self) -> Counter[str]:
        """Returns why something was not saved or fetched, and how often."""
        ...

    def check(self) -> list[str]:
        """Recount. Returns a sentence for each thing that is wrong."""
        ...


class NoTier:
    """A tier that holds nothing."""

    def attach(self, tree: Tree, namespace: Hashable) -> None: ...
    def touch(self, path: list[Node], used: float) -> None: ...
    def committed(self, node: Node) -> None: ...
    def is_clean(self, node: Node) -> bool:
        return False

    def saving(self, node: Node, until: float) -> Work[bool]:
        yield from ()
        return False

    def count_lost(self, node: Node) -> None: ...
    def leave(self, node: Node) -> None:
        node.below = None

    def drop_below(self, node: Node) -> None: ...
    def clear(self) -> None: ...
    def awaiting_copies(self, slabs: Iterable[Slab]) -> Work[None]:
        yield from ()

    def making_way(self, path: list[Node], slabs: Iterable[Slab]) -> Work[bool]:
        yield from ()
        return True

    @property
    def extra_bytes(self) -> int:
        return 0

    def draining(self, until: float) -> Work[None]:
        yield from ()

    def planning(self, tree: Tree, tokens: Tokens, reserve_tokens: int) -> Work[Fetch | None]:
        yield from ()
        return None

    def awaiting_others(self, tree: Tree, tokens: Tokens) -> Work[None]:
        yield from ()

    def prefilled(self, n_tokens: int, seconds: float) -> None: ...
    def flush(self, *, everything: bool, until: float, reports: bool = False) -> bool:
        return True

    def give_up(self) -> None: ...
    def stop(self, until: float | None) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...
    @property
    def written_bytes(self) -> int:
        return 0

    def stats(self) -> TierStats:
        return TierStats()

    def reasons(self) -> Counter[str]:
        return Counter()

    def check(self) -> list[str]:
        return []
