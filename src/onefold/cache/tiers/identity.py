"""What tells the KV of one cache from that of another: a tier that outlives the process keeps them apart by it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Identity(NamedTuple):
    about: dict[str, Any]
    """Everything that changes the bytes, in values that JSON has: model, adapter, tokenizer, KV format, bound."""
    points: list[dict[str, Any]]
    """What checkpoints are made of."""
    label: str
    """The model's name, for people."""
