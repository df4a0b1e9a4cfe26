"""The system's cache folder: which one it is, what `--disk auto` means, and that macOS does not back it up."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake import FakeModel, Session, text

import onefold.cache_folder
from onefold import PrefixCache
from onefold.cache.tiers.disk.tier import DiskSettings
from onefold.cache.tiers.records import backups
from onefold.cache.tiers.records.folder import Folder
from onefold.cache_folder import cache_folder, disk_folder, kv_folder
from onefold.cli import doctor_install, main, serve
from onefold.errors import ConfigError

NAMES = ("XDG_CACHE_HOME", "ONEFOLD_CACHE_DIR", "ONEFOLD_DISK")


def pretend(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Only to the files under test: others call what only a Mac has."""
    for module in (onefold.cache_folder, backups):
        monkeypatch.setattr(module, "sys", SimpleNamespace(platform=platform))


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user of our own, on Linux, who has set nothing."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pretend(monkeypatch, "linux")
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("platform", "set_to", "expected"),
    [
        ("linux", {}, "/home/me/.cache/onefold/kv"),
        ("linux", {"XDG_CACHE_HOME": "/var/xdg"}, "/var/xdg/onefold/kv"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/onefold/kv"),
        ("linux", {"XDG_CACHE_HOME": "/var/xdg", "ONEFOLD_CACHE_DIR": "/mine"}, "/mine/kv"),
        ("linux", {"ONEFOLD_CACHE_DIR": "~/mine"}, "/home/me/mine/kv"),
        ("darwin", {"XDG_CACHE_HOME": "/var/xdg"}, "/home/me/Library/Caches/onefold/kv.noindex"),
        ("darwin", {"ONEFOLD_CACHE_DIR": "/mine"}, "/mine/kv.noindex"),
    ],
)
def test_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, set_to: dict[str, str], expected: str
) -> None:
    for name, value in ({"HOME": "/home/me"} | set_to).items():
        monkeypatch.setenv(name, value)
    pretend(monkeypatch, platform)
    assert kv_folder() == Path(expected) and cache_folder() == Path(expected).parent


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(ConfigError, match="set HOME, or ONEFOLD_CACHE_DIR"):
        disk_folder("auto")
    assert disk_folder("/elsewhere") == "/elsewhere"
    monkeypatch.setenv("ONEFOLD_CACHE_DIR", "/mine")
    assert disk_folder("auto") == Path("/mine/kv")


def test_a_folder_that_is_called_auto_can_be_named(home: Path) -> None:
    assert disk_folder("auto") == kv_folder() == home / ".cache/onefold/kv"
    for other in ("./auto", "/tmp/auto", "auto/", Path("auto")):
        assert disk_folder(other) == other


def test_a_cache_with_the_default_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = FakeModel(("full",))
    for given, folder in (("auto", home / ".cache/onefold/kv"), ("./auto", tmp_path / "auto")):
        with PrefixCache(model, budget=40_000_000, disk=given, disk_budget="1GB") as cache:
            Session(model, cache, text(90)).prefill().commit()
            assert cache.stats().disk.folder == str(folder)
        assert len(list(folder.rglob("*.safetensors"))) == 1


def test_commands_know_the_default_folder(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = kv_folder()
    assert main(["cache", "stat", "--disk", "auto"]) == 2
    assert f"there is no folder {where}" in capsys.readouterr().err
    settings = serve._disk(serve.parser().parse_args(["m", "--disk", "auto"]))
    assert settings == DiskSettings(where) and settings is not None
    serve._try_folder(settings)
    assert main(["cache", "--disk", "auto", "stat", "--json"]) == 0
    assert str(where) in capsys.readouterr().out
    assert doctor_install.disk("auto").facts["folder"] == str(where)


# -- Time Machine ---------------------------------------------------------------------------------


@pytest.fixture
def tmutil(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for macOS's program, on a Mac; it writes down what it is asked."""
    there = tmp_path / "bin" / "tmutil"
    there.parent.mkdir()
    there.write_text(f'#!/bin/sh\n[ -d "$2" ] && echo "$@" >> {tmp_path}/asked\n')
    there.chmod(0o755)
    monkeypatch.setenv("PATH", f"{there.parent}:{os.environ['PATH']}")
    pretend(monkeypatch, "darwin")
    return there


def test_the_default_folder_is_excluded_once(tmutil: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    Folder.make(tmp_path / "another").unlock()
    assert not asked.exists()
    for _ in range(2):
        Folder.make(kv_folder()).unlock()
    assert asked.read_text() == f"addexclusion {kv_folder()}\n"


def test_other_systems_have_no_time_machine(tmutil: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "linux")
    Folder.make(kv_folder()).unlock()
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("echo no volume >&2; exit 3", "no volume"),
        ("exit 3", "exit code 3"),
        ("sleep 60", "timed out"),
        (None, "tmutil"),
    ],
)
def test_a_start_does_not_depend_on_time_machine(
    tmutil: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    program: str | None,
    why: str,
) -> None:
    caplog.set_level(logging.DEBUG, "onefold")
    monkeypatch.setattr(backups, "SECONDS", 0.1 if program == "sleep 60" else 60.0)
    if program is None:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        tmutil.write_text(f"#!/bin/sh\n{program}\n")
    Folder.make(kv_folder()).unlock()
    (said,) = [r for r in caplog.records if "Time Machine" in r.getMessage()]
    assert said.levelno == logging.DEBUG and "is not excluded" in said.getMessage() and why in said.getMessage()
