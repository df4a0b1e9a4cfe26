"""Measures what keeping answers to a schema costs: 8 rows with a schema against 8 free ones, in one engine, by turns.

    python benchmarks/guided.py [--rows 8] [--tokens 96] [--repeats 5] [--model demo]
    python benchmarks/guided.py --model llama-8b --most 1.2          (on a GPU: random weights, 128,256 tokens)

The schema needs long answers, so that all rows decode together for as long as the measurement lasts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import onefold

# isort: split
import mlx.core as mx
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
from shapes import llama_model

from onefold.engine.constraint import Constraint, Shape
from onefold.engine.engine import Engine
from onefold.engine.guidance import masks
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


class Timed:
    """The time that masks took on the host."""

    seconds, calls = 0.0, 0

    @classmethod
    def bits(cls, *given: Any) -> Any:
        begun = time.perf_counter()
        found = ORIGINAL(*given)
        cls.seconds, cls.calls = cls.seconds + time.perf_counter() - begun, cls.calls + 1
        return found


ORIGINAL, masks.allowed_bits = masks.allowed_bits, Timed.bits  # type: ignore[assignment]


class Together:
    """Requests that run at once, and the tokens that came while all of them decoded."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._over = 0
        self._all = threading.Event()
        self._tokens = [0] * len(requests)
        self._window: list[tuple[float, int]] = []
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
                    self._tokens[i] = event.tokens
                elif isinstance(event, Done | Failed):
                    self._over += 1
                    self.failed += [event.error] if isinstance(event, Failed) else []
            if len(self._begun) == n and self._over == 0:
                self._window.append((now, sum(self._tokens)))
            if self._over == n:
                self._all.set()

    @property
    def token_ms(self) -> float:
        """The time in which each row got a token, on average."""
        (begun, before), (ended, after) = self._window[0], self._window[-1]
        return 1e3 * (ended - begun) / (after - before) * len(self._tokens)


def requests(engine: Engine, rows: int, tokens: int, constraint: Constraint | None, turn: int) -> list[Request]:
    made = []
    for row in range(rows):
        prompt = engine.chat([{"role": "user", "content": f"List people as JSON, please: list {row} of {turn}."}])
        sampling = Sampling(temperature=0.8)
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
                found.append(run.token_ms)
    return free, guided


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description="What keeping answers to a schema costs.")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--most", type=float, default=1.1, help="the target, as a ratio")
    options = parser.parse_args(given)
    model, tokenizer = llama_8b() if options.model == "llama-8b" else onefold.load(options.model)
    with Engine(model, tokenizer, budget="4GB") as engine:
        return report(engine, options)


def llama_8b() -> tuple[Any, Any]:
    """A model of that shape with random weights in bf16, and a vocabulary of made-up words."""
    shape = {"hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocab": 128256}
    model = llama_model(layers=32, dtype=mx.bfloat16, **shape)  # type: ignore[arg-type]
    return model, made_up_words(shape["vocab"])


def made_up_words(size: int) -> Any:
    """A byte-level tokenizer of so many tokens: bytes, and words of syllables as languages have them."""
    vowels, consonants = "aeiou", "bcdfghklmnprstvw"
    syllables = [c + v + e for c in consonants for v in vowels for e in ("", "n", "r", "st", "l")]
    ends = [f" {syllable}" for syllable in syllables[:100]]
    words = itertools.chain(("".join(w) for n in (1, 2, 3) for w in itertools.product(syllables, repeat=n)), ends)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = dict.fromkeys(alphabet)
    for word in words:
        for written in (word, f"\u0120{word}"):
            vocab.setdefault(written.replace(" ", "\u0120"))
        if len(vocab) >= size - 2:
            break
    made = Tokenizer(models.BPE({word: i for i, word in enumerate([*vocab][: size - 2])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def report(engine: Any, options: argparse.Namespace) -> int:
    free, guided = measure(engine, options.rows, options.tokens, options.repeats)
    ratios = [g / f for f, g in zip(free, guided, strict=True)]
    ratio = statistics.median(ratios)
    masks_ms = 1e3 * Timed.seconds / max(1, Timed.calls)
    print(f"{options.rows} rows, vocabulary of {engine.vocab}, {options.tokens} tokens each, ms per token of a row")
    print(f"  masks, on the host, per step: {masks_ms:.2f}")
    for name, found in (("free", free), ("with a schema", guided)):
        print(f"  {name:14} {statistics.median(found):7.2f}   ({', '.join(f'{x:.2f}' for x in found)})")
    print(f"  ratio          {ratio:7.3f}   ({', '.join(f'{x:.3f}' for x in ratios)}); target <= {options.most}")
    return 0 if ratio <= options.most else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
