"""The census: what lies in a folder, for its administrator. Reads names and heads, and changes nothing.

- A record is recognised by its name; its head says how many tokens it has and which record it continues.
- A folder may be looked at while its server writes: a file that vanishes meanwhile does not count, and
  the folder is listed again before a record is called an orphan.
- Records of another format version are not understood, and not called broken. Their parents are unknown: each is taken
  to continue the one that begins before it, so that the last is removed first.

No MLX in this file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from onefold.cache.tiers.records.entry import on_disk
from onefold.cache.tiers.records.faults import is_passing
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.heads import Wanted, read_heads
from onefold.cache.tiers.records.index import NO_STAMP, Index, Said, Stamp
from onefold.cache.tiers.records.listing import Filed
from onefold.cache.tiers.records.locking import LOCK
from onefold.cache.tiers.records.marker import MARKER, of_the_system
from onefold.cache.tiers.records.record import NAMESPACE_FORMAT, Named, What, file_name
from onefold.cache.tiers.records.written import WRITTEN
from onefold.errors import RecordError

_LOOKS = 3

ORPHAN = "goes on from a record that is not there"
WAITS = "goes on from a record that cannot be read now"
MISPLACED = "begins outside of the record that it goes on from"


@dataclass(eq=False, slots=True)
class Entry:
    """A record, as its name and its head describe it."""

    namespace: str
    named: Named
    size: int
    used: float
    stamp: Stamp = NO_STAMP
    tokens: int = 0
    hollow: bool = False
    """A range that has tokens and no KV."""
    problem: str = ""
    """Why it cannot be used, as far as heads tell."""
    unread: bool = False
    """The problem is that it, or its parent, cannot be read now: its content may be sound."""
    parent: Entry | None = None
    after: Entry | None = None
    """The point whose windows its own continue."""
    parent_address: bytes = b""
    start: int = field(init=False)
    order: tuple[int, bool, bytes] = field(init=False)
    """Sorts by where it begins: so it comes after its parent."""

    def __post_init__(self) -> None:
        what, self.start, address, _, _ = self.named
        self.order = self.start, what is What.RANGE, address

    @property
    def name(self) -> str:
        return file_name(*self.named)

    @property
    def above(self) -> list[Entry]:
        """The records that it continues."""
        return [e for e in (self.parent, self.after) if e is not None]

    @property
    def end(self) -> int:
        return self.named.start + self.tokens

    @property
    def disk_bytes(self) -> int:
        return on_disk(self.size)


@dataclass
class Space:
    """A namespace's folder."""

    id: str
    about: dict[str, Any]
    entries: list[Entry]
    """By where they begin: each after its parent."""
    leftovers: list[str] = field(default_factory=list)
    """Files that an interrupted write left behind."""
    strangers: list[str] = field(default_factory=list)
    """Files that no cache wrote; never touched."""

    @property
    def foreign(self) -> bool:
        """Whether the namespace has another format than this version's."""
        return self.about.get("format", NAMESPACE_FORMAT) != NAMESPACE_FORMAT

    @property
    def disk_bytes(self) -> int:
        return sum(e.disk_bytes for e in self.entries)

    @property
    def tokens(self) -> int:
        return sum(e.tokens for e in self.entries)


def take(folder: Folder, namespaces: Iterable[str] | None = None, *, heads: bool = True) -> list[Space]:
    """Returns the content of these namespaces, or of all; without `heads` by names alone. Raises OSError if the folder
    itself cannot be read."""
    found = []
    for namespace in folder.namespaces() if namespaces is None else namespaces:
        space = Space(namespace, folder.about(namespace), [])
        there = folder.listing(namespace)
        for name in (n for n in there.strangers if not of_the_system(n)):
            (space.leftovers if folder.is_leftover(namespace, name) else space.strangers).append(name)
        listed = [_entry(namespace, filed) for filed in there.records]
        if heads and not space.foreign:
            listed = _with_heads(folder, namespace, listed)
        space.entries = sorted(listed, key=lambda e: e.order)
        if space.foreign:
            for before, entry in zip(space.entries, space.entries[1:], strict=False):
                entry.parent = before
        found.append(space)
    return found


