"""What conversations have in common on disk: one of them goes, is bounded, or is damaged, and the others stay whole."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_caches import Held, files, flip, opened, small_records, turn
from effort import spread
from fake import FakeModel, Session, logits_of, settled, text

from onefold import BudgetError, PrefixCache
from onefold.cache.memory import arrays
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.tokens import as_tokens
from onefold.cache.tiers import host
from onefold.cache.tiers.disk import jobs
from onefold.cache.tiers.records.folder import Folder


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(("full", "full"))


def other(token: int) -> int:
    return (token + 1) % 64


def branch(tokens: list[int], at: int, n: int, seed: int) -> list[int]:
    """What goes another way from there."""
    return [*tokens[:at], other(tokens[at]), *text(n - 1, seed)]


# -- records that begin inside others ---------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False], ids=["in place", "by operations"])
def test_a_short_branch_of_a_long_record_is_restored(
    direct: bool, model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that it branches off ends later than anything it asks for."""
    monkeypatch.setattr(arrays, "addressable", lambda: direct)
    long = text(900)
    short = branch(long, 40, 20, 5)
    with opened(model, tmp_path, disk_mode="through") as cache:
        turn(model, cache, long, 0)
        assert cache.flush(10)
        turn(model, cache, short, 0)
    with opened(model, tmp_path) as cache:
        session = Session(model, cache, [*short, 1])
        assert session.cached == len(short)
        session.prefill().commit()
        assert Session(model, cache, [*long, 1]).cached == len(long)
        assert cache.stats().disk.rejected_records == 0


@pytest.mark.parametrize("how", ["forgotten", "cleared beside a request"])
@pytest.mark.parametrize("new", [153, 80, 60])
def test_what_went_in_part_and_came_again_is_durable(how: str, new: int, model: FakeModel, tmp_path: Path) -> None:
    """Part of its record was still relied on; what is written again has tokens in common with that."""
    tokens = text(100)
    with opened(model, tmp_path, disk_mode="through") as cache:
        turn(model, cache, tokens, 0)
        assert cache.flush(10)
        if how == "forgotten":
            cache.inventory.forget(tokens, 40)
        else:
            session = Session(model, cache, branch(tokens, 40, 30, 7))
            cache.clear()
            session.prefill(31).commit()
        again = [*tokens, *text(50, 7)][:new]
        went_on = branch(again, 50, 9, 3)
        for prompt in (again, went_on):
            turn(model, cache, prompt, 3)
        assert cache.flush(10) and [cache.durable(p) for p in (again, went_on)] == [len(again), len(went_on)]
    with opened(model, tmp_path) as cache:
        assert [cache.durable(p) for p in (again, went_on)] == [len(again), len(went_on)]
        for prompt in (again, went_on, tokens[:40]):
            assert Session(model, cache, [*prompt, other(0)]).cached == len(prompt)
        assert cache.stats().disk.rejected_records == 0
        cache.inventory.forget(again, 40)
        assert turn(model, cache, again, 0) == again and cache.flush(10, everything=True)
        assert cache.durable(again) == len(again)
        settled(cache)


