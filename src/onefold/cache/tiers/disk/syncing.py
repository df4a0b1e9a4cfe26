"""When the device's own cache is emptied (macOS): at a flush, and some seconds after a record was written.

A record that has its name is complete. On macOS a power loss can still take the latest ones: they are safe after a full
flush of the device, which takes so long that it is done for many records at once. Other systems need none.

`run` is called by the thread that writes, or after that has ended. No MLX in this file.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.faults import PASSING
from onefold.cache.tiers.records.reasons import DiskReason

log = logging.getLogger("onefold")

EVERY_SECONDS = 5.0
"""A record is safe from a power loss so long after it was written, or as soon as the device permits."""


class Syncing:
    def __init__(self, catalog: Catalog, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self.clock = clock
        self._pending_since: float | None = None
        self.covered = self.failures = 0
        """Full flushes are counted as they begin: the last that succeeded; and how many failed."""
        self._begun = self._wanted = 0
        self.reasons: Counter[str] = Counter()
        """Why full flushes failed that are tried again."""

    @property
    def is_pending(self) -> bool:
        """Whether a power loss could take records that have their names."""
        return bool(self._catalog.folder.unflushed) and not self._catalog.failed

    @property
    def is_due(self) -> bool:
        """Whether it was asked for, or the first of these records was written some seconds ago."""
        if not self.is_pending:
            self._pending_since = None
            return False
        if self._pending_since is None:
            self._pending_since = self.clock()
        return self._begun < self._wanted or self.clock() - self._pending_since >= EVERY_SECONDS

    def ask(self) -> int:
        """Have a full flush begin soon. Returns its number, 0 if none is needed. When `covered` is as large, all that
        was written before is durable. Called with the cache's lock held."""
        if not self.is_pending:
            return 0
        self._wanted = self._begun + 1
        return self._wanted

    def run(self) -> None:
        """Empty the device's cache, if records are pending. A failure switches the disk off, as one of a write does,
        unless it is passing: then it is tried again later."""
        if not self._catalog.folder.unflushed:
            return
        self._pending_since = None
        self._begun += 1
        try:
            self._catalog.folder.unflushed.flush()
        except OSError as error:
            self.failures += 1
            if error.errno not in PASSING:
                self._catalog.fail(error)
                return
            self.reasons[DiskReason.NOT_NOW] += 1
            log.warning("cannot flush the disk now; it is tried again later: %s", error)
            return
        self.covered = self._begun
