"""The requests of a scheduler, by what they do now, and how each of them ends.

    add ──> waiting ──> prefilling ──> decoding ──> finish, fail or cancel
               ^             │             │
               └── preempt ──┴─────────────┘

A request that leaves gives its lease back first, so that a client that sees the end of its answer can rely on what is
stored.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from onefold.cache.memory.device import names_its_cause
from onefold.engine.job import Job
from onefold.engine.request import Finish
from onefold.engine.sampling import Chosen
from onefold.errors import DeviceError, OnefoldError, RequestError
from onefold.faults import UNEXPECTED, FaultLog

log = logging.getLogger("onefold.engine")


class Jobs:
    def __init__(self, rows: int) -> None:
        """`rows`: how many requests hold memory at a time, for `expected_wait_seconds`."""
        self.waiting: list[Job] = []
        self.prefilling: list[Job] = []
        self.decoding: list[Job] = []
        self.counts: Counter[str] = Counter()
        self.memory_short = False
        """A request was preempted: no request is admitted until another one has ended."""
        self.departures = 0
        """Requests that left one of the lists, and may have released memory."""
        self.device_error: DeviceError | None = None
        """A failure of the device that showed when a request left, and may have spoilt the work of all others."""
        self.faults = FaultLog(log)
        self._rows = rows
        self._lifetimes_seconds = 0.0

    @property
    def live(self) -> list[Job]:
        """Requests that hold memory."""
        return self.prefilling + self.decoding

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    def expected_wait_seconds(self) -> int:
        """Estimates how long it takes until a row is free, from what requests have taken so far."""
        done = max(1, self.counts["finished"])
        return max(1, min(60, round(self._lifetimes_seconds / done * (1 + len(self.waiting) / self._rows))))

    def read(self, job: Job, chosen: Chosen, seat: int) -> None:
        """Reads a token that was chosen for a request, and finishes the request if the token ends its answer."""
        finish = job.read(chosen, seat)
        self.counts["generated_tokens"] += 1
        if finish is not None:
            self.finish(job, finish)

    def finish(self, job: Job, finish: Finish) -> None:
        """Ends a request with its answer; with an error, if the device may have spoilt that."""
        self._leave(job, finish)
        if self.device_error is not None:
            self.fail(job, self.device_error)
            return
        self.counts["finished"] += 1
        self._lifetimes_seconds += time.monotonic() - job.arrived_at
        try:
            job.finish(finish)
        except UNEXPECTED as error:  # broad on purpose: see there
            self.faults.caught("the end of an answer could not be parsed; its request fails", error)
            job.fail(request_failed(error))
        job.tell()

    def fail(self, job: Job, error: OnefoldError) -> None:
        self.counts["failed"] += 1
        self._leave(job)
        job.fail(error)
        job.tell()

    def cancel(self, number: int) -> None:
        """Ends a request without an event. Does nothing if it has ended already."""
        for job in [j for j in self.waiting + self.live if j.number == number]:
            self.counts["cancelled"] += 1
            job.over = True
            self._leave(job)

    def fail_all(self, error: OnefoldError) -> None:
        for job in self.waiting + self.live:
            self.fail(job, error)

    def preempt(self, job: Job) -> None:
        """Moves a request that holds memory to the head of the queue. It continues later from what is stored."""
        self.counts["preemptions"] += 1
        self._leave(job)
        if self.device_error is not None:  # its last token may be spoilt
            self.fail(job, self.device_error)
            return
        self.waiting.insert(0, job)
        self.memory_short = bool(self.live)

    def _leave(self, job: Job, finish: Finish | None = None) -> None:
        for jobs in (self.waiting, self.prefilling, self.decoding):
            if job in jobs:
                jobs.remove(job)
                self.memory_short = self.memory_short and jobs is self.waiting
                self.departures += 1
        error = job.settle(finish)
        if error is not None and not names_its_cause(error):
            self.device_error = error


def request_failed(error: Exception) -> RequestError:
    """Returns the error that a client gets for a fault of code that is not ours."""
    return RequestError(f"this request failed: {type(error).__name__}: {error}")
