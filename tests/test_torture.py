"""The torture in small: a few kills in the middle of serving and writing, and the other faults of a disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "torture.py"


def test_a_killed_process_loses_and_spoils_nothing(tmp_path: Path) -> None:
    """In a process of its own, which forks before anything is computed."""
    command = [sys.executable, SCRIPT, "--kills", "6", "--seed", "7", "--seconds", "0.4", "--folder", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "6 kills" in ran.stdout
    assert list(tmp_path.glob("*/*/*.safetensors")), "nothing was written, and nothing was tried"
