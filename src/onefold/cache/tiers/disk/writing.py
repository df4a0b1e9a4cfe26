"""The thread that writes records, and the few buffers through which their bytes leave memory.

- A record is copied out of the cache's buffers into one of ours, and written from there: the copy takes two
  milliseconds, however slow the disk is. When all buffers are full (`staging`) nothing more is copied: that is the
  whole queue.
- The thread asks for the next record when it has none. A caller that is about to write to a buffer can have some copied
  at once (`stage`): they are written first, in order.
- While requests are computed the thread takes a fortieth of one processor, unless a caller waits or its own buffers
  are not enough.
- `settle` is called with the outcome of each record, with the lock held.
- Where records are not durable one by one (macOS), the thread makes them so together: when a caller waits for a flush,
  and a few seconds after the first was written (`syncing`).

Knows nothing of nodes, or of why a record is written.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from onefold.cache.memory import arrays
from onefold.cache.memory.arrays import Bytes, Payload
from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.lock import CacheLock
from onefold.cache.memory.segment import Slab
from onefold.cache.tiers import host
from onefold.cache.tiers.disk.staging import Place, Staging
from onefold.cache.tiers.disk.syncing import Syncing
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.record import Content
from onefold.worker import Worker

log = logging.getLogger("onefold")

LOOK_AGAIN = 0.5
"""Seconds after which a waiting thread looks again without being notified."""


_COPY_ERRORS = (RuntimeError, ValueError, MemoryError)
REST = 40.0
"""While requests are computed: so many times as long as a record took of the processor, the thread rests."""


STOPPING_MOST = 60.0
"""Seconds that a record which is being written is waited for at the end."""


class Job(NamedTuple):
    record: Record
    content: Content
    slab: Slab | None
    """Where a range lies; None if it has no bytes, or is a checkpoint."""
    lo: int
    checkpoint: Checkpoint | None = None
    since: int = 0
    """Where the entries of a checkpoint's windows begin, at the earliest."""


class Staged(NamedTuple):
    job: Job
    payload: Iterable[Bytes]
    place: Place | None
    """None of a record whose bytes are read when it is written: a checkpoint, or a range without any."""


