"""What is damaged on disk is a miss with its reason: never output, never a crash. A disk that fails is done without.

Every layer of every request is compared with a stock run beside it (`fake.Session`), so that a wrong byte would show.
"""

from __future__ import annotations

import atexit
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_caches import files, flip, opened, ordinary_folder, small_records, turn
from effort import ALL, quick, spread
from fake import FakeModel, Session, settled, text
from test_disk import HYBRID

from onefold import PrefixCache
from onefold.cache.tiers.records import record as format
from onefold.cache.tiers.records.folder import Folder
from onefold.cli import cache_actions, cache_report  # noqa: F401  an ordinary user may not be able to import them
from onefold.cli.cache import run
from onefold.errors import ConfigError

KINDS = {"full": ("full", "full"), "hybrid": HYBRID}


def filled(kinds: tuple[str, ...], folder: Path) -> tuple[FakeModel, list[int]]:
    model = FakeModel(kinds)
    with opened(model, folder) as cache:
        small_records(cache, 40)
        return model, turn(model, cache, text(120))


@functools.cache
def kept(kind: str) -> tuple[Path, list[int]]:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return folder, filled(KINDS[kind], folder)[1]


def copied(kind: str, folder: Path) -> tuple[FakeModel, list[int]]:
    """What `filled` makes, made once and copied."""
    source, tokens = kept(kind)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return FakeModel(KINDS[kind]), list(tokens)


def goes_on(model: FakeModel, folder: Path, tokens: list[int]) -> tuple[int, dict[str, int]]:
    """A turn after a restart, every layer compared; how much was cached, and the reasons that the disk gave."""
    with opened(model, folder) as cache:
        session = Session(model, cache, [*tokens, *text(5, 3)])
        session.prefill().decode(3).commit()
        settled(cache)
        reasons = {r: n for r, n in cache.stats().reasons.items() if r.startswith("disk: ")}
        return session.cached, reasons


