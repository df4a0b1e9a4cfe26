"""The index of a namespace: what the heads of its records say, in one file, so that they need not all be read.

- The records override it. An entry counts if the file that it is of has the name, the size, the
  modification time and the inode that it had; and what it says of tokens and parent must make the address in that name.
  Whatever does not agree, the record's own head is read. Before a record is restored, all of it is checked as ever.
- A file that is damaged, cut off, of another namespace or not understood is as good as none, and is made anew.

    16 bytes   "onefold index 1\\n"
    16         XXH3 with 128 bits of all that follows
    32         the namespace's name
    8          how many entries, uint64
    entries    78 bytes each: see `_ENTRY`
    tokens     int32 each, of all entries in their order

No MLX in this file, and no file is touched.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers.records.record import ADDRESS_BYTES, Named, What, address_from

MAGIC = b"onefold index 1\n"
LEAST = 256
"""Heads that an index would have spared: from there on it is made anew."""
SHARE = 16
"""The same as a share of the records."""
_HEADER = struct.Struct("<32sQ")
_ENTRY = struct.Struct("<20s20sB?qIqqQ")
"""Its address; its parent's, and how long that is; whether it is hollow; start, tokens, size, modification time in
nanoseconds and inode."""
_MODIFIED, _MODIFIED_AT = struct.Struct("<q"), struct.calcsize("<20s20sB?qIq")
_BEGIN = len(MAGIC) + 16


class Stamp(NamedTuple):
    """By which a file is known again."""

    size: int
    modified: int
    """Nanoseconds since 1970."""
    inode: int


NO_STAMP = Stamp(-1, 0, 0)


class Said(NamedTuple):
    """The part of a record's head that a cache needs before it restores the record."""

    parent: bytes
    tokens: Tokens
    hollow: bool
    """A range that has tokens and no KV."""


class Indexed(NamedTuple):
    """A record, to be put into an index."""

    address: bytes
    start: int
    stamp: Stamp
    parent: bytes
    tokens: Tokens
    hollow: bool


class Index:
    """What a namespace's index says. One that could not be understood says nothing."""

    def __init__(self, namespace: str, data: bytes = b"") -> None:
        self._namespace = namespace
        self._data = data
        self._tokens: Tokens = np.empty(0, np.int32)
        """All of them: on their own, for trees refer to them afterwards."""
        self._entries: dict[bytes, tuple[int, tuple[int, int, int], bytes, bool, int, int]] = {}
        """By address: start, stamp, parent, whether it is hollow, where its tokens begin and end."""
        self.spared = 0
        """Heads that were found here."""
        if self._is_ours(data):
            self._parse()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, named: Named, stamp: Stamp) -> Said | None:
        """What a record's head says; None if that is not known of the file that there is now."""
        found = self._entries.get(named.address)
        if found is None or stamp == NO_STAMP:
            return None
        start, known, parent, hollow, first, stop = found
        is_range = named.what is What.RANGE
        if start != named.start or known != stamp or is_range != (first < stop) or (hollow and not is_range):
            return None
        tokens = self._tokens[first:stop]
        said = address_from(
            self._namespace,
            named.what,
            parent,
            start,
            tokens,
            hollow=hollow,
            version=named.version,
            after=named.after,
        )
        if said != named.address:
            return None
        self.spared += 1
        return Said(parent, tokens, hollow)

    def restamped(self, stamps: Mapping[bytes, Stamp]) -> bytes:
        """The same index, of files whose last use was written down meanwhile, by address: what else has happened to one
        (another inode, another size) leaves its entry as it was. Nothing if that changes nothing."""
        first, data, changed = _BEGIN + _HEADER.size, bytearray(self._data), False
        for i, (address, entry) in enumerate(self._entries.items()):
            known, now = entry[1], stamps.get(address)
            if now is not None and now != known and (now.size, now.inode) == (known[0], known[2]):
                _MODIFIED.pack_into(data, first + i * _ENTRY.size + _MODIFIED_AT, now.modified)
                changed = True
        data[len(MAGIC) : _BEGIN] = xxhash.xxh3_128_digest(memoryview(data)[_BEGIN:])
        return bytes(data) if changed else b""

    def is_stale(self, n_records: int) -> bool:
        """Whether it had better be made anew, now that so many records were looked for."""
        missed, dead = n_records - self.spared, len(self) - self.spared
        return max(missed, dead) >= max(LEAST, n_records // SHARE)

    def _is_ours(self, data: bytes) -> bool:
        if len(data) < _BEGIN + _HEADER.size or not data.startswith(MAGIC):
            return False
        return xxhash.xxh3_128_digest(memoryview(data)[_BEGIN:]) == data[len(MAGIC) : _BEGIN]

    def _parse(self) -> None:
        name, count = _HEADER.unpack_from(self._data, _BEGIN)
        first = _BEGIN + _HEADER.size
        at = first + count * _ENTRY.size
        if name != self._namespace.encode() or at > len(self._data):
            return
        entries, n = {}, 0
        for entry in _ENTRY.iter_unpack(memoryview(self._data)[first:at]):
            address, parent, n_parent, hollow, start, n_tokens, size, modified, inode = entry
            if n_parent not in (0, ADDRESS_BYTES):
                return
            entries[address] = (start, (size, modified, inode), parent[:n_parent], hollow, n, n := n + n_tokens)
        if at + 4 * n == len(self._data) and len(entries) == count:
            self._entries, self._tokens = entries, np.frombuffer(self._data[at:], "<i4")


def pack(namespace: str, entries: Iterable[Indexed]) -> bytes:
    """An index of these records, as it is written; of those whose files can be known again."""
    fixed, tokens = list[bytes](), [np.empty(0, np.int32)]
    for address, start, stamp, parent, own, hollow in entries:
        if stamp == NO_STAMP:
            continue
        fixed.append(_ENTRY.pack(address, parent, len(parent), hollow, start, len(own), *stamp))
        tokens.append(own)
    all_tokens = np.concatenate(tokens).astype("<i4", copy=False).tobytes()
    body = b"".join([_HEADER.pack(namespace.encode(), len(fixed)), *fixed, all_tokens])
    return MAGIC + xxhash.xxh3_128_digest(body) + body
