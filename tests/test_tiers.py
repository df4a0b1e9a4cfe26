"""Records, the folder and the catalog by themselves: names, headers, budgets, and which record goes first. No model."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forking import forks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from onefold.cache.tiers.records import record as form
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.entry import Record, on_disk
from onefold.cache.tiers.records.files import read_all, write_all
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.record import (
    Content,
    Named,
    Tensor,
    What,
    content_of,
    file_name,
    parse_head,
    parse_name,
)
from onefold.cache.tiers.records.written import Written
from onefold.errors import ConfigError, FolderInUse, RecordError

SPACE = "0" * 31 + "1"
OTHER = "0" * 31 + "2"


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def content(n: int = 20, start: int = 0, parent: bytes = b"", seed: int = 0, space: str = SPACE) -> Content:
    tensors = (Tensor("kv.0.0", "F32", (2, n, 4)), Tensor("kv.0.1", "BF16", (2, n, 4)))
    return Content(What.RANGE, space, parent, start, tokens(n, seed), tensors)


def payload_of(made: Content, seed: int = 0) -> bytes:
    size = sum(t.nbytes for t in made.tensors)
    return np.random.default_rng(seed).integers(0, 255, size).astype(np.uint8).tobytes()


def put(folder: Folder, made: Content, used: float | None = None) -> Path:
    folder.describe(made.namespace, {"label": "a model"})
    payload = payload_of(made)
    folder.write(made.namespace, made.name, [made.header(made.checksum([payload])), made.tokens, payload], used)
    return folder.path / made.namespace / made.name


def raising(code: int) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fails


# -- records ---------------------------------------------------------------------------------------


def test_a_record_is_a_safetensors_file(folder: Folder) -> None:
    made = content()
    with safe_open(put(folder, made), framework="numpy") as found:
        assert set(found.keys()) == {"tokens", "kv.0.0", "kv.0.1"}
        assert (found.get_tensor("tokens") == made.tokens).all()
        assert found.get_tensor("kv.0.0").shape == (2, 20, 4)
        said = found.metadata()
    assert said["onefold"] == str(form.VERSION) and said["namespace"] == SPACE and said["what"] == "range"


def test_a_file_is_as_long_as_it_says_and_says_what_it_holds(folder: Folder) -> None:
    made = content(33, 5, b"p" * 20)
    data = put(folder, made).read_bytes()
    assert len(data) == made.size
    head = parse_head(data)
    assert not isinstance(head, int)
    again = content_of(head, SPACE, Named(What.RANGE, 5, made.address))
    assert again.header() == made.header() and (again.tokens == made.tokens).all()
    assert again.checksum([data[head.data_at + made.tokens.nbytes :]]) == head.checksum


def test_the_first_bytes_of_a_file_say_how_many_are_needed(folder: Folder) -> None:
    data = put(folder, content()).read_bytes()
    for n in (8, 9, 100):
        needed = parse_head(data[:n])
        assert isinstance(needed, int) and n < needed <= len(data)
    with pytest.raises(RecordError, match="truncated"):
        parse_head(data[:7])


def test_an_address_depends_on_all_that_goes_before() -> None:
    addresses = {
        content().address,
        content(seed=1).address,
        content(start=1).address,
        content(parent=b"p" * 20).address,
        content(parent=b"q" * 20).address,
        content(space=OTHER).address,
        content(21).address,
        Content(What.POINT, SPACE, b"", 0, tokens(20), ()).address,
    }
    assert len(addresses) == 8


@pytest.mark.parametrize("name", ["", "x.safetensors", "00000000-zz.range.safetensors", "readme.txt", "-.range"])
def test_other_names_are_none_of_ours(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize("after", [b"", bytes(range(20))], ids=["whole", "continues"])
def test_names_of_points_in_parts_are_read_back(after: bytes) -> None:
    name = file_name(What.POINT, 7, bytes(20), 3, after)
    assert parse_name(name) == (What.POINT, 7, bytes(20), 3, after)
    assert parse_name(name.replace("point", "range")) is None
    assert not after or parse_name(name.replace(".3-", ".2-")) is None


@given(st.sampled_from(What), st.integers(0, 1 << 31), st.binary(min_size=20, max_size=20), st.sampled_from((1, 2)))
def test_names_are_read_back(what: What, start: int, address: bytes, version: int) -> None:
    name = file_name(what, start, address, version)
    assert parse_name(name) == (what, start, address, version, b"")
    assert parse_name(name + ".tmp") is None and parse_name("0" + name) is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_record_or_an_error(data: bytes) -> None:
    try:
        parse_head(len(data).to_bytes(8, "little") + data)
        parse_head(data)
    except RecordError:
        pass


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "a"]), x, max_size=3),
    max_leaves=8,
)
KEYS = ["onefold", "what", "parent", "start", "tokens", "tensors", "checksum", "state", "kv.0.0"]


@settings(max_examples=300, deadline=None)
@given(ANY_JSON, st.sampled_from(KEYS))
def test_any_json_is_a_record_or_an_error(value: Any, key: str) -> None:
    made = content()
    said = json.loads(made.header()[8:])
    (said if key == "kv.0.0" else said["__metadata__"])[key] = value
    text = json.dumps(said).replace('{"__metadata__": ', '{"__metadata__":').encode()
    data = len(text).to_bytes(8, "little") + text + made.tokens.tobytes()
    try:
        head = parse_head(data)
        if not isinstance(head, int):
            content_of(head, SPACE, Named(What.RANGE, 0, made.address))
    except RecordError:
        pass


# -- the folder ------------------------------------------------------------------------------------


def test_parts_are_written_and_read_however_they_are_cut(tmp_path: Path) -> None:
    parts = [bytes([i % 256]) * (i % 7) for i in range(3000)]
    with (tmp_path / "file").open("wb+") as file:
        write_all(file.fileno(), parts)
        whole = b"".join(parts)
        assert os.fstat(file.fileno()).st_size == len(whole)
        places = [bytearray(len(p)) for p in parts]
        assert read_all(file.fileno(), places, 0) == len(whole) and b"".join(places) == whole
        assert read_all(file.fileno(), [bytearray(100)], len(whole) - 10) == 10


def test_a_write_that_fails_leaves_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, content(seed=1)).unlink()
    monkeypatch.setattr("onefold.cache.tiers.records.files.write_all", raising(errno.ENOSPC))
    with pytest.raises(OSError):
        folder.write(SPACE, content().name, [b"x"])
    assert [p.name for p in (folder.path / SPACE).iterdir()] == ["about.json"]


def test_one_process_writes_and_others_look(folder: Folder) -> None:
    with pytest.raises(FolderInUse):
        Folder.make(folder.path)
    put(folder, content())
    assert len(Folder.look(folder.path).listing(SPACE).records) == 1


def test_whatever_has_a_temporary_name_is_not_written_to(folder: Folder, tmp_path: Path) -> None:
    """Not a pipe that nobody reads from, and not somebody's file that has a second name there."""
    mine = tmp_path / "thesis.txt"
    mine.write_text("precious")
    temporary = folder.path / "written.json.tmp"
    os.link(mine, temporary)
    folder.note_written(Written("2026-05-04", 1, 1))
    assert mine.read_text() == "precious"
    os.mkfifo(temporary)
    folder.note_written(Written("2026-05-04", 2, 2))
    assert folder.written().ever == 2 and not temporary.exists()


