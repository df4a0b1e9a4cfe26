"""The marker of a cache folder: the file that says that the folder is a cache, and in which layout.

A folder that holds anything else, or is of another layout, is refused. No MLX in this file.
"""

from __future__ import annotations

import json
from pathlib import Path

from onefold.cache.tiers.records.directory import Directory
from onefold.cache.tiers.records.files import TEMPORARY, parse_json, write_json
from onefold.cache.tiers.records.locking import LOCK
from onefold.errors import ConfigError

MARKER = "onefold.json"
LAYOUT = 1
_OF_THE_SYSTEM = frozenset(
    {".DS_Store", ".localized", ".Spotlight-V100", ".fseventsd", ".Trashes", ".TemporaryItems", "lost+found"}
)
"""Entries that macOS or a file system puts into folders and volumes by itself."""
_MARKED = {"is": "a Onefold cache", "layout": LAYOUT}


def of_the_system(name: str) -> bool:
    """Whether an entry of a folder is nobody's: the system makes it by itself."""
    return name in _OF_THE_SYSTEM or name.startswith("._")


def require_usable(top: Directory, path: Path) -> None:
    """Check that a folder is a cache of this layout, or empty. Raises ConfigError and OSError."""
    if top.has(MARKER):
        require_layout(top, path)
        return
    ours = (LOCK, MARKER + TEMPORARY)
    others = sorted(e.name for e in top.entries() if e.name not in ours and not of_the_system(e.name))
    if others:
        raise ConfigError(f"{path} holds other things ({others[0]}): give the cache a folder of its own")


def require_layout(top: Directory, path: Path) -> None:
    """Check that a folder is a cache of this layout. Raises ConfigError."""
    try:
        layout = parse_json(top, MARKER).get("layout")
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not JSON"
        raise ConfigError(
            f"{path / MARKER} is unreadable ({why}), so the folder is not used: make it readable; "
            f"or write {json.dumps(_MARKED)} to it, if this version wrote the folder; or use another folder"
        ) from error
    if layout != LAYOUT:
        has = "says no layout" if layout is None else f"is of layout {layout}"
        raise ConfigError(
            f"{path / MARKER} {has}, and this version writes {LAYOUT}: "
            "use another folder, or the version that wrote this one"
        )


def mark(top: Directory, path: Path) -> None:
    """Write the marker if there is none. Raises OSError, and ConfigError if the folder is of another layout."""
    if not top.has(MARKER):
        write_json(top, MARKER, _MARKED)
    require_layout(top, path)
