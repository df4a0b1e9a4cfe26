"""The calls that differ between operating systems: reading a record, and making a file durable. Two policies.

    Posix    Linux and others   reads straight into place; fsync of each file, and of its folder after the rename
    Darwin   macOS              reads whole blocks through a staging buffer, past the file cache; a barrier for each
                                file before its rename, and one full flush of the device for many files

On macOS fsync does not empty the device's own cache, and F_FULLFSYNC, which does, takes many milliseconds. A barrier
(F_BARRIERFSYNC) orders writes: what follows it reaches the disk only after what went before. So a record that has its
name is complete there too, after a power loss as well, though the latest ones may be missing.

`chosen` is this system's policy; tests replace it. No MLX in this file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from onefold.cache.tiers.records.faults import ignoring

BLOCK = 16 << 10
"""Reads on macOS begin at a multiple of this in the file, and have a multiple of this as their length."""
STAGE_BYTES = 4 << 20
"""The size of a staging buffer."""
KEPT = 2
"""Staging buffers that are kept for the next read."""
IOV_MOST = 512
PIECE_MOST = 2 << 20

F_RDADVISE, F_NOCACHE, F_FULLFSYNC, F_BARRIERFSYNC = 44, 48, 51, 85
"""Commands of macOS's fcntl."""
_REFUSED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)
"""What a file system says that has no such command."""
_UNFLUSHED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS, errno.EACCES)
"""What a file system says that cannot flush a directory."""


class System(Protocol):
    """All methods take an open file's descriptor, and raise OSError unless they only advise."""

    @property
    def flushes_later(self) -> bool:
        """Whether a file is safe from a power loss only after `flush_device`."""
        ...

    def expect_head(self, held: int, n_bytes: int) -> None:
        """Tell the system that so many bytes at the beginning of a file are about to be read."""
        ...

    def expect_all(self, held: int) -> None:
        """Tell the system that all of a file is about to be read, once."""
        ...

    def expect_writes(self, held: int) -> None:
        """Tell the system that a file is about to be written, and not read soon."""
        ...

    def forget(self, held: int) -> None:
        """Ask the system to drop a file from its file cache."""
        ...

    def read_head(self, held: int, n_bytes: int) -> bytes:
        """Returns at least so many bytes from the beginning of a file, or all that it has."""
        ...

    def read(self, held: int, parts: Sequence[Any], at: int) -> int:
        """Fill `parts` from position `at` of a file. Returns how many bytes the file had for them."""
        ...

    def staged_bytes(self, size: int) -> int:
        """Returns how much memory reading a file of this size takes in addition to the parts."""
        ...

    def free_stages(self) -> None:
        """Free the memory that is kept for the next `read`."""
        ...

    def flush_file(self, held: int) -> None:
        """After this a file may be renamed: a file that has its new name is complete."""
        ...

    def flush_directory(self, held: int) -> None:
        """What was made, renamed and removed in a directory is durable, unless the system `flushes_later`."""
        ...

    def push_directory(self, held: int) -> None:
        """Give the device what was made, renamed and removed in a directory, if the system `flushes_later`."""
        ...

    def flush_device(self, held: int) -> None:
        """Make durable all that the device of this directory was given before, and the directory, if the system
        `flushes_later`."""
        ...


class Calls:
    """The system calls that a policy makes. A test can record them."""

    def control(self, held: int, command: int, value: int | bytes = 0) -> None:
        fcntl.fcntl(held, command, value)

    def fsync(self, held: int) -> None:
        os.fsync(held)

    def read_head(self, held: int, n_bytes: int) -> bytes:
        return os.pread(held, n_bytes, 0)

    def read(self, held: int, parts: Sequence[memoryview], at: int) -> int:
        return os.preadv(held, parts, at)


