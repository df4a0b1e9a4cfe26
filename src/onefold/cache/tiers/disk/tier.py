"""The disk tier of a cache: its folder, and what a cache asks of it (`memory.tier.Tier`).

- A record that is removed, for whatever reason, is taken from its nodes, with all its descendants (`linking`).
- Writing is `spilling`'s business, reading `restoring`'s, namespaces are `namespaces`'.

Methods are called with the cache's lock held, unless they say otherwise.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import Fetch, TierStats, Written, nothing_shared
from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers.disk import ondisk, restoring
from onefold.cache.tiers.disk.linking import Links
from onefold.cache.tiers.disk.namespaces import Namespaces
from onefold.cache.tiers.disk.others import log_others
from onefold.cache.tiers.disk.reading import Reading
from onefold.cache.tiers.disk.reading_ranges import AHEAD
from onefold.cache.tiers.disk.spilling import Spiller
from onefold.cache.tiers.identity import Identity
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.record import NAMESPACE_FORMAT
from onefold.cache_folder import disk_folder
from onefold.errors import ConfigError, OnefoldError
from onefold.sizes import parse_size, show_size

log = logging.getLogger("onefold")

MODES = ("back", "through")
ABANDONED_SECONDS = 30.0
DEFAULT_MOST = 100 * 1000**3
DiskStats = TierStats


@dataclass(frozen=True)
class DiskSettings:
    folder: str | os.PathLike[str]
    """The text "auto" becomes the default folder (`cache_folder.kv_folder`)."""
    budget: int | float | str | None = None
    """By default half of what is free there, and at most 100 GB."""
    mode: str = "back"
    daily_limit: int | float | str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"a disk mode is 'back' or 'through', not {self.mode!r}")
        if not isinstance(self.folder, (str, os.PathLike)) or not os.fspath(self.folder):
            raise ConfigError(f"disk is a folder, not {self.folder!r}")
        object.__setattr__(self, "folder", disk_folder(self.folder))
        if self.budget is not None:
            parse_size(self.budget, total_bytes=1 << 60)
        if isinstance(self.daily_limit, str) and "%" in self.daily_limit:
            raise ConfigError(f"a daily limit is a size such as '20GB', not a share: {self.daily_limit!r}")
        if self.daily_limit is not None:
            parse_size(self.daily_limit)


def open_disk(settings: DiskSettings, state: CacheState, identity: Identity) -> Disk | DiskStats:
    """Open the disk tier of a cache. A folder that cannot be used is logged, and only its statistics are returned.
    Raises ConfigError if the folder is not one of ours, and FolderInUse if another process writes there."""
    layout = [[[a.heads, a.dim, str(a.dtype)] for a in s.arrays] for s in state.store.specs]
    about = identity.about | {"format": NAMESPACE_FORMAT, "layout": layout}
    try:
        return Disk(settings, state, identity._replace(about=about))
    except OSError as error:
        why = error.strerror or str(error)
        log.warning("the disk cache in %s cannot be used: %s. KV is kept in memory alone", settings.folder, why)
        return DiskStats(failed=why, folder=os.fspath(settings.folder))


class Disk:
    grid = 0
    shared_tokens: Callable[[Tree, Tokens], int] = staticmethod(nothing_shared)

    def __init__(self, settings: DiskSettings, state: CacheState, identity: Identity) -> None:
        """Raises OSError if the folder cannot be used, ConfigError if it is not one of ours, and FolderInUse."""
        self.mode = settings.mode
        folder = Folder.make(settings.folder)
        try:
            self.catalog = Catalog(
                folder,
                _budget(settings.budget, folder),
                daily_bytes=None if settings.daily_limit is None else parse_size(settings.daily_limit),
            )
            self._lock = state.lock
            self._state = weakref.ref(state)  # the tier outlives the cache, which the state may refer to
            self.layout = Layout(identity.about["layout"], identity.points)
            """What this model's records are made of."""
            self._namespaces = Namespaces(self.catalog, identity)
            self.links = Links(state.nodes, self.catalog)
            self.spiller = Spiller(
                state, self.links, self.layout, through=settings.mode == "through", space_of=self._namespaces.name_of
            )
            log_others(self.catalog, identity)
        except (OSError, OnefoldError):
            folder.unlock()
            raise
        self.reader = concurrent.futures.ThreadPoolExecutor(AHEAD, "onefold-read")
        """Reads the next records while one is being checked. Its threads are started when they are first used."""
        self.reading = Reading(self.links, self.layout, self.reader, self.spiller.committed)
        """What restores share."""
        if self.catalog.budget_bytes < 2 * self.spiller.record_bytes:
            log.warning(
                "disk budget %s is too small to be useful: one record takes up to %s; give a larger disk_budget",
                show_size(self.catalog.budget_bytes),
                show_size(self.spiller.record_bytes),
            )

    # -- nodes --------------------------------------------------------------------------------------------

    is_clean = staticmethod(ondisk.is_clean)

    def attach(self, tree: Tree, namespace: Hashable) -> None:
        self._namespaces.attach(tree, namespace)

    def touch(self, path: list[Node], used: float) -> None:
        for node in path:
            self.catalog.uses.touch(ondisk.all_records_of(node), used)

    def committed(self, node: Node) -> None:
        self.spiller.committed(node)

    def saving(self, node: Node, until: float) -> Work[bool]:
        return self.spiller.saving(node, until)

    def count_lost(self, node: Node) -> None:
        self.spiller.flusher.count_lost(node)

    def leave(self, node: Node) -> None:
        self.spiller.queue_parent(node)
        self.links.leave(node)

    def drop_below(self, node: Node) -> None:
        self.links.drop_below(node)

    def clear(self) -> None:
        """Remove every record of this model that no node has, in all its namespaces, but for those being written."""
        unused = [r for r in self.catalog.records() if not r.nodes]
        ours = self._namespaces.ours(r.namespace for r in unused)
        self.links.forget([r for r in unused if r.namespace in ours])

    # -- memory -------------------------------------------------------------------------------------------

    def awaiting_copies(self, slabs: Iterable[Slab]) -> Work[None]:
        return self.spiller.awaiting_copies(slabs)

    def making_way(self, path: list[Node], slabs: Iterable[Slab]) -> Work[bool]:
        return self.spiller.making_way(path, slabs)

    @property
    def extra_bytes(self) -> int:
        return self.spiller.extra_bytes

    def draining(self, until: float) -> Work[None]:
        return self.spiller.draining(until)

    # -- requests -----------------------------------------------------------------------------------------

    def planning(self, tree: Tree, tokens: Tokens, reserve_tokens: int) -> Work[Fetch | None]:
        state = self._state()
        assert state is not None, "the cache that asks has it"
        return restoring.planning(state, self.reading, tree, tokens, reserve_tokens)

    def awaiting_others(self, tree: Tree, tokens: Tokens) -> Work[None]:
        state = self._state()
        assert state is not None, "the cache that asks has it"
        return restoring.awaiting_others(state, tree, tokens)

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        self.reading.prefill_pace.took(seconds, n_tokens)

    # -- the whole of it ----------------------------------------------------------------------------------

    def flush(self, *, everything: bool, until: float, reports: bool = False) -> bool:
        written = self.spiller.flusher.flush(everything=everything, until=until, reports=reports)
        return written and not self.catalog.failed

    def give_up(self) -> None:
        self.spiller.flusher.give_up()

    def stop(self, until: float | None) -> None:
        if until is not None:
            with self._lock.inner:
                self.spiller.flusher.write(everything=True, until=until)  # durable with `close`
                self.reading.counts["left_tokens"] = self.spiller.flusher.unsaved()
        self.spiller.stop()

    def close(self) -> None:
        """Note what a restart should know, and release the folder. After `stop`."""
        self.reader.shutdown()
        if not self.spiller.writes:  # else a record is still being written, and files are that thread's
            self.catalog.empty_bin()
            self.catalog.note(self.catalog.uses.take(force=True), force=True)
            self.catalog.refresh_indexes()
            self.spiller.syncing.run()
        self.catalog.folder.unlock()

    def abandon(self) -> None:
        """The cache was dropped, or Python ends, without `close`: write what is due in write-through mode, and log how
        much is lost."""
        if self._lock.is_elsewhere:
            return
        if self.spiller.writes_here:  # the collector ran on the thread that would be waited for
            threading.Thread(target=self.abandon, name="onefold-abandon").start()
            return
        with self._lock:
            lost = self.spiller.flusher.left(time.monotonic() + ABANDONED_SECONDS)
        if lost:
            log.warning("the cache was not closed, and %d tokens are not on disk: use `with`, or close()", lost)
        self.spiller.stop()
        self.reader.shutdown(wait=False)
        self.catalog.folder.unlock()

    @property
    def written(self) -> Written:
        return Written(disk=self.catalog.counts["written_bytes"])

    def stats(self) -> DiskStats:
        catalog, spiller = self.catalog, self.spiller
        return DiskStats(
            mode=self.mode,
            folder=str(catalog.folder.path),
            failed=catalog.failed,
            budget_bytes=catalog.budget_bytes,
            used_bytes=catalog.total_bytes,
            records=catalog.n_records,
            written_bytes=catalog.counts["written_bytes"],
            written_today_bytes=catalog.writes.today,
            written_ever_bytes=catalog.writes.ever,
            daily_limit_bytes=catalog.writes.daily_bytes or 0,
            pending=spiller.pending,
            spilled_tokens=spiller.spilled_tokens,
            restored_tokens=self.reading.counts["restored_tokens"],
            restored_bytes=self.reading.counts["restored_bytes"],
            skipped_tokens=self.reading.counts["skipped_tokens"],
            rejected_records=catalog.counts["rejected_records"],
            evicted_records=catalog.counts["evicted_records"],
            left_tokens=self.reading.counts["left_tokens"],
        )

    def reasons(self) -> Counter[str]:
        found = self.catalog.reasons + self.spiller.reasons + self.reading.reasons
        return Counter({f"disk: {reason}": n for reason, n in found.items()})

    def check(self) -> list[str]:
        return self.spiller.check()


def _budget(given: int | float | str | None, folder: Folder) -> int:
    usage = shutil.disk_usage(folder.path)
    if given is not None:
        return parse_size(given, total_bytes=usage.total)
    if usage.free >= 2 * DEFAULT_MOST:
        return DEFAULT_MOST  # whatever the records take, which need not be listed for this
    return max(1, min(DEFAULT_MOST, (usage.free + folder.bytes()) // 2))
