"""A directory that is open: what lies in it is reached through its descriptor, by a plain name.

A path is looked up anew at every call, and a link that was put there in between leads elsewhere. A descriptor stays the
directory that it was. So no symbolic link is followed here, whenever it was put there: neither one to a directory nor
one to a file. Only the path with which one begins (`Directory.at`) may lead through links.

No MLX in this file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from onefold.cache.tiers.records import system
from onefold.cache.tiers.records.faults import ignoring

_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READING = os.O_RDONLY | os.O_NONBLOCK
"""Nothing that was put in a file's place, such as a pipe, is waited for."""
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""There is no such directory, or something else has its name: a link says ENOTDIR on Linux, and ELOOP on macOS."""


class Directory:
    """Closed by leaving its `with`. Every method raises OSError."""

    def __init__(self, held: int) -> None:
        self._held = held

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Directory:
        """The directory of this path, which may lead through links."""
        return cls(os.open(path, _DIRECTORY))

    def below(self, name: str) -> Directory:
        """The directory of this name; a link to one is none."""
        return Directory(os.open(_plain(name), _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._held))

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._held)

    def open(self, name: str, how: int = READING) -> int:
        """A descriptor of the file of this name. Whatever is made is 0600."""
        return os.open(_plain(name), how | _NOFOLLOW, 0o600, dir_fd=self._held)

    def stat(self, name: str = "") -> os.stat_result:
        """Returns the status of the entry with this name, a link's own included; without a name, of the directory."""
        return os.stat(_plain(name), dir_fd=self._held, follow_symlinks=False) if name else os.fstat(self._held)

    def has(self, name: str) -> bool:
        """Whether anything has this name."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """What there is; ask each with `follow_symlinks=False`, and before the directory is closed."""
        with os.scandir(self._held) as found:
            yield from found

    def make(self, name: str) -> bool:
        """Make a directory, 0700; False if something has that name."""
        try:
            os.mkdir(_plain(name), 0o700, dir_fd=self._held)
        except FileExistsError:
            return False
        return True

    def restrict(self) -> None:
        """Nobody else may enter."""
        os.fchmod(self._held, 0o700)

    def remove(self, name: str) -> bool:
        """Remove what has this name, itself; False if nothing has."""
        try:
            os.unlink(_plain(name), dir_fd=self._held)
        except FileNotFoundError:
            return False
        return True

    def remove_directory(self, name: str, known: Directory) -> None:
        """Remove the empty directory of this name, if it is the one that is known."""
        if os.path.samestat(self.stat(name), known.stat()):
            os.rmdir(_plain(name), dir_fd=self._held)

    def rename(self, name: str, new: str) -> None:
        os.rename(_plain(name), _plain(new), src_dir_fd=self._held, dst_dir_fd=self._held)

    def flush(self) -> None:
        """Make durable what was made, renamed and removed here, where the file system can promise that. On macOS only
        `flush_device` does."""
        system.chosen.flush_directory(self._held)

    def push(self) -> None:
        """On macOS: give the device what was made, renamed and removed here, for `flush_device`."""
        system.chosen.push_directory(self._held)

    def flush_device(self) -> None:
        """On macOS: make durable what was made, renamed and removed here, and all that the device was given before.
        Does nothing on other systems, where each flush has done that."""
        system.chosen.flush_device(self._held)


def _plain(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise OSError(errno.EINVAL, "not the name of a file", name)
    return name


def absent_is_empty() -> contextlib.AbstractContextManager[None]:
    """Suppresses the errors that say that a directory does not exist."""
    return ignoring(ABSENT)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], name: str) -> Iterator[Directory]:
    """Open the directory of this name below a path; without a name, that of the path. Raises OSError."""
    with Directory.at(path) as top:
        if not name:
            yield top
            return
        with top.below(name) as inside:
            yield inside
