"""The lock of a cache folder: one process writes there at a time.

- The lock is an flock on the file `lock`; it ends with the process, however that ends. The file names its holder.
- Every write and removal uses `changing`, which refuses a folder that is not the one that was locked: it may have been
  deleted, and made anew by another process.
- A child process does not inherit the lock, which would otherwise outlive the parent.

No MLX in this file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from onefold.cache.tiers.records.directory import Directory, absent_is_empty
from onefold.errors import FolderInUse

LOCK = "lock"
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_LOCK_SECONDS = 0.2
"""How long the lock is waited for: a process that asks who holds it has it for an instant."""
_ALL: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None
        _ALL.add(self)

    def take(self, top: Directory) -> None:
        """Lock the folder, which is open as `top`. Raises OSError, and FolderInUse if another process has it locked."""
        held = top.open(LOCK, os.O_RDWR | os.O_CREAT)
        try:
            if not _locked(held, time.monotonic() + _LOCK_SECONDS):
                holder = _named_in(held) or "another process"
                raise FolderInUse(
                    f"{self._path} is in use by {holder}, and one process writes a cache folder at a time: "
                    "end that process, or use another folder"
                )
        except (OSError, FolderInUse):
            os.close(held)
            raise
        self._held = held
        with contextlib.suppress(OSError):  # the text is for people: a full disk can still be read from
            os.ftruncate(held, 0)
            os.pwrite(held, f"process {os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Unlock the folder, if this object has it locked."""
        if self._held is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._held, 0)
            self.forget()

    def forget(self) -> None:
        """Close the lock file, and leave its text as it is."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @contextlib.contextmanager
    def changing(self) -> Iterator[Directory]:
        """Open the folder, to write or remove something there. Raises OSError (ESTALE) if it is not the folder that
        was locked."""
        with contextlib.ExitStack() as held:
            locked: Directory | None = None
            with absent_is_empty():
                top = held.enter_context(Directory.at(self._path))
                if self._held is not None and os.path.samestat(os.fstat(self._held), top.stat(LOCK)):
                    locked = top
            if locked is None:
                raise OSError(errno.ESTALE, "its lock is gone: the folder was removed, or made anew by another process")
            yield locked

    def holder(self) -> str:
        """Returns which process has the folder locked, as "process 123"; nothing if none has. Raises OSError."""
        try:
            with Directory.at(self._path) as top:
                held = top.open(LOCK)
        except FileNotFoundError:
            return ""
        try:
            named = _named_in(held)
            if named:  # a holder writes its name at once; without a name, do not disturb one that is starting
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return ""
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return named
        finally:
            os.close(held)


def _locked(held: int, until: float) -> bool:
    """Lock this file. Returns False if another process has it locked until then. Raises OSError."""
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


def _forked() -> None:
    """In a child process: close its copies of the locks."""
    for lock in _ALL:
        lock.forget()


os.register_at_fork(after_in_child=_forked)
