"""What follows when a record was written, or could not be: its nodes keep it or lose it.

- A record that no node needs any more is removed, unless it has descendants on disk, which are reached through it.
- A record that failed is taken from its nodes with all its descendants; the nodes are not tried again before they are
  used again. Its old file, if it was written over one, is set apart.
- An error that is neither passing nor about one file switches the disk off.

Called with the cache's lock held.
"""

from __future__ import annotations

import logging
from collections import Counter

from onefold.cache.tiers.disk.backlog import Refusals
from onefold.cache.tiers.disk.linking import Links
from onefold.cache.tiers.disk.writing import Job
from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.faults import MISPLACED, PASSING
from onefold.cache.tiers.records.order import below
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import What

log = logging.getLogger("onefold")


class Outcomes:
    def __init__(self, links: Links, refusals: Refusals) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        """Why records were not written."""
        self._links, self._catalog, self._refusals = links, links.catalog, refusals

    def settle(self, job: Job, error: Exception | None, written: bool) -> bool:
        """Settle a record whose writing ended, with or without an error; `written` is whether its file was. Returns
        whether a node has it on disk now."""
        if job.checkpoint is not None:
            job.checkpoint.release()
        if error is not None:
            self._fail(job.record, error)
            return False
        if written:
            self._catalog.arrived(job.record)
        if not job.record.nodes:
            self._remove_unneeded(job.record)
            return False
        for node in list(job.record.nodes) if job.record.what is What.POINT else ():
            self._links.thin(node)
        self.counts["spilled_tokens"] += job.record.end - job.record.start
        return True

    def _remove_unneeded(self, record: Record) -> None:
        if record.unread:  # it was not written again
            self._catalog.set_back(record, ())
        elif record.ready and record.children:
            self._catalog.apart.keep(record)
        else:
            if record.children:
                self._links.forget([record])  # and those that continue it, which are staged
            self._catalog.drop(record)
            for above in record.above:
                self._links.release(above)

    def _fail(self, record: Record, error: Exception) -> None:
        descendants = below(self._catalog.records(), [record])  # some of them may be staged
        for descendant in descendants:
            for node in descendant.nodes:
                self._refusals.add(node)
        if record.unread:
            for descendant in sorted(descendants, key=lambda r: -r.start):
                self._links.take_from_nodes(descendant)
            self._catalog.set_back(record, descendants)
        else:
            self._links.forget([record])
            self._catalog.drop(record)
        if not isinstance(error, OSError):
            self.reasons[DiskReason.NOT_COMPUTED] += 1
            log.debug("a record could not be copied out of memory: %s", error)
        elif error.errno in PASSING:
            self.reasons[DiskReason.NOT_NOW] += 1
            log.warning("cannot write a record now; it is tried again when it is next used: %s", error)
        elif error.errno in MISPLACED:
            self.reasons[DiskReason.TAKEN] += 1
            log.warning("cannot write %s/%s: %s", record.namespace, record.name, error)
        else:
            self._catalog.fail(error)
