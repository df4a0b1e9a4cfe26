"""The protocols of the tier below memory. `tiers/` implements them; memory knows no files.

    Tier          the tier as a whole: saves nodes that memory evicts, and fetches them again
    Fetch         brings KV back to memory for one request, in steps
    TierPayload   attached to a node (`Node.below`, in `tree`): how much of the node the tier has
    TierStats     the statistics of a tier
    NoTier        a tier that holds nothing: a base class for small tiers
    KvPayload     the KV of a node's first tokens, and no checkpoint: a base class for their payloads

Methods are called with the cache's lock held, unless their docstring says otherwise. Methods that return `Work` may
release it between steps. docs/extending.md explains how to write one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track
from onefold.cache.memory.tree import TierPayload

__all__ = ["Fetch", "KvPayload", "NoTier", "Tier", "TierPayload", "TierStats"]


REMOTE = "remote"
"""The mode of a tier that is a store of several machines."""


@dataclass(frozen=True)
class TierStats:
    """The statistics of a tier at a moment. Counts begin when the cache is made, unless stated otherwise."""

    mode: str = "off"
    """off, back, through or remote."""
    folder: str = ""
    failed: str = ""
    """Why the tier writes nothing; empty if it does."""
    budget_bytes: int = 0
    used_bytes: int = 0
    """On disk, in blocks of 4,096."""
    records: int = 0
    written_bytes: int = 0
    written_today_bytes: int = 0
    written_ever_bytes: int = 0
    """To this folder, by any process."""
    daily_limit_bytes: int = 0
    """0 is no limit."""
    pending: bool = False
    """Whether something is being written or is queued."""
    spilled_tokens: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    skipped_tokens: int = 0
    """Tokens in the tier that were not read because computing them is quicker."""
    rejected_records: int = 0
    evicted_records: int = 0
    left_tokens: int = 0
    """Tokens that were in memory and not in the tier when the cache was closed."""
    record_tokens: int = 0
    """Of a record, where all have as many: prompts are read and written in whole records."""
    below: TierStats | None = None
    """The statistics of the tier below this one, if there are two."""


class Written(NamedTuple):
    """Bytes that this process has written, by where; None where nothing can be."""

    disk: int | None = None
    shared: int | None = None
    """To a store that machines share."""


LONGEST_WAIT = 0.05
"""Seconds that a step of a fetch waits for another machine, unless its caller has less time."""


class Fetch(Protocol):
    """Tokens of one request on their way back into memory."""

    driver: threading.Thread | None
    """The thread that runs all steps; None if the caller runs them one by one."""
    owner: object
    """Kept alive by the fetch: the cache."""

    @property
    def done(self) -> bool: ...
    @property
    def rejected(self) -> bool:
        """Whether a record failed a check. `planning` again finds what is left."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens that were fetched so far."""
        ...

    @property
    def remote_tokens(self) -> int:
        """How many of these came from a store that machines share."""
        ...

    @property
    def before(self) -> int:
        """The position at which the request could have been resumed without the fetch."""
        ...

    @property
    def waits(self) -> bool:
        """Whether nothing can be done but wait for another machine."""
        ...

    def step(self, seconds: float = LONGEST_WAIT) -> bool:
        """Fetch a part, or wait for it, for so long at most. Returns False when the fetch is complete. Called without
        the lock."""
        ...

    def finish(self) -> None:
        """End the fetch: memory owns what was fetched. Called with or without the lock, any number of times."""
        ...

    def holds(self, track: Track) -> bool:
        """Whether this track holds the fetch's buffer."""
        ...


def nothing_shared(tree: Tree, tokens: Tokens) -> int:
    """The `shared_tokens` of a tier without a store that machines share."""
    return 0