class Posix:
    flushes_later = False

    def expect_head(self, held: int, n_bytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # a pipe, say
                os.posix_fadvise(held, 0, n_bytes, os.POSIX_FADV_WILLNEED)

    def expect_all(self, held: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(held, 0, 0, os.POSIX_FADV_WILLNEED)

    def expect_writes(self, held: int) -> None:
        """Nothing to do: `forget` drops what was written."""

    def forget(self, held: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_head(self, held: int, n_bytes: int) -> bytes:
        return os.pread(held, n_bytes, 0)

    def read(self, held: int, parts: Sequence[Any], at: int) -> int:
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

    def staged_bytes(self, size: int) -> int:
        return 0

    def free_stages(self) -> None:
        """Nothing is kept."""

    def flush_file(self, held: int) -> None:
        os.fsync(held)

    def flush_directory(self, held: int) -> None:
        with ignoring(_UNFLUSHED):
            os.fsync(held)

    def push_directory(self, held: int) -> None:
        """Nothing to do: `flush_directory` did it."""

    def flush_device(self, held: int) -> None:
        """Nothing to do: each file, and each directory, is durable."""


class Darwin:
    flushes_later = True

    def __init__(self, calls: Calls | None = None) -> None:
        self._calls = calls or Calls()
        self._free: deque[mmap.mmap] = deque()

    def expect_head(self, held: int, n_bytes: int) -> None:
        with contextlib.suppress(OSError):
            self._calls.control(held, F_RDADVISE, struct.pack("=qi4x", 0, n_bytes))

    def expect_all(self, held: int) -> None:
        with contextlib.suppress(OSError):  # it is advice
            self._calls.control(held, F_NOCACHE, 1)

    def expect_writes(self, held: int) -> None:
        with contextlib.suppress(OSError):
            self._calls.control(held, F_NOCACHE, 1)

    def forget(self, held: int) -> None:
        """Nothing to do: F_NOCACHE kept it out."""

    def read_head(self, held: int, n_bytes: int) -> bytes:
        return self._calls.read_head(held, _up(n_bytes))

    def read(self, held: int, parts: Sequence[Any], at: int) -> int:
        """Whole blocks, into a staging buffer that begins at a page, and from there into the parts: a read that begins
        or ends inside a block is not done past the file cache, and without that there is no read-ahead."""
        left = _pieces(parts)
        begin, end = at, min(at + sum(map(len, left)), os.fstat(held).st_size)
        with self._stage() as stage:
            while at < end:
                first = at // BLOCK * BLOCK
                n_bytes = min(len(stage), _up(end) - first)
                done = self._fill(held, stage[:n_bytes], first, enough=end - first)
                if first + done <= at:
                    break
                _scatter(stage[at - first : min(done, end - first)], left)
                at = min(first + done, end)
        return at - begin

    def _fill(self, held: int, stage: memoryview, first: int, *, enough: int) -> int:
        """Fill the buffer from position `first`, or its first `enough` bytes. Returns how many bytes there were."""
        total = 0
        while total < min(len(stage), enough):
            done = self._calls.read(held, [stage[total:]], first + total)
            if done == 0:
                break
            total += done
        return total

    @contextlib.contextmanager
    def _stage(self) -> Iterator[memoryview]:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = mmap.mmap(-1, STAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        try:
            with memoryview(buffer) as stage:
                yield stage
        finally:
            if len(self._free) < KEPT:
                self._free.append(buffer)

    def staged_bytes(self, size: int) -> int:
        return min(_up(size), STAGE_BYTES)

    def free_stages(self) -> None:
        self._free.clear()

    def flush_file(self, held: int) -> None:
        if not self._accepts(held, F_BARRIERFSYNC) and not self._accepts(held, F_FULLFSYNC):
            self._calls.fsync(held)

    def flush_directory(self, held: int) -> None:
        """Nothing to do: `flush_device` makes it durable."""

    def push_directory(self, held: int) -> None:
        with ignoring(_UNFLUSHED):
            self._calls.fsync(held)

    def flush_device(self, held: int) -> None:
        with ignoring(_UNFLUSHED):
            if not self._accepts(held, F_FULLFSYNC):
                self._calls.fsync(held)

    def _accepts(self, held: int, command: int) -> bool:
        """Give a command. Returns False if the file system does not have it. Raises OSError if it failed."""
        try:
            self._calls.control(held, command)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return False
        return True


def _up(n_bytes: int) -> int:
    return -(-n_bytes // BLOCK) * BLOCK


def _pieces(parts: Sequence[Any]) -> list[memoryview]:
    """Returns views of the parts, the last first, short enough that a system call takes `IOV_MOST` of them at once."""
    found = []
    for part in parts:
        view = memoryview(part).cast("B")
        found += [view[i : i + PIECE_MOST] for i in range(0, len(view), PIECE_MOST)]
    return found[::-1]


def _scatter(data: memoryview, left: list[memoryview]) -> None:
    """Copy bytes to the parts that are left, the last first; takes away what is filled."""
    while data:
        part = left[-1]
        n = min(len(part), len(data))
        part[:n] = data[:n]
        data = data[n:]
        if n == len(part):
            left.pop()
        else:
            left[-1] = part[n:]


chosen: System = Darwin() if sys.platform == "darwin" else Posix()
"""The policy of this system."""
