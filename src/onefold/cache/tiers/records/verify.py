"""Verifying: a record's file is read whole, and everything that a cache would ask of it is asked.

- Its name, its header byte by byte, its size, its checksum, and that its tensors are what the namespace's layout says.
- The file is read a piece at a time, so memory does not depend on its size, and then dropped from the file cache.
- Whether the record's parent is there is the census's business.

No MLX in this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from onefold.cache.tiers.records.census import Entry
from onefold.cache.tiers.records.files import read_all
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.heads import read_content
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.errors import RecordError

PIECE = 4 << 20


def verify(folder: Folder, entry: Entry, layout: Layout, read: Callable[[int], None]) -> None:
    """Read a record whole and check it. Calls `read` with the number of bytes as they are read. Raises RecordError if
    the record cannot be used, and OSError."""
    with folder.reading(entry.namespace, entry.name) as file:
        size = os.fstat(file).st_size
        head, content = read_content(file, entry.namespace, entry.named, size)
        data_at = head.data_at + content.tokens.nbytes
        read(data_at)
        if content.checksum(_pieces(file, data_at, size, read)) != head.checksum:
            raise RecordError(DiskReason.CHECKSUM)
    layout.require(content)


def _pieces(file: int, at: int, end: int, read: Callable[[int], None]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE, end - at)))
    while at < end:
        piece = buffer[: end - at]
        if read_all(file, [piece], at) != len(piece):
            raise RecordError(DiskReason.TRUNCATED)
        yield piece
        read(len(piece))
        at += len(piece)
