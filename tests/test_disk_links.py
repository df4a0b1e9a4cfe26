"""Nothing below a cache's folder is reached through a symbolic link, whenever it was put there; and nothing is removed
that a cache did not write."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_caches import MODES, files, opened, ordinary_folder, turn
from fake import FakeModel, Session, settled, text
from test_tiers import OTHER, SPACE, content, put

from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.directory import Directory
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.heads import Wanted, read_heads
from onefold.cache.tiers.records.index import Index
from onefold.cache.tiers.records.record import Named
from onefold.cache.tiers.records.written import Written
from onefold.cli.cache import run
from onefold.errors import ConfigError


def cli(*arguments: Any) -> int:
    return run([str(argument) for argument in arguments])


def everything(path: Path) -> dict[str, Any]:
    """All files below, with their bytes and when they were changed."""
    found = sorted(path.rglob("*"))
    return {str(p.relative_to(path)): (p.read_bytes(), p.stat().st_mtime_ns) for p in found if p.is_file()}


# -- a namespace's folder is a link ----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_namespace_that_is_a_link_is_left_alone(mode: str, tmp_path: Path) -> None:
    model, good, linked = FakeModel(("full",)), tmp_path / "good", tmp_path / "linked"
    with opened(model, good) as cache:
        said = turn(model, cache, text(60))
    before, namespace = everything(good), files(good)[0].parent
    linked.mkdir()
    shutil.copy(good / "onefold.json", linked)
    (linked / namespace.name).symlink_to(namespace)
    with opened(model, linked, disk_mode=mode) as cache:
        assert Session(model, cache, [*said, 1]).cached == 0, "it is not read"
        assert turn(model, cache, text(60)) == said
        assert not cache.flush(10, everything=True) and cache.durable(said) == 0
        assert cache.stats().reasons["disk: something else in its place"] >= 1 and not cache.stats().disk.failed
        cache.clear()
        settled(cache)
    assert everything(good) == before


def test_a_namespace_that_becomes_a_link_is_left_alone(tmp_path: Path) -> None:
    model, folder, away = FakeModel(("full",)), tmp_path / "cache", tmp_path / "away"
    with opened(model, folder, disk_mode="through") as cache:
        said = turn(model, cache, text(60))
        assert cache.flush(10)
        namespace = files(folder)[0].parent
        namespace.rename(away)
        namespace.symlink_to(away)
        before = everything(away)
        cache.clear()
        turn(model, cache, text(60))
        assert not cache.flush(10)
    assert everything(away) == before and namespace.is_symlink()
    namespace.unlink()
    away.rename(namespace)
    with opened(model, folder) as cache:
        assert Session(model, cache, [*said, 1]).cached == len(said)


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "large disk")
    model = FakeModel(("full",))
    with opened(model, tmp_path / "cache") as cache:
        said = turn(model, cache, text(60))
    assert files(tmp_path / "large disk")
    with opened(model, tmp_path / "cache") as cache:
        assert Session(model, cache, [*said, 1]).cached == len(said)


@pytest.mark.parametrize("action", [["clear", "--yes"], ["prune", "--older-than", "0s"], ["verify", "--remove"]])
def test_the_command_line_leaves_the_target_of_a_link_alone(action: list[str], folder: Folder, tmp_path: Path) -> None:
    target = tmp_path / "target"
    path = put(folder, content())
    folder.unlock()
    path.parent.rename(target)
    (target / (path.name + ".tmp")).write_text("half")
    path.parent.symlink_to(target)
    before = everything(target)
    assert cli(*action, "--disk", folder.path) == 0
    assert everything(target) == before and path.parent.is_symlink()


def heads_of(folder: Folder) -> list[Any]:
    made = content()
    wanted = Wanted(Named(made.what, made.start, made.address), made.size)
    return list(read_heads(folder, SPACE, [wanted], Index(SPACE)))


def read_through(folder: Folder) -> bytes:
    with folder.reading(SPACE, content().name) as file:
        return os.read(file, 1 << 20)


OPERATIONS: dict[str, Callable[[Folder], Any]] = {
    "write": lambda f: put(f, content(seed=5)),
    "write over": lambda f: put(f, content()),
    "remove": lambda f: f.remove(SPACE, content().name),
    "remove_if_empty": lambda f: f.remove_if_empty(SPACE),
    "touch": lambda f: f.touch(SPACE, content().name, 5.0),
    "sweep": lambda f: f.sweep(SPACE, f.listing(SPACE).strangers),
    "records": lambda f: f.listing(SPACE).records,
    "strangers": lambda f: f.listing(SPACE).strangers,
    "about": lambda f: f.about(SPACE),
    "reading": read_through,
    "heads": heads_of,
    "stat": lambda f: f.stat(SPACE, content().name),
    "leftover": lambda f: f.is_leftover(SPACE, content().name + ".tmp"),
    "open a catalog": lambda f: Catalog(f, 1),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_swap_in_the_middle_is_no_way_in(
    name: str, when: str, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cache's namespace takes the place of ours just before, or just after, our folder was opened."""
    other = Folder.make(tmp_path / "other")
    put(other, content())
    if name == "remove_if_empty":
        other.remove(SPACE, content().name)
    else:
        (other.path / SPACE / (content().name + ".tmp")).write_text("half")
    other.unlock()
    ours = put(folder, content(seed=1))
    if name == "remove_if_empty":
        folder.remove(SPACE, ours.name)
    before, swapped, real = everything(other.path), list[bool](), Directory.below

    def swap() -> None:
        if not swapped:
            swapped.append(True)
            (folder.path / SPACE).rename(tmp_path / "gone")
            (folder.path / SPACE).symlink_to(other.path / SPACE)

    def below(self: Directory, name: str) -> Directory:
        if when == "before":
            swap()
        found = real(self, name)
        swap()
        return found

    monkeypatch.setattr(Directory, "below", below)
    found: Any = None
    with contextlib.suppress(OSError):
        found = OPERATIONS[name](folder)
    assert swapped and everything(other.path) == before
    assert (folder.path / SPACE).is_symlink()
    if name == "records":
        assert [r.named.address for r in found] == ([] if when == "before" else [content(seed=1).address])
    if name == "heads":
        assert all(isinstance(head, OSError) for head in found)
    if name in ("reading", "stat"):
        assert found is None