class Tier(Protocol):
    grid: int
    """At multiples of so many tokens the tier can store checkpoints; 0 if it can anywhere, or nowhere."""
    shared_tokens: Callable[[Tree, Tokens], int]
    """Returns how many of these tokens, from the first on, a store that machines share is known to have. Does not ask
    it, and does not need the lock."""

    # -- nodes -----------------------------------------------------------------------------------

    def attach(self, tree: Tree, namespace: Hashable) -> None:
        """Add the nodes that the tier has to the tree of a caller's namespace. Called at each use of the tree."""
        ...

    def touch(self, path: list[Node], used: float) -> None:
        """Record that these nodes were used at time `used`."""
        ...

    def committed(self, node: Node) -> None:
        """Note that the node is committed, and may be written from now on."""
        ...

    def is_clean(self, node: Node) -> bool:
        """Whether the tier has all that memory has of the node."""
        ...

    def saving(self, node: Node, until: float) -> Work[bool]:
        """Write a node that is about to be evicted, and wait for that until `until`. Sets `Node.below`. Returns False
        if the tier does not have the node afterwards."""
        ...

    def count_lost(self, node: Node) -> None:
        """Count a node that is evicted although the tier may not have it."""
        ...

    def leave(self, node: Node) -> None:
        """Drop what the tier has of a node that is being removed from its tree. Sets `Node.below` to None."""
        ...

    def drop_below(self, node: Node) -> None:
        """Drop the node's descendants, which are in the tier only, because the tier does not have the node itself.
        Removes them from their tree."""
        ...

    def clear(self) -> None:
        """Drop everything of this model that no node refers to."""
        ...

    # -- memory ----------------------------------------------------------------------------------

    def awaiting_copies(self, slabs: Iterable[Slab]) -> Work[None]:
        """Wait, for a limited time, until the tier is copying none of these slabs."""
        ...

    def making_way(self, path: list[Node], slabs: Iterable[Slab]) -> Work[bool]:
        """Prepare for a request that wants to continue in these slabs. Returns False if it should write to a new slab
        instead."""
        ...

    @property
    def extra_bytes(self) -> int:
        """Bytes of memory that the tier uses temporarily."""
        ...

    def draining(self, until: float) -> Work[None]:
        """Wait until the tier has released its `extra_bytes`, at most until `until`."""
        ...

    # -- requests --------------------------------------------------------------------------------

    def planning(self, tree: Tree, tokens: Tokens, reserve_tokens: int) -> Work[Fetch | None]:
        """Returns a fetch of what a request with these tokens can use; None if nothing is worth fetching. Raises
        BudgetError if there is no room. The fetch is in `CacheState.restores` while it holds a buffer."""
        ...

    def awaiting_others(self, tree: Tree, tokens: Tokens) -> Work[None]:
        """Wait while another thread fetches KV of these tokens."""
        ...

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """Record how long computing `n_tokens` took: fetching is worth it only if it is quicker."""
        ...

    # -- the whole of it -------------------------------------------------------------------------

    def flush(self, *, everything: bool, until: float, reports: bool = False) -> bool:
        """Write the dirty nodes that are due, or with `everything` all dirty nodes, and wait until they survive a power
        loss. Returns False if it took too long or failed. With `reports`, no later flush reports the same lost nodes.
        Needs only the inner lock."""
        ...

    def give_up(self) -> None:
        """End all flushes now, and later ones at once. Called without the lock."""
        ...

    def stop(self, until: float | None) -> None:
        """Write all dirty nodes, at most until `until`, and end the tier's threads; with None, only end them. Called
        without the lock, before `close`, any number of times."""
        ...

    def close(self) -> None:
        """Release what the tier holds outside of memory. Called after `stop`."""
        ...

    def abandon(self) -> None:
        """Stop and close, because the cache was dropped without `close`. Called without the lock, on any thread."""
        ...

    @property
    def written(self) -> Written:
        """What this process has written. Needs no lock."""
        ...

    def stats(self) -> TierStats: ...
    def reasons(self) -> Counter[str]:
        """Returns the reasons why something was not saved or fetched, each with its count."""
        ...

    def check(self) -> list[str]:
        """Recounts everything. Returns a sentence for each finding."""
        ...


class KvPayload(TierPayload):
    """The KV of a node's first tokens, up to `kv`, and no checkpoint. A derived class has `kv`, `cut`, `join` and
    `moved`."""

    has_point = has_saved_point = False
    point_bytes = 0

    @property
    def fetchable(self) -> int:
        return self.kv

    @property
    def known(self) -> int:
        return self.kv

    @property
    def readable(self) -> int:
        return self.kv

    def reaches_beyond(self, lower: Node) -> bool:
        return False


class NoTier:
    """A tier that holds nothing."""

    grid = 0
    shared_tokens: Callable[[Tree, Tokens], int] = staticmethod(nothing_shared)

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
    def written(self) -> Written:
        return Written()

    def stats(self) -> TierStats:
        return TierStats()

    def reasons(self) -> Counter[str]:
        return Counter()

    def check(self) -> list[str]:
        return []
