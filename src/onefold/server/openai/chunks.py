"""What OpenAI's answers have in common: usage, logprobs, errors in a stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from onefold import __version__
from onefold.engine.request import Logprob
from onefold.server.errors import Problem
from onefold.server.openai import errors
from onefold.server.outcome import Usage
from onefold.server.reply import sse

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
FINGERPRINT = f"onefold-{__version__}"
NEVER = -9999.0
"""What OpenAI writes for a probability of nothing, which JSON has no number for."""


def usage_shape(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def failed(problem: Problem) -> bytes:
    return sse(errors.shape(problem))


def finite(logprob: float) -> float:
    return max(logprob, NEVER) if not math.isnan(logprob) else NEVER


def chat_logprobs(found: Iterable[Logprob]) -> dict[str, Any]:
    return {"content": token_logprobs(found), "refusal": None}


def token_logprobs(found: Iterable[Logprob]) -> list[dict[str, Any]]:
    return [_token(lp) for lp in found]


def _token(lp: Logprob) -> dict[str, Any]:
    top = [_alternative(text, logprob) for _, text, logprob in lp.top]
    return _alternative(lp.text, lp.logprob) | {"top_logprobs": top}


def _alternative(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def completion_logprobs(found: Iterable[Logprob], offset: int) -> dict[str, Any]:
    """`offset`: characters of the text before these."""
    made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for lp in found:
        made["tokens"].append(lp.text)
        made["token_logprobs"].append(finite(lp.logprob))
        made["top_logprobs"].append({text: finite(logprob) for _, text, logprob in lp.top})
        made["text_offset"].append(offset)
        offset += len(lp.text)
    return made
