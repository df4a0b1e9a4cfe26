"""Names of namespaces on disk: the same in every process for the same model, settings and salt."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def name_of(about: dict[str, Any], salt: str) -> str:
    """The folder of a namespace: a digest of everything that changes the bytes, and of the salt."""
    text = json.dumps([about, salt], sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16, person=b"onefold space").hexdigest()
