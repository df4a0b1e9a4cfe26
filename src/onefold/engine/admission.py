"""Gives waiting requests memory, oldest first, and reads what they have on disk.

- The head of the queue that does not fit is not overtaken. It is tried again when a request leaves, or after a while.
- A prompt that another request is prefilling at this moment waits for it, and borrows.
- What a request has on disk is read before it is admitted, a record or so between two steps of the others.
"""

from __future__ import annotations

import functools
import time

from onefold.cache.memory.tier import LONGEST_WAIT
from onefold.cache.memory.tokens import common_length
from onefold.cache.prefix_cache import PrefixCache
from onefold.engine.job import Job
from onefold.engine.jobs import Jobs, request_failed
from onefold.engine.limits import Limits
from onefold.engine.recovery import Recovery
from onefold.errors import BudgetError, Busy
from onefold.faults import UNEXPECTED
from onefold.sizes import show_size

WORTH_WAITING_FOR = 64
"""Tokens of another request's prefill."""
TRY_AGAIN_SECONDS = 0.25
"""After which a request that waits for memory is tried again though no request has left."""
LOWERED_WAIT = 60
"""Seconds after which a request may find that the budget has risen again."""
READ_SECONDS = 0.01
"""How long the disk is read between two steps before no other record is begun."""
READ_SECONDS_ALONE = 0.1
"""The same while no request holds memory."""


