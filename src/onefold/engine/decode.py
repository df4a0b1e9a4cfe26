"""Decodes: one forward for all rows a step.

The next step is started before the tokens of the last one are read, so a row that ends has run one token too far: that
token is its end, and is kept.

On CUDA the host is slower than the device, and the first step with other rows costs it two to three times a usual one.
So a new row does not join a step right after a chunk of a prompt, which delays the streams as long, and no chunk runs
before a step whose rows have changed.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.prefix_cache import PrefixCache
from onefold.engine.job import Job
from onefold.engine.jobs import Jobs
from onefold.engine.prefill import SHORT_REST
from onefold.engine.recovery import Recovery
from onefold.engine.sampling import Chooser

AHEAD_STEPS, AHEAD_STEPS_CUDA = 1, 6
"""How many steps a forward of one row takes the time of. On CUDA the host needs about three to start it, and as many to
take the row out of the batch and back in."""


class Decode:
    def __init__(self, cache: PrefixCache, jobs: Jobs, recovery: Recovery, chooser: Chooser) -> None:
        self._jobs = jobs
        self._recovery = recovery
        self._chooser = chooser
        self._batch = cache.batch([])
        self._on_cuda = device.on_cuda()
        self._resumes_anywhere = cache.inventory.resumes_anywhere
        self._seated: frozenset[int] = frozenset()
        """The numbers of the rows of the last step."""

    @property
    def delays_prompts(self) -> bool:
        """Whether the next step is to begin without a chunk of a prompt: rows have joined or left since the last step,
        and some of that step's rows go on."""
        if not self._on_cuda:
            return False
        rows = {job.number for job in self._jobs.decoding if job.left > 0}
        return rows != self._seated and not rows.isdisjoint(self._seated)

    def run(self, *, after_chunk: bool) -> None:
        """Starts the next step, reads the tokens of the last one, and finishes the requests that end with them.
        `after_chunk`: a chunk of a prompt has run since the last step."""
        jobs, recovery = self._jobs, self._recovery
        # On CUDA the host is the slower one: while it waited for a new row, the others' next step would not begin.
        waits = self._on_cuda and any(job.n_read for job in jobs.decoding)
        for job in list(jobs.decoding):
            if not waits and job.chosen is not None and job.n_read == 0:  # its first token does not wait for the step
                recovery.run([job], functools.partial(jobs.read, job, job.chosen, job.seat))
                job.tell()
        started = [(job, job.chosen, job.seat) for job in jobs.decoding if job.chosen is not None]
        only_seated = after_chunk and self.delays_prompts
        rows = [job for job in jobs.decoding if job.left > 0 and (job.number in self._seated or not only_seated)]
        guided = any(job.guide is not None for job in rows)
        logits: list[mx.array] = []
        short = rows and not recovery.run(rows, lambda: logits.append(self._step(rows)), preempt=False)
        if logits and not guided:
            recovery.run(rows, lambda: self._choose(rows, logits[0]))
        elif logits:  # which tokens may come depends on the last ones: they are read while the device computes
            mx.async_eval(logits[0])
        for job, chosen, seat in started:
            if not job.over:
                recovery.run([job], functools.partial(jobs.read, job, chosen, seat))
        if logits and guided:
            self._choose_guided(rows, logits[0])
        for job in [j for j in jobs.decoding if j.left <= 0 and j.chosen is None]:
            jobs.finish(job, "length")
        if short:
            recovery.preempt_youngest()
        for job in jobs.decoding:
            job.tell()

    def _step(self, rows: list[Job]) -> mx.array:
        """Describes one forward for all rows, and returns its logits. Waits for nothing."""
        self._batch.seat([job.lease for job in rows if job.lease is not None])
        logits = self._batch.step(_inputs(rows))
        self._jobs.counts["steps"] += 1
        self._seated = frozenset(job.number for job in rows)
        for job in rows:
            job.position += 1
        return logits

    def _choose(self, rows: list[Job], logits: mx.array) -> None:
        """Starts the forward and the choice of the rows' next tokens. Waits for neither."""
        chosen = self._chooser.choose(logits, [job.turn() for job in rows])
        chosen.start()
        for seat, job in enumerate(rows):
            job.seated(chosen, seat)

    def _choose_guided(self, rows: list[Job], logits: mx.array) -> None:
        """Starts the choice of the next tokens of the rows that go on, whose last tokens were read."""
        jobs = self._jobs
        for job in rows:
            if not job.over and self._runs_ahead(job):
                self._recovery.run([job], functools.partial(self._run_ahead, job))
        left = [i for i, job in enumerate(rows) if job in jobs.decoding]
        if not left:
            return
        if len(left) < len(rows):
            logits, rows = logits[mx.array(left)], [rows[i] for i in left]
        if self._recovery.run(rows, lambda: self._choose(rows, logits)):
            for job in rows:
                if job.guide is not None:
                    self._recovery.run([job], job.guide.check)

    def _runs_ahead(self, job: Job) -> bool:
        """Whether a row's forced tokens are to be computed in one forward of its own. That forward delays the other
        rows, so it must save this row more steps than it costs all of them."""
        if job.guide is None or not self._resumes_anywhere or job.request.top_logprobs is not None:
            return False
        cost = AHEAD_STEPS_CUDA if self._on_cuda else AHEAD_STEPS
        return min(len(job.guide.forced), job.left) > cost * len(self._jobs.decoding)

    def _run_ahead(self, job: Job) -> None:
        """Takes a row's forced tokens into its answer, and has them computed as a prompt is."""
        before = job.n_read
        finish = job.take_forced(SHORT_REST)
        self._jobs.counts["generated_tokens"] += job.n_read - before
        if finish is not None:
            self._jobs.finish(job, finish)
            return
        self._jobs.decoding.remove(job)
        self._jobs.prefilling.append(job)

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
