"""Verifying: a record's file is read whole, and everything that a cache would ask of it is asked.

- Its name, its header byte by byte, its size, its checksum, and that its tensors are what the namespace's layout says.
- A piece at a time: memory does not depend on the record. The file cache of the operating system lets go of it.
- What it goes on from is the census's to say.

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
from onefold.errors import RecordError

PIECE = 4 << 20


def verify(folder: Folder, entry: Entry, layout: Layout, read: Callable[[int], None]) -> None:
    """Raises RecordError if the record cannot be used, and OSError. `read` is told of bytes as they are read."""
    with folder.reading(entry.namespace, entry.name) as file:
        size = os.fstat(file).st_size
        head, content = read_content(file, entry.namespace, entry.named, size)
        data_at = head.data_at + content.tokens.nbytes
        read(data_at)
        if content.checksum(_pieces(file, data_at, size, read)) != head.checksum:
            raise RecordError("checksum")
    layout.require(content)


def _pieces(file: int, at: int, end: int, read: Callable[[int], None]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE, end - at)))
    while at < end:
        piece = buffer[: end - at]
        if read_all(file, [piece], at) != len(piece):
            raise RecordError("truncated")
        yield piece
        read(len(piece))
        at += len(piece)