def test_a_swap_between_listing_and_removing(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `onefold cache clear` goes: all names are known when the first is removed."""
    other = Folder.make(tmp_path / "other")
    made = [content(seed=i) for i in range(3)]
    for one in made:
        put(other, one)
        put(folder, one)
    other.unlock()
    folder.unlock()
    before, real = everything(other.path), Folder.remove

    def remove(self: Folder, namespace: str, name: str) -> None:
        if not (folder.path / SPACE).is_symlink():
            (folder.path / SPACE).rename(tmp_path / "gone")
            (folder.path / SPACE).symlink_to(other.path / SPACE)
        real(self, namespace, name)

    monkeypatch.setattr(Folder, "remove", remove)
    assert cli("clear", "--yes", "--disk", folder.path) == 2
    assert everything(other.path) == before


# -- files that are links --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lock", "onefold.json", "written.json", "written.json.tmp", "onefold.json.tmp"])
def test_a_link_at_the_top_is_not_written_through(name: str, folder: Folder, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.txt"
    mine.write_text(json.dumps({"layout": 1, "ever": 5}))
    before = everything(tmp_path)["thesis.txt"]
    folder.unlock()
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(mine)
    with contextlib.suppress(OSError, ConfigError):
        again = Folder.make(folder.path)
        assert again.written().ever == 0
        again.note_written(Written("2026-05-04", 1, 1))
        put(again, content())
        again.unlock()
    assert everything(tmp_path)["thesis.txt"] == before


@pytest.mark.parametrize("name", ["about.json", "about.json.tmp", content().name, content().name + ".tmp"])
def test_a_link_in_a_namespace_is_not_followed(name: str, folder: Folder, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.txt"
    mine.write_text(json.dumps({"label": "mine"}))
    before = everything(tmp_path)["thesis.txt"]
    put(folder, content(seed=1)).unlink()
    (folder.path / SPACE / name).unlink(missing_ok=True)
    (folder.path / SPACE / name).symlink_to(mine)
    assert folder.about(SPACE) != {"label": "mine"} and folder.listing(SPACE).records == []
    folder.touch(SPACE, name, 5.0)
    put(folder, content())
    assert len(folder.listing(SPACE).records) == 1
    folder.sweep(SPACE, folder.listing(SPACE).strangers)
    Catalog(folder, 1)
    assert everything(tmp_path)["thesis.txt"] == before


@pytest.mark.parametrize("name", ["../lock", "..", ".", "", "a/b"])
def test_a_name_does_not_lead_elsewhere(name: str, folder: Folder) -> None:
    put(folder, content())
    for act in (lambda: folder.remove(SPACE, name), lambda: folder.write(SPACE, name, [b"x"])):
        with pytest.raises(OSError):
            act()
    assert (folder.path / "lock").exists() and len(folder.listing(SPACE).records) == 1


# -- what a cache did not write --------------------------------------------------------------------


def test_clearing_leaves_what_no_cache_wrote(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(folder, content())
    folder.unlock()
    theirs = [folder.path / OTHER / "about.json", folder.path / ("a" * 32) / "about.json.tmp", folder.path / "lock.tmp"]
    for one in theirs:
        one.parent.mkdir(exist_ok=True)
        one.write_text('{"label": "holidays"}' if one.name == "about.json" else "mine")
    (folder.path / ("b" * 32)).mkdir()
    (folder.path / ("c" * 32) / "about.json").mkdir(parents=True)
    assert cli("clear", "--yes", "--disk", folder.path) == 0 and not path.parent.exists()
    assert all(one.exists() for one in theirs)
    assert (folder.path / ("b" * 32)).is_dir() and (folder.path / ("c" * 32) / "about.json").is_dir()
    capsys.readouterr()
    assert cli("stat", "--json", "--disk", folder.path) == 0
    assert {f"{OTHER}/about.json", "lock.tmp"} <= set(json.loads(capsys.readouterr().out)["strangers"])
    again = Folder.make(folder.path)
    Catalog(again, 1 << 20)
    again.unlock()
    assert all(one.exists() for one in theirs) and (folder.path / ("b" * 32)).is_dir(), "opening leaves them too"


def test_what_an_earlier_version_described_goes_with_its_last_record(folder: Folder) -> None:
    path = put(folder, content())
    about = {"label": "a", "model": "m", "kv": 16, "format": 1, "layout": [], "salted": False}
    (path.parent / "about.json").write_text(json.dumps(about, indent=1))
    path.unlink()
    (path.parent / "about.json.tmp").write_text('{\n "label": "half')
    Catalog(folder, 1 << 20)
    assert not path.parent.exists()


@pytest.mark.parametrize("how", ["garbage", "nothing", "a list", "a folder", "a link", "forbidden", "no layout"])
def test_a_marker_that_cannot_be_read_is_said_to_be_so(how: str) -> None:
    with ordinary_folder() as place:
        model = FakeModel(("full",))
        with opened(model, place / "cache") as cache:
            turn(model, cache, text(60))
        marker, before = place / "cache" / "onefold.json", everything(place / "cache")
        del before["onefold.json"]
        if how == "forbidden":
            marker.chmod(0)
        else:
            marker.unlink()
        if how == "a folder":
            marker.mkdir()
        elif how == "a link":
            marker.symlink_to(place / "elsewhere")
        elif how != "forbidden":
            texts = {"garbage": "{", "nothing": "", "a list": "[1]", "no layout": "{}"}
            marker.write_text(texts[how])
        said = "says no layout" if how == "no layout" else "is unreadable"
        with pytest.raises(ConfigError, match=f"onefold.json {said}.* another folder"):
            opened(model, place / "cache")
        with pytest.raises(ConfigError, match=said) as caught:
            Folder.look(place / "cache")
        assert "None" not in str(caught.value) and "remove" not in str(caught.value)
        if how != "forbidden":
            kept = everything(place / "cache")
            assert {name: kept[name] for name in before} == before


@pytest.mark.parametrize("name", ["written.json", "written.json.tmp"])
def test_a_folder_in_the_place_of_the_count_costs_the_count_alone(name: str, tmp_path: Path) -> None:
    model = FakeModel(("full",))
    with opened(model, tmp_path) as cache:
        turn(model, cache, text(60))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with opened(model, tmp_path, disk_mode="through") as cache:
        said = [turn(model, cache, text(60, i)) for i in range(3)]
        assert cache.flush(10)
        assert [cache.durable(x) for x in said] == [len(x) for x in said]
        disk = cache.stats().disk
        assert disk.failed == "" and disk.written_ever_bytes >= disk.written_bytes > 0
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("name", ["about.json", "about.json.tmp"])
def test_a_folder_in_the_place_of_the_description_costs_that_alone(name: str, folder: Folder) -> None:
    (folder.path / SPACE / name).mkdir(parents=True)
    put(folder, content())
    assert len(folder.listing(SPACE).records) == 1 and folder.about(SPACE) == {}
