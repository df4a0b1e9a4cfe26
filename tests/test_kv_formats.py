"""What quantised KV promises: reuse has the same codes but for rounding, and logits within a tolerance per format.

A key or value that was computed in another call differs by rounding (about 1e-6 of its scale). Where that crosses the
border between two codes, the code differs by one step, which is far more than 1e-6, and what is computed from it
differs by that much.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from driving import forward, greedy
from fake import RoundedRing
from tiny import tiny

import onefold

TOLERANCE = {"16": 1e-4, "8": 2e-3, "4": 2e-2}
"""Of the logits' scale. Measured: 3e-6, 5e-4 and 2e-4 at most."""
FLIPPED = 1e-3
"""The share of codes that may differ: most are of tokens that attend to the first one that did. Measured: 2e-4."""


SEEDS = (0, 3)
GRID = 32


def words(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


def codes(layers: list[Any], bits: int) -> list[mx.array]:
    """The codes of every layer's keys and values, one integer per entry."""
    found = []
    for layer in layers:
        arrays = layer.snapshot(0).arrays
        for packed in (arrays[0], arrays[3]):
            shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
            found.append(((packed[..., None] >> shifts) & (2**bits - 1)).astype(mx.int32))
    return found


def replayed(model: Any, kv: str, tokens: list[int], out: list[int]) -> tuple[list[mx.array], list[mx.array]]:
    """The same tokens in a fresh cache: logits and codes."""
    with onefold.PrefixCache(model, "64MB", kv=kv) as cache, cache.lease(tokens) as lease:
        seen = [forward(model, lease.layers, tokens, 0, GRID)]
        for token in out:
            seen.append(model(mx.array([[token]]), cache=lease.layers)[:, -1, :])
            mx.eval(seen[-1])
        return seen, codes(lease.layers, int(kv)) if kv != "16" else []


@pytest.mark.parametrize("kv", ["16", "8", "4"])
def test_a_warm_run_equals_a_cold_one_as_far_as_the_format_allows(kv: str) -> None:
    worst, flipped, total, steps = 0.0, 0, 0, 0
    for seed in SEEDS:
        model = tiny("llama_q", seed=seed)
        with onefold.PrefixCache(model, "64MB", kv=kv) as cache:
            conversation = words(100, seed)
            for turn in range(2):
                tokens = conversation + words(20, 10 * seed + turn)
                with cache.lease(tokens) as lease:
                    logits = forward(model, lease.layers, tokens, lease.cached, GRID)
                    out, seen = greedy(model, lease.layers, logits, 6)
                    warm = codes(lease.layers, int(kv)) if kv != "16" else []
                    lease.commit(tokens + out)
                reference, cold = replayed(model, kv, tokens, out)
                for a, b in zip(seen, reference, strict=True):
                    worst = max(worst, (mx.abs(a - b).max() / mx.abs(b).max()).item())
                for a, b in zip(warm, cold, strict=True):
                    steps = max(steps, mx.abs(a - b).max().item())
                    flipped, total = flipped + int((a != b).sum().item()), total + a.size
                conversation = tokens + out
    assert worst <= TOLERANCE[kv]
    assert steps <= 2
    assert flipped <= FLIPPED * total
    print(f"kv={kv}: logits differ by {worst:.1e} of their scale, {flipped} of {total} codes by at most {steps}")


BOUND = {"max_kv_size": 32, "keep": 4}


def bounded_turn(model: Any, layers: list[Any], tokens: list[int], start: int) -> tuple[list[int], list[mx.array]]:
    return greedy(model, layers, forward(model, layers, tokens, start, GRID), 5)


@pytest.mark.parametrize("kv", ["8", "4"])
def test_a_bounded_conversation_equals_a_ring_of_rounded_entries(kv: str, tmp_path: Path) -> None:
    """In memory, resumed, and resumed from disk; the reference is mlx-lm's ring of dequantised entries."""
    model = tiny("llama_q")
    conversation: list[int] = []
    reference = [RoundedRing(32, 4, int(kv)) for _ in model.layers]
    for restart in range(3):
        options: dict[str, Any] = {"disk": tmp_path, "disk_mode": "through", **BOUND}
        with onefold.PrefixCache(model, "16MB", kv=kv, **options) as cache:
            for turn in range(2):
                start = len(conversation)
                conversation = conversation + words(9 if start else 29, 2 * restart + turn)
                wanted = bounded_turn(model, reference, conversation, start)[1]
                with cache.lease(conversation) as lease:
                    assert lease.cached == start
                    out, seen = bounded_turn(model, lease.layers, conversation, start)
                    conversation = conversation + out
                    lease.commit(conversation)
                for a, b in zip(seen, wanted, strict=True):
                    assert (mx.abs(a - b).max() / mx.abs(b).max()).item() <= TOLERANCE[kv]
            cache.check()
            assert cache.flush(60)


def test_a_ring_stays_packed() -> None:
    model, tokens = tiny("llama_q"), words(200, 0)
    held = {}
    for kv in ("16", "8", "4"):
        with onefold.PrefixCache(model, "16MB", kv=kv, max_kv_size=128) as cache, cache.lease(tokens) as lease:
            forward(model, lease.layers, tokens, 0, GRID)
            for token in range(40):  # each in place, once the chunks' surplus is trimmed
                mx.eval(model(mx.array([[token]]), cache=lease.layers))
            mx.clear_cache()
            held[kv] = cache.stats().bytes["live"]
            assert lease.nbytes == held[kv] == 128 * cache.inventory.token_bytes
            cache.check()
    assert held["8"] == held["16"] * (8 + 1) // 32  # fp32: a code, and a scale and a bias for 64 of them
    assert held["4"] == held["16"] * (4 + 1) // 32
