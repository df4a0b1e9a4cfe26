"""LiteLLM, with its provider for servers that speak OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

import litellm
from cell import (
    CALL,
    GREET,
    GREETING,
    MESSAGES,
    MODEL,
    QUESTION,
    REPORT,
    RESULT,
    SECONDS,
    SYSTEM,
    TOKENS,
    TOOL,
    URL,
    Cells,
    Forecast,
    main,
)

SAME: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "any", "timeout": SECONDS}
CHAT: Any = {**SAME, "max_tokens": TOKENS}


class Litellm(Cells):
    def test_chat(self) -> None:
        self.assertEqual(litellm.completion(messages=MESSAGES, **CHAT).choices[0].message.content, GREETING)

    def test_stream(self) -> None:
        chunks = list(litellm.completion(messages=MESSAGES, stream=True, **CHAT))
        self.streamed([chunk.choices[0].delta.content or "" for chunk in chunks], GREETING)
        self.assertEqual(litellm.stream_chunk_builder(chunks).choices[0].message.content, GREETING)

    def test_tools(self) -> None:
        first = litellm.completion(messages=QUESTION, tools=[TOOL], **CHAT).choices[0]
        self.assertEqual(first.finish_reason, "tool_calls")
        call = self.one(first.message.tool_calls)
        self.assertEqual((call.function.name, json.loads(call.function.arguments)), (CALL["name"], CALL["arguments"]))
        result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        done = litellm.completion(messages=[*QUESTION, first.message, result], tools=[TOOL], **CHAT)
        self.assertEqual(done.choices[0].message.content, REPORT)

    def test_forced(self) -> None:
        done = litellm.completion(messages=MESSAGES, tools=[TOOL], tool_choice="required", **CHAT)
        call = self.one(done.choices[0].message.tool_calls)
        self.forced(call.function.name, call.function.arguments)

    def test_structured(self) -> None:
        done = litellm.completion(messages=MESSAGES, response_format=Forecast, **CHAT)
        Forecast.model_validate_json(done.choices[0].message.content, strict=True)

    def test_responses(self) -> None:
        same: Any = {**SAME, "instructions": SYSTEM, "max_output_tokens": TOKENS}
        self.assertEqual(litellm.responses(input=GREET, **same).output_text, GREETING)
        events = litellm.responses(input=GREET, stream=True, **same)
        self.streamed([event.delta for event in events if event.type == "response.output_text.delta"], GREETING)

    def test_usage(self) -> None:
        for _ in range(2):
            usage = litellm.completion(messages=MESSAGES, **CHAT).usage
        self.counted(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens)


if __name__ == "__main__":
    main(Litellm)
