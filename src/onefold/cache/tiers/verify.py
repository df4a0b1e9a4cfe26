"""Verifying: a record's file is read whole, and everything that a cache would ask of it is asked.

- Its name, its header byte by byte, its size, its checksum, and that its tensors are what such a record has.
- A piece at a time: memory does not depend on the record. The file cache of the operating system lets go of it.
- What it goes on from is the census's to say.

No MLX in this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from onefold.cache.tiers.census import Entry
from onefold.cache.tiers.folder import Folder, read_all
from onefold.cache.tiers.heads import read_content
from onefold.cache.tiers.record import Content, Tensor, What, range_tensors
from onefold.errors import RecordError

PIECE = 4 << 20


def verify(folder: Folder, entry: Entry, about: dict[str, Any], read: Callable[[int], None]) -> None:
    """Raises RecordError if the record cannot be used, and OSError. `read` is told of bytes as they are read."""
    with folder.reading(entry.namespace, entry.name) as file:
        size = os.fstat(file).st_size
        head, content = read_content(file, entry.namespace, entry.named, size)
        data_at = head.data_at + content.tokens.nbytes
        read(data_at)
        if content.checksum(_pieces(file, data_at, size, read)) != head.checksum:
            raise RecordError("checksum")
    _require_tensors(content, about)


def _pieces(file: int, at: int, end: int, read: Callable[[int], None]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE, end - at)))
    while at < end:
        piece = buffer[: end - at]
        if read_all(file, [piece], at) != len(piece):
            raise RecordError("truncated")
        yield piece
        read(len(piece))
        at += len(piece)


def _require_tensors(content: Content, about: dict[str, Any]) -> None:
    if content.what is What.POINT:
        if _named_in_state(content) != {t.name for t in content.tensors}:
            raise RecordError("no header of ours")
    elif content.tensors:
        expected = _range_tensors(about.get("layout"), len(content.tokens))
        if expected is not None and content.tensors != expected:
            raise RecordError("of another layout")


def _named_in_state(content: Content) -> set[str]:
    try:
        said = json.loads(content.state)
        position, leaves = int(said["position"]), said["leaves"]
        slots = [[] if leaf is None else leaf["slots"] for leaf in leaves]
        found = {f"state.{i}.{j}" for i, used in enumerate(slots) for j, is_used in enumerate(used) if is_used}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise RecordError("no header of ours") from error
    if position != content.start:
        raise RecordError("of another layout")
    return found


def _range_tensors(layout: Any, n_tokens: int) -> tuple[Tensor, ...] | None:
    """What a range of that namespace is made of; None if its `about.json` does not say."""
    try:
        told = [[(int(h), int(d), str(t).rpartition(".")[2]) for h, d, t in arrays] for arrays in layout]
        return range_tensors(told, n_tokens)
    except (TypeError, ValueError, KeyError):
        return None
