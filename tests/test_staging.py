"""Records on their way to the disk: turns that follow each other at once go on in place, and every byte is counted."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from disk_caches import Held, opened
from fake import FakeModel, text

from onefold.cache.memory import arrays
from onefold.cache.memory.ledger import Ledger, Purpose
from onefold.cache.tiers.disk import spilling
from onefold.cache.tiers.disk.staging import Staging
from onefold.cache.tiers.disk.writing import Job, Writer

BUFFER = 1000


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    fsync = os.fsync

    def slowly(file: int) -> None:
        time.sleep(seconds)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slowly)


@pytest.mark.parametrize(
    ("kinds", "slow", "direct", "conversations"),
    [
        (("full",), 0.005, True, 8),
        (("full",), 0.02, True, 1),
        (("full",), 0.02, False, 1),
        (("full", "recurrent"), 0.02, True, 1),
    ],
    ids=["200 turns", "slow disk", "slow disk, not addressable", "slow disk, checkpoints"],
)
def test_turns_that_follow_at_once_go_on_in_place(
    kinds: tuple[str, ...],
    slow: float,
    direct: bool,
    conversations: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns of 100 tokens each, 25 to a conversation; what the disk has not taken yet holds none of them up."""
    if not direct:
        monkeypatch.setattr(arrays, "addressable", lambda: False)
    slow_disk(monkeypatch, slow)
    model = FakeModel(kinds)
    with opened(model, tmp_path, disk_mode="through", min_checkpoint_tokens=100) as cache:
        said = []
        for conversation in range(conversations):
            tokens: list[int] = []
            for i in range(25):
                tokens += text(100, 100 * conversation + i)
                with cache.lease(tokens) as lease:
                    mx.eval(model(mx.array([tokens[lease.cached :]]), cache=lease.layers))
                    lease.commit(tokens)
            said.append(tokens)
        stats = cache.stats()
        assert stats.moves + stats.borrows == 24 * conversations
        assert stats.borrows <= 2, "a copy that is interrupted for long is the only reason"
        assert stats.used_bytes <= stats.budget_bytes
        cache.check()
        assert cache.flush(60)
        assert [cache.durable(tokens) for tokens in said] == [2500] * conversations
        cache.check()


def test_nothing_is_copied_out_of_a_buffer_that_a_request_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where a checkpoint, which waits for its turn, comes before it."""
    monkeypatch.setattr(spilling, "POINTS_MOST", 0)
    written_to: list[int] = []
    stage = Writer.stage

    def staged(self: Writer, job: Job) -> None:
        written_to.append(0 if job.slab is None else len(job.slab.writers))
        stage(self, job)

    monkeypatch.setattr(Writer, "stage", staged)
    model = FakeModel(("full", "recurrent"))
    with opened(model, tmp_path, disk_mode="through", min_checkpoint_tokens=10) as cache:
        disk = Held(cache)
        with cache.lease(busy := text(50, 9)) as lease:  # the writer has this one meanwhile
            mx.eval(model(mx.array([busy]), cache=lease.layers))
            lease.commit(busy)
        assert disk.begun.wait(10)
        tokens: list[int] = []
        leases = []
        for i in range(3):
            tokens = [*tokens, *text(50, i)]
            leases.append(lease := cache.lease(tokens))
            mx.eval(model(mx.array([tokens[lease.cached :]]), cache=lease.layers))
            lease.commit(tokens, close=i == 0)
        for lease in leases[1:]:
            lease.cancel()
        assert written_to and not any(written_to)
        disk.go()
        assert cache.flush(30) and cache.durable(tokens) == len(tokens)
        cache.check()


def staging(budget: int = 10 * BUFFER, buffers: int = 2, most: int = 4 * BUFFER) -> tuple[Staging, Ledger]:
    ledger = Ledger(budget)
    return Staging(ledger, BUFFER, buffers, most), ledger


def test_small_records_share_a_buffer() -> None:
    held, ledger = staging()
    places = [held.take(100) for _ in range(20)]
    assert all(place is not None for place in places)
    for i, place in enumerate(places):
        assert place is not None
        place.bytes[:] = i
    assert all((place.bytes == i).all() for i, place in enumerate(places) if place is not None)
    assert ledger.used_bytes == 0, "two buffers are enough, and are the caller's to count"
    for place in places:
        assert place is not None
        held.give(place)
    assert held.fits(4 * BUFFER) and not held.fits(4 * BUFFER + 1)


def test_more_buffers_are_counted_and_come_back() -> None:
    held, ledger = staging()
    places = [held.take(900) for _ in range(4)]
    assert None not in places and ledger.by_purpose()[Purpose.DISK.value] == held.extra_bytes == 2 * BUFFER
    assert not held.fits(900) and held.take(900) is None, "this is the limit"
    for place in places:
        assert place is not None
        held.give(place)
    assert ledger.used_bytes == held.extra_bytes == 0


def test_no_more_buffers_are_made_of_bytes_that_somebody_uses() -> None:
    held, ledger = staging()
    ledger.open(Purpose.LIVE, 9 * BUFFER + 1)
    assert held.fits(2 * BUFFER) and not held.fits(2 * BUFFER + 1)
    assert [held.take(900) is None for _ in range(3)] == [False, False, True]


def test_a_buffer_that_the_system_has_no_memory_for_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    held, ledger = staging()

    def refused(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("onefold.cache.tiers.disk.staging.np.empty", refused)
        assert [held.take(900) is None for _ in range(3)] == [False, False, True]
    assert ledger.used_bytes == held.extra_bytes == 0
    assert held.take(900) is not None and held.extra_bytes == BUFFER


def test_a_request_gets_the_bytes_that_waiting_records_took(tmp_path: Path) -> None:
    """They took what nobody used; whoever needs it has them written first, and is not refused."""
    model = FakeModel(("full",), dim=64)
    with opened(model, tmp_path, disk_mode="through", budget="16MB") as cache:
        always = cache.stats().bytes["disk_buffers"]
        disk = Held(cache)
        tokens: list[int] = []
        while cache.stats().bytes["disk_buffers"] == always:
            tokens += text(50, len(tokens))
            with cache.lease(tokens) as lease:
                mx.eval(model(mx.array([tokens[lease.cached :]]), cache=lease.layers))
                lease.commit(tokens)
        cache.check()
        wanted = cache.inventory.budget_bytes - always - cache.stats().bytes["scratch"] - cache.state.ledger.headroom()
        later = threading.Timer(0.2, disk.go)
        later.start()
        with cache.state.lock:
            cache.state.ledger.open(Purpose.LIVE, wanted).close()
        later.join()
        assert cache.flush(30) and cache.durable(tokens) == len(tokens)
        cache.check()
