"""Instructor on OpenAI's client: every answer is an object of a class."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from cell import MESSAGES, MODEL, SECONDS, TOKENS, URL, Cells, Forecast, main

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=SECONDS)
SAME: Any = {"model": MODEL, "max_retries": 0}
CHAT: Any = {**SAME, "max_tokens": TOKENS, "messages": MESSAGES}


class Instructor(Cells):
    def test_stream(self) -> None:
        made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        parts = list(made.create_partial(response_model=Forecast, **CHAT))
        self.assertGreater(len(parts), 1, "the object came in one piece")
        Forecast.model_validate(parts[-1].model_dump(), strict=True)

    def test_forced(self) -> None:
        made = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        self.assertIsInstance(made.create(response_model=Forecast, **CHAT), Forecast)

    def test_structured(self) -> None:
        made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        self.assertIsInstance(made.create(response_model=Forecast, **CHAT), Forecast)

    def test_responses(self) -> None:
        made = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
        found = made.create(response_model=Forecast, messages=MESSAGES, max_output_tokens=TOKENS, **SAME)
        self.assertIsInstance(found, Forecast)

    def test_usage(self) -> None:
        made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        for _ in range(2):
            _, completion = made.create_with_completion(response_model=Forecast, **CHAT)
        usage = completion.usage
        self.assertGreater(usage.completion_tokens, 0)
        self.assertGreater(usage.prompt_tokens_details.cached_tokens, 20, "no cached tokens on a repeat")


if __name__ == "__main__":
    main(Instructor)
