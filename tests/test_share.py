"""How prompts and streams share the device: the whole rule on a clock that is made up."""

from __future__ import annotations

import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from onefold.engine import prefill, scheduler
from onefold.engine.jobs import Jobs
from onefold.engine.limits import Limits
from onefold.engine.share import LEAST_TOKENS, LEAST_TOKENS_ALONE, FixedCost, Share, Speed
from onefold.errors import ConfigError

STEP = 0.02
"""Seconds of a decode step."""


class Device:
    """Streams beside one long prompt. A token costs more the further it is, and each chunk costs something."""

    def __init__(
        self,
        share: float,
        *,
        noise: float = 0.0,
        token_seconds: float = 1e-4,
        chunk_seconds: float | None = None,
        seed: int = 0,
    ) -> None:
        self.share = Share(share, 2048)
        self.chunk_seconds = 5 * token_seconds if chunk_seconds is None else chunk_seconds
        self.chunks = 0
        self.chance, self.noise, self.token_seconds = random.Random(seed), noise, token_seconds
        self.gaps: list[float] = []
        self.prompt_seconds = 0.0

    def run(self, prompt_tokens: int) -> None:
        position = 0
        while position < prompt_tokens:
            spent = 0.0
            if self.share.due:
                n = min(self.share.chunk(position, streams=True), prompt_tokens - position)
                spent = self.noisy(self.chunk_seconds + n * self.token_seconds * (1 + position / 5000))
                self.chunks += 1
                self.share.timed(position, n, spent)
                position += n
            step = self.noisy(STEP)
            self.share.prefilled(spent)
            self.share.streamed(step)
            self.prompt_seconds += spent
            self.gaps.append(step + spent)

    def noisy(self, seconds: float) -> float:
        return seconds * self.chance.uniform(1 - self.noise, 1 + self.noise)

    def times(self, quantile: float) -> float:
        """Of a gap alone."""
        return sorted(self.gaps)[int(quantile * (len(self.gaps) - 1))] / STEP


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.95])
def test_prompts_get_their_share_of_the_time(share: float, noise: float) -> None:
    device = Device(share, noise=noise)
    device.run(30_000)
    assert device.prompt_seconds / sum(device.gaps) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("token_seconds", [3e-5, 1e-4, 2e-4])
def test_streams_at_half_are_not_held_up_for_long(token_seconds: float) -> None:
    device = Device(0.5, noise=0.1, token_seconds=token_seconds)
    device.run(30_000)
    assert statistics.median(device.gaps) <= 2 * STEP
    assert device.times(0.99) <= 4
    assert device.times(1) <= 8


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_chunks_are_long_enough_where_each_costs_more_than_a_step(noise: float) -> None:
    """A GPU whose forwards take several steps' time to start: chunks of a few tokens cost as much as long ones."""
    device = Device(0.5, noise=noise, token_seconds=2e-5, chunk_seconds=3 * STEP)
    device.run(30_000)
    assert device.chunks < 150
    assert device.times(1) <= 12


@pytest.mark.parametrize("seed", range(4))
def test_the_short_rests_of_prompts_do_not_make_chunks_short(seed: int) -> None:
    """Starting a chunk takes 2.5 steps, and the last chunk of each prompt may have a few tokens only."""
    device = Device(0.5, noise=0.1, token_seconds=3e-4, chunk_seconds=2.5 * STEP, seed=seed)
    for n in range(30):
        device.run(900 + 7 * n)
    assert device.chunks < 30 * 14  # of about 100 tokens
    assert device.times(1) <= 12


@pytest.mark.parametrize("steps", [4, 8.5, 20])
def test_chunks_do_not_collapse_where_each_costs_many_steps(steps: float) -> None:
    """As those of a model with many experts, all of which a chunk reads."""
    device = Device(0.5, noise=0.1, token_seconds=0.002 * STEP, chunk_seconds=steps * STEP)
    for n in range(10):
        device.run(900 + 70 * n)
    assert device.chunks < 100  # of about 120 tokens
    assert device.times(1) <= 2.5 * steps + 4


def test_what_a_chunk_costs_in_any_case_stays_known_and_is_not_that_of_an_outlier() -> None:
    fixed = FixedCost()
    for n in (512, 512, 512):
        fixed.note(0, n, 0.015 + 1e-4 * n)
    assert fixed.seconds == 0
    for n in (64, 64):
        fixed.note(0, n, 0.015 + 1e-4 * n)
    assert fixed.seconds == pytest.approx(0.015)
    fixed.note(0, 60, 0.5)  # the first use of a kernel
    assert fixed.seconds == pytest.approx(0.015)
    for _ in range(50):  # all alike: nothing new is learnt
        fixed.note(0, 64, 0.015 + 1e-4 * 64)
    assert fixed.seconds == pytest.approx(0.015)
    for n in (512, 64, 64) * 6:
        fixed.note(0, n, 0.005 + 1e-4 * n)
    assert fixed.seconds == pytest.approx(0.005)
    for i in range(16):  # at the end of a long conversation tokens cost more, and chunks are shorter
        fixed.note(30_000 * (i % 2), 64 if i % 2 else 512, 0.0562)
    assert fixed.seconds == pytest.approx(0.005)


def test_a_chunk_that_took_too_long_is_made_up_for() -> None:
    share = Share(0.5, 2048)
    for _ in range(20):
        share.streamed(STEP)
    assert share.due
    share.prefilled(10 * STEP)
    steps = 0
    while not share.due:
        share.streamed(STEP)
        steps += 1
    assert 7 <= steps <= 10


