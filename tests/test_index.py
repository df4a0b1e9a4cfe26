"""The index of a namespace spares reading heads, and nothing is ever believed because of it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from disk_caches import files, flip, opened, small_records, turn
from fake import FakeModel, text

from onefold.cache.tiers.records import census, heads, index
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.index import Index, Indexed, pack
from onefold.cache.tiers.records.index_files import IndexFiles
from onefold.cache.tiers.records.listing import INDEX
from onefold.cli import cache_actions

KINDS = ("full", "recurrent")


@pytest.fixture(autouse=True)
def small_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "LEAST", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Conversations with branches and checkpoints, and an index of them that a second process has made."""
    path, model = tmp_path / "cache", FakeModel(KINDS)
    with opened(model, path, disk_mode="through") as cache:
        small_records(cache, 10)
        said = turn(model, cache, text(60, 1))
        turn(model, cache, [*said, *text(30, 2)])
        turn(model, cache, [*said[:25], *text(30, 3)])
        assert cache.flush(30)
    loaded(path)
    assert index_of(path).is_file() and index_of(path).stat().st_mode & 0o777 == 0o600
    return path


def index_of(folder: Path) -> Path:
    return namespace_of(folder) / INDEX


def namespace_of(folder: Path) -> Path:
    (found,) = (p for p in folder.iterdir() if p.is_dir())
    return found


def loaded(folder: Path) -> list[Any]:
    """What a cache that opens the folder learns of it, as far as it can be compared."""
    held = Folder.make(folder)
    try:
        catalog = Catalog(held, 1 << 40)
        found = catalog.load(namespace_of(folder).name)
        catalog.empty_bin()
        assert not catalog.failed and not catalog.check()
        return sorted(
            (r.named[1:], r.what.value, r.end, r.hollow, b"" if r.parent is None else r.parent.address, tokens.tolist())
            for r, tokens in found
        )
    finally:
        held.unlock()


