"""The engine on a GPU: Llama-8B shape, random weights, bf16, beside mlx-lm's generate_step and BatchGenerator.

    python benchmarks/gpu_serve.py [--layers 32] [--tokens 16384] [--rows 8 32] [--bits 4] [--only alone together ...]

alone      one stream after a long prompt: ms per token, beside generate_step
turns      the next turn of that conversation: time to its first token, and the peak over what is held
together   several requests with prompts of their own: seconds until all decode, and the median step while they do;
           beside BatchGenerator, once before the engine is open and once after it; and beside the bare forward of
           mlx-lm's batch: no sampling, no bookkeeping, the next step built while the device works
agents     several requests on one long prefix, cold and all at once: tokens prefilled, time, the peak over the weights
joining    500 steps while requests come and go: the slowest step beside the median
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import BatchKVCache

sys.path.insert(0, str(Path(__file__).parent))
from shapes import llama_model

from onefold.engine.engine import Engine
from onefold.engine.request import Done, Event, Prompt, Request, Sampling, Text

Say = Callable[[str], None]


class Numbers:
    """A tokenizer whose words are numbers: what an answer says is not what is measured."""

    eos_token_ids = frozenset({-1})
    has_thinking = has_tool_calling = has_chat_template = False

    class Detokenizer:
        def __init__(self) -> None:
            self.last_segment = ""

        def add_token(self, token: int) -> None:
            self.last_segment = f"{token} "

        def finalize(self) -> None:
            self.last_segment = ""

    @property
    def detokenizer(self) -> Any:
        return self.Detokenizer()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def __len__(self) -> int:
        return 1 << 17


class Asked:
    def __init__(self, engine: Engine, tokens: list[int], n: int) -> None:
        self.times: list[float] = []
        self.text = ""
        self.hit: Any = None
        self._over = threading.Event()
        self.begun = time.perf_counter()
        prompt = Prompt(np.array(tokens, np.int32))
        request = Request(prompt=prompt, max_tokens=n, sampling=Sampling(temperature=0), plain=True)
        self.number = engine.submit(request, self._deliver)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Text):
                self.times.append(time.perf_counter())
                self.text += event.text
            elif isinstance(event, Done):
                self.hit = event.hit
                self._over.set()
            elif type(event).__name__ == "Failed":
                print(event)
                self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> Asked:
        self._over.wait(300)
        return self


def settle() -> int:
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    return int(mx.get_active_memory())


def ms(times: list[float]) -> float:
    return (times[-1] - times[8]) / (len(times) - 9) * 1e3


class Words:
    """Random tokens, other ones at each call."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._rng = np.random.default_rng(0)

    def __call__(self, n: int) -> list[int]:
        return self._rng.integers(0, self._vocab, n).tolist()  # type: ignore[no-any-return]


def stock_alone(model: Any, long: list[int], out: Say) -> list[int]:
    """One conversation on mlx-lm's generate_step. Returns its tokens."""
    times, begun = [], time.perf_counter()
    tokens = []
    for token, _ in generate_step(mx.array(long), model, max_tokens=128):
        times.append(time.perf_counter())
        tokens.append(int(token))
    out(f"alone     generate_step  {ms(times):7.2f} ms/token, cold first token {times[0] - begun:.2f} s")
    gc.collect()
    settle()
    return tokens


def alone(engine: Engine, long: list[int], stock_tokens: list[int], words: Words, out: Say) -> None:
    """One conversation on the engine, and two turns more of it."""
    asked = Asked(engine, long, 128).wait()
    first = asked.times[0] - asked.begun
    out(f"alone     engine         {ms(asked.times):7.2f} ms/token, cold first token {first:.2f} s")
    same = sum(a == str(b) for a, b in zip(asked.text.split(), stock_tokens, strict=False))
    out(f"          same tokens as generate_step: {same} of 128")
    answer = [int(t) for t in asked.text.split()]
    held = settle()
    turn = Asked(engine, [*long, *answer, *words(60)], 64).wait()
    entry = len(long) * engine.cache.inventory.token_bytes
    out(
        f"turns     first token {(turn.times[0] - turn.begun) * 1e3:.0f} ms, cached {turn.hit.cached}, "
        f"peak over held {(mx.get_peak_memory() - held) / 1e9:.2f} GB (entry {entry / 1e9:.2f} GB)"
    )
    turn = Asked(engine, [*long, *answer, *words(600)], 64).wait()
    out(
        f"          600 new tokens: first token {(turn.times[0] - turn.begun) * 1e3:.0f} ms, cached {turn.hit.cached}"
    )
    engine.clear()


