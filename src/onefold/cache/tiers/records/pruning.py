"""Pruning: which records an administrator wants to remove from a folder, and how they are removed.

A record is in use for as long as any of its descendants: the beginning of a conversation is as recent as its end.
Removes only the records that the caller names. No MLX in this file.
"""

from __future__ import annotations

from collections.abc import Iterable

from onefold.cache.tiers.records.census import Entry, Space
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.order import oldest_tails_first


def broken(entries: Iterable[Entry]) -> set[Entry]:
    """Returns the records that no cache would use, as far as heads show. One that cannot be read now may be sound."""
    return {e for e in entries if e.problem and not e.unread}


def last_used(entries: Iterable[Entry]) -> dict[Entry, float]:
    """Returns when each record, or a descendant, was last used."""
    found = {e: e.used for e in entries}
    for entry in _tails_first(found):
        for above in entry.above:
            if above in found:
                found[above] = max(found[above], found[entry])
    return found


def older_than(entries: Iterable[Entry], moment: float) -> set[Entry]:
    return {entry for entry, used in last_used(entries).items() if used < moment}


def beyond(entries: Iterable[Entry], budget_bytes: int) -> set[Entry]:
    """Returns the records to remove so that the others meet the budget: the least recently used, children first."""
    held = list(entries)
    total = sum(e.disk_bytes for e in held)
    gone = set[Entry]()
    for entry in oldest_tails_first(held):
        if total <= budget_bytes:
            break
        gone.add(entry)
        total -= entry.disk_bytes
    return gone


def remove(folder: Folder, entries: Iterable[Entry]) -> None:
    """Remove records, children first: whenever this is interrupted, the rest can be used. Raises OSError."""
    for entry in _tails_first(entries):
        folder.remove(entry.namespace, entry.name)


def remove_leftovers(folder: Folder, spaces: Iterable[Space], top: Iterable[str] = ()) -> None:
    """Remove the files that interrupted writes left behind. Raises OSError."""
    for space in spaces:
        for name in space.leftovers:
            folder.remove(space.id, name)
    for name in top:
        folder.remove("", name)


def _tails_first(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda e: e.order, reverse=True)
