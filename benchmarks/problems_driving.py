"""What the proofs of problems.py share: requests against Onefold and against mlx-lm, and memory as MLX counts it."""

from __future__ import annotations

import gc
import json
import logging
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from onefold.cache.memory.tokens import as_tokens
from onefold.cache.tiers.disk.tier import Disk

ROOT = Path(__file__).resolve().parent.parent
NONE = "—"
T = TypeVar("T")


@dataclass(frozen=True)
class Shown:
    what: str
    figure: str
    stock: str
    ok: bool


# -- requests -----------------------------------------------------------------------------------------


def words(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 120, n).tolist()


def active() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())


def watched(run: Callable[[], T]) -> tuple[int, T]:
    """The highest that MLX's active memory stood during `run`, weights included, and what came out."""
    active()
    mx.reset_peak_memory()
    out = run()
    return int(mx.get_peak_memory()), out


def peak_over(run: Callable[[], object]) -> int:
    return watched(run)[0]


def generate(model: nn.Module, prompt: Any, layers: list[Any], n: int, step: int = 256) -> list[int]:
    prompt = mx.array(np.asarray(prompt))
    found = generate_step(prompt, model, max_tokens=n, prompt_cache=layers, prefill_step_size=step)
    return [int(token) for token, _ in found]


def cold(model: nn.Module, tokens: list[int], n: int) -> list[int]:
    return generate(model, tokens, make_prompt_cache(model), n)


def ask(
    cache: onefold.PrefixCache, model: nn.Module, tokens: list[int], n: int = 4, step: int = 256
) -> tuple[onefold.Lease, list[int]]:
    """One request: lease, generate, commit. The lease, and the conversation as it stands then."""
    with cache.lease(tokens) as lease:
        out = generate(model, lease.rest, lease.layers, n, step)
        lease.commit(tokens + out)
    return lease, tokens + out


class Stock:
    """The same request as mlx-lm serves it: fetch a copy, generate, insert."""

    def __init__(self, *models: nn.Module, max_bytes: int = 1 << 63, kv_bits: int | None = None) -> None:
        self.models = models
        self.lru = LRUPromptCache(max_size=1000, max_bytes=max_bytes)
        self.kv_bits = kv_bits
        self.reused = 0

    def fetch(self, tokens: list[int]) -> tuple[list[Any], list[int]]:
        layers, rest = self.lru.fetch_nearest_cache("m", tokens)
        self.reused = len(tokens) - len(rest)
        if layers is None:
            layers = [c for m in self.models for c in make_prompt_cache(m)]
            if self.kv_bits:
                layers = [c.to_quantized(group_size=64, bits=self.kv_bits) for c in layers]
        return layers, rest

    def ask(self, tokens: list[int], n: int = 4, step: int = 256) -> list[int]:
        layers, rest = self.fetch(tokens)
        known = tokens + generate(self.models[0], rest, layers, n, step)
        self.lru.insert_cache("m", known, layers)
        return known


def run(model: nn.Module, lease: onefold.Lease) -> list[float]:
    """The rest of a lease in one forward; its last logits."""
    logits = model(mx.array(lease.rest)[None], cache=lease.layers)[0, -1]
    mx.eval(logits, [c.state for c in lease.layers])
    return logits.tolist()  # type: ignore[no-any-return]


# -- memory -------------------------------------------------------------------------------------------


def held_bytes(cache: onefold.PrefixCache) -> int:
    found = cache.stats().bytes
    return found["live"] + found["stored"] + found["checkpoint"]


def agree(cache: onefold.PrefixCache, base: int) -> bool:
    """Whether the books are MLX's own count, but for what is too small to have an entry."""
    return abs(held_bytes(cache) - (active() - base)) <= 0.001 * held_bytes(cache)


def as_asked() -> None:
    """From here until the cache is closed a buffer has the size that was asked for. One from MLX's pool may be up to
    two pages larger, and which ones are there is chance."""
    mx.set_cache_limit(0)


def known_tokens(cache: onefold.PrefixCache, tokens: list[int]) -> int:
    """How much of a conversation the tree still knows, without a request."""
    return int(cache.state.nodes.tree(cache.parts.key("")).match(as_tokens(tokens)).matched)


def address(array: mx.array) -> int:
    """Where an array's buffer lies (floats only: what numpy can view)."""
    return int(np.asarray(array).__array_interface__["data"][0])


def slab_addresses(cache: onefold.PrefixCache) -> set[int]:
    return {address(a) for slab in cache.state.store.slabs for layer in slab.layers if layer for a in layer}


# -- files --------------------------------------------------------------------------------------------


def on_disk(model: nn.Module, folder: str, budget: int | str, **options: Any) -> onefold.PrefixCache:
    """A cache with this folder as its disk. That computing may be quicker than reading is left out: these models
    compute in no time."""
    cache = onefold.PrefixCache(model, budget, disk=folder, disk_budget="4GB", **options)
    assert isinstance(cache.parts.tier, Disk)
    cache.parts.tier.reading.prefill_pace.estimate = lambda units: None  # type: ignore[method-assign]
    return cache


def record_files(folder: str, what: str = "") -> list[Path]:
    return sorted(p for p in Path(folder).glob("*/*.safetensors") if what in p.name)


def tokens_in(folder: str) -> int:
    """The tokens of all records there, as their headers have them."""
    found = 0
    for path in record_files(folder):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found += int(header["__metadata__"]["tokens"])
    return found


def flip(path: Path) -> None:
    """Damage a byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 0x10
    path.write_bytes(data)


# -- logs and tests -----------------------------------------------------------------------------------


class LogLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """What Onefold logs, here instead of on the screen."""
    log, lines = logging.getLogger("onefold"), LogLines()
    log.addHandler(lines)
    propagate, log.propagate = log.propagate, False
    try:
        yield lines.said
    finally:
        log.removeHandler(lines)
        log.propagate = propagate


def pytest_counts(paths: list[str], pattern: str) -> dict[str, Counter[str]]:
    """Run tests; passed and failed by what `pattern` finds in their names."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *paths]
        subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    counts: dict[str, Counter[str]] = {}
    for case in cases:
        if (found := re.search(pattern, case.get("name", ""))) is not None:
            bad = any(child.tag in ("failure", "error") for child in case)
            counts.setdefault(found.group(0), Counter())["failed" if bad else "passed"] += 1
    return counts
