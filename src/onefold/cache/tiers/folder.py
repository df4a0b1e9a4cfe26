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
- Folders are 0700, files 0600. A folder that holds something else is refused, and links are not followed.
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cache.tiers.index import NO_STAMP, Stamp
from onefold.cache.tiers.record import Named, parse_name
from onefold.errors import ConfigError, FolderInUse

MARKER, LOCK, WRITTEN, ABOUT, INDEX = "onefold.json", "lock", "written.json", "about.json", "index"
LAYOUT = 1
TEMPORARY = ".tmp"
NAMESPACE_DIGITS = 32
_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
READING = os.O_RDONLY | os.O_NONBLOCK | _NOFOLLOW
"""Nothing that was put in a record's place, such as a pipe, is waited for."""
_F_NOCACHE = 48  # macOS
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_LOCK_SECONDS = 0.2
"""That the lock is waited for: whoever asks who holds it has it for an instant."""
_UNFLUSHED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS, errno.EACCES)
"""What a file system says that cannot flush a folder, or a folder that may not be read."""
IOV_MOST = 512
PIECE_MOST = 2 << 20
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


def is_leftover(name: str) -> bool:
    """The temporary name of something that is written among the records."""
    of = name.removesuffix(TEMPORARY)
    return of != name and (of in (ABOUT, INDEX) or parse_name(of) is not None)


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._abouts: dict[str, dict[str, Any]] = {}
        """What namespaces are of, for when they are made."""
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
        if self.path.stat().st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise ConfigError(f"{self.path} is somebody else's; give a folder of your own to the cache")
        marker = self.path / MARKER
        if not marker.exists():
            others = sorted(p.name for p in self.path.iterdir() if p.name not in (LOCK, MARKER + TEMPORARY))
            if others:
                raise ConfigError(
                    f"{self.path} holds other things ({others[0]}); give a folder of its own to the cache"
                )
        self.lock()
        try:
            self.path.chmod(0o700)
            for name in (MARKER, WRITTEN):
                _remove(self.path / (name + TEMPORARY))
            if not marker.exists():
                self._write_json(marker, {"is": "a Onefold cache", "layout": LAYOUT})
            self._require_layout()
        except (OSError, ConfigError):
            self.unlock()
            raise
        return self

    @classmethod
    def look(cls, path: str | os.PathLike[str]) -> Folder:
        """The folder, for reading only: whoever writes there may go on. Raises ConfigError if it is not one of ours."""
        self = cls(Path(path).expanduser().absolute())
        if not (self.path / MARKER).is_file():
            raise ConfigError(f"{self.path} is not a cache of Onefold's")
        self._require_layout()
        return self

    def _require_layout(self) -> None:
        said = read_json(self.path / MARKER)
        if said.get("layout") != LAYOUT:
            raise ConfigError(
                f"{self.path} is of layout {said.get('layout')}, and this version writes {LAYOUT}: "
                "use another folder, or remove this one"
            )

    def lock(self) -> None:
        """One process writes at a time; it ends with the process, however that ends."""
        held = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | _NOFOLLOW, 0o600)
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

    def _require_lock(self) -> None:
        """Raises OSError if the folder is not the one that was locked: it may be somebody else's by now."""
        if self._lock is not None:
            with _absent_is_empty():
                if os.path.samestat(os.fstat(self._lock), os.lstat(self.path / LOCK)):
                    return
        raise OSError(errno.ESTALE, "its lock is gone: the folder was removed, or made anew by another process")

    def holder(self) -> str:
        """Who has it locked: "process 123"; empty if nobody does."""
        try:
            held = os.open(self.path / LOCK, READING)
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
        with os.scandir(self.path) as entries:
            return sorted(e.name for e in entries if _is_namespace(e.name) and e.is_dir(follow_symlinks=False))

    def listing(self, namespace: str) -> Listing:
        """What a namespace's folder holds beside the word of what it is of, and its index; by names alone."""
        records, strangers = list[Filed](), list[str]()
        with _absent_is_empty(), os.scandir(self.path / namespace) as entries:
            for entry in entries:
                named = parse_name(entry.name)
                if named is None or not entry.is_file(follow_symlinks=False):
                    if entry.name not in (ABOUT, INDEX):
                        strangers.append(entry.name)
                    continue
                try:
                    held = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                stamp = Stamp(held.st_size, held.st_mtime_ns, held.st_ino)
                records.append(Filed(named, held.st_size, held.st_mtime, stamp))
        return Listing(records, sorted(strangers))

    def records(self, namespace: str) -> list[Filed]:
        """The records of a namespace, by their names alone."""
        return self.listing(namespace).records

    def strangers(self, namespace: str) -> list[str]:
        """What lies among the records and is none."""
        return self.listing(namespace).strangers

    def sweep(self, namespace: str, strangers: Iterable[str]) -> None:
        """Remove what writing left behind when it was cut off, among these."""
        for name in strangers:
            if is_leftover(name):
                with contextlib.suppress(OSError):
                    self.remove(namespace, name)

    def bytes(self) -> int:
        """Of all records."""
        return sum(filed.size for namespace in self.namespaces() for filed in self.records(namespace))

    def about(self, namespace: str) -> dict[str, Any]:
        return read_json(self.path / namespace / ABOUT)

    def stamp(self, namespace: str, name: str) -> Stamp:
        """Of a record's file as it is now; `NO_STAMP` if it cannot be told."""
        try:
            held = os.lstat(self.path / namespace / name)
        except OSError:
            return NO_STAMP
        return Stamp(held.st_size, held.st_mtime_ns, held.st_ino)

    def index(self, namespace: str) -> Bytes:
        """What the namespace's index holds; nothing if there is none, or none that can be read."""
        try:
            held = os.open(self.path / namespace / INDEX, READING)
        except OSError:
            return b""
        with contextlib.suppress(OSError), open(held, "rb") as file:
            found = os.fstat(held)
            if stat.S_ISREG(found.st_mode) and found.st_size <= INDEX_MOST:
                return file.read(INDEX_MOST)
        return b""

    # -- files -----------------------------------------------------------------------------------------

    def write_index(self, namespace: str, data: Any) -> None:
        """In place of the one that there is. Raises OSError, and makes no folder."""
        self._require_lock()
        inside = self.path / namespace
        if inside.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(inside))
        self._write(inside / INDEX, [data])

    def describe(self, namespace: str, about: dict[str, Any]) -> None:
        """What a namespace is of: it says so in its folder, which is made when its first record is written."""
        self._abouts[namespace] = about

    def write(self, namespace: str, name: str, parts: Iterable[Any], used: float | None = None) -> None:
        """A record, all of it or nothing; `used` is when what it holds was last used. Raises OSError."""
        self._require_lock()
        inside = self.path / namespace
        if not inside.exists():
            inside.mkdir(mode=0o700, exist_ok=True)
            _flush_folder(self.path)
        if inside.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(inside))
        if namespace in self._abouts and not (inside / ABOUT).exists():
            self._write_json(inside / ABOUT, self._abouts[namespace])
        self._write(inside / name, parts, used)

    def remove(self, namespace: str, name: str) -> None:
        """Raises OSError, but not if it has gone."""
        self._require_lock()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / namespace / name)

    def remove_if_empty(self, namespace: str) -> bool:
        """A namespace that has nothing but the word of what it is of goes, with its index; where something else was put
        there, the index goes alone. Raises OSError."""
        self._require_lock()
        found = self.listing(namespace)
        if found.records:
            return False
        with contextlib.suppress(OSError):
            (self.path / namespace / INDEX).unlink()
        if found.strangers:
            return False
        with contextlib.suppress(OSError):
            (self.path / namespace / ABOUT).unlink()
        with contextlib.suppress(OSError):
            (self.path / namespace).rmdir()
        return True

    def touch(self, namespace: str, name: str, used: float) -> None:
        with contextlib.suppress(OSError):
            self._require_lock()
            os.utime(self.path / namespace / name, (used, used), follow_symlinks=False)

    @contextlib.contextmanager
    def reading(self, namespace: str, name: str) -> Iterator[int]:
        """A record's file, open; afterwards the file cache lets go of it. Raises OSError."""
        held = os.open(self.path / namespace / name, READING)
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

    def written(self) -> Written:
        said = read_json(self.path / WRITTEN)
        return Written(str(said.get("day", "")), _count(said.get("today")), _count(said.get("ever")))

    def note_written(self, written: Written) -> None:
        self._require_lock()
        self._write_json(self.path / WRITTEN, written._asdict())

    def _write_json(self, path: Path, value: dict[str, Any]) -> None:
        self._write(path, [json.dumps(value, indent=1).encode() + b"\n"])

    def _write(self, path: Path, parts: Iterable[Any], used: float | None = None) -> None:
        temporary = path.with_name(path.name + TEMPORARY)
        _remove(temporary)  # whatever it is: nothing is written to that is not new
        held = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600)
        with contextlib.ExitStack() as undo:
            undo.callback(_remove, temporary)
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
            os.rename(temporary, path)
            undo.pop_all()
        _flush_folder(path.parent)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


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


