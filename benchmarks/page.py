"""What the page costs: how long a picture holds the cache's lock, and how much slower answers are with one viewer.

    make bench-page     # or: python benchmarks/page.py [--nodes 5000] [--rounds 12] [--model demo]

- The lock: pictures of a cache with so many nodes, of a tiny model, and of one whose nodes are one path, with a pin on
  all of it; and what a click on the deepest prefix asks for. The longest time for which the thread that looks has held
  the lock without letting go, by the clock and in its own processor time (others may run in between).
- Speed: one server, one stream of tokens after the other, every second one with a viewer; ratios of neighbours.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import httpx
import mlx.core as mx
from mlx_lm.models import llama

from onefold.cache.memory.lock import CacheLock
from onefold.cli.server_process import ServerProcess
from onefold.page.icicle import boxes

TOKENS = 48
PROMPT = "Write a long story about a lighthouse keeper who collects clocks."
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
SHAPE |= {"rms_norm_eps": 1e-5, "vocab_size": 128, "tie_word_embeddings": True}


def cache_of(n_nodes: int, path: int) -> tuple[Any, onefold.PrefixCache]:
    """A cache with so many nodes: conversations of `path` nodes each, cut where others branch off."""
    model = llama.Model(llama.ModelArgs(model_type="llama", **SHAPE))
    cache = onefold.PrefixCache(model, "1GB")
    for i in range(max(1, round(n_nodes / path))):
        tokens = [i % 100, i // 100, *((7 * i + 3 * j) % 120 for j in range(path))]
        with cache.lease(tokens) as lease:
            mx.eval(model(mx.array([lease.rest.tolist()]), cache=lease.layers))
            lease.commit(tokens)
    with cache.state.lock:
        for tree in cache.state.nodes.trees.values():
            for node in [n for n in tree.root.walk() if not n.children]:
                for at in range(node.start + 1, node.end):
                    if tree.size < n_nodes:
                        tree.split(node, at)
    return model, cache


class Holds:
    """How long the lock is held at a time."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.processor: list[float] = []
        self._began = (0.0, 0.0)
        self._depth = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        enter, leave = CacheLock.__enter__, CacheLock.__exit__

        def entering(lock: CacheLock) -> None:
            enter(lock)
            self._depth += 1
            if self._depth == 1:
                self._began = time.perf_counter(), time.thread_time()

        def leaving(lock: CacheLock, *error: object) -> None:
            self._depth -= 1
            if self._depth == 0:
                self.clock.append(time.perf_counter() - self._began[0])
                self.processor.append(time.thread_time() - self._began[1])
            leave(lock, *error)

        CacheLock.__enter__, CacheLock.__exit__ = entering, leaving  # type: ignore[method-assign]
        try:
            yield
        finally:
            CacheLock.__enter__, CacheLock.__exit__ = enter, leave  # type: ignore[method-assign]


def measure_lock(n_nodes: int, path: int, rounds: int) -> list[str]:
    _, cache = cache_of(n_nodes, path)
    gc.collect()
    gc.freeze()  # as the server does
    with cache:
        holds, clicks, drawing = Holds(), Holds(), []
        deepest = max(cache.view.outline().nodes, key=lambda n: n.end)
        pin = cache.view.pin(deepest.number, cache)
        for _ in range(rounds):
            with clicks.watching():
                cache.view.path(deepest.number)
                cache.view.through(deepest.number, [deepest.node] * 200)
            began = time.thread_time()
            with holds.watching():
                outline = cache.view.outline()
                cache.view.purposes()
                cache.view.tiers()
                cache.stats()
            boxes(outline, cache.inventory.token_bytes, cache.view.sharing(outline))
            drawing.append(time.thread_time() - began)
        pin.release()
        each = 1e3 * statistics.median(drawing)
        shape = f"{len(outline.nodes):,} nodes in paths of {path:,}"
        return [
            f"| longest hold of the lock, {shape}, {rounds} {what} | {1e3 * max(held.processor):.2f} ms of the "
            f"processor, {1e3 * max(held.clock):.2f} ms by the clock | ≤ 2 ms |"
            for what, held in (("pictures", holds), ("clicks", clicks))
        ] + [f"| a picture with the tree, processor time | {each:.0f} ms, so one every {max(1.0, each / 10):.0f} s | |"]


def speed(url: str) -> float:
    """Returns the tokens a second of one stream, after its first token."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "temperature": 0, "stream": True}
    times = []
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=600) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                times.append(time.perf_counter())
    return (len(times) - 1) / (times[-1] - times[0])


@contextmanager
def viewer(url: str) -> Iterator[None]:
    """Looks at the page meanwhile, as a browser does."""
    over, seen = threading.Event(), threading.Event()

    def look() -> None:
        with httpx.stream("GET", url + "/v1/page/events", timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("event"):
                    seen.set()
                if over.is_set():
                    return

    thread = threading.Thread(target=look)
    thread.start()
    seen.wait(60)
    yield
    over.set()
    thread.join()


def measure_speed(model: str, rounds: int) -> list[str]:
    server = ServerProcess(model)
    try:
        server.wait_until_up(lambda *_: None)
        speed(server.url)
        ratios, before = [], speed(server.url)
        for _ in range(rounds):
            with viewer(server.url):
                watched = speed(server.url)
            after = speed(server.url)
            ratios.append(2 * watched / (before + after))
            print(f"  {before:.1f} {watched:.1f} {after:.1f} tokens/s", file=sys.stderr, flush=True)
            before = after
    finally:
        server.stop()
    middle, spread = statistics.median(ratios), sorted(ratios)
    return [
        f"| speed of a stream with one viewer / without | {middle:.3f} ({spread[0]:.2f} to {spread[-1]:.2f}) | ≥ 0.98 |"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model", default="demo")
    given = parser.parse_args()
    lines = measure_lock(given.nodes, 100, given.rounds) + measure_lock(given.nodes, given.nodes, given.rounds)
    lines += measure_speed(given.model, given.rounds)
    print("| what | measured | target |\n|---|---:|---:|", *lines, sep="\n")


if __name__ == "__main__":
    main()
