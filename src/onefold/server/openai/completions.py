"""POST /v1/completions: text or tokens are continued as they are; no template, no tools, no reasoning."""

from __future__ import annotations

import time
import uuid
from typing import Any

from onefold.engine.request import Done, Event, Request, Started, Text
from onefold.errors import BadRequest
from onefold.server import constraints
from onefold.server.body import parse
from onefold.server.errors import Problem
from onefold.server.openai import chunks
from onefold.server.openai.chat import choices
from onefold.server.openai.constraints import shape
from onefold.server.openai.schemas import CompletionRequest
from onefold.server.options import most_tokens, stop_strings
from onefold.server.outcome import Outcome, Tally, Usage
from onefold.server.reply import Plan, sse
from onefold.server.service import Service

MOST_CHOICES = 64
"""The most choices of all prompts of a request together."""
USUAL_TOKENS = 16
"""OpenAI's default here, where a model that only continues text may never end."""


def plan(service: Service, body: bytes, namespace: str) -> Plan:
    """Blocks while the prompts are made. Raises RequestError."""
    asked = parse(body, CompletionRequest)
    service.check_model(asked.model)
    given, n = prompts(asked), asked.n or 1
    refuse(asked, given, n)
    sampling = asked.sampling(service.defaults())
    stop = stop_strings(asked.stop, "stop")
    constraint = constraints.constraint(shape(asked))
    most = most_tokens(asked.max_tokens, service.settings.max_tokens, USUAL_TOKENS)
    made: list[Request] = []
    for prompt in given:
        request = Request(
            prompt=service.engine.text(prompt),
            max_tokens=most,
            stop=stop,
            sampling=sampling,
            top_logprobs=asked.logprobs,
            plain=True,
            constraint=constraint,
            namespace=namespace,
        )
        made += choices(request, n)
    echoed = [prompt if asked.echo and isinstance(prompt, str) else "" for prompt in given for _ in range(n)]
    usage = bool(asked.stream_options and asked.stream_options.include_usage)
    writer = CompletionWriter(
        service.model, echoed, per_prompt=n, include_usage=usage, logprobs=asked.logprobs is not None
    )
    return Plan(tuple(made), writer, bool(asked.stream), n)


def prompts(asked: CompletionRequest) -> list[str | list[int]]:
    """A list of numbers is one prompt, of tokens."""
    given = asked.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise BadRequest("A prompt must not be an empty list.", where="prompt")
    if isinstance(given[0], int):
        return [[token for token in given if isinstance(token, int)]]
    return [one for one in given if not isinstance(one, int)]


def refuse(asked: CompletionRequest, given: list[str | list[int]], n: int) -> None:
    if len(given) * n > MOST_CHOICES:
        raise BadRequest(f"At most {MOST_CHOICES} choices are allowed in a request, over all prompts.", where="prompt")
    if asked.suffix:
        raise BadRequest("This server cannot insert text before a suffix: leave suffix out.", where="suffix")
    if asked.best_of is not None and asked.best_of > n:
        raise BadRequest("best_of is not supported: use n.", where="best_of")
    if asked.echo and asked.logprobs is not None:
        raise BadRequest("Logprobs of prompt tokens are not supported: use either echo or logprobs.", where="echo")
    if asked.echo and any(not isinstance(prompt, str) for prompt in given):
        raise BadRequest("Only a text prompt can be echoed.", where="echo")


class CompletionWriter:
    def __init__(
        self, model: str, echoed: list[str], *, per_prompt: int = 1, include_usage: bool = False, logprobs: bool = False
    ) -> None:
        """`echoed`: what each choice's text begins with."""
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head |= {"model": model, "system_fingerprint": chunks.FINGERPRINT}
        self._echoed = echoed
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._tally = Tally(per_prompt)
        self._offset = [0] * len(echoed)

    def feed(self, choice: int, event: Event) -> bytes:
        self._tally.add(choice, event)
        match event:
            case Started():
                return self._chunk(choice, self._echoed[choice]) if self._echoed[choice] else b""
            case Text():
                shown = chunks.completion_logprobs(event.logprobs, self._offset[choice]) if self._logprobs else None
                self._offset[choice] += len(event.text)
                return self._chunk(choice, event.text, logprobs=shown)
            case Done():
                return self._chunk(choice, "", finish=event.finish)
            case _:
                return b""

    def keep_alive(self) -> bytes:
        return chunks.KEEP_ALIVE

    def end(self) -> bytes:
        if not self._include_usage:
            return chunks.DONE
        return sse({**self._head, "choices": [], "usage": chunks.usage_shape(self._tally.usage)}) + chunks.DONE

    def failed(self, problem: Problem) -> bytes:
        return chunks.failed(problem)

    def whole(self, outcomes: list[Outcome], usage: Usage) -> dict[str, Any]:
        made = [
            {
                "index": i,
                "text": self._echoed[i] + outcome.text,
                "logprobs": chunks.completion_logprobs(outcome.logprobs, 0) if self._logprobs else None,
                "finish_reason": outcome.done.finish if outcome.done else None,
            }
            for i, outcome in enumerate(outcomes)
        ]
        return {**self._head, "choices": made, "usage": chunks.usage_shape(usage)}

    def _chunk(self, choice: int, text: str, *, finish: str | None = None, logprobs: Any = None) -> bytes:
        said = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        chunk: dict[str, Any] = {**self._head, "choices": [said]}
        if self._include_usage:
            chunk["usage"] = None
        return sse(chunk)
