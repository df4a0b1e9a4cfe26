"""The errors of the Responses API: OpenAI's shape over HTTP, and the error of a response whose stream failed.

Codex reads the code. It tries again after `rate_limit_exceeded`, when the message says, and not after
`server_is_overloaded`.
"""

from __future__ import annotations

from typing import Any

from onefold.server.errors import Problem
from onefold.server.openai import errors

OVERLOADED = frozenset({"overloaded", "out_of_memory"})


def shape(problem: Problem) -> dict[str, Any]:
    made = errors.shape(problem)
    return {"error": made["error"] | {"message": message(problem)}}


def message(problem: Problem) -> str:
    """Returns the sentence, and when to try again if that is known."""
    said = errors.message(problem)
    if problem.retry_after is None:
        return said
    return f"{said.rstrip('.')}. Please try again in {problem.retry_after} s."


def of_response(problem: Problem) -> dict[str, str]:
    """Returns the `error` of a response that failed after it had begun."""
    code = "server_error"
    if problem.too_long is not None:
        code = "context_length_exceeded"
    elif problem.code in OVERLOADED:
        code = "rate_limit_exceeded"
    return {"code": code, "message": message(problem)}
