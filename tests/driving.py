"""Driving models warm and cold on the same grid of chunks, and comparing what comes out."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

import onefold

T = TypeVar("T")
GRID = 8
"""Chunks end at multiples of this, warm or cold, so that both make the same calls."""


def forward(model: nn.Module, layers: list[Any], tokens: list[int], start: int, grid: int = GRID) -> mx.array:
    """Feed tokens[start:] chunk by chunk; the last position's logits. The last token goes alone."""
    at, last, logits = start, len(tokens) - 1, None
    while at < len(tokens):
        stop = len(tokens) if at == last else min((at // grid + 1) * grid, last)
        logits = model(mx.array([tokens[at:stop]]), cache=layers)[:, -1, :]
        mx.eval(logits, [c.state for c in layers])
        at = stop
    assert logits is not None
    return logits


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=n)


def fresh(model: nn.Module, tokens: list[int]) -> mx.array:
    """The last position's logits on mlx-lm's own caches."""
    return forward(model, make_prompt_cache(model), tokens, 0)


def prefilled(cache: Any, model: Any, prompts: list[list[int]], reserve: int = 0) -> list[onefold.Lease]:
    """Leases that are prefilled up to the last token of their prompts."""
    leases = [cache.lease(prompt, reserve_tokens=reserve) for prompt in prompts]
    for lease, prompt in zip(leases, prompts, strict=True):
        forward(model, lease.layers, prompt[:-1], lease.cached)
    return leases


def rows_on_a_prefix(cache: onefold.PrefixCache, model: nn.Module) -> tuple[list[list[int]], list[onefold.Lease]]:
    """Prompts and leases of three rows: on a stored prefix, on a part of it, and on nothing stored."""
    prefix = words(70, seed=9)
    with cache.lease(prefix) as lease:
        forward(model, lease.layers, prefix, 0)
        lease.commit(prefix)
    said = [[*prefix, *words(5, seed=1)], [*prefix[:50], *words(30, seed=2)], words(300, seed=3)]
    return said, prefilled(cache, model, said)


def decode(batch: onefold.Batch, said: list[list[int]], n: int, reach: Any = None) -> mx.array:
    """Feeds the last token of each row, and appends the next ones to `said`; calls `reach` after each step. The last
    step's logits."""
    for _ in range(n):
        logits = batch.step([row[-1] for row in said])
        for row, token in zip(said, mx.argmax(logits, axis=-1).tolist(), strict=True):
            row.append(token)
        if reach is not None:
            reach()
    return logits


def close(a: mx.array, b: mx.array) -> bool:
    return mx.abs(a - b).max().item() <= 1e-4 * mx.abs(b).max().item()


def greedy(model: nn.Module, layers: list[Any], logits: mx.array, n: int) -> tuple[list[int], list[mx.array]]:
    out, seen = [], [logits]
    for _ in range(n):
        token = int(mx.argmax(seen[-1], axis=-1).item())
        out.append(token)
        seen.append(model(mx.array([[token]]), cache=layers)[:, -1, :])
        mx.eval(seen[-1])
    return out, seen


def cold(model: nn.Module, tokens: list[int], n: int, grid: int = GRID) -> tuple[list[int], list[mx.array]]:
    layers = make_prompt_cache(model)
    return greedy(model, layers, forward(model, layers, tokens, 0, grid), n)


def same(warm: list[mx.array], reference: list[mx.array], tolerance: float = 1e-4) -> bool:
    """Logits agree, relative to their scale, until a near tie may send the two different ways."""
    for a, b in zip(warm, reference, strict=True):
        scale = mx.abs(b).max().item()
        if mx.abs(a - b).max().item() > tolerance * scale:
            return False
        best = mx.sort(b[0])[-2:]
        if (best[1] - best[0]).item() <= tolerance * scale:
            return True
    return True


def turn(
    cache: onefold.PrefixCache,
    model: nn.Module,
    tokens: list[int],
    n: int = 4,
    grid: int = GRID,
    **options: Any,
) -> tuple[onefold.Lease, list[int]]:
    """One request, warm; asserts that it equals a cold run. Returns the lease and all tokens."""
    reference = cold(model, tokens, n, grid)
    with cache.lease(tokens, **options) as lease:
        out, seen = greedy(model, lease.layers, forward(model, lease.layers, tokens, lease.cached, grid), n)
        assert same(seen, reference[1]), "warm logits differ from cold ones"
        lease.commit(tokens + out)
    cache.check()
    assert cache.stats().used_bytes <= cache.stats().budget_bytes
    return lease, tokens + out


def elsewhere(work: Callable[[], T]) -> T:
    """Returns what `work` returns on a thread of its own, which ends then."""

    def run() -> T:
        try:
            return work()
        finally:
            mx.clear_streams()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def in_its_own_process(module: str, name: str) -> None:
    """Run a function of a test module where nothing was run before."""
    code = f"import {module}; {module}.{name}()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
