"""Two tiers below memory: the machine's own disk, and below it a store that several machines share.

- Nodes are the disk's: what memory evicts goes there. A commit is offered to both.
- What a request needs is read from the disk first, and then from the store what the disk does not have.
- If one of the two cannot be opened, the other is used alone, and the statistics say why.

Methods are called with the cache's lock held, unless `Tier` says otherwise.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from onefold.cache.memory.lock import CacheLock, Work
from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import LONGEST_WAIT, Fetch, NoTier, Tier, TierStats, Written
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track
from onefold.cache.tiers.disk.tier import DiskSettings, open_disk
from onefold.cache.tiers.identity import Identity
from onefold.cache.tiers.remote.tier import RemoteSettings, open_remote
from onefold.errors import BudgetError


@dataclass(frozen=True)
class StackSettings:
    disk: DiskSettings
    remote: RemoteSettings


class Failed(NoTier):
    """A tier that could not be opened."""

    def __init__(self, stats: TierStats) -> None:
        self._stats = stats

    def stats(self) -> TierStats:
        return self._stats


class Stack:
    def __init__(self, lock: CacheLock, disk: Tier, remote: Tier) -> None:
        self._lock, self.disk, self.remote = lock, disk, remote
        self.grid, self.shared_tokens = remote.grid, remote.shared_tokens
        # Nodes are the disk's. `clear` removes what it has: what lies in the store is other machines', too.
        self.touch, self.is_clean, self.saving = disk.touch, disk.is_clean, disk.saving
        self.count_lost, self.leave, self.drop_below, self.clear = (
            disk.count_lost, disk.leave, disk.drop_below, disk.clear
        )  # fmt: skip
        self.awaiting_copies, self.making_way, self.draining = disk.awaiting_copies, disk.making_way, disk.draining

    def attach(self, tree: Tree, namespace: Hashable) -> None:
        self.disk.attach(tree, namespace)
        self.remote.attach(tree, namespace)

    def committed(self, node: Node) -> None:
        self.disk.committed(node)
        self.remote.committed(node)

    @property
    def extra_bytes(self) -> int:
        return self.disk.extra_bytes

    # -- requests --------------------------------------------------------------------------------

    def planning(self, tree: Tree, tokens: Tokens, reserve_tokens: int) -> Work[Fetch | None]:
        first = yield from self.disk.planning(tree, tokens, reserve_tokens)
        if first is None:
            return (yield from self.remote.planning(tree, tokens, reserve_tokens))
        return FetchFromBoth(
            self._lock, first, lambda: self.remote.planning(tree, tokens, reserve_tokens)
        )

    def awaiting_others(self, tree: Tree, tokens: Tokens) -> Work[None]:
        yield from self.disk.awaiting_others(tree, tokens)
        yield from self.remote.awaiting_others(tree, tokens)

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        self.disk.prefilled(n_tokens, seconds)
        self.remote.prefilled(n_tokens, seconds)

    # -- the whole of it -------------------------------------------------------------------------

    def flush(self, *, everything: bool, until: float, reports: bool = False) -> bool:
        on_disk = self.disk.flush(everything=everything, until=until, reports=reports)
        return self.remote.flush(everything=everything, until=until, reports=reports) and on_disk

    def give_up(self) -> None:
        self.disk.give_up()
        self.remote.give_up()

    def stop(self, until: float | None) -> None:
        self.disk.stop(until)
        self.remote.stop(until)

    def close(self) -> None:
        self.disk.close()
        self.remote.close()

    def abandon(self) -> None:
        self.disk.abandon()
        self.remote.abandon()

    @property
    def written(self) -> Written:
        return Written(self.disk.written.disk, self.remote.written.shared)

    def stats(self) -> TierStats:
        return dataclasses.replace(self.disk.stats(), below=self.remote.stats())

    def reasons(self) -> Counter[str]:
        return self.disk.reasons() + self.remote.reasons()

    def check(self) -> list[str]:
        return self.disk.check() + self.remote.check()


class FetchFromBoth:
    """What the disk has of a request, and then what the store has behind it."""

    def __init__(self, lock: CacheLock, first: Fetch, planning: Callable[[], Work[Fetch | None]]) -> None:
        """`planning()` plans the second fetch, when the first is done."""
        self._lock, self._first, self._planning = lock, first, planning
        self._second: Fetch | None = None
        self.done = False
        self.driver: threading.Thread | None = None
        self.owner: object = None

    @property
    def rejected(self) -> bool:
        return self._first.rejected

    @property
    def tokens(self) -> int:
        return self._first.tokens + self.remote_tokens

    @property
    def remote_tokens(self) -> int:
        return 0 if self._second is None else self._second.tokens

    @property
    def before(self) -> int:
        return self._first.before

    @property
    def waits(self) -> bool:
        return not self.done and (self._second or self._first).waits

    def step(self, seconds: float = LONGEST_WAIT) -> bool:
        at = self._second or self._first
        at.owner, at.driver = self.owner, self.driver
        if self.done or at.step(seconds):
            return not self.done
        if self._second is None and not self.rejected:
            self._second = self._next()
            if self._second is not None:
                return True
        self.done = True
        return False

    def _next(self) -> Fetch | None:
        """Returns the second fetch; None if the store has nothing to ask for, or memory no room."""
        try:
            return self._lock.run(self._planning())
        except BudgetError:
            return None

    def finish(self) -> None:
        self.done = True
        self._first.finish()
        if self._second is not None:
            self._second.finish()

    def holds(self, track: Track) -> bool:
        return any(fetch is not None and fetch.holds(track) for fetch in (self._first, self._second))


def open_stack(settings: StackSettings, state: CacheState, identity: Identity) -> Stack | TierStats:
    """Open both tiers. One that cannot be used is replaced by its statistics. Raises ConfigError, and FolderInUse."""
    disk = open_disk(settings.disk, state, identity)
    opened = False
    try:
        remote = open_remote(settings.remote, state, identity)
        opened = True
    finally:
        if not opened and not isinstance(disk, TierStats):
            disk.abandon()
    if isinstance(disk, TierStats) and isinstance(remote, TierStats):
        return dataclasses.replace(disk, below=remote)
    return Stack(state.lock, _or_failed(disk), _or_failed(remote))


def _or_failed(opened: Tier | TierStats) -> Tier:
    return Failed(opened) if isinstance(opened, TierStats) else opened