def test_a_stall_of_the_disk_does_not_starve_prompts_for_long() -> None:
    share = Share(0.5, 2048)
    share.streamed(STEP)
    share.prefilled(1000.0)
    steps = 0
    while not share.due and steps < 1000:
        share.streamed(STEP)
        steps += 1
    assert steps < 60
    share.prefilled(1000.0)
    share.rested()
    assert share.tolerates


def test_streams_that_ran_alone_for_long_owe_two_chunks_and_no_more() -> None:
    share = Share(0.5, 2048)
    for _ in range(10_000):
        share.streamed(STEP)
    chunks = 0
    while share.due:
        share.prefilled(share.chunk_seconds)
        chunks += 1
    assert chunks == 2


def test_short_prompts_go_ahead_of_their_share_but_not_for_ever() -> None:
    share = Share(0.5, 2048)
    share.streamed(STEP)
    done = 0
    while share.tolerates:
        share.prefilled(STEP)
        done += 1
    assert 3 <= done <= 8


def test_a_chunk_alone_is_as_long_as_it_may_be_and_takes_about_a_second() -> None:
    share, slow = Share(0.5, 2048), Share(0.5, 2048)
    assert share.chunk(0, streams=False) == 2048
    share.timed(0, 2048, 0.2)
    slow.timed(0, 100, 1.0)
    assert share.chunk(0, streams=False) == 2048
    assert slow.chunk(0, streams=False) == LEAST_TOKENS_ALONE
    slow.streamed(STEP)
    assert slow.chunk(0, streams=True) == LEAST_TOKENS
    assert Share(0.5, 100).chunk(0, streams=False) == 100


def test_speed_goes_by_how_far_into_a_conversation_a_chunk_is() -> None:
    speed = Speed()
    assert speed.at(0) == 0
    speed.note(0, 1000, 1.0)
    assert speed.at(100) > speed.at(600) > 10 * speed.at(20_000) > 100
    speed.note(20_000, 50, 1.0)
    for _ in range(30):
        speed.note(0, 2000, 1.0)
    assert speed.at(20_100) == 50 and speed.at(0) == pytest.approx(2000, rel=0.01)
    deep = Speed()
    deep.note(20_000, 50, 1.0)
    assert deep.at(0) == 50


@pytest.mark.parametrize("share", [0, 1, -0.5, 2, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Limits(prefill_share=share)


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_steps_of_very_different_length_count_in_full(share: float) -> None:
    device, spent, total, position = Share(share, 2048), 0.0, 0.0, 0
    for i in range(2000):
        took = 0.0
        if device.due:
            n = device.chunk(position, streams=True)
            took = (n + 5) * 1e-4
            device.timed(position, n, took)
        step = 0.1 if i % 10 == 9 else 0.001
        device.prefilled(took)
        device.streamed(step)
        spent, total = spent + took, total + took + step
    assert spent / total == pytest.approx(share, abs=0.12)


class Chunks(prefill.Prefill):
    """The rule of the real prefill, on a clock that is made up."""

    def __init__(self, jobs: Jobs, share: Share, clock: SimpleNamespace) -> None:
        self._jobs, self._share, self._clock = jobs, share, clock
        self._recovery: Any = SimpleNamespace(run=self.work)

    @staticmethod
    def work(jobs: Any, work: Any) -> bool:
        work()
        return True

    def _await_step(self) -> None: ...

    def _run_chunk(self, job: Any) -> None:
        rest = len(job.tokens) - job.position
        n = self._share.chunk(job.position, streams=True)
        n = rest if 1 < rest <= min(prefill.SHORT_REST, n) else min(n, rest - 1)
        job.position += n
        self._clock.now += (n + 15) * 5e-4


class Queue(scheduler.Scheduler):
    """The rule of the real scheduler, on a clock that is made up: one stream, and prompts."""

    def __init__(self, share: float, clock: SimpleNamespace) -> None:
        nothing = lambda: None  # noqa: E731
        self._share, self._clock = Share(share, 2048), clock
        self.jobs = Jobs(32)
        self.jobs.decoding.append(self.prompt(1))
        self._prefill = Chunks(self.jobs, self._share, clock)
        self._decode: Any = SimpleNamespace(run=self.decode, delays_prompts=False)
        self._recovery: Any = SimpleNamespace(look_for_failures=nothing)
        self._admission: Any = SimpleNamespace(expire=nothing, admit=nothing, read_records=nothing)

    def prompt(self, n: int) -> Any:
        nothing = lambda: None  # noqa: E731
        return SimpleNamespace(
            tokens=[0] * n, position=0, passed_over=0, chosen=None, tell=nothing, progressed=nothing, left=1
        )

    def decode(self, *, after_chunk: bool) -> None:
        self._clock.now += STEP
        del self.jobs.decoding[1:]


@pytest.mark.parametrize(("share", "every"), [(0.5, 2), (0.3, 4), (0.1, 20), (0.3, 2)])
def test_short_prompts_that_keep_coming_do_not_starve_a_long_one(
    share: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take all of the prompts' time in the last case: the long one still gets every fifth turn."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now, monotonic=lambda: clock.now)
    for module in (scheduler, prefill):
        monkeypatch.setattr(module, "time", clock)
    queue = Queue(share, clock)
    for _ in range(50):
        queue.tick()
    queue.jobs.prefilling.append(long := queue.prompt(8000))
    for i in range(4000):
        if i % every == 0:
            queue.jobs.prefilling.append(queue.prompt(40))
        queue.tick()
    assert long.position > 190
