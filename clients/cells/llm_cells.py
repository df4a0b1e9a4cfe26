"""The command `llm`, and its Python API where the command prints too little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cell import (
    CALL,
    GREET,
    GREETING,
    MODEL,
    REPORT,
    RESULT,
    SECONDS,
    SYSTEM,
    TOKENS,
    URL,
    WEATHER,
    Cells,
    Forecast,
    main,
)

FOLDER = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(FOLDER)
SAME = {"model_name": MODEL, "api_base": f"{URL}/v1", "supports_tools": True, "supports_schema": True}
MODELS = [{"model_id": "here", **SAME}, {"model_id": "here-responses", "responses": True, **SAME}]
(FOLDER / "extra-openai-models.yaml").write_text(json.dumps(MODELS))  # JSON is YAML, too

import llm  # noqa: E402  it reads the folder


def command(*arguments: str) -> str:
    """What the command prints."""
    given = [sys.executable, "-m", "llm", *arguments, "--system", SYSTEM, "-o", "max_tokens", str(TOKENS)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return done.stdout.rstrip("\n")


def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    CALLS.append({"city": city, "days": days})
    return str(RESULT)


CALLS: list[dict[str, Any]] = []


class Llm(Cells):
    def test_chat(self) -> None:
        self.assertEqual(command("-m", "here", "--no-stream", GREET), GREETING)

    def test_stream(self) -> None:
        self.streamed(list(llm.get_model("here").prompt(GREET, system=SYSTEM, max_tokens=TOKENS)), GREETING)
        self.assertEqual(command("-m", "here", GREET), GREETING)

    def test_tools(self) -> None:
        CALLS.clear()
        chain = llm.get_model("here").chain(WEATHER, system=SYSTEM, tools=[get_weather])
        self.assertEqual(chain.text(), REPORT)
        self.assertEqual(CALLS, [CALL["arguments"]])

    def test_structured(self) -> None:
        schema = json.dumps(Forecast.model_json_schema())
        Forecast.model_validate_json(command("-m", "here", "--schema", schema, GREET), strict=True)

    def test_responses(self) -> None:
        found = llm.get_model("here-responses").prompt(GREET, system=SYSTEM)
        self.streamed(list(found), GREETING)

    def test_usage(self) -> None:
        for _ in range(2):
            found = llm.get_model("here").prompt(GREET, system=SYSTEM, max_tokens=TOKENS)
            found.text()
        usage = found.usage()
        cached = (usage.details or {}).get("prompt_tokens_details", {}).get("cached_tokens")
        self.counted(usage.input, usage.output, cached)


if __name__ == "__main__":
    main(Llm)
