"""The scheduler: which request gets memory, which prompt gets its next chunk, and one decode step for all rows.

- Memory is given by the cache's ledger, oldest request first; nobody overtakes one that waits for memory.
- A prompt that another request is prefilling at this moment waits for it, and borrows.
- What a request has on disk is read before it is admitted, a record or so between two steps of the others.
- Between two decode steps there is at most one chunk of prefill, and prompts get their share of the time: `share.py`.
- The prompt with the least left to do is next; one that was passed over a few times comes before it.
- All rows of a step go through one forward. The next step is under way before the last one's tokens are read, so a
  row that ends has run one token too far: that token is its end, and is kept.
- When memory runs out in mid-generation, the youngest request gives way and goes on later. The oldest always goes on.

Everything here runs on one thread, which owns MLX.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from onefold.cache.memory.tree import common_length
from onefold.cache.prefix_cache import PrefixCache
from onefold.engine.ageing import next_of, note_turn
from onefold.engine.job import Job
from onefold.engine.request import Finish
from onefold.engine.sampling import Chooser, Chosen
from onefold.engine.share import Share
from onefold.errors import BudgetError, Busy, ConfigError, DeviceError, OnefoldError, RequestError, TooLong
from onefold.sizes import show_size

log = logging.getLogger("onefold.engine")

WORTH_WAITING_FOR = 64
"""Tokens of another request's prefill."""
SHORT_REST = 64
"""A rest of so many tokens is run whole, its last token included: one forward instead of two."""
TRY_AGAIN_SECONDS = 0.25
"""After which a request that waits for memory is tried again though nobody has let go of any."""
READ_SECONDS = 0.01
"""Of reading from disk between two steps, beyond which no other record is begun."""
READ_SECONDS_ALONE = 0.1
"""The same if nobody is held up by it but those who would come."""


