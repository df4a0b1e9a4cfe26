"""The memory of this process, on Linux and on macOS."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path


def now() -> int:
    """Returns the bytes of this process that lie in memory; 0 if the system does not say."""
    if sys.platform == "darwin":
        said = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=False)
        return 1024 * int(said.stdout.strip() or 0)
    return _field("VmRSS")


def most() -> int:
    """Returns the most bytes that lay in memory: since `forget_most`, or on macOS since the process began."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes there
    return _field("VmHWM")


def forget_most() -> None:
    """Begin to measure `most` anew, where the system can."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def _field(name: str) -> int:
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)
