"""Pydantic AI, with its models for OpenAI's two APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from cell import CALL, GREET, GREETING, MODEL, REPORT, RESULT, SYSTEM, TOKENS, URL, WEATHER, Cells, Forecast, main
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
model = OpenAIChatModel(MODEL, provider=provider)
SAME: Any = {"instructions": SYSTEM, "model_settings": {"max_tokens": TOKENS}, "retries": 0}


def with_tool(agent: Agent[None, Any]) -> list[tuple[str, int]]:
    """Gives the agent the tool, and returns the list of its calls."""
    calls: list[tuple[str, int]] = []

    @agent.tool_plain(name=CALL["name"])
    def get_weather(city: Literal["Oslo", "Paris", "Lima"], days: int) -> str:
        calls.append((city, days))
        return str(RESULT)

    return calls


class PydanticAi(Cells):
    def test_chat(self) -> None:
        self.assertEqual(Agent(model, **SAME).run_sync(GREET).output, GREETING)

    def test_stream(self) -> None:
        async def pieces() -> list[str]:
            async with Agent(model, **SAME).run_stream(GREET) as stream:
                return [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]

        self.streamed(asyncio.run(pieces()), GREETING)

    def test_tools(self) -> None:
        agent = Agent(model, **SAME)
        calls = with_tool(agent)
        self.assertEqual(agent.run_sync(WEATHER).output, REPORT)
        self.assertEqual(calls, [tuple(CALL["arguments"].values())])

    def test_forced(self) -> None:
        found = Agent(model, output_type=ToolOutput(Forecast), **SAME).run_sync(GREET).output
        self.assertIsInstance(found, Forecast)

    def test_structured(self) -> None:
        found = Agent(model, output_type=NativeOutput(Forecast), **SAME).run_sync(GREET).output
        self.assertIsInstance(found, Forecast)

    def test_responses(self) -> None:
        responses = OpenAIResponsesModel(MODEL, provider=provider)
        self.assertEqual(Agent(responses, **SAME).run_sync(GREET).output, GREETING)
        agent = Agent(responses, **SAME)
        calls = with_tool(agent)
        self.assertEqual(agent.run_sync(WEATHER).output, REPORT)
        self.assertEqual(calls, [tuple(CALL["arguments"].values())])

    def test_usage(self) -> None:
        for _ in range(2):
            done = Agent(model, **SAME).run_sync(GREET)
        usage = done.usage() if callable(done.usage) else done.usage
        self.counted(usage.input_tokens, usage.output_tokens, usage.cache_read_tokens)


if __name__ == "__main__":
    main(PydanticAi)
