"""The folder: where records lie, and how a file comes and goes there.

    DIR/onefold.json              says that this folder is ours, and in which layout
    DIR/lock                      held by the one process that writes here; names it
    DIR/written.json              bytes written, today and ever
    DIR/<namespace>/about.json    what the namespace is of, for people
    DIR/<namespace>/index         what the heads of its records say, to be read faster
    DIR/<namespace>/*.safetensors records
    DIR/<namespace>/*.tmp         a record on its way; swept when found

- A file is written under a temporary name, flushed, and renamed: what has a record's name is whole, or was damaged
  afterwards.
- A namespace's folder comes with its first record, and goes with its last.
- Nothing is written or removed but by the process that holds the lock, and only while `lock` is the file that it holds:
  a folder that was deleted and made anew is somebody else's.
- Folders are 0700, files 0600. A folder that holds something else is refused.
- The folder itself may be a symbolic link, which is for its owner to decide; it is looked up once in each call. No link
  below it is followed, nor one that is put there in the middle of a call (`directory`).
- Only what a cache wrote is removed: records and their temporary names, an `about.json` that says so, and folders that
  held nothing else. But a file is always written anew: whatever has its temporary name by then is removed first.
- The file cache of the operating system is told to let go of what was written or read.

Knows nothing of what records mean, but for their names. No MLX in this file.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cache.tiers.records.directory import ABSENT, NEW, Directory
from onefold.cache.tiers.records.index import MAGIC, NO_STAMP, Stamp
from onefold.cache.tiers.records.record import Named, parse_name
from onefold.errors import ConfigError, FolderInUse

MARKER, LOCK, WRITTEN, ABOUT, INDEX = "onefold.json", "lock", "written.json", "about.json", "index"
LAYOUT = 1
_MARKED = {"is": "a Onefold cache", "layout": LAYOUT}
JSON_MOST = 1 << 20
TEMPORARY = ".tmp"
NAMESPACE_DIGITS = 32
_ABOUT_KEYS = {"model", "kv", "format", "layout", "salted"}
"""Of an `about.json` from before it named its namespace."""
_F_NOCACHE = 48  # macOS
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_LOCK_SECONDS = 0.2
"""That the lock is waited for: whoever asks who holds it has it for an instant."""
IOV_MOST = 512
PIECE_MOST = 2 << 20
_INDEX_BEGINS = MAGIC[: len(b"onefold index ")]
INDEX_MOST = 1 << 28
"""Bytes; a longer one is not read."""
WRITE_MOST = 1 << 30
"""Bytes; macOS refuses twice as many in one call."""
Bytes = bytes  # where `Folder.bytes` hides it
_OPEN: weakref.WeakSet[Folder] = weakref.WeakSet()


class Filed(NamedTuple):
    """A record's file, as the folder lists it."""

    named: Named
    size: int
    used: float
    """When it was written or last used: its modification time."""
    stamp: Stamp


class Listing(NamedTuple):
    """What lies in a namespace's folder."""

    records: list[Filed]
    strangers: list[str]
    """What is no record: leftovers of a crash, and whatever was put there."""


class Written(NamedTuple):
    """Bytes of records that were written: on a day, and ever."""

    day: str
    today: int
    ever: int


