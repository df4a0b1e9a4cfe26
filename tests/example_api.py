"""An HTTP API of our own in one file, as docs/extending.md describes it: `POST /v1/say` takes words and has the model
continue them, and `POST /v1/say/length` counts their tokens. Errors are one line of text under `sorry`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from onefold.engine.request import Done, Event, Request, Text
from onefold.server.api import Api, Endpoint
from onefold.server.body import Fields, Refusal, parse
from onefold.server.errors import Problem
from onefold.server.options import MaxTokens, SamplingFields
from onefold.server.outcome import Outcome, Usage
from onefold.server.reply import Plan, sse
from onefold.server.service import Service


class SayLengthRequest(Fields):
    refused: ClassVar[Mapping[str, Refusal]] = {"loudly": Refusal("This server has no voice: leave loudly out.")}

    words: str


class SayRequest(SayLengthRequest, SamplingFields):
    most: MaxTokens | None = None
    stream: bool | None = None


class SayWriter:
    def feed(self, choice: int, event: Event) -> bytes:
        match event:
            case Text():
                return sse({"more": event.text})
            case Done():
                return sse({"end": event.finish})
            case _:
                return b""

    def keep_alive(self) -> bytes:
        return b": wait\n\n"

    def end(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        return sse(sorry(problem))

    def whole(self, outcomes: list[Outcome], usage: Usage) -> dict[str, Any]:
        return {"said": outcomes[0].text, "tokens": usage.prompt + usage.completion}


def plan(service: Service, body: bytes, namespace: str) -> Plan:
    asked = parse(body, SayRequest)
    sampling = asked.sampling(service.defaults())
    prompt = service.engine.text(asked.words)
    request = Request(prompt=prompt, max_tokens=asked.most, sampling=sampling, plain=True, namespace=namespace)
    return Plan((request,), SayWriter(), bool(asked.stream))


def length(service: Service, body: bytes) -> dict[str, int]:
    return {"tokens": len(service.engine.text(parse(body, SayLengthRequest).words))}


def sorry(problem: Problem) -> dict[str, Any]:
    return {"sorry": problem.sentence}


SAY = Api(
    name="say",
    endpoints=(
        Endpoint("/v1/say", SayRequest, plan=plan),
        Endpoint("/v1/say/length", SayLengthRequest, answer=length),
    ),
    error_shape=sorry,
    error_schema={"type": "object", "required": ["sorry"], "properties": {"sorry": {"type": "string"}}},
    prefixes=("/v1/say",),
    header=b"x-say",
)
