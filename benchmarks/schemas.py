"""Whether answers keep to their schemas: 1,040 of them, 420 not ours (benchmarks/schema_sources.py).

    python benchmarks/schemas.py [--out FILE] [--limit N] [--only ours|theirs] [--seed 1]
    python benchmarks/schemas.py --walk [--walks 3]

For each schema the demo model is asked for one answer, 8 at a time, and it is validated with `jsonschema`. An answer
that comes near the limit of 2,000 tokens is completed there ("closed"). A run takes hours on two cores: with `--out` it
writes a line for each schema, and goes on there when it is started again. `--walk` takes minutes: no model, but tokens
drawn at random from those that are allowed.

Targets: no answer that ended is invalid; at most 2 % are cut at the limit of tokens; at most 15 % of the schemas are
refused, each with a reason; none fails midway.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from decimal import MAX_EMAX, Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import onefold

# isort: split
import jsonschema
import numpy as np
from referencing.exceptions import Unresolvable

sys.path.insert(0, str(Path(__file__).parent))
from schema_sources import Case, cases

from onefold.engine.constraint import Constraint, Shape
from onefold.engine.engine import Engine
from onefold.engine.guidance.compiler import Compiler
from onefold.engine.guidance.masks import allowed_bits
from onefold.engine.request import Done, Failed, Prompt, Request, Sampling, Text
from onefold.errors import Busy, PromptError, RequestError

MOST_TOKENS = 2000
SHOWN = 1500
"""Characters of a schema in the prompt."""
CLOSERS, IN_A_STRING = ("}", "]", '"', ","), ('"', "@", ":")
"""What a walk writes, where it may, so that it comes to an end."""
MOST_DIGITS = 10_000
"""Of a number, when it is divided."""
MOST_OUTSIDE = 1000
"""Where more tokens are allowed, it is in a string."""
MOST_CUT, MOST_REFUSED = 0.02, 0.15


@dataclass(frozen=True)
class Outcome:
    case: str
    source: str
    what: str
    """"valid", "invalid", "closed" (valid, but completed because of the limit), "cut", "refused" or "failed"."""
    why: str = ""
    tokens: int = 0
    text: str = ""
    """Of an answer that is not valid, or did not end by itself."""


def judged(case: Case, text: str, tokens: int, ended: bool) -> Outcome:
    why = invalid(case.schema, text)
    if not ended:
        return Outcome(case.number, case.source, "cut" if why else "closed", "", tokens, text)
    return Outcome(case.number, case.source, "invalid" if why else "valid", why, tokens, text if why else "")


def invalid(schema: Any, text: str) -> str:
    """Why an answer does not keep to a schema; empty if it does. Numbers are decimals: 8234.8 is a multiple of 0.01."""
    schema = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        value = json.loads(text, parse_float=number)
    except (ValueError, ArithmeticError) as error:
        return f"no JSON: {error}"
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        with localcontext(prec=MOST_DIGITS):
            wrong = next(kind(schema).iter_errors(value), None)
    except (Unresolvable, re.error) as broken:
        return f"cannot be validated: {broken}"
    return "" if wrong is None else f"{'/'.join(map(str, wrong.schema_path))}: {wrong.message[:200]}"


def number(text: str) -> Decimal:
    """Reads a number of JSON. One with an exponent that decimals have no room for is the largest of them, or 0."""
    try:
        return Decimal(text)
    except InvalidOperation:
        digits, exponent = text.lower().split("e")
        sign = "-" if digits.startswith("-") else ""
        tiny = exponent.startswith("-") or not digits.strip("-0.")
        return Decimal(f"{sign}0" if tiny else f"{sign}1E{MAX_EMAX}")


class Asking:
    """Answers of the model."""

    def __init__(self, seed: int) -> None:
        self._engine = Engine(*onefold.load("demo"), budget="4GB")
        self._seed = seed

    def __call__(self, case: Case) -> Outcome:
        said = json.dumps(case.schema)[:SHOWN]
        asked = f"Make up an example, and answer with JSON that keeps to this schema:\n{said}"
        request = Request(
            prompt=self._engine.chat([{"role": "user", "content": asked}]),
            max_tokens=MOST_TOKENS,
            sampling=Sampling(temperature=0.7, repetition_penalty=1.1, seed=self._seed),
            constraint=Constraint(shape=Shape("json_schema", json.dumps(case.schema))),
        )
        while True:
            try:
                events = list(self._engine.ask(request))
                break
            except Busy as busy:
                time.sleep(busy.retry_after or 1)
            except PromptError as error:
                return Outcome(case.number, case.source, "refused", str(error))
        last = events[-1]
        if isinstance(last, Failed):
            return Outcome(case.number, case.source, "failed", str(last.error))
        assert isinstance(last, Done)
        text = "".join(event.text for event in events if isinstance(event, Text))
        return judged(case, text, last.completion_tokens, last.finish == "stop")

    def close(self) -> None:
        self._engine.stop()


class Walking:
    """Answers of tokens drawn at random."""

    def __init__(self, seed: int, walks: int) -> None:
        _, self._tokenizer = onefold.load("demo")
        self._compiler = Compiler(self._tokenizer, len(self._tokenizer))
        self._seed, self._walks = seed, walks
        encode = self._tokenizer.encode
        self._closers = {closer: encode(closer, add_special_tokens=False)[0] for closer in CLOSERS + IN_A_STRING}

    def __call__(self, case: Case) -> Outcome:
        """Returns the worst of some walks."""
        found = []
        for i in range(self._walks):
            found.append(self._walk(case, random.Random(f"{self._seed} {case.number} {i}")))
            if found[-1].what not in ("valid", "closed", "cut"):
                return found[-1]
        worst = min(found, key=lambda one: ("cut", "closed", "valid").index(one.what))
        return replace(worst, tokens=sum(one.tokens for one in found))

    def _walk(self, case: Case, draw: random.Random) -> Outcome:
        shape = Shape("json_schema", json.dumps(case.schema))
        request = Request(prompt=Prompt(np.array([1], np.int32)), constraint=Constraint(shape=shape), plain=True)
        try:
            guided = self._compiler.guided(request)
        except PromptError as error:
            return Outcome(case.number, case.source, "refused", str(error))
        assert guided is not None
        guide, tokens = guided.guide, list[int]()
        vocab, end = len(self._tokenizer), min(self._tokenizer.eos_token_ids)
        least = draw.choice((0.02, 0.1, 0.3))
        while len(tokens) < MOST_TOKENS and not guide.completed:
            try:
                may = np.unpackbits(allowed_bits([guide], vocab)[0].view(np.uint8), bitorder="little")[:vocab]
                guide.check()
                haste = least + (0.95 - least) * min(1.0, len(tokens) / 200)
                token = guide.forced[0] if guide.forced else end if may[end] else self._drawn(may, draw, haste)
                if token == end:
                    break
                tokens.append(token)
                guide.read(token, "normal", MOST_TOKENS - len(tokens))
            except RequestError as error:
                return Outcome(case.number, case.source, "failed", str(error), len(tokens))
        ended = len(tokens) < MOST_TOKENS and not guide.completed
        return judged(case, self._tokenizer.decode(tokens), len(tokens), ended)

    def _drawn(self, may: np.ndarray, draw: random.Random, haste: float) -> int:
        allowed = np.flatnonzero(may)
        if draw.random() < haste:
            for closer in IN_A_STRING if len(allowed) > MOST_OUTSIDE else CLOSERS:
                if may[self._closers[closer]]:
                    return self._closers[closer]
        return int(draw.choice(allowed))

    def close(self) -> None:
        self._compiler.close()


def outcomes(answer: Callable[[Case], Outcome], asked: list[Case], rows: int) -> Iterator[Outcome]:
    """In the order in which they come, so that one long answer holds up no other."""
    done: list[Outcome] = []
    ready = threading.Semaphore(0)

    def one(case: Case) -> None:
        try:
            done.append(answer(case))
        finally:
            ready.release()

    with ThreadPoolExecutor(rows) as pool:
        futures = [pool.submit(one, case) for case in asked]
        for i in range(len(asked)):
            ready.acquire()
            if i >= len(done):
                break  # one has raised
            yield done[i]
        for future in futures:
            future.result()


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Whether answers keep to their schemas.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="the first so many schemas")
    parser.add_argument("--only", choices=("all", "ours", "theirs"), default="all")
    parser.add_argument("--rows", type=int, default=8, help="answers at a time")
    parser.add_argument("--walk", action="store_true", help="tokens at random, and no model")
    parser.add_argument("--walks", type=int, default=3, help="for each schema")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="a line for each schema; goes on there")
    kept = Path(tempfile.gettempdir(), "onefold-schemas")
    parser.add_argument("--folder", type=Path, default=kept, help="where packages are kept that schemas come from")
    options = parser.parse_args(given)
    asked = cases(options.seed, options.only, options.folder)[: options.limit]
    found = read(options.out, {case.number for case in asked})
    rest = [case for case in asked if case.number not in found]
    answer: Any = Walking(options.seed, options.walks) if options.walk else Asking(options.seed)
    begun = time.monotonic()
    try:
        for outcome in outcomes(answer, rest, 1 if options.walk else options.rows):
            found[outcome.case] = outcome
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
            if outcome.what in ("invalid", "failed"):
                print(f"{outcome.what}: {outcome.case}: {outcome.why}\n  {outcome.text[:300]}", flush=True)
    finally:
        answer.close()
    return report(list(found.values()), time.monotonic() - begun)


def read(file: Path | None, wanted: set[str]) -> dict[str, Outcome]:
    if file is None or not file.exists():
        return {}
    lines = [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]
    return {outcome.case: outcome for outcome in lines if outcome.case in wanted}


def report(found: list[Outcome], seconds: float) -> int:
    kinds = ("valid", "closed", "invalid", "cut", "refused", "failed")
    print(f"\n{'source':12} {'schemas':>8} " + " ".join(f"{kind:>8}" for kind in kinds))
    for source in (*sorted({one.source for one in found}), "all"):
        here = [one.what for one in found if source in (one.source, "all")]
        print(f"{source:12} {len(here):8} " + " ".join(f"{here.count(kind):8}" for kind in kinds))
    reasons = collections.Counter(_kind_of(one.why) for one in found if one.what == "refused")
    print("\nrefused:")
    for why, n in reasons.most_common():
        print(f"{n:5}  {why}")
    count = collections.Counter(one.what for one in found)
    answered = max(1, len(found) - count["refused"])
    cut, refused = count["cut"] / answered, count["refused"] / max(1, len(found))
    tokens = sum(one.tokens for one in found)
    print(f"\n{tokens} tokens, {seconds:.0f} s in this run; cut {cut:.1%} (target <= {MOST_CUT:.0%}), ", end="")
    print(f"closed at the limit {count['closed'] / answered:.1%}, ", end="")
    print(f"refused {refused:.1%} (target <= {MOST_REFUSED:.0%}), invalid {count['invalid']}, failed {count['failed']}")
    return int(cut > MOST_CUT or refused > MOST_REFUSED or count["invalid"] + count["failed"] > 0)


def _kind_of(why: str) -> str:
    """A reason without what is particular to a schema."""
    return re.sub(r"(regex|Resource|URI|SearchRegex|property|Failed) .*", r"\1 ...", why)[:150]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
