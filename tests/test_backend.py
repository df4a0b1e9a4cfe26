"""Which backend of MLX is installed. Cases of whole processes see only the distributions that the test writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import onefold
from onefold import backend, cli

ROOT = Path(__file__).resolve().parent.parent
CPU, CUDA12, CUDA13 = "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13"


def write(site: Path, *names: str, version: str = "0.32.4", library: bool = False) -> Path:
    """A folder of distributions: their metadata, and an mlx package without its core."""
    (site / "mlx" / "lib").mkdir(parents=True)
    if library:
        (site / "mlx" / "lib" / "libmlx.so").touch()
    for name in names:
        about = site / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return site


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """In an interpreter that has the standard library, our sources and `site`, and nothing else."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ONEFOLD_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(site)])
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Linux, no GPU, and mlx without a library."""
    monkeypatch.setattr(backend.sys, "platform", "linux")
    monkeypatch.setattr(backend, "nvidia", lambda: False)
    monkeypatch.setattr(backend, "_library", lambda: None)
    return monkeypatch


def have(machine: pytest.MonkeyPatch, **versions: str) -> None:
    there = {name.replace("_", "-"): version for name, version in versions.items()}
    machine.setattr(backend, "version_of", there.get)
    machine.setattr(backend, "_is_installed", there.__contains__)


def test_here_is_one() -> None:
    assert len(backend.installed()) == 1
    assert backend.missing() == backend.several() == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.check()
        backend.require()


def test_the_version_of_a_distribution() -> None:
    assert re.fullmatch(r"0\.\d+\.\d+.*", backend.version_of("mlx") or "")
    assert backend.version_of("no-such-distribution") is None


@pytest.mark.parametrize("platform, gpu, line", [
    ("linux", False, "pip install 'onefold[cpu]' (or: onefold[cuda12] or onefold[cuda13])"),
    ("linux", True, "pip install 'onefold[cuda13]' (or: onefold[cpu] or onefold[cuda12])"),
    ("darwin", False, "pip install --force-reinstall mlx"),
])  # fmt: skip
def test_none(machine: pytest.MonkeyPatch, platform: str, gpu: bool, line: str) -> None:
    have(machine, mlx="0.32.4")
    machine.setattr(backend.sys, "platform", platform)
    machine.setattr(backend, "nvidia", lambda: gpu)
    assert backend.installed() == {}
    assert backend.missing().startswith("MLX has no backend here") and backend.missing().endswith(f"Run: {line}")
    assert backend.several() == ""


@pytest.mark.parametrize("found, gpu, line", [
    ((CPU, CUDA13), False, "pip uninstall -y mlx-cuda-13 && pip install --force-reinstall --no-deps mlx-cpu==0.32.4"),
    ((CPU, CUDA13), True, "pip uninstall -y mlx-cpu && pip install --force-reinstall --no-deps mlx-cuda-13==0.32.4"),
    ((CPU, CUDA12), True, "pip uninstall -y mlx-cpu && pip install --force-reinstall --no-deps mlx-cuda-12==0.32.4"),
    ((CUDA12, CUDA13), False,
     "pip uninstall -y mlx-cuda-12 && pip install --force-reinstall --no-deps mlx-cuda-13==0.32.4"),
    ((CPU, CUDA12, CUDA13), False,
     "pip uninstall -y mlx-cuda-12 mlx-cuda-13 && pip install --force-reinstall --no-deps mlx-cpu==0.32.4"),
])  # fmt: skip
def test_several(machine: pytest.MonkeyPatch, found: tuple[str, ...], gpu: bool, line: str) -> None:
    have(machine, **dict.fromkeys(found, "0.32.4"))
    machine.setattr(backend, "nvidia", lambda: gpu)
    assert list(backend.installed()) == list(found)
    assert backend.missing() == ""
    assert backend.several().startswith(" and ".join(found)) and backend.several().endswith(f"Run: {line}")
    with pytest.warns(RuntimeWarning, match=re.escape(line)):
        backend.check()


def test_mlx_that_was_built_here_has_no_other_distribution(machine: pytest.MonkeyPatch) -> None:
    have(machine, mlx="0.33.0.dev1")
    machine.setattr(backend, "_library", lambda: "/somewhere/mlx/lib/libmlx.so")
    assert backend.installed() == {"mlx": "0.33.0.dev1"}
    have(machine)
    assert backend.installed() == {"mlx": ""}
    assert backend.missing() == backend.several() == ""


def test_an_nvidia_gpu_is_one_with_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backend.sys, "platform", "linux")
    monkeypatch.setattr(backend, "_NVIDIA", str(tmp_path / "none"))
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    assert not backend.nvidia() and backend.wanted() == CPU
    monkeypatch.setattr(backend, "_NVIDIA", str(tmp_path))
    assert backend.nvidia() and backend.wanted() == CUDA13
    monkeypatch.setattr(backend.sys, "platform", "darwin")
    assert not backend.nvidia() and backend.wanted() == backend.METAL


# -- whole processes -------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="on macOS mlx brings its backend")


@linux
@pytest.mark.parametrize("code", [
    "import onefold, mlx.core",
    "from onefold import PrefixCache",
    "import onefold.cache.memory.device",
])  # fmt: skip
def test_without_a_backend_mlx_cannot_be_imported(tmp_path: Path, code: str) -> None:
    done = run(write(tmp_path, "mlx"), f"try:\n {code}\nexcept ImportError as error: print(type(error), error)")
    assert done.stdout.startswith("<class 'onefold.errors.NoBackend'> MLX has no backend here: "), done.stderr
    assert re.search(r"Run: pip install 'onefold\[(cpu|cuda13)\]'", done.stdout)


@linux
def test_without_mlx_the_public_names_say_the_same(tmp_path: Path) -> None:
    done = run(tmp_path, "import onefold\ntry: onefold.load\nexcept onefold.NoBackend as error: print(error)")
    assert done.stdout.startswith("MLX has no backend here"), done.stderr


@linux
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"]])
def test_help_and_version_need_no_backend(tmp_path: Path, arguments: list[str]) -> None:
    done = run(write(tmp_path, "mlx"), f"from onefold.cli import main\nmain({arguments})")
    assert (done.returncode, done.stderr) == (0, "")
    assert "onefold" in done.stdout


def test_a_command_without_a_backend_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: list[str]) -> int:
        raise onefold.NoBackend("MLX has no backend here. Run: this")

    monkeypatch.setattr(cli.serve, "run", run)
    assert cli.main(["serve", "demo"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "onefold serve: MLX has no backend here. Run: this\n")


@linux
def test_looking_for_mlx_stays_possible_without_a_backend(tmp_path: Path) -> None:
    """transformers looks for it in this way."""
    code = "import onefold, importlib.util\nprint(importlib.util.find_spec('mlx') is not None)"
    assert run(write(tmp_path, "mlx"), code).stdout == "True\n"


@linux
def test_a_backend_that_comes_later_is_found(tmp_path: Path) -> None:
    code = f"""
