"""How much tests do: `make test` runs a few of what is many, `make test-all` (ONEFOLD_TEST_ALL=1) runs all of it.

What takes long is marked `slow`, and runs with `make test-all` only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

ALL = os.environ.get("ONEFOLD_TEST_ALL") == "1"


def effort(few: int, all_of_them: int) -> int:
    """How many examples, seeds or rounds to run."""
    return all_of_them if ALL else few


def spread(cases: Sequence[T], few: int) -> list[T]:
    """All of these cases, or a few of them that lie evenly apart, the first and the last among them."""
    if ALL or len(cases) <= few:
        return list(cases)
    return [cases[round(i * (len(cases) - 1) / max(1, few - 1))] for i in range(few)]


def quick(cases: Iterable[T], *kept: T) -> list[Any]:
    """Parameters of a test: `make test` runs it with those that are kept, `make test-all` with all of them."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]