def day_of(moment: float, later: int = 0) -> str:
    """As `Written` has it; or so many days later. Later days compare greater."""
    return (datetime.date.fromtimestamp(moment) + datetime.timedelta(later)).isoformat()


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._abouts: dict[str, dict[str, Any]] = {}
        """What namespaces are of, for when they are made."""
        self._described: set[str] = set()
        """Namespaces whose `about.json` was looked at."""
        self._ours: set[str] = set()
        """Namespaces whose folder was made, or a record removed from, here: if it is empty it may go."""
        _OPEN.add(self)

    # -- opening ---------------------------------------------------------------------------------

    @classmethod
    def make(cls, path: str | os.PathLike[str]) -> Folder:
        """The folder, made if need be, and locked. Raises OSError, ConfigError if it is not one of ours, and
        FolderInUse."""
        self = cls(Path(path).expanduser().absolute())
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{self.path} cannot be a folder: {error.strerror}") from error
        with Directory.at(self.path) as top:
            if top.stat().st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
                raise ConfigError(f"{self.path} is somebody else's; give a folder of your own to the cache")
            if top.has(MARKER):
                self._require_layout(top)
            else:
                others = sorted(e.name for e in top.entries() if e.name not in (LOCK, MARKER + TEMPORARY))
                if others:
                    raise ConfigError(
                        f"{self.path} holds other things ({others[0]}); give a folder of its own to the cache"
                    )
            self._take_lock(top)
            try:
                top.restrict()
                for name in (MARKER, WRITTEN):
                    _remove(top, name + TEMPORARY)
                if not top.has(MARKER):
                    _write_json(top, MARKER, _MARKED)
                self._require_layout(top)
            except (OSError, ConfigError):
                self.unlock()
                raise
        return self

    @classmethod
    def look(cls, path: str | os.PathLike[str]) -> Folder:
        """The folder, for reading only: whoever writes there may go on. Raises OSError, and ConfigError if it is not
        one of ours."""
        self = cls(Path(path).expanduser().absolute())
        with _absent_is_empty(), Directory.at(self.path) as top:
            if top.has(MARKER):
                self._require_layout(top)
                return self
        raise ConfigError(f"{self.path} is not a cache of Onefold's")

    def _require_layout(self, top: Directory) -> None:
        try:
            layout = _parsed(top, MARKER).get("layout")
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no JSON"
            raise ConfigError(
                f"{self.path / MARKER} is unreadable ({why}), so what lies beside it is left alone: make it readable; "
                f"or put {json.dumps(_MARKED)} there, if this version wrote the folder; or use another folder"
            ) from error
        if layout != LAYOUT:
            says = "says no layout" if layout is None else f"is of layout {layout}"
            raise ConfigError(
                f"{self.path / MARKER} {says}, and this version writes {LAYOUT}: "
                "use another folder, or the version that wrote this one"
            )

    def lock(self) -> None:
        """One process writes at a time; it ends with the process, however that ends. Raises OSError and FolderInUse."""
        with Directory.at(self.path) as top:
            self._take_lock(top)

    def _take_lock(self, top: Directory) -> None:
        held = top.open(LOCK, os.O_RDWR | os.O_CREAT)
        try:
            if not _locked(held, time.monotonic() + _LOCK_SECONDS):
                who = _named_in(held) or "another process"
                raise FolderInUse(f"{self.path} is in use by {who}: one process writes a cache folder at a time")
        except (OSError, FolderInUse):
            os.close(held)
            raise
        self._lock = held
        with contextlib.suppress(OSError):  # the text is for people: a full disk can be read from
            os.ftruncate(held, 0)
            os.pwrite(held, f"process {os.getpid()}\n".encode(), 0)

    def unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Directory]:
        """The folder, open, to write or remove something there. Raises OSError if it is not the one that was locked: it
        may be somebody else's by now."""
        with contextlib.ExitStack() as held:
            locked: Directory | None = None
            with _absent_is_empty():
                top = held.enter_context(Directory.at(self.path))
                if self._lock is not None and os.path.samestat(os.fstat(self._lock), top.stat(LOCK)):
                    locked = top
            if locked is None:
                raise OSError(errno.ESTALE, "its lock is gone: the folder was removed, or made anew by another process")
            yield locked

    @contextlib.contextmanager
    def _inside(self, namespace: str) -> Iterator[Directory]:
        """The folder of a namespace, open; of none, the folder itself. Raises OSError."""
        with Directory.at(self.path) as top:
            if not namespace:
                yield top
                return
            with top.below(namespace) as inside:
                yield inside

    def holder(self) -> str:
        """Who has it locked: "process 123"; empty if nobody does."""
        try:
            with Directory.at(self.path) as top:
                held = top.open(LOCK)
        except FileNotFoundError:
            return ""
        try:
            who = _named_in(held)
            if who:  # whoever takes the lock says so at once, and nobody's start is to be disturbed
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return ""
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return who
        finally:
            os.close(held)

    # -- looking -----------------------------------------------------------------------------------

    def namespaces(self) -> list[str]:
        with Directory.at(self.path) as top:
            return sorted(e.name for e in top.entries() if _is_namespace(e.name) and e.is_dir(follow_symlinks=False))

    def listing(self, namespace: str) -> Listing:
        """What a namespace's folder holds beside the word of what it is of, and its index."""
        with _absent_is_empty(), self._inside(namespace) as inside:
            return _listing(inside, namespace)
        return Listing([], [])

    def records(self, namespace: str) -> list[Filed]:
        """The records of a namespace, by their names alone."""
        return self.listing(namespace).records

    def strangers(self, namespace: str) -> list[str]:
        """What lies among the records and is none, nor says what they are of: leftovers of a crash, and whatever else
        was put there."""
        return self.listing(namespace).strangers

    def top_level(self) -> list[str]:
        """What lies beside the namespaces, our own files included."""
        with Directory.at(self.path) as top:
            spaces = {e.name for e in top.entries() if _is_namespace(e.name) and e.is_dir(follow_symlinks=False)}
            return sorted({e.name for e in top.entries()} - spaces)

    def is_leftover(self, namespace: str, name: str) -> bool:
        """Whether it is what writing left behind when it was cut off. At the top the namespace is empty."""
        with _absent_is_empty(), self._inside(namespace) as inside:
            return _is_leftover(inside, namespace, name)
        return False

    def stat(self, namespace: str, name: str) -> os.stat_result:
        """Of what has this name, itself; at the top the namespace is empty. Raises OSError."""
        with self._inside(namespace) as inside:
            return inside.stat(name)

    def sweep(self, namespace: str, strangers: Iterable[str]) -> None:
        """Remove what writing left behind when it was cut off, among these."""
        for name in strangers:
            if name.endswith(TEMPORARY) and self.is_leftover(namespace, name):
                with contextlib.suppress(OSError):
                    self.remove(namespace, name)

    def bytes(self) -> int:
        """Of all records that can be seen."""
        total = 0
        for namespace in self.namespaces():
            with contextlib.suppress(PermissionError):
                total += sum(filed.size for filed in self.records(namespace))
        return total

    def about(self, namespace: str) -> dict[str, Any]:
        """What a namespace is of, as it was described; nothing if that cannot be read or understood."""
        with contextlib.suppress(OSError), self._inside(namespace) as inside:
            found = _read_json(inside, ABOUT)
            return {key: value for key, value in found.items() if key != "namespace"}
        return {}

    def stamp(self, namespace: str, name: str) -> Stamp:
        """Of a record's file as it is now; `NO_STAMP` if it cannot be told."""
        try:
            return _stamp(self.stat(namespace, name))
        except OSError:
            return NO_STAMP

    def index(self, namespace: str) -> Bytes:
        """What the namespace's index holds; nothing if there is none, or none that can be read."""
        with contextlib.suppress(OSError), self._inside(namespace) as inside:
            held = inside.open(INDEX)
            try:
                found = os.fstat(held)
                if stat.S_ISREG(found.st_mode) and found.st_size <= INDEX_MOST:
                    with open(held, "rb", closefd=False) as file:
                        return file.read(INDEX_MOST)
            finally:
                os.close(held)
        return b""

    # -- files -----------------------------------------------------------------------------------------

    def write_index(self, namespace: str, data: Any) -> None:
        """In place of the one that there is. Raises OSError, and FileExistsError if something else has its name; makes
        no folder."""
        with self._changing() as top, top.below(namespace) as inside:
            if inside.has(INDEX) and not _is_an_index(inside):
                raise FileExistsError(errno.EEXIST, "something else has the index's name", INDEX)
            _write(inside, INDEX, [data])

    def describe(self, namespace: str, about: dict[str, Any]) -> None:
        """What a namespace is of: it says so in its folder, which is made when its first record is written. One that an
        earlier version described says so in full from the next record on."""
        self._abouts[namespace] = {"namespace": namespace} | about

    def write(self, namespace: str, name: str, parts: Iterable[Any], used: float | None = None) -> None:
        """A record, all of it or nothing; `used` is when what it holds was last used. Raises OSError."""
        with self._changing() as top:
            if top.make(namespace):
                self._ours.add(namespace)
                top.flush()
            with top.below(namespace) as inside:
                if namespace in self._abouts and self._is_to_be_described(inside, namespace):
                    with contextlib.suppress(FileExistsError):  # a folder under the temporary name: that is left there
                        _write_json(inside, ABOUT, self._abouts[namespace])
                _write(inside, name, parts, used)

    def _is_to_be_described(self, inside: Directory, namespace: str) -> bool:
        if not inside.has(ABOUT):
            return True
        if namespace in self._described:
            return False
        self._described.add(namespace)
        found = _read_json(inside, ABOUT)
        return _is_ours(found, namespace) and not found.keys() >= self._abouts[namespace].keys()

    def remove(self, namespace: str, name: str) -> None:
        """A record, or a leftover; at the top the namespace is empty. Raises OSError, but not if it has gone."""
        with self._changing() as top, contextlib.suppress(FileNotFoundError):
            if not namespace:
                top.remove(name)
                return
            with top.below(namespace) as inside:
                if inside.remove(name) and parse_name(name) is not None:
                    self._ours.add(namespace)

    def remove_if_empty(self, namespace: str) -> bool:
        """A namespace that has nothing but the word of what it is of goes, with its index; where something else was put
        there, the index goes alone. False if something else is there, or if it is an empty folder that may be
        anybody's. Raises OSError."""
        with self._changing() as top, contextlib.suppress(FileNotFoundError), top.below(namespace) as inside:
            found = _listing(inside, namespace)
            if found.records:
                return False
            with contextlib.suppress(OSError):
                if _is_an_index(inside):
                    inside.remove(INDEX)
            if found.strangers or (not inside.has(ABOUT) and namespace not in self._ours):
                return False
            with contextlib.suppress(OSError):
                inside.remove(ABOUT)
                top.remove_directory(namespace, inside)
            self._ours.discard(namespace)
        return True

    def touch(self, namespace: str, name: str, used: float) -> None:
        with contextlib.suppress(OSError), self._changing() as top, top.below(namespace) as inside:
            held = inside.open(name)
            try:
                os.utime(held, (used, used))
            finally:
                os.close(held)

    @contextlib.contextmanager
    def reading(self, namespace: str, name: str) -> Iterator[int]:
        """A record's file, open; afterwards the file cache lets go of it. Raises OSError."""
        with self._inside(namespace) as inside:
            held = inside.open(name)
        try:
            if not stat.S_ISREG(os.fstat(held).st_mode):
                raise OSError(errno.EINVAL, "not a file")
            if sys.platform == "darwin":
                fcntl.fcntl(held, _F_NOCACHE, 1)
            elif hasattr(os, "posix_fadvise"):
                os.posix_fadvise(held, 0, 0, os.POSIX_FADV_WILLNEED)  # all of it will be read
            yield held
        finally:
            _let_go(held)
            os.close(held)

    @contextlib.contextmanager
    def opening(self, namespace: str) -> Iterator[Callable[[str], int]]:
        """A function that opens one of the namespace's files, for many of them; whoever calls it closes the file. Both
        raise OSError."""
        with self._inside(namespace) as inside:
            yield inside.open

    def written(self) -> Written:
        said = dict[str, Any]()
        with contextlib.suppress(OSError), Directory.at(self.path) as top:
            said = _read_json(top, WRITTEN)
        return Written(str(said.get("day", "")), _count(said.get("today")), _count(said.get("ever")))

    def note_written(self, written: Written) -> None:
        """Raises OSError."""
        with self._changing() as top:
            _write_json(top, WRITTEN, written._asdict())


