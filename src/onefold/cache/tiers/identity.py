"""What tells the KV of one cache from that of another: a tier that outlives the process keeps them apart by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class Identity(NamedTuple):
    about: dict[str, Any]
    """Everything that changes the bytes, in values that JSON has: model, adapter, tokenizer, KV format, bound."""
    points: list[dict[str, Any]]
    """What checkpoints are made of."""
    label: str
    """The model's name, for people."""
    kv_of: Callable[[object], str]
    """Returns the name of the format that `about["kv"]` stands for with this model; empty if there is none."""


def typed(value: Hashable) -> Hashable:
    """Returns what tells a namespace from one that is equal in Python and of other types: 1, True and 1.0, say."""
    if isinstance(value, tuple):
        return type(value), tuple(typed(v) for v in value)
    if isinstance(value, frozenset):
        return type(value), frozenset((typed(v), v) for v in value)
    return type(value), repr(value) if isinstance(value, float) else ""


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
