"""File work that waits for the thread that writes: files of removed records, and indexes to be written.

`remove` and `write_index` only queue, and may be called while `run` runs on the other thread. `run` does not run while
a record is written: one thread does both. No MLX in this file.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable

from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.table import RecordTable

log = logging.getLogger("onefold")


class Cleanup:
    def __init__(self, folder: Folder, table: RecordTable, fail: Callable[[OSError], None]) -> None:
        """Calls `fail` if the folder turns out not to be ours any more."""
        self._folder, self._table, self._fail = folder, table, fail
        self._removed: deque[Record] = deque()
        self._indexes: deque[tuple[str, bytes]] = deque()

    def remove(self, record: Record) -> None:
        """Queue the removal of a record's file."""
        self._removed.append(record)

    def write_index(self, namespace: str, data: bytes) -> None:
        """Queue the writing of a namespace's index."""
        self._indexes.append((namespace, data))

    @property
    def is_due(self) -> bool:
        """Whether anything is queued."""
        return bool(self._removed or self._indexes)

    def run(self) -> None:
        """Write the queued indexes, and remove the queued files and the namespaces that have none left."""
        while self._indexes:
            namespace, data = self._indexes.popleft()
            try:
                self._folder.indexes.write(namespace, data)
            except OSError as error:  # the records have all that it has
                log.debug("cannot write the index of %s: %s", namespace, error)
        emptied = set[str]()
        while self._removed:
            record = self._removed.popleft()
            emptied.add(record.namespace)
            try:
                self._folder.remove(record.namespace, record.name)
            except OSError as error:
                self._not_removed(record.name, error)
        for namespace in emptied:
            if not self._table.of(namespace):  # a record that is being written is in the table already
                self.remove_if_empty(namespace)

    def remove_if_empty(self, namespace: str) -> None:
        """Remove a namespace's folder if it has no records."""
        try:
            self._folder.remove_if_empty(namespace)
        except OSError as error:
            self._not_removed(namespace, error)

    def _not_removed(self, name: str, error: OSError) -> None:
        log.debug("cannot remove %s: %s", name, error)
        if error.errno == errno.ESTALE:
            self._fail(error)
