"""The catalog: which records there are, what they take, and which goes first.

- One hard budget for the folder, other models' records included; it holds from the moment the folder is opened.
- Least recently used first, and never a record that another goes on from: so tails go first, and no orphan is left.
  A record makes way only for one that was used later than itself.
- Bytes written are counted, today's and all; a daily limit pauses writing until tomorrow.
- What cannot be written any more (the disk is full, the folder read-only or gone) is said once, and `failed` says why;
  records that are there can still be read.

Not thread safe: the cache's lock guards it. Only `Folder` touches files. No MLX in this file.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from onefold.cache.memory.tree import Tokens
from onefold.cache.tiers.records.files import read_all
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.heads import Wanted, read_heads
from onefold.cache.tiers.records.index import NO_STAMP, Index, Indexed, Said, pack
from onefold.cache.tiers.records.listing import Filed
from onefold.cache.tiers.records.order import oldest_tails_first
from onefold.cache.tiers.records.record import OTHER_FORMAT, Named, What, file_name
from onefold.cache.tiers.records.written import Written, day_of
from onefold.collecting import paused
from onefold.sizes import show_size

log = logging.getLogger("onefold")

BLOCK = 4096
"""What a file takes on a disk is a multiple of this."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
PASSING = (errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.ENOMEM)
"""Trouble with writing that the disk is not to blame for."""
MISPLACED = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP)
"""Something else lies where a file belongs: that is the trouble of this file alone."""
_SAID = 10
"""Records, rejected or unreadable, that are named in the log; all are counted."""
_NOTE_EVERY = 64 << 20
_LINK_FROM = 0.8
"""Of the budget."""
_TOUCH_EVERY = 60.0
RETRY_SECONDS = 30.0
"""After which heads that could not be read are tried again; twice as long after each time that was in vain."""
RETRY_MOST = 3600.0
TRIAL_SECONDS = 0.2
"""For which, in one go, records are read whole that could not be; the lock is held meanwhile."""
_TRIAL_BYTES = 1 << 20


def on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


class Record:
    """One file: there, or on its way."""

    __slots__ = (
        "address",
        "children",
        "end",
        "hollow",
        "in_doubt",
        "namespace",
        "nodes",
        "parent",
        "pins",
        "ready",
        "size",
        "stamp",
        "start",
        "tried",
        "unread",
        "used",
        "what",
    )

    def __init__(self, namespace: str, what: What, at: bytes, start: int, end: int, size: int, used: float) -> None:
        self.namespace = namespace
        self.what = what
        self.address = at
        self.start = start
        self.end = end
        self.size = size
        self.used = used
        self.hollow = False
        """A range that has tokens and no KV."""
        self.parent: Record | None = None
        self.children = 0
        """Records that go on from this one."""
        self.nodes: set[Any] = set()
        """Whoever relies on it."""
        self.pins = 0
        """It is being read."""
        self.ready = True
        """The file is there, under its name."""
        self.unread = False
        """It could not be read. If that was its head, its end and its parent are not known."""
        self.in_doubt = False
        """Its head can be read, and its content could not be: it is not used before all of it was read once."""
        self.tried = 0.0
        """When that was tried last."""
        self.stamp = NO_STAMP
        """By which its file is known again, until its head was read."""

    @property
    def named(self) -> Named:
        return Named(self.what, self.start, self.address)

    @property
    def name(self) -> str:
        return file_name(*self.named)

    def __repr__(self) -> str:
        return f"<{self.what.value} record [{self.start}, {self.end}) of {self.size} bytes>"


class Loaded(NamedTuple):
    record: Record
    tokens: Tokens


class _Retry(NamedTuple):
    """When heads are to be read again, and after how many seconds that is."""

    at: float
    waited: float


