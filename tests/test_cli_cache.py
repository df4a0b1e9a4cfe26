"""`onefold cache`: what is said of a folder, what is found to be wrong with it, and what is deleted of it.

The folder is one that caches wrote: two models, one of them with two namespaces, of conversations that branch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from disk_caches import opened as opened_on
from disk_caches import turn
from fake import FakeModel, Session, text
from terminal import environment, on_terminal

from onefold import PrefixCache
from onefold.cache.tiers.records import census
from onefold.cache.tiers.records.entry import NO_TOKENS, on_disk
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.order import below
from onefold.cache.tiers.records.record import Content, Named, What, file_name, parse_name
from onefold.cli import cache_actions, cache_report, main, serve

DOCS = Path(__file__).resolve().parent.parent / "docs" / "disk-format.md"
SALT = "somebody's key"
DAY = 86400.0


def opened(model: FakeModel, folder: Path, label: str, kv: str = "16") -> PrefixCache:
    options: dict[str, Any] = {"budget": 40_000_000, "min_checkpoint_tokens": 1, "disk_budget": "1GB"}
    cache = PrefixCache(model, disk=folder, label=label, kv=kv, **options)
    assert cache.parts.tier is not None
    cache.parts.tier.spiller.jobs.record_tokens = 32  # so that a conversation is several records
    return cache


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; tests get copies."""
    folder = tmp_path_factory.mktemp("disk") / "cache"
    hybrid = FakeModel(("full", "recurrent"))
    with opened(hybrid, folder, "tiny/hybrid") as cache:
        said = Session(hybrid, cache, text(90)).prefill().decode(6).commit()
        with cache.state.lock:
            assert cache.parts.tier is not None
            assert cache.parts.tier.flush(everything=True, until=time.monotonic() + 30)
        Session(hybrid, cache, [*said[:70], *text(50, 1)], checkpoints=[70]).prefill().commit()
        Session(hybrid, cache, text(60, 2), namespace=SALT).prefill().commit()
    plain = FakeModel(("full", "full"), dim=64, seed=1)
    with opened(plain, folder, "", kv="8") as cache:
        Session(plain, cache, text(100, 3), kv="8").prefill().commit()
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "cache"
    shutil.copytree(written, copied)
    return copied


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEFOLD_DISK", raising=False)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, disk: Path | None = None) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["cache", *arguments, "--disk", str(disk or folder)])
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def told(run: Run) -> Callable[..., Any]:
    """With --json; the exit code is 0 unless said."""

    def told(*arguments: str, code: int = 0) -> Any:
        found, out, err = run(*arguments, "--json")
        assert (found, err) == (code, "") and out.count("\n") == 1
        return json.loads(out)

    return told


