"""Records that cannot be read for a while, and a thread that writes which ends: neither costs anything else."""

from __future__ import annotations

import errno
import functools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from disk_caches import Held, files, flip, opened, small_records, turn
from fake import FakeModel, Session, settled, text
from test_disk import HYBRID

from onefold import PrefixCache
from onefold.cache.tiers.records import heads, unread
from onefold.cli.cache import run

KINDS = {"full": ("full", "full"), "hybrid": HYBRID}


@contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch, names: set[str], code: int = errno.EIO) -> Iterator[None]:
    """The heads of these records cannot be read meanwhile."""

    def failing(real: Any) -> Any:
        def read(file: int, namespace: str, named: Any, size: int) -> Any:
            if heads.file_name(*named) in names:
                raise OSError(code, os.strerror(code))
            return real(file, namespace, named, size)

        return read

    with monkeypatch.context() as patched:
        for name in ("read_head", "read_said"):
            patched.setattr(heads, name, failing(getattr(heads, name)))
        yield


def filled(kinds: tuple[str, ...], folder: Path) -> tuple[FakeModel, list[int]]:
    model = FakeModel(kinds)
    with opened(model, folder) as cache:
        small_records(cache, 20)
        return model, turn(model, cache, text(100))


def reopened(model: FakeModel, folder: Path, mode: str) -> PrefixCache:
    cache = opened(model, folder, disk_mode=mode)
    small_records(cache, 20)
    return cache