import sys, onefold
try: import mlx.core
except onefold.NoBackend: print("none")
open({str(tmp_path / "mlx" / "lib" / "libmlx.so")!r}, "w").close()
open({str(tmp_path / "mlx" / "core.py")!r}, "w").close()
import importlib; importlib.invalidate_caches()
import mlx.core
print(mlx.core.__file__)
"""
    done = run(write(tmp_path, "mlx"), code)
    assert done.stdout.splitlines() == ["none", str(tmp_path / "mlx" / "core.py")], done.stderr


@linux
def test_two_backends_are_warned_of_where_onefold_is_imported(tmp_path: Path) -> None:
    site = write(tmp_path, "mlx", CPU, CUDA13, library=True)
    done = run(site, "import onefold")
    assert done.returncode == 0
    assert "<string>:1: RuntimeWarning: mlx-cpu and mlx-cuda-13 are installed together" in done.stderr
    assert "--force-reinstall --no-deps mlx-" in done.stderr


@linux
@pytest.mark.parametrize("names, library", [((CPU,), True), ((), True)])
def test_one_backend_says_nothing(tmp_path: Path, names: tuple[str, ...], library: bool) -> None:
    done = run(write(tmp_path, "mlx", *names, library=library), "import onefold, sys; print('mlx.core' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


# -- what pyproject.toml asks for --------------------------------------------------------------------


def test_the_extras_are_those_that_messages_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(backend.EXTRAS.values()) <= set(extras)
    for extra in backend.EXTRAS.values():
        assert any(line.startswith(f"mlx[{extra}]") for line in extras[extra])
    assert extras["cuda"] == extras["cuda13"]
    assert not [line for line in project["dependencies"] if "[" in line or "blas" in line]


def test_there_is_one_version_and_it_is_the_newest_of_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["tool"]["hatch"]["version"]["path"].endswith("__init__.py")
    newest = re.search(r"^## (\S+)( \(not released\))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert onefold.__version__ == newest[1] + (".dev0" if newest[2] else "")