def _listing(inside: Directory, namespace: str) -> Listing:
    records, strangers = list[Filed](), list[str]()
    for entry in inside.entries():
        named = parse_name(entry.name)
        if named is None or not entry.is_file(follow_symlinks=False):
            strangers.append(entry.name)
            continue
        with contextlib.suppress(FileNotFoundError):
            held = entry.stat(follow_symlinks=False)
            records.append(Filed(named, held.st_size, held.st_mtime, _stamp(held)))
    if ABOUT in strangers and _is_ours(_read_json(inside, ABOUT), namespace):
        strangers.remove(ABOUT)
    if INDEX in strangers and _is_an_index(inside):
        strangers.remove(INDEX)
    return Listing(records, sorted(strangers))


def _stamp(held: os.stat_result) -> Stamp:
    """Of a file that says it is from after 2262, or before 1678, none: an index has 64 bits for that."""
    known = -(1 << 63) <= held.st_mtime_ns < 1 << 63
    return Stamp(held.st_size, held.st_mtime_ns, held.st_ino) if known else NO_STAMP


def _is_an_index(inside: Directory) -> bool:
    """Whether what has an index's name begins as one of any version does."""
    with contextlib.suppress(OSError):
        return _first_bytes(inside, INDEX, len(_INDEX_BEGINS)) == _INDEX_BEGINS
    return False


