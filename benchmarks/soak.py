"""Many clients on little memory: the real server over HTTP, under a budget a tenth of what its traffic needs.

    make soak       # or: python benchmarks/soak.py [--clients 16] [--requests 300] [--share 0.1] [--model demo]

Random lengths, turns that go on, branches, repeats, clients that go away. Every answer is compared with that of a cold
run on mlx-lm's own caches; the ledger is read all the time; at the end memory must be what the ledger says, and
`check()` must find nothing. Ends with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import httpx
import mlx.core as mx
import numpy as np
import process_memory
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from asking import cold as cold_tokens
from listening import listening
from local_model import write_model
from traffic import Ask, longest, plan, unique_tokens

from onefold.cache.memory.device import weight_bytes
from onefold.engine.engine import Engine
from onefold.engine.limits import Limits
from onefold.engine.prompt import PromptMaker
from onefold.sizes import show_size

PATIENCE_SECONDS = 600.0


@dataclass
class Soak:
    budget_bytes: int
    needed_bytes: int
    requests: int
    answers: int = 0
    cancelled: int = 0
    retries: int = 0
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    peak_ledger_bytes: int = 0
    peak_active_bytes: int = 0
    """Beyond the weights."""
    held_bytes: int = 0
    active_bytes: int = 0
    rss: list[int] = field(default_factory=list)
    preemptions: int = 0
    cached: int = 0
    prompted: int = 0
    findings: str = ""
    seconds: float = 0.0

    def faults(self) -> list[str]:
        found = list(self.wrong[:5])
        if self.answers + self.cancelled < self.requests:
            found.append(f"{self.requests - self.answers - self.cancelled} requests have no answer: {self.statuses}")
        if self.peak_ledger_bytes > self.budget_bytes:
            found.append(f"the ledger reached {self.peak_ledger_bytes} of {self.budget_bytes} bytes")
        if self.peak_active_bytes > self.budget_bytes:
            found.append(f"memory reached {self.peak_active_bytes} of {self.budget_bytes} bytes beyond the weights")
        if abs(self.active_bytes - self.held_bytes) > 0.01 * self.budget_bytes:
            found.append(f"{self.active_bytes} bytes are in use at the end, and the ledger has {self.held_bytes}")
        return found + ([self.findings] if self.findings else [])


class Client:
    """Streams one answer, and goes away in the middle if it is told to."""

    def __init__(self, url: str, result: Soak) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False)
        self._result = result

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, ask: Ask) -> None:
        body = {
            "messages": ask.messages,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        while True:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                self._result.statuses[response.status_code] += 1
                if response.status_code == 503:
                    self._result.retries += 1
                    time.sleep(min(1.0, float(response.headers["retry-after"])))
                    continue
                if response.status_code != 200:
                    self._result.wrong.append(f"{response.status_code}: {response.read()[:200]!r}")
                    return
                self._read(ask, response)
                return

    def _read(self, ask: Ask, response: httpx.Response) -> None:
        text, pieces, usage = "", 0, None
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self._result.wrong.append(str(chunk))
                return
            usage = chunk.get("usage") or usage
            piece = "".join((c["delta"].get("content") or "") for c in chunk["choices"])
            text, pieces = text + piece, pieces + bool(piece)
            if ask.cancel_after is not None and pieces >= ask.cancel_after:
                if not ask.expected.startswith(text):
                    self._result.wrong.append(f"{text!r} is not how {ask.expected!r} begins")
                self._result.cancelled += 1
                return
        self._result.answers += 1
        if text != ask.expected:
            self._result.wrong.append(f"expected {ask.expected!r}, got {text!r}")
        if usage is None:
            self._result.wrong.append("an answer without usage")
            return
        self._result.prompted += usage["prompt_tokens"]
        self._result.cached += usage["prompt_tokens_details"]["cached_tokens"]


def run(model: Any, tokenizer: Any, asks: list[Ask], budget_bytes: int, needed_bytes: int, clients: int) -> Soak:
    result = Soak(budget_bytes, needed_bytes, len(asks))
    weights = weight_bytes(model)
    mx.clear_cache()
    beyond = mx.get_active_memory() - weights  # tables and the like that the model keeps beside its weights
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            ledger = engine.cache.state.ledger
            result.peak_ledger_bytes = max(result.peak_ledger_bytes, ledger.used_bytes, ledger.peak_bytes)
            result.peak_active_bytes = max(result.peak_active_bytes, mx.get_active_memory() - weights - beyond)

    todo: queue.SimpleQueue[Ask] = queue.SimpleQueue()
    for ask in asks:
        todo.put(ask)
    begun = time.perf_counter()
    with Engine(model, tokenizer, budget=budget_bytes, limits=Limits(rows=16)) as engine, listening(engine) as url:

        def work() -> None:
            with Client(url, result) as client:
                while not todo.empty():
                    with contextlib.suppress(queue.Empty):
                        client.ask(todo.get_nowait())
                    if todo.qsize() % 50 == 0:
                        result.rss.append(process_memory.now())

        watcher = threading.Thread(target=watch, daemon=True)
        workers = [threading.Thread(target=work, daemon=True) for _ in range(clients)]
        watcher.start()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        result.seconds = time.perf_counter() - begun
        ended.set()
        watcher.join()
        while engine.stats().decoding or engine.stats().prefilling:  # those whose client went away
            time.sleep(0.02)
        try:
            engine.check()
        except onefold.IntegrityError as error:
            result.findings = str(error)
        stats = engine.stats()
        result.preemptions = stats.preemptions
        result.held_bytes = engine.cache.inventory.held_bytes
        result.active_bytes = mx.get_active_memory() - weights - beyond
        result.rss.append(process_memory.now())
    return result


def prepare(model: Any, tokenizer: Any, requests: int, seed: int) -> tuple[list[Ask], int, int]:
    """The traffic with its cold answers, the tokens that all of it would hold, and the longest conversation."""
    prompts = PromptMaker(tokenizer, vocab=model.args.vocab_size, checkpoints=False)
    conversations = []
    known: dict[bytes, list[int]] = {}

    def cold(messages: list[Any], n: int) -> str:
        tokens = prompts.chat(messages).tokens
        key = tokens.tobytes()
        if len(known.get(key, [])) < n:
            known[key] = cold_tokens(model, tokens.tolist(), n)
        answer = known[key][:n]
        ends = [i for i, t in enumerate(answer) if t in tokenizer.eos_token_ids]
        answer = answer[: ends[0]] if ends else answer
        conversations.append([*tokens.tolist(), *answer])
        bar.update(task, advance=1)
        return str(tokenizer.decode(answer))

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("cold answers", total=requests)
        asks = plan(cold, requests, seed=seed)
    return asks, unique_tokens([np.array(c, np.int32) for c in conversations]), longest(conversations)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.1, help="of the bytes that the traffic needs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a folder, an id or 'demo'; a tiny local one if not given")
    given = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = onefold.load(given.model or str(write_model(Path(folder) / "model")))
    asks, tokens, most = prepare(model, tokenizer, given.requests, given.seed)
    token_bytes = onefold.PrefixCache(model, "1GB").inventory.token_bytes
    needed = tokens * token_bytes
    result = run(model, tokenizer, asks, int(needed * given.share), needed, given.clients)
    table = Table(title=f"{given.requests} requests, {given.clients} clients, {result.seconds:.0f} s")
    for name, value in (
        ("the traffic needs", f"{show_size(needed)} ({tokens} tokens, longest conversation {most})"),
        ("budget", show_size(result.budget_bytes)),
        ("answers right / cancelled", f"{result.answers} / {result.cancelled}"),
        ("wrong", str(len(result.wrong))),
        ("statuses", ", ".join(f"{k}: {v}" for k, v in sorted(result.statuses.items()))),
        ("prompt tokens reused", f"{result.cached / max(1, result.prompted):.0%}"),
        ("preemptions", str(result.preemptions)),
        ("ledger, peak", show_size(result.peak_ledger_bytes)),
        ("memory beyond the weights, peak", show_size(result.peak_active_bytes)),
        ("at the end: ledger / memory", f"{show_size(result.held_bytes)} / {show_size(result.active_bytes)}"),
        ("process, over time", " ".join(show_size(r) for r in result.rss[:: max(1, len(result.rss) // 6)])),
        ("check()", result.findings or "nothing found"),
    ):
        table.add_row(name, value)
    console.print(table)
    for fault in result.faults():
        console.print(f"[red]{fault}")
    return 1 if result.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
