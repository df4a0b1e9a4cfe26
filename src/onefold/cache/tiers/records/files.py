"""Single files in an open directory: written whole or not at all, and read into given places.

- A file is written under a temporary name, flushed, and renamed. So a file that has its final name is complete, or was
  damaged afterwards. How it is flushed, and when its name is durable, depends on the system (`system`).
- A file is always created anew: whatever has its temporary name by then is removed first.
- The operating system is asked to drop from its file cache what was written or read.

No MLX in this file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Sequence
from typing import Any

from onefold.cache.tiers.records import system
from onefold.cache.tiers.records.directory import NEW, Directory

TEMPORARY = ".tmp"
JSON_MOST = 1 << 20
WRITE_MOST = 1 << 30
"""Bytes; macOS refuses twice as many in one call."""


def replace(inside: Directory, name: str, parts: Iterable[Any], used: float | None = None) -> None:
    """Write a file, whole or not at all, in place of the one of that name. `used` becomes its modification time.
    Raises OSError."""
    temporary = name + TEMPORARY
    remove_if_possible(inside, temporary)
    held = inside.open(temporary, NEW)
    with contextlib.ExitStack() as undo:
        undo.callback(remove_if_possible, inside, temporary)
        try:
            system.chosen.expect_writes(held)
            write_all(held, parts)
            if used is not None:
                with contextlib.suppress(OSError):  # a file system that cannot
                    os.utime(held, (used, used))
            system.chosen.flush_file(held)
            system.chosen.forget(held)
        finally:
            os.close(held)
        inside.rename(temporary, name)
        undo.pop_all()
    inside.flush()


def remove_if_possible(inside: Directory, name: str) -> None:
    """Remove a file; does nothing if that fails."""
    with contextlib.suppress(OSError):
        inside.remove(name)


# -- bytes -----------------------------------------------------------------------------------------


def write_all(held: int, parts: Iterable[Any]) -> None:
    """Write the parts one after the other. A part may be made when it is its turn, and freed before the next."""
    for part in parts:
        left = memoryview(part).cast("B")
        while left:
            left = left[os.write(held, left[:WRITE_MOST]) :]


def read_all(held: int, parts: Sequence[Any], at: int) -> int:
    """Fill `parts` from position `at` of a file. Returns how many bytes the file had for them."""
    return system.chosen.read(held, parts, at)


def first_bytes(inside: Directory, name: str, n_bytes: int) -> bytes:
    """Returns the beginning of a file; nothing of what is not a plain file. Raises OSError."""
    held = inside.open(name)
    try:
        return os.read(held, n_bytes) if stat.S_ISREG(os.fstat(held).st_mode) else b""
    finally:
        os.close(held)


# -- JSON ------------------------------------------------------------------------------------------


def json_bytes(value: dict[str, Any]) -> bytes:
    """Returns an object as we write it."""
    return json.dumps(value, indent=1).encode() + b"\n"


def write_json(inside: Directory, name: str, value: dict[str, Any]) -> None:
    """Write an object to a file, whole or not at all. Raises OSError."""
    replace(inside, name, [json_bytes(value)])


def parse_json(inside: Directory, name: str) -> dict[str, Any]:
    """Returns the object in a small file. Raises OSError, and ValueError or RecursionError if it holds no object."""
    held = inside.open(name)
    try:
        if not stat.S_ISREG(os.fstat(held).st_mode):
            raise OSError(errno.EINVAL, "not a file")
        found = json.loads(os.read(held, JSON_MOST))
    finally:
        os.close(held)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def read_json(inside: Directory, name: str) -> dict[str, Any]:
    """Returns the object in a small file; an empty one if the file is missing or holds none."""
    try:
        return parse_json(inside, name)
    except (OSError, ValueError, RecursionError):
        return {}
