"""Where the records of a shared store begin and end, and what they are called there.

A reader computes the names of all records of its prompt from its own tokens, so nothing is listed:

    tokens    [ 0 .. G )[ G .. 2G )[ 2G .. 3G ).. the rest, less than G tokens, is computed again
    address   a0 ------> a1 -------> a2           SHA-256 of the address before and the record's own tokens
              ^ HMAC of what tells this cache's KV from any other: model, format, settings, the caller's namespace
    point                            p2           SHA-256 of the address before it: the checkpoint at the edge 2G

So a record of one conversation cannot be taken for that of another model, format or tenant, nor for the same tokens
after others. Names in the store begin with a tag of the namespace, which tells nothing else of it, so that an
administrator can list what belongs together. Knows nothing of stores.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from onefold.cache.memory.tokens import NAMED, Tokens

VALUE_BYTES = 4 << 20
"""The most that a value has: stores are quickest with values of about this size."""
HEAD_BYTES = 16 << 10
"""The most of a value that is not KV."""
MOST_TOKENS, STEP = 256, 8
"""Of a record: what lies behind the last whole record is computed again. Records of 64 tokens and more have a multiple
of 8."""
PREFIX = "onefold/1/"
"""What all names in a store begin with."""
ABOUT = "about"
"""The last part of the name of a namespace's description."""
_CHAIN = b"onefold remote chain 1\0"
_RECORD = b"onefold remote record 1\0"
_POINT = b"onefold remote point 1\0"
_PART = b"onefold remote part 1\0"
_TAG = b"onefold remote tag 1\0"
_TAG_BYTES = 8


def record_tokens(token_bytes: int, *, edges: bool = False) -> int:
    """Returns how many tokens a record has, for so many bytes of KV a token; 0 if not even one token fits into a value.
    Values are a little smaller than a power of two: Redis takes memory in steps of an eighth to a quarter, and one that
    is a little larger would take the next. `edges`: checkpoints are taken where records end, so it is a power of two,
    at which loops of callers end their chunks."""
    n = (VALUE_BYTES - HEAD_BYTES) // max(1, token_bytes)
    if edges:
        return 1 << (min(MOST_TOKENS, n).bit_length() - 1) if n else 0
    n = min(MOST_TOKENS - STEP, n)
    return n // STEP * STEP if n >= 8 * STEP else n


def root_of(about: dict[str, Any], salt: str, secret: bytes = b"") -> bytes:
    """Returns where the chain of a namespace begins. `about` is everything that changes the bytes of KV; `salt` names
    the caller's namespace. Machines with another secret have other addresses, and one cannot guess which prompts
    another has."""
    text = json.dumps([about, salt], sort_keys=True, separators=(",", ":")).encode()
    return hmac.new(secret, _CHAIN + text, hashlib.sha256).digest()


def addresses(root: bytes, tokens: Tokens, n_tokens: int) -> Iterator[bytes]:
    """Yields the addresses of the whole records of these tokens, each of `n_tokens`, up to the first with an id that
    only this process knows."""
    address = root
    for begin in range(0, len(tokens) - n_tokens + 1, n_tokens):
        part = np.ascontiguousarray(tokens[begin : begin + n_tokens], "<i4")
        if part.max() >= NAMED:
            return
        address = hashlib.sha256(_RECORD + address + part.tobytes()).digest()
        yield address


def point_address(record: bytes) -> bytes:
    """Returns the address of the checkpoint at the end of the record with this address."""
    return hashlib.sha256(_POINT + record).digest()


def part_address(point: bytes, nonce: bytes, i: int) -> bytes:
    """Returns the address of a part of a checkpoint. `nonce` is random: parts that two machines write at the same time
    are never mixed, because their states may differ by rounding."""
    return hashlib.sha256(_PART + point + nonce + i.to_bytes(4, "little")).digest()


def tag_of(root: bytes) -> str:
    """Returns what the names of a namespace's values have in common. Values that belong to another tag are never read,
    because all addresses begin with the root."""
    return hashlib.sha256(_TAG + root).digest()[:_TAG_BYTES].hex()


def name_of(tag: str, address: bytes) -> str:
    """Returns the name in the store of the value with this address."""
    return f"{PREFIX}{tag}/{address.hex()}"


def about_name(tag: str) -> str:
    return f"{PREFIX}{tag}/{ABOUT}"
