"""The folder: where records lie, and how their files are written and removed.

    DIR/onefold.json              says that this folder is a cache, and in which layout (`marker`)
    DIR/lock                      locked by the one process that writes here; names it (`locking`)
    DIR/written.json              bytes written, today and ever (`written`)
    DIR/<namespace>/about.json    what the namespace belongs to, for people (`abouts`)
    DIR/<namespace>/index         a copy of its records' heads, which is faster to read
    DIR/<namespace>/*.safetensors records
    DIR/<namespace>/*.tmp         a record that is being written; one that is found at the start is removed

- A file is written whole or not at all (`files`).
- A namespace's folder is made with its first record, and removed with its last.
- Only the process that holds the lock writes or removes, and only while `lock` is still the file that it locked.
- Folders are 0700, files 0600. A folder that holds anything else is refused.
- The folder itself may be a symbolic link; each call resolves it once. No link below it is followed, nor one that is
  put there in the middle of a call (`directory`).
- Only files that a cache wrote are removed: records, their temporary names, our `about.json` and index, and folders
  that held nothing else (`listing`).

Knows nothing of the content of records, but for their names. No MLX in this file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from onefold.cache.tiers.records import backups, system
from onefold.cache.tiers.records.abouts import Abouts, read_about
from onefold.cache.tiers.records.directory import Directory, absent_is_empty, opened
from onefold.cache.tiers.records.files import (
    TEMPORARY,
    read_json,
    remove_if_possible,
    replace,
    write_json,
)
from onefold.cache.tiers.records.index import NO_STAMP, Stamp
from onefold.cache.tiers.records.index_files import IndexFiles
from onefold.cache.tiers.records.listing import (
    ABOUT,
    INDEX,
    Listing,
    is_index,
    is_leftover,
    is_namespace,
    list_namespace,
    stamp_of,
)
from onefold.cache.tiers.records.locking import FolderLock
from onefold.cache.tiers.records.marker import MARKER, mark, require_layout, require_usable
from onefold.cache.tiers.records.record import parse_name
from onefold.cache.tiers.records.unflushed import Unflushed
from onefold.cache.tiers.records.written import WRITTEN, Written, parse_written
from onefold.errors import ConfigError


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FolderLock(path)
        self.indexes = IndexFiles(path, self._lock)
        self.unflushed = Unflushed(self._lock)
        self._abouts = Abouts()
        self._emptied: set[str] = set()
        """Namespaces whose folder was made, or a record removed from, by this process: if it is empty it may go."""

    # -- opening ---------------------------------------------------------------------------------

    @classmethod
    def make(cls, path: str | os.PathLike[str]) -> Folder:
        """Open a cache folder to write in, and make it if need be. Raises OSError, ConfigError if it is not one of
        ours, and FolderInUse."""
        self = cls(Path(os.path.expanduser(path)).absolute())
        new = not self.path.exists()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{self.path} cannot be a folder: {error.strerror}") from error
        if new:
            backups.exclude_default(self.path)
        with Directory.at(self.path) as top:
            if top.stat().st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
                raise ConfigError(f"{self.path} belongs to another user: give the cache a folder of your own")
            require_usable(top, self.path)
            self._lock.take(top)
            try:
                top.restrict()
                for name in (MARKER, WRITTEN):
                    remove_if_possible(top, name + TEMPORARY)
                mark(top, self.path)
            except (OSError, ConfigError):
                self.unlock()
                raise
        return self

    @classmethod
    def look(cls, path: str | os.PathLike[str]) -> Folder:
        """Open a cache folder for reading only; another process may write there meanwhile. Raises OSError, and
        ConfigError if it is not one of ours."""
        self = cls(Path(os.path.expanduser(path)).absolute())
        with absent_is_empty(), Directory.at(self.path) as top:
            if top.has(MARKER):
                require_layout(top, self.path)
                return self
        raise ConfigError(f"{self.path} is not a cache of Onefold's")

    def lock(self) -> None:
        """Become the one process that writes here. Raises OSError and FolderInUse."""
        with Directory.at(self.path) as top:
            self._lock.take(top)

    def unlock(self) -> None:
        """Release the lock, if this process has it."""
        self._lock.release()

    def holder(self) -> str:
        """Returns which process has the folder locked, as "process 123"; nothing if none has. Raises OSError."""
        return self._lock.holder()

    # -- looking -----------------------------------------------------------------------------------

    def namespaces(self) -> list[str]:
        """Returns the names of the namespaces' folders. Raises OSError."""
        with Directory.at(self.path) as top:
            return sorted(e.name for e in top.entries() if is_namespace(e))

    def listing(self, namespace: str) -> Listing:
        """Returns what a namespace's folder holds besides its `about.json` and its index. Raises OSError."""
        with absent_is_empty(), opened(self.path, namespace) as inside:
            return list_namespace(inside, namespace)
        return Listing([], [])

    def top_level(self) -> list[str]:
        """Returns the names of everything that is not a namespace, our own files included. Raises OSError."""
        with Directory.at(self.path) as top:
            return sorted(e.name for e in top.entries() if not is_namespace(e))

    def is_leftover(self, namespace: str, name: str) -> bool:
        """Whether an interrupted write left this file behind. For the top of the folder the namespace is empty."""
        with absent_is_empty(), opened(self.path, namespace) as inside:
            return is_leftover(inside, namespace, name)
        return False

    def stat(self, namespace: str, name: str) -> os.stat_result:
        """Returns the state of a file, or of a link itself. For the top of the folder the namespace is empty. Raises
        OSError."""
        with opened(self.path, namespace) as inside:
            return inside.stat(name)

    def bytes(self) -> int:
        """Returns the size of all records that can be seen. Raises OSError."""
        total = 0
        for namespace in self.namespaces():
            with contextlib.suppress(PermissionError):
                total += sum(filed.size for filed in self.listing(namespace).records)
        return total

    def about(self, namespace: str) -> dict[str, Any]:
        """Returns what a namespace belongs to, as it was described; nothing if that cannot be read or understood."""
        with contextlib.suppress(OSError), opened(self.path, namespace) as inside:
            return read_about(inside)
        return {}

    def stamp(self, namespace: str, name: str) -> Stamp:
        """Returns the stamp of a record's file as it is now; `NO_STAMP` if that is unknown."""
        try:
            return stamp_of(self.stat(namespace, name))
        except OSError:
            return NO_STAMP

    # -- files -----------------------------------------------------------------------------------------

    def describe(self, namespace: str, about: dict[str, Any]) -> None:
        """Set what a namespace's `about.json` is to say. It is written with the namespace's next record."""
        self._abouts.set(namespace, about)

    def write(self, namespace: str, name: str, parts: Iterable[Any], used: float | None = None) -> None:
        """Write a record, whole or not at all; `used` is when its content was last used. Raises OSError."""
        with self._lock.changing() as top:
            if top.make(namespace):
                self._emptied.add(namespace)
                top.flush()
            with top.below(namespace) as inside:
                self._abouts.write_if_due(inside, namespace)
                replace(inside, name, parts, used)
            self.unflushed.add(namespace)

    def remove(self, namespace: str, name: str) -> None:
        """Remove a record or a leftover, if it is there. For the top of the folder the namespace is empty. Raises
        OSError."""
        with self._lock.changing() as top, contextlib.suppress(FileNotFoundError):
            if not namespace:
                top.remove(name)
                return
            with top.below(namespace) as inside:
                if inside.remove(name) and parse_name(name) is not None:
                    self._emptied.add(namespace)

    def sweep(self, namespace: str, strangers: Iterable[str]) -> None:
        """Remove those of these files that an interrupted write left behind."""
        for name in strangers:
            if name.endswith(TEMPORARY) and self.is_leftover(namespace, name):
                with contextlib.suppress(OSError):
                    self.remove(namespace, name)

    def remove_if_empty(self, namespace: str) -> bool:
        """Remove a namespace that has no records. Returns False if it was not removed: it has records; or it holds a
        file that no cache wrote, and then its index alone goes; or it is an empty folder that a cache may not have
        made. Raises OSError."""
        with self._lock.changing() as top, contextlib.suppress(FileNotFoundError), top.below(namespace) as inside:
            found = list_namespace(inside, namespace)
            if found.records:
                return False
            with contextlib.suppress(OSError):
                if is_index(inside):
                    inside.remove(INDEX)
            if found.strangers or (not inside.has(ABOUT) and namespace not in self._emptied):
                return False
            with contextlib.suppress(OSError):
                inside.remove(ABOUT)
                top.remove_directory(namespace, inside)
            self._emptied.discard(namespace)
        return True

    def touch(self, namespace: str, name: str, used: float) -> None:
        """Set when a record was last used; does nothing if that fails."""
        with contextlib.suppress(OSError), self._lock.changing() as top, top.below(namespace) as inside:
            held = inside.open(name)
            try:
                os.utime(held, (used, used))
            finally:
                os.close(held)

    @contextlib.contextmanager
    def reading(self, namespace: str, name: str) -> Iterator[int]:
        """Open a record's file to read all of it, and drop it from the file cache afterwards. Raises OSError."""
        with opened(self.path, namespace) as inside:
            held = inside.open(name)
        try:
            if not stat.S_ISREG(os.fstat(held).st_mode):
                raise OSError(errno.EINVAL, "not a file")
            system.chosen.expect_all(held)
            yield held
        finally:
            system.chosen.forget(held)
            os.close(held)

    @contextlib.contextmanager
    def opening(self, namespace: str) -> Iterator[Callable[[str], int]]:
        """Yields a function that opens one of the namespace's files, for many of them; its caller closes the file.
        Both raise OSError."""
        with opened(self.path, namespace) as inside:
            yield inside.open

    def written(self) -> Written:
        """Returns how much was written here, as far as that was noted."""
        found = dict[str, Any]()
        with contextlib.suppress(OSError), Directory.at(self.path) as top:
            found = read_json(top, WRITTEN)
        return parse_written(found)

    def note_written(self, written: Written) -> None:
        """Note how much was written here. Raises OSError."""
        with self._lock.changing() as top:
            write_json(top, WRITTEN, written._asdict())