class Admission:
    def __init__(self, cache: PrefixCache, jobs: Jobs, recovery: Recovery, limits: Limits, most_tokens: int) -> None:
        self._cache = cache
        self._jobs = jobs
        self._recovery = recovery
        self._limits = limits
        self._most_tokens = most_tokens
        self._no_room_until = 0.0
        """The head of the queue did not fit: it is not tried before this time, unless a request leaves."""
        self._departures = 0
        """Requests that had left when it did not fit."""

    def expire(self) -> None:
        """Fails the requests that have waited too long for their turn."""
        patience = self._limits.queue_timeout_seconds
        now = time.monotonic()
        for job in [j for j in self._jobs.waiting if j.hit is None and now - j.arrived_at > patience]:
            message = f"this request waited {patience:.0f} s for its turn, and others are still running; try again"
            self._jobs.fail(job, Busy(message, retry_after=self._jobs.expected_wait_seconds()))

    def admit(self) -> None:
        """Opens leases for waiting requests, oldest first, until rows or memory run out."""
        jobs = self._jobs
        if jobs.live and (jobs.memory_short or self._waits_for_room):
            return
        for job in list(jobs.waiting):
            if len(jobs.live) >= self._limits.rows:
                return
            if self._follows(job):
                continue
            try:
                if self._restoring(job):
                    continue
            except BudgetError:
                if jobs.live:
                    self._note_no_room()
                    return
            if not self._open(job):
                return
            jobs.waiting.remove(job)
            jobs.prefilling.append(job)
            job.tell()

    def read_records(self) -> None:
        """Reads some of what waiting requests have below memory: one record, and more while there is time. While others
        run, nothing waits here for another machine."""
        alone = not self._jobs.live
        until = time.monotonic() + (READ_SECONDS_ALONE if alone else READ_SECONDS)
        for job in list(self._jobs.waiting):
            restore = job.restore
            while restore is not None and not restore.done and job in self._jobs.waiting:
                self._recovery.run([job], functools.partial(restore.step, LONGEST_WAIT if alone else 0.0))
                if time.monotonic() > until:
                    return
                if restore.waits and not alone:
                    break

    # -- waiting for memory ----------------------------------------------------------------------

    @property
    def _waits_for_room(self) -> bool:
        return self._departures == self._jobs.departures and time.monotonic() < self._no_room_until

    def _note_no_room(self) -> None:
        self._no_room_until = time.monotonic() + TRY_AGAIN_SECONDS
        self._departures = self._jobs.departures

    # -- waiting for another request, or for the disk ----------------------------------------------

    def _follows(self, job: Job) -> bool:
        """Whether this request waits for one that is being prefilled and will soon have much of its prompt. What the
        other request has already, it lends."""
        prompt = job.request.prompt.tokens
        best, leader = 0, None
        for other in self._jobs.live:
            if other.request.namespace == job.request.namespace:
                common = min(common_length(other.request.prompt.tokens, prompt), len(prompt) - 1)
                best, leader = max((best, leader), (common, other), key=lambda pair: pair[0])
        if leader is None or best < WORTH_WAITING_FOR:
            return False
        if best - self._cache.inventory.matched(prompt, namespace=job.request.namespace) < WORTH_WAITING_FOR:
            return False
        reach = min(best, len(leader.request.prompt) - 1)
        if leader in self._jobs.prefilling and leader.position < reach:
            if leader.lease is not None:
                leader.lease.hold.stop_at(reach)
            return True
        self._recovery.run([leader], leader.publish)
        return False

    def _restoring(self, job: Job) -> bool:
        """Whether this request waits for the disk: for its own records, or for those of another request that shares a
        prefix with it. Raises BudgetError."""
        prompt, namespace, waiting = job.request.prompt.tokens, job.request.namespace, self._jobs.waiting
        others = [j for j in waiting[: waiting.index(job)] if j.restore is not None and not j.restore.done]
        common = [common_length(j.request.prompt.tokens, prompt) for j in others if j.request.namespace == namespace]
        if common and max(common) - self._cache.inventory.in_memory(prompt, namespace=namespace) >= WORTH_WAITING_FOR:
            return True
        try:
            return job.look_on_disk(self._cache, self._room(job))
        except UNEXPECTED as error:  # broad on purpose: see there
            self._jobs.faults.caught("a request could not be looked up on disk; it fails", error)
            self._jobs.fail(job, request_failed(error))
            return True

    # -- leases ------------------------------------------------------------------------------------

    def _room(self, job: Job) -> int:
        """Tokens of the answer to reserve room for."""
        return min(self._limits.reserve_tokens, max(0, self._most_tokens - len(job.tokens)))

    def _open(self, job: Job) -> bool:
        """Opens a request's lease. False if it waits for memory, or failed."""
        room = self._room(job)
        try:
            if self._lease(job, room):
                return True
            if self._jobs.live or self._waits_for_budget(job):
                return False
            return self._lease(job, 0) or self._lease_alone(job)
        except UNEXPECTED as error:  # broad on purpose: see there
            self._jobs.faults.caught("a request could not be admitted; it fails", error)
            self._jobs.fail(job, request_failed(error))
            return False

    def _lease(self, job: Job, reserve_tokens: int) -> bool:
        try:
            job.open(self._cache, reserve_tokens)
        except BudgetError:
            self._note_no_room()
            return False
        return True

    def _waits_for_budget(self, job: Job) -> bool:
        """Whether a request is longer than the budget has room for now, because the machine's memory is short. It fails
        with Busy, and finds room when the budget has risen again."""
        budget, needed = self._cache.budget, len(job.tokens)
        if not budget.is_lowered or needed < self._cache.inventory.most_tokens():
            return False
        now, whole = show_size(self._cache.inventory.budget_bytes), show_size(budget.whole_bytes)
        message = (
            f"this machine is short of memory: the budget is {now} instead of {whole}, which has no room for a prompt "
            f"of {needed} tokens now; try again in {LOWERED_WAIT} s"
        )
        self._jobs.fail(job, Busy(message, retry_after=LOWERED_WAIT))
        return True

    def _lease_alone(self, job: Job) -> bool:
        """Frees all stored KV for a request that needs so much that even the KV it shares cannot stay in place; what is
        pinned only if there is no room beside it."""
        self._cache.clear(disk=False, pins=False)
        if self._lease(job, 0):
            return True
        if self._cache.view.pins:
            self._recovery.free_all(job)
            if self._lease(job, 0):
                return True
        self._recovery.out_of_room(job, len(job.tokens) - 1)
        return False
