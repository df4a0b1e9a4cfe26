"""`onefold cache --remote`: what is said of a store that machines share, what is found to be wrong, what is deleted.

The store is one that caches wrote: a model in two formats, the same with a secret, and one with checkpoints.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import free_port, redis_server
from terminal import environment, on_terminal
from test_remote_tier import SECRET, machine, served, words
from tiny import tiny

from onefold.cache.tiers.remote import census, sharing
from onefold.cache.tiers.remote.grid import HEAD_BYTES, PREFIX, VALUE_BYTES, about_name, name_of
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.registry import address_of, open_store
from onefold.cache.tiers.remote.stores.store import Held, StoreError, StoreSettings
from onefold.cache.tiers.remote.values import Sealing
from onefold.cli import cache_report, main
from onefold.cli.secret_file import MOST_BYTES, read_secret
from onefold.errors import ConfigError

REDIS = pytest.mark.system("redis-server")
TOKENS = words(300)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; tests get copies."""
    folder = tmp_path_factory.mktemp("store") / "store"
    plain, windows = tiny("llama_q", seed=3), tiny("llama_sliding", seed=3)
    for model, label, options in (
        (plain, "tiny/plain", {}),
        (plain, "tiny/plain", {"kv": "8"}),
        (plain, "tiny/secret", {"secret": SECRET}),
        (windows, "tiny/windows", {}),
    ):
        with machine(model, f"file://{folder}", extra={"label": label}, **options) as cache:
            served(cache, model, TOKENS)
            assert cache.flush(60)
    return folder