def reason(error: OSError | RecordError) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"unreadable: {os.strerror(error.errno) if error.errno else error}"


def _entry(namespace: str, filed: Filed) -> Entry:
    return Entry(namespace, filed.named, filed.size, filed.used, filed.stamp)


def _with_heads(folder: Folder, namespace: str, listed: list[Entry]) -> list[Entry]:
    held: dict[Named, Entry] = {}
    there_now: dict[bytes, Entry] = {}
    index = Index(namespace, folder.indexes.read(namespace))
    for look in range(_LOOKS):
        if look:
            listed = [_entry(namespace, filed) for filed in folder.listing(namespace).records]
            there = {e.named for e in listed}
            held = {named: e for named, e in held.items() if named in there}
        new = [e for e in listed if e.named not in held]
        heads = read_heads(folder, namespace, (Wanted(e.named, e.size, e.stamp) for e in new), index)
        held |= {e.named: e for e, head in zip(new, heads, strict=True) if _learn(e, head)}
        there_now = {e.named.address: e for e in held.values()}
        if all(not at or at in there_now for e in held.values() for at in (e.parent_address, e.named.after)):
            break
    _link(sorted(held.values(), key=lambda e: e.order), there_now)
    return list(held.values())


def _learn(entry: Entry, head: Said | OSError | RecordError) -> bool:
    """Fill in what the entry's head says. Returns False if the file is gone."""
    if isinstance(head, FileNotFoundError):
        return False
    if isinstance(head, OSError | RecordError):
        entry.problem, entry.unread = reason(head), is_passing(head)
        return True
    entry.tokens = len(head.tokens)
    entry.hollow = head.hollow
    entry.parent_address = head.parent
    return True


def _link(entries: list[Entry], there: dict[bytes, Entry]) -> None:
    """Link entries, sorted by where they begin, to their parents: a parent is judged before its children."""
    for entry in entries:
        if not entry.problem:
            _link_to_parent(entry, there)
        if entry.named.after and not entry.problem:
            _link_after(entry, there.get(entry.named.after))


def _link_after(entry: Entry, after: Entry | None) -> None:
    """Link a point to the one whose windows its own continue."""
    if after is None or after.named.what is not What.POINT or after.start >= entry.start:
        entry.problem = ORPHAN
        return
    entry.after = after
    if after.problem:
        entry.problem, entry.unread = (WAITS, True) if after.unread else (ORPHAN, False)


def _link_to_parent(entry: Entry, there: dict[bytes, Entry]) -> None:
    found = there.get(entry.parent_address) if entry.parent_address else None
    parent = found if found is not None and found.named.what is What.RANGE else None
    if parent is None:
        if entry.parent_address or entry.start:
            entry.problem = ORPHAN
    elif parent.unread and parent.start < entry.start:
        entry.parent, entry.problem, entry.unread = parent, WAITS, True
    elif not parent.start < entry.start <= parent.end:
        entry.problem = ORPHAN if parent.problem else MISPLACED
    else:
        entry.parent = parent
        if parent.problem:
            entry.problem = ORPHAN


# -- what is no record -----------------------------------------------------------------------------


def top_level(folder: Folder) -> tuple[list[str], list[str]]:
    """Returns the files outside of the namespaces: those that an interrupted write left behind, and those not ours."""
    leftovers, strangers = list[str](), list[str]()
    for name in folder.top_level():
        if name not in (MARKER, LOCK, WRITTEN) and not of_the_system(name):
            (leftovers if folder.is_leftover("", name) else strangers).append(name)
    return leftovers, strangers


def size_of(folder: Folder, namespace: str, name: str) -> int:
    """Returns the size of a leftover. At the top of the folder the namespace is empty."""
    with contextlib.suppress(OSError):
        return folder.stat(namespace, name).st_size
    return 0


def is_there(folder: Folder, entry: Entry) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        folder.stat(entry.namespace, entry.name)
        return True
    return False
