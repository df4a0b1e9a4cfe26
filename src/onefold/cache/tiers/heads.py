"""Reading the head of a record's file: what it says of itself, if that agrees with its name.

No MLX in this file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from onefold.cache.tiers.folder import Folder
from onefold.cache.tiers.record import (
    HEAD_MOST,
    Content,
    Head,
    Named,
    What,
    address_of,
    content_of,
    file_name,
    parse_head,
)
from onefold.errors import RecordError

_BEGIN = 8 << 10
_AHEAD = 16
"""Files that are open before their turn."""
_MOST = HEAD_MOST + (64 << 20)
"""No record of ours has so long a header and so many tokens; what says so is not read into memory."""


def read_head(file: int, namespace: str, named: Named, size: int) -> Head:
    """All that is asked of a record before it is restored. Raises RecordError and OSError."""
    found = parse_head(os.pread(file, _BEGIN, 0))
    while isinstance(found, int):
        if found > size:
            raise RecordError("truncated")
        if found > _MOST:
            raise RecordError("no header of ours")
        found = parse_head(os.pread(file, found, 0))
    if (found.what, found.start, address_of(found, namespace)) != named:
        raise RecordError("misnamed")
    if (found.what is What.RANGE) != bool(len(found.tokens)):
        raise RecordError("no header of ours")
    return found


class Wanted(NamedTuple):
    named: Named
    size: int


def read_heads(folder: Folder, namespace: str, wanted: Iterable[Wanted]) -> Iterator[Head | OSError | RecordError]:
    """Of many records of a namespace, in order, each when its turn comes: a head takes much more than what is
    kept of it. The next few files are open by then, and the device reads them meanwhile."""
    with contextlib.ExitStack() as held:
        try:
            opens = held.enter_context(folder.opening(namespace))
        except OSError as error:
            yield from (error for _ in wanted)
            return
        yield from _read_heads(opens, namespace, wanted)


def _read_heads(
    opens: Callable[[str], int], namespace: str, wanted: Iterable[Wanted]
) -> Iterator[Head | OSError | RecordError]:
    ahead: deque[tuple[Wanted, int | OSError]] = deque()
    try:
        for one in wanted:
            found = _begin(opens, one)
            if isinstance(found, OSError) and found.errno == errno.EMFILE:
                yield from _in_turn(namespace, ahead, 0)
                found = _begin(opens, one)
            ahead.append((one, found))
            yield from _in_turn(namespace, ahead, _AHEAD)
        yield from _in_turn(namespace, ahead, 0)
    finally:
        for _, held in ahead:
            if isinstance(held, int):
                os.close(held)


def _begin(opens: Callable[[str], int], one: Wanted) -> int | OSError:
    try:
        file = opens(file_name(*one.named))
    except OSError as error:
        return error
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # a pipe, say
            os.posix_fadvise(file, 0, _BEGIN, os.POSIX_FADV_WILLNEED)
    return file


def _in_turn(
    namespace: str, ahead: deque[tuple[Wanted, int | OSError]], most: int
) -> Iterator[Head | OSError | RecordError]:
    """The first of them, until there are no more than so many."""
    while len(ahead) > most:
        one, file = ahead.popleft()
        if isinstance(file, OSError):
            yield file
            continue
        try:
            found: Head | OSError | RecordError = read_head(file, namespace, one.named, one.size)
        except (OSError, RecordError) as error:
            found = error
        finally:
            os.close(file)
        yield found


def read_content(file: int, namespace: str, named: Named, size: int) -> tuple[Head, Content]:
    """What the file holds, which is as long as it says; its checksum is still to be compared."""
    head = read_head(file, namespace, named, size)
    content = content_of(head, namespace, named)
    if content.size != size:
        raise RecordError("truncated" if size < content.size else "too long")
    return head, content
