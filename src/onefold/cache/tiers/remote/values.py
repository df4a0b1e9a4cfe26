"""One value of a shared store: a head, KV, and a seal over both.

    "onefold\\x01" | length of the head, 4 bytes | head, JSON | payload | seal, 32 bytes

- The store is written by others, so nothing is believed before the seal agrees: HMAC-SHA256 with the secret that all
  machines share, over everything before it. Without a secret it is a checksum, which shows damage and no forgery.
- The name under which a value lies is part of what is sealed: a value that was copied to another name is rejected.
- JSON and bytes; nothing is unpickled. Sizes are compared before anything is allocated for them.
- Without a secret, numbers must be finite, too: what a model computes from one that is not is nonsense.

Knows nothing of stores.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from onefold.cache.tiers.remote.grid import HEAD_BYTES, VALUE_BYTES
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.errors import RecordError

MAGIC = b"onefold\x01"
SEAL_BYTES = 32
_LENGTH_BYTES = 4
_HEAD_AT = len(MAGIC) + _LENGTH_BYTES
_NO_SECRET = b"only a checksum:"
"""The first half of the seal of a value that was not sealed with a secret."""

_INFINITY = {"F16": (2, 0x7C00), "BF16": (2, 0x7F80), "F32": (4, 0x7F800000), "C64": (4, 0x7F800000)}
"""The bytes of a number of each type, and the bits of infinity: NaN has higher ones."""

Head = dict[str, Any]


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...
    def digest(self) -> bytes: ...


class _Checksum:
    """xxh3, which takes a hundredth of the time of SHA-256 where the processor has no instructions for that."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        self._digest.update(data)

    def digest(self) -> bytes:
        return _NO_SECRET + self._digest.digest()


class Sealing:
    """Seals values, and opens those that were sealed with the same secret."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self.has_secret = bool(secret)

    def seal(self, name: bytes, head: Mapping[str, Any], payload: Sequence[Any]) -> bytes:
        """Returns the value for `name`; `payload` are buffers. Raises ValueError if it would be too large."""
        text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
        begin = MAGIC + len(text).to_bytes(_LENGTH_BYTES, "little") + text
        if len(begin) > HEAD_BYTES - SEAL_BYTES:
            raise ValueError(f"a head of {len(begin)} bytes; at most {HEAD_BYTES - SEAL_BYTES} are possible")
        if len(begin) + sum(memoryview(part).nbytes for part in payload) + SEAL_BYTES > VALUE_BYTES:
            raise ValueError(f"a value of more than {VALUE_BYTES} bytes")
        digest = self._digest(name)
        for part in (begin, *payload):
            digest.update(part)
        return b"".join([begin, *payload, digest.digest()])

    def open(self, name: bytes, value: bytes | memoryview, wanted: Mapping[str, Any]) -> tuple[Head, memoryview]:
        """Returns the head and the payload of a value that was read under `name`. Raises RecordError with a
        `RemoteReason` unless its seal agrees and its head has all of `wanted`."""
        whole = memoryview(value)
        if len(whole) > VALUE_BYTES:
            raise RecordError(RemoteReason.TOO_LARGE)
        if len(whole) < _HEAD_AT + SEAL_BYTES:
            raise RecordError(RemoteReason.TRUNCATED)
        sealed = whole[:-SEAL_BYTES]
        digest = self._digest(name)
        digest.update(sealed)
        if not hmac.compare_digest(digest.digest(), bytes(whole[-SEAL_BYTES:])):
            raise RecordError(RemoteReason.SEAL)
        if sealed[: len(MAGIC)] != MAGIC:
            raise RecordError(RemoteReason.OTHER_FORMAT)
        length = int.from_bytes(sealed[len(MAGIC) : _HEAD_AT], "little")
        if length > len(sealed) - _HEAD_AT:
            raise RecordError(RemoteReason.TRUNCATED)
        head = _head(bytes(sealed[_HEAD_AT : _HEAD_AT + length]))
        if any(head.get(key) != expected for key, expected in wanted.items()):
            raise RecordError(RemoteReason.OTHER_LAYOUT)
        return head, sealed[_HEAD_AT + length :]

    def _digest(self, name: bytes) -> _Digest:
        digest: _Digest = hmac.new(self._secret, digestmod=hashlib.sha256) if self._secret else _Checksum()
        digest.update(len(name).to_bytes(_LENGTH_BYTES, "little") + name)
        return digest


def require_finite(dtype: str, data: Any, words: int = 0) -> None:
    """Raises RecordError if one of these numbers is infinite or NaN. With `words`, numbers are only in the last word of
    each so many, of 32 bits."""
    size, infinity = _INFINITY.get(dtype, (0, 0))
    if size and len(data):
        bits = np.frombuffer(np.frombuffer(data, "<u4")[words - 1 :: words].copy() if words else data, f"<u{size}")
        if bits.max() >= infinity | 1 << 8 * size - 1 or bits.view(f"<i{size}").max() >= infinity:
            raise RecordError(RemoteReason.NOT_FINITE)


def _head(text: bytes) -> Head:
    """Raises RecordError. Those who have the secret may still have another version."""
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(RemoteReason.OTHER_FORMAT) from error
    if not isinstance(head, dict):
        raise RecordError(RemoteReason.OTHER_FORMAT)
    return head
