"""Records that are set apart: no tree knows them, because they, or a record that they continue, could not be read.

Their files stay. They are tried again when their namespace is used, after `RETRY_SECONDS` at first and twice as long
after each time that was in vain. A record whose head can be read and whose content could not is in doubt: it is used
again only after all of it was read once.

Not thread safe: the cache's lock guards it. No MLX in this file.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.faults import LOGGED_MOST
from onefold.cache.tiers.records.files import read_all
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.reasons import DiskReason

log = logging.getLogger("onefold")

RETRY_SECONDS = 30.0
"""After which records that could not be read are tried again; twice as long after each time that was in vain."""
RETRY_MOST = 3600.0
TRIAL_SECONDS = 0.2
"""How long records in doubt are read in one go; the lock is held meanwhile."""
_TRIAL_BYTES = 1 << 20


class _Retry(NamedTuple):
    """When records are tried again, and how many seconds after the last time that is."""

    at: float
    waited: float


class SetApart:
    def __init__(self, folder: Folder, reasons: Counter[str]) -> None:
        """Counts unreadable records in `reasons`."""
        self._folder, self._reasons = folder, reasons
        self._records: dict[str, set[Record]] = {}
        self._retries: dict[str, _Retry] = {}

    def begin(self, namespace: str, records: Iterable[Record]) -> None:
        """Set these records of a namespace apart, in place of all that were."""
        self._records[namespace] = set(records)

    def of(self, namespace: str) -> set[Record]:
        """Returns the records of a namespace that are set apart. The caller may discard from it."""
        return self._records[namespace]

    def discard(self, record: Record) -> None:
        """The record is no longer set apart, if it was."""
        self._records.get(record.namespace, set()).discard(record)

    def keep(self, record: Record, descendants: Iterable[Record] = ()) -> None:
        """Set these records, which no node has, apart; they are tried again later."""
        self._records.setdefault(record.namespace, set()).update(r for r in (record, *descendants) if r.ready)
        if record.namespace not in self._retries:
            self.retry_soon(record.namespace)

    def doubt(self, record: Record, descendants: Iterable[Record], error: Exception) -> None:
        """Set a record, whose content could not be read, and its descendants apart. No node has them any more."""
        self.note_unread(record, error)
        record.in_doubt = True
        self.keep(record, descendants)

    def note_unread(self, record: Record, error: Exception) -> None:
        """Count a record that could not be read, and log it if it is the first time."""
        if not record.unread:
            self._reasons[DiskReason.UNREADABLE] += 1
            level = logging.WARNING if self._reasons[DiskReason.UNREADABLE] <= LOGGED_MOST else logging.DEBUG
            log.log(level, "a record on disk cannot be read now; its file stays and is tried again: %s", error)
        record.unread = True

    def due(self, namespace: str) -> list[Record] | None:
        """Returns the records of a namespace to try again now, parents first; None before it is time. The caller calls
        `retry_later` afterwards."""
        retry = self._retries.get(namespace)
        if retry is None or time.monotonic() < retry.at:
            return None
        apart = self._records[namespace]
        apart -= {r for r in apart if r.nodes or not r.ready}  # written again meanwhile, or found to be the same
        self._try_whole(r for r in apart if r.in_doubt)
        return sorted(apart, key=lambda r: r.start)

    def retry_later(self, namespace: str, *, in_vain: bool) -> None:
        """Set when the records that are still set apart are tried again, after those of `due` were."""
        waited = self._retries[namespace].waited
        self._retry_in(namespace, min(2 * waited, RETRY_MOST) if in_vain else RETRY_SECONDS)

    def retry_soon(self, namespace: str) -> None:
        """Set when the records that are set apart are tried again, for the first time."""
        self._retry_in(namespace, RETRY_SECONDS)

    def _retry_in(self, namespace: str, seconds: float) -> None:
        self._retries.pop(namespace, None)
        if self._records.get(namespace):
            self._retries[namespace] = _Retry(time.monotonic() + seconds, seconds)

    def _try_whole(self, records: Iterable[Record]) -> None:
        """Read records in doubt, the one that was tried longest ago first; at least one."""
        until = time.monotonic() + TRIAL_SECONDS
        for record in sorted(records, key=lambda r: r.tried):
            record.in_doubt, record.tried = not self._is_readable(record), time.monotonic()
            if time.monotonic() > until:
                return

    def _is_readable(self, record: Record) -> bool:
        """Whether all of its file can be read."""
        place = bytearray(min(record.size, _TRIAL_BYTES))
        try:
            with self._folder.reading(record.namespace, record.name) as file:
                for at in range(0, record.size, len(place)):
                    read_all(file, [place], at)
        except OSError:
            return False
        return True
