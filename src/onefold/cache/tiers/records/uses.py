"""When records were last used, and when that is written down: as the modification times of their files.

Uses are collected and written down at most once a minute. `touch`, `is_due` and `take` need the cache's lock; `save`
does not, and runs on the one thread that writes files. No MLX in this file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.index import Stamp

_TOUCH_EVERY = 60.0


class Uses:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._touched: set[Record] = set()
        self._taken_at = time.monotonic()
        self._retimed: dict[str, set[Record]] = {}
        """By namespace, records whose files have another modification time than the index has."""

    def touch(self, records: Iterable[Record], used: float) -> None:
        """These records were used at that time."""
        for record in records:
            record.used = used
            self._touched.add(record)

    @property
    def is_due(self) -> bool:
        """Whether uses are to be written down now."""
        return bool(self._touched) and time.monotonic() - self._taken_at >= _TOUCH_EVERY

    def take(self, *, force: bool = False) -> list[Record]:
        """Returns the records whose use is to be written down now: none within a minute of the last time, unless that
        is forced."""
        if not force and time.monotonic() - self._taken_at < _TOUCH_EVERY:
            return []
        self._taken_at = time.monotonic()
        touched, self._touched = self._touched, set()
        return list(touched)

    def save(self, touched: Iterable[Record]) -> None:
        """Write down when these records were used."""
        for record in touched:
            if record.ready:
                self._folder.touch(record.namespace, record.name, record.used)
                self._retimed.setdefault(record.namespace, set()).add(record)

    def forget(self, record: Record) -> None:
        """The record was removed."""
        self._touched.discard(record)
        self._retimed.get(record.namespace, set()).discard(record)

    def take_retimed(self) -> dict[str, list[Record]]:
        """Returns, by namespace, the records whose stamps in the index are out of date."""
        retimed, self._retimed = self._retimed, {}
        return {namespace: list(records) for namespace, records in retimed.items()}

    def stamps(self, namespace: str, records: Iterable[Record]) -> dict[bytes, Stamp]:
        """Returns the stamps of these records' files as they are now, by address."""
        return {r.address: self._folder.stamp(namespace, r.name) for r in records}
