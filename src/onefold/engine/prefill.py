"""Computes prompts, a chunk at a time.

- Between two decode steps at most one chunk runs, and prompts get their share of the time: `share.py`. Prompts that are
  about as short as a step run in addition.
- The prompt with the least left to do is next; one that was passed over a few times comes before it: `ageing.py`.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.request import chunking
from onefold.engine.ageing import next_of, note_turn
from onefold.engine.job import Job
from onefold.engine.jobs import Jobs
from onefold.engine.recovery import Recovery
from onefold.engine.sampling import Chooser
from onefold.engine.share import Share

SHORT_REST = 64
"""A rest of so many tokens is run whole, its last token included: one forward instead of two."""


class Prefill:
    def __init__(
        self, model: Any, cache: PrefixCache, jobs: Jobs, recovery: Recovery, share: Share, chooser: Chooser
    ) -> None:
        self._model = model
        self._cache = cache
        self._jobs = jobs
        self._recovery = recovery
        self._share = share
        self._chooser = chooser
        self._seconds = 0.0

    def run(self) -> float:
        """Runs one chunk, if prompts have earned it; then short prompts, one chunk of each, together no longer than
        `SHORT_REST`. Returns the seconds that prompts took."""
        self._seconds = 0.0
        streams, left, done = bool(self._jobs.decoding), list(self._jobs.prefilling), 0
        if left and (not streams or self._share.due):
            left.remove(job := self._next())
            done = max(1, self._run_some(job))
        while left and (not streams or self._share.tolerates):
            job = next_of(left, _to_do)
            if done + _to_do(job) > SHORT_REST:
                break  # a long one was passed over too often: it gets the next chunk that is earned
            left.remove(job)
            note_turn(job, left)
            if job in self._jobs.prefilling:  # it may have been preempted
                done += max(1, self._run_some(job))
        return self._seconds

    def _next(self) -> Job:
        chosen = next_of(self._jobs.prefilling, _to_do)
        note_turn(chosen, self._jobs.prefilling)
        return chosen

    def _run_some(self, job: Job) -> int:
        """Runs the next chunk of a prompt. Returns the number of its tokens."""
        jobs = self._jobs
        if jobs.decoding:
            self._await_step()
        begun, before = time.perf_counter(), job.position
        if self._recovery.run([job], lambda: self._run_chunk(job)) and job.chosen is None and job.position > before:
            self._share.timed(before, job.position - before, time.perf_counter() - begun)
        self._seconds += time.perf_counter() - begun
        if job in jobs.prefilling and job.position >= len(job.tokens) - 1:
            jobs.prefilling.remove(job)
            jobs.decoding.append(job)
        elif job in jobs.prefilling:
            job.progressed()
        job.tell()
        return job.position - before

    def _await_step(self) -> None:
        """Waits for the decode step that is being computed, or its time would count as the prompt's."""
        decoding = self._jobs.decoding
        computed = {id(job.chosen): job.chosen for job in decoding if job.chosen is not None}
        for chosen in computed.values():
            self._recovery.run([job for job in decoding if job.chosen is chosen], chosen.wait)

    def _run_chunk(self, job: Job) -> None:
        lease = job.lease
        assert lease is not None
        rest = _to_do(job)
        chunk_tokens = self._share.chunk(job.position, streams=bool(self._jobs.decoding))
        whole = 1 < rest <= min(SHORT_REST, chunk_tokens) and lease.chunk_limit(rest) == rest
        if whole and self._cache.inventory.resumes_anywhere and job.left:
            logits = self._forward(job, job.tokens[job.position :])
            chosen = self._chooser.choose(logits[:, -1, :], [job.turn()])
            if job.guide is not None:
                job.guide.check()
            chosen.start()
            job.position += rest
            job.seated(chosen, 0)
            self._jobs.counts["prefilled_tokens"] += rest
            return
        chunk = chunking.next_chunk(lease.hold, job.position, chunk_tokens).tolist()
        if not chunk and rest > 1:  # tokens that a guide forced, which the lease was not opened with
            chunk = job.tokens[job.position : job.position + lease.chunk_limit(min(chunk_tokens, rest - 1))]
        if chunk:
            self._forward(job, chunk)
            device.evaluate([layer.state for layer in lease.layers])
            job.position += len(chunk)
            self._jobs.counts["prefilled_tokens"] += len(chunk)

    def _forward(self, job: Job, tokens: list[int]) -> mx.array:
        assert job.lease is not None
        logits: mx.array = self._model(mx.array(tokens)[None], cache=job.lease.layers)
        return logits


def _to_do(job: Job) -> int:
    """Tokens that its layers do not hold yet."""
    return len(job.tokens) - job.position
