"""Which errors of files are passing, which concern one file, and which end the use of a folder.

No MLX in this file.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
PASSING = (errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.ENOMEM)
"""Errors of a write that the disk did not cause."""
MISPLACED = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP)
"""Errors of a write that concern one file only: something else has its name."""
LOGGED_MOST = 10
"""Records, rejected or unreadable, that a warning names; all are counted."""


@contextlib.contextmanager
def ignoring(codes: tuple[int, ...]) -> Iterator[None]:
    """Suppresses OSErrors with these codes."""
    try:
        yield
    except OSError as error:
        if error.errno not in codes:
            raise


def is_passing(error: Exception) -> bool:
    """Whether an error of a read says nothing about the file: the next read may succeed."""
    return isinstance(error, OSError) and error.errno not in _GONE


def reason_of(error: Exception) -> str:
    """Returns the reason for rejecting a record that could not be read, or failed a check."""
    return "unreadable" if isinstance(error, OSError) else str(error)
