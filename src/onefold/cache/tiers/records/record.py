"""The record: one safetensors file that holds a range of a segment, or a checkpoint (in words: `docs/disk-format.md`).

- An address is a hash chain: over the namespace, the parent's address, where the record begins in its path, and its
  tokens. So a record's name says what it must hold, and two paths never meet by accident.
- The header is a function of what the record holds and of one checksum, over the header itself (without it) and all
  that follows. A reader makes the header again from what it says, and compares: every byte is checked.
- Records of formats 1 to 3 are read; new ones are of format 2. There the tensors of a large record begin at a multiple
  of `PAGE`, so that they can be read in whole blocks of the disk.
- A point whose windows are stored in parts is of format 3. It may continue an earlier point, `after`, which has the
  entries before its own; both its name and its address have that point's address.
- What the bytes mean is not known here: they are tensors with a name, a type and a shape.

No MLX in this file, and no file is touched.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.errors import RecordError

VERSION = 2
"""The format of new records."""
PARTED = 3
"""The format of points whose windows are stored in parts."""
VERSIONS = (1, 2, PARTED)
"""The formats that are read."""
NAMESPACE_FORMAT = 1
"""Is part of every namespace's name. It does not change with the records' format, so both lie in one namespace."""
PAGE = 16 << 10
"""From format 2 on, the tensors of a large record begin at a multiple of this."""
PAGED_FROM = 256 << 10
"""Bytes of tensors from which on a record is large."""
_ALIGNMENT = 64
ADDRESS_BYTES = 20
SUFFIX = ".safetensors"
HEAD_MOST = 1 << 24
"""No header is longer: a length beyond it is not one of ours."""
OTHER_FORMAT = DiskReason.OTHER_FORMAT
FURTHEST = 1 << 31
"""No conversation is longer."""
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "C64": 8,
}  # fmt: skip


class What(enum.Enum):
    RANGE = "range"  # the KV of some tokens
    POINT = "point"  # the state of window and recurrent layers after a token


_KINDS = {what.value: what for what in What}
_ENDINGS = {what: f".{what.value}{SUFFIX}" for what in What}
_PERSONS = {What.RANGE: b"onefold range", What.POINT: b"onefold point"}
_VERSION_BYTES = {version: struct.pack("<I", version) for version in VERSIONS}
_MARKS = {1: "", 2: ".2", PARTED: f".{PARTED}"}
"""What a name has before its ending. A process that knows format 1 alone takes a name of format 2 for no record, and
leaves the file alone; and so on."""
_NUMBERS = {mark.removeprefix("."): version for version, mark in _MARKS.items()}
_FORMATS = {str(version): version for version in VERSIONS}


class Tensor(NamedTuple):
    name: str
    dtype: str
    """As safetensors calls it: F32, BF16, U32, ..."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


TYPE_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "complex64": "C64",
}  # fmt: skip
"""MLX's names of types, and those of safetensors."""


def range_tensors(layout: Iterable[Iterable[tuple[int, int, str]]], n_tokens: int) -> tuple[Tensor, ...]:
    """What a range of so many tokens is made of: for every layer its arrays, each given as heads, dimension and type
    (in MLX's words); heads first."""
    return tuple(
        Tensor(f"kv.{i}.{j}", TYPE_CODES[dtype], (heads, n_tokens, dim))
        for i, arrays in enumerate(layout)
        for j, (heads, dim, dtype) in enumerate(arrays)
    )


