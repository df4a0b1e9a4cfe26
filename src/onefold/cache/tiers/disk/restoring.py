"""Restoring: the part of a path that is on disk is read back into memory, record by record.

- Where computing the tokens would be quicker than reading them, they are not read: both are measured as they happen.
- The first record that fails a check ends the restore, and its tokens are a miss.
- Restored tokens are a hit in memory from then on, and stay on disk.

A restore can be taken in steps, between the steps of other requests. Functions are called with the cache's lock held.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time

import numpy as np

from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Tree
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import LONGEST_WAIT
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track
from onefold.cache.tiers.disk.plan import Plan, plan_for
from onefold.cache.tiers.disk.reading import Reading
from onefold.cache.tiers.disk.reading_points import PointReader
from onefold.cache.tiers.disk.reading_ranges import Loaded, RangeReader
from onefold.cache.tiers.pace import is_slower
from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.faults import is_passing, reason_of
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.errors import BudgetError, RecordError

log = logging.getLogger("onefold")

READ_ELSEWHERE_SECONDS = 0.05
"""Seconds between two looks at what another thread reads."""


def planning(
    state: CacheState, shared: Reading, tree: Tree, tokens: Tokens, reserve_tokens: int
) -> Work[Restore | None]:
    """Returns a restore that has begun, None if none is worth it. Raises BudgetError if there is no room."""
    found = plan_for(state, tree, tokens)
    if found is None or not (found.records or found.point):
        return None
    if is_slower(shared.read_pace, found.size, shared.prefill_pace, found.saves):
        shared.counts["skipped_tokens"] += found.saves
        shared.reasons[DiskReason.SLOWER] += 1
        return None
    room = max(0, len(tokens) + reserve_tokens - found.matched)
    if found.records:
        end = found.path[-1]
        for node in end.path():
            node.pins += 1  # else the nodes that the records continue might be evicted for the buffer
        try:
            yield from state.store.making_room_for(found.stop + room - found.first)
        finally:
            for node in end.path():
                node.pins = max(0, node.pins - 1)
        found = plan_for(state, tree, tokens)  # other threads had the lock meanwhile
        if found is None or not (found.records or found.point):
            return None
    restore = Restore(state, shared, tree, found)
    restore.begin(max(0, len(tokens) + reserve_tokens - found.matched))
    return restore


def awaiting_others(state: CacheState, tree: Tree, tokens: Tokens) -> Work[None]:
    """Wait while another thread, which does nothing else meanwhile, reads a record that these tokens need."""
    while (found := plan_for(state, tree, tokens)) is not None and any(
        isinstance(restore, Restore) and restore.is_read_elsewhere and restore.reads(found.records)
        for restore in state.restores
    ):
        yield READ_ELSEWHERE_SECONDS


class Restore:
    """Made by `planning`. Call `step` until it returns False, or `finish` to end it before."""

    remote_tokens = 0
    waits = False

    def __init__(self, state: CacheState, shared: Reading, tree: Tree, plan: Plan) -> None:
        self._state, self._shared, self._tree, self._plan = state, shared, tree, plan
        self._left: list[Record] = [*plan.records, *plan.points]
        self._held = list(self._left)
        self._end = plan.path[-1]
        self._ranges = RangeReader(state, shared, plan, np.concatenate([n.tokens for n in self._end.path()]))
        self._points = PointReader(state, shared, self._end, plan.point)
        self._read_bytes = 0
        self._seconds = 0.0
        self.done = False
        self.driver: threading.Thread | None = None
        """The thread that reads all of it, if one does."""
        self.rejected = False
        """A record failed a check: another plan may find what is left."""
        self.tokens = 0
        """Tokens of the path that came from disk."""
        self.owner: object = None
        """Kept alive by this restore: the cache."""
        self.before = plan.before
        """How far a request could have been resumed without."""

    def __del__(self) -> None:
        """A restore that was dropped before it was done is finished at the cache's next call."""
        if not getattr(self, "done", True):
            self._state.drop_restore(self)

    @property
    def is_read_elsewhere(self) -> bool:
        """Whether another thread will read all of it."""
        driver = self.driver
        return not self.done and driver not in (None, threading.current_thread()) and driver.is_alive()  # type: ignore[union-attr]

    def reads(self, records: list[Record]) -> bool:
        """Whether it reads one of these records."""
        return any(record in self._held for record in records)

    def holds(self, track: Track) -> bool:
        """Whether this track holds the restore's buffer."""
        return self._ranges.holds(track)

    def begin(self, room: int) -> None:
        """Pin the path, and reserve the buffer with room for so many tokens behind it. Raises BudgetError."""
        for node in self._end.path():
            node.pins += 1
        for record in self._held:
            record.pins += 1
        with contextlib.ExitStack() as undo:
            undo.callback(self._not_begun)
            self._ranges.reserve(room)
            undo.pop_all()
        self._state.restores.add(self)

    def _not_begun(self) -> None:
        self.done = True
        self._release()

    def step(self, seconds: float = LONGEST_WAIT) -> bool:
        """Read one record. Returns False when there is nothing more to do. Waits for the disk without the lock, as long
        as a record takes."""
        with self._state.lock:
            reading = self._begin_reading()
        if reading is not None:
            concurrent.futures.wait([reading])
        with self._state.lock:
            return self._step()

    def _begin_reading(self) -> concurrent.futures.Future[Loaded] | None:
        """Have the next record read on another thread. None if the step itself must read it, or fail to."""
        if self.done or self._left[0] in self._plan.points:
            return None
        with contextlib.suppress(BudgetError, RuntimeError, MemoryError):
            self._ranges.prepare(self._ranges_left())
        return self._ranges.loading

    def _ranges_left(self) -> list[Record]:
        return [r for r in self._left if r not in self._plan.points]

    def _step(self) -> bool:
        if self.done:
            return False
        with contextlib.ExitStack() as undo:
            undo.callback(self._break_off)
            self._read_one()
            undo.pop_all()
        if not self._left:
            self._finish()
        return not self.done

    def _break_off(self) -> None:
        """After an interrupt: keep what was read so far, and read no more."""
        self._left.clear()
        self._finish()

    def _read_one(self) -> None:
        began = time.perf_counter()
        record = self._left.pop(0)
        try:
            self._take(record)
            self._read_bytes += record.size
        except (OSError, RecordError) as error:
            self._left.clear()
            self.rejected = True
            if is_passing(error):
                for node in self._shared.links.set_apart(record, error):
                    self._shared.dirtied(node)
            else:
                self._shared.links.reject(record, reason_of(error))
            point = self._plan.point
            if record in self._plan.points and point is not None and point.nodes and point is not record:
                self._shared.links.forget([point])  # else it would be tried again and again
        except BudgetError:
            self._left.clear()
            self._shared.reasons[DiskReason.NO_ROOM_TO_RESTORE] += 1
        except (RuntimeError, MemoryError) as error:  # of the device, or no more threads
            self._left.clear()
            self._ranges.distrust()
            self._shared.reasons[DiskReason.FAILED] += 1
            log.warning("cannot restore tokens from disk, so they are computed: %s", error)
        self._seconds += time.perf_counter() - began

    def _take(self, record: Record) -> None:
        if record not in self._plan.points:
            self._ranges.take(record, self._ranges_left())
            return
        kept = self._points.read(record, direct=self._ranges.direct, is_done=lambda: self.done)
        if kept and record is self._plan.point and not self._plan.records:
            self.tokens += self._plan.saves

    def finish(self) -> None:
        """End the restore: memory owns what was read."""
        with self._state.lock:
            self._finish()

    def _finish(self) -> None:
        if self.done:
            return
        self.done = True
        self.tokens += self._ranges.finish(self._tree)
        self._release()
        self._shared.read_pace.took(self._seconds, self._read_bytes)
        self._shared.counts["restored_tokens"] += self.tokens
        self._shared.counts["restored_bytes"] += self._read_bytes

    def _release(self) -> None:
        self._state.restores.discard(self)
        self._ranges.release()
        self._points.release()
        for record in self._held:
            record.pins -= 1
        for node in self._end.path():
            node.pins = max(0, node.pins - 1)
        self._shared.links.prune(self._end)