def read_json(path: Path) -> dict[str, Any]:
    """What a small file says; nothing if it is not there or not to be understood."""
    try:
        held = os.open(path, READING)
        try:
            found = json.loads(os.read(held, 1 << 20) if stat.S_ISREG(os.fstat(held).st_mode) else b"")
        finally:
            os.close(held)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


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


def _flush_folder(path: Path) -> None:
    try:
        held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _flush(held)
        finally:
            os.close(held)
    except OSError as error:
        if error.errno not in _UNFLUSHED:
            raise


def _flush(held: int) -> None:
    """Also out of the device's own cache, with all that was flushed into that before: on macOS fsync leaves it there,
    where a power cut takes it."""
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with contextlib.suppress(OSError):  # a file system that cannot
            fcntl.fcntl(held, full)
            return
    os.fsync(held)


def _is_namespace(name: str) -> bool:
    return len(name) == NAMESPACE_DIGITS and all(c in "0123456789abcdef" for c in name)


@contextlib.contextmanager
def _absent_is_empty() -> Iterator[None]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield


def _forked() -> None:
    """A child of this process does not write here: or the lock would outlive its parent."""
    for folder in _OPEN:
        if folder._lock is not None:
            os.close(folder._lock)
            folder._lock = None


os.register_at_fork(after_in_child=_forked)
