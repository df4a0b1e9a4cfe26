"""The checks of `onefold doctor` that need no MLX: versions, the backend, and the folder of a disk cache.

Nothing is written: whether a folder can be written to is asked of the system.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import onefold
from onefold import backend
from onefold.cache_folder import disk_folder
from onefold.cli.doctor_finding import Finding
from onefold.errors import ConfigError
from onefold.sizes import show_size

NEEDED = ("mlx", "mlx-lm", "transformers", "numpy")
LITTLE_DISK = 1_000_000_000
"""Bytes free, below which there is a warning: a conversation of 10,000 tokens of an 8B model takes as much."""
NO_DISK = 50_000_000


def versions() -> Finding:
    """Which versions are installed; a problem if a distribution that we depend on is not."""
    found = {name: backend.version_of(name) for name in NEEDED}
    facts = {"onefold": onefold.__version__, "python": platform.python_version(), **found}
    facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    missing = [name for name, version in found.items() if version is None]
    if missing:
        remedy = f"Run: {backend.how_to_install()}"
        return Finding("versions", "problem", f"{' and '.join(missing)} not installed", remedy, facts)
    told = ", ".join(f"{name} {version}" for name, version in {"python": facts["python"], **found}.items())
    return Finding("versions", "ok", told, facts=facts)


def check_backend() -> Finding:
    """Whether there is one backend of MLX, of MLX's own version, and the one for this machine's hardware."""
    found = backend.installed()
    facts = {"installed": found, "nvidia": backend.nvidia()}
    fault = backend.missing() or backend.several()
    if fault:
        message, remedy = fault.split(". Run: ")
        return Finding("backend", "problem", message, f"Run: {remedy}", facts)
    ((name, version),) = found.items()
    told = f"{name} {version}".strip()
    mlx = backend.version_of("mlx")
    if version != mlx and name != "mlx":
        remedy = f"Run: pip install --force-reinstall --no-deps {name}=={mlx}"
        return Finding("backend", "problem", f"{told} is installed with mlx {mlx}", remedy, facts)
    if facts["nvidia"] and name == "mlx-cpu":
        remedy = f"To use the GPU run: pip uninstall -y mlx-cpu && {backend.how_to_install()}"
        return Finding("backend", "warning", f"{told} does not use the NVIDIA GPU that is here", remedy, facts)
    return Finding("backend", "ok", told, facts=facts)


def disk(given: str) -> Finding:
    """Whether a cache could use this folder now: it is ours or empty, writable, not locked, and has room."""
    path = Path(disk_folder(given)).expanduser().absolute()
    facts = {"folder": str(path), "exists": path.is_dir(), "free_bytes": None, "records_bytes": None, "locked_by": None}
    try:
        return _disk(path, facts)
    except ConfigError as error:
        return Finding("disk", "problem", str(error), "Give another folder with --disk, or an empty one", facts)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        return Finding("disk", "problem", message, "Make it readable for you, or give another folder", facts)


def _disk(path: Path, facts: dict[str, object]) -> Finding:
    """Checks the folder. Raises ConfigError and OSError."""
    from onefold.cache.tiers.records.folder import Folder  # stands on libraries that may be what is missing

    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return Finding("disk", "problem", f"{there} is a file, not a folder", "Give a folder with --disk", facts)
    if not os.access(there, os.W_OK | os.X_OK):
        remedy = f"Make it writable for you (ls -ld {there} says for whom it is now), or give another folder"
        return Finding("disk", "problem", f"{there} cannot be written to", remedy, facts)
    records = 0
    facts["free_bytes"] = free = shutil.disk_usage(there).free
    if there == path and any(path.iterdir()):
        folder = Folder.look(path)
        facts["records_bytes"] = records = folder.bytes()
        facts["locked_by"] = holder = folder.holder() or None
        if holder:
            remedy = f"Stop {holder}, or give another folder: one process writes to a folder at a time"
            return Finding("disk", "problem", f"{path} is in use by {holder}", remedy, facts)
    told = f"{path} has {show_size(free)} free"
    if free < LITTLE_DISK:
        remedy = "Make room there, or give a folder on another file system"
        return Finding("disk", "problem" if free < NO_DISK else "warning", f"{told}, which is little", remedy, facts)
    if there != path:
        told = f"{path} does not exist and can be made; {show_size(free)} are free there"
    elif records:
        told += f" and {show_size(records)} of records"
    return Finding("disk", "ok", told, facts=facts)
