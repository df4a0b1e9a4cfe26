"""Reads the KV memory from the statistics of GET /v1/cache or of the engine, in bytes and as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold.cache.memory.ledger import HELD
from onefold.sizes import show_size


def held_bytes(stats: Mapping[str, Any]) -> int:
    return sum(int(stats["cache"]["bytes"].get(purpose.value, 0)) for purpose in HELD)


def show_held(stats: Mapping[str, Any]) -> str:
    return f"KV {show_size(held_bytes(stats))} of {show_size(stats['cache']['budget_bytes'])}"