def test_a_folder_under_a_temporary_name_is_left_there(folder: Folder) -> None:
    (folder.path / "written.json.tmp").mkdir()
    with pytest.raises(FileExistsError):
        folder.note_written(Written("2026-05-04", 1, 1))


def test_what_a_crash_left_at_the_top_is_swept(folder: Folder) -> None:
    folder.unlock()
    for name in ("written.json.tmp", "onefold.json.tmp", "notes.tmp"):
        (folder.path / name).write_text("half")
    Folder.make(folder.path).unlock()
    assert sorted(p.name for p in folder.path.glob("*.tmp")) == ["notes.tmp"]


def test_a_full_disk_can_be_opened(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is taken though nothing can be written into it, and is let go of with its holder."""
    folder.unlock()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", raising(errno.ENOSPC))
        again = Folder.make(folder.path)
        with pytest.raises(FolderInUse, match="another process"):
            Folder.make(folder.path)
    again.unlock()
    Folder.make(folder.path).unlock()


def test_a_lock_that_cannot_be_taken_is_closed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.unlock()
    before = os.open(os.devnull, os.O_RDONLY)
    os.close(before)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", raising(errno.ENOLCK))
        with pytest.raises(OSError):
            Folder.make(folder.path)
    after = os.open(os.devnull, os.O_RDONLY)
    os.close(after)
    assert before == after, "no descriptor is left open"


def test_whoever_asks_who_holds_the_lock_is_waited_for(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onefold.cache.tiers.records.locking._LOCK_SECONDS", 60)
    folder.unlock()
    asking = os.open(folder.path / "lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    answered = threading.Timer(0.05, os.close, [asking])
    answered.start()
    Folder.make(folder.path).unlock()
    answered.join()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_times(code: int, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "utime", raising(code))
    assert put(folder, content(), used=1.0).exists()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS, errno.EACCES])
def test_a_file_system_that_cannot_flush_a_folder(code: int, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))
        flush(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        assert put(folder, content()).exists()


def test_a_folder_that_was_made_anew_is_somebody_elses(folder: Folder) -> None:
    """Nothing is written there by whoever had the folder of that name before, and nothing removed."""
    shutil.rmtree(folder.path)
    theirs = Folder.make(folder.path)
    path = put(theirs, content(), used=1000.0)
    theirs.note_written(Written("2026-05-04", 7, 7))
    for act in (
        lambda: put(folder, content(seed=1)),
        lambda: folder.note_written(Written("2026-05-04", 1, 1)),
        lambda: folder.remove(SPACE, path.name),
        lambda: folder.remove_if_empty(SPACE),
    ):
        with pytest.raises(OSError, match="made anew"):
            act()
    folder.touch(SPACE, path.name, 2000.0)
    assert [f.used for f in theirs.listing(SPACE).records] == [1000.0]
    assert theirs.written().ever == 7 and theirs.about(SPACE) == {"label": "a model"}
    theirs.unlock()


@forks
def test_a_child_of_the_process_removes_nothing(folder: Folder) -> None:
    path = put(folder, content())
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            folder.remove(SPACE, path.name)
        os._exit(0)
    os.waitpid(child, 0)
    assert path.exists()


def test_a_folder_that_is_not_ours_is_not_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a cache"):
        Folder.look(tmp_path)


def test_a_namespace_comes_with_its_first_record(folder: Folder) -> None:
    folder.describe(SPACE, {"label": "a model"})
    assert folder.namespaces() == []
    put(folder, content())
    assert folder.about(SPACE) == {"label": "a model"}


# -- the catalog -------------------------------------------------------------------------------------


def chain(folder: Folder, n: int, *, seed: int = 0, used: float | None = None, space: str = SPACE) -> list[Content]:
    """Records that go on from each other."""
    made: list[Content] = []
    for i in range(n):
        above = made[-1] if made else None
        made.append(content(20, 20 * i, b"" if above is None else above.address, seed * 100 + i, space))
        put(folder, made[-1], used)
    return made


def left(folder: Folder, space: str = SPACE) -> set[bytes]:
    return {f.named.address for f in folder.listing(space).records}


def test_at_the_start_what_is_too_much_goes_oldest_first_and_tails_first(folder: Folder) -> None:
    now = time.time()
    old, new = chain(folder, 4, used=now - 1000), chain(folder, 4, seed=1, used=now)
    for made in old[:2]:
        put(folder, made, now - 5000)  # the beginning of a conversation was written down as used before its end
    each = on_disk(old[0].size)
    Catalog(folder, 6 * each)
    assert left(folder) == {m.address for m in (*old[:2], *new)}
    Catalog(folder, 3 * each)
    assert left(folder) == {m.address for m in new[:3]}


def test_other_models_records_go_tails_first_too(folder: Folder) -> None:
    """Also while running, when nobody has used that namespace yet."""
    theirs = chain(folder, 4, used=time.time() - 100, space=OTHER)
    each = on_disk(theirs[0].size)
    catalog = Catalog(folder, 20 * each)
    catalog.budget_bytes = 4 * each
    victims = catalog.make_room(theirs[0].size, time.time())
    assert victims is not None
    catalog.empty_bin()
    assert left(folder, OTHER) == {m.address for m in theirs[: 4 - len(victims)]}


def test_a_record_makes_way_only_for_one_used_later(folder: Folder) -> None:
    made = chain(folder, 2, used=1000.0)
    catalog = Catalog(folder, 2 * on_disk(made[0].size))
    assert catalog.make_room(made[0].size, 999.0) is None and len(left(folder)) == 2
    victims = catalog.make_room(made[0].size, 1001.0)
    assert victims is not None and victims[0].address == made[1].address


def test_orphans_go(folder: Folder) -> None:
    made = chain(folder, 4)
    (folder.path / SPACE / made[1].name).unlink()
    catalog = Catalog(folder, 10**9)
    assert [x.record.address for x in catalog.load(SPACE)] == [made[0].address]
    catalog.empty_bin()
    assert left(folder) == {made[0].address} and catalog.reasons["orphan"] == 2
    assert catalog.check() == []


def test_loading_keeps_tokens_and_no_headers(folder: Folder) -> None:
    """The headers of large models take many times what is wanted of them."""
    layers = tuple(Tensor(f"kv.{i}.{j}", "BF16", (1, 4, 1)) for i in range(64) for j in range(2))
    for i in range(100):
        put(folder, Content(What.RANGE, SPACE, b"", 0, np.full(4, i, np.int32), layers))
    catalog = Catalog(folder, 10**9)
    catalog.load(SPACE)
    tracemalloc.start()
    loaded = catalog.load(SPACE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loaded) == 100 and peak < 200_000, f"{peak // 100} bytes for each"


def test_what_another_version_wrote_is_left_to_it(folder: Folder) -> None:
    made = chain(folder, 3, used=time.time(), space=OTHER)
    for m in made:
        path = folder.path / OTHER / m.name
        path.write_bytes(path.read_bytes().replace(b'"onefold":"2"', b'"onefold":"3"', 1))
    catalog = Catalog(folder, 3 * on_disk(made[0].size) + 5000)
    assert len(left(folder, OTHER)) == 3 and catalog.counts["rejected_records"] == 0


def test_a_namespace_goes_with_its_last_record_and_comes_again(folder: Folder) -> None:
    chain(folder, 2)
    catalog = Catalog(folder, 10**9)
    first, second = sorted(catalog.records(), key=lambda r: r.start)
    catalog.drop(second)
    catalog.empty_bin()
    assert folder.namespaces() == [SPACE]
    catalog.drop(first)
    catalog.empty_bin()
    assert folder.namespaces() == []
    put(folder, content())
    assert folder.about(SPACE) == {"label": "a model"}


def test_a_namespace_stays_for_a_record_that_is_on_its_way(folder: Folder) -> None:
    chain(folder, 1)
    catalog = Catalog(folder, 10**9)
    catalog.drop(catalog.records()[0])
    catalog.expect(Record(SPACE, What.RANGE, b"a" * 20, 0, 20, 100, 0.0))
    catalog.empty_bin()
    assert folder.namespaces() == [SPACE] and left(folder) == set()


def test_empty_namespaces_are_swept_but_for_what_was_put_there(folder: Folder) -> None:
    for made in (content(), content(space=OTHER)):
        put(folder, made).unlink()
    (folder.path / OTHER / "notes.txt").write_text("mine")
    Catalog(folder, 10**9)
    assert folder.namespaces() == [OTHER]
    assert sorted(p.name for p in (folder.path / OTHER).iterdir()) == ["about.json", "notes.txt"]


DAY = 86_400.0
NOON = time.mktime((2026, 5, 4, 12, 0, 0, 0, 0, -1))


def test_the_daily_limit_is_for_a_day_however_the_clock_is_set(folder: Folder) -> None:
    now = NOON
    catalog = Catalog(folder, 10**9, daily_bytes=1000, clock=lambda: now)
    catalog.arrived(Record(SPACE, What.RANGE, b"a" * 20, 0, 20, 1000, 0.0))
    assert catalog.refuses(1) == "daily limit"
    now = NOON - DAY
    assert catalog.refuses(1) == "daily limit"
    now = NOON
    assert catalog.refuses(1) == "daily limit", "the clock was set back and forth"
    now = NOON + DAY
    assert catalog.refuses(1) == "" and catalog.writes.today == 0


@pytest.mark.parametrize("day", ["2062-05-04", "9999-99-99", "next week"])
def test_a_day_that_never_was_does_not_stop_writing_for_ever(day: str, folder: Folder) -> None:
    """What was counted on it counts for today, as it may well have been written today."""
    folder.note_written(Written(day, 1000, 5000))
    now = NOON
    catalog = Catalog(folder, 10**9, daily_bytes=1000, clock=lambda: now)
    assert catalog.refuses(1) == "daily limit"
    now = NOON + DAY
    assert catalog.refuses(1) == "" and catalog.writes.ever == 5000


def test_uses_are_written_down_however_the_clock_is_set(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(folder, 1)
    now, passed = NOON, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: passed)
    catalog = Catalog(folder, 10**9, clock=lambda: now)
    now -= 3600
    catalog.uses.touch(catalog.records(), now)
    assert not catalog.uses.is_due and catalog.uses.take() == []
    passed += 61
    assert catalog.uses.is_due and catalog.uses.take() == catalog.records()
    catalog.uses.touch(catalog.records(), now)
    assert not catalog.uses.is_due
    now += 2 * 3600
    assert not catalog.uses.is_due


FOREST = st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1000), st.integers(1, 9000)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(FOREST, st.integers(1, 60_000))
def test_no_record_goes_before_one_that_goes_on_from_it(shape: list[tuple[int, float, int]], budget: int) -> None:
    """Any forest, any times of use, any budget."""

    class NoFiles:
        path = Path("nowhere")

        def namespaces(self) -> list[str]:
            return []

        def written(self) -> Written:
            return Written("", 0, 0)

        def remove(self, *_: Any) -> None:
            pass

    catalog = Catalog(NoFiles(), 10**9)  # type: ignore[arg-type]
    made: list[Record] = []
    for i, (parent, used, size) in enumerate(shape):
        record = Record(SPACE, What.RANGE, i.to_bytes(20, "big"), i + 1, i + 2, size, used)
        record.parent = made[parent % len(made)] if made and parent else None
        catalog.expect(record)
        catalog.arrived(record)
        made.append(record)
    catalog.loader.linked.add(SPACE)
    catalog.budget_bytes = budget
    victims = catalog.make_room(0, float("inf"))
    assert victims is not None and catalog.total_bytes <= budget
    kept = set(catalog.records())
    assert all(r.parent is None or r.parent in kept for r in kept)
    assert catalog.check() == []
    if victims and kept:
        leaves = [r for r in kept if not r.children]
        gone_last = victims[-1]
        assert all((r.used, -r.start) >= (gone_last.used, -gone_last.start) or r is gone_last.parent for r in leaves)
