"""Tests that need programs: skipped and counted without them, and failures with `make test-system`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.system("no-such-program", "sh")
@pytest.mark.parametrize("n", [1, 2])
def test_with_it(n): ...

@pytest.mark.system("another-one", "no-such-program")
def test_with_both(): ...

@pytest.mark.system("sh")
def test_with_one_that_is_there(): ...

def test_without(): ...
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_of_programs.py").write_text(TESTS)
    given = {name: value for name, value in os.environ.items() if not name.startswith(("ONEFOLD_TEST", "PYTEST_"))}
    given |= {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    options = ["-q", "--strict-markers", "-p", "programs", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("parallel", [[], ["-p", "xdist.plugin", "-n", "1"]], ids=["in one process", "with xdist"])
def test_what_has_no_program_is_skipped_and_counted(tmp_path: Path, parallel: list[str]) -> None:
    done = run(tmp_path, *parallel)
    assert done.returncode == 0, done.stdout + done.stderr
    line = "3 skipped because a program is not installed (another-one, no-such-program): install it and run"
    assert f"{line} `make test-system`" in done.stdout
    assert "2 passed, 3 skipped" in done.stdout


def test_what_has_its_programs_is_not_mentioned(tmp_path: Path) -> None:
    done = run(tmp_path, "-k", "there or without")
    assert done.returncode == 0 and "program" not in done.stdout


def test_a_run_that_is_for_them_fails_without_a_program(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "system", ONEFOLD_TEST_SYSTEM="1")
    assert done.returncode == 1 and "1 passed, 1 deselected, 3 errors" in done.stdout
    assert "not installed: another-one, no-such-program" in done.stdout
