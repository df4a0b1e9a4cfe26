"""Turns Onefold's exceptions into HTTP errors in the shape of the client's API.

Every error that leaves the server is made here. Messages say what was wrong and with which field; they do not repeat
what was sent, and an error that is a bug of ours says nothing about its inside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

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
)

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


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
        case Busy():
            return Problem(503, str(error), "overloaded", retry_after=error.retry_after)
        case BudgetError():
            return Problem(503, str(error), "out_of_memory", retry_after=5)
        case EngineStopped():
            return Problem(503, str(error) or "The engine has stopped.", "engine_stopped", retry_after=10)
        case _:
            return BROKEN


def speaks_anthropic(path: str, header_names: set[bytes]) -> bool:
    """Whether the client uses Anthropic's API. Paths that both APIs have differ by a header that its clients send."""
    return path.startswith("/v1/messages") or (
        b"anthropic-version" in header_names and not path.startswith(("/v1/chat", "/v1/completions"))
    )


def openai_shape(problem: Problem) -> dict[str, Any]:
    message = problem.sentence
    if problem.too_long:
        tokens, most = problem.too_long
        said = f"This model's maximum context length is {most} tokens."
        message = f"{said} However, your messages resulted in {tokens} tokens: {message}."
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": problem.param, "code": problem.code}}


def anthropic_shape(problem: Problem) -> dict[str, Any]:
    message = problem.sentence
    if problem.too_long:
        tokens, most = problem.too_long
        message = f"prompt is too long: {tokens} tokens > {most} maximum"  # Claude Code looks for these words
    kind = ANTHROPIC_TYPES.get(problem.status, "api_error")
    details = {"details": dict(problem.details)} if problem.details else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def respond(scope: Any, problem: Problem) -> Response:
    """The response to a request of this ASGI scope."""
    anthropic = speaks_anthropic(scope["path"], {name for name, _ in scope["headers"]})
    shape = anthropic_shape(problem) if anthropic else openai_shape(problem)
    headers = {}
    if problem.retry_after is not None:
        headers["retry-after"] = str(problem.retry_after)
    if problem.allow:
        headers["allow"] = problem.allow
    if problem is BROKEN:
        headers["connection"] = "close"  # uvicorn closes it after an exception: a client must not try to use it again
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(json.dumps(shape), problem.status, headers, "application/json")
