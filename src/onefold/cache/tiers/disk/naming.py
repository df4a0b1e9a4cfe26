"""Names of namespaces on disk: the same in every process for the same model, settings and salt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from typing import Any


def salt_of(namespace: Hashable) -> str | None:
    """A name for a caller's namespace that will be the same in another process; None if it has none."""
    plain = _plain(namespace)
    return None if plain is None else json.dumps(plain)


def _plain(value: Any) -> list[Any] | None:
    """Returns the value as JSON can hold it; None if it has another type than these: two different values of another
    type may have the same text."""
    if value is None or type(value) in (bool, int, float, str):
        return [type(value).__name__, repr(value)]
    if type(value) is bytes:
        return ["bytes", value.hex()]
    if type(value) is tuple:
        parts = [_plain(v) for v in value]
        return None if None in parts else ["tuple", parts]
    return None


def name_of(about: dict[str, Any], salt: str) -> str:
    """The folder of a namespace: a digest of everything that changes the bytes, and of the salt."""
    text = json.dumps([about, salt], sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16, person=b"onefold space").hexdigest()