UNEXPECTED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What tokenizers, parsers and models of other people's raise for what they were not made for. It costs the requests
that were being worked on, and not everybody."""


@dataclass(frozen=True)
class Limits:
    rows: int = 32
    """Requests that hold memory at a time."""
    prefill_chunk: int = 2048
    reserve_tokens: int = 256
    """Room for an answer that a request must find at admission."""
    queue_timeout_seconds: float = 600.0
    prefill_share: float = 0.5
    """Of the time in which streams run, what prompts get. Above 0 and below 1."""

    def __post_init__(self) -> None:
        if not 0 < self.prefill_share < 1:
            raise ConfigError(f"prefill_share is {self.prefill_share}; it must lie between 0 and 1, 0.5 for instance")


class Scheduler:
    def __init__(self, model: Any, cache: PrefixCache, limits: Limits) -> None:
        self._model = model
        self._cache = cache
        self._limits = limits
        self.most_tokens = cache.most_tokens()
        self._batch = cache.batch([])
        self._chooser = Chooser()
        self._share = Share(limits.prefill_share, limits.prefill_chunk)
        self._prompt_seconds = 0.0
        """What prompts took of this turn."""
        self.waiting: list[Job] = []
        self.prefilling: list[Job] = []
        self.decoding: list[Job] = []
        self._hold_off = False
        """Memory was short: nobody new until somebody is done."""
        self._no_room_until = 0.0
        """The first who waits found none, and nobody has let go of any since: it need not ask before then."""
        self._lifetimes_seconds = 0.0
        self.counts: Counter[str] = Counter()

    @property
    def live(self) -> list[Job]:
        return self.prefilling + self.decoding

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    def tick(self) -> None:
        """One turn: whoever can be admitted, some records from disk, one chunk of prefill, one decode step."""
        self._expire()
        self._admit()
        streams, begun, self._prompt_seconds = bool(self.decoding), time.perf_counter(), 0.0
        self._read_disk()
        self._prefill()
        self._decode()
        if streams:
            self._share.prefilled(self._prompt_seconds)
            self._share.streamed(time.perf_counter() - begun - self._prompt_seconds)
        else:
            self._share.rested()

    # -- coming and going ----------------------------------------------------------------------

    def add(self, job: Job) -> None:
        self.waiting.append(job)

    def cancel(self, number: int) -> None:
        for job in [j for j in self.waiting + self.live if j.number == number]:
            self.counts["cancelled"] += 1
            job.over = True
            self._leave(job)

    def drop_all(self, error: OnefoldError) -> None:
        for job in self.waiting + self.live:
            self._fail(job, error)

    def _leave(self, job: Job) -> None:
        for jobs in (self.waiting, self.prefilling, self.decoding):
            if job in jobs:
                jobs.remove(job)
                self._hold_off = self._hold_off and jobs is self.waiting
                self._no_room_until = 0.0
        job.settle()

    def _finish(self, job: Job, finish: Finish) -> None:
        self.counts["finished"] += 1
        self._lifetimes_seconds += time.monotonic() - job.arrived_at
        self._leave(job)  # first: whoever hears of the end can count on what is stored
        try:
            job.finish(finish)
        except UNEXPECTED as error:
            log.exception("the end of an answer could not be read")
            job.fail(_broken(error))
        job.tell()

    def _fail(self, job: Job, error: OnefoldError) -> None:
        self.counts["failed"] += 1
        self._leave(job)
        job.fail(error)
        job.tell()

    def _suspend(self, job: Job) -> None:
        log.info("memory is short: request %d gives way after %d tokens", job.number, job.position)
        if job.chosen is not None:  # a token is on its way: it counts, and it may be the last
            self._guarded([job], functools.partial(self._read, job, job.chosen, job.seat))
            if job.over:
                return
        self.counts["preemptions"] += 1
        self._leave(job)
        self.waiting.insert(0, job)
        self._hold_off = bool(self.live)

    def _expire(self) -> None:
        patience = self._limits.queue_timeout_seconds
        now = time.monotonic()
        for job in [j for j in self.waiting if j.hit is None and now - j.arrived_at > patience]:
            message = f"this request waited {patience:.0f} s for its turn, and others are still running"
            self._fail(job, Busy(message, retry_after=self.expected_wait_seconds()))

    def expected_wait_seconds(self) -> int:
        """About how long until a row is free, by what requests have taken so far."""
        done = max(1, self.counts["finished"])
        return max(1, min(60, round(self._lifetimes_seconds / done * (1 + len(self.waiting) / self._limits.rows))))

    # -- admission -----------------------------------------------------------------------------

    def _admit(self) -> None:
        if self.live and (self._hold_off or time.monotonic() < self._no_room_until):
            return
        for job in list(self.waiting):
            if len(self.live) >= self._limits.rows:
                return
            if self._follows(job):
                continue
            try:
                if self._restoring(job):
                    continue
            except BudgetError:
                if self.live:
                    self._no_room_until = time.monotonic() + TRY_AGAIN_SECONDS
                    return
            if not self._open(job):
                return
            self.waiting.remove(job)
            self.prefilling.append(job)
            job.tell()

    def _follows(self, job: Job) -> bool:
        """Whether a request that is being prefilled will soon have much of this one's prompt. What a request has
        already, it lends."""
        prompt = job.request.prompt.tokens
        best, leader = 0, None
        for other in self.live:
            if other.request.namespace == job.request.namespace:
                common = min(common_length(other.request.prompt.tokens, prompt), len(prompt) - 1)
                best, leader = max((best, leader), (common, other), key=lambda pair: pair[0])
        if leader is None or best < WORTH_WAITING_FOR:
            return False
        if best - self._cache.matched(prompt, namespace=job.request.namespace) < WORTH_WAITING_FOR:
            return False
        reach = min(best, len(leader.request.prompt) - 1)
        if leader in self.prefilling and leader.position < reach:
            if leader.lease is not None:
                leader.lease.stop_at(reach)
            return True
        self._guarded([leader], leader.publish)
        return False

    def _restoring(self, job: Job) -> bool:
        """Whether it waits for the disk: for what is read for itself, or for another request that has a prefix in
        common with it. Raises BudgetError."""
        prompt, namespace = job.request.prompt.tokens, job.request.namespace
        others = [j for j in self.waiting[: self.waiting.index(job)] if j.restore is not None and not j.restore.done]
        common = [common_length(j.request.prompt.tokens, prompt) for j in others if j.request.namespace == namespace]
        if common and max(common) - self._cache.in_memory(prompt, namespace=namespace) >= WORTH_WAITING_FOR:
            return True
        try:
            return job.look_on_disk(self._cache, self._room(job))
        except UNEXPECTED as error:
            log.exception("a request could not be looked up on disk")
            self._fail(job, _broken(error))
            return True

    def _read_disk(self) -> None:
        """Some of what waiting requests have on disk: one record, and more while nobody is held up by it."""
        if self.decoding and not self._share.tolerates:
            return
        begun = time.perf_counter()
        self._read_records()
        self._prompt_seconds += time.perf_counter() - begun

    def _read_records(self) -> None:
        until = time.monotonic() + (READ_SECONDS if self.live else READ_SECONDS_ALONE)
        for job in list(self.waiting):
            restore = job.restore
            while restore is not None and not restore.done and job in self.waiting:
                self._guarded([job], restore.step)
                if time.monotonic() > until:
                    return

    def _room(self, job: Job) -> int:
        return min(self._limits.reserve_tokens, max(0, self.most_tokens - len(job.tokens)))

    def _open(self, job: Job) -> bool:
        """False if it has to wait for memory."""
        room = self._room(job)
        try:
            return self._lease(job, room) or (not self.live and (self._lease(job, 0) or self._lease_alone(job)))
        except UNEXPECTED as error:
            log.exception("a request could not be admitted")
            self._fail(job, _broken(error))
            return False

    def _lease(self, job: Job, reserve_tokens: int) -> bool:
        try:
            job.open(self._cache, reserve_tokens)
        except BudgetError:
            self._no_room_until = time.monotonic() + TRY_AGAIN_SECONDS
            return False
        return True

    def _lease_alone(self, job: Job) -> bool:
        """It needs so much that not even what it shares with others can be left where it lies."""
        self._cache.clear(disk=False)
        if self._lease(job, 0):
            return True
        self._end_of_room(job, len(job.tokens) - 1)
        return False

    # -- prefill -------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Runs one chunk, if prompts have earned it; then those prompts that are short, all together no longer than
        `SHORT_REST`, one chunk of each."""
        streams, left, done = bool(self.decoding), list(self.prefilling), 0
        if left and (not streams or self._share.due):
            left.remove(job := self._next_to_prefill())
            done = max(1, self._prefill_some(job))
        while left and (not streams or self._share.tolerates):
            job = next_of(left, _to_do)
            if done + _to_do(job) > SHORT_REST:
                return  # a long one was passed over too often: it gets the next chunk that is earned
            left.remove(job)
            note_turn(job, left)
            if job in self.prefilling:  # it may have given way
                done += max(1, self._prefill_some(job))

    def _prefill_some(self, job: Job) -> int:
        """Runs the next chunk of a prompt. Returns the number of its tokens."""
        if self.decoding:
            self._await_step()
        begun, before = time.perf_counter(), job.position
        if self._guarded([job], lambda: self._run_chunk(job)) and job.chosen is None and job.position > before:
            self._share.timed(before, job.position - before, time.perf_counter() - begun)
        self._prompt_seconds += time.perf_counter() - begun
        if job in self.prefilling and job.position >= len(job.tokens) - 1:
            self.prefilling.remove(job)
            self.decoding.append(job)
        elif job in self.prefilling:
            job.progressed()
        job.tell()
        return job.position - before

    def _await_step(self) -> None:
        """Waits for the decode step that is under way, or its time would count as the prompt's."""
        under_way = {id(job.chosen): job.chosen for job in self.decoding if job.chosen is not None}
        for chosen in under_way.values():
            self._guarded([job for job in self.decoding if job.chosen is chosen], chosen.wait)

    def _next_to_prefill(self) -> Job:
        """The one with the least to do; but one that was passed over too often comes first."""
        chosen = next_of(self.prefilling, _to_do)
        note_turn(chosen, self.prefilling)
        return chosen

    def _run_chunk(self, job: Job) -> None:
        lease = job.lease
        assert lease is not None
        rest = _to_do(job)
        chunk_tokens = self._share.chunk(job.position, streams=bool(self.decoding))
        whole = 1 < rest <= min(SHORT_REST, chunk_tokens) and lease.chunk_limit(rest) == rest
        if whole and self._cache.resumes_anywhere and job.left:
            logits = self._forward(job, job.tokens[job.position :])
            chosen = self._chooser.choose(logits[:, -1, :], [job.turn()])
            chosen.start()
            job.position += rest
            job.seated(chosen, 0)
            self.counts["prefilled_tokens"] += rest
            return
        chunk = lease.next_chunk(job.position, chunk_tokens)
        if len(chunk):
            self._forward(job, chunk.tolist())
            mx.eval([layer.state for layer in lease.layers])
            job.position += len(chunk)
            self.counts["prefilled_tokens"] += len(chunk)

    def _forward(self, job: Job, tokens: list[int]) -> mx.array:
        assert job.lease is not None
        logits: mx.array = self._model(mx.array(tokens)[None], cache=job.lease.layers)
        return logits

    # -- decode --------------------------------------------------------------------------------

    def _decode(self) -> None:
        for job in list(self.decoding):
            if job.chosen is not None and job.n_read == 0:  # its first token does not wait for the next step to begin
                self._guarded([job], functools.partial(self._read, job, job.chosen, job.seat))
                job.tell()
        under_way = [(job, job.chosen, job.seat) for job in self.decoding if job.chosen is not None]
        rows = [job for job in self.decoding if job.left > 0]
        short = rows and not self._guarded(rows, lambda: self._step(rows), preempt=False)
        for job, chosen, seat in under_way:
            if not job.over:
                self._guarded([job], functools.partial(self._read, job, chosen, seat))
        for job in [j for j in self.decoding if j.left <= 0 and j.chosen is None]:
            self._finish(job, "length")
        if short:
            self._give_way()
        for job in self.decoding:
            job.tell()

    def _read(self, job: Job, chosen: Chosen, seat: int) -> None:
        finish = job.read(chosen, seat)
        self.counts["generated_tokens"] += 1
        if finish is not None:
            self._finish(job, finish)

    def _step(self, rows: list[Job]) -> None:
        """One forward for all rows, and the choice of their next tokens, all of it only begun."""
        self._batch.seat([job.lease for job in rows if job.lease is not None])
        logits = self._batch.step(_inputs(rows))
        chosen = self._chooser.choose(logits, [job.turn() for job in rows])
        chosen.start()
        self.counts["steps"] += 1
        for seat, job in enumerate(rows):
            job.position += 1
            job.seated(chosen, seat)

    # -- when something is short or goes wrong ---------------------------------------------------

    def _guarded(self, jobs: Iterable[Job], work: Callable[[], object], *, preempt: bool = True) -> bool:
        """Do some work for these requests. If memory is short somebody gives way, and it is tried again later; if the
        device fails they fail, and the others go on."""
        try:
            work()
            return True
        except BudgetError:
            if preempt:
                self._give_way()
        except (DeviceError, RuntimeError, MemoryError) as error:
            log.exception("the device failed in the middle of a forward")
            for job in list(jobs):
                self._fail(job, DeviceError(f"the device failed: {error}"))
        except UNEXPECTED as error:
            log.exception("a request failed; the others go on")
            for job in list(jobs):
                self._fail(job, _broken(error))
        return False

    def _give_way(self) -> None:
        """The youngest of those who hold memory lets go of it. One that is alone has all there is, but for what lies in
        one buffer with what it reads: that can be freed while it holds nothing."""
        job = max(self.live, key=lambda j: j.number, default=None)
        if job is None:
            return
        if len(self.live) > 1 or job.gave_way_at < job.position:
            job.gave_way_at = job.position
            self._suspend(job)
        elif not job.last_resort:
            job.last_resort = True
            self._suspend(job)
            self._cache.clear(disk=False)
        else:
            self._end_of_room(job, job.position)

    def _end_of_room(self, job: Job, reached: int) -> None:
        """Alone, and without room for more than `reached` tokens: an answer ends here, a prompt is refused."""
        if job.n_chosen:
            log.warning("request %d ends at %d tokens: the budget has no room for more", job.number, reached)
            self._finish(job, "length")
        else:
            self._fail(job, too_long(len(job.tokens), min(self.most_tokens, reached), self._cache))


def _to_do(job: Job) -> int:
    """Tokens that its layers do not hold yet."""
    return len(job.tokens) - job.position


def _inputs(rows: list[Job]) -> mx.array:
    """The newest token of each row, whether it is known yet or not."""
    first = rows[0].chosen
    as_before = all(job.chosen is first and job.seat == i for i, job in enumerate(rows))
    if first is not None and as_before and len(first.tokens) == len(rows):
        return first.tokens
    return mx.concatenate(
        [
            mx.array([job.tokens[-1]], mx.uint32)
            if job.chosen is None
            else job.chosen.tokens[job.seat : job.seat + 1].astype(mx.uint32)
            for job in rows
        ]
    )


def _broken(error: Exception) -> RequestError:
    return RequestError(f"this request failed: {type(error).__name__}: {error}")


def too_long(tokens: int, most: int, cache: PrefixCache, about: str = "") -> TooLong:
    budget = show_size(cache.budget_bytes)
    message = f"this prompt has {about}{tokens} tokens; the memory budget of {budget} has room for {most}"
    return TooLong(message, tokens=tokens, most=most)