@pytest.mark.parametrize(
    ("mode", "kinds", "which"),
    [
        ("back", "full", "first"),
        ("through", "full", "first"),
        ("through", "full", "last"),
        ("through", "hybrid", "middle"),
        ("back", "hybrid", "points"),
        ("through", "hybrid", "all"),
    ],
)
def test_what_could_not_be_read_is_written_again_if_it_is_computed_again(
    mode: str, kinds: str, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, said = filled(KINDS[kinds], tmp_path)
    ranges = [p.name for p in files(tmp_path) if ".range." in p.name]
    points = [p.name for p in files(tmp_path) if ".point." in p.name]
    broken = {"first": ranges[:1], "middle": ranges[2:3], "last": ranges[-1:], "points": points, "all": ranges + points}
    before = {p: p.stat().st_ino for p in files(tmp_path)}
    with unreadable(monkeypatch, set(broken[which])):
        cache = reopened(model, tmp_path, mode)
    with cache:
        assert turn(model, cache, text(100)) == said
        later = [turn(model, cache, text(60, 10 + i)) for i in range(2)]
        assert cache.flush(10, everything=True)
        assert [cache.durable(x) for x in (said, *later)] == [len(x) for x in (said, *later)]
        assert cache.stats().disk.failed == "" and cache.stats().disk.rejected_records == 0
        settled(cache)
    same = {p.name for p in before if p.stat().st_ino == before[p]}
    assert same.isdisjoint(broken[which]), "what could not be read is a new file"
    if which != "all":
        assert same, "and the others are as they were"
    with opened(model, tmp_path) as cache:
        for x in (said, *later):
            assert Session(model, cache, [*x, 1]).cached == len(x)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_what_could_not_be_read_is_tried_again(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = filled(KINDS["hybrid"], tmp_path)
    monkeypatch.setattr(unread, "RETRY_SECONDS", 0.0)
    with unreadable(monkeypatch, {files(tmp_path)[0].name}, code):
        cache = reopened(model, tmp_path, "back")
        assert cache.inventory.matched(said) == cache.inventory.matched(said) == 0
        assert cache.stats().reasons["disk: unreadable"] == 1, "and it is said once"
    with cache:
        session = Session(model, cache, [*said, 1])
        assert session.cached == len(said)
        session.prefill().commit()
        settled(cache)


def test_what_goes_on_from_one_that_has_gone_meanwhile_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one could not be read, then it is not there, and the one that goes on from it cannot be read."""
    model, said = filled(KINDS["full"], tmp_path)
    monkeypatch.setattr(unread, "RETRY_SECONDS", 0.0)
    first, second = files(tmp_path)[:2]
    with unreadable(monkeypatch, {first.name}):
        cache = reopened(model, tmp_path, "back")
        assert cache.inventory.matched(said) == 0
    with cache:
        first.unlink()
        with unreadable(monkeypatch, {second.name}):
            assert cache.inventory.matched(said) == 0
            settled(cache)
        assert cache.inventory.matched(said) == 0
        settled(cache)
    assert not files(tmp_path), "orphans"


def test_one_that_is_not_yet_to_be_tried_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = filled(KINDS["full"], tmp_path)
    with unreadable(monkeypatch, {files(tmp_path)[0].name}):
        cache = reopened(model, tmp_path, "back")
    with cache:
        assert cache.inventory.matched(said) == 0, "the disk is left alone for a while"
        assert Session(model, cache, [*said, 1]).cached == 0
    assert len(files(tmp_path)) > 1


@pytest.mark.parametrize(("mode", "kinds"), [("back", "full"), ("through", "hybrid"), ("back", "hybrid")])
def test_what_is_read_later_meets_what_was_computed_meanwhile(
    mode: str, kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the conversation is in memory by then, and another that branches off inside it."""
    model, said = filled(KINDS[kinds], tmp_path)
    monkeypatch.setattr(unread, "RETRY_SECONDS", 0.0)
    with unreadable(monkeypatch, {p.name for p in files(tmp_path)[:2]}):
        cache = reopened(model, tmp_path, mode)
        half = turn(model, cache, said[:47])
        branch = turn(model, cache, [*said[:30], *text(40, 5)])
        if mode == "through":
            assert cache.flush(10)
    with cache:
        session = Session(model, cache, [*said, 1])
        assert session.cached == len(said)
        session.prefill().commit()
        settled(cache)
        assert cache.flush(10, everything=True)
        assert [cache.durable(x) for x in (said, half, branch)] == [len(said), len(half), len(branch)]
        settled(cache)


@contextmanager
def broken_content(monkeypatch: pytest.MonkeyPatch, paths: list[Path]) -> Iterator[None]:
    """The heads of these files can be read meanwhile, and nothing behind them."""
    real, inodes = os.preadv, {p.stat().st_ino for p in paths}

    def read(file: int, *rest: Any) -> int:
        if os.fstat(file).st_ino in inodes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", read)
        yield


@pytest.mark.parametrize(
    ("mode", "kinds", "which"),
    [("back", "full", 0), ("through", "full", 2), ("through", "hybrid", 1), ("back", "hybrid", -1)],
)
def test_a_record_whose_content_cannot_be_read_is_dirty_again(
    mode: str, kinds: str, which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`flush` and `durable` do not count on it: what memory has of it is written again."""
    model, said = filled(KINDS[kinds], tmp_path)
    broken = [p for p in files(tmp_path) if (".point." in p.name) == (which < 0)][which]
    inode = broken.stat().st_ino
    with broken_content(monkeypatch, [broken]), reopened(model, tmp_path, mode) as cache:
        first = Session(model, cache, [*said, 1])
        assert first.cached < len(said)
        assert cache.durable(said) < len(said)
        again = first.prefill().decode(2).commit()
        assert cache.flush(10, everything=True)
        assert cache.durable(again) == len(again) and cache.stats().disk.rejected_records == 0
        assert cache.stats().reasons["disk: unreadable"] == 1
        settled(cache)
    assert broken.stat().st_ino != inode, "it is a new file"
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*again, 1]).cached == len(again)


def test_a_record_whose_content_could_not_be_read_is_used_when_all_of_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, said = filled(KINDS["full"], tmp_path)
    monkeypatch.setattr(unread, "RETRY_SECONDS", 0.0)
    third = files(tmp_path)[2]
    inode = third.stat().st_ino
    with reopened(model, tmp_path, "back") as cache:
        with broken_content(monkeypatch, [third]):
            lease = cache.lease([*said, 1])
            assert lease.cached == 40
            lease.cancel()
            assert cache.inventory.matched(said) == 40, "its head can be read, and that is not enough"
            settled(cache)
        assert Session(model, cache, [*said, 1]).cached == len(said)
        settled(cache)
    assert third.stat().st_ino == inode


def test_a_record_that_no_node_needs_any_more_stays_if_others_are_reached_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of a record that is being written again leaves memory, and the record's descendants are apart."""
    model, said = filled(KINDS["full"], tmp_path)
    before = files(tmp_path)
    with broken_content(monkeypatch, before[1:2]):
        cache = reopened(model, tmp_path, "through")
        session = Session(model, cache, [*said[:40], 9])
        assert session.cached == 20
        disk = Held(cache)
        session.prefill().commit()
        assert disk.begun.wait(10)
    monkeypatch.setattr("onefold.cache.clearing.FLUSH_MOST", 0.1)
    with cache:
        cache.clear(disk=False)
        disk.go()
        assert cache.flush(10)
        settled(cache)
    assert set(before) <= set(files(tmp_path))
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*said, 1]).cached == len(said)


def test_a_restore_that_fails_on_a_record_that_is_being_written_again_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, said = filled(KINDS["full"], tmp_path)
    with reopened(model, tmp_path, "back") as cache:
        other = turn(model, cache, [*said[:70], *text(40, 5)])
    before = files(tmp_path)
    with broken_content(monkeypatch, before[2:3]):
        cache = reopened(model, tmp_path, "through")
        restore = cache.restore([*other, 1])
        assert restore is not None and restore.step(), "the next record is being read ahead"
        session = Session(model, cache, [*said, 1])
        assert session.cached == 40
        disk = Held(cache)
        again = session.prefill().decode(1).commit()
        assert disk.begun.wait(10)
        while restore.step():
            pass
        settled(cache)
        disk.go()
        assert cache.flush(10) and cache.durable(again) == len(again)
        settled(cache)
    cache.close()
    assert set(before) <= set(files(tmp_path))
    with opened(model, tmp_path) as cache:
        assert (cache.durable(again), cache.durable(other)) == (len(again), len(other))


def test_a_record_that_was_cleared_while_it_was_read_is_not_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, said = filled(KINDS["hybrid"], tmp_path)
    monkeypatch.setattr(unread, "RETRY_SECONDS", 0.0)
    points = {p.stat().st_ino for p in files(tmp_path) if ".point." in p.name}
    real, reading, go = os.preadv, threading.Event(), threading.Event()

    def read(file: int, *rest: Any) -> int:
        if os.fstat(file).st_ino in points:
            reading.set()
            assert go.wait(30)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, *rest)

    monkeypatch.setattr(os, "preadv", read)
    with reopened(model, tmp_path, "through") as cache:
        asking = threading.Thread(target=lambda: cache.lease([*said, 1]).cancel())
        asking.start()
        assert reading.wait(30)
        cache.clear()
        go.set()
        asking.join()
        monkeypatch.setattr(os, "preadv", real)
        assert cache.inventory.matched(said) == 0 and cache.stats().disk.rejected_records == 0
        again = turn(model, cache, text(100))
        assert cache.flush(10) and cache.durable(again) == len(again)
        settled(cache)