@dataclass(frozen=True)
class Content:
    """Everything about a record but its bytes."""

    what: What
    namespace: str
    parent: bytes
    """The address of the record that it continues; empty at the start of a path."""
    start: int
    """A range begins at this position, a point lies at it."""
    tokens: Tokens
    """A range's own; a point has none."""
    tensors: tuple[Tensor, ...]
    state: str = ""
    """For a point: a description of the state that the tensors are, as JSON."""
    version: int = VERSION
    after: bytes = b""
    """For a point of format 3: the address of the point whose windows its own continue; empty if they are whole."""

    @functools.cached_property
    def address(self) -> bytes:
        hollow = self.what is What.RANGE and not self.tensors
        return address_from(
            self.namespace,
            self.what,
            self.parent,
            self.start,
            self.tokens,
            hollow=hollow,
            version=self.version,
            after=self.after,
        )

    @property
    def name(self) -> str:
        return file_name(self.what, self.start, self.address, self.version, self.after)

    @property
    def is_state(self) -> bool:
        return is_state(self.what, self.version)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def payload_bytes(self) -> int:
        return self.tokens.nbytes + sum(t.nbytes for t in self.tensors)

    @functools.cached_property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self.header()) + self.payload_bytes

    def checksum(self, payload: Iterable[Any]) -> str:
        """Over the header without it, the tokens, and the bytes of the tensors, in order."""
        digest = xxhash.xxh3_128(self.header())
        digest.update(np.ascontiguousarray(self.tokens, "<i4").data)
        for part in payload:
            digest.update(part)
        return digest.hexdigest()

    def header(self, checksum: str = "0" * 32) -> bytes:
        blank = self._header
        at = blank.index(_CHECKSUM) + len(_CHECKSUM)
        return blank[:at] + checksum.encode() + blank[at + 32 :]

    @functools.cached_property
    def _header(self) -> bytes:
        described: dict[str, object] = {
            "__metadata__": {
                "onefold": str(self.version),
                "what": self.what.value,
                "namespace": self.namespace,
                "parent": self.parent.hex(),
                **({"after": self.after.hex()} if self.version == PARTED else {}),
                "start": str(self.start),
                "tokens": str(len(self.tokens)),
                "tensors": str(len(self.tensors)),
                "checksum": "0" * 32,
                "state": self.state,
            }
        }
        at = 0
        for tensor in (Tensor("tokens", "I32", (len(self.tokens),)), *self.tensors):
            offsets = [at, at := at + tensor.nbytes]
            described[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(described, separators=(",", ":"), allow_nan=False).encode()
        text += b" " * self._padding(8 + len(text))
        return struct.pack("<Q", len(text)) + text

    def _padding(self, n_bytes: int) -> int:
        """Returns how many spaces follow so many bytes of header: up to `_ALIGNMENT`, or so many that the first tensor
        of a large record begins at a multiple of `PAGE`."""
        tokens = self.tokens.nbytes
        if self.version == 1 or self.payload_bytes - tokens < PAGED_FROM:
            return -n_bytes % _ALIGNMENT
        return -(n_bytes + tokens) % PAGE


class Head(NamedTuple):
    """What the first bytes of a file say, before any of it was checked."""

    what: What
    parent: bytes
    start: int
    tokens: Tokens
    checksum: str
    data_at: int
    """Where the header ends."""
    n_tensors: int
    """Beside the tokens."""
    state: str
    header: bytes
    """All of it, as it is."""
    rest: str
    """The last part of the header: the tensors."""
    version: int
    after: bytes = b""

    @property
    def hollow(self) -> bool:
        """A range that has tokens and no KV."""
        return self.what is What.RANGE and self.n_tensors == 0


def address_of(head: Head, namespace: str) -> bytes:
    return address_from(
        namespace,
        head.what,
        head.parent,
        head.start,
        head.tokens,
        hollow=head.hollow,
        version=head.version,
        after=head.after,
    )


def address_from(
    namespace: str,
    what: What,
    parent: bytes,
    start: int,
    tokens: Tokens,
    *,
    hollow: bool,
    version: int,
    after: bytes = b"",
) -> bytes:
    """A range without KV has another than one of the same tokens that has it: both may be there."""
    hashed = b"%b%b\0%c%b%b%b" % (
        _VERSION_BYTES[version], namespace.encode(), len(parent), parent, start.to_bytes(8, "little", signed=True),
        tokens.astype("<i4", copy=False).tobytes(),
    )  # fmt: skip
    if version == PARTED:
        hashed += b"%c%b" % (len(after), after)
    person = b"onefold hollow" if hollow else _PERSONS[what]
    return hashlib.blake2b(hashed, digest_size=ADDRESS_BYTES, person=person).digest()


def is_state(what: What, version: int) -> bool:
    """Whether a record is a point that is whole: a state that cannot be cut, or windows that continue no other's."""
    return what is What.POINT and version != PARTED


def file_name(what: What, start: int, at: bytes, version: int = VERSION, after: bytes = b"") -> str:
    follows = f"-{after.hex()}" if after else ""
    return f"{start:08d}-{at.hex()}{_MARKS[version]}{follows}{_ENDINGS[what]}"


class Named(NamedTuple):
    """What a file's name says."""

    what: What
    start: int
    address: bytes
    version: int = VERSION
    after: bytes = b""


def parse_name(name: str) -> Named | None:
    """None if it is not the name of a record, or of one whose format is not known here."""
    found = _NAME.fullmatch(name)
    if found is None or (start := int(found[1])) > FURTHEST:
        return None
    what, version, after = _KINDS[found[5]], _NUMBERS[found[3] or ""], bytes.fromhex(found[4] or "")
    if (after and version != PARTED) or (version == PARTED and what is not What.POINT):
        return None
    return Named(what, start, bytes.fromhex(found[2]), version, after)


_HEX = rf"[0-9a-f]{{{2 * ADDRESS_BYTES}}}"
_NAME = re.compile(
    rf"([0-9]{{8}}|[1-9][0-9]{{8,9}})-({_HEX})(?:\.([23])(?:-({_HEX}))?)?\.(range|point)" + re.escape(SUFFIX)
)
_CHECKSUM = b'"checksum":"'
_DECODER = json.JSONDecoder()
_OPENING = '{"__metadata__":'


def parse_head(begin: bytes) -> Head | int:
    """Read a file's first bytes; an integer says how many of them are needed."""
    if len(begin) < 8:
        raise RecordError(DiskReason.TRUNCATED)
    (length,) = struct.unpack_from("<Q", begin)
    if not 2 <= length <= HEAD_MOST:
        raise RecordError(DiskReason.NO_HEADER)
    data_at = 8 + length
    if len(begin) < data_at:
        return data_at
    try:
        text = begin[8:data_at].decode()
        if not text.startswith(_OPENING):
            raise RecordError(DiskReason.NO_HEADER)
        fields, end = _DECODER.raw_decode(text, len(_OPENING))
        if (version := _FORMATS.get(fields["onefold"])) is None:
            raise RecordError(OTHER_FORMAT)
        what, parent = _KINDS[fields["what"]], bytes.fromhex(fields["parent"])
        after = bytes.fromhex(fields["after"]) if version == PARTED else b""
        start, n_tokens, n_tensors = int(fields["start"]), int(fields["tokens"]), int(fields["tensors"])
        found, state = str(fields["checksum"]), str(fields["state"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise RecordError(DiskReason.NO_HEADER) from error
    if not 0 <= start <= FURTHEST or not 0 <= n_tokens <= FURTHEST or {len(parent), len(after)} - {0, ADDRESS_BYTES}:
        raise RecordError(DiskReason.NO_HEADER)
    if len(begin) < data_at + 4 * n_tokens:
        return data_at + 4 * n_tokens
    tokens = np.frombuffer(begin, "<i4", n_tokens, data_at).astype(np.int32)
    rest = text[end:]
    return Head(what, parent, start, tokens, found, data_at, n_tensors, state, begin[:data_at], rest, version, after)


def content_of(head: Head, namespace: str, named: Named) -> Content:
    """What a file says that it holds, if that agrees with its name; its checksum is still to be compared."""
    content = Content(
        head.what, namespace, head.parent, head.start, head.tokens, _tensors(head), head.state, head.version, head.after
    )
    if (content.what, content.start, content.address, content.version, content.after) != named:
        raise RecordError(DiskReason.MISNAMED)
    if content.header(head.checksum) != head.header:
        raise RecordError(DiskReason.NO_HEADER)
    return content


def _tensors(head: Head) -> tuple[Tensor, ...]:
    try:
        described = json.loads("{" + head.rest.lstrip().removeprefix(","))
        found = [(n, str(d["dtype"]), tuple(int(x) for x in d["shape"])) for n, d in described.items()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RecordError(DiskReason.NO_HEADER) from error
    if any(d not in ITEM_BYTES or min(shape, default=0) < 0 for _, d, shape in found):
        raise RecordError(DiskReason.NO_HEADER)
    return tuple(Tensor(*t) for t in found if t[0] != "tokens")
