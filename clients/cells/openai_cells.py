"""OpenAI's own Python client."""

from __future__ import annotations

import json
from typing import Any

import openai
from cell import (
    CALL,
    GREET,
    GREETING,
    MESSAGES,
    MODEL,
    QUESTION,
    REPORT,
    RESULT,
    SCHEMA,
    SECONDS,
    SYSTEM,
    TOKENS,
    TOOL,
    URL,
    WEATHER,
    Cells,
    Forecast,
    main,
)

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=SECONDS)
SAME: Any = {"model": MODEL, "max_tokens": TOKENS}
RESPONSES_TOOL: Any = {"type": "function", "name": CALL["name"], "parameters": SCHEMA, "strict": False}


class Openai(Cells):
    def test_chat(self) -> None:
        done = client.chat.completions.create(messages=MESSAGES, **SAME)
        self.assertEqual(done.choices[0].message.content, GREETING)
        self.assertEqual(done.choices[0].finish_reason, "stop")

    def test_stream(self) -> None:
        with client.chat.completions.stream(messages=MESSAGES, **SAME) as stream:
            pieces = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        self.streamed(pieces, GREETING)
        self.assertEqual(final.choices[0].message.content, GREETING)

    def test_tools(self) -> None:
        first = client.chat.completions.create(messages=QUESTION, tools=[TOOL], **SAME).choices[0]
        self.assertEqual(first.finish_reason, "tool_calls")
        call = self.one(first.message.tool_calls)
        self.assertEqual((call.function.name, json.loads(call.function.arguments)), (CALL["name"], CALL["arguments"]))
        result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        done = client.chat.completions.create(messages=[*QUESTION, first.message, result], tools=[TOOL], **SAME)
        self.assertEqual(done.choices[0].message.content, REPORT)

    def test_forced(self) -> None:
        for choice in ("required", {"type": "function", "function": {"name": CALL["name"]}}):
            done = client.chat.completions.create(messages=MESSAGES, tools=[TOOL], tool_choice=choice, **SAME)
            call = self.one(done.choices[0].message.tool_calls)
            self.forced(call.function.name, call.function.arguments)

    def test_structured(self) -> None:
        done = client.chat.completions.parse(messages=MESSAGES, response_format=Forecast, **SAME)
        self.assertIsInstance(done.choices[0].message.parsed, Forecast)

    def test_responses(self) -> None:
        same: Any = {"model": MODEL, "instructions": SYSTEM, "max_output_tokens": TOKENS, "store": False}
        done = client.responses.create(input=GREET, **same)
        self.assertEqual((done.status, done.output_text), ("completed", GREETING))
        with client.responses.stream(input=GREET, **same) as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        self.streamed(pieces, GREETING)
        first = client.responses.create(input=WEATHER, tools=[RESPONSES_TOOL], **same)
        call = self.one(item for item in first.output if item.type == "function_call")
        self.assertEqual((call.name, json.loads(call.arguments)), (CALL["name"], CALL["arguments"]))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        asked: Any = [{"role": "user", "content": WEATHER}, *first.output, result]
        self.assertEqual(client.responses.create(input=asked, tools=[RESPONSES_TOOL], **same).output_text, REPORT)
        parsed = client.responses.parse(input=GREET, text_format=Forecast, **same)
        self.assertIsInstance(parsed.output_parsed, Forecast)

    def test_usage(self) -> None:
        for _ in range(2):
            usage = client.chat.completions.create(messages=MESSAGES, **SAME).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        self.counted(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens)
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        last = list(client.chat.completions.create(messages=MESSAGES, **options, **SAME))[-1].usage
        self.counted(last.prompt_tokens, last.completion_tokens, last.prompt_tokens_details.cached_tokens)


if __name__ == "__main__":
    main(Openai)