ANSWER = 1024
"""The most tokens of an answer, where several requests run at once."""
STEPS = 96
"""Steps that are measured, in which all of them decode."""


def median_step(all_times: list[list[float]]) -> float:
    """Returns the median time between two tokens while all rows decode, in ms; not a number if they never do."""
    first, last = max(times[1] for times in all_times), min(times[-1] for times in all_times)
    steps = [b - a for times in all_times for a, b in itertools.pairwise(times) if first <= a and b <= last]
    return 1e3 * statistics.median(steps) if steps else float("nan")


def ask_all(engine: Engine, prompts: list[list[int]]) -> tuple[float, float]:
    """Asks for all answers at once, and cancels them after `STEPS` steps in which all of them decode. Returns the
    seconds until all do, and the median step in ms."""
    rows = [Asked(engine, prompt, ANSWER) for prompt in prompts]
    while not all(len(row.times) > 1 for row in rows):
        time.sleep(0.005)
        if any(row.over for row in rows):
            return float("nan"), float("nan")
    began = max(row.times[1] for row in rows)
    counts = [len(row.times) for row in rows]
    while not any(row.over or len(row.times) >= n + STEPS for row, n in zip(rows, counts, strict=True)):
        time.sleep(0.005)
    step = median_step([list(row.times) for row in rows])
    for row in rows:
        engine.cancel(row.number)
    while engine.stats().decoding:
        time.sleep(0.005)
    return began - rows[0].begun, step


def together(engine: Engine, n_rows: int, words: Words, weights: int, out: Say) -> None:
    """Several conversations at once on the engine."""
    for run in ("cold", "warm"):  # kernels are made at their first use
        prompts = [words(1000 + 37 * i) for i in range(n_rows)]
        settle()
        began, step = ask_all(engine, prompts)
        peak = (mx.get_peak_memory() - weights) / 1e9
        out(
            f"together  {n_rows} rows, engine, {run}: all decode after {began:.2f} s, {step:.2f} ms/step, "
            f"peak {peak:.2f} GB"
        )
        engine.clear()


def stock_together(model: Any, n_rows: int, words: Words, weights: int, out: Say, run: str) -> None:
    """The same in mlx-lm's BatchGenerator."""
    prompts = [words(1000 + 37 * i) for i in range(n_rows)]
    settle()
    prefilled = min(n_rows, 8)
    generator = BatchGenerator(model, max_tokens=ANSWER, completion_batch_size=n_rows, prefill_batch_size=prefilled)
    begun = time.perf_counter()
    generator.insert(prompts, [ANSWER] * n_rows)
    times: list[float] = []
    while len(times) <= STEPS:
        _, responses = generator.next()
        times += [time.perf_counter()] if len(responses) == n_rows else []
    peak, step = (mx.get_peak_memory() - weights) / 1e9, median_step([times])
    out(
        f"together  {n_rows} rows, stock, {run}: all decode after {times[0] - begun:.2f} s, {step:.2f} ms/step, "
        f"peak {peak:.2f} GB"
    )
    generator.close()
    del generator, responses  # which holds the rows it ended with


def bare(model: Any, n_rows: int, words: Words, out: Say) -> None:
    """The forward of mlx-lm's batch alone, with rows of one length."""
    settle()
    caches = [BatchKVCache([0] * n_rows) for _ in model.layers]
    mx.eval(model(mx.array([words(1000) for _ in range(n_rows)]), cache=caches)[:, -1])
    y, took = mx.array([[5]] * n_rows), []
    for _ in range(80):
        start = time.perf_counter()
        following = mx.argmax(model(y, cache=caches)[:, -1], axis=-1, keepdims=True)
        mx.async_eval(following)
        y.tolist()
        y = following
        took.append(time.perf_counter() - start)
    mx.eval(y)
    out(f"          {n_rows} rows, bare forward of mlx-lm's batch: {1e3 * statistics.median(took[8:]):.2f} ms/step")