def regions(path: Path) -> dict[str, tuple[int, int]]:
    """The parts of a record's file."""
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    said = json.loads(data[8:head])
    found = {"length": (0, 8), "padding": (len(data[:head].rstrip(b" ")), head)}
    for key, value in said["__metadata__"].items():
        at = data.index(f'"{key}":"'.encode(), 8) + len(key) + 4
        found[f"metadata {key}"] = (at, at + max(1, len(str(value))))
    at = data.index(b'"dtype"', 8)
    found["a tensor's entry"] = (at, at + 60)
    for name, entry in said.items():
        if name != "__metadata__":
            found[f"tensor {name}"] = (head + entry["data_offsets"][0], head + entry["data_offsets"][1])
    return {name: (lo, hi) for name, (lo, hi) in found.items() if lo < hi <= len(data)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_in_any_region_is_a_miss(kind: str, tmp_path: Path) -> None:
    model, tokens = copied(kind, tmp_path / "whole")
    names = [p.relative_to(tmp_path / "whole") for p in files(tmp_path / "whole")]
    picked = [names[0], names[1], next((n for n in reversed(names) if "point" in n.name), names[-1])]
    cases: dict[str, list[tuple[Path, int]]] = {}
    for n in dict.fromkeys(picked):
        for region, (lo, hi) in regions(tmp_path / "whole" / n).items():
            cases.setdefault(region, []).extend((n, at) for at in sorted({lo, (lo + hi) // 2, hi - 1}))
    for i, (region, places) in enumerate(cases.items()):  # every region, and a few of them at another place each
        for n, at in places if ALL else [places[5 * i % len(places)]]:
            shutil.rmtree(tmp_path / "broken", ignore_errors=True)
            shutil.copytree(tmp_path / "whole", tmp_path / "broken")
            flip(tmp_path / "broken" / n, at)
            cached, reasons = goes_on(model, tmp_path / "broken", tokens)
            assert cached < len(tokens), f"byte {at} of {n}, in {region}, was not missed"
            assert reasons, f"byte {at} of {n}, in {region}: no reason was given"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_at_any_boundary_is_a_miss(kind: str, tmp_path: Path) -> None:
    model, tokens = copied(kind, tmp_path / "whole")
    names = [p.relative_to(tmp_path / "whole") for p in files(tmp_path / "whole")]
    ranges = [n for n in names if "point" not in n.name]
    cases: list[tuple[Path, int]] = []
    for n in [*ranges[:4], *(names[-1:] if names[-1] not in ranges else [])]:  # an earlier point may be made up for
        size = (tmp_path / "whole" / n).stat().st_size
        edges = {0, 1, 7, 8, 9, size - 1, size // 2}
        for lo, hi in regions(tmp_path / "whole" / n).values():
            edges |= {lo, hi}
        cases += [(n, length) for length in sorted(edges) if length < size]
    for n, length in spread(cases, 20):
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "broken")
        os.truncate(tmp_path / "broken" / n, length)
        cached, reasons = goes_on(model, tmp_path / "broken", tokens)
        assert cached < len(tokens) and reasons, (n, length)


def lengthened(path: Path, others: list[Path]) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def emptied(path: Path, others: list[Path]) -> None:
    path.write_bytes(b"")


def swapped(path: Path, others: list[Path]) -> None:
    other = next(p for p in others if p != path)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def turned_into_a_folder(path: Path, others: list[Path]) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("something")


def turned_into_a_link(path: Path, others: list[Path]) -> None:
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to(kept)


def of_an_older_version(path: Path, others: list[Path]) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"onefold":"2"', b'"onefold":"0"', 1))


def removed(path: Path, others: list[Path]) -> None:
    path.unlink()


def filled_with_text(path: Path, others: list[Path]) -> None:
    path.write_text("once upon a time " * 1000)


def with_an_endless_header(path: Path, others: list[Path]) -> None:
    data = path.read_bytes()
    path.write_bytes((1 << 62).to_bytes(8, "little") + data[8:])


def with_deep_json(path: Path, others: list[Path]) -> None:
    text = b'{"__metadata__":' + b"[" * 100_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)


DAMAGE: list[Callable[[Path, list[Path]], None]] = [
    lengthened,
    emptied,
    swapped,
    turned_into_a_folder,
    turned_into_a_link,
    of_an_older_version,
    removed,
    filled_with_text,
    with_an_endless_header,
    with_deep_json,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("which", quick([0, 1, -1], 0, -1))
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_a_miss(kind: str, which: int, damage: Callable[..., None], tmp_path: Path) -> None:
    model, tokens = copied(kind, tmp_path)
    there = files(tmp_path)
    damage(there[which], there)
    cached, _ = goes_on(model, tmp_path, tokens)
    assert cached < len(tokens)
    again, _ = goes_on(model, tmp_path, tokens)
    assert again >= cached, "what was computed again was kept"


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_while_running_is_a_miss(kind: str, damage: Callable[..., None], tmp_path: Path) -> None:
    """The tree knows the record already; it is found out when it is read."""
    model, tokens = copied(kind, tmp_path)
    with opened(model, tmp_path) as cache:
        assert cache.inventory.matched(tokens) == len(tokens)
        there = files(tmp_path)
        damage(there[1], there)
        session = Session(model, cache, [*tokens, 5])
        assert session.cached < len(tokens)
        assert cache.stats().disk.rejected_records >= 1
        session.prefill().decode(3).commit()
        settled(cache)


def test_what_went_on_from_a_damaged_record_is_counted(tmp_path: Path) -> None:
    model, tokens = filled(("full", "full"), tmp_path)
    with opened(model, tmp_path) as cache:
        assert cache.inventory.matched(tokens) == len(tokens)
        there = files(tmp_path)
        flip(there[0], -5)
        assert cache.lease([*tokens, 5]).cached == 0
        stats = cache.stats()
        assert stats.disk.rejected_records == len(there) > 1
        assert stats.reasons["disk: checksum"] == 1
        assert stats.reasons["disk: orphan"] == len(there) - 1


def test_another_models_record_is_a_miss(tmp_path: Path) -> None:
    """Copied into this model's folder under its own name, and under the name that this model would look for."""
    model, tokens = filled(("full", "full"), tmp_path / "a")
    other = FakeModel(("full", "full"), seed=7)
    with opened(other, tmp_path / "b") as cache:
        small_records(cache, 40)
        turn(other, cache, text(120))
    ours, theirs = files(tmp_path / "a"), files(tmp_path / "b")
    for mine, foreign in zip(ours, theirs, strict=True):
        assert mine.name != foreign.name
        shutil.copy(foreign, mine.parent / foreign.name)
        shutil.copy(foreign, mine)
    cached, reasons = goes_on(model, tmp_path / "a", tokens)
    assert cached == 0 and reasons["disk: misnamed"] >= len(ours)
    assert sum(reasons.values()) == 2 * len(ours)


def test_no_record_is_read_that_says_it_is_of_another_layout(tmp_path: Path) -> None:
    """A file that is sound by itself, and is not what this model needs."""
    model, tokens = filled(("full", "full"), tmp_path)
    path = files(tmp_path)[0]
    folder = Folder.make(tmp_path)
    head = format.parse_head(path.read_bytes())
    assert isinstance(head, format.Head)
    named = format.parse_name(path.name)
    assert named is not None
    content = format.content_of(head, path.parent.name, named)
    tensors = tuple(t._replace(shape=(t.shape[0], t.shape[1], t.shape[2] // 2)) for t in content.tensors)
    lying = format.Content(content.what, content.namespace, content.parent, content.start, content.tokens, tensors)
    payload = bytes(sum(t.nbytes for t in tensors))
    folder.write(
        path.parent.name, path.name, [lying.header(lying.checksum([payload])), content.tokens.astype("<i4"), payload]
    )
    folder.unlock()
    cached, reasons = goes_on(model, tmp_path, tokens)
    assert cached == 0 and reasons["disk: of another layout"] == 1


def test_leftovers_of_a_crash_are_swept(tmp_path: Path) -> None:
    model, tokens = filled(("full", "full"), tmp_path)
    first = files(tmp_path)[0]
    half = first.with_name(first.name + ".tmp")
    half.write_bytes(b"half a record")
    stranger = first.with_name("readme.txt")
    stranger.write_text("mine")
    orphan = files(tmp_path)[0]
    orphan.unlink()
    cached, reasons = goes_on(model, tmp_path, tokens)
    assert cached == 0 and not half.exists() and stranger.exists()
    assert reasons["disk: orphan"] >= 1


# -- the disk fails ----------------------------------------------------------------------------------


def serves_on(model: FakeModel, cache: PrefixCache, n: int = 6) -> None:
    for i in range(n):
        said = turn(model, cache, [i, *text(100, 50 + i)])
        again = Session(model, cache, [*said, 1])
        assert again.cached == len(said), "memory goes on working"
        again.prefill().commit()
    settled(cache)


@pytest.mark.parametrize(
    "code", quick([errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT], errno.ENOSPC, errno.EIO)
)
@pytest.mark.parametrize("mode", ["back", "through"])
def test_a_disk_that_takes_no_more_is_done_without(
    code: int, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = filled(("full", "full"), tmp_path)
    before = files(tmp_path)

    def full(*what: Any) -> None:
        raise OSError(code, os.strerror(code))

    with opened(model, tmp_path, budget="1MB", disk_mode=mode) as cache:
        monkeypatch.setattr("onefold.cache.tiers.records.files.write_all", full)
        serves_on(model, cache, 12)
        cache.flush(10)
        assert Session(model, cache, [*tokens, 1]).cached == len(tokens), "what is there can be read"
        if mode == "through":
            assert cache.stats().disk.failed == os.strerror(code)
            assert not cache.flush(10)
    assert caplog.text.count("is switched off") == 1
    monkeypatch.undo()
    assert set(before) <= set(files(tmp_path)) and not list(tmp_path.glob("*/*.tmp"))
    assert goes_on(model, tmp_path, tokens)[0] == len(tokens)


@pytest.mark.parametrize("mode", ["back", "through"])
def test_a_folder_that_vanishes_is_done_without(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = filled(("full", "full"), tmp_path / "cache")
    with opened(model, tmp_path / "cache", budget="1MB", disk_mode=mode) as cache:
        shutil.rmtree(tmp_path / "cache")
        serves_on(model, cache, 12)
        session = Session(model, cache, [*tokens, 1])
        assert session.cached == 0
        session.prefill().commit()
        cache.flush(10)
        assert "the folder was removed" in cache.stats().disk.failed
        settled(cache)
    assert caplog.text.count("is switched off") == 1
    assert not (tmp_path / "cache").exists()


def test_clearing_a_folder_that_vanished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = filled(("full", "full"), tmp_path / "cache")
    with opened(model, tmp_path / "cache", disk_mode="through") as cache:
        assert cache.inventory.matched(tokens) == len(tokens)
        shutil.rmtree(tmp_path / "cache")
        cache.clear()
        assert cache.stats().disk.records == 0 and "the folder was removed" in cache.stats().disk.failed
        serves_on(model, cache)
        cache.clear()
    assert caplog.text.count("is switched off") == 1


def test_clearing_reaches_records_that_could_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor for the first of a conversation: neither it nor what goes on from it has a node."""
    model, tokens = filled(("full", "full"), tmp_path)
    first, real = files(tmp_path)[0], os.open

    def none_left(path: Any, *how: Any, **where: Any) -> int:
        if path == first.name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *how, **where)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", none_left)
        cache = opened(model, tmp_path)
    with cache:
        assert cache.inventory.matched(tokens) == 0 and len(files(tmp_path)) == cache.stats().disk.records > 1
        cache.clear()
        assert files(tmp_path) == [] and cache.stats().disk.records == 0
        settled(cache)


def test_a_folder_that_is_made_anew_is_left_to_its_new_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = filled(("full", "full"), tmp_path / "cache")
    with opened(model, tmp_path / "cache", disk_mode="through") as cache:
        assert cache.inventory.matched(tokens) == len(tokens)
        shutil.rmtree(tmp_path / "cache")
        with opened(model, tmp_path / "cache", disk_mode="through") as theirs:
            said = turn(model, theirs, tokens)
            assert theirs.flush(10)
            before = files(tmp_path / "cache")
            serves_on(model, cache)
            assert not cache.flush(10) and "made anew" in cache.stats().disk.failed
            cache.clear()
            assert files(tmp_path / "cache") == before and theirs.durable(said) == len(said)
            assert theirs.stats().disk.failed == ""
    assert caplog.text.count("is switched off") == 1


def test_looking_makes_no_folder_and_clearing_leaves_none(tmp_path: Path) -> None:
    model = FakeModel(("full",))
    with opened(model, tmp_path, disk_mode="through") as cache:
        for i in range(3):
            assert cache.inventory.matched([1, 2], namespace=f"user {i}") == 0
            assert cache.durable([1, 2], namespace=f"user {i}") == 0
        cache.lease([1, 2, 3], namespace="nobody").cancel()
        assert list(tmp_path.glob("*/")) == []
        turn(model, cache, text(60), namespace="user 1")
        assert cache.flush(10) and len(list(tmp_path.glob("*/about.json"))) == 1
        cache.clear()
        assert list(tmp_path.glob("*/")) == []
        said = turn(model, cache, text(60), namespace="user 1")
    with pytest.raises(ConfigError, match="closed"):
        cache.durable([1, 2], namespace="new")
    (about,) = tmp_path.glob("*/about.json")
    assert json.loads(about.read_text())["salted"] is True
    with opened(model, tmp_path) as cache:
        assert cache.inventory.matched(said, namespace="user 1") == len(said)


def test_trouble_with_a_new_namespace_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor for its `about.json`: that is not the disk's fault."""
    model = FakeModel(("full",))
    real = os.open

    def none_left(path: Any, *how: Any, **where: Any) -> int:
        if "about.json" in str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *how, **where)

    with opened(model, tmp_path, disk_mode="through") as cache:
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", none_left)
            said = turn(model, cache, text(100), namespace="x")
            cache.flush(10)
            assert cache.stats().reasons["disk: not written for now"] >= 1
        assert cache.stats().disk.failed == "" and not list(tmp_path.glob("*/"))
        said = turn(model, cache, said, namespace="x")
        assert cache.flush(10) and cache.durable(said, namespace="x") == len(said)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_made_is_done_without(
    code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(("full",))

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", fails)
        cache = opened(model, tmp_path / "cache")
    with cache:
        assert "memory alone" in caplog.text
        disk = cache.stats().disk
        assert (disk.mode, disk.failed) == ("off", os.strerror(code))
        serves_on(model, cache)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_way_is_a_mistake(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be a folder"):
        opened(FakeModel(("full",)), tmp_path / name)


@pytest.fixture(name="ordinary_folder")
def _ordinary_folder() -> Iterator[Path]:
    with ordinary_folder() as folder:
        yield folder


def test_a_namespace_without_access_is_named_and_done_without(
    ordinary_folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = FakeModel(("full",)), FakeModel(("full", "full"))
    with opened(other, ordinary_folder) as cache:
        turn(other, cache, text(100))
    closed = files(ordinary_folder)[0].parent
    with opened(model, ordinary_folder) as cache:
        said = turn(model, cache, text(100))
    closed.chmod(0)
    with opened(model, ordinary_folder, disk_budget=None) as cache:
        assert Session(model, cache, [*said, 1]).cached == len(said)
        assert cache.flush(10, everything=True) and not cache.stats().disk.failed
    assert f"{closed} cannot be read, and is not used: Permission denied" in caplog.text
    with opened(other, ordinary_folder) as cache:  # the one that it is of goes on in memory
        turn(other, cache, text(50))
        assert not cache.flush(10, everything=True)
        assert not cache.stats().disk.failed and cache.stats().reasons["disk: no permission"]
    capsys.readouterr()
    assert run(["ls", "--disk", str(ordinary_folder)]) == 2
    assert closed.name in capsys.readouterr().err, "who looks at it all is told why not"


@pytest.mark.parametrize("mode", ["back", "through"])
def test_permissions_that_are_taken_away(
    mode: str, ordinary_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ordinary_folder / "cache"
    model, tokens = filled(("full", "full"), folder)
    with opened(model, folder, disk_mode=mode) as cache:
        for path in [folder, *folder.iterdir()]:
            path.chmod(0o500 if path.is_dir() else 0o400)
        serves_on(model, cache)
        cache.flush(10)
        assert Session(model, cache, [*tokens, 1]).cached == len(tokens), "what may be read is"
    assert caplog.text.count("is switched off: Permission denied") == 1


def test_a_folder_that_may_not_be_written_is_done_without(
    ordinary_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ordinary_folder.chmod(0o500)
    model = FakeModel(("full",))
    with opened(model, ordinary_folder / "cache") as cache:
        assert "Permission denied" in caplog.text and cache.stats().disk.failed == "Permission denied"
        serves_on(model, cache)


def test_a_newer_folder_is_not_touched(tmp_path: Path) -> None:
    model, _ = filled(("full",), tmp_path)
    (tmp_path / "onefold.json").write_text('{"layout": 99}')
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="layout 99"):
        opened(model, tmp_path)
    assert files(tmp_path) == before


def test_the_file_size_limit_in_the_middle_of_a_record(tmp_path: Path) -> None:
    """A real write that stops half-way: the process may not make files of more than 20 kB."""
    script = f"""
        import resource, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import onefold
        from pathlib import Path
        from fake import FakeModel, text
        from disk_caches import opened
        from test_disk_faults import serves_on
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        model = FakeModel(("full",), dim=64)
        with opened(model, Path({str(tmp_path)!r}), disk_mode="through") as cache:
            serves_on(model, cache)
            cache.flush(10)
            assert cache.stats().disk.failed == "File too large", cache.stats().disk
        assert not list(Path({str(tmp_path)!r}).glob("*/*.tmp"))
        print("served on")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "served on" in done.stdout and "switched off: File too large" in done.stderr


def test_the_lock_ends_with_the_process(tmp_path: Path) -> None:
    held = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom onefold.cache.tiers.records.folder import Folder\n"
            "f = Folder.make(sys.argv[1]); print('held', flush=True); time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert held.stdout is not None and held.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {held.pid}"):
            Folder.make(tmp_path)
    finally:
        held.kill()
        held.communicate()
    Folder.make(tmp_path).unlock()
