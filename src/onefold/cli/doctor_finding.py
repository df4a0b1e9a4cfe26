"""What a check of `onefold doctor` found: fine, or what is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from onefold.errors import OnefoldError

State = Literal["ok", "warning", "problem"]

FAULTS = (
    OnefoldError,
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)
"""What a check may raise on a broken installation."""


@dataclass(frozen=True)
class Finding:
    check: str
    state: State
    message: str
    """One sentence, without a full stop."""
    remedy: str = ""
    """What to do about it; empty if all is well."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What was found, for a program."""


def guarded(name: str, check: Callable[[], Finding], remedy: str) -> Finding:
    """Return what a check found; if the check itself fails, that is a problem with this remedy."""
    try:
        return check()
    except FAULTS as error:
        lines = str(error).strip().splitlines() or ["it gave no reason"]
        return Finding(name, "problem", f"the check failed: {lines[0]} ({type(error).__name__})", remedy)
