"""Turns Onefold's exceptions into problems, which each API has a shape for (`Api.error_shape`).

Every error that leaves the server is one. Messages say what was wrong and with which field; they do not repeat
what was sent, and an error that is a bug of ours says nothing about its inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onefold.errors import (
    BadRequest,
    BudgetError,
    Busy,
    EngineStopped,
    OnefoldError,
    PromptError,
    TokenError,
    TooLong,
    UnknownModel,
    UnknownNode,
)


@dataclass(frozen=True)
class Problem:
    """What went wrong, before it has a shape."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None
    """Seconds."""
    allow: str | None = None
    """The methods that there are, for 405."""
    too_long: tuple[int, int] | None = None
    """Tokens that there are, and that there may be: each API has a sentence for it that clients look for."""
    details: Mapping[str, Any] | None = None
    """For a program; Anthropic's errors have a place for it."""

    @property
    def sentence(self) -> str:
        """The message, with the field that it is about."""
        return f"{self.param}: {self.message}" if self.param else self.message


BROKEN = Problem(500, "The server failed on this request; its log has the reason.", code="internal_error")


def problem_of(error: OnefoldError) -> Problem:
    match error:
        case TooLong():
            return Problem(400, str(error), "context_length_exceeded", too_long=(error.tokens, error.most))
        case BadRequest():
            return Problem(400, str(error), param=error.where or None, details=error.details or None)
        case PromptError():
            return Problem(400, str(error), param=error.where or None)
        case TokenError():
            return Problem(400, str(error))
        case UnknownModel():
            return Problem(404, str(error), "model_not_found", "model")
        case UnknownNode():
            return Problem(404, str(error), "node_not_found")
        case Busy():
            return Problem(503, str(error), "overloaded", retry_after=error.retry_after)
        case BudgetError():
            return Problem(503, str(error), "out_of_memory", retry_after=5)
        case EngineStopped():
            return Problem(503, str(error) or "The engine has stopped.", "engine_stopped", retry_after=10)
        case _:
            return BROKEN
