"""Four agents, one system prompt: the same requests through Onefold and through mlx-lm's own prompt cache.

    make demo                  # or: python examples/demo.py

The model has random weights, in a shape where KV outweighs everything else: what it says means nothing, but
both sides must say the same.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from rich.console import Console
from rich.table import Table

SYSTEM, AGENTS, TURNS, MESSAGE, ANSWER, CHUNK = 1000, 4, 3, 40, 12, 250


def small_model() -> nn.Module:
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=24,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            rms_norm_eps=1e-5,
            vocab_size=1000,
        )
    )
    mx.eval(model.parameters())
    return model.eval()


def words(n: int, seed: str) -> list[int]:
    return random.Random(seed).choices(range(1000), k=n)


# -- one request, on whatever cache ------------------------------------------------------------------


@dataclass
class Request:
    """A prompt, the layers that hold what was known of it, and what is left to prefill."""

    prompt: list[int]
    rest: list[int]
    layers: list[Any]
    lease: onefold.Lease | None = None
    told: list[int] = field(default_factory=list)

    def prefill(self, model: nn.Module) -> None:
        for at in range(0, len(self.rest), CHUNK):
            logits = model(mx.array([self.rest[at : at + CHUNK]]), cache=self.layers)[:, -1]
            mx.eval(logits, [c.state for c in self.layers])
        self.told = [int(mx.argmax(logits).item())]

    def step(self, model: nn.Module) -> None:
        logits = model(mx.array([self.told[-1:]]), cache=self.layers)[:, -1]
        self.told.append(int(mx.argmax(logits).item()))

    @property
    def held(self) -> list[int]:
        """The tokens whose KV is in the layers: the last one said has not been through the model."""
        return self.prompt + self.told[:-1]


class Ours:
    name = "Onefold"

    def __init__(self, model: nn.Module) -> None:
        self.cache = onefold.PrefixCache(model, "2GB")

    def open(self, prompt: list[int]) -> Request:
        lease = self.cache.lease(prompt)
        return Request(prompt, lease.rest.tolist(), lease.layers, lease)

    def close(self, request: Request) -> None:
        assert request.lease is not None
        request.lease.commit(request.held)

    def end(self) -> None:
        self.cache.check()
        self.cache.close()


class Theirs:
    name = "mlx-lm"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.cache = LRUPromptCache(max_size=100)

    def open(self, prompt: list[int]) -> Request:
        layers, rest = self.cache.fetch_nearest_cache("model", prompt)
        return Request(prompt, rest, layers or make_prompt_cache(self.model))

    def close(self, request: Request) -> None:
        self.cache.insert_cache("model", request.held, request.layers)

    def end(self) -> None:
        pass


# -- the conversations -------------------------------------------------------------------------------


@dataclass
class Result:
    answers: list[list[int]] = field(default_factory=list)
    prefilled: int = 0
    reused: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


def active() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())


def serve(model: nn.Module, side: Ours | Theirs, prompts: list[list[int]], result: Result) -> list[list[int]]:
    """All of `prompts` at once: a token of each in turn. Returns the conversations as they stand then."""
    requests = [side.open(p) for p in prompts]
    for request in requests:
        request.prefill(model)
        result.prefilled += len(request.rest)
        result.reused += len(request.prompt) - len(request.rest)
    for _ in range(ANSWER):
        for request in requests:
            request.step(model)
    for request in requests:
        side.close(request)
        result.answers.append(request.told)
    return [r.prompt + r.told for r in requests]


def play(model: nn.Module, side: Ours | Theirs) -> Result:
    result, base, start = Result(), active(), time.perf_counter()
    mx.reset_peak_memory()
    system = words(SYSTEM, "system")
    serve(model, side, [system], result)
    talks, asked = [system] * AGENTS, list[list[list[int]]]()
    for turn in range(TURNS):
        asked.append([t + words(MESSAGE, f"{agent} {turn}") for agent, t in enumerate(talks)])
        talks = serve(model, side, asked[-1], result)
    branch = asked[1][0][:-MESSAGE] + words(MESSAGE, "another second question")
    serve(model, side, [branch, asked[-1][1]], result)  # one goes another way, one asks the very same again
    result.seconds = time.perf_counter() - start
    result.peak_bytes = int(mx.get_peak_memory()) - base
    result.held_bytes = active() - base
    side.end()
    return result


# -- showing it --------------------------------------------------------------------------------------


def show(ours: Result, theirs: Result, entry_bytes: int, console: Console) -> None:
    def mb(n: int) -> str:
        return f"{n / 1e6:.1f} MB"

    table = Table(title=f"{len(ours.answers)} requests, {ours.prefilled + ours.reused:,} prompt tokens")
    table.add_column("")
    for name in (Ours.name, Theirs.name, "ratio"):
        table.add_column(name, justify="right")
    rows = [
        ("prompt tokens prefilled", ours.prefilled, theirs.prefilled, "{:,}".format),
        ("prompt tokens reused", ours.reused, theirs.reused, "{:,}".format),
        ("KV held at the end", ours.held_bytes, theirs.held_bytes, mb),
        ("peak over the run", ours.peak_bytes, theirs.peak_bytes, mb),
    ]
    for what, a, b, form in rows:
        table.add_row(what, form(a), form(b), f"{a / b:.2f}")
    table.add_row("seconds", f"{ours.seconds:.1f}", f"{theirs.seconds:.1f}", "")
    console.print(table)
    console.print(
        f"Both reuse the system prompt's KV ({mb(entry_bytes)}). mlx-lm holds it once per conversation, and "
        "a second time for every request that is running; Onefold holds it once, and every agent reads it "
        "where it lies."
    )
    same = ours.answers == theirs.answers
    verdict = f"The {len(ours.answers)} answers are identical." if same else "[bold red]The answers differ."
    console.print(verdict)


def main() -> int:
    console, model = Console(width=110), small_model()
    weights = sum(p.nbytes for _, p in tree_flatten(model.parameters()))
    console.print(
        f"{AGENTS} agents share a system prompt of {SYSTEM:,} tokens and talk for {TURNS} turns, all at the "
        "same time; then one branches off and one repeats itself. The model's weights "
        f"({weights / 1e6:.1f} MB) are not counted."
    )
    with console.status("Onefold"):
        ours = play(model, Ours(model))
    with console.status("mlx-lm"):
        theirs = play(model, Theirs(model))
    per_token = 24 * 2 * 2 * 64 * 4
    show(ours, theirs, SYSTEM * per_token, console)
    return 0 if ours.answers == theirs.answers else 1


if __name__ == "__main__":
    sys.exit(main())