@pytest.fixture
def store(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "store"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return secret_in(tmp_path / "secret", SECRET + b"\n")


def secret_in(path: Path, content: bytes) -> Path:
    path.touch(0o600)
    path.write_bytes(content)
    return path


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISK", "REMOTE", "REMOTE_SECRET_FILE"):
        monkeypatch.delenv(f"ONEFOLD_{name}", raising=False)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["cache", *arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


@pytest.fixture
def run(store: Path, command: Run) -> Run:
    def run(*arguments: str, url: str = "") -> tuple[int, str, str]:
        return command(*arguments, "--remote", url or f"file://{store}")

    return run


@pytest.fixture
def told(run: Run) -> Callable[..., Any]:
    """With --json; the exit code is 0 unless said."""

    def told(*arguments: str, code: int = 0, url: str = "") -> Any:
        found, out, err = run(*arguments, "--json", url=url)
        assert (found, err) == (code, "") and out.count("\n") == 1
        return json.loads(out)

    return told


def files(store: Path, tag: str = "") -> list[Path]:
    return sorted(p for p in (store / PREFIX / tag).rglob("*") if p.is_file())


def size(found: list[Path]) -> int:
    return sum(p.stat().st_size for p in found)


def tag_of(told: Callable[..., Any], label: str, kv: str = "16", *arguments: str) -> str:
    (found,) = [s["id"] for s in told("ls", *arguments)["namespaces"] if (s["model"], s["kv"]) == (label, kv)]
    return str(found)


def put(store: Path, name: str, value: bytes) -> None:
    path = store / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(value)


# -- looking -----------------------------------------------------------------------------------------


def test_ls_lists_namespaces(run, told, store) -> None:
    found = told("ls")
    assert found["store"] == f"file://{store}" and found["strangers"] == 0
    by_label = {(s["model"], s["kv"]): s for s in found["namespaces"]}
    assert set(by_label) == {("tiny/plain", "16"), ("tiny/plain", "8"), ("tiny/windows", "16"), (None, None)}
    for space in found["namespaces"]:
        there = files(store, space["id"])
        assert (space["values"], space["bytes"]) == (len(there), size(there))
        assert space["unknown"] == ("" if space["model"] else "sealed: give --remote-secret-file")
        assert (space["device"] in ("cpu", "metal", "cuda")) == (space["tokens"] is not None) == bool(space["model"])
    code, out, err = run("ls")
    assert (code, err) == (0, "") and "tiny/secret" not in out
    assert out.count("unknown (sealed: give --remote-secret-file)") == 1
    assert all(s["short"] in out and len(s["short"]) == 8 for s in found["namespaces"])


def test_the_secret_tells_what_a_namespace_is(told, secret) -> None:
    found = told("ls", "--remote-secret-file", str(secret))
    assert sorted(s["unknown"] for s in found["namespaces"]) == ["", *3 * ["another secret"]]
    assert [s["model"] for s in found["namespaces"] if not s["unknown"]] == ["tiny/secret"]


def test_a_namespace_whose_description_was_forgotten(run, told, store) -> None:
    tag = tag_of(told, "tiny/plain")
    (store / about_name(tag)).unlink()
    (space,) = [s for s in told("ls")["namespaces"] if s["id"] == tag]
    assert space["unknown"] == "not described" and "unknown (not described)" in run("ls")[1]
    assert told("verify", "--namespace", tag)["bad"] == []


def test_ls_lists_the_values_of_a_namespace(run, told, store, monkeypatch) -> None:
    tag = tag_of(told, "tiny/windows")
    there = files(store, tag)
    found = told("ls", tag[:6])
    assert found["namespace"]["id"] == tag and found["namespace"]["model"] == "tiny/windows"
    assert found["values"] == [{"name": f"{PREFIX}{tag}/{p.name}", "bytes": p.stat().st_size} for p in there]
    assert len(there) >= 4  # a record, a checkpoint, a part of it, the description
    monkeypatch.setattr(cache_report, "MOST_ROWS", 2)
    some, every = run("ls", tag)[1], run("ls", tag, "--all")[1]
    assert f"and {len(there) - 2} more; --all lists them" in some and " more" not in every
    assert [p.name in some for p in there] == [i < 2 for i in range(len(there))]
    assert all(p.name in every for p in there)


def test_stat_sums_up(run, told, store) -> None:
    there = files(store)
    assert told("stat") == {
        "store": f"file://{store}", "namespaces": 4, "values": len(there), "bytes": size(there), "strangers": 0,
    }  # fmt: skip
    code, out, err = run("stat")
    assert (code, err) == (0, "") and f"{len(there)} in 4 namespaces" in out


def test_an_empty_store(run, told, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    url = f"file://{tmp_path}/empty"
    assert told("ls", url=url)["namespaces"] == [] and "is empty" in run("ls", url=url)[1]
    assert told("stat", url=url)["values"] == told("verify", url=url)["values"] == 0
    assert told("clear", "--yes", url=url)["values"] == 0


def test_what_is_not_ours_is_counted_and_stays(run, told, store) -> None:
    tag = tag_of(told, "tiny/plain")
    names = [
        f"{PREFIX}notes.txt", f"{PREFIX}{tag}/notes", f"{PREFIX}{tag}/{'A' * 64}", f"{PREFIX}{tag}/{'a' * 63}",
        f"{PREFIX}{tag[:15]}/about", f"{PREFIX}{tag}/{'a' * 64}/more",
    ]  # fmt: skip
    for name in names:
        put(store, name, b"mine")
    assert told("stat")["strangers"] == told("ls")["strangers"] == len(names)
    assert "not ours: 6 names" in run("stat")[1]
    assert told("verify", "--remove", "--namespace", tag)["strangers"] == 4
    assert told("clear", "--yes")["strangers"] == len(names)
    assert "not ours, and left there: 6 names" in run("clear", "--yes")[1]
    assert [p.relative_to(store).as_posix() for p in files(store)] == sorted(names)


def test_names_cannot_move_the_cursor(run, told, store) -> None:
    tag = tag_of(told, "tiny/plain")
    said = {"model": "evil\x1b[2J\x9b1m[bold]", "kv": "\x1b]0;x\x07", "device": "\x1b[1m", "tokens": "1"}
    (store / about_name(tag)).unlink()
    put(store, about_name(tag), Sealing().seal(tag.encode(), {"kind": "about"}, [json.dumps(said).encode()]))
    for arguments in (("ls",), ("ls", tag), ("stat",), ("verify",)):
        out = run(*arguments)[1]
        assert "\x1b" not in out and "\x9b" not in out and "\x07" not in out
    assert "evil[2J1m[bold]" in run("ls")[1]


@pytest.mark.parametrize("said", ["", "[]", '{"model": 5, "kv": {}, "tokens": -1, "token_bytes": true, "device": []}'])
def test_a_description_that_says_nonsense_is_shown_as_unknown(said: str, run, told, store) -> None:
    tag = tag_of(told, "tiny/plain")
    (store / about_name(tag)).unlink()
    put(store, about_name(tag), Sealing().seal(tag.encode(), {"kind": "about"}, [said.encode()]))
    (space,) = [s for s in told("ls")["namespaces"] if s["id"] == tag]
    assert (space["model"], space["tokens"], space["token_bytes"], space["device"]) == (None,) * 4
    assert run("ls")[0] == 0 and run("verify", "--namespace", tag)[0] == (0 if said.startswith("{") else 1)


def test_a_description_that_is_too_large_is_not_read(told, store) -> None:
    tag = tag_of(told, "tiny/plain")
    (store / about_name(tag)).unlink()
    said = json.dumps({"model": "x" * HEAD_BYTES}).encode()
    put(store, about_name(tag), Sealing().seal(tag.encode(), {"kind": "about"}, [said]))
    (space,) = [s for s in told("ls")["namespaces"] if s["id"] == tag]
    assert (space["model"], space["unknown"]) == (None, "too large")


# -- verifying ---------------------------------------------------------------------------------------


def test_values_of_another_secret_are_bad_and_stay(run, told, store, secret) -> None:
    there = files(store)
    tag = tag_of(told, "tiny/secret", "16", "--remote-secret-file", str(secret))
    found = told("verify", code=1)
    assert found["all_bad"] == {tag: len(files(store, tag))} and found["removable_values"] == 0
    assert {b["namespace"] for b in found["bad"]} == {tag} and {b["reason"] for b in found["bad"]} == {"wrong seal"}
    code, out, _ = run("verify", "--remove")
    assert code == 1 and "which cannot be told apart" in out and "--namespace ID" in out and files(store) == there
    good = told("verify", "--namespace", tag, "--remote-secret-file", str(secret))
    assert (good["values"], good["bytes"], good["bad"]) == (len(files(store, tag)), size(files(store, tag)), [])
    named = told("verify", "--remove", "--namespace", tag, code=1)
    assert named["removed_values"] == found["all_bad"][tag] and files(store, tag) == []
    assert told("verify")["bad"] == [] and "all good" in run("verify")[1]


def damaged(value: bytes, how: str, address: bytes) -> bytes:
    short = {"kind": "kv", "tokens": 100, "layout": "x"}
    return {
        "flip": value[:-1] + bytes([value[-1] ^ 1]),
        "truncated": value[:20],
        "empty": b"",
        "too large": value + bytes(VALUE_BYTES),
        "of another size": Sealing().seal(address, short, [bytes(1000)]),
        "a description": Sealing().seal(address, {"kind": "about"}, [b"{}"]),
        "no value": Sealing().seal(address, {}, [])[:-32],
    }[how]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("flip", RemoteReason.SEAL),
        ("truncated", RemoteReason.TRUNCATED),
        ("empty", RemoteReason.TRUNCATED),
        ("too large", RemoteReason.TOO_LARGE),
        ("of another size", RemoteReason.OTHER_LAYOUT),
        ("a description", RemoteReason.OTHER_LAYOUT),
        ("no value", RemoteReason.TRUNCATED),
    ],
)
def test_damage_is_found_and_removed(how: str, reason: RemoteReason, run, told, store) -> None:
    tag = tag_of(told, "tiny/plain")
    path = next(p for p in files(store, tag) if p.name != "about")
    content = damaged(path.read_bytes(), how, bytes.fromhex(path.name))
    path.unlink()  # a copy in the other folder may be the same file
    path.write_bytes(content)
    name = f"{PREFIX}{tag}/{path.name}"
    bad = {"namespace": tag, "name": name, "bytes": len(content), "reason": str(reason)}
    found = told("verify", "--namespace", tag, code=1)
    assert found["bad"] == [bad] and (found["removable_values"], found["removed_values"]) == (1, 0)
    code, out, err = run("verify")
    assert (code, err) == (1, "") and f"bad: {name}: {cache_report.STORE_REASONS[reason]}" in out
    assert "`onefold cache verify --remove` deletes this 1" in out and path.exists()
    found = told("verify", "--remove", code=1)
    assert (found["removed_values"], found["removed_bytes"]) == (1, len(content)) and not path.exists()
    assert told("verify", "--namespace", tag)["bad"] == []


def test_a_value_under_another_name_is_bad(told, store) -> None:
    tag = tag_of(told, "tiny/windows")
    one, other = [p for p in files(store, tag) if p.name != "about"][:2]
    content = other.read_bytes()
    one.unlink()
    one.write_bytes(content)
    (bad,) = told("verify", "--namespace", tag, code=1)["bad"]
    assert (bad["name"], bad["reason"]) == (f"{PREFIX}{tag}/{one.name}", RemoteReason.SEAL)


def test_every_reason_of_a_value_has_words() -> None:
    reasons = set(RemoteReason)
    of_values = {r for r in reasons if list(RemoteReason).index(r) < list(RemoteReason).index(RemoteReason.GONE)}
    assert {str(r) for r in of_values} <= set(cache_report.STORE_REASONS)


def test_a_bar_is_shown_on_a_terminal(store) -> None:
    with on_terminal("cache", "verify", ONEFOLD_REMOTE=f"file://{store}") as terminal:
        assert "verifying" in terminal.wait_for("cannot be told apart")
        assert terminal.end() == 1


class Shaky:
    """A store that is slow at times, and loses values while it is listed."""

    def __init__(self, names: list[str], *, slow: int) -> None:
        self._names, self._slow = names, slow
        self.removed: list[str] = []

    def names(self, prefix: str) -> Iterator[Held]:
        return (Held(name, 10) for name in self._names if name.startswith(prefix))

    def _answer(self) -> None:
        self._slow -= 1
        if self._slow >= 0:
            raise StoreError(RemoteReason.SLOW, "too slow")

    def get(self, name: str) -> None:
        self._answer()

    def remove(self, name: str) -> None:
        self._answer()
        self.removed.append(name)


def test_what_vanishes_does_not_count_and_what_is_slow_is_asked_again() -> None:
    name = name_of("0" * 16, bytes(32))
    read: list[int] = []
    found = census.verify(Shaky([name], slow=2), Sealing(), PREFIX, {}, read.append)  # type: ignore[arg-type]
    assert (found.values, found.vanished, found.bad, read) == (0, 1, [], [10])
    with pytest.raises(StoreError):
        census.verify(Shaky([name], slow=census.TRIES), Sealing(), PREFIX, {}, read.append)  # type: ignore[arg-type]


def test_a_name_that_is_listed_twice_is_removed_once() -> None:
    names = [name_of("0" * 16, i.to_bytes(32, "big")) for i in range(100)]
    shaky = Shaky(names + names[:50], slow=0)
    assert census.remove(shaky, census.values(shaky)) == (100, 1000)  # type: ignore[arg-type]
    assert sorted(shaky.removed) == names


def test_kinds_are_those_of_the_tier() -> None:
    assert sharing.KV == census.KV and sharing.ABOUT == census.ABOUT


# -- clearing ----------------------------------------------------------------------------------------


def test_clear_deletes_all_values(run, told, store) -> None:
    n, n_bytes = len(files(store)), size(files(store))
    code, out, err = run("clear")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "--yes" in err and len(files(store)) == n
    found = told("clear", "--yes")
    assert (found["agreed"], found["values"], found["bytes"]) == (True, n, n_bytes) and files(store) == []
    assert run("clear", "--yes")[1] == "deleted 0 values, 0 B\n"


def test_clear_one_namespace(run, told, store) -> None:
    tag = tag_of(told, "tiny/plain")
    others = [p for p in files(store) if p.parent.name != tag]
    n, n_bytes = len(files(store, tag)), size(files(store, tag))
    assert run("clear", "--namespace", tag, "--yes")[1] == (f"deleted {n} values, {cache_report.show_size(n_bytes)}\n")
    assert files(store) == others


def test_clear_does_not_follow_a_link_to_another_folder(told, store, tmp_path) -> None:
    tag = tag_of(told, "tiny/plain")
    elsewhere = (store / PREFIX / tag).rename(tmp_path / "elsewhere")
    (store / PREFIX / tag).symlink_to(elsewhere)
    there = sorted(elsewhere.iterdir())
    assert there and told("stat")["strangers"] == 1  # the link
    told("clear", "--yes")
    assert sorted(elsewhere.iterdir()) == there and (store / PREFIX / tag).is_symlink()


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("y", 0)])
def test_clear_asks_on_a_terminal(answer: str, code: int, store) -> None:
    n = len(files(store))
    with on_terminal("cache", "clear", "--remote", f"file://{store}") as terminal:
        assert f"delete {n} values" in terminal.wait_for(r"\[y/N\] ")
        terminal.type(answer + "\n")
        assert ("nothing was deleted" in terminal.wait_for("deleted")) == bool(code)
        assert terminal.end() == code
    assert len(files(store)) == (n if code else 0)


