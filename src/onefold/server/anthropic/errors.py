"""The shape of Anthropic's errors."""

from __future__ import annotations

from typing import Any

from onefold.server.errors import Problem

SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def shape(problem: Problem) -> dict[str, Any]:
    message = problem.sentence
    if problem.too_long:
        tokens, most = problem.too_long
        message = f"prompt is too long: {tokens} tokens > {most} maximum"  # Claude Code looks for these words
    kind = TYPES.get(problem.status, "api_error")
    details = {"details": dict(problem.details)} if problem.details else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}
