"""What an HTTP API is to the server: paths, the schemas of their bodies, and the shape of its errors.

Each API is a folder with one such object, and a line in `registry.py`. Knows no API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onefold.server.body import Fields
from onefold.server.errors import Problem
from onefold.server.reply import Plan
from onefold.server.service import Service


@dataclass(frozen=True)
class Endpoint:
    """A path that takes POST. Exactly one of `plan` and `answer` is set; both run on a thread for prompts, and raise
    RequestError."""

    path: str
    """With `/v1`; `paths.py` adds the aliases."""
    schema: type[Fields]
    """For the OpenAPI document. Its class name differs from those of all other endpoints."""
    summary: str = ""
    """What it does, in a few words, for the OpenAPI document. Without it, the path."""
    plan: Callable[[Service, bytes, str], Plan] | None = None
    """Makes the body, in a namespace, into requests for the engine."""
    answer: Callable[[Service, bytes], Mapping[str, Any]] | None = None
    """Returns the JSON of an answer that the model is not run for."""


@dataclass(frozen=True, kw_only=True)
class Api:
    name: str
    endpoints: tuple[Endpoint, ...]
    error_shape: Callable[[Problem], dict[str, Any]]
    """Returns an error as the body of a response."""
    error_schema: Mapping[str, Any]
    """JSON Schema of these bodies, for the OpenAPI document."""
    prefixes: tuple[str, ...]
    """Paths that begin so are this API's, also those that do not exist."""
    header: bytes = b""
    """A header that only this API's clients send, in lower case: it tells who asks for a path of the server itself."""
