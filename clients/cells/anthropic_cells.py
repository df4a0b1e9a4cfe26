"""Anthropic's own Python client."""

from __future__ import annotations

from typing import Any

import anthropic
from cell import (
    CALL,
    GREET,
    GREETING,
    MODEL,
    REPORT,
    RESULT,
    SCHEMA,
    SECONDS,
    SYSTEM,
    TOKENS,
    URL,
    WEATHER,
    Cells,
    Forecast,
    main,
)

client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0, timeout=SECONDS)
SAME: Any = {"model": MODEL, "max_tokens": TOKENS, "system": SYSTEM}
MESSAGES: Any = [{"role": "user", "content": GREET}]
QUESTION: Any = [{"role": "user", "content": WEATHER}]
TOOL: Any = {"name": CALL["name"], "description": "", "input_schema": SCHEMA}


class Anthropic(Cells):
    def test_chat(self) -> None:
        done = client.messages.create(messages=MESSAGES, **SAME)
        self.assertEqual([(block.type, block.text) for block in done.content], [("text", GREETING)])
        self.assertEqual(done.stop_reason, "end_turn")

    def test_stream(self) -> None:
        with client.messages.stream(messages=MESSAGES, **SAME) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        self.streamed(pieces, GREETING)
        self.assertEqual(final.content[0].text, GREETING)

    def test_tools(self) -> None:
        with client.messages.stream(messages=QUESTION, tools=[TOOL], **SAME) as stream:
            streamed = stream.get_final_message()
        whole = client.messages.create(messages=QUESTION, tools=[TOOL], **SAME)
        for first in (streamed, whole):
            self.assertEqual(first.stop_reason, "tool_use")
            use = self.one(block for block in first.content if block.type == "tool_use")
            self.assertEqual((use.name, use.input), (CALL["name"], CALL["arguments"]))
            result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
            later = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            done = client.messages.create(messages=[*QUESTION, *later], tools=[TOOL], **SAME)
            self.assertEqual(done.content[0].text, REPORT)

    def test_forced(self) -> None:
        for choice in ({"type": "any"}, {"type": "tool", "name": CALL["name"]}):
            done = client.messages.create(messages=MESSAGES, tools=[TOOL], tool_choice=choice, **SAME)
            use = self.one(block for block in done.content if block.type == "tool_use")
            self.forced(use.name, use.input)

    def test_structured(self) -> None:
        done = client.messages.parse(messages=MESSAGES, output_format=Forecast, **SAME)
        self.assertIsInstance(done.parsed_output, Forecast)

    def test_usage(self) -> None:
        for _ in range(2):
            usage = client.messages.create(messages=MESSAGES, **SAME).usage
        cached = usage.cache_read_input_tokens or 0
        self.counted(usage.input_tokens + cached, usage.output_tokens, cached)
        with client.messages.stream(messages=MESSAGES, **SAME) as stream:
            usage = stream.get_final_message().usage
        cached = usage.cache_read_input_tokens or 0
        self.counted(usage.input_tokens + cached, usage.output_tokens, cached)
        counted = client.messages.count_tokens(messages=MESSAGES, model=MODEL, system=SYSTEM)
        self.assertEqual(counted.input_tokens, usage.input_tokens + cached)


if __name__ == "__main__":
    main(Anthropic)