class Catalog:
    def __init__(
        self,
        folder: Folder,
        budget_bytes: int,
        *,
        daily_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.daily_bytes = daily_bytes
        self.failed = ""
        """Why nothing is written any more."""
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.total_bytes = 0
        self._clock = clock
        self._records: dict[str, dict[bytes, Record]] = {}
        self._doomed: deque[Record] = deque()
        self._indexes: deque[tuple[str, bytes]] = deque()
        """Namespaces' indexes that are to be written."""
        self._linked: set[str] = set()
        """Namespaces whose records know what they go on from."""
        self._apart: dict[str, set[Record]] = {}
        """By namespace: records that no tree was told of, as they, or what they go on from, could not be read."""
        self._retries: dict[str, _Retry] = {}
        self._touched: set[Record] = set()
        self._touched_at = time.monotonic()
        self._retimed: dict[str, set[Record]] = {}
        """By namespace, records whose files have another modification time than the index knows."""
        self._forbidden: set[str] = set()
        """Namespaces whose folders this process may not use."""
        self._said_limit = ""
        self._coming = 0
        """Bytes that are about to be written."""
        self._said_rejected = 0
        self._no_room_until = 0.0
        """What was last used before this found no room, and would not now."""
        self._day, self.written_today, self.written_ever = folder.written()
        self._noted = self.written_ever
        with paused():
            self._scan()

    def _scan(self) -> None:
        """Count what is there, sweep what a crash left, and be within the budget."""
        for namespace in self.folder.namespaces():
            try:
                found = self.folder.listing(namespace)
            except PermissionError as error:
                log.warning("%s/%s cannot be read, and is not used: %s", self.folder.path, namespace, error.strerror)
                self._forbidden.add(namespace)
                continue
            self.folder.sweep(namespace, found.strangers)
            if not found.records:
                self._remove_if_empty(namespace)
            for filed in found.records:
                self._add(_record(namespace, filed, self._clock()))
        if self.total_bytes > _LINK_FROM * self.budget_bytes:
            self._link_all()  # while nobody waits
        victims = self.make_room(0, float("inf"))
        if victims:
            freed = sum(r.size for r in victims)
            log.warning(
                "%d records (%s) were removed from %s to be within its budget of %s",
                len(victims),
                show_size(freed),
                self.folder.path,
                show_size(self.budget_bytes),
            )
        self.empty_bin()

    # -- what there is -----------------------------------------------------------------------------

    def records(self) -> list[Record]:
        return [r for held in self._records.values() for r in held.values()]

    def find(self, namespace: str, at: bytes) -> Record | None:
        return self._records.get(namespace, {}).get(at)

    @property
    def n_records(self) -> int:
        return sum(len(held) for held in self._records.values())

    def load(self, namespace: str) -> list[Loaded]:
        """The records of a namespace with their tokens, each after the one that it goes on from. What cannot be
        understood, or goes on from nothing, is removed; what cannot be read now is left to `load_again`."""
        self._linked.discard(namespace)
        index = self._index(namespace)
        found = list(self._link(namespace, ours=True, index=index))
        if index.is_stale(len(found)):
            self._indexes.append((namespace, pack(namespace, map(_indexed, found))))
        for record, _ in found:
            record.stamp = NO_STAMP  # it is used and written from now on
        self._retry_in(namespace, RETRY_SECONDS)
        return found

    def _index(self, namespace: str) -> Index:
        return Index(namespace, self.folder.indexes.read(namespace))

    def load_again(self, namespace: str) -> list[Loaded]:
        """Those records that could not be read before and can be now, with what goes on from them, in the order of
        `load`; none before it is time to try."""
        retry = self._retries.get(namespace)
        if retry is None or time.monotonic() < retry.at:
            return []
        apart = self._apart[namespace]
        apart -= {r for r in apart if r.nodes or not r.ready}  # written again meanwhile, or found to be the same
        self._try_whole(r for r in apart if r.in_doubt)
        found = list(self._read(namespace, sorted(apart, key=lambda r: r.start), ours=True, index=Index(namespace)))
        self._retry_in(namespace, RETRY_SECONDS if found else min(2 * retry.waited, RETRY_MOST))
        return found

    def _retry_in(self, namespace: str, seconds: float) -> None:
        self._retries.pop(namespace, None)
        if self._apart.get(namespace):
            self._retries[namespace] = _Retry(time.monotonic() + seconds, seconds)

    def _link_all(self) -> None:
        """Learn what goes on from what in the namespaces that nobody has used yet, before any of theirs is given up."""
        for namespace in self._records:
            if namespace not in self._linked:
                for _ in self._link(namespace, ours=False, index=self._index(namespace)):
                    pass

    def _link(self, namespace: str, *, ours: bool, index: Index) -> Iterator[Loaded]:
        """Read the heads of a namespace's records; each comes after the one that it goes on from. What another version
        wrote is left to it, in the order of its names."""
        self._linked.add(namespace)
        held = self._records.get(namespace, {})
        for record in held.values():
            record.parent, record.children = None, 0
        self._apart[namespace] = set(held.values())
        there = sorted(held.values(), key=lambda r: r.start)  # parents come first
        yield from self._read(namespace, there, ours=ours, index=index)

    def _read(self, namespace: str, there: list[Record], *, ours: bool, index: Index) -> Iterator[Loaded]:
        """Read the heads of these, which stay apart until their own and those of all that they go on from were read."""
        held, apart = self._records.get(namespace, {}), self._apart[namespace]
        heads = read_heads(self.folder, namespace, (Wanted(r.named, r.size, r.stamp) for r in there), index)
        for record, head in zip(there, heads, strict=True):
            if not isinstance(head, Said):
                if is_passing(head):
                    if record.parent is not None and held.get(record.parent.address) is not record.parent:
                        self.learn(record, None, record.end)  # that has gone since; an orphan, once it can be read
                    self._note_unread(record, head)
                elif ours or str(head) != OTHER_FORMAT:
                    self.reject(record, reason_of(head))
                else:
                    apart.discard(record)
                continue
            parent = held.get(head.parent) if head.parent else None
            waits = parent in apart and parent is not None and parent.start < record.start
            if not waits and (not _goes_on(parent, record) if parent is not None else head.parent or record.start):
                self.reject(record, "orphan")
                continue
            self.learn(record, parent, record.start + len(head.tokens))
            if record.in_doubt:
                continue
            record.unread = False
            record.hollow = head.hollow
            if not waits:
                apart.discard(record)
                yield Loaded(record, head.tokens)

    def _try_whole(self, records: Iterable[Record]) -> None:
        """Read records in doubt, those first that were not tried for the longest; at least one."""
        until = time.monotonic() + TRIAL_SECONDS
        for record in sorted(records, key=lambda r: r.tried):
            record.in_doubt, record.tried = not self._is_readable(record), time.monotonic()
            if time.monotonic() > until:
                return

    def _is_readable(self, record: Record) -> bool:
        """Reads the whole file."""
        place = bytearray(min(record.size, _TRIAL_BYTES))
        try:
            with self.folder.reading(record.namespace, record.name) as file:
                for at in range(0, record.size, len(place)):
                    read_all(file, [place], at)
        except OSError:
            return False
        return True

    def set_apart(self, record: Record, tails: Iterable[Record], error: Exception) -> None:
        """Its content could not be read, and no node has it or its `tails` any more: they are tried again later."""
        self._note_unread(record, error)
        record.in_doubt = True
        self.keep_apart(record, tails)

    def keep_apart(self, record: Record, tails: Iterable[Record] = ()) -> None:
        """No node has these; `load_again` returns them once they can be read."""
        self._apart.setdefault(record.namespace, set()).update(r for r in (record, *tails) if r.ready)
        if record.namespace not in self._retries:
            self._retry_in(record.namespace, RETRY_SECONDS)

    def _note_unread(self, record: Record, error: Exception) -> None:
        if not record.unread:
            self.reasons["unreadable"] += 1
            level = logging.WARNING if self.reasons["unreadable"] <= _SAID else logging.DEBUG
            log.log(level, "a record on disk cannot be read now, and is left there: %s", error)
        record.unread = True

    def learn(self, record: Record, parent: Record | None, end: int) -> None:
        """What it goes on from, and where it ends."""
        if record.parent is not parent:
            if record.parent is not None:
                record.parent.children -= 1
            if parent is not None:
                parent.children += 1
        record.parent, record.end = parent, end

    # -- coming --------------------------------------------------------------------------------------

    def refuses(self, n_bytes: int, namespace: str = "") -> str:
        """Why so many bytes may not be written there now; empty if they may."""
        if self.failed:
            return self.failed
        if namespace in self._forbidden:
            return "no permission"
        if self.daily_bytes is not None and self._today() + self._coming + n_bytes > self.daily_bytes:
            if self._said_limit != self._day:
                self._said_limit = self._day
                log.warning(
                    "no more is written to disk today: %s were, and another %s would pass the daily limit of %s",
                    show_size(self.written_today + self._coming),
                    show_size(n_bytes),
                    show_size(self.daily_bytes),
                )
            return "daily limit"
        return ""

    def make_room(self, size: int, used: float) -> list[Record] | None:
        """Give up records until one of `size`, last used at `used`, fits; returns those given up, which are off the
        books already. None if that cannot be, and then nothing was given up."""
        missing = self.total_bytes + on_disk(size) - self.budget_bytes
        if missing <= 0:
            return []
        if size and used <= self._no_room_until:
            return None
        self._link_all()
        missing = self.total_bytes + on_disk(size) - self.budget_bytes  # orphans have gone meanwhile
        goal = missing if size == 0 else max(missing, min(self.budget_bytes // 128, 1 << 30))
        victims, freed = list[Record](), 0
        for record in oldest_tails_first(self.records(), _free):
            if freed >= goal or (record.used >= used and size):
                break
            victims.append(record)
            freed += on_disk(record.size)
        if freed < missing:
            self._no_room_until = used
            return None
        until = self._no_room_until
        for record in victims:
            self.counts["evicted_records"] += 1
            self.drop(record)
        self._no_room_until = until  # what is left was used later than what has gone
        return victims

    def expect(self, record: Record) -> None:
        """It is about to be written: its bytes are taken from the budget now."""
        record.ready = False
        self._coming += record.size
        self._add(record)
        if record.parent is not None:
            record.parent.children += 1

    def expect_again(self, record: Record) -> None:
        """It is there, could not be read, and is about to be written once more, over what is there."""
        record.ready = False
        self._coming += record.size

    def set_back(self, record: Record, tails: Iterable[Record]) -> None:
        """It was not written once more: it is there as it was, with these that go on from it, and no node has them."""
        record.ready = True
        self._coming -= record.size
        self.keep_apart(record, tails)

    def arrived(self, record: Record) -> None:
        """It was written, whether anybody wants it still or not."""
        if not record.ready:
            self._coming -= record.size
        record.ready, record.unread, record.in_doubt = True, False, False
        self._today()
        self.written_today += record.size
        self.written_ever += record.size
        self.counts["written_bytes"] += record.size

    def fail(self, error: OSError) -> None:
        """The folder takes no more."""
        if not self.failed:
            self.failed = error.strerror or str(error)
            log.warning(
                "the disk cache in %s is switched off: %s. Serving goes on from memory; restart to try again",
                self.folder.path,
                self.failed,
            )

    # -- going ---------------------------------------------------------------------------------------

    def drop(self, record: Record) -> None:
        """Off the books; its file is removed when the bin is emptied. Whoever relies on it is to be told."""
        held = self._records[record.namespace]
        self._apart.get(record.namespace, set()).discard(record)
        if held.get(record.address) is not record:
            return
        del held[record.address]
        if not record.ready:
            self._coming -= record.size
        self._no_room_until = 0.0
        self.total_bytes -= on_disk(record.size)
        if record.parent is not None:
            record.parent.children -= 1
        self._touched.discard(record)
        self._retimed.get(record.namespace, set()).discard(record)
        self._doomed.append(record)

    def reject(self, record: Record, reason: str) -> None:
        """It is not what its name says."""
        self.drop(record)
        self.count_rejected(record, reason, [])

    def count_rejected(self, record: Record, reason: str, tails: list[Record]) -> None:
        """`tails` go on from it, and go with it."""
        self.reasons[reason] += 1
        if tails:
            self.reasons["orphan"] += len(tails)
        self.counts["rejected_records"] += 1 + len(tails)
        self._said_rejected += 1
        level = logging.WARNING if self._said_rejected <= _SAID else logging.DEBUG
        name = f"{record.namespace}/{record.name}"
        more = f"; and {len(tails)} that go on from it, {show_size(sum(r.size for r in tails))}" if tails else ""
        log.log(level, "a record on disk is not used and removed: %s (%s)%s", reason, name, more)

    def empty_bin(self) -> None:
        """Remove the files of what was given up, and namespaces that have none any more; write indexes. May run beside
        the other methods, but not while records are written: one thread does both."""
        while self._indexes:
            namespace, data = self._indexes.popleft()
            try:
                self.folder.indexes.write(namespace, data)
            except OSError as error:  # the records have it all
                log.debug("the index of %s could not be written: %s", namespace, error)
        emptied = set[str]()
        while self._doomed:
            record = self._doomed.popleft()
            emptied.add(record.namespace)
            try:
                self.folder.remove(record.namespace, record.name)
            except OSError as error:
                self._not_removed(record.name, error)
        for namespace in emptied:
            if not self._records[namespace]:  # what is on its way is there already
                self._remove_if_empty(namespace)

    def _remove_if_empty(self, namespace: str) -> None:
        try:
            self.folder.remove_if_empty(namespace)
        except OSError as error:
            self._not_removed(namespace, error)

    def _not_removed(self, name: str, error: OSError) -> None:
        log.debug("%s could not be removed: %s", name, error)
        if error.errno == errno.ESTALE:
            self.fail(error)

    @property
    def has_bin(self) -> bool:
        return bool(self._doomed or self._indexes)

    # -- use ---------------------------------------------------------------------------------------------

    def touch(self, records: Iterable[Record], used: float) -> None:
        for record in records:
            record.used = used
            self._touched.add(record)

    @property
    def unnoted(self) -> bool:
        """Whether bytes were written that a restart would not know of."""
        return self.written_ever != self._noted and not self.failed

    @property
    def has_touched(self) -> bool:
        """Whether uses are to be written down now."""
        return bool(self._touched) and time.monotonic() - self._touched_at >= _TOUCH_EVERY

    def take_touched(self, *, force: bool = False) -> list[Record]:
        """Those whose use is to be written down now: not more often than once a minute."""
        if not force and time.monotonic() - self._touched_at < _TOUCH_EVERY:
            return []
        self._touched_at = time.monotonic()
        touched, self._touched = self._touched, set()
        return list(touched)

    def note(self, touched: list[Record], *, force: bool = False) -> None:
        """Write down what a restart should know: when records were used, and how much was written."""
        if self.failed:
            return
        for record in touched:
            if record.ready:
                self.folder.touch(record.namespace, record.name, record.used)
                self._retimed.setdefault(record.namespace, set()).add(record)
        if self.unnoted and (force or self.written_ever - self._noted >= _NOTE_EVERY):
            self._noted = self.written_ever
            try:
                self.folder.note_written(Written(self._day, self.written_today, self.written_ever))
            except OSError as error:
                if error.errno in MISPLACED:
                    log.debug("how much was written is not noted: %s", error)
                elif error.errno not in PASSING:
                    self.fail(error)

    def refresh_indexes(self) -> None:
        """Have the indexes know the files again whose last use was written down. At the end: nothing is used any
        more."""
        for namespace, records in self._retimed.items():
            index = self._index(namespace)
            if len(index) and not self.failed:
                stamps = {r.address: self.folder.stamp(namespace, r.name) for r in records}
                if data := index.restamped(stamps):
                    self._indexes.append((namespace, data))
        self._retimed.clear()
        self.empty_bin()

    # -- details -----------------------------------------------------------------------------------------

    def _add(self, record: Record) -> None:
        self._records.setdefault(record.namespace, {})[record.address] = record
        self.total_bytes += on_disk(record.size)

    def _today(self) -> int:
        """A count is that of the latest day there was, until that is over: clocks are set back, and time zones change.
        A day that is not even tomorrow there never was; what was counted then is taken to be today's."""
        now = self._clock()
        if day_of(now) > self._day:
            self._day, self.written_today = day_of(now), 0
        elif self._day > day_of(now, later=1):
            self._day = day_of(now)
        return self.written_today

    def check(self) -> list[str]:
        """Recount; says what is not as it should be."""
        found = []
        total = sum(on_disk(r.size) for r in self.records())
        if total != self.total_bytes:
            found.append(f"the catalog says {self.total_bytes} bytes, its records sum to {total}")
        coming = sum(r.size for r in self.records() if not r.ready)
        if coming != self._coming:
            found.append(f"the catalog says that {self._coming} bytes are coming, its records sum to {coming}")
        if total > self.budget_bytes:
            found.append(f"{total} bytes on disk of a budget of {self.budget_bytes}")
        children = Counter(r.parent for r in self.records() if r.parent is not None)
        found += [f"{r} counts {r.children} children" for r in self.records() if r.children != children[r]]
        known = set(self.records())
        there = [r for r in known if r.ready and r.parent is not None]
        found += [f"{r} goes on from a record that is gone" for r in there if r.parent not in known]
        return found


def _record(namespace: str, filed: Filed, now: float) -> Record:
    """Whatever its file says, it was not used in the future."""
    start, used = filed.named.start, min(filed.used, now)
    found = Record(namespace, filed.named.what, filed.named.address, start, start, filed.size, used)
    found.stamp = filed.stamp
    return found


def _indexed(loaded: Loaded) -> Indexed:
    record, above = loaded.record, loaded.record.parent
    parent = b"" if above is None else above.address
    return Indexed(record.address, record.start, record.stamp, parent, loaded.tokens, record.hollow)


def _free(record: Record) -> bool:
    return record.ready and not record.pins


def _goes_on(parent: Record | None, record: Record) -> bool:
    return parent is not None and parent.start < record.start <= parent.end


def is_passing(error: Exception) -> bool:
    """Trouble with reading that says nothing of the file: it may be over the next time."""
    return isinstance(error, OSError) and error.errno not in _GONE


def reason_of(error: Exception) -> str:
    """Why a record that could not be read, or believed, is rejected."""
    return "unreadable" if isinstance(error, OSError) else str(error)


NO_TOKENS: Tokens = np.empty(0, np.int32)