class Writer:
    def __init__(
        self,
        catalog: Catalog,
        lock: CacheLock,
        staging: Staging,
        syncing: Syncing,
        piece_bytes: int,
        next_job: Callable[[], Job | None],
        settle: Callable[[Job, Exception | None, bool], None],
        hurries: Callable[[], bool],
        impatient: Callable[[], bool],
    ) -> None:
        """A checkpoint is read in pieces of `piece_bytes` where it cannot be read as it lies. `hurries()`: write at
        full speed. `impatient()`: ask for a job again soon, the last search was cut short."""
        self.busy = False
        self._catalog, self._lock = catalog, lock
        self._staging, self._piece_bytes = staging, piece_bytes
        self.syncing = syncing
        self._next_job, self._settle = next_job, settle
        self._hurries, self._impatient = hurries, impatient
        self._staged: deque[Staged] = deque()
        self._current: Staged | None = None
        """The one that is being written."""
        self.staged_points = 0
        """Checkpoints among those: they cannot be given up while they wait."""
        self._direct = arrays.addressable()
        self._stop = self._died = False
        self._thread = Worker(self._run, "onefold-disk")

    def start(self) -> None:
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not self.busy and not self._staged and not self._catalog.cleanup.is_due

    @property
    def failed(self) -> bool:
        """Whether the disk is switched off."""
        return bool(self._catalog.failed)

    @property
    def alive(self) -> bool:
        return self._thread.working and not self._stop and not self._died

    def stage(self, job: Job) -> None:
        """Copy a record out now, on this thread and with the lock held. The caller has checked that there is room."""
        with self._given_up_if_not_copied(job):
            self._staged.append(self._copied(job, self._place(job)))
            self.staged_points += job.checkpoint is not None

    def stop(self) -> None:
        """End the thread. Without the lock: it may need it to end."""
        with self._lock.inner:
            self._stop = True
            self._lock.notify_all()
        if self._thread.working and not self.is_this_thread and not self._thread.wait(STOPPING_MOST):
            log.warning("a record is still being written after %.0f s; not waiting for it any longer", STOPPING_MOST)

    @property
    def working(self) -> bool:
        """Whether the thread has not ended yet, though it may be ending."""
        return self._thread.working

    @property
    def is_this_thread(self) -> bool:
        return self._thread.is_this_thread

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            if not self._stop:  # only after a bug: then no caller may wait for this thread
                with self._lock.inner:
                    why = type(sys.exc_info()[1]).__name__
                    self._catalog.fail(OSError(0, f"the thread that writes has ended ({why})"))
                    self.busy, self._died = False, True
                    self._give_back()
                    self._lock.notify_all()
            host.leave_thread()

    def _give_back(self) -> None:
        """Release the places of records that will not be written, and their checkpoints."""
        waiting = [*self._staged, *([] if self._current is None else [self._current])]
        self._staged.clear()
        self._current = None
        self.staged_points = 0
        for staged in waiting:
            if staged.place is not None:
                self._staging.give(staged.place)
            if staged.job.checkpoint is not None:
                staged.job.checkpoint.release()

    def _turn(self) -> bool:
        """Write one record. Returns False when it is time to end."""
        with self._lock.inner:
            job, place = self._wait()
            if self._stop and job is None and not self._staged:
                return False
            staged = self._current = self._staged.popleft() if self._staged else None
            if staged is not None:
                self.staged_points -= staged.job.checkpoint is not None
            touched = self._catalog.uses.take() if job is None else []
        began, idle = time.thread_time(), job is None and staged is None
        if job is not None:  # at once: a request that wants to write there waits for it
            with self._given_up_if_not_copied(job):
                staged = self._current = self._copied(job, place)
        self._catalog.empty_bin()
        self._catalog.note(touched, force=idle)
        if staged is not None:
            self._write(staged)
        if self.syncing.is_due:
            self.syncing.run()
            with self._lock.inner:
                self._lock.notify_all()
        job = place = staged = None  # while it rests, the thread holds on to nothing that was written
        self._rest(time.thread_time() - began)
        return True

    def _rest(self, worked: float) -> None:
        """Leave the processor to the requests: taking a core from a matrix product delays all its other cores, and the
        interpreter has to feed a GPU."""
        until = time.monotonic() + REST * worked
        with self._lock.inner:
            while (left := until - time.monotonic()) > 0 and not self._stop and not self._hurries():
                self._lock.wait(min(left, LOOK_AGAIN))

    def _wait(self) -> tuple[Job | None, Place | None]:
        """Wait until there is something to do. Returns a job, with a place for its bytes, if none is staged."""
        while not self._staged and not self._catalog.cleanup.is_due and not self._catalog.uses.is_due:
            ready = not self._stop and self._staging.fits(self._staging.buffer_bytes)
            job = self._next_job() if ready else None
            if job is not None or self._stop:
                self.busy = job is not None
                return job, None if job is None else self._place(job)
            if self._catalog.unnoted:  # a burst is over
                break
            if self.syncing.is_due:
                break
            self.busy = False
            self._lock.notify_all()
            self._lock.wait(0.001 if self._impatient() else LOOK_AGAIN)
        self.busy = True
        return None, None

    @contextlib.contextmanager
    def _given_up_if_not_copied(self, job: Job) -> Iterator[None]:
        """Settles the job as failed if its copy fails or is interrupted: else callers would wait for it for ever."""
        error: Exception | None = RuntimeError("interrupted")
        try:
            yield
            error = None
        except _COPY_ERRORS as caught:
            error = caught
        finally:
            with self._lock.inner:
                if error is not None:
                    self._settle(job, error, False)
                self._lock.notify_all()

    def _place(self, job: Job) -> Place | None:
        """Returns the place that its bytes are copied to; None if they are read when it is written."""
        if job.slab is None:
            return None
        return self._staging.take(len(job.content.tokens) * job.slab.store.token_bytes)

    def _copied(self, job: Job, place: Place | None) -> Staged:
        """Copy a record out. Raises RuntimeError, among others, if the arrays are not computed yet; then the place is
        free again."""
        if job.slab is None:
            arrays = {} if job.checkpoint is None else job.checkpoint.arrays(job.since)
            return Staged(job, Payload(arrays.values(), self._piece_bytes, direct=self._direct), None)
        n = len(job.content.tokens)
        copied = False
        try:
            if place is None:
                raise MemoryError("the buffers for records are full")
            host.copy_out(job.slab, job.lo, job.lo + n, place.bytes, direct=self._direct)
            copied = True
        finally:
            with self._lock.inner:
                if place is not None and not copied:
                    self._staging.give(place)
                job.slab.copies -= 1
                job.slab.settle()
                self._lock.notify_all()
        return Staged(job, [place.bytes], place)

    def _write(self, staged: Staged) -> None:
        record, content = staged.job.record, staged.job.content
        with self._lock.inner:
            if not record.nodes:  # no node needs it, or its descendants, any more
                self._end(staged, None, written=False)
                return
        error: Exception | None = None
        try:
            header = content.header(content.checksum(staged.payload))
            tokens = np.ascontiguousarray(content.tokens, "<i4")
            parts = itertools.chain([header, tokens], staged.payload)
            self._catalog.folder.write(record.namespace, record.name, parts, record.used)
        except (OSError, *_COPY_ERRORS) as caught:
            error = caught
        with self._lock.inner:
            self._end(staged, error)

    def _end(self, staged: Staged, error: Exception | None, *, written: bool = True) -> None:
        self._current = None
        if staged.place is not None:
            self._staging.give(staged.place)
        self._settle(staged.job, error, written)
        self._lock.notify_all()
