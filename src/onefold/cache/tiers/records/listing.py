"""What lies in a namespace's folder: records, our other files, leftovers of a crash, and strangers.

- A record is recognised by its name. An `about.json` or an index is ours if its content says so.
- A leftover is a plain file under the temporary name of something that a cache writes there.
- Everything else is a stranger, which no cache touches.

No MLX in this file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any, NamedTuple

from onefold.cache.tiers.records.directory import Directory
from onefold.cache.tiers.records.files import TEMPORARY, first_bytes, json_bytes, read_json
from onefold.cache.tiers.records.index import MAGIC, NO_STAMP, Stamp
from onefold.cache.tiers.records.marker import MARKER
from onefold.cache.tiers.records.record import Named, parse_name
from onefold.cache.tiers.records.written import WRITTEN

ABOUT, INDEX = "about.json", "index"
NAMESPACE_DIGITS = 32
_ABOUT_KEYS = {"model", "kv", "format", "layout", "salted"}
"""The keys of an `about.json` from before it named its namespace."""
_INDEX_BEGINS = MAGIC[: len(b"onefold index ")]


class Filed(NamedTuple):
    """A record's file, as the folder lists it."""

    named: Named
    size: int
    used: float
    """When it was written or last used: its modification time."""
    stamp: Stamp


class Listing(NamedTuple):
    """The content of a namespace's folder, without its `about.json` and its index."""

    records: list[Filed]
    strangers: list[str]
    """Files that are not records: leftovers of a crash, and files that no cache wrote."""


def list_namespace(inside: Directory, namespace: str) -> Listing:
    """Returns what a namespace's open folder holds. Raises OSError."""
    records, strangers = list[Filed](), list[str]()
    for entry in inside.entries():
        named = parse_name(entry.name)
        if named is None or not entry.is_file(follow_symlinks=False):
            strangers.append(entry.name)
            continue
        with contextlib.suppress(FileNotFoundError):
            held = entry.stat(follow_symlinks=False)
            records.append(Filed(named, held.st_size, held.st_mtime, stamp_of(held)))
    if ABOUT in strangers and is_our_about(read_json(inside, ABOUT), namespace):
        strangers.remove(ABOUT)
    if INDEX in strangers and is_index(inside):
        strangers.remove(INDEX)
    return Listing(records, sorted(strangers))


def is_namespace(entry: os.DirEntry[str]) -> bool:
    """Whether a directory entry is the folder of a namespace."""
    name = entry.name
    return (
        len(name) == NAMESPACE_DIGITS
        and all(c in "0123456789abcdef" for c in name)
        and entry.is_dir(follow_symlinks=False)
    )


def stamp_of(held: os.stat_result) -> Stamp:
    """Returns a file's stamp; `NO_STAMP` if its date is after 2262 or before 1678, for which an index has no bits."""
    known = -(1 << 63) <= held.st_mtime_ns < 1 << 63
    return Stamp(held.st_size, held.st_mtime_ns, held.st_ino) if known else NO_STAMP


def is_index(inside: Directory) -> bool:
    """Whether the file that has an index's name begins as an index of any version does."""
    with contextlib.suppress(OSError):
        return first_bytes(inside, INDEX, len(_INDEX_BEGINS)) == _INDEX_BEGINS
    return False


def is_our_about(about: dict[str, Any], namespace: str) -> bool:
    """Whether a cache wrote this `about.json`, for this namespace."""
    named = about.get("namespace")
    return named == namespace if named is not None else about.keys() >= _ABOUT_KEYS


def is_leftover(inside: Directory, namespace: str, name: str) -> bool:
    """Whether an interrupted write left this file behind. For the top of the folder the namespace is empty."""
    of = name.removesuffix(TEMPORARY)
    with contextlib.suppress(OSError):
        if of == name or not stat.S_ISREG(inside.stat(name).st_mode):
            return False
        if not namespace:
            return of in (MARKER, WRITTEN)
        if of == ABOUT:
            return is_our_about(read_json(inside, ABOUT), namespace) or _begins_as_ours(inside, name, namespace)
        if of == INDEX:
            found = first_bytes(inside, name, len(_INDEX_BEGINS))
            return _INDEX_BEGINS.startswith(found)
        return parse_name(of) is not None
    return False


def _begins_as_ours(inside: Directory, name: str, namespace: str) -> bool:
    """Whether this is an `about.json` of ours, as far as it was written."""
    begins = (json_bytes({"namespace": namespace})[: -len("\n}\n")], b'{\n "label": ')
    found = first_bytes(inside, name, max(map(len, begins)))
    return any(b.startswith(found[: len(b)]) for b in begins)
