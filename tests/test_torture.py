"""The torture in small: a few kills in the middle of serving and writing, and the other faults of a disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "torture.py"


SECONDS = (0.4, 2, 10, 50)
"""How long a child may live. A busy machine may need longer before anything is written."""


def torture(folder: Path, kills: int, *options: str) -> None:
    """In a process of its own."""
    for seconds in SECONDS:
        command = [sys.executable, SCRIPT, "--kills", str(kills), "--seed", "7", "--seconds", str(seconds)]
        ran = subprocess.run([*command, "--folder", folder, *options], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert f"{kills} kills" in ran.stdout
        if list(folder.glob("*/*/*.safetensors")):
            return
    raise AssertionError("nothing was written, and nothing was tried")


def test_a_killed_process_loses_and_spoils_nothing(tmp_path: Path) -> None:
    """On Linux with forks of a process that never computes anything, elsewhere with processes that start anew."""
    torture(tmp_path, 6)


def test_children_that_start_from_nothing_do_the_same(tmp_path: Path) -> None:
    """As they do wherever forks are not used."""
    torture(tmp_path, 2, "--start", "spawn", "--no-faults")
