"""POST /v1/chat/completions: a request made into a plan, and its answer in OpenAI's words."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any

from onefold.engine.request import Done, Event, Reasoning, Request, Started, Text, ToolCall
from onefold.server import constraints
from onefold.server.body import parse
from onefold.server.errors import Problem
from onefold.server.openai import chunks, translate
from onefold.server.openai.constraints import shape
from onefold.server.openai.schemas import ChatRequest
from onefold.server.options import most_tokens, stop_strings
from onefold.server.outcome import Outcome, Tally, Usage
from onefold.server.reply import Plan, sse
from onefold.server.service import Service
from onefold.server.tools import custom_input


def plan(service: Service, body: bytes, namespace: str) -> Plan:
    """Blocks while the prompt is made. Raises RequestError."""
    asked = parse(body, ChatRequest)
    service.check_model(asked.model)
    sampling = asked.sampling(service.defaults())
    messages, offer = translate.messages(asked.messages), translate.offer(asked)
    constraint = constraints.constraint(shape(asked), offer.rule)
    request = Request(
        prompt=service.engine.chat(messages, tools=offer.tools, template_options=translate.template_options(asked)),
        max_tokens=most_tokens(asked.max_completion_tokens, asked.max_tokens, service.settings.max_tokens),
        stop=stop_strings(asked.stop, "stop"),
        sampling=sampling,
        top_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        tools=offer.tools,
        constraint=constraint,
        namespace=namespace,
    )
    n = asked.n or 1
    usage = bool(asked.stream_options and asked.stream_options.include_usage)
    writer = ChatWriter(
        service.model,
        choices=n,
        include_usage=usage,
        logprobs=bool(asked.logprobs),
        custom=offer.custom,
        functions=bool(asked.functions and not asked.tools),
    )
    return Plan(choices(request, n), writer, bool(asked.stream), n)


def choices(request: Request, n: int) -> tuple[Request, ...]:
    """Returns the request once for each choice. With a seed, each gets its own, or all answers would be equal."""
    seed = request.sampling.seed
    if seed is None:
        return (request,) * n
    return tuple(replace(request, sampling=replace(request.sampling, seed=(seed + i) % (1 << 63))) for i in range(n))


class ChatWriter:
    def __init__(
        self,
        model: str,
        *,
        choices: int = 1,
        include_usage: bool = False,
        logprobs: bool = False,
        custom: frozenset[str] = frozenset(),
        functions: bool = False,
    ) -> None:
        """`custom`: tools that take text. `functions`: the client offered functions, as before there were tools, and
        gets one call as `function_call`."""
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._head["system_fingerprint"] = chunks.FINGERPRINT
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._custom = custom
        self._functions = functions
        self._tally = Tally(choices)
        self._calls = [0] * choices

    def feed(self, choice: int, event: Event) -> bytes:
        self._tally.add(choice, event)
        match event:
            case Started():
                return self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})
            case Text():
                shown = chunks.chat_logprobs(event.logprobs) if self._logprobs else None
                return self._chunk(choice, {"content": event.text}, logprobs=shown)
            case Reasoning():
                return self._chunk(choice, {"reasoning_content": event.text})
            case ToolCall():
                return self._call(choice, event)
            case Done():
                return self._chunk(choice, {}, finish=self._finish(event))
            case _:
                return b""

    def keep_alive(self) -> bytes:
        return chunks.KEEP_ALIVE

    def end(self) -> bytes:
        if not self._include_usage:
            return chunks.DONE
        usage = chunks.usage_shape(self._tally.usage)
        return sse({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}) + chunks.DONE

    def failed(self, problem: Problem) -> bytes:
        return chunks.failed(problem)

    def whole(self, outcomes: list[Outcome], usage: Usage) -> dict[str, Any]:
        made = [self._choice(i, outcome) for i, outcome in enumerate(outcomes)]
        return {**self._head, "object": "chat.completion", "choices": made, "usage": chunks.usage_shape(usage)}

    def _choice(self, choice: int, outcome: Outcome) -> dict[str, Any]:
        calls = outcome.calls
        message: dict[str, Any] = {"role": "assistant", "content": outcome.text or (None if calls else "")}
        message["refusal"] = None
        if outcome.reasoning:
            message["reasoning_content"] = outcome.reasoning
        if calls and self._functions:
            message["function_call"] = _function(calls[0])
        elif calls:
            message["tool_calls"] = [{"id": call.id, **self._called(call)} for call in calls]
        logprobs = chunks.chat_logprobs(outcome.logprobs) if self._logprobs else None
        finish = self._finish(outcome.done) if outcome.done else None
        return {"index": choice, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _finish(self, done: Done) -> str:
        return "function_call" if self._functions and done.finish == "tool_calls" else done.finish

    def _called(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._custom:
            return {"type": "custom", "custom": {"name": call.name, "input": custom_input(call.arguments)}}
        return {"type": "function", "function": _function(call)}

    def _call(self, choice: int, call: ToolCall) -> bytes:
        """Its name first, then its arguments, as OpenAI sends them."""
        index = self._calls[choice]
        self._calls[choice] += 1
        if self._functions:
            argued = {"function_call": {"arguments": call.arguments}}
            named = self._chunk(choice, {"function_call": {"name": call.name, "arguments": ""}})
            return named + self._chunk(choice, argued) if index == 0 else b""
        called = self._called(call)
        kind = called["type"]
        (text,) = called[kind].keys() - {"name"}
        begun = {"index": index, "id": call.id, "type": kind, kind: {"name": call.name, text: ""}}
        rest = {"index": index, kind: {text: called[kind][text]}}
        return self._chunk(choice, {"tool_calls": [begun]}) + self._chunk(choice, {"tool_calls": [rest]})

    def _chunk(self, choice: int, delta: dict[str, Any], *, finish: str | None = None, logprobs: Any = None) -> bytes:
        said = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": [said]}
        if self._include_usage:
            chunk["usage"] = None
        return sse(chunk)


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}
