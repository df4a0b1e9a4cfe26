"""Reading the head of a record's file: what it says of itself, if that agrees with its name.

No MLX in this file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from onefold.cache.tiers.records import system
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.index import NO_STAMP, Index, Said, Stamp
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import (
    HEAD_MOST,
    PAGE,
    Content,
    Head,
    Named,
    What,
    address_from,
    address_of,
    content_of,
    file_name,
    parse_head,
)
from onefold.errors import RecordError

_BEGIN = PAGE
"""The header and the tokens of nearly every record are no longer."""
_PLAIN = re.compile(
    rb'\{"__metadata__":\{"onefold":"([0-9])","what":"range","namespace":"[0-9a-f]{32}","parent":"((?:[0-9a-f]{40})?)",'
    rb'"start":"([0-9]{1,10})","tokens":"([0-9]{1,10})","tensors":"([0-9]{1,7})","checksum":"[0-9a-f]{32}","state":""\}'
)
"""How the header of a range begins."""
_AHEAD = 16
"""Files that are open before their turn."""
_MOST = HEAD_MOST + (64 << 20)
"""No record of ours has so long a header and so many tokens; what says so is not read into memory."""


def read_head(file: int, namespace: str, named: Named, size: int) -> Head:
    """All that is asked of a record before it is restored. Raises RecordError and OSError."""
    found = parse_head(system.chosen.read_head(file, _BEGIN))
    while isinstance(found, int):
        if found > size:
            raise RecordError(DiskReason.TRUNCATED)
        if found > _MOST:
            raise RecordError(DiskReason.NO_HEADER)
        found = parse_head(system.chosen.read_head(file, found))
    if (found.what, found.start, address_of(found, namespace), found.version, found.after) != named:
        raise RecordError(DiskReason.MISNAMED)
    if (found.what is What.RANGE) != bool(len(found.tokens)):
        raise RecordError(DiskReason.NO_HEADER)
    return found


class Wanted(NamedTuple):
    named: Named
    size: int
    stamp: Stamp = NO_STAMP


def read_said(file: int, namespace: str, named: Named, size: int) -> Said:
    """The same as `read_head`, of which only that is kept which a tree needs. Raises RecordError and OSError."""
    begin = system.chosen.read_head(file, _BEGIN)
    plain = _plain(begin, namespace, named)
    if plain is not None:
        return plain
    head = read_head(file, namespace, named, size)
    return Said(head.parent, head.tokens, head.hollow)


def _plain(begin: bytes, namespace: str, named: Named) -> Said | None:
    """What nearly every range's first bytes say, without the cost of JSON; None if they had better be looked at
    closely."""
    data_at = 8 + int.from_bytes(begin[:8], "little")
    found = _PLAIN.match(begin, 8) if named.what is What.RANGE and data_at <= len(begin) else None
    if found is None or found.end() > data_at or not begin[8:data_at].isascii():
        return None
    version, start, n_tokens, n_tensors = int(found[1]), int(found[3]), int(found[4]), int(found[5])
    parent, hollow = bytes.fromhex(found[2].decode()), n_tensors == 0
    end = data_at + 4 * n_tokens
    if not n_tokens or end > len(begin) or (start, version) != (named.start, named.version):
        return None
    tokens = np.frombuffer(begin[data_at:end], "<i4")
    if address_from(namespace, What.RANGE, parent, start, tokens, hollow=hollow, version=version) != named.address:
        return None
    return Said(parent, tokens, hollow)


def read_heads(
    folder: Folder, namespace: str, wanted: Iterable[Wanted], index: Index
) -> Iterator[Said | OSError | RecordError]:
    """Yields for each record of `wanted`, in order, what the index says, or else the head of its file. Opens the next
    few files ahead, so that the device reads them meanwhile."""
    with contextlib.ExitStack() as held:
        try:
            opens = held.enter_context(folder.opening(namespace))
        except OSError as error:
            yield from (error for _ in wanted)
            return
        yield from _read_heads(opens, namespace, wanted, index)


def _read_heads(
    opens: Callable[[str], int], namespace: str, wanted: Iterable[Wanted], index: Index
) -> Iterator[Said | OSError | RecordError]:
    ahead: deque[tuple[Wanted, int | Said | OSError]] = deque()
    try:
        for one in wanted:
            known = index.find(one.named, one.stamp)
            if known is not None and not ahead:
                yield known
                continue
            found = _begin(opens, one) if known is None else known
            if isinstance(found, OSError) and found.errno == errno.EMFILE:
                while ahead:
                    yield _end(namespace, *ahead.popleft())
                found = _begin(opens, one)
            ahead.append((one, found))
            if len(ahead) > _AHEAD:
                yield _end(namespace, *ahead.popleft())
        while ahead:
            yield _end(namespace, *ahead.popleft())
    finally:
        for _, held in ahead:
            if isinstance(held, int):
                os.close(held)


def _begin(opens: Callable[[str], int], one: Wanted) -> int | OSError:
    try:
        file = opens(file_name(*one.named))
    except OSError as error:
        return error
    system.chosen.expect_head(file, _BEGIN)
    return file


def _end(namespace: str, one: Wanted, file: int | Said | OSError) -> Said | OSError | RecordError:
    if not isinstance(file, int):
        return file
    try:
        return read_said(file, namespace, one.named, one.size)
    except (OSError, RecordError) as error:
        return error
    finally:
        os.close(file)


def read_content(file: int, namespace: str, named: Named, size: int) -> tuple[Head, Content]:
    """What the file holds, which is as long as it says; its checksum is still to be compared."""
    head = read_head(file, namespace, named, size)
    content = content_of(head, namespace, named)
    if content.size != size:
        raise RecordError(DiskReason.TRUNCATED if size < content.size else "too long")
    return head, content
