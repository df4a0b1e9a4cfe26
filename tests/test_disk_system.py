"""How records are read and made durable on macOS. The policy is the real one; its system calls are recorded, and done
with what this system has."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from disk_caches import files, opened, small_records, turn
from fake import FakeModel, Session, settled, text
from test_disk import HYBRID
from test_disk_versions import large
from test_tiers import SPACE, put

from onefold.cache.memory import device
from onefold.cache.tiers.disk import syncing
from onefold.cache.tiers.records import heads, system
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.files import TEMPORARY
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.record import PAGE
from onefold.cache.tiers.records.system import (
    BLOCK,
    F_BARRIERFSYNC,
    F_FULLFSYNC,
    F_NOCACHE,
    F_RDADVISE,
    STAGE_BYTES,
    Calls,
    Darwin,
    Posix,
)

NAMES = {F_RDADVISE: "advise", F_NOCACHE: "no cache", F_FULLFSYNC: "full", F_BARRIERFSYNC: "barrier"}
KINDS = {"full": ("full", "full"), "hybrid": HYBRID}


class Call(NamedTuple):
    what: str
    """A command's name, read, fsync or rename."""
    at: int = 0
    n_bytes: int = 0
    address: int = 0
    """In memory, of what is read into."""


class Recorded(Calls):
    """A stand-in for macOS: notes each call and does on this system what comes closest."""

    def __init__(self) -> None:
        self.made: list[Call] = []
        self.fails: dict[str, int] = {}
        """By call: the number of the error that it raises."""
        self.short = 0
        """The most bytes that a read returns; 0 is no limit."""

    def note(self, call: Call) -> None:
        self.made.append(call)
        if code := self.fails.get(call.what, 0):
            raise OSError(code, os.strerror(code))

    def control(self, held: int, command: int, value: int | bytes = 0) -> None:
        self.note(Call(NAMES[command]))
        if command in (F_FULLFSYNC, F_BARRIERFSYNC):
            os.fsync(held)

    def fsync(self, held: int) -> None:
        self.note(Call("fsync folder" if stat.S_ISDIR(os.fstat(held).st_mode) else "fsync"))
        os.fsync(held)

    def read_head(self, held: int, n_bytes: int) -> bytes:
        self.note(Call("read", 0, n_bytes))
        return os.pread(held, n_bytes, 0)

    def read(self, held: int, parts: Sequence[memoryview], at: int) -> int:
        n_bytes = sum(map(len, parts))
        self.note(Call("read", at, n_bytes, np.frombuffer(parts[0], np.uint8).ctypes.data))
        if self.short:
            parts = [parts[0][: self.short]]
        return os.preadv(held, parts, at)

    def of(self, *what: str) -> list[Call]:
        return [call for call in self.made if call.what in what]

    @property
    def order(self) -> list[str]:
        return [call.what for call in self.made if call.what not in ("read", "no cache", "advise")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """macOS's policy for everything, and the calls that it makes."""
    made = Recorded()
    rename = os.rename

    def renamed(source: Any, target: Any, **where: Any) -> None:
        made.note(Call("rename" if str(target).endswith(".safetensors") else "rename other"))
        rename(source, target, **where)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(system, "chosen", Darwin(made))
    return made


@pytest.fixture
def folder(tmp_path: Path, calls: Recorded) -> Any:
    made = Folder.make(tmp_path / "cache")
    calls.made.clear()
    yield made
    made.unlock()


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


# -- reading -----------------------------------------------------------------------------------------


def parts_of(sizes: Sequence[int]) -> list[np.ndarray]:
    return [np.zeros(n, np.uint8) for n in sizes]


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """2.5 staging buffers and a few bytes."""
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 5 * STAGE_BYTES // 2 + 77, np.uint8).tobytes())
    with path.open("rb") as held:
        yield held.fileno()


@pytest.mark.parametrize("at", [0, 1, BLOCK - 1, BLOCK, STAGE_BYTES - 3, 5 * STAGE_BYTES // 2, 3 * STAGE_BYTES])
@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [BLOCK] * 9, [0, 7, 0, BLOCK + 1, 100_000] * 3, [STAGE_BYTES, 5], [3 * STAGE_BYTES]]
)
@pytest.mark.parametrize("short", [0, 5000, BLOCK])
def test_a_read_is_of_whole_blocks_and_its_result_the_same(at: int, sizes: list[int], short: int, file: int) -> None:
    if short and sum(sizes) > STAGE_BYTES:
        sizes = [n // 64 for n in sizes]
    calls = Recorded()
    calls.short = short
    darwin, ours, theirs = Darwin(calls), parts_of(sizes), parts_of(sizes)
    assert darwin.read(file, ours, at) == Posix().read(file, theirs, at)
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
    if short:
        return
    size = os.fstat(file).st_size
    for call in calls.made:
        assert call.at % BLOCK == 0 and call.n_bytes % BLOCK == 0 and call.address % BLOCK % 4096 == 0
        assert call.n_bytes <= STAGE_BYTES
    end = min(at + sum(sizes), size)
    if sum(sizes) and at < size:
        expected = -(-(end - at // BLOCK * BLOCK) // STAGE_BYTES)
        assert len(calls.made) == expected


def test_a_file_that_is_cut_off_while_it_is_read_ends_there(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = os.fstat(file)
    monkeypatch.setattr(os, "fstat", lambda _: type("Longer", (), {"st_size": size.st_size + STAGE_BYTES})())
    ours, theirs = parts_of([100, 5 * BLOCK]), parts_of([100, 5 * BLOCK])
    assert Darwin(Recorded()).read(file, ours, size.st_size - 3 * BLOCK) == 3 * BLOCK
    assert Posix().read(file, theirs, size.st_size - 3 * BLOCK) == 3 * BLOCK
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))


def test_a_buffer_is_used_again_and_freed(file: int) -> None:
    calls = Recorded()
    darwin = Darwin(calls)
    for _ in range(3):
        darwin.read(file, parts_of([100]), 5)
    assert len({call.address for call in calls.made}) == 1
    assert darwin.staged_bytes(100) == BLOCK and darwin.staged_bytes(10**9) == STAGE_BYTES
    darwin.free_stages()
    assert darwin.read(file, parts_of([100]), 5) == 100


def test_a_failed_read_raises_and_returns_the_buffer(file: int) -> None:
    calls = Recorded()
    darwin = Darwin(calls)
    calls.fails["read"] = errno.EIO
    for _ in range(2):
        with pytest.raises(OSError):
            darwin.read(file, parts_of([100]), 5)
    assert len({call.address for call in calls.made}) == 1


def test_a_large_record_is_read_in_a_few_large_reads(folder: Folder, calls: Recorded) -> None:
    made = large(n_bytes=8 << 20, layers=64)
    put(folder, made)
    (filed,) = folder.listing(SPACE).records
    calls.made.clear()
    places = parts_of([(8 << 20) // 512] * 512)
    with folder.reading(SPACE, made.name) as held:
        head, content = heads.read_content(held, SPACE, filed.named, filed.size)
        at = head.data_at + content.tokens.nbytes
        assert system.chosen.read(held, places, at) == 8 << 20
    assert calls.of("no cache") and not calls.of("advise", "fsync", "full", "barrier")
    assert [(c.at, c.n_bytes) for c in calls.of("read")] == [
        (0, PAGE), (PAGE, STAGE_BYTES), (PAGE + STAGE_BYTES, STAGE_BYTES),
    ]  # fmt: skip
    assert content.checksum(places) == head.checksum


def test_heads_are_read_ahead(folder: Folder, calls: Recorded) -> None:
    put(folder, large())
    calls.made.clear()
    assert len(Catalog(folder, 10**9).load(SPACE)) == 1
    assert [c.what for c in calls.made] == ["advise", "read"]
    calls.fails["advise"] = errno.ENOTSUP
    assert len(Catalog(folder, 10**9).load(SPACE)) == 1


@pytest.mark.parametrize("name", KINDS)
def test_conversations_are_restored(
    name: str, tmp_path: Path, calls: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges and checkpoints: what one policy writes the other reads, byte for byte."""
    model = FakeModel(KINDS[name])
    written = {}
    for policy in (Posix(), system.chosen):
        monkeypatch.setattr(system, "chosen", policy)
        path = tmp_path / type(policy).__name__
        with opened(model, path) as cache:
            small_records(cache, 40)
            said = turn(model, cache, text(150))
        written[path.name] = {p.relative_to(path): p.read_bytes() for p in files(path)}
    assert written["Posix"] == written["Darwin"] and written["Darwin"]
    calls.made.clear()
    with opened(model, tmp_path / "Posix") as cache:
        session = Session(model, cache, [*said, 1])  # every layer is compared with a fresh run
        assert session.cached == len(said) and session.lease.restored > 0
        session.prefill().decode(2).commit()
        assert all(c.at % BLOCK == 0 and c.n_bytes % BLOCK == 0 for c in calls.of("read")) and calls.of("read")
        settled(cache)


@pytest.mark.skipif(device.on_cuda(), reason="macOS has no CUDA, whose restores have host buffers of their own")
def test_the_staging_buffers_count_while_they_are_used(
    tmp_path: Path, calls: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counted = FakeModel(("full", "full")), list[int]()
    with opened(model, tmp_path) as cache:
        said = turn(model, cache, text(150))
    with opened(model, tmp_path) as cache:
        before = cache.state.ledger.by_purpose()["disk_buffers"]
        read = calls.read

        def reading(held: int, parts: Sequence[memoryview], at: int) -> int:
            counted.append(cache.state.ledger.by_purpose()["disk_buffers"])
            return read(held, parts, at)

        monkeypatch.setattr(calls, "read", reading)
        Session(model, cache, [*said, 1]).prefill().commit()
        largest = max(p.stat().st_size for p in files(tmp_path))
        assert counted[-1] - before == 2 * system.chosen.staged_bytes(largest)
        assert cache.state.ledger.by_purpose()["disk_buffers"] == before


@pytest.mark.parametrize("left", [0.3, 0.99])
def test_a_truncated_file_is_a_miss(left: float, tmp_path: Path, calls: Recorded) -> None:
    model = FakeModel(("full", "full"))
    with opened(model, tmp_path) as cache:
        said = turn(model, cache, text(150))
    (path,) = files(tmp_path)
    os.truncate(path, int(path.stat().st_size * left))
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*said, 1]).cached == 0
        assert cache.stats().reasons["disk: truncated"] == 1


# -- writing -----------------------------------------------------------------------------------------


def test_a_barrier_comes_before_the_name_and_nothing_is_flushed_after(folder: Folder, calls: Recorded) -> None:
    put(folder, large())
    calls.made.clear()
    put(folder, large(66))
    assert calls.order == ["barrier", "rename"] and calls.made[0].what == "no cache"
    assert folder.unflushed
    folder.unflushed.flush()
    assert calls.order == ["barrier", "rename", "fsync folder", "full"] and not folder.unflushed


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
def test_a_file_system_without_the_commands_gets_the_next_best(code: int, folder: Folder, calls: Recorded) -> None:
    put(folder, large())
    calls.made.clear()
    calls.fails["barrier"] = code
    put(folder, large(66))
    assert calls.order == ["barrier", "full", "rename"]
    calls.made.clear()
    calls.fails["full"] = code
    put(folder, large(67))
    assert calls.order == ["barrier", "full", "fsync", "rename"]
    calls.made.clear()
    folder.unflushed.flush()
    assert calls.order == ["fsync folder", "full", "fsync folder"]


def test_a_barrier_that_fails_leaves_no_record(folder: Folder, calls: Recorded) -> None:
    put(folder, large())
    calls.fails["barrier"] = errno.EIO
    with pytest.raises(OSError):
        put(folder, large(66))
    assert len(folder.listing(SPACE).records) == 1 and not [*folder.path.glob(f"*/*{TEMPORARY}")]


def test_linux_flushes_each_file_and_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "chosen", Posix())
    folder, said, fsync, rename = Folder.make(tmp_path / "cache"), list[str](), os.fsync, os.rename
    put(folder, large())

    def flushed(held: int) -> None:
        said.append("fsync folder" if stat.S_ISDIR(os.fstat(held).st_mode) else "fsync")
        fsync(held)

    def renamed(*names: Any, **where: Any) -> None:
        said.append("rename")
        rename(*names, **where)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(fcntl, "fcntl", lambda *_: pytest.fail("a command of macOS"))
    put(folder, large(66))
    assert said == ["fsync", "rename", "fsync folder"] and not folder.unflushed
    folder.unlock()


def test_flush_and_close_empty_the_devices_cache_once(tmp_path: Path, calls: Recorded) -> None:
    model = FakeModel(("full", "full"))
    with opened(model, tmp_path, disk_mode="through") as cache:
        cache.parts.tier.spiller.syncing.clock = lambda: 0.0
        small_records(cache, 20)
        said = turn(model, cache, text(150))
        assert cache.flush(20) and cache.durable(said) == len(said)
        assert len(calls.of("rename")) > 5 and len(calls.of("full")) == 1
        assert "rename" not in calls.order[calls.order.index("full") :]
        assert cache.flush(20) and len(calls.of("full")) == 1, "nothing was written since"
        turn(model, cache, [*said, *text(40, 5)])
        wait_until(lambda: len(cache.parts.tier.catalog.records()) > 8 and not cache.stats().disk.pending)
        assert len(calls.of("full")) == 1, "the time has not come"
        calls.made.clear()
    assert calls.order[-2:] == ["fsync folder", "full"] and len(calls.of("full")) == 1


def test_closing_in_write_back_mode_empties_the_devices_cache_last(tmp_path: Path, calls: Recorded) -> None:
    model = FakeModel(HYBRID)
    with opened(model, tmp_path) as cache:
        small_records(cache, 20)
        turn(model, cache, text(150))
        assert not calls.of("rename")
    assert len(calls.of("rename")) > 5 and calls.order[-2:] == ["fsync folder", "full"]
    assert len(calls.of("full")) == 1 and len(calls.of("barrier")) >= len(calls.of("rename"))


def test_records_are_safe_some_seconds_after_they_were_written(tmp_path: Path, calls: Recorded) -> None:
    model, now = FakeModel(("full", "full")), [100.0]
    with opened(model, tmp_path, disk_mode="through") as cache:
        cache.parts.tier.spiller.syncing.clock = lambda: now[0]
        said = turn(model, cache, text(50))
        for i in range(1, 4):
            wait_until(lambda i=i: len(calls.of("rename")) == i and not cache.stats().disk.pending)
            assert len(calls.of("full")) == i - 1
            now[0] += syncing.EVERY_SECONDS
            wait_until(lambda i=i: len(calls.of("full")) == i and not cache.parts.tier.catalog.folder.unflushed)
            now[0] += 1000.0
            if i < 3:
                said = turn(model, cache, [*said, *text(40, i)])
    assert len(calls.of("full")) == 3, "nothing was written since"


def test_a_full_flush_that_fails_makes_flush_false(
    tmp_path: Path, calls: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    model = FakeModel(("full", "full"))
    with caplog.at_level(logging.WARNING, "onefold"), opened(model, tmp_path, disk_mode="through") as cache:
        cache.parts.tier.spiller.syncing.clock = lambda: 0.0
        calls.fails["full"] = errno.EIO
        turn(model, cache, text(50))
        assert not cache.flush(20) and not cache.flush(20)
        assert cache.stats().disk.failed == os.strerror(errno.EIO)
    assert len([r for r in caplog.records if "switched off" in r.message]) == 1


def test_a_full_flush_that_cannot_be_done_now_is_tried_again(tmp_path: Path, calls: Recorded) -> None:
    model = FakeModel(("full", "full"))
    with opened(model, tmp_path, disk_mode="through") as cache:
        cache.parts.tier.spiller.syncing.clock = lambda: 0.0
        calls.fails["full"] = errno.EINTR
        turn(model, cache, text(50))
        assert not cache.flush(20) and not cache.stats().disk.failed
        assert cache.stats().reasons["disk: not written for now"] == 1
        calls.fails.clear()
        assert cache.flush(20)
