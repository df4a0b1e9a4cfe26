"""What all Python cells share: what is asked and must come back, and a test case whose results are lines of JSON.

A cell is a method `test_` and its column's name. The script `greet` answers in words: where an answer must have a
shape, or must be a call, only the server can have made it so.
"""

from __future__ import annotations

import json
import os
import unittest
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

SAID = json.loads(Path(__file__).with_name("said.json").read_text())
URL = os.environ.get("ONEFOLD_URL", "http://127.0.0.1:8080")
MODEL, SYSTEM, SCHEMA = SAID["model"], SAID["system"], SAID["schema"]
GREET, GREETING = SAID["greet"], SAID["greeting"]
WEATHER, CALL, RESULT, REPORT = SAID["weather"], SAID["call"], SAID["result"], SAID["report"]
SECONDS = 60.0
TOKENS = 200

MESSAGES: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": GREET}]
QUESTION: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": WEATHER}]
TOOL: Any = {"type": "function", "function": {"name": CALL["name"], "description": "", "parameters": SCHEMA}}


class Forecast(BaseModel, extra="forbid"):
    """Lists of values and no other fields, so that an answer of any model ends. Some clients leave bounds out."""

    city: Literal["Oslo", "Paris", "Lima"]
    days: Literal[1, 2, 3, 4, 5, 6, 7]
    sunny: bool


class Arguments(BaseModel, extra="forbid"):
    """What `SCHEMA` says."""

    city: Literal["Oslo", "Paris", "Lima"]
    days: Annotated[int, Field(ge=1, le=7)]


class Cells(unittest.TestCase):
    maxDiff = None

    def streamed(self, pieces: list[str], whole: str) -> None:
        pieces = [piece for piece in pieces if piece]
        self.assertEqual("".join(pieces), whole)
        self.assertGreater(len(pieces), 1, "the answer came in one piece")

    def one(self, calls: Iterable[Any] | None) -> Any:
        found = list(calls or [])
        self.assertEqual(len(found), 1, f"{len(found)} calls of tools, not one")
        return found[0]

    def forced(self, name: str, arguments: str | dict[str, Any]) -> None:
        """A call that the model would not have made: its arguments keep to the schema."""
        self.assertEqual(name, CALL["name"])
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        Arguments.model_validate(given, strict=True)

    def counted(self, prompt: int | None, completion: int | None, cached: int | None) -> None:
        """Of a request that was asked before. The greeting is three tokens and the end."""
        self.assertGreater(prompt or 0, 20)
        self.assertIn(completion, range(3, 8))
        self.assertGreater(cached or 0, 20, "no cached tokens on a repeat")


class Lines(unittest.TestResult):
    def _line(self, test: unittest.TestCase, problem: str) -> None:
        cell = test.id().rpartition("test_")[2]
        print(json.dumps({"cell": cell, "problem": problem}), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._line(test, "")

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        lines = [line.strip() for line in str(err[1]).splitlines() if line.strip()] or ["no message"]
        self._line(test, f"{type(err[1]).__name__}: {' '.join(lines)}")

    addFailure = addError


def main(cells: type[Cells]) -> None:
    unittest.defaultTestLoader.loadTestsFromTestCase(cells).run(Lines())
