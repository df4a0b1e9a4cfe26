"""The system's cache folder of this user, and the folder in it that `--disk auto` means.

No MLX in this file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from onefold.errors import ConfigError

AUTO = "auto"
"""In place of a folder of the disk tier: the default one. A folder that has this name itself is `./auto`."""


def cache_folder() -> Path:
    """Returns ONEFOLD_CACHE_DIR, or the system's cache folder of this user. Raises ConfigError if the user has no home
    folder."""
    try:
        found = _cache_folder()
    except RuntimeError as error:
        raise ConfigError(
            "this user's home folder, and so the folder for caches, is not known: set HOME, or ONEFOLD_CACHE_DIR"
        ) from error
    if not found.is_absolute():
        raise ConfigError(f"{found} cannot be the folder for caches: set HOME, or ONEFOLD_CACHE_DIR, to a whole path")
    return found


def _cache_folder() -> Path:
    named = os.environ.get("ONEFOLD_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    if os.environ.get("HOME") == "":
        raise RuntimeError("HOME is empty")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "onefold"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"  # a relative one is to be ignored
    return base / "onefold"


def kv_folder() -> Path:
    """Returns the default folder of the disk tier; Spotlight indexes nothing in a folder that ends in `.noindex`.
    Raises ConfigError."""
    return cache_folder() / ("kv.noindex" if sys.platform == "darwin" else "kv")


def disk_folder(given: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns the folder of the disk tier that was given; for `AUTO` the default one. Raises ConfigError."""
    return kv_folder() if given == AUTO else given
