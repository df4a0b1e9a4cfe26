"""The shape of OpenAI's errors."""

from __future__ import annotations

from typing import Any

from onefold.server.errors import Problem

SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def shape(problem: Problem) -> dict[str, Any]:
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": message(problem), "type": kind, "param": problem.param, "code": problem.code}}


def message(problem: Problem) -> str:
    """Returns the sentence. Clients look for these words in that of a prompt that is too long."""
    if problem.too_long is None:
        return problem.sentence
    tokens, most = problem.too_long
    said = f"This model's maximum context length is {most} tokens."
    return f"{said} However, your messages resulted in {tokens} tokens: {problem.sentence}."