def counted(folder: Path) -> list[Any]:
    """What a person who looks at the folder is told."""
    (space,) = census.take(Folder.look(folder))
    return [(e.name, e.size, e.tokens, e.hollow, e.problem, e.parent and e.parent.name) for e in space.entries]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of records whose heads were read."""
    found: list[str] = []
    begin = heads._begin
    monkeypatch.setattr(heads, "_begin", lambda inside, one: (found.append(str(one.named)), begin(inside, one))[1])
    yield found


def without_index(folder: Path, copy: Path) -> tuple[list[Any], list[Any]]:
    shutil.copytree(folder, copy)
    index_of(copy).unlink(missing_ok=True)
    told = counted(copy)
    return loaded(copy), told


def test_heads_that_are_indexed_are_not_read(folder: Path, tmp_path: Path, read: list[str]) -> None:
    said, told = without_index(folder, tmp_path / "copy")
    assert len(said) == len(files(folder)) >= 12 and len(read) == 2 * len(said)
    read.clear()
    assert loaded(folder) == said and counted(folder) == told
    assert not read


def test_records_that_came_later_are_read_and_indexed(folder: Path, read: list[str]) -> None:
    model = FakeModel(KINDS)
    before = set(files(folder))
    with opened(model, folder) as cache:
        turn(model, cache, text(20, 4))
    new = set(files(folder)) - before
    loaded(folder)
    assert len(read) == len(new) > 0
    read.clear()
    loaded(folder)
    assert not read


def test_records_that_were_used_are_known_again(folder: Path, read: list[str]) -> None:
    """A use is written down as the modification time."""
    model = FakeModel(KINDS)
    modified = [p.stat().st_mtime_ns for p in files(folder)]
    with opened(model, folder) as cache:
        for node in cache.state.nodes.nodes():
            cache.state.nodes.touch(node)
        assert cache.inventory.matched(text(60, 1)) == 60
        with cache.lease([*text(60, 1), 5]) as lease:
            assert lease.restored
    assert [p.stat().st_mtime_ns for p in files(folder)] != modified
    assert not read
    loaded(folder)
    assert not read


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_index_is_as_good_as_none(seed: int, folder: Path, tmp_path: Path) -> None:
    said, told = without_index(folder, tmp_path / "copy")
    rng, path = random.Random(seed), index_of(folder)
    whole = path.read_bytes()
    for i in range(6):
        data = bytearray(whole)
        if i == 0:
            data = data[: rng.randrange(len(data))]
        elif i == 1:
            data += rng.randbytes(8)
        else:
            for _ in range(rng.choice([1, 20])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert counted(folder) == told and loaded(folder) == said


@pytest.mark.parametrize("seed", range(4))
def test_an_index_that_lies_is_not_believed(seed: int, folder: Path, tmp_path: Path) -> None:
    """Its checksum is right: somebody made it so."""
    said, told = without_index(folder, tmp_path / "copy")
    rng, path = random.Random(seed), index_of(folder)
    whole = path.read_bytes()
    for _ in range(10):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 5, 200])):
            data[rng.randrange(32, len(data))] = rng.randrange(256)
        data[16:32] = xxhash.xxh3_128_digest(data[32:])
        path.write_bytes(data)
        assert counted(folder) == told and loaded(folder) == said


def test_a_record_that_was_replaced_or_cut_off_is_noticed(folder: Path) -> None:
    _, _, *more = (p for p in files(folder) if "range" in p.name)
    more[0].write_bytes(more[1].read_bytes())
    with more[2].open("rb+") as file:
        file.truncate(40)
    problems = {name: problem for name, _, _, _, problem, _ in counted(folder) if problem}
    assert problems[more[0].name] == "misnamed" and problems[more[2].name] == "truncated"
    there = {named[1] for named, *_ in [(r[0],) for r in loaded(folder)]}
    assert not there & {bytes.fromhex(p.name.split("-")[1].split(".")[0]) for p in (more[0], more[2])}
    assert not more[0].exists() and not more[2].exists()


def test_damage_that_leaves_no_trace_is_found_when_the_record_is_read(folder: Path) -> None:
    """Size, modification time and inode are as they were."""
    model = FakeModel(("full", "recurrent"))
    for path in files(folder):
        found = path.stat()
        flip(path, 120)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    with opened(model, folder) as cache:
        with cache.lease([*text(60, 1), 5]) as lease:
            assert lease.restored == 0
        assert cache.stats().disk.rejected_records
        cache.check()


def test_the_index_of_another_folder_is_harmless(folder: Path, tmp_path: Path) -> None:
    other, model = tmp_path / "other", FakeModel(KINDS)
    with opened(model, other, disk_mode="through") as cache:
        small_records(cache, 10)
        turn(model, cache, text(60, 1))
        assert cache.flush(30)
    assert namespace_of(other).name == namespace_of(folder).name
    said, told = without_index(other, tmp_path / "copy")
    shutil.copy(index_of(folder), index_of(other))
    assert counted(other) == told and loaded(other) == said
    elsewhere = Index("0" * 32, index_of(folder).read_bytes())
    assert len(elsewhere) == 0


@pytest.mark.parametrize("what", ["folder", "link", "pipe", "long"])
def test_something_else_in_its_place(
    what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, told = without_index(folder, tmp_path / "copy")
    path = index_of(folder)
    if what == "long":
        monkeypatch.setattr("onefold.cache.tiers.records.index_files.INDEX_MOST", 100)
    else:
        path.rename(tmp_path / "elsewhere")
    if what == "folder":
        path.mkdir()
        (path / "x").write_text("not ours")
    elif what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(path)
    before = (tmp_path / "elsewhere").read_bytes() if what == "link" else b""
    assert counted(folder) == told and loaded(folder) == said
    if what == "link":
        assert (tmp_path / "elsewhere").read_bytes() == before


def test_an_index_that_cannot_be_written_is_done_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, "no")

    index_of(folder).unlink()
    monkeypatch.setattr(IndexFiles, "write", refused)
    assert loaded(folder) == loaded(folder)
    assert not index_of(folder).exists() and len(read) == 2 * len(files(folder))


def test_it_is_ours_and_goes_with_the_records(folder: Path) -> None:
    (namespace_of(folder) / (INDEX + ".tmp")).write_text("onefold in")
    told = cache_actions.stat(Folder.look(folder))
    assert told["strangers"] == [] and [n.rpartition("/")[2] for n in told["leftovers"]] == [INDEX + ".tmp"]
    space = namespace_of(folder)
    cache_actions.clear(Folder.look(folder), None, lambda question: True)
    assert not space.exists()


def test_it_goes_where_something_else_stays(folder: Path) -> None:
    (namespace_of(folder) / "notes.txt").write_text("mine")
    cache_actions.clear(Folder.look(folder), None, lambda question: True)
    assert [p.name for p in namespace_of(folder).iterdir() if p.name != "about.json"] == ["notes.txt"]


def test_what_is_packed_is_found(folder: Path) -> None:
    space = namespace_of(folder)
    held = Folder.look(folder).listing(space.name).records
    whole = Index(space.name, index_of(folder).read_bytes())
    entries = []
    for filed in held:
        said = whole.find(filed.named, filed.stamp)
        assert said is not None
        assert whole.find(filed.named, filed.stamp._replace(modified=1)) is None
        assert whole.find(filed.named, filed.stamp._replace(inode=1)) is None
        assert whole.find(filed.named, filed.stamp._replace(size=1)) is None
        assert whole.find(filed.named._replace(start=filed.named.start + 1), filed.stamp) is None
        entries.append(Indexed(filed.named.address, filed.named.start, filed.stamp, *said))
    again = Index(space.name, pack(space.name, entries))
    assert len(again) == len(whole) == len(held)
    assert not whole.is_stale(len(held)) and Index(space.name).is_stale(len(held))


@pytest.mark.parametrize("modified", [12 * 10**18, -10 * 10**18])
def test_a_file_from_another_age_is_not_indexed(modified: int, folder: Path, tmp_path: Path, read: list[str]) -> None:
    """An index has 64 bits for nanoseconds; a clock that went wrong, or a damaged file system, has more."""
    said, _ = without_index(folder, tmp_path / "copy")
    path = files(folder)[0]
    os.utime(path, ns=(0, modified))
    if path.stat().st_mtime_ns != modified:
        pytest.skip("this file system has no such time")
    index_of(folder).unlink()
    read.clear()
    assert loaded(folder) == said and index_of(folder).is_file()
    read.clear()
    assert loaded(folder) == said
    assert len(read) == 1


def test_a_folder_in_its_place_costs_no_descriptor(folder: Path) -> None:
    index_of(folder).unlink()
    index_of(folder).mkdir()
    held, space = Folder.look(folder), namespace_of(folder).name
    before = os.dup(0)
    os.close(before)
    for _ in range(5):
        assert held.indexes.read(space) == b""
    after = os.dup(0)
    os.close(after)
    assert after == before, "the lowest free one is the same"
