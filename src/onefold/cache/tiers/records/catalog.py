"""The catalog of a folder: which records it has, what they take, and which are removed first.

- One hard budget for the folder, other models' records included; it holds from the moment the folder is opened.
- The least recently used record goes first, and never one that another continues: so no orphan is left. A record is
  removed only for one that was used later than itself.
- Bytes written are counted, today's and all; a daily limit pauses writing until tomorrow (`written`).
- When the folder cannot be written any more (the disk is full, the folder read-only or gone), that is logged once, and
  `failed` is the reason. Records that are there can still be read.

Not thread safe: the cache's lock guards it. Only `Folder` touches files. No MLX in this file.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from onefold.cache.tiers.records.cleanup import Cleanup
from onefold.cache.tiers.records.entry import Loaded, Record, on_disk
from onefold.cache.tiers.records.faults import LOGGED_MOST, MISPLACED, PASSING
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.listing import Filed
from onefold.cache.tiers.records.loading import Loader
from onefold.cache.tiers.records.order import oldest_tails_first
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.table import RecordTable
from onefold.cache.tiers.records.unread import SetApart
from onefold.cache.tiers.records.uses import Uses
from onefold.cache.tiers.records.written import WriteCounter
from onefold.collecting import paused
from onefold.sizes import show_size

log = logging.getLogger("onefold")

_LINK_FROM = 0.8
"""A share of the budget: a folder that is fuller has all its heads read when it is opened."""

STATES_SHARE = 2
"""Whole points, most of which are recurrent states, take at most half of the budget."""


class Catalog:
    def __init__(
        self,
        folder: Folder,
        budget_bytes: int,
        *,
        daily_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.failed = ""
        """Why nothing is written any more."""
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.writes = WriteCounter(folder.written(), daily_bytes, clock)
        self.uses = Uses(folder)
        self.apart = SetApart(folder, self.reasons)
        """Records that no tree knows, because they could not be read."""
        self._table = RecordTable()
        self.cleanup = Cleanup(folder, self._table, self.fail)
        self.loader = Loader(folder, self._table, self.apart, self.cleanup, self.reject)
        self._forbidden: set[str] = set()
        """Namespaces whose folders this process may not use."""
        self._n_rejections = 0
        self._no_room_until = 0.0
        """A record that was last used before this found no room, and would not now."""
        with paused():
            self._scan()

    def _scan(self) -> None:
        """Count the records, remove what a crash left, and evict down to the budget."""
        for namespace in self.folder.namespaces():
            try:
                found = self.folder.listing(namespace)
            except PermissionError as error:
                log.warning("%s/%s cannot be read, and is not used: %s", self.folder.path, namespace, error.strerror)
                self._forbidden.add(namespace)
                continue
            self.folder.sweep(namespace, found.strangers)
            if not found.records:
                self.cleanup.remove_if_empty(namespace)
            for filed in found.records:
                self._table.add(_record(namespace, filed, self.writes.clock()))
        if self.total_bytes > _LINK_FROM * self.budget_bytes:
            self.loader.link_all()  # now, while no request waits
        victims = self.make_room(0, float("inf"))
        if victims:
            log.warning(
                "removed %d records (%s) from %s to meet its budget of %s",
                len(victims),
                show_size(sum(r.size for r in victims)),
                self.folder.path,
                show_size(self.budget_bytes),
            )
        self.empty_bin()

    # -- what there is -----------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Returns every record, those that are being written included."""
        return self._table.all()

    def find(self, namespace: str, at: bytes) -> Record | None:
        """Returns the record of this address, None if there is none."""
        return self._table.find(namespace, at)

    @property
    def n_records(self) -> int:
        return len(self._table)

    @property
    def total_bytes(self) -> int:
        """All records, in blocks of the disk; those that are being written included."""
        return self._table.total_bytes

    def missing_for_state(self, size: int) -> int:
        """Returns how many bytes of whole points must go, so that another of this size keeps to their share."""
        return self._table.state_bytes + on_disk(size) - self.budget_bytes // STATES_SHARE

    def states(self) -> list[Record]:
        """Returns the whole points that can be removed, the least recently used first. Reads all heads: before that it
        is not known which points others continue."""
        self.loader.link_all()
        found = [r for r in self.records() if r.is_state and _is_evictable(r) and not r.children]
        return sorted(found, key=lambda r: (r.used, r.start))

    def load(self, namespace: str) -> list[Loaded]:
        """Returns the records of a namespace with their tokens, parents first. Removes those that cannot be
        understood or continue no record; leaves those that cannot be read now to `load_again`."""
        return self.loader.load(namespace)

    def load_again(self, namespace: str) -> list[Loaded]:
        """Returns the records that could not be read before and can be now, with their descendants, parents first;
        none before it is time to try."""
        return self.loader.load_again(namespace)

    # -- writing -------------------------------------------------------------------------------------

    def refuses(self, n_bytes: int, namespace: str = "") -> str:
        """Returns why so many bytes may not be written there now; nothing if they may."""
        if self.failed:
            return self.failed
        if namespace in self._forbidden:
            return "no permission"
        return "daily limit" if self.writes.refuses(n_bytes) else ""

    def make_room(self, size: int, used: float) -> list[Record] | None:
        """Evict records until one of `size`, last used at `used`, fits. Returns those that were evicted, or None if it
        cannot fit, and then nothing was evicted."""
        missing = self.total_bytes + on_disk(size) - self.budget_bytes
        if missing <= 0:
            return []
        if size and used <= self._no_room_until:
            return None
        self.loader.link_all()
        missing = self.total_bytes + on_disk(size) - self.budget_bytes  # orphans were removed meanwhile
        goal = missing if size == 0 else max(missing, min(self.budget_bytes // 128, 1 << 30))
        victims, freed = list[Record](), 0
        for record in oldest_tails_first(self.records(), _is_evictable):
            if freed >= goal or (record.used >= used and size):
                break
            victims.append(record)
            freed += on_disk(record.size)
        if freed < missing:
            self._no_room_until = used
            return None
        until = self._no_room_until
        for record in victims:
            self.counts["evicted_records"] += 1
            self.drop(record)
        self._no_room_until = until  # the records that are left were used later than the evicted ones
        return victims

    def expect(self, record: Record) -> None:
        """Add a record that is about to be written: its bytes count from now on."""
        record.ready = False
        self.writes.coming += record.size
        self._table.add(record)
        for above in record.above:
            above.children += 1

    def expect_again(self, record: Record) -> None:
        """A record that could not be read is about to be written again, over its file."""
        record.ready = False
        self.writes.coming += record.size

    def set_back(self, record: Record, descendants: Iterable[Record]) -> None:
        """A record was not written again: its old file is still there. No node has it or its descendants."""
        record.ready = True
        self.writes.coming -= record.size
        self.apart.keep(record, descendants)

    def arrived(self, record: Record) -> None:
        """The record was written, whether a node still needs it or not."""
        if not record.ready:
            self.writes.coming -= record.size
        record.ready, record.unread, record.in_doubt = True, False, False
        self.writes.arrived(record.size)
        self.counts["written_bytes"] += record.size

    def fail(self, error: OSError) -> None:
        """Write nothing any more, because of this error."""
        if not self.failed:
            self.failed = error.strerror or str(error)
            log.warning(
                "the disk cache in %s is switched off: %s. Requests are served from memory; restart to try again",
                self.folder.path,
                self.failed,
            )

    # -- removing -----------------------------------------------------------------------------------

    def drop(self, record: Record) -> None:
        """Remove a record; its file goes when `empty_bin` runs. The caller takes it from its nodes."""
        self.apart.discard(record)
        if not self._table.remove(record):
            return
        if not record.ready:
            self.writes.coming -= record.size
        self._no_room_until = 0.0
        self.uses.forget(record)
        self.cleanup.remove(record)

    def reject(self, record: Record, reason: str) -> None:
        """Remove a record that cannot be used."""
        self.drop(record)
        self.count_rejected(record, reason, [])

    def count_rejected(self, record: Record, reason: str, descendants: list[Record]) -> None:
        """Count and log a record that was removed because it cannot be used, and its descendants, which went too."""
        self.reasons[reason] += 1
        if descendants:
            self.reasons[DiskReason.ORPHAN] += len(descendants)
        self.counts["rejected_records"] += 1 + len(descendants)
        self._n_rejections += 1
        level = logging.WARNING if self._n_rejections <= LOGGED_MOST else logging.DEBUG
        name, more = f"{record.namespace}/{record.name}", ""
        if descendants:
            more = f", and {len(descendants)} descendants, {show_size(sum(r.size for r in descendants))}"
        log.log(level, "removed unusable record: %s (%s)%s", reason, name, more)

    def empty_bin(self) -> None:
        """Remove the files of removed records, and write indexes. May run while another thread uses the catalog, but
        not while a record is written: one thread does both."""
        self.cleanup.run()

    # -- notes for a restart ---------------------------------------------------------------------------

    @property
    def unnoted(self) -> bool:
        """Whether bytes were written that a restart would not know of."""
        return self.writes.is_unnoted and not self.failed

    def note(self, touched: list[Record], *, force: bool = False) -> None:
        """Write down for a restart when these records were used, and how much was written."""
        if self.failed:
            return
        self.uses.save(touched)
        written = self.writes.take_note(force=force)
        if written is None:
            return
        try:
            self.folder.note_written(written)
        except OSError as error:
            if error.errno in MISPLACED:
                log.debug("cannot note how much was written: %s", error)
            elif error.errno not in PASSING:
                self.fail(error)

    def refresh_indexes(self) -> None:
        """Update the stamps in the indexes of files whose modification times were set. At the end, when nothing is
        used any more."""
        for namespace, records in self.uses.take_retimed().items():
            index = self.loader.index_of(namespace)
            stale = len(index) and not self.failed
            if stale and (data := index.restamped(self.uses.stamps(namespace, records))):
                self.cleanup.write_index(namespace, data)
        self.empty_bin()

    def check(self) -> list[str]:
        """Recount. Returns a sentence for each thing that is wrong."""
        found = self._table.check()
        coming = sum(r.size for r in self.records() if not r.ready)
        if coming != self.writes.coming:
            found.append(f"the catalog expects {self.writes.coming} bytes, its unwritten records sum to {coming}")
        if self.total_bytes > self.budget_bytes:
            found.append(f"{self.total_bytes} bytes on disk of a budget of {self.budget_bytes}")
        return found


def _record(namespace: str, filed: Filed, now: float) -> Record:
    """Returns the record of a file; one that claims to have been used in the future was used now."""
    what, start, address, version, after = filed.named
    found = Record(namespace, what, address, start, start, filed.size, min(filed.used, now), version, after)
    found.stamp = filed.stamp
    return found


def _is_evictable(record: Record) -> bool:
    return record.ready and not record.pins
