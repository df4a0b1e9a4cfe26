"""Measures what a turn writes to disk, by kind of model and mode, and what of it can be resumed, before and after a
restart.

    python benchmarks/turns.py [--turns 20] [--tokens 25] [--window 256]

A turn's target, written through: 1.1 times its full-attention KV and the window's KV of min(turn, window) tokens. A
recurrent state cannot be cut, so a hybrid writes one state a turn beside its KV.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import onefold

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step

sys.path.insert(0, str(Path(__file__).parent))
from problems_driving import on_disk
from shapes import gemma_model, hybrid_model, llama_model

ANSWER = 5
FIRST = 200
"""Tokens before the first turn."""


class Conversation:
    def __init__(self, cache: onefold.PrefixCache, model: Any) -> None:
        self.cache, self.model = cache, model
        self.said: list[int] = []
        self.ends: list[int] = []
        self._draw = random.Random(1)

    def turn(self, tokens: int) -> None:
        prompt = self.said + self._draw.choices(range(1, 90), k=tokens)
        with self.cache.lease(prompt) as lease:
            made = generate_step(mx.array(lease.rest), self.model, max_tokens=ANSWER, prompt_cache=lease.layers)
            self.said = (prompt + [int(token) for token, _ in made])[: lease.offset]
            lease.commit(self.said)
        self.ends.append(len(self.said))


def reused(cache: onefold.PrefixCache, prompt: list[int], most: int) -> float:
    """Which share of the tokens that could be reused for this prompt are."""
    with cache.lease(prompt) as lease:
        found = lease.cached / most
        lease.cancel()
    return found


def edited(cache: onefold.PrefixCache, talk: Conversation) -> float:
    """The same for an edit of each question but the first, the last ten turns aside."""
    ends = talk.ends[:-10] or talk.ends[:1]
    return sum(reused(cache, [*talk.said[:end], 95, 96, 97], end) for end in ends) / len(ends)


def again(cache: onefold.PrefixCache, talk: Conversation) -> float:
    """The same for the last answer, asked for once more."""
    prompt = talk.said[: talk.ends[-1] - ANSWER + 1]
    return reused(cache, prompt, len(prompt) - 1)


def measure(model: Any, kv: str, mode: str, options: argparse.Namespace, folder: str) -> list[str]:
    with on_disk(model, folder, "400MB", kv=kv, disk_mode=mode) as cache:
        talk = Conversation(cache, model)
        talk.turn(FIRST)
        cache.flush(60, everything=True)
        before = cache.stats().disk.written_bytes
        for _ in range(options.turns):
            talk.turn(options.tokens - ANSWER)
            if mode == "through":
                cache.flush(60)
        in_memory = again(cache, talk), edited(cache, talk)
        cache.flush(60, everything=True)
        written = (cache.stats().disk.written_bytes - before) / options.turns
        tokens = (len(talk.said) - talk.ends[0]) / options.turns
        full = tokens * cache.state.store.token_bytes
        stats = cache.stats()
        held, points = stats.checkpoints, stats.bytes["checkpoint"]
    with on_disk(model, folder, "400MB", kv=kv, disk_mode=mode) as cache:
        restarted = again(cache, talk), edited(cache, talk)
    shown = [f"{value:.0%}" for value in (*in_memory, *restarted)]
    return [f"{full:,.0f}", f"{written:,.0f}", f"{written / full:.2f}", f"{held}: {points:,}", *shown]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=25, help="of a turn, question and answer")
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args(given)
    kinds = {
        "full": (llama_model(layers=6), "16"),
        "8 bits": (llama_model(layers=6), "8"),
        "sliding, 5 of 6": (gemma_model(layers=6, window=options.window), "16"),
        "hybrid, 3 of 4": (hybrid_model(layers=8), "16"),
    }
    print(f"{options.turns} turns of {options.tokens} tokens after {FIRST}; window {options.window}")
    names = "model, mode, full KV, written, ratio, checkpoints and bytes, again, edited, again after a restart, edited"
    print(f"| {names.replace(', ', ' | ')} |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, (model, kv) in kinds.items():
        for mode in ("through", "back"):
            with tempfile.TemporaryDirectory() as folder:
                row = measure(model, kv, mode, options, folder)
            print(f"| {name} | {mode} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
