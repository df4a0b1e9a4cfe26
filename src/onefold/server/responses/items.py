"""The items of a response's output, and what a response cost. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from onefold.engine.request import Logprob, ToolCall
from onefold.server.openai.chunks import token_logprobs
from onefold.server.outcome import Usage
from onefold.server.tools import custom_input

Item = dict[str, Any]


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def message(id: str, status: str, *parts: Item) -> Item:
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": list(parts)}


def output_text(text: str, logprobs: Iterable[Logprob] = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs(logprobs)}


def reasoning(id: str, status: str, *parts: Item) -> Item:
    made: Item = {"id": id, "type": "reasoning", "status": status, "summary": [], "content": list(parts)}
    return made | {"encrypted_content": None}


def reasoning_text(text: str) -> Item:
    return {"type": "reasoning_text", "text": text}


def called(call: ToolCall, *, custom: bool) -> Item:
    """Returns the item of a whole call."""
    if custom:
        made = {"id": new_id("ctc"), "type": "custom_tool_call", "status": "completed", "call_id": call.id}
        return made | {"name": call.name, "input": custom_input(call.arguments)}
    made = {"id": new_id("fc"), "type": "function_call", "status": "completed", "call_id": call.id}
    return made | {"name": call.name, "arguments": call.arguments}


def usage_shape(usage: Usage) -> dict[str, Any]:
    """Keeping KV costs nothing here, so no tokens are counted as written."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