def _is_ours(about: dict[str, Any], namespace: str) -> bool:
    """Whether a cache wrote that, of this namespace."""
    said = about.get("namespace")
    return said == namespace if said is not None else about.keys() >= _ABOUT_KEYS


def _is_leftover(inside: Directory, namespace: str, name: str) -> bool:
    """A file under the temporary name of something that is written there."""
    of = name.removesuffix(TEMPORARY)
    with contextlib.suppress(OSError):
        if of == name or not stat.S_ISREG(inside.stat(name).st_mode):
            return False
        if not namespace:
            return of in (MARKER, WRITTEN)
        if of == ABOUT:
            return _is_ours(_read_json(inside, ABOUT), namespace) or _begins_as_ours(inside, name, namespace)
        if of == INDEX:
            found = _first_bytes(inside, name, len(_INDEX_BEGINS))
            return _INDEX_BEGINS.startswith(found)
        return parse_name(of) is not None
    return False


def _begins_as_ours(inside: Directory, name: str, namespace: str) -> bool:
    """Whether this is an `about.json` of ours, as far as it was written."""
    begins = (_json({"namespace": namespace})[: -len("\n}\n")], b'{\n "label": ')
    found = _first_bytes(inside, name, max(map(len, begins)))
    return any(b.startswith(found[: len(b)]) for b in begins)


