"""The disk tier of a cache: its folder, its namespaces, and how records and nodes find each other.

- A namespace's records are read into its tree when the namespace is first used: their names and tokens, not their KV.
- A record that is given up, for whatever reason, is taken from its nodes, with every record that goes on from it.
- Spilling and restoring are elsewhere; what they share is here. All methods are called with the cache's lock held.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from onefold.cache.memory.lock import Work
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tree import Node, Tree
from onefold.cache.tiers.disk.growing import grow
from onefold.cache.tiers.disk.linking import Links
from onefold.cache.tiers.disk.naming import name_of, salt_of
from onefold.cache.tiers.disk.ondisk import all_records_of, is_clean
from onefold.cache.tiers.disk.reading import Reading
from onefold.cache.tiers.disk.reading_ranges import AHEAD
from onefold.cache.tiers.disk.spilling import Spiller
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.layout import Layout
from onefold.collecting import paused
from onefold.errors import ConfigError, OnefoldError
from onefold.sizes import parse_size, show_size

log = logging.getLogger("onefold")

MODES = ("back", "through")
ABANDONED_SECONDS = 30.0
DEFAULT_MOST = 100 * 1000**3


@dataclass(frozen=True)
class DiskSettings:
    folder: str | os.PathLike[str]
    budget: int | float | str | None = None
    """By default half of what is free there, and at most 100 GB."""
    mode: str = "back"
    daily_limit: int | float | str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"a disk mode is 'back' or 'through', not {self.mode!r}")
        if not isinstance(self.folder, (str, os.PathLike)) or not os.fspath(self.folder):
            raise ConfigError(f"disk is a folder, not {self.folder!r}")
        if self.budget is not None:
            parse_size(self.budget, total_bytes=1 << 60)
        if isinstance(self.daily_limit, str) and "%" in self.daily_limit:
            raise ConfigError(f"a daily limit is a size such as '20GB', not a share: {self.daily_limit!r}")
        if self.daily_limit is not None:
            parse_size(self.daily_limit)


@dataclass(frozen=True)
class DiskStats:
    """The disk tier at a moment. Counts are since the cache was made, unless they say otherwise."""

    mode: str = "off"
    """off, back or through."""
    folder: str = ""
    failed: str = ""
    """Why nothing is written any more, or was from the start."""
    budget_bytes: int = 0
    used_bytes: int = 0
    """In blocks of 4,096."""
    records: int = 0
    written_bytes: int = 0
    written_today_bytes: int = 0
    written_ever_bytes: int = 0
    """To this folder, by whatever process."""
    daily_limit_bytes: int = 0
    """0 is none."""
    pending: bool = False
    """Something is being written, or waits for it."""
    spilled_tokens: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    skipped_tokens: int = 0
    """On disk, and not read because computing them is quicker."""
    rejected_records: int = 0
    evicted_records: int = 0
    left_tokens: int = 0
    """In memory and not on disk, when the cache was closed."""


class Disk:
    def __init__(
        self,
        settings: DiskSettings,
        state: CacheState,
        about: dict[str, Any],
        points: list[dict[str, Any]],
        *,
        label: str,
    ) -> None:
        """`about` is everything that changes the bytes, `points` what checkpoints are made of, `label` for people.
        Raises OSError if the folder cannot be used."""
        self.mode = settings.mode
        folder = Folder.make(settings.folder)
        try:
            self.catalog = Catalog(
                folder,
                _budget(settings.budget, folder),
                daily_bytes=None if settings.daily_limit is None else parse_size(settings.daily_limit),
            )
            self._about, self._label, self._lock = about, label, state.lock
            self._points = points
            self.layout = Layout(about["layout"], points)
            """What this model's records are made of."""
            self._spaces: dict[Node, str | None] = {}
            self.links = Links(state.nodes, self.catalog)
            self.spiller = Spiller(
                state, self.links, self.layout, through=settings.mode == "through", space_of=self.space_of
            )
        except (OSError, OnefoldError):
            folder.unlock()
            raise
        self.reader = concurrent.futures.ThreadPoolExecutor(AHEAD, "onefold-read")
        """Reads the next records while one is being looked at. Its threads are made when they are first used."""
        self.reading = Reading(self.links, self.layout, self.reader, self.spiller.committed)
        """What restores share."""
        if self.catalog.budget_bytes < 2 * self.spiller.record_bytes:
            log.warning(
                "a disk budget of %s is next to nothing: a record takes up to %s",
                show_size(self.catalog.budget_bytes),
                show_size(self.spiller.record_bytes),
            )

    # -- namespaces ------------------------------------------------------------------------------------

    def attach(self, tree: Tree, namespace: Hashable) -> None:
        """The tree of a caller's namespace is used: it learns what is on disk of it. What could not be read then is
        tried again at a later use."""
        if tree.root in self._spaces:
            known = self._spaces[tree.root]
            if known is not None and (found := self.catalog.load_again(known)):
                grow(tree, found)
            return
        salt = salt_of(namespace)
        if salt is None:
            log.warning("the namespace %r stays in memory: it has no name that another process would know", namespace)
            self._spaces[tree.root] = None
            return
        space = name_of(self._about, salt)
        self._spaces[tree.root] = space
        salted = namespace not in ("", None)
        told = {"label": self._label} | self._about | {"points": self._points, "salted": salted}
        self.catalog.folder.describe(space, told)
        with paused():
            grow(tree, self.catalog.load(space))

    def space_of(self, node: Node) -> str | None:
        return self._spaces.get(node.root)

    # -- records and nodes --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Everything of this model's that no node has, in whatever namespace, but for what is on its way."""
        told = json.loads(json.dumps(self._about))
        ours = {s for s in self._spaces.values() if s is not None}
        unused = [r for r in self.catalog.records() if not r.nodes]
        for space in {r.namespace for r in unused} - ours:
            about = self.catalog.folder.about(space)
            if {k: about.get(k) for k in told} == told:
                ours.add(space)
        self.links.forget([r for r in unused if r.namespace in ours])

    def leave(self, node: Node) -> None:
        """The node is being removed from its tree."""
        self.spiller.bequeath(node)
        self.links.leave(node)

    def drop_below(self, node: Node) -> None:
        self.links.drop_below(node)

    # -- as memory asks: see `memory.tier.Tier` ---------------------------------------------------------

    def committed(self, node: Node) -> None:
        self.spiller.committed(node)

    def is_clean(self, node: Node) -> bool:
        return is_clean(node)

    def saving(self, node: Node, until: float) -> Work[bool]:
        return self.spiller.saving(node, until)

    def count_lost(self, node: Node) -> None:
        self.spiller.flusher.count_lost(node)

    def awaiting_copies(self, slabs: Iterable[Slab]) -> Work[None]:
        return self.spiller.awaiting_copies(slabs)

    def making_way(self, path: list[Node], slabs: Iterable[Slab]) -> Work[bool]:
        return self.spiller.making_way(path, slabs)

    @property
    def extra_bytes(self) -> int:
        return self.spiller.extra_bytes

    def draining(self, until: float) -> Work[None]:
        return self.spiller.draining(until)

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        self.reading.prefill_pace.took(seconds, n_tokens)

    def check(self) -> list[str]:
        return self.spiller.check()

    def touch(self, path: list[Node], used: float) -> None:
        for node in path:
            self.catalog.uses.touch(all_records_of(node), used)

    def flush(self, *, everything: bool, until: float, reports: bool = False) -> bool:
        """Write the dirty nodes that the mode has queued, or with `everything` all, and wait for that. Returns False
        if it took too long, if a node could not be written, or if the disk failed."""
        written = self.spiller.flusher.flush(everything=everything, until=until, reports=reports)
        return written and not self.catalog.failed

    def give_up(self) -> None:
        """End all flushes now, and later ones at once. Does not need the lock."""
        self.spiller.flusher.give_up()

    def count_left(self) -> None:
        """Count the tokens that are in memory and not on disk, for `DiskStats.left_tokens`."""
        self.reading.counts["left_tokens"] = self.spiller.flusher.unsaved()

    def stop(self) -> None:
        """End the thread that writes. Without the lock, and before `close`."""
        self.spiller.stop()

    @property
    def written_bytes(self) -> int:
        """Bytes of records that this process has written. Does not need the lock."""
        return self.catalog.counts["written_bytes"]

    def abandon(self) -> None:
        """The cache is gone, or Python ends, without `close`. What was to be written through is; the rest is said to be
        lost. Without the lock."""
        if self._lock.is_elsewhere:
            return
        if self.spiller.writes_here:  # the collector came by on the thread that would be waited for
            threading.Thread(target=self.abandon, name="onefold-abandon").start()
            return
        with self._lock:
            lost = self.spiller.flusher.left(time.monotonic() + ABANDONED_SECONDS)
        if lost:
            log.warning("the cache was not closed: %d tokens are not on disk; use `with`, or close()", lost)
        self.spiller.stop()
        self.reader.shutdown(wait=False)
        self.catalog.folder.unlock()

    # -- the whole of it ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Note what a restart should know, and release the folder. After `stop`."""
        self.reader.shutdown()
        if not self.spiller.writes:  # else a record is still being written, and files are that thread's
            self.catalog.empty_bin()
            self.catalog.note(self.catalog.uses.take(force=True), force=True)
            self.catalog.refresh_indexes()
        self.catalog.folder.unlock()

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

    def all_reasons(self) -> Counter[str]:
        found = self.catalog.reasons + self.spiller.reasons + self.reading.reasons
        return Counter({f"disk: {reason}": n for reason, n in found.items()})


def _budget(given: int | float | str | None, folder: Folder) -> int:
    usage = shutil.disk_usage(folder.path)
    if given is not None:
        return parse_size(given, total_bytes=usage.total)
    if usage.free >= 2 * DEFAULT_MOST:
        return DEFAULT_MOST  # whatever the records take, which need not be listed for this
    return max(1, min(DEFAULT_MOST, (usage.free + folder.bytes()) // 2))
