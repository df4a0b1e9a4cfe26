"""The examples run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from effort import quick

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


TAKES_A_MODEL = {"generate.py"}


@pytest.mark.parametrize("name", quick(EXAMPLES, "generate.py"))
def test_example_runs(name: str, model: Path) -> None:
    command = [sys.executable, f"examples/{name}", *([str(model)] if name in TAKES_A_MODEL else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "reused" in done.stdout