def records(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*/*") if parse_name(p.name) is not None)


def everything(folder: Path) -> dict[str, tuple[int, float]]:
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime) for p in sorted(folder.rglob("*"))}


def spaces(folder: Path) -> list[census.Space]:
    return census.take(Folder.look(folder))


def hybrid_space(folder: Path) -> census.Space:
    """The one with a branch."""
    return next(s for s in spaces(folder) if s.about["label"] and not s.about["salted"])


def path_of(folder: Path, entry: census.Entry) -> Path:
    return folder / entry.namespace / entry.name


def no_orphan(folder: Path) -> None:
    assert [e.problem for s in spaces(folder) for e in s.entries if e.problem] == []


# -- looking -----------------------------------------------------------------------------------------


def test_ls_lists_namespaces(run, told, folder) -> None:
    found = told("ls")
    assert found["folder"] == str(folder) and len(found["namespaces"]) == 3
    by_label = {(s["label"], s["salted"]): s for s in found["namespaces"] if s["records"]}
    hybrid, salted = by_label["tiny/hybrid", False], by_label["tiny/hybrid", True]
    (other,) = [s for s in by_label.values() if s["label"].startswith("model ")]
    assert (hybrid["kv"], other["kv"]) == ("16", "8") and hybrid["tokens"] == 96 + 50 and other["tokens"] == 100
    assert salted["tokens"] == 60 and SALT not in json.dumps(found)
    assert sum(s["records"] for s in found["namespaces"]) == len(records(folder))
    assert sum(s["bytes"] for s in found["namespaces"]) == sum(on_disk(p.stat().st_size) for p in records(folder))
    assert all(time.time() - 600 < s["oldest"] <= s["last_used"] for s in by_label.values())
    code, out, err = run("ls")
    assert (code, err) == (0, "") and "tiny/hybrid" in out and "just now" in out
    assert all(s["short"] in out and len(s["short"]) == 8 for s in found["namespaces"])


def test_ls_lists_the_records_of_a_namespace_by_conversation(run, told, folder) -> None:
    space = hybrid_space(folder)
    found = told("ls", space.id[:6])
    assert found["namespace"]["id"] == space.id and found["namespace"]["about"]["label"] == "tiny/hybrid"
    assert len(found["records"]) == len(space.entries)
    seen: set[str] = set()
    for record in found["records"]:
        assert record["parent"] is None or record["parent"] in seen
        seen.add(record["name"])
    assert {r["kind"] for r in found["records"]} == {"range", "point"}
    code, out, _ = run("ls", space.id)
    assert code == 0 and out.count("point") == sum(r["kind"] == "point" for r in found["records"])


def read_off(lines: list[tuple[int, bool, Any]]) -> dict[Any, Any]:
    """What each record goes on from, as one sees it: by how far in it is, and whether it begins something."""
    above: list[Any] = []
    found = {}
    for level, begins, name in lines:
        found[name] = (above[level - 1] if level else None) if begins else above[level]
        above[level:] = [name]
    return found


def test_one_sees_what_each_record_goes_on_from(run, told, folder) -> None:
    space = hybrid_space(folder)
    listed = told("ls", space.id)["records"]
    parents = {r["name"]: r["parent"] for r in listed}
    assert read_off([(r["level"], r["begins"], r["name"]) for r in listed]) == parents
    shown = []
    for line, record in zip(run("ls", space.id)[1].splitlines()[2:], listed, strict=False):
        found = re.match(r"( *)(\+ )?([0-9a-f]{12}) ", line)
        assert found is not None and found[3] in record["name"]
        begins = found[2] is not None
        shown.append((len(found[1]) // 2 - (not begins), begins, record["name"]))
    assert read_off(shown) == parents and len({level for level, *_ in shown}) > 1


@pytest.mark.parametrize("goes_on_from", [lambda i: i - 1, lambda i: i // 2 - 1, lambda i: i - 1 - i % 2])
def test_deep_trees_have_few_levels(goes_on_from: Callable[[int], int]) -> None:
    """A chain, a tree that branches at every record, and a chain with something beside each."""
    entries: list[census.Entry] = []
    for i in range(3000):
        entries.append(census.Entry("n", Named(What.RANGE, i, i.to_bytes(20, "big")), 1, used=float(i % 7), tokens=1))
        entries[-1].parent = entries[goes_on_from(i)] if i and goes_on_from(i) >= 0 else None
    listed = cache_actions._by_conversation(entries)
    assert read_off([(level, begins, e) for e, level, begins in listed]) == {e: e.parent for e in entries}
    assert max(level for _, level, _ in listed) <= 12


def test_ls_shows_some_records_and_all_when_asked(run, folder, monkeypatch) -> None:
    monkeypatch.setattr(cache_report, "MOST_ROWS", 2)
    space = hybrid_space(folder)
    _, some, _ = run("ls", space.id)
    assert f"and {len(space.entries) - 2} more" in some
    _, every, _ = run("ls", space.id, "--all")
    assert " more:" not in every and every.count("just now") == some.count("just now") + len(space.entries) - 2


LONG = "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit"
COLUMNS = "namespace", "model", "--kv", "private", "records", "tokens", "size", "last used", "oldest"


def relabelled(folder: Path, label: str = LONG) -> census.Space:
    space = hybrid_space(folder)
    (folder / space.id / "about.json").write_text(json.dumps(space.about | {"label": label}))
    return space


def seen(width: int, folder: Path, *arguments: str) -> list[str]:
    """The lines on a terminal of that width, without colours."""
    with on_terminal("cache", *arguments, COLUMNS=str(width), ONEFOLD_DISK=str(folder)) as terminal:
        assert terminal.end() == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.seen).splitlines()


@pytest.mark.parametrize(
    ("width", "without"),
    [
        (120, ()),
        (80, ("oldest", "private")),
        (60, ("oldest", "private", "--kv", "tokens", "records")),
        (40, ("oldest", "private", "--kv", "tokens", "records", "last used")),
        (20, ("oldest", "private", "--kv", "tokens", "records", "last used")),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_nothing(width: int, without: tuple[str, ...], folder) -> None:
    space = relabelled(folder)
    head, *lines = seen(width, folder, "ls")
    assert [c for c in COLUMNS if c not in without] == re.split(r"  +", head.strip())
    assert max(map(len, [head, *lines])) <= max(width, 30) and "…" not in "".join(lines)
    at = next(i for i, line in enumerate(lines) if line.startswith(space.id[:8]))
    assert cache_report.show_size(space.disk_bytes) in lines[at]
    model, end = head.index("model"), at + 1
    while end < len(lines) and lines[end].startswith(" "):  # what the model's name takes more lines for
        end += 1
    folded = [line[model:].split()[0] for line in lines[at:end]]
    assert "".join(folded) == LONG and len(folded) == {120: 1, 80: 2, 60: 2, 40: 3, 20: 6}[width]


def test_a_narrow_terminal_shows_the_numbers_of_records_whole(folder) -> None:
    space = hybrid_space(folder)
    for width in (80, 60, 40):
        lines = seen(width, folder, "ls", space.id)[1:-1]
        assert max(map(len, lines)) <= width and "…" not in "".join(lines)
        for entry in space.entries:
            (line,) = [line for line in lines if entry.named.address.hex()[:12] in line and f" {entry.start} " in line]
            assert cache_report.show_size(entry.disk_bytes) in line and str(entry.tokens) in line.split()


def test_what_is_no_terminal_gets_everything(run, folder, monkeypatch) -> None:
    relabelled(folder, LONG * 10)
    for name, value in (("COLUMNS", "40"), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    out = re.sub(r"\x1b\[[0-9;]*m", "", run("ls")[1])
    assert LONG * 10 in out and re.split(r"  +", out.splitlines()[0].strip()) == list(COLUMNS)


def test_stat_sums_up(run, told, folder) -> None:
    name = records(folder)[0].name
    (records(folder)[0].parent / (name + ".tmp")).write_bytes(b"x" * 100)
    (folder / "written.json.tmp").write_bytes(b"x")
    (records(folder)[0].parent / "notes.txt").write_text("mine")
    found = told("stat")
    assert found["records"] == len(records(folder)) and found["namespaces"] == 3
    assert found["written_today_bytes"] == found["written_ever_bytes"] > 0
    assert found["in_use_by"] == "" and found["free_bytes"] > 0
    assert len(found["leftovers"]) == 2 and found["leftover_bytes"] == 101
    assert [s.rpartition("/")[2] for s in found["strangers"]] == ["notes.txt"]
    code, out, err = run("stat")
    assert (code, err) == (0, "") and "no process" in out and "2 files, 101 B" in out and "notes.txt" in out


def test_stat_does_not_take_yesterday_for_today(told, folder) -> None:
    (folder / "written.json").write_text('{"day": "2001-01-01", "today": 5, "ever": 7}')
    found = told("stat")
    assert (found["written_today_bytes"], found["written_ever_bytes"]) == (0, 7)


def test_looking_changes_nothing(run, folder) -> None:
    before = everything(folder)
    for arguments in (("ls",), ("stat",), ("verify",), ("prune", "--dry-run", "--budget", "1")):
        assert run(*arguments)[0] == 0
        assert run(*arguments, "--json")[0] == 0
    assert everything(folder) == before


def test_ages_in_words() -> None:
    now = 1e9
    words = {30: "just now", 90: "1 min ago", 3 * 3600 + 5: "3 h ago", 50 * 3600: "2 d ago", -500: "in the future"}
    assert {n: cache_report.age(now - n, now) for n in words} == words
    assert cache_report.age(None) == "-"


# -- verifying ---------------------------------------------------------------------------------------


def test_a_whole_folder_is_good(run, told, folder) -> None:
    found = told("verify")
    assert found["records"] == len(records(folder)) and found["bad"] == [] and found["vanished"] == 0
    code, out, err = run("verify")
    assert (code, err) == (0, "") and "all good" in out


def flipped(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)

    return damage


def renamed(path: Path) -> None:
    named = parse_name(path.name)
    assert named is not None
    path.rename(path.with_name(file_name(named.what, named.start, bytes(20))))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A header that says something else, with all that follows as it was."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        said = json.loads(data[8:end])
        change(said)
        text = json.dumps(said, separators=(",", ":")).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "last byte": (flipped(-1), "checksum"),
    "a byte of the length": (flipped(7), "no header of ours"),
    "a byte of the header": (flipped(20), ""),
    "truncated": (lambda p: os.truncate(p, p.stat().st_size - 1), "truncated"),
    "truncated in its header": (lambda p: os.truncate(p, 100), "truncated"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "too long"),
    "empty": (lambda p: os.truncate(p, 0), "truncated"),
    "another name": (renamed, "misnamed"),
    "padding": (header(lambda h: None), "no header of ours"),
    "a start beyond all bounds": (header(lambda h: h["__metadata__"].update(start=str(10**30))), "no header of ours"),
    "a start that is infinite": (header(lambda h: h["__metadata__"].update(start=float("inf"))), "no header of ours"),
    "a parent that is too long": (header(lambda h: h["__metadata__"].update(parent="00" * 300)), "no header of ours"),
    "a shape that is infinite": (header(lambda h: h["kv.0.0"].update(shape=[float("inf")])), "no header of ours"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(name: str, run, told, folder) -> None:
    damage, reason = DAMAGE[name]
    space = hybrid_space(folder)
    entry = max((e for e in space.entries if e.named.what is What.RANGE), key=lambda e: e.order)
    damage(path_of(folder, entry))
    found = told("verify", code=1)
    bad = {b["reason"] for b in found["bad"] if "goes on from" not in b["reason"]}
    assert len(bad) == 1 and reason in bad.pop()
    assert {b["namespace"] for b in found["bad"]} == {space.id}
    code, out, err = run("verify", "--namespace", space.id[:8])
    assert (code, err) == (1, "") and out.count("bad: ") == len(found["bad"])
    other = next(s for s in spaces(folder) if s.id != space.id and s.entries)
    assert run("verify", "--namespace", other.id)[0] == 0


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_bad_is_removed_with_what_goes_on_from_it(name: str, run, told, folder) -> None:
    space = hybrid_space(folder)
    first = space.entries[0]
    assert first.parent is None and len(space.entries) > 4
    DAMAGE[name][0](path_of(folder, first))
    others = [p for p in records(folder) if p.parent.name != space.id]
    found = told("verify", "--remove", code=1)
    assert found["removed_records"] == len(space.entries)
    left = [p for p in records(folder) if p.is_file()]
    assert left == others
    assert told("verify")["records"] == len(others)


def test_a_folder_with_a_records_name_is_none_of_ours(told, folder) -> None:
    space = hybrid_space(folder)
    last = max((e for e in space.entries if not any(x.parent is e for x in space.entries)), key=lambda e: e.order)
    a_folder(path_of(folder, last))
    found = told("verify", "--remove")
    assert found["bad"] == [] and found["strangers"] == told("stat")["strangers"] == [f"{space.id}/{last.name}"]
    assert path_of(folder, last).is_dir()


def test_only_the_branch_goes_that_is_bad(told, folder) -> None:
    space = hybrid_space(folder)
    ranges = [e for e in space.entries if e.named.what is What.RANGE]
    inside = next(e for e in ranges if e.parent is not None and e.start < e.parent.end)  # begins inside its parent
    flipped(-1)(path_of(folder, inside))
    found = told("verify", "--remove", code=1)
    gone = below(space.entries, {inside})
    assert found["removed_records"] == len(gone) < len(space.entries)
    assert [b["reason"] for b in found["bad"]] == ["checksum"] and found["going_on_from_bad"] == len(gone) - 1
    no_orphan(folder)


def test_verify_names_all_that_is_not_ours(run, told, folder) -> None:
    space = hybrid_space(folder)
    (folder / space.id / "notes.txt").write_text("mine")
    (folder / "thesis.tex").write_text("mine")
    inside = f"{space.id}/notes.txt"
    assert told("verify")["strangers"] == told("stat")["strangers"] == [inside, "thesis.tex"]
    code, out, _ = run("verify")
    assert code == 0 and f"not ours: {inside}, thesis.tex" in out
    assert told("verify", "--namespace", space.id)["strangers"] == [inside]


def test_what_is_bad_is_said_in_words_with_what_to_do(run, told, folder) -> None:
    space = hybrid_space(folder)
    flipped(-1)(path_of(folder, space.entries[0]))
    found = told("verify", code=1)
    assert [b["reason"] for b in found["bad"]] == ["checksum"] and found["removed_records"] == 0
    code, out, _ = run("verify")
    n, size = len(space.entries), cache_report.show_size(space.disk_bytes)
    assert code == 1 and f"/{space.entries[0].name}: its checksum does not agree\n" in out
    assert out.endswith(f"`onefold cache verify --remove` deletes these {n} ({size})\n")
    assert f"`onefold cache verify --namespace {space.id} --remove`" in run("verify", "--namespace", space.id[:9])[1]
    code, out, _ = run("verify", "--remove")
    assert code == 1 and out.endswith(f"deleted {n} records, {size}\n")
    assert run("verify")[0] == 0


def test_every_reason_has_words() -> None:
    tiers = Path(census.__file__).parent
    reasons = {r for p in tiers.glob("*.py") for r in re.findall(r'RecordError\("(.+?)"', p.read_text())}
    assert reasons <= set(cache_report.REASONS)


def test_exit_codes_are_in_the_help(run) -> None:
    said = " ".join(run("verify", "--help")[1].split())
    assert "Exit codes: 0 all records are good; 1 a bad record was found, removed or not; 2" in said


def test_an_orphan_is_bad(told, folder) -> None:
    space = hybrid_space(folder)
    path_of(folder, space.entries[0]).unlink()
    found = told("verify", code=1)
    assert len(found["bad"]) == len(space.entries) - 1 and {b["reason"] for b in found["bad"]} == {census.ORPHAN}
    assert sum(s["unusable"] for s in told("ls")["namespaces"]) == len(space.entries) - 1


def written_record(folder: Path, content: Content, payload: bytes = b"") -> Path:
    path = folder / content.namespace / content.name
    head = content.header(content.checksum([payload]))
    path.write_bytes(head + content.tokens.astype("<i4").tobytes() + payload)
    return path


def test_what_is_whole_and_means_nothing_is_bad(told, folder) -> None:
    space = hybrid_space(folder)
    first = space.entries[0]
    points = [
        Content(What.POINT, space.id, first.named.address, first.end, NO_TOKENS, (), state)
        for state in ("", "[]", '{"position": 1, "leaves": []}')
    ]
    outside = Content(What.POINT, space.id, first.named.address, first.end + 1, NO_TOKENS, (), "")
    for point in points:
        path = written_record(folder, point)
        found = told("verify", code=1)
        assert [b["name"] for b in found["bad"]] == [path.name]
        path.unlink()
    written_record(folder, outside)
    assert [b["reason"] for b in told("verify", code=1)["bad"]] == [census.MISPLACED]


def test_a_range_of_another_layout_is_bad(told, folder) -> None:
    space = hybrid_space(folder)
    about = json.loads((folder / space.id / "about.json").read_text())
    about["layout"][0][0][0] += 1
    (folder / space.id / "about.json").write_text(json.dumps(about))
    assert {b["reason"] for b in told("verify", code=1)["bad"]} == {"of another layout"}
    (folder / space.id / "about.json").write_text("nonsense")
    assert told("verify")["bad"] == []


def test_a_record_that_vanishes_is_no_error(told, folder, monkeypatch) -> None:
    space = hybrid_space(folder)
    gone = path_of(folder, space.entries[-1])
    link, done = census._link, []

    def vanish(*arguments: Any) -> None:
        link(*arguments)
        if not done and any(e.name == gone.name for e in arguments[0]):
            done.append(gone.unlink())

    monkeypatch.setattr(census, "_link", vanish)
    found = told("verify")
    assert found["vanished"] == 1 and found["bad"] == []


def test_a_parent_that_comes_while_the_folder_is_read_is_found(told, folder, monkeypatch) -> None:
    space = hybrid_space(folder)
    first = path_of(folder, space.entries[0])
    aside = folder.parent / "aside"
    first.rename(aside)
    look, done = census._learn, []

    def arrive(*arguments: Any) -> bool:
        if not done:
            done.append(aside.rename(first))
        return look(*arguments)

    monkeypatch.setattr(census, "_learn", arrive)
    assert told("verify")["bad"] == []


def test_a_namespace_of_another_format_is_left_alone(run, told, folder) -> None:
    space = hybrid_space(folder)
    about = folder / space.id / "about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 99}))
    for entry in space.entries:
        path_of(folder, entry).write_bytes(b"who knows")
    assert told("verify")["of_another_format"] == [space.id]
    told("prune")
    assert len([p for p in records(folder) if p.parent.name == space.id]) == len(space.entries)
    told("prune", "--namespace", space.id, "--budget", str(4096 * 2))
    kept = [p for p in records(folder) if p.parent.name == space.id]
    assert len(kept) == 2 and all(p.name.startswith("00000000") or "point" not in p.name for p in kept)
    assert run("ls", space.id)[0] == 0


def test_memory_does_not_depend_on_the_record(folder, monkeypatch) -> None:
    from onefold.cache.tiers.records import verify

    monkeypatch.setattr(verify, "PIECE", 64)
    sizes: list[int] = []
    for space in spaces(folder):
        for entry in space.entries:
            verify.verify(Folder.look(folder), entry, Layout.of(space.about), sizes.append)
    assert sum(sizes) == sum(p.stat().st_size for p in records(folder))
    assert sizes.count(64) > 100


# -- pruning -----------------------------------------------------------------------------------------


def aged(folder: Path, entries: list[census.Entry], seconds: float) -> None:
    for entry in entries:
        os.utime(path_of(folder, entry), (time.time() - seconds,) * 2)


def test_nothing_asked_for_prunes_what_no_cache_could_use(run, told, folder) -> None:
    before = set(everything(folder))
    assert told("prune")["records"] == 0 and set(everything(folder)) == before
    space = hybrid_space(folder)
    path_of(folder, space.entries[0]).unlink()
    (folder / space.id / (space.entries[1].name + ".tmp")).write_bytes(b"half")
    (folder / space.id / "about.json.tmp").write_bytes(b"half")
    (folder / "onefold.json.tmp").write_bytes(b"half")
    for stranger in ("notes.txt", "notes.tmp", "00000000-zz.range.safetensors"):
        (folder / space.id / stranger).write_text("mine")
    dry = told("prune", "--dry-run")
    found = told("prune")
    assert dry | {"dry_run": False} == found
    assert (found["records"], found["leftovers"], found["leftover_bytes"]) == (len(space.entries) - 1, 3, 12)
    assert sorted(p.name for p in (folder / space.id).iterdir()) == [
        "00000000-zz.range.safetensors", "about.json", "notes.tmp", "notes.txt",
    ]  # fmt: skip
    assert sorted(p.name for p in folder.iterdir() if p.is_file()) == ["lock", "onefold.json", "written.json"]


def test_down_to_a_budget_the_least_recently_used_first_and_tails_first(told, folder) -> None:
    every = [e for s in spaces(folder) for e in s.entries]
    old = hybrid_space(folder)
    aged(folder, old.entries, DAY)
    total = sum(e.disk_bytes for e in every)
    while total > 4096:
        before = {p.name for p in records(folder)}
        found = told("prune", "--budget", str(total - 1))
        assert found["left_bytes"] <= total - 1 and found["why"]["beyond_budget"] == found["records"] > 0
        no_orphan(folder)
        gone = before - {p.name for p in records(folder)}
        if any(p.parent.name == old.id for p in records(folder)):
            assert gone <= {e.name for e in old.entries}  # they were used a day ago
        total = found["left_bytes"]
    assert len(records(folder)) <= 1


def test_what_was_not_used_for_long_goes(run, told, folder) -> None:
    space = hybrid_space(folder)
    aged(folder, space.entries, 2 * DAY)
    newer = space.entries[-1]
    aged(folder, [newer], 0)
    before = everything(folder)
    dry = told("prune", "--older-than", "1d", "--dry-run")
    assert everything(folder) == before
    found = told("prune", "--older-than", "1d")
    assert found["records"] == dry["records"] > 0 and [s["id"] for s in found["namespaces"]] == [space.id]
    no_orphan(folder)
    kept = hybrid_space(folder).entries
    assert newer.name in {e.name for e in kept} and kept[0].start == 0  # with all that it goes on from
    assert told("prune", "--older-than", "30m")["records"] == 0
    code, out, err = run("prune", "--older-than", "0s")
    assert (code, err, records(folder)) == (0, "", []) and "left: 0 records" in out


def test_every_unit_of_an_age_is_named_and_works(run, told, folder) -> None:
    space = hybrid_space(folder)
    aged(folder, space.entries, 10 * DAY)
    ages = ("865000s", "863000s"), ("14500m", "14300m"), ("240.5h", "239.5h"), ("11d", "9d"), ("1.5w", "1w")
    for more, less in ages:
        assert told("prune", "--dry-run", "--older-than", more)["records"] == 0
        assert told("prune", "--dry-run", "--older-than", less)["records"] == len(space.entries)
    said = " ".join(run("prune", "--help")[1].split())
    assert "s, m, h, d or w: 30m, 1.5h, 7d, 2w" in said and "Reads only the headers of records" in said
    assert "a number of s, m, h, d or w: 30m, 1.5h, 7d or 2w, not '7y'" in refused(run, "prune", "--older-than", "7y")


def test_one_namespace_is_pruned_alone(told, folder) -> None:
    space = hybrid_space(folder)
    others = [p for p in records(folder) if p.parent.name != space.id]
    (others[0].parent / (others[0].name + ".tmp")).write_bytes(b"half")
    found = told("prune", "--namespace", space.id[:7], "--budget", "1")
    assert found["records"] == len(space.entries) and records(folder) == others
    assert not (folder / space.id).exists() and (others[0].parent / (others[0].name + ".tmp")).exists()


def test_a_cache_goes_on_with_what_was_pruned(folder, told) -> None:
    """What is left is a prefix, and is reused."""
    for keep in (3, 2, 1):
        space = hybrid_space(folder)
        ranges = sorted((e for e in space.entries if e.named.what is What.RANGE), key=lambda e: e.order)
        told("prune", "--namespace", space.id, "--budget", str(sum(e.disk_bytes for e in ranges[:keep])))
        no_orphan(folder)
    hybrid = FakeModel(("full", "recurrent"))
    with opened(hybrid, folder, "tiny/hybrid") as cache:
        assert cache.stats().disk.rejected_records == 0


# -- clearing ----------------------------------------------------------------------------------------


def test_clear_needs_a_yes(run, folder) -> None:
    before = everything(folder)
    code, out, err = run("clear")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "--yes" in err
    assert {k: v[0] for k, v in everything(folder).items()} == {k: v[0] for k, v in before.items()}


def test_clear_deletes_what_is_ours(run, told, folder) -> None:
    first = records(folder)[0]
    first.with_name(first.name + ".tmp").write_bytes(b"half")
    stranger = first.parent / "notes.txt"
    stranger.write_text("mine")
    (folder / "mine").mkdir()
    n = len(records(folder))
    found = told("clear", "--yes")
    assert (found["records"], found["leftovers"], found["left_records"]) == (n, 1, 0)
    assert found["strangers"] == [f"{first.parent.name}/notes.txt"]
    assert stranger.read_text() == "mine" and sorted(p.name for p in first.parent.iterdir()) == [
        "about.json", "notes.txt",
    ]  # fmt: skip
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["lock", "mine", "onefold.json", "written.json", first.parent.name]
    )
    code, out, _ = run("clear", "--yes")
    assert code == 0 and "deleted 0 records" in out and "notes.txt" in out


def test_clear_one_namespace(told, folder) -> None:
    space = hybrid_space(folder)
    others = [p for p in records(folder) if p.parent.name != space.id]
    assert told("clear", "--namespace", space.id, "--yes")["records"] == len(space.entries)
    assert records(folder) == others and not (folder / space.id).exists()


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("y", 0)])
def test_clear_asks_on_a_terminal(answer: str, code: int, folder) -> None:
    n = len(records(folder))
    with on_terminal("cache", "clear", "--disk", str(folder)) as terminal:
        assert f"delete {n} records" in terminal.wait_for(r"\[y/N\] ")
        terminal.type(answer + "\n")
        assert terminal.end() == code
    assert len(records(folder)) == (0 if code == 0 else n)


def test_a_no_deletes_nothing_and_says_so(folder) -> None:
    first = records(folder)[0]
    first.with_name(first.name + ".tmp").write_bytes(b"half")
    n, n_bytes = len(records(folder)), sum(on_disk(p.stat().st_size) for p in records(folder))
    look = Folder.look(folder)
    answered = {yes: cache_actions.clear(look, None, lambda _, yes=yes: yes) for yes in (False, True)}
    no, yes = answered[False], answered[True]
    figures = ("records", "bytes", "leftovers", "leftover_bytes", "namespaces", "left_records", "left_bytes")
    assert [no[f] for f in figures] == [0, 0, 0, 0, [], n, n_bytes] and no["agreed"] is False
    assert (yes["records"], yes["leftovers"], yes["left_records"]) == (n, 1, 0) and set(no) == set(yes)


def test_a_bar_is_shown_on_a_terminal(folder) -> None:
    with on_terminal("cache", "verify", ONEFOLD_DISK=str(folder)) as terminal:
        assert "verifying" in terminal.wait_for("all good")
        assert terminal.end() == 0


# -- the lock ----------------------------------------------------------------------------------------


@pytest.fixture
def in_use(folder: Path) -> Iterator[int]:
    code = (
        "import sys; from onefold.cache.tiers.records.folder import Folder; f = Folder.make(sys.argv[1]); "
        "print(flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def test_a_folder_in_use_is_looked_at_and_not_touched(run, told, folder, in_use) -> None:
    assert told("stat")["in_use_by"] == f"process {in_use}"
    before = everything(folder)
    for arguments in (("ls",), ("verify",), ("prune", "--dry-run", "--budget", "1")):
        assert run(*arguments)[0] == 0
    for arguments in (("prune",), ("clear", "--yes"), ("verify", "--remove"), ("prune", "--budget", "1")):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1 and f"process {in_use}" in err
        assert "end that process" in err and ("DELETE /v1/cache" in err) == (arguments[0] != "verify")
    assert everything(folder) == before


def test_a_lock_that_a_crash_left_is_nobodys(told, folder, in_use) -> None:
    os.kill(in_use, signal.SIGKILL)
    end = time.monotonic() + 30
    while told("stat")["in_use_by"] and time.monotonic() < end:
        time.sleep(0.05)
    assert (folder / "lock").read_text() == f"process {in_use}\n"
    assert told("stat")["in_use_by"] == "" and told("prune")["records"] == 0


# -- nonsense ----------------------------------------------------------------------------------------


def refused(run: Run, *arguments: str, **more: Any) -> str:
    code, out, err = run(*arguments, **more)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith(f"onefold cache {arguments[0]}: ")
    return err


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "prune", "clear"])
def test_folders_that_are_none(action: str, run, tmp_path, capsys) -> None:
    yes = ("--yes",) if action == "clear" else ()
    assert "there is no folder" in refused(run, action, *yes, disk=tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    assert "file is a file, not a folder" in refused(run, action, *yes, disk=tmp_path / "file")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    assert "not a cache of Onefold's" in refused(run, action, *yes, disk=mine)
    (mine / "onefold.json").write_text('{"layout": 99}')
    assert "layout 99" in refused(run, action, *yes, disk=mine)
    (mine / "onefold.json").unlink()
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]
    assert main(["cache", action, *yes]) == 2
    assert "no folder given" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read(run, folder) -> None:
    folder.chmod(0)
    try:
        assert "Permission denied" in refused(run, "ls")
    finally:
        folder.chmod(0o700)


def test_a_namespace_that_is_none_or_several(run, folder) -> None:
    for arguments in (("ls", "zz"), ("ls", ""), ("verify", "--namespace", "zz"), ("clear", "--namespace", "../x")):
        assert "there is no namespace" in refused(run, *arguments)
    id = hybrid_space(folder).id
    shutil.copytree(folder / id, folder / (id[:30] + ("00" if id[30:] != "00" else "11")))
    assert "2 namespaces begin with" in refused(run, "prune", "--namespace", id[:30])
    _, out, _ = run("ls")
    assert id[:31] in out  # as much as tells them apart


def test_sizes_ages_and_actions_that_are_none(run, capsys) -> None:
    for arguments in (("--budget", "lots"), ("--budget", "0"), ("--older-than", "7"), ("--older-than", "-1d")):
        refused(run, "prune", *arguments)
    for wrong in ([], ["burn"]):
        with pytest.raises(SystemExit) as end:
            main(["cache", *wrong])
        assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_the_environment_names_the_folder(folder, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ONEFOLD_DISK", str(folder))
    assert main(["cache", "stat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(folder)


@pytest.mark.parametrize(
    ("flag", "given", "said"),
    [
        ("disk-daily-limit", "x", "cannot read 'x' as a size; write it like '8GB' or '24GiB'"),
        ("disk-daily-limit", "10%", "'10%' is a share, and a share is not allowed here"),
        ("disk-budget", "x", "cannot read 'x' as a size; write it like '8GB', '24GiB' or '60%'"),
        ("disk", "", "a folder is needed, not ''"),
        ("disk", " ", "a folder is needed, not ' '"),
    ],
)
def test_what_serve_is_told_of_its_disk_is_read_with_the_flags(
    flag: str, given: str, said: str, monkeypatch, capsys
) -> None:
    """Before anything else; whichever said it, the flag or its variable, is named."""
    with pytest.raises(SystemExit):
        serve.parser().parse_args(["m", f"--{flag}", given])
    assert capsys.readouterr().err.startswith(f"onefold serve: argument --{flag}: {said}")
    variable = "ONEFOLD_" + flag.upper().replace("-", "_")
    monkeypatch.setenv(variable, given)
    if not given.strip():
        assert getattr(serve.parser().parse_args(["m"]), flag) is None
        return
    with pytest.raises(SystemExit):
        serve.parser().parse_args(["m"])
    assert capsys.readouterr().err.startswith(f"onefold serve: environment variable {variable} (--{flag}): {said}")
    with pytest.raises(SystemExit):
        serve.parser().parse_args(["m", f"--{flag}", given])
    assert capsys.readouterr().err.startswith(f"onefold serve: argument --{flag}: {said}")
    assert getattr(serve.parser().parse_args(["m", f"--{flag}", "1GB"]), flag.replace("-", "_")) == "1GB"


def test_the_folder_may_be_named_before_the_action(folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ONEFOLD_DISK", str(tmp_path / "absent"))
    for arguments in (["--disk", str(folder), "stat"], ["--disk", "absent", "stat", "--disk", str(folder)]):
        assert main(["cache", *arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["folder"] == str(folder)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
@pytest.mark.parametrize("json", [(), ("--json",)])
def test_output_that_cannot_be_written_is_not_the_folders_fault(json: tuple[str, ...], folder) -> None:
    command = [sys.executable, "-m", "onefold", "cache", "ls", "--disk", str(folder), *json]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    said = "onefold cache ls: the output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_names_cannot_move_the_cursor(run, told, folder) -> None:
    space = hybrid_space(folder)
    about = folder / space.id / "about.json"
    about.write_text(json.dumps(space.about | {"label": "evil\x1b[2J[bold]", "kv": "\x1b]0;x\x07"}))
    (folder / space.id / "\x1b[31m.txt").write_text("x")
    (folder / space.id / os.fsdecode(b"\xff.txt")).write_text("x")
    for action in ("ls", "stat", "verify"):
        code, out, _ = run(action)
        assert code == 0 and "\x1b" not in out
    assert "evil[2J[bold]" in run("ls")[1]
    told("stat")


def test_about_that_says_nonsense_is_shown_as_unknown(run, told, folder) -> None:
    space = hybrid_space(folder)
    for said in ("", "[]", '{"label": 5, "model": [], "kv": {}, "salted": "?", "layout": 3}'):
        (folder / space.id / "about.json").write_text(said)
        assert run("ls")[0] == run("verify")[0] == run("prune", "--dry-run")[0] == 0
        assert any(s["label"] == "?" for s in told("ls")["namespaces"])


def test_mlx_is_not_needed(folder) -> None:
    code = "import sys; from onefold.cli import main; main(sys.argv[1:]); assert 'mlx' not in sys.modules"
    for arguments in (["ls"], ["stat"], ["verify"], ["prune"], ["clear", "--yes"]):
        command = [sys.executable, "-c", code, "cache", *arguments, "--disk", str(folder)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    help = "import sys; from onefold.cli import main\ntry: main(['cache', '--help'])\nfinally: "
    help += "assert not {'mlx', 'numpy', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", help], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "verify" in done.stdout, done.stderr


# -- the format, in words ----------------------------------------------------------------------------


def test_the_reader_in_the_docs_reads_every_record(folder, tmp_path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    model, said = FakeModel(("full", "rotating")), text(60)
    with opened_on(model, tmp_path / "windows", disk_mode="through") as cache:
        for i in range(3):
            said = turn(model, cache, [*said, i])
            assert cache.flush(20)
    parted = [p for p in records(tmp_path / "windows") if ".3-" in p.name]
    for path, format in [*((p, 2) for p in records(folder)[::4]), *((p, 3) for p in parted[:1])]:
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
        lines = done.stdout.splitlines()
        assert done.returncode == 0 and lines[-1] == "address    agrees" and lines[0] == f"onefold    {format}"


def test_namespaces_and_checksums_are_as_the_docs_say(folder) -> None:
    found = []
    for about in folder.glob("*/about.json"):
        said = json.loads(about.read_text())
        salt = json.dumps(["str", repr(SALT if said.pop("salted") else "")])
        assert said.pop("namespace") == about.parent.name
        del said["label"], said["points"]
        told = json.dumps([said, salt], sort_keys=True).encode()
        found.append(hashlib.blake2b(told, digest_size=16, person=b"onefold space").hexdigest() == about.parent.name)
    assert found == [True] * 3
    for path in records(folder):
        data = path.read_bytes()
        checksum = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["checksum"].encode()
        assert xxhash.xxh3_128(data.replace(checksum, b"0" * 32, 1)).hexdigest().encode() == checksum
