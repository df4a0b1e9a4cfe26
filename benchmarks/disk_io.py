"""How fast a disk is read and flushed by the calls that records use, on Linux and on macOS. Needs no model.

    python benchmarks/disk_io.py FOLDER [MEGABYTES]

- Reading: a file in pieces of 8 MiB, each into 512 parts, as a record of a large model. Scattered: `preadv` straight
  into the parts, from a position that is no multiple of 16 KiB (format 1). Staged: whole blocks of 16 KiB into a
  buffer, and from there into the parts (format 2). Both with and without F_NOCACHE, which macOS alone has.
- Flushing: milliseconds after 8 MB were written to a new file, the median of some.

What a system does not have is named and skipped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from onefold.cache.tiers.records.files import write_all
from onefold.cache.tiers.records.system import BLOCK, F_BARRIERFSYNC, F_FULLFSYNC, F_NOCACHE, Darwin, Posix

MEGABYTES = 256
PIECE = 8 << 20
PARTS = 512
UNALIGNED = BLOCK // 2 + 64
"""Where a payload of format 1 may begin."""
FLUSHED_BYTES = 8 * 1000 * 1000
REPEATS = 5
ON_MACOS = sys.platform == "darwin"
READS: dict[str, tuple[Posix | Darwin, int, bool]] = {
    "read scattered": (Posix(), UNALIGNED, False),
    "read scattered, F_NOCACHE": (Posix(), UNALIGNED, True),
    "read staged": (Darwin(), BLOCK, False),
    "read staged, F_NOCACHE": (Darwin(), BLOCK, True),
}
"""By name: how, from which position on, and whether past the file cache."""
FLUSHES: dict[str, Callable[[int], object]] = {
    "fsync": os.fsync,
    "F_BARRIERFSYNC": lambda held: fcntl.fcntl(held, F_BARRIERFSYNC),
    "F_FULLFSYNC": lambda held: fcntl.fcntl(held, F_FULLFSYNC),
}
_REFUSED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)


def main(folder: str | os.PathLike[str], megabytes: int = MEGABYTES) -> dict[str, float]:
    """Measure the disk of a folder, print a line for each figure, and return them by name: GB/s of reads, milliseconds
    of flushes. What was skipped is not among them. Raises OSError if the folder cannot be written."""
    path = Path(folder) / f"onefold-disk-io-{os.getpid()}"
    found: dict[str, float] = {}
    try:
        for name, (how, at, past_cache) in READS.items():
            if past_cache and not ON_MACOS:
                print(f"{name}: skipped, only on macOS")
                continue
            found[name] = _read(path, how, at, max(1, megabytes * 1000 * 1000 // PIECE), past_cache=past_cache)
            print(f"{name}: {found[name]:.2f} GB/s")
        for name, flush in FLUSHES.items():
            if name != "fsync" and not ON_MACOS:
                print(f"{name}: skipped, only on macOS")
                continue
            try:
                found[name] = statistics.median(_flush(path, flush) for _ in range(REPEATS))
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                print(f"{name}: skipped, the file system has no such command")
                continue
            print(f"{name}: {found[name]:.1f} ms after {FLUSHED_BYTES // 1000**2} MB")
    finally:
        path.unlink(missing_ok=True)
    return found


def _read(path: Path, how: Posix | Darwin, at: int, n_pieces: int, *, past_cache: bool) -> float:
    """Returns GB/s of reading a new file of so many pieces, which begin at that position."""
    _write(path, at, n_pieces)
    places = [np.zeros(PIECE // PARTS, np.uint8) for _ in range(PARTS)]
    held = os.open(path, os.O_RDONLY)
    try:
        if past_cache:
            fcntl.fcntl(held, F_NOCACHE, 1)
        began = time.perf_counter()
        for i in range(n_pieces):
            if how.read(held, places, at + i * PIECE) != PIECE:
                raise OSError(errno.EIO, "the file is shorter than it was written", str(path))
        return n_pieces * PIECE / (time.perf_counter() - began) / 1e9
    finally:
        os.close(held)


def _write(path: Path, at: int, n_pieces: int) -> None:
    """Write the file, and have the system drop it from its file cache."""
    piece = np.random.default_rng(0).integers(0, 256, PIECE, np.uint8)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    held = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if ON_MACOS:
            fcntl.fcntl(held, F_NOCACHE, 1)
        write_all(held, [bytes(at), *[piece] * n_pieces])
        os.fsync(held)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(held)


def _flush(path: Path, flush: Callable[[int], object]) -> float:
    """Returns the milliseconds of a flush after 8 MB were written to a new file."""
    data = np.random.default_rng(0).integers(0, 256, FLUSHED_BYTES, np.uint8)
    path.unlink(missing_ok=True)
    held = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(held, [data])
        began = time.perf_counter()
        flush(held)
        return 1000 * (time.perf_counter() - began)
    finally:
        os.close(held)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python benchmarks/disk_io.py FOLDER [MEGABYTES]")
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else MEGABYTES)