# -- nonsense ----------------------------------------------------------------------------------------


@pytest.fixture
def refused(command: Run) -> Callable[..., str]:
    def refused(*arguments: str) -> str:
        code, out, err = command(*arguments)
        assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith(f"onefold cache {arguments[0]}: ")
        return err

    return refused


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "clear"])
def test_stores_that_are_none(action: str, refused, tmp_path) -> None:
    yes = ("--yes",) if action == "clear" else ()
    absent = tmp_path / "absent"
    assert "there is no folder" in refused(action, *yes, "--remote", f"file://{absent}") and not absent.exists()
    assert "such as redis://" in refused(action, *yes, "--remote", "http://127.0.0.1/")
    assert "cannot be reached" in refused(action, *yes, "--remote", f"redis://127.0.0.1:{free_port()}/0")


@pytest.mark.parametrize(
    "url", ["redis://:hunter2/x@10.0.0.1/0", "redis://me:hunter2#x@10.0.0.1/0", "redis://[hunter2"]
)
def test_a_url_that_is_none_does_not_show_its_password(url: str, refused) -> None:
    said = refused("stat", "--remote", url)
    assert "no URL" in said and "hunter2" not in said


def test_a_package_that_is_missing_is_named(refused, store, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "pip install 'onefold[remote]'" in refused("ls", "--remote", "s3://bucket/folder")


def test_prune_is_not_for_stores(refused, store, monkeypatch) -> None:
    assert "time to live" in refused("prune", "--remote", f"file://{store}", "--older-than", "7d")
    monkeypatch.setenv("ONEFOLD_REMOTE", f"file://{store}")
    assert "time to live" in refused("prune")


def test_a_namespace_that_is_none_or_several(refused, told, store) -> None:
    tag = tag_of(told, "tiny/plain")
    for arguments in (("ls", "zz"), ("ls", ""), ("verify", "--namespace", "f" * 17), ("clear", "--namespace", "../x")):
        assert "there is no namespace" in refused(*arguments, "--remote", f"file://{store}")
    twin = tag[:15] + ("0" if tag[15] != "0" else "1")
    shutil.copytree(store / PREFIX / tag, store / PREFIX / twin)
    assert "2 namespaces begin with" in refused("ls", tag[:15], "--remote", f"file://{store}")
    shorts = [s["short"] for s in told("ls")["namespaces"]]
    assert {tag, twin} <= set(shorts)  # as much as tells them apart
    assert told("ls", tag.upper())["namespace"]["id"] == tag


def test_a_folder_or_a_store(refused, command, store, tmp_path, monkeypatch) -> None:
    """What the command line says wins; the environment alone must be clear."""
    url, disk = f"file://{store}", str(tmp_path / "absent")
    assert "cannot be given together" in refused("stat", "--remote", url, "--disk", disk)
    assert "requires --remote" in refused("stat", "--disk", disk, "--remote-secret-file", "x")
    assert "for a shared store, --remote URL" in refused("stat")
    monkeypatch.setenv("ONEFOLD_REMOTE", url)
    monkeypatch.setenv("ONEFOLD_REMOTE_SECRET_FILE", "")
    assert json.loads(command("stat", "--json")[1])["store"] == url
    monkeypatch.setenv("ONEFOLD_DISK", disk)
    assert "ONEFOLD_DISK and ONEFOLD_REMOTE are both set" in refused("stat")
    assert command("stat", "--remote", url)[0] == command("--remote", url, "stat")[0] == 0
    monkeypatch.setenv("ONEFOLD_REMOTE_SECRET_FILE", str(tmp_path / "no secret"))
    assert "there is no folder" in refused("stat", "--disk", disk)
    assert "cannot read the secret" in refused("stat", "--remote", url)


def test_the_environment_names_the_secret(command, store, secret, monkeypatch) -> None:
    monkeypatch.setenv("ONEFOLD_REMOTE", f"file://{store}")
    monkeypatch.setenv("ONEFOLD_REMOTE_SECRET_FILE", str(secret))
    assert "tiny/secret" in command("ls")[1] and "tiny/plain" not in command("ls")[1]


# -- the secret's file -------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_one_newline_at_the_end_is_no_part_of_the_secret(end: bytes, tmp_path) -> None:
    assert read_secret(str(secret_in(tmp_path / "secret", SECRET + end))) == SECRET


def test_only_one_newline_is_taken_off(tmp_path) -> None:
    assert read_secret(str(secret_in(tmp_path / "secret", SECRET + b"\n\n"))) == SECRET + b"\n"
    assert read_secret(str(secret_in(tmp_path / "other", SECRET + b"\r"))) == SECRET + b"\r"
    assert read_secret(str(secret_in(tmp_path / "least", bytes(16)))) == bytes(16)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "has 0 bytes: at least 16"),
        (b"x" * 15 + b"\n", "has 15 bytes: at least 16"),
        (bytes(MOST_BYTES + 1), f"more than {MOST_BYTES:,} bytes"),
    ],
)
def test_a_secret_that_cannot_be_used(content: bytes | None, said: str, refused, store, tmp_path) -> None:
    path = tmp_path / "no secret"
    if content is not None:
        secret_in(path, content)
    with pytest.raises(ConfigError, match=said):
        read_secret(str(path))
    arguments = ("ls", "--remote", f"file://{store}", "--remote-secret-file", str(path))
    assert said in refused(*arguments) and "xxx" not in refused(*arguments)