def test_a_record_that_fails_slowly_keeps_no_other_from_being_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(KINDS["full"])
    with opened(model, tmp_path) as cache:
        said = [turn(model, cache, text(100, i)) for i in range(2)]
    monkeypatch.setattr(unread, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(unread, "TRIAL_SECONDS", 0.0)  # one of them at a time
    with opened(model, tmp_path) as cache:
        with broken_content(monkeypatch, files(tmp_path)):
            for x in said:
                cache.lease([*x, 1]).cancel()
            assert [cache.inventory.matched(x) for x in said] == [0, 0]
        for _ in range(2):
            cache.inventory.matched(said[0])
        assert [cache.inventory.matched(x) for x in said] == [len(x) for x in said]
        settled(cache)
    with opened(model, tmp_path) as cache:
        with broken_content(monkeypatch, files(tmp_path)):
            for x in said:
                cache.lease([*x, 1]).cancel()
        with broken_content(monkeypatch, files(tmp_path)[:1]):
            for _ in range(3):
                cache.inventory.matched(said[0])
            assert sorted(cache.inventory.matched(x) for x in said) == [0, len(said[0])]


@pytest.mark.parametrize("mode", ["back", "through"])
def test_what_cannot_be_written_again_is_left_as_it_was(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptors, neither to read it nor to write it; what goes on from it is not lost either."""
    model, said = filled(KINDS["hybrid"], tmp_path)
    before = files(tmp_path)
    with unreadable(monkeypatch, {before[0].name}, errno.EMFILE):
        cache = reopened(model, tmp_path, mode)

    def none_left(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr("onefold.cache.tiers.records.files.write_all", none_left)
        assert turn(model, cache, text(100)) == said
        assert not cache.flush(10, everything=True)
        settled(cache)
        assert files(tmp_path) == before and cache.stats().disk.failed == ""
    with cache:
        assert turn(model, cache, [*said, 1]) and cache.flush(10, everything=True)
        assert cache.durable(said) == len(said) and set(before) <= set(files(tmp_path))
        settled(cache)
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*said, 1]).cached == len(said)


def test_the_command_line_deletes_nothing_that_it_could_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the record nor what goes on from it; a damaged one beside it goes."""
    model, said = filled(KINDS["full"], tmp_path)
    with opened(model, tmp_path) as cache:
        turn(model, cache, text(40, 9))
    before = files(tmp_path)
    mine = [p for p in before if p.stat().st_size == max(q.stat().st_size for q in before)]
    other = mine[0]
    flip(other, other.stat().st_size - 1)
    first = next(p for p in before if p is not other)
    with unreadable(monkeypatch, {first.name}):
        assert run(["prune", "--disk", str(tmp_path)]) == 0
        assert files(tmp_path) == before
        capsys.readouterr()
        assert run(["verify", "--remove", "--json", "--disk", str(tmp_path)]) == 1
        told = json.loads(capsys.readouterr().out)
        assert (told["unread"], told["removed_records"], len(told["bad"])) == (len(before) - 1, 1, len(before))
        assert files(tmp_path) == [p for p in before if p != other]
        run(["verify", "--disk", str(tmp_path)])
        assert "records left there" in capsys.readouterr().out
    assert run(["verify", "--disk", str(tmp_path)]) == 0
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*said, 1]).cached == len(said)