def joining(engine: Engine, n_rows: int, words: Words, out: Say) -> None:
    """A long answer beside short ones, of which one ends and another begins all the time."""
    long = Asked(engine, words(300), 500)
    short: list[Asked] = []
    while not long.over:
        short = [asked for asked in short if not asked.over]
        while len(short) < n_rows - 1:
            short.append(Asked(engine, words(24 + 5 * len(short)), 60 + 9 * len(short)))
        time.sleep(0.002)
    for asked in short:
        asked.wait()
    took = sorted(b - a for a, b in itertools.pairwise(long.times))
    middle = statistics.median(took)
    slow = ", ".join(f"{1e3 * x:.1f}" for x in took[-5:])
    out(
        f"joining   {len(took)} steps beside {n_rows - 1} short requests: median {1e3 * middle:.2f} ms, "
        f"slowest {slow} ms ({took[-1] / middle:.1f} x the median)"
    )
    engine.clear()


def agents(engine: Engine, tokens: int, n_rows: int, words: Words, weights: int, out: Say) -> None:
    """Several conversations that share a long prefix."""
    for run in ("cold", "warm"):
        engine.clear()
        settle()
        before = engine.stats().prefilled_tokens
        prefix = words(tokens)
        began, step = ask_all(engine, [[*prefix, *words(40 + i)] for i in range(n_rows)])
        peak, done = (mx.get_peak_memory() - weights) / 1e9, engine.stats().prefilled_tokens - before
        out(f"agents    {n_rows} on {tokens} new tokens, {run}: {done} prefilled, all decode after {began:.2f} s")
        out(f"          {step:.2f} ms/step, peak {peak:.2f} GB")
        began, step = ask_all(engine, [[*prefix, *words(2000 + 37 * i)] for i in range(n_rows)])
        out(f"          and 2000 of its own each: all decode after {began:.2f} s, {step:.2f} ms/step")


PARTS = ("alone", "together", "agents", "joining")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    parser.add_argument("--bits", type=int, help="quantise the weights")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    shape = {"hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocab": 32000}
    model = llama_model(layers=given.layers, dtype=mx.bfloat16, **shape)  # type: ignore[arg-type]
    if given.bits is not None:
        nn.quantize(model, group_size=64, bits=given.bits)
        mx.eval(model.parameters())
    words = Words(model.args.vocab_size)
    weights = settle()
    begun = time.perf_counter()

    def out(line: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {line}", flush=True)

    long = words(given.tokens)
    stock_tokens = stock_alone(model, long, out) if "alone" in given.only else []
    stock_rows = given.rows if "together" in given.only else []
    for n_rows in stock_rows:
        stock_together(model, n_rows, words, weights, out, "before the engine")
    engine = Engine(model, Numbers(), budget="60GB")
    gc.collect()
    gc.freeze()  # as the server does
    out("the engine has started")
    if "alone" in given.only:
        alone(engine, long, stock_tokens, words, out)
    for n_rows in given.rows:
        if "together" in given.only:
            together(engine, n_rows, words, weights, out)
        if "agents" in given.only:
            agents(engine, given.tokens, n_rows, words, weights, out)
        if "joining" in given.only:
            joining(engine, n_rows, words, out)
    engine.check()
    held = engine.cache.inventory.held_bytes
    settle()
    used = mx.get_active_memory() - weights
    out(f"          at the end the ledger has {held / 1e9:.3f} GB, memory {used / 1e9:.3f} GB")
    out(f"          attention: {engine.cache.stats().attention}")
    engine.stop()
    for n_rows in stock_rows:
        stock_together(model, n_rows, words, weights, out, "after the engine")
        bare(model, n_rows, words, out)


if __name__ == "__main__":
    main()
