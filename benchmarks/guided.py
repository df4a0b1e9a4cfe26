"""Measures what keeping answers to a schema costs: 8 rows with a schema against 8 free ones, in one engine, by turns.

    python benchmarks/guided.py [--rows 8] [--tokens 96] [--repeats 5] [--model demo]

The schema allows long answers, so that all rows decode together for as long as the measurement lasts. Forced tokens are
not fed ahead in it: with 8 rows a forward of its own for a few tokens would not pay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from typing import Any

import onefold
from onefold.engine.constraint import Constraint, Shape
from onefold.engine.engine import Engine
from onefold.engine.request import Done, Event, Failed, Generated, Request, Sampling

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 200,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "email": {"type": "string", "pattern": "^[a-z.]{1,12}@[a-z]{1,8}\\.(com|org)$"},
                    "role": {"enum": ["cook", "smith", "farmer", "clerk"]},
                    "note": {"anyOf": [{"type": "string", "maxLength": 80}, {"type": "null"}]},
                },
                "required": ["name", "age", "email", "role", "note"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}


class Together:
    """Requests that run at once: when each step of the first of them came, while all of them decoded."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._over = 0
        self._all = threading.Event()
        self.times: list[float] = []
        self.failed: list[Exception] = []
        for i, request in enumerate(requests):
            engine.submit(request, lambda events, i=i: self._note(i, len(requests), events))  # type: ignore[misc]
        self._all.wait()

    def _note(self, i: int, n: int, events: list[Event]) -> None:
        now = time.perf_counter()
        with self._lock:
            for event in events:
                if isinstance(event, Generated):
                    self._begun.add(i)
                elif isinstance(event, Done | Failed):
                    self._over += 1
                    self.failed += [event.error] if isinstance(event, Failed) else []
            if i == 0 and len(self._begun) == n and self._over == 0:
                self.times.append(now)
            if self._over == n:
                self._all.set()

    @property
    def step_ms(self) -> float:
        """The mean time of a step: the median would leave out masks that take long."""
        return 1e3 * (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


def requests(engine: Engine, rows: int, tokens: int, constraint: Constraint | None, turn: int) -> list[Request]:
    made = []
    for row in range(rows):
        prompt = engine.chat([{"role": "user", "content": f"List people as JSON, please: list {row} of {turn}."}])
        sampling = Sampling(temperature=0.8, logit_bias=dict.fromkeys(engine.tokenizer.eos_token_ids, -100.0))
        made.append(Request(prompt=prompt, max_tokens=tokens, sampling=sampling, constraint=constraint))
    return made


def measure(engine: Engine, rows: int, tokens: int, repeats: int) -> tuple[list[float], list[float]]:
    shape = Constraint(shape=Shape("json_schema", json.dumps(SCHEMA)))
    free: list[float] = []
    guided: list[float] = []
    for turn in range(repeats + 1):
        for constraint, found in ((None, free), (shape, guided)):
            run = Together(engine, requests(engine, rows, tokens, constraint, turn))
            if run.failed:
                raise run.failed[0]
            if turn:  # the first turn compiles
                found.append(run.step_ms)
    return free, guided


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description="What keeping answers to a schema costs.")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--most", type=float, default=1.1, help="the target, as a ratio")
    options = parser.parse_args(given)
    model, tokenizer = onefold.load(options.model)
    with Engine(model, tokenizer, budget="4GB") as engine:
        return report(engine, options)


def report(engine: Any, options: argparse.Namespace) -> int:
    free, guided = measure(engine, options.rows, options.tokens, options.repeats)
    ratios = [g / f for f, g in zip(free, guided, strict=True)]
    ratio = statistics.median(ratios)
    print(f"{options.rows} rows, vocabulary of {engine.vocab}, {options.tokens} tokens each, ms per step")
    for name, found in (("free", free), ("with a schema", guided)):
        print(f"  {name:14} {statistics.median(found):7.2f}   ({', '.join(f'{x:.2f}' for x in found)})")
    print(f"  ratio          {ratio:7.3f}   ({', '.join(f'{x:.3f}' for x in ratios)}); target <= {options.most}")
    return 0 if ratio <= options.most else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