def test_others_who_can_read_the_secret_are_named(tmp_path, caplog) -> None:
    path = secret_in(tmp_path / "secret", SECRET)
    read_secret(str(path))
    assert caplog.text == ""
    path.chmod(0o644)
    read_secret(str(path))
    assert "chmod 600" in caplog.text and SECRET.decode() not in caplog.text


# -- Redis -------------------------------------------------------------------------------------------


def sent(store: Path, url: str) -> None:
    """Puts what a folder has into another store."""
    found = open_store(StoreSettings(address_of(url), 30.0, 3600))
    for path in files(store):
        assert found.add(path.relative_to(store).as_posix(), path.read_bytes())
    found.close()


@REDIS
def test_every_command_works_with_redis(run, told, store, secret, tmp_path) -> None:
    here = told("ls")["namespaces"]
    with redis_server(tmp_path, "--requirepass", "hunter2") as server:
        url = f"redis://:hunter2@127.0.0.1:{server.port}/0"
        sent(store, url)
        found = told("ls", url=url)
        assert found == {"store": f"redis://127.0.0.1:{server.port}/0", "strangers": 0, "namespaces": here}
        assert told("stat", url=url)["bytes"] == size(files(store)) and "hunter2" not in run("stat", url=url)[1]
        tag = here[0]["id"]
        assert told("ls", tag, url=url)["values"] == told("ls", tag)["values"]
        verified = told("verify", "--remote-secret-file", str(secret), url=url, code=1)
        assert verified["values"] == len(files(store)) and len(verified["all_bad"]) == 3
        assert told("clear", "--namespace", tag, "--yes", url=url)["values"] == here[0]["values"]
        assert told("stat", url=url)["namespaces"] == 3
        assert told("clear", "--yes", url=url)["values"] == sum(s["values"] for s in here[1:])
        code, out, err = run("ls", url=f"redis://:not-hunter2@127.0.0.1:{server.port}/0")
        assert (code, out, err.count("\n")) == (2, "", 1) and "refuses the password" in err and "hunter2" not in err


# -- the process -------------------------------------------------------------------------------------


def test_mlx_is_not_needed(store) -> None:
    code = "import sys; from onefold.cli import main\n"
    code += "for a in (['ls'], ['stat'], ['verify'], ['clear', '--yes']): main(['cache', *a, *sys.argv[1:]])\n"
    code += "assert 'mlx' not in sys.modules"
    command = [sys.executable, "-c", code, "--remote", f"file://{store}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and files(store) == []
