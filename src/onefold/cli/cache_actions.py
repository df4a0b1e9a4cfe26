"""The actions of `onefold cache`. Each returns its report in values that JSON has.

Sizes are what files take on a disk, as the budget counts them. Moments are seconds since 1970.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from onefold.cache.model.formats.names import name_of
from onefold.cache.tiers.records import census, pruning
from onefold.cache.tiers.records import verify as verifying
from onefold.cache.tiers.records.census import Entry, Space
from onefold.cache.tiers.records.faults import is_passing
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.order import below
from onefold.cache.tiers.records.written import day_of
from onefold.errors import ConfigError, RecordError
from onefold.sizes import parse_size, show_size

SHORT = 8
"""Digits of a namespace that are shown, unless two begin with the same."""


class Progress(Protocol):
    def begin(self, total_bytes: int) -> None: ...
    def advance(self, n_bytes: int) -> None: ...


def namespace_of(folder: Folder, given: str) -> str:
    """Returns the one namespace that begins with `given`. Raises ConfigError."""
    found = [n for n in folder.namespaces() if given and n.startswith(given.lower())]
    if not found:
        raise ConfigError(f"there is no namespace {given!r} in {folder.path}")
    if len(found) > 1:
        raise ConfigError(f"{len(found)} namespaces begin with {given!r}: {', '.join(found[:3])}; give more digits")
    return found[0]


@contextmanager
def _locked(folder: Folder, needed: bool = True) -> Iterator[None]:
    """Locks the folder for the block. Raises FolderInUse."""
    if needed:
        folder.lock()
    try:
        yield
    finally:
        folder.unlock()


def _chosen(folder: Folder, namespace: str | None) -> list[str] | None:
    return None if namespace is None else [namespace_of(folder, namespace)]


# -- looking -----------------------------------------------------------------------------------------


def ls(folder: Folder, namespace: str | None) -> dict[str, Any]:
    told: dict[str, Any] = {"folder": str(folder.path)}
    spaces = census.take(folder, _chosen(folder, namespace))
    short = short_ids(folder.namespaces())
    if namespace is None:
        return told | {"namespaces": [_space(s, short) for s in spaces]}
    (space,) = spaces
    told["namespace"] = _space(space, short) | {"about": space.about}
    listed = _by_conversation(space.entries)
    told["records"] = [_record(e, space.foreign, level, begins) for e, level, begins in listed]
    return told


def stat(folder: Folder) -> dict[str, Any]:
    spaces = census.take(folder, heads=False)
    entries = [e for s in spaces for e in s.entries]
    top_leftovers, top_strangers = census.top_level(folder)
    leftovers = [(s.id, n) for s in spaces for n in s.leftovers] + [("", n) for n in top_leftovers]
    written = folder.written()
    usage = shutil.disk_usage(folder.path)
    return {
        "folder": str(folder.path),
        "in_use_by": folder.holder(),
        "namespaces": len(spaces),
        "records": len(entries),
        "bytes": sum(e.disk_bytes for e in entries),
        "last_used": max((e.used for e in entries), default=None),
        "oldest": min((e.used for e in entries), default=None),
        "written_today_bytes": written.today if written.day >= day_of(time.time()) else 0,
        "written_ever_bytes": written.ever,
        "leftovers": [_joined(s, n) for s, n in leftovers],
        "leftover_bytes": sum(census.size_of(folder, s, n) for s, n in leftovers),
        "strangers": _strangers(spaces) + top_strangers,
        "free_bytes": usage.free,
        "file_system_bytes": usage.total,
    }


def _strangers(spaces: Iterable[Space]) -> list[str]:
    return [_joined(s.id, n) for s in spaces for n in s.strangers]


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}/{name}" if namespace else name


def short_ids(namespaces: Iterable[str]) -> dict[str, str]:
    every = list(namespaces)
    digits = SHORT
    while len({n[:digits] for n in every}) < len(every):
        digits += 1
    return {n: n[:digits] for n in every}


def _label(about: dict[str, Any]) -> str:
    label, model = about.get("label"), about.get("model")
    if isinstance(label, str) and label.strip():
        return label
    return f"model {model[:SHORT]}" if isinstance(model, str) and model else "?"


def _space(space: Space, short: dict[str, str]) -> dict[str, Any]:
    about = space.about
    return {
        "id": space.id,
        "short": short.get(space.id, space.id),
        "label": _label(about),
        "model": about.get("model"),
        "kv": None if about.get("kv") is None else name_of(about["kv"]),
        "salted": about.get("salted"),
        "format": about.get("format"),
        "records": len(space.entries),
        "tokens": None if space.foreign else space.tokens,
        "bytes": space.disk_bytes,
        "last_used": max((e.used for e in space.entries), default=None),
        "oldest": min((e.used for e in space.entries), default=None),
        "unusable": sum(bool(e.problem) for e in space.entries),
    }


def _record(entry: Entry, foreign: bool, level: int, begins: bool) -> dict[str, Any]:
    parent = None if entry.parent is None or foreign else entry.parent.name
    kind = "hollow range" if entry.hollow else entry.named.what.value
    return {
        "name": entry.name,
        "kind": kind,
        "start": entry.start,
        "tokens": None if foreign else entry.tokens,
        "bytes": entry.disk_bytes,
        "file_bytes": entry.size,
        "last_used": entry.used,
        "parent": parent,
        "level": None if foreign else level,
        "begins": None if foreign else begins,
        "problem": entry.problem,
    }


def _by_conversation(entries: list[Entry]) -> list[tuple[Entry, int, bool]]:
    """Returns each record followed by its descendants, with its level and whether a conversation or branch begins.

    The most recently used conversation is the first. Of a record's descendants, the part with the most records
    stays at its level and comes last; the others are branches, a level further in. So there are few levels, however
    long conversations are and however often they branch: with each there are at most half as many records."""
    used = pruning.last_used(entries)
    following: dict[Entry | None, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: (used[e], e.order)):
        following.setdefault(entry.parent, []).append(entry)
    records = dict.fromkeys(entries, 1)  # each, and all its descendants
    for entry in sorted(entries, key=lambda e: e.order, reverse=True):
        if entry.parent is not None:
            records[entry.parent] += records[entry]
    found, todo = [], [(entry, 0, True) for entry in following.get(None, ())]
    while todo:
        entry, level, begins = todo.pop()
        found.append((entry, level, begins))
        if branches := following.get(entry):
            longest = max(branches, key=lambda e: (records[e], e.tokens, used[e]))
            todo.append((longest, level, False))
            todo += [(e, level + 1, True) for e in branches if e is not longest]
    return found


# -- checking ----------------------------------------------------------------------------------------


def verify(folder: Folder, namespace: str | None, remove: bool, progress: Progress) -> dict[str, Any]:
    with _locked(folder, remove):
        spaces = census.take(folder, _chosen(folder, namespace))
        ours = [s for s in spaces if not s.foreign]
        entries = [e for s in ours for e in s.entries]
        progress.begin(sum(e.size for e in entries))
        vanished = {e for s in ours for e in s.entries if not _verified(folder, e, Layout.of(s.about), progress)}
        bad = [e for e in entries if e.problem and e not in vanished]
        gone = below(entries, [e for e in bad if not e.unread])
        strangers = _strangers(spaces)
        if namespace is None:
            strangers += census.top_level(folder)[1]
        if remove:
            pruning.remove(folder, gone)
    gone_bytes = sum(e.disk_bytes for e in gone)
    return {
        "folder": str(folder.path),
        "namespace": None if namespace is None else spaces[0].id,
        "records": len(entries) - len(vanished),
        "bytes": sum(e.disk_bytes for e in entries if e not in vanished),
        "vanished": len(vanished),
        "bad": [{"namespace": e.namespace, "name": e.name, "bytes": e.disk_bytes, "reason": e.problem} for e in bad],
        "unread": sum(e.unread for e in bad),
        "going_on_from_bad": sum(e not in bad for e in gone),
        "removed_records": len(gone) if remove else 0,
        "removed_bytes": gone_bytes if remove else 0,
        "removable_records": 0 if remove else len(gone),
        "removable_bytes": 0 if remove else gone_bytes,
        "strangers": strangers,
        "of_another_format": [s.id for s in spaces if s.foreign],
        "not_compared": {s.id: n for s in ours if (n := sum(e not in vanished for e in _not_compared(s)))},
    }


def _not_compared(space: Space) -> list[Entry]:
    """Returns records that are sound by themselves, but whose namespace does not describe their layers."""
    layout = Layout.of(space.about)
    return [e for e in space.entries if not e.problem and not e.hollow and not layout.describes(e.named.what)]


def _verified(folder: Folder, entry: Entry, layout: Layout, progress: Progress) -> bool:
    """Checks one record and notes its fault. Returns False if the record is gone."""
    done = 0

    def read(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress.advance(n_bytes)

    try:
        if entry.problem:
            return census.is_there(folder, entry)
        verifying.verify(folder, entry, layout, read)
    except FileNotFoundError:
        return False
    except (OSError, RecordError) as error:
        entry.problem, entry.unread = census.reason(error), is_passing(error)
    finally:
        progress.advance(entry.size - done)
    return True


# -- deleting ----------------------------------------------------------------------------------------


def prune(
    folder: Folder, namespace: str | None, budget: str | None, older_than: float | None, dry_run: bool
) -> dict[str, Any]:
    total = shutil.disk_usage(folder.path).total
    budget_bytes = None if budget is None else parse_size(budget, total_bytes=total)
    with _locked(folder, not dry_run):
        spaces = census.take(folder, _chosen(folder, namespace))
        entries = [e for s in spaces for e in s.entries]
        why: dict[str, set[Entry]] = {"unusable": pruning.broken(entries)}
        left = [e for e in entries if e not in why["unusable"]]
        why["older"] = set() if older_than is None else pruning.older_than(left, time.time() - older_than)
        left = [e for e in left if e not in why["older"]]
        why["beyond_budget"] = set() if budget_bytes is None else pruning.beyond(left, budget_bytes)
        gone = set().union(*why.values())
        top = census.top_level(folder)[0] if namespace is None else []
        told = _removal(folder, spaces, gone, top)
        if not dry_run:
            pruning.remove(folder, gone)
            pruning.remove_leftovers(folder, spaces, top)
            for space in spaces:
                folder.remove_if_empty(space.id)
    return told | {"dry_run": dry_run, "why": {reason: len(found) for reason, found in why.items()}}


def clear(folder: Folder, namespace: str | None, agreed: Callable[[str], bool]) -> dict[str, Any]:
    """Deletes all records if `agreed` returns True. Raises what `agreed` raises."""
    with _locked(folder):
        spaces = census.take(folder, _chosen(folder, namespace), heads=False)
        entries = {e for s in spaces for e in s.entries}
        top = census.top_level(folder)[0] if namespace is None else []
        told = _removal(folder, spaces, entries, top)
        size, where = show_size(told["bytes"]), folder.path if namespace is None else folder.path / spaces[0].id
        if not agreed(f"delete {told['records']:,} records, {size}, in {where}?"):
            left = {"left_records": told["records"], "left_bytes": told["bytes"]}
            nothing = {"records": 0, "bytes": 0, "leftovers": 0, "leftover_bytes": 0, "namespaces": []}
            return told | nothing | left | {"agreed": False, "strangers": _strangers(spaces)}
        pruning.remove(folder, entries)
        pruning.remove_leftovers(folder, spaces, top)
        kept = [s for s in spaces if not folder.remove_if_empty(s.id)]
    return told | {"agreed": True, "strangers": _strangers(kept)}


def _removal(folder: Folder, spaces: list[Space], gone: set[Entry], top: list[str]) -> dict[str, Any]:
    """Returns what is removed, by namespace, and what stays."""
    short = short_ids(folder.namespaces())
    namespaces = []
    for space in spaces:
        going = [e for e in space.entries if e in gone]
        if going or space.leftovers:
            namespaces.append(
                {
                    "id": space.id,
                    "short": short.get(space.id, space.id),
                    "label": _label(space.about),
                    "records": len(going),
                    "bytes": sum(e.disk_bytes for e in going),
                    "leftovers": len(space.leftovers),
                }
            )
    leftovers = [(s.id, n) for s in spaces for n in s.leftovers] + [("", n) for n in top]
    stay = [e for s in spaces for e in s.entries if e not in gone]
    return {
        "folder": str(folder.path),
        "records": len(gone),
        "bytes": sum(e.disk_bytes for e in gone),
        "leftovers": len(leftovers),
        "leftover_bytes": sum(census.size_of(folder, s, n) for s, n in leftovers),
        "namespaces": namespaces,
        "left_records": len(stay),
        "left_bytes": sum(e.disk_bytes for e in stay),
    }