def await_end_of(name: str) -> None:
    """Wait until no thread of this name is left: the exception that ends one is reported last, and would otherwise be
    reported in another test."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("mode", "where"), [("back", "empty_bin"), ("through", "arrived"), ("through", "uses.take")]
)
def test_a_writer_that_ends_is_done_without(
    mode: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, writers = FakeModel(KINDS["full"], dim=32), "onefold-disk"

    def dies(*_: Any, **__: Any) -> Any:
        if threading.current_thread().name == writers:
            raise KeyError("a bug")
        return []

    with opened(model, tmp_path, budget="1MB", disk_mode=mode) as cache:
        assert cache.parts.tier is not None
        with monkeypatch.context() as patched:
            *parts, name = where.split(".")
            patched.setattr(functools.reduce(getattr, parts, cache.parts.tier.catalog), name, dies)
            said = turn(model, cache, text(100))
            assert not cache.flush(10, everything=True)
        await_end_of(writers)
        disk = cache.stats().disk
        assert disk.failed == "the thread that writes has ended (KeyError)" and not disk.pending
        assert cache.parts.tier.spiller._staging.extra_bytes == 0 and cache.parts.tier.spiller._staging.fits(1)
        began = time.monotonic()
        for i in range(3):  # more than memory has room for
            said = turn(model, cache, text(250, i))
            session = Session(model, cache, [*said, 1])
            assert session.cached == len(said)
            session.prefill().commit()
        assert not cache.flush(100) and not cache.flush(100, everything=True)
    assert time.monotonic() - began < 80, "nobody waited for a thread that has ended"
    assert caplog.text.count("is switched off: the thread that writes has ended") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_checkpoints_that_a_writer_leaves_behind_are_not_counted_for_ever(tmp_path: Path) -> None:
    model = FakeModel(("full", "recurrent"))
    with opened(model, tmp_path, disk_mode="through", min_checkpoint_tokens=10) as cache:
        assert cache.parts.tier is not None
        disk = Held(cache)
        disk.fails = [KeyError("a bug")]  # type: ignore[list-item]
        said: list[int] = []
        for i in range(6):
            said = turn(model, cache, [*said, *text(60, i)])
        with cache.state.lock:
            assert cache.parts.tier.spiller._writer.staged_points
        disk.go()
        assert not cache.flush(10) and cache.stats().disk.failed
        await_end_of("onefold-disk")
        cache.clear()
        assert cache.stats().bytes["checkpoint"] == 0
        settled(cache)
