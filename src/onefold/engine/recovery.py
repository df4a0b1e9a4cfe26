"""What happens when memory runs out in mid-generation, or when work for a request fails.

- When memory runs out, the youngest request that holds memory is preempted. The oldest always continues.
- A request that is alone and still has no room frees all stored KV once. After that its answer ends, or its prompt is
  refused.
- When other people's code fails, or memory cannot be allocated, the requests that the work was for fail, and all
  others continue.
- When a command of the device fails, every running request fails, and nothing of what they wrote is stored: MLX may
  report the failure to another request than the one whose work it spoilt. A device that does not recover ends the
  engine.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable

from onefold.cache.memory import device
from onefold.cache.model import metal
from onefold.cache.prefix_cache import PrefixCache
from onefold.engine.job import Job
from onefold.engine.jobs import Jobs, request_failed
from onefold.errors import BudgetError, DeviceError, DeviceLost, RequestError, TooLong
from onefold.faults import UNEXPECTED
from onefold.sizes import show_size

log = logging.getLogger("onefold.engine")

RECOVERY_TRIES = 4
RECOVERY_SECONDS = 0.1


class Recovery:
    def __init__(self, jobs: Jobs, cache: PrefixCache, most_tokens: int) -> None:
        """`most_tokens`: the longest conversation that the budget has room for."""
        self._jobs = jobs
        self._cache = cache
        self._most_tokens = most_tokens
        self._failures = device.failures()
        """Failures of the device that are dealt with."""

    def run(self, jobs: Iterable[Job], work: Callable[[], object], *, preempt: bool = True) -> bool:
        """Does some work for these requests, and returns whether it succeeded. If memory is short, a request is
        preempted and the caller tries again later, unless `preempt` is False. If anything else fails, these requests
        fail. Raises DeviceLost."""
        try:
            work()
            return True
        except BudgetError:
            if preempt:
                self.preempt_youngest()
        except (DeviceError, RuntimeError, MemoryError) as error:
            self._device_failed(list(jobs), error)
        except RequestError as error:
            for job in list(jobs):
                self._jobs.fail(job, error)
        except UNEXPECTED as error:  # broad on purpose: see there
            self._jobs.faults.caught("a request failed; all others continue", error)
            for job in list(jobs):
                self._jobs.fail(job, request_failed(error))
        return False

    def _device_failed(self, jobs: list[Job], error: Exception) -> None:
        alone = device.names_its_cause(error)
        what = "its requests fail" if alone else "every running request fails"
        self._jobs.faults.caught(f"the device failed during a forward; {what}{metal.hint(error)}", error)
        if not alone:
            device.note_failure(error)
            jobs += [job for job in self._jobs.live if job not in jobs]
        for job in jobs:
            self._jobs.fail(job, DeviceError(f"the device failed: {error}"))
        self._jobs.device_error, self._failures = None, device.failures()
        if isinstance(error, RuntimeError | DeviceError):
            _require_recovery(error)
            self._failures = device.failures()

    def look_for_failures(self) -> None:
        """Fails every running request if the device failed meanwhile: that showed when a request left, or to work that
        was not for a request. Raises DeviceLost."""
        error = self._jobs.device_error
        if error is None and self._failures != device.failures():
            error = DeviceError(device.last_failure())
        if error is not None:
            self._device_failed([], error)

    def preempt_youngest(self) -> None:
        """Preempts the youngest of the requests that hold memory. A request that is alone has all memory there is,
        except for stored KV in the buffers that it reads: that can be freed while the request holds nothing."""
        live = self._jobs.live
        job = max(live, key=lambda j: j.number, default=None)
        if job is None:
            return
        if len(live) > 1 or job.gave_way_at < job.position:
            job.gave_way_at = job.position
            self._preempt(job)
        elif not job.last_resort:
            job.last_resort = True
            self._preempt(job)
            self.free_all(job)
        else:
            self.out_of_room(job, job.position)

    def free_all(self, job: Job) -> None:
        """Evicts all stored KV for a request that is alone, what is pinned too: that is logged."""
        if pins := self._cache.view.pins:
            log.warning("%d pinned prefixes are released: request %d has no room beside them", pins, job.number)
        self._cache.clear(disk=False)

    def out_of_room(self, job: Job, reached: int) -> None:
        """Ends a request that is alone and has no room for more than `reached` tokens: an answer ends with "length", a
        prompt is refused with TooLong."""
        if job.n_chosen:
            log.warning("request %d ends at %d tokens: the memory budget has no room for more", job.number, reached)
            self._jobs.finish(job, "length")
        else:
            self._jobs.fail(job, too_long(len(job.tokens), min(self._most_tokens, reached), self._cache))

    def _preempt(self, job: Job) -> None:
        log.info("memory is short: request %d is preempted after %d tokens", job.number, job.position)
        if job.chosen is not None:  # a token is being computed: it counts, and it may be the last
            self.run([job], functools.partial(self._jobs.read, job, job.chosen, job.seat))
            if job.over:
                return
        self._jobs.preempt(job)


def _require_recovery(error: Exception) -> None:
    """Raises DeviceLost if the device fails at the simplest command too, a few times: a failure is reported once."""
    for _ in range(RECOVERY_TRIES):
        try:
            device.require_clean()
            return
        except RuntimeError as again:
            error = again
        time.sleep(RECOVERY_SECONDS)
    raise DeviceLost(f"the device does not recover: {error}") from error


def too_long(tokens: int, most: int, cache: PrefixCache, about: str = "") -> TooLong:
    """Returns the error for a prompt of `tokens` tokens, where the budget has room for `most`."""
    budget = show_size(cache.budget.whole_bytes)
    message = f"this prompt has {about}{tokens} tokens; the memory budget of {budget} has room for {most}"
    return TooLong(message, tokens=tokens, most=most)
