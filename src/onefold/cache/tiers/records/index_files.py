"""The index files of a folder's namespaces: read whole, replaced whole. What they hold is `index`'s to know.

No MLX in this file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any

from onefold.cache.tiers.records.directory import opened
from onefold.cache.tiers.records.files import replace
from onefold.cache.tiers.records.listing import INDEX, is_index
from onefold.cache.tiers.records.locking import FolderLock

INDEX_MOST = 1 << 28
"""Bytes; a longer one is not read."""


class IndexFiles:
    def __init__(self, path: Path, lock: FolderLock) -> None:
        self._path, self._lock = path, lock

    def read(self, namespace: str) -> bytes:
        """Returns the bytes of a namespace's index; none if it has none that can be read."""
        with contextlib.suppress(OSError), opened(self._path, namespace) as inside:
            held = inside.open(INDEX)
            try:
                found = os.fstat(held)
                if stat.S_ISREG(found.st_mode) and found.st_size <= INDEX_MOST:
                    with open(held, "rb", closefd=False) as file:
                        return file.read(INDEX_MOST)
            finally:
                os.close(held)
        return b""

    def write(self, namespace: str, data: Any) -> None:
        """Write a namespace's index in place of the one that there is; makes no folder. Raises OSError, and
        FileExistsError if a file that is no index has its name."""
        with self._lock.changing() as top, top.below(namespace) as inside:
            if inside.has(INDEX) and not is_index(inside):
                raise FileExistsError(errno.EEXIST, "another file has the index's name", INDEX)
            replace(inside, INDEX, [data])
