"""POST /v1/messages and /v1/messages/count_tokens: a request made into a plan, and its answer in Anthropic's words."""

from __future__ import annotations

import json
import uuid
from typing import Any

from onefold.engine.request import Done, Event, Reasoning, Request, Started, Text, ToolCall
from onefold.server import constraints
from onefold.server.anthropic import errors, translate
from onefold.server.anthropic.schemas import Conversation, MessagesRequest
from onefold.server.body import parse, parse_arguments
from onefold.server.errors import Problem
from onefold.server.options import most_tokens, stop_strings
from onefold.server.outcome import Outcome, Tally, Usage
from onefold.server.reply import Plan, sse
from onefold.server.service import Service

SIGNATURE = "onefold"
"""Thinking is not signed here; but clients drop a block that has no signature."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def plan(service: Service, body: bytes, namespace: str) -> Plan:
    """Blocks while the prompt is made. Raises RequestError."""
    asked = parse(body, MessagesRequest)
    service.check_model(asked.model)
    sampling = asked.sampling(service.defaults())
    offer = translate.offer(asked)
    options = translate.template_options(asked)
    constraint = constraints.constraint(translate.shape(asked), offer.rule)
    request = Request(
        prompt=service.engine.chat(translate.messages(asked), tools=offer.tools, template_options=options),
        max_tokens=most_tokens(asked.max_tokens),
        stop=stop_strings(asked.stop_sequences, "stop_sequences"),
        sampling=sampling,
        tools=offer.tools,
        constraint=constraint,
        namespace=namespace,
    )
    return Plan((request,), MessageWriter(service.model, request.max_tokens), bool(asked.stream))


def count_tokens(service: Service, body: bytes) -> dict[str, int]:
    """Blocks while the prompt is made. Raises RequestError."""
    asked = parse(body, Conversation)
    service.check_model(asked.model)
    tools, options = translate.offer(asked).tools, translate.template_options(asked)
    messages = translate.messages(asked)
    prompt = service.engine.chat(messages, tools=tools, template_options=options, of_any_length=True)
    return {"input_tokens": len(prompt)}


class MessageWriter:
    def __init__(self, model: str, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._tally = Tally()
        self._index = -1
        self._open: type | None = None
        """What the block is made of that was begun and not ended."""

    def feed(self, choice: int, event: Event) -> bytes:
        self._tally.add(choice, event)
        match event:
            case Started():
                ends = {"stop_reason": None, "stop_sequence": None, "usage": usage_shape(self._tally.usage)}
                return _event("message_start", message={**self._head, "content": [], **ends}) + self.keep_alive()
            case Text():
                return self._begin(event) + self._delta({"type": "text_delta", "text": event.text})
            case Reasoning():
                return self._begin(event) + self._delta({"type": "thinking_delta", "thinking": event.text})
            case ToolCall():
                written = json.dumps(arguments_object(event.arguments), ensure_ascii=False)
                return self._begin(event) + self._delta({"type": "input_json_delta", "partial_json": written})
            case Done():
                delta = {"stop_reason": stop_reason(event, self._max_tokens), "stop_sequence": event.stop_sequence}
                usage = usage_shape(self._tally.usage)
                return self._end_block() + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")
            case _:
                return b""

    def keep_alive(self) -> bytes:
        return _event("ping")

    def end(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        return sse(errors.shape(problem), "error")

    def whole(self, outcomes: list[Outcome], usage: Usage) -> dict[str, Any]:
        (outcome,) = outcomes
        content = []
        for piece in outcome.pieces:
            match piece:
                case Text():
                    content.append({"type": "text", "text": piece.text})
                case Reasoning():
                    content.append({"type": "thinking", "thinking": piece.text, "signature": SIGNATURE})
                case ToolCall():
                    content.append(_tool_use(piece) | {"input": arguments_object(piece.arguments)})
        done = outcome.done
        ends = {"stop_reason": stop_reason(done, self._max_tokens), "stop_sequence": done.stop_sequence} if done else {}
        return {**self._head, "content": content, **ends, "usage": usage_shape(usage)}

    def _begin(self, event: Text | Reasoning | ToolCall) -> bytes:
        """Ends the open block and begins one for this piece, unless the piece continues the open block."""
        kind = type(event)
        if self._open is kind and kind is not ToolCall:
            return b""
        said = self._end_block()
        self._index += 1
        self._open = kind
        match event:
            case Text():
                block: dict[str, Any] = {"type": "text", "text": ""}
            case Reasoning():
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case ToolCall():
                block = _tool_use(event) | {"input": {}}
        return said + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._open is Reasoning
        self._open = None
        said = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if signed else b""
        return said + _event("content_block_stop", index=self._index)


def stop_reason(done: Done, max_tokens: int | None = None) -> str:
    """An answer that was cut off before the client's own limit reached the end of the context, or of the memory."""
    if done.stop_sequence is not None:
        return "stop_sequence"
    if done.finish == "length" and max_tokens is not None and done.completion_tokens < max_tokens:
        return "model_context_window_exceeded"
    return STOP_REASONS[done.finish]


def usage_shape(usage: Usage) -> dict[str, Any]:
    """Anthropic's three parts of a prompt. Keeping KV costs nothing here, so what was not read is all input."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def arguments_object(given: str) -> dict[str, Any]:
    """Anthropic's calls have an object; if a model wrote none, what it wrote is in there under one name."""
    found = parse_arguments(given)
    return found if isinstance(found, dict) else {"arguments": found}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
