"""What GET /v1/cache, or the engine itself, tells of memory, in bytes and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold.sizes import show_size

HELD = ("live", "stored", "checkpoint")
"""The purposes that are KV, or stand for it. The others are what computing takes."""


def held_bytes(stats: Mapping[str, Any]) -> int:
    return sum(int(stats["cache"]["bytes"].get(purpose, 0)) for purpose in HELD)


def show_held(stats: Mapping[str, Any]) -> str:
    return f"KV {show_size(held_bytes(stats))} of {show_size(stats['cache']['budget_bytes'])}"