def record_lengths(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    small_records(cache, n)
    monkeypatch.setattr(jobs, "HOLLOW_TOKENS", n)


@pytest.fixture(params=[("full", "full"), ("full", "recurrent"), ("recurrent",)], ids="+".join)
def kinds(request: pytest.FixtureRequest) -> tuple[str, ...]:
    found: tuple[str, ...] = request.param
    return found


@pytest.mark.parametrize("length", [120, 40])
def test_a_record_inside_what_was_written_again_from_further_up(
    kinds: tuple[str, ...], length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[0, 20), [20, 40), and then [8, 120) or [8, 40): as a folder may have it in which something lingered."""
    model, tokens = FakeModel(kinds), text(length)
    with opened(model, tmp_path, disk_mode="through") as cache:
        assert cache.parts.tier is not None
        record_lengths(cache, monkeypatch, 20)
        Session(model, cache, tokens[:40]).prefill(40).commit()
        assert cache.flush(10)
        lingers = [r for r in cache.parts.tier.catalog.records() if r.start == 20]
        for record in lingers:
            record.children += 1  # as if something went on from it
        cache.inventory.forget(tokens[:40], 8)
        for record in lingers:
            record.children -= 1
        record_lengths(cache, monkeypatch, 200)
        Session(model, cache, tokens).prefill(200).commit()
        assert cache.flush(10) and cache.durable(tokens) == length
    for lost in (False, True):
        with opened(model, tmp_path) as cache:
            assert cache.parts.tier is not None and cache.durable(tokens) == length
            if lost:
                with cache.state.lock:
                    within = [r for r in cache.parts.tier.catalog.records() if r.start == 20 and r.end <= 40]
                    cache.parts.tier.links.forget(r for r in within if r.nodes)
                settled(cache)
            left = 20 if lost and length == 40 and "recurrent" not in kinds else length  # nothing leads to the other
            assert cache.durable(tokens) == left
            assert Session(model, cache, [*tokens, 1]).cached == left
            assert cache.stats().disk.rejected_records == 0
            cache.inventory.shrink(0)
            settled(cache)


def test_what_is_forgotten_while_more_of_it_is_written_goes_from_disk(model: FakeModel, tmp_path: Path) -> None:
    tokens = text(60)
    with opened(model, tmp_path, disk_mode="through") as cache:
        small_records(cache, 20)
        turn(model, cache, tokens[:40], 0)
        assert cache.flush(10)
        held = Held(cache)
        turn(model, cache, tokens, 0)
        assert held.begun.wait(10)
        cache.inventory.forget(tokens, 8)
        held.go()
        cache.flush(10)
        assert [int(p.name[:8]) for p in files(tmp_path)] == [0]
        settled(cache)


# -- bounded conversations ----------------------------------------------------------------------------------

BOUND = {"max_kv_size": 64, "keep": 4}


def bounded(model: FakeModel, cache: PrefixCache, prompt: list[int]) -> list[int]:
    return turn(model, cache, prompt, 2, bound=(64, 4))


def test_kv_is_written_where_a_rotated_conversation_left_none(model: FakeModel, tmp_path: Path) -> None:
    """A longer conversation with the same beginning has lost its KV, and is on disk without. Both come back."""
    system = text(40)
    with opened(model, tmp_path, disk_mode="through", **BOUND) as cache:
        long = bounded(model, cache, [*system, *text(100, 1)])
        assert cache.flush(10) and cache.durable(long) == len(long)
        short = bounded(model, cache, [*system, *text(10, 2)])
        assert cache.flush(10)
        assert (cache.durable(short), cache.durable(long)) == (len(short), len(long))
        settled(cache)
        cache.clear(disk=False)
        assert Session(model, cache, [*short, 1], bound=(64, 4)).cached == len(short)
    for asked in (long, short):
        with opened(model, tmp_path, **BOUND) as cache:
            assert (cache.durable(short), cache.durable(long)) == (len(short), len(long))
            session = Session(model, cache, [*asked, 1], bound=(64, 4))
            assert session.cached == len(asked)
            session.prefill().commit()
            assert cache.stats().disk.rejected_records == 0


def test_a_record_with_kv_that_is_damaged_takes_along_what_continues_it(model: FakeModel, tmp_path: Path) -> None:
    """The prompt of a conversation that rotated, too: it was stored before that. Both are computed and stored again."""
    system = text(40)
    with opened(model, tmp_path, disk_mode="through", **BOUND) as cache:
        long = bounded(model, cache, [*system, *text(100, 1)])
        short = bounded(model, cache, [*system, *text(10, 2)])
        assert cache.flush(10)
    with opened(model, tmp_path, **BOUND) as cache:
        damaged = max((p for p in files(tmp_path) if p.name.startswith("00000000")), key=lambda p: p.stat().st_size)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        assert Session(model, cache, [*short, 1], bound=(64, 4)).cached == 0
        settled(cache)
        assert cache.durable(long) == cache.durable(short) == 0
        for said in (long, short):
            assert bounded(model, cache, [*said, 1])
            assert cache.flush(10, everything=True)
            assert cache.durable(said) == len(said)


@pytest.mark.parametrize("kinds", [("full", "recurrent"), ("full", "rotating")], ids="+".join)
def test_a_checkpoint_whose_kv_was_forgotten_is_not_kept(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """It was taken before the conversation rotated, and nobody can go on from it."""
    model, tokens, bound = FakeModel(kinds), text(100, 1), (64, 4)
    with opened(model, tmp_path, disk_mode="through", **BOUND) as cache:
        Session(model, cache, tokens[:20], bound=bound).prefill(10).commit()
        Session(model, cache, tokens, checkpoints=[30], bound=bound).prefill(10).commit()
        assert cache.flush(10)
        durable = cache.durable(tokens[:40])
        asked = [*tokens[:40], other(tokens[40])]
        assert Session(model, cache, asked, bound=bound).cached >= durable > 0
    with opened(model, tmp_path, **BOUND) as cache:
        assert cache.durable(tokens[:40]) == durable
        assert Session(model, cache, asked, bound=bound).cached >= durable


def test_a_checkpoint_goes_on_from_the_kv_that_overtook_a_hollow_range(tmp_path: Path) -> None:
    """That was on its way when memory got the KV of its tokens."""
    model, bound, common = FakeModel(("full", "recurrent")), (64, 4), text(30, 1)
    with opened(model, tmp_path, disk_mode="through", **BOUND) as cache:
        assert cache.parts.tier is not None
        folder, arrived, turns = cache.parts.tier.catalog.folder, threading.Semaphore(0), threading.Semaphore(0)
        write = folder.write

        def one_by_one(*what: Any) -> None:
            arrived.release()
            assert turns.acquire(timeout=30)
            write(*what)

        folder.write = one_by_one  # type: ignore[method-assign]
        turn(model, cache, text(10, 77), 0, bound=bound)
        rotated = [[*common, first, *text(69, first)] for first in (1, 2)]
        for tokens in rotated:
            turn(model, cache, tokens, 0, bound=bound)
        while arrived.acquire(timeout=30):
            with cache.state.lock:
                records = cache.parts.tier.catalog.records()
                if any((r.start, r.end, r.hollow, r.ready) == (0, 30, True, False) for r in records):
                    break
            turns.release()
        else:
            raise AssertionError("it was never on its way")
        for tokens in rotated:
            cache.inventory.forget(tokens, 30)
        said = turn(model, cache, [*common, 3, *text(19, 4)], 0, bound=bound)
        Session(model, cache, [*said, 5], bound=bound).prefill(31).commit()
        turns.release(1000)
        assert cache.flush(10) and cache.durable(said) == len(said)
        settled(cache)
    with opened(model, tmp_path, **BOUND) as cache:
        assert cache.durable(said) == len(said)
        assert Session(model, cache, [*said, 5], bound=bound).cached == len(said)
        assert cache.stats().disk.rejected_records == 0


def test_a_conversation_that_rotates_when_memory_is_short_stays_on_disk(tmp_path: Path) -> None:
    """It takes its buffer for itself, and the tree lets go of it: not of the files."""
    model, bound = FakeModel(("full", "full"), dim=64), 1024
    tokens = text(bound - 30)
    for left in spread(range(0, 8_000_000, 400_000), 6):
        folder = tmp_path / str(left)
        options: dict[str, Any] = {"disk_mode": "through", "max_kv_size": bound, "keep": 4, "budget": 20_000_000}
        with opened(model, folder, **options) as cache:
            lease = cache.lease(tokens)
            for at in range(0, len(tokens), 64):
                logits_of(model, tokens[at : at + 64], lease.layers)
            lease.commit(tokens)
            assert cache.flush(10) and cache.durable(tokens) == len(tokens)
            lease = cache.lease([*tokens, 1])
            with contextlib.suppress(BudgetError), contextlib.ExitStack() as held:
                for i in range(40):
                    if i == 24 and (n := cache.state.ledger.free_bytes - cache.state.ledger.headroom() - left) > 0:
                        another = cache.state.ledger.open(Purpose.LIVE, n)
                        held.callback(another.close)
                    logits_of(model, [1], lease.layers)
            assert cache.durable(tokens) == len(tokens), left
            cache.check()
            lease.discard()


# -- checkpoints --------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_about_to_be_read_is_not_thinned(tmp_path: Path) -> None:
    model = FakeModel(("full", "recurrent"))
    with opened(model, tmp_path, disk_mode="through") as cache:
        tokens = text(60)
        for i in range(6):
            tokens = turn(model, cache, [*tokens, *text(20, i)], 2)
            assert cache.flush(10)
    at = min(int(p.name[:8]) for p in files(tmp_path) if ".point" in p.name)
    asked = [*tokens[:at], other(tokens[at]), 1]
    with opened(model, tmp_path, disk_mode="through") as cache:
        restore = cache.restore(asked)
        assert restore is not None and restore.step()  # the KV; the checkpoint is still to be read
        turn(model, cache, [*tokens, *text(30, 9)], 2)
        assert cache.flush(10)
        while restore.step():
            pass
        assert cache.lease(asked, after=restore).cached == at
        assert cache.stats().disk.rejected_records == 0


def test_behind_a_range_that_cannot_be_read_the_checkpoint_before_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(("full", "recurrent"))
    with opened(model, tmp_path, disk_mode="through") as cache:
        first = turn(model, cache, text(100))
        assert cache.flush(10)
        second = turn(model, cache, [*first, *text(100, 1)])
    reading = Folder.reading

    @contextlib.contextmanager
    def failing(self: Folder, namespace: str, name: str) -> Iterator[int]:
        if ".range" in name and int(name[:8]) >= len(first):
            raise OSError(errno.EIO, "no")
        with reading(self, namespace, name) as file:
            yield file

    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*second, 1]).cached == len(second)
    monkeypatch.setattr(Folder, "reading", failing)
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*second, 1]).cached == len(first)


def test_a_checkpoint_that_is_rejected_leaves_the_ranges_as_they_are(tmp_path: Path) -> None:
    model, tokens = FakeModel(("recurrent",)), text(86)
    with opened(model, tmp_path, disk_mode="through") as cache:
        for prompt in (tokens, tokens[:50]):
            turn(model, cache, prompt, 0)
            assert cache.flush(10)
        cache.inventory.shrink(0)
        (point,) = [p for p in files(tmp_path) if p.name.startswith("00000050") and ".point" in p.name]
        flip(point, -1)
        turn(model, cache, [*tokens[:50], other(tokens[50])], 0)
        settled(cache)
        assert Session(model, cache, [*tokens, 1]).cached == len(tokens)


# -- writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["back", "through"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EISDIR])
def test_what_cannot_be_written_is_tried_once(code: int, mode: str, model: FakeModel, tmp_path: Path) -> None:
    """It is what others go on from: they do not ask for it over and over."""
    tokens, tries = text(100), list[str]()
    with opened(model, tmp_path, disk_mode=mode) as cache:
        assert cache.parts.tier is not None
        folder = cache.parts.tier.catalog.folder

        def failing(namespace: str, name: str, *_: Any) -> None:
            tries.append(name)
            raise OSError(code, "no")

        folder.write = failing  # type: ignore[method-assign]
        for prompt in (tokens, branch(tokens, 40, 10, 5), branch(tokens, 40, 12, 6)):
            turn(model, cache, prompt, 0)
        assert not cache.flush(5, everything=True)
        assert len(tries) <= 8, "once for each node, or when it was used again"
        settled(cache)


def test_what_makes_way_on_disk_as_soon_as_it_was_written_is_not_waited_for(tmp_path: Path) -> None:
    """The least recently used in memory is that on disk, too: the writer's next record takes its place."""
    model = FakeModel(("full",))
    with opened(model, tmp_path, disk_budget=5 * 4096) as cache:
        assert cache.parts.tier is not None
        small_records(cache, 8)
        spiller = cache.parts.tier.spiller
        said = [turn(model, cache, [i, *text(n, i)], 0) for i, n in ((1, 7), (2, 31), (3, 799))]
        with cache.state.lock:
            nodes = [cache.parts.tree("").match(as_tokens(t)).path[0] for t in said]
            spiller._backlog.want(nodes[1])
            cache.state.lock.notify_all()
        cache.flush(10)
        with cache.state.lock:
            spiller._backlog.want(nodes[2])
            began = time.monotonic()
            cache.state.lock.run_held(spiller.saving(nodes[0], began + 120))
            assert time.monotonic() - began < 60, "what is not written is not waited for"
        assert cache.stats().reasons.get("disk: disk too slow", 0) == 0
        settled(cache)


@pytest.mark.parametrize("how", ["forgotten", "evicted"])
def test_what_stays_of_something_that_was_owed_is_owed(how: str, model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path, disk_mode="through") as cache:
        small_records(cache)
        held = Held(cache)
        tokens = turn(model, cache, text(400, 1), 0)
        assert held.begun.wait(10)
        if how == "forgotten":
            cache.inventory.forget(tokens, 300)
        else:
            assert cache.parts.tier is not None
            cache.parts.tier.spiller._slow = True  # nobody waits for it
            cache.inventory.shrink(300 * cache.inventory.token_bytes)
        left = cache.inventory.in_memory(tokens)
        held.go()
        assert cache.flush(10) == (how == "forgotten"), "what made way unwritten is told"
        assert 0 < left < 400 and cache.durable(tokens) == left and cache.flush(10)


def test_what_was_lost_is_told_to_whoever_asks_and_to_nobody_else(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path, disk_mode="through") as cache:
        assert cache.parts.tier is not None
        folder = cache.parts.tier.catalog.folder
        write = folder.write

        def failing(*_: Any) -> None:
            raise OSError(errno.EMFILE, "no")

        folder.write = failing  # type: ignore[method-assign]
        turn(model, cache, text(400, 1), 0)
        cache.inventory.shrink(0)
        folder.write = write  # type: ignore[method-assign]
        cache.clear(disk=False)
        assert [cache.flush(10), cache.flush(10)] == [False, True]


def test_bytes_are_counted_whether_anybody_wants_them_still_or_not(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path, disk_mode="through") as cache:
        for i in range(3):
            held = Held(cache)
            turn(model, cache, text(100, i), 0)
            assert held.begun.wait(10)
            cache.inventory.forget(text(100, i), 0)
            held.go()
            assert cache.flush(10)
        disk = cache.stats().disk
        assert disk.records == 0
        assert disk.written_bytes == disk.written_today_bytes > 3 * 100 * cache.inventory.token_bytes


def test_what_is_on_its_way_counts_for_the_daily_limit(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path, disk_mode="through", disk_daily_limit=4_000, budget="400MB") as cache:
        small_records(cache, 10)
        held = Held(cache)
        tokens = text(200)
        turn(model, cache, tokens, 0)
        assert held.begun.wait(10)
        lease = cache.lease([*tokens, 1])  # goes on in place: what is owed is copied out first
        held.go()
        lease.cancel()
        cache.flush(10)
        assert 0 < cache.stats().disk.written_today_bytes <= 4_000


# -- several threads ------------------------------------------------------------------------------------------


def test_whether_something_fits_is_asked_with_the_lock(model: FakeModel) -> None:
    """Others come and go meanwhile."""
    with PrefixCache(model, "40MB") as cache, cache.lease(text(50)) as lease:
        asked = threading.Thread(target=lease.chunk_limit)
        with cache.state.lock:
            asked.start()
            asked.join(0.2)
            assert asked.is_alive()
        asked.join(10)
        assert not asked.is_alive()


def test_a_buffer_that_is_only_being_copied_belongs_to_the_copy(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_out, begun, go = host.copy_out, threading.Event(), threading.Event()

    def slow(*what: Any, **how: Any) -> None:
        begun.set()
        go.wait(10)
        copy_out(*what, **how)

    monkeypatch.setattr(host, "copy_out", slow)
    with opened(model, tmp_path, disk_mode="through") as cache:
        tokens = text(100)
        with cache.lease(tokens) as lease:
            logits_of(model, tokens, lease.layers)
            lease.commit(tokens)
        assert begun.wait(10)
        cache.inventory.forget(tokens, 0)
        cache.check()
        go.set()
        cache.flush(10)
        settled(cache)
        assert cache.inventory.held_bytes == 0