def _first_bytes(inside: Directory, name: str, n_bytes: int) -> bytes:
    held = inside.open(name)
    try:
        return os.read(held, n_bytes) if stat.S_ISREG(os.fstat(held).st_mode) else b""
    finally:
        os.close(held)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _write_json(inside: Directory, name: str, value: dict[str, Any]) -> None:
    _write(inside, name, [_json(value)])


def _write(inside: Directory, name: str, parts: Iterable[Any], used: float | None = None) -> None:
    temporary = name + TEMPORARY
    _remove(inside, temporary)  # whatever it is: nothing is written to that is not new
    held = inside.open(temporary, NEW)
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, inside, temporary)
        try:
            if sys.platform == "darwin":
                fcntl.fcntl(held, _F_NOCACHE, 1)
            write_all(held, parts)
            if used is not None:
                with contextlib.suppress(OSError):  # a file system that cannot
                    os.utime(held, (used, used))
            os.fsync(held)
            _let_go(held)
        finally:
            os.close(held)
        inside.rename(temporary, name)
        undo.pop_all()
    inside.flush()


def _remove(inside: Directory, name: str) -> None:
    with contextlib.suppress(OSError):
        inside.remove(name)


def _locked(held: int, until: float) -> bool:
    """Whether this file is ours alone; False if it is somebody else's until then. Raises OSError."""
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        if time.monotonic() > until:
            return False
        time.sleep(0.005)


def _named_in(lock: int) -> str:
    return os.pread(lock, 64, 0).decode(errors="replace").strip()


def _count(found: Any) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else 0


def _parsed(inside: Directory, name: str) -> dict[str, Any]:
    """What a small file says. Raises OSError, and ValueError or RecursionError if it cannot be understood."""
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


def _read_json(inside: Directory, name: str) -> dict[str, Any]:
    """What a small file says; nothing if it is not there or not to be understood."""
    try:
        return _parsed(inside, name)
    except (OSError, ValueError, RecursionError):
        return {}


def write_all(held: int, parts: Iterable[Any]) -> None:
    """One after the other: a part may be made when its turn comes, and gone when the next one's does."""
    for part in parts:
        left = memoryview(part).cast("B")
        while left:
            left = left[os.write(held, left[:WRITE_MOST]) :]


def read_all(held: int, parts: Sequence[Any], at: int) -> int:
    """Fill `parts` from position `at` of a file; returns how many bytes there were."""
    left = _pieces(parts)
    total = 0
    while left:
        done = os.preadv(held, left[: -IOV_MOST - 1 : -1], at + total)
        if done == 0:
            break
        total += done
        while left and done >= len(left[-1]):
            done -= len(left.pop())
        if done:
            left[-1] = left[-1][done:]
    return total


def _pieces(parts: Sequence[Any]) -> list[memoryview]:
    """The last first; none so long, and no `IOV_MOST` of them together, that a system call would refuse it."""
    found = []
    for part in parts:
        view = memoryview(part).cast("B")
        found += [view[i : i + PIECE_MOST] for i in range(0, len(view), PIECE_MOST)]
    return found[::-1]


def _let_go(held: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)


def _is_namespace(name: str) -> bool:
    return len(name) == NAMESPACE_DIGITS and all(c in "0123456789abcdef" for c in name)


@contextlib.contextmanager
def _absent_is_empty() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in ABSENT:
            raise


def _forked() -> None:
    """A child of this process does not write here: or the lock would outlive its parent."""
    for folder in _OPEN:
        if folder._lock is not None:
            os.close(folder._lock)
            folder._lock = None


os.register_at_fork(after_in_child=_forked)
