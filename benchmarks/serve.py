"""Our server beside mlx-lm's: time to the first token, tokens per second, the same model, over HTTP, in one run.

    make bench-serve         # or: python benchmarks/serve.py [--model demo] [--repeats 3] [--only turns,together,alone]

Both servers are up all the time, each in a process of its own, and take turns: what else the machine does hits both.
mlx-lm's runs with the same BLAS that Onefold loads, without which it would be slower by an order on a Linux CPU.

turns      one conversation of five turns on a long system prompt, greedy: time to the first token, turns 2 to 5
together   four conversations of three turns at once: tokens per second of all of them
alone      one stream: tokens per second, beside `mlx_lm.stream_generate` in this process, without a server
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import httpx
import mlx_lm
from rich.console import Console
from rich.table import Table

from onefold.engine import demo_model

ROOT = Path(__file__).resolve().parents[1]
OURS, THEIRS = "onefold", "mlx-lm"
SYSTEM_CHARACTERS = 4000
ANSWER_TOKENS = 48
QUESTIONS = [
    "What is this text about? Answer in one sentence.",
    "Which command would you run first?",
    "Name one thing that could go wrong.",
    "Explain that to a colleague.",
    "Now say it in five words.",
]


@dataclass
class Answer:
    text: str = ""
    first_token_seconds: float = 0.0
    tokens: int = 0
    cached: int = 0
    """Tokens of the prompt that were reused, if the server says."""
    times: list[float] = field(default_factory=list)


class Served:
    """A server in a process of its own. mlx-lm's listens on 127.0.0.1 always."""

    def __init__(self, name: str, model: str, folder: str, *, host: str = "127.0.0.1") -> None:
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if name == OURS:
            options = {"--host": host, "--port": str(port), "--budget": "4GB", "--log-level": "warning"}
            command = ["-m", "onefold", "serve", model, *(x for option in options.items() for x in option)]
        else:
            code = "import onefold, sys; from mlx_lm.server import main; sys.argv[0] = 'mlx_lm.server'; main()"
            command = ["-c", code, "--model", folder, "--port", str(port), "--log-level", "ERROR"]
        self.model = model if name == OURS else "default_model"
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        self.port = port
        self._http = httpx.Client(base_url=f"http://{host}:{port}", timeout=600, trust_env=False)

    def ready(self) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} did not start: exit status {self._process.returncode}")
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise SystemExit(f"{self.name} did not start")

    def ask(self, messages: list[dict[str, str]], max_tokens: int = ANSWER_TOKENS) -> Answer:
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        answer, begun = Answer(), time.perf_counter()
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"{self.name}: {response.status_code} {response.read()!r}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("usage"):
                    answer.tokens = chunk["usage"]["completion_tokens"]
                    answer.cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                piece = "".join(c["delta"].get("content") or "" for c in chunk["choices"])
                if piece:
                    answer.times.append(time.perf_counter())
                    answer.text += piece
        answer.first_token_seconds = (answer.times[0] if answer.times else time.perf_counter()) - begun
        return answer

    def end(self) -> int:
        """Ends it with SIGTERM, or else with SIGKILL, and returns its exit code."""
        self._http.close()
        self._process.terminate()
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@dataclass
class Row:
    what: str
    ours: float
    theirs: float
    target: str
    met: bool
    unit: str

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def system_prompt(which: int) -> dict[str, str]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    start = which * SYSTEM_CHARACTERS % max(1, len(text) - SYSTEM_CHARACTERS)
    return {"role": "system", "content": text[start : start + SYSTEM_CHARACTERS]}


def turns(servers: list[Served], repeats: int) -> Row:
    """Each turn goes to one server, then to the other; each goes on with its own answers."""
    found: dict[str, list[float]] = {s.name: [] for s in servers}
    for repeat in range(repeats):
        talks = {s.name: [system_prompt(repeat)] for s in servers}
        for turn, question in enumerate(QUESTIONS):
            for server in servers if (turn + repeat) % 2 else servers[::-1]:
                messages = talks[server.name]
                messages.append({"role": "user", "content": question})
                answer = server.ask(messages)
                messages.append({"role": "assistant", "content": answer.text})
                if turn:
                    found[server.name].append(answer.first_token_seconds)
    ours, theirs = (statistics.fmean(found[name]) for name in (OURS, THEIRS))
    return Row("time to first token, turns 2 to 5", ours, theirs, "≤ 0.80", ours <= 0.8 * theirs, "s")


def together(servers: list[Served], repeats: int) -> Row:
    found: dict[str, list[float]] = {s.name: [] for s in servers}
    for repeat in range(repeats):
        for server in servers if repeat % 2 else servers[::-1]:
            made: list[int] = []

            def talk(i: int, server: Served = server, made: list[int] = made, repeat: int = repeat) -> None:
                who = f"You are agent {i} of run {repeat}."
                messages = [system_prompt(repeat), {"role": "user", "content": f"{who} {QUESTIONS[0]}"}]
                for question in QUESTIONS[1:4]:
                    answer = server.ask(messages)
                    made.append(answer.tokens)
                    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]

            threads = [threading.Thread(target=talk, args=(i,)) for i in range(4)]
            begun = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found[server.name].append(sum(made) / (time.perf_counter() - begun))
    ours, theirs = (statistics.fmean(found[name]) for name in (OURS, THEIRS))
    return Row("4 conversations at once", ours, theirs, "≥ 1.15", ours >= 1.15 * theirs, "tokens/s")


def alone(servers: list[Served], folder: str, repeats: int) -> Row:
    """Between the first token and the last, so that prefill is left out."""
    model, tokenizer = mlx_lm.load(folder)[:2]
    ours = next(s for s in servers if s.name == OURS)
    messages = [{"role": "user", "content": "Write a long story about a lighthouse keeper and a storm."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    found: dict[str, list[float]] = {OURS: [], "stream": []}
    for repeat in range(2 * repeats + 1):
        answer = ours.ask(messages, 128)
        times = [time.perf_counter() for _ in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=128)]
        if repeat:  # the first is to warm up
            found[OURS].append((answer.tokens - 1) / (answer.times[-1] - answer.times[0]))
            found["stream"].append((len(times) - 1) / (times[-1] - times[0]))
    mine, stock = (statistics.median(found[name]) for name in (OURS, "stream"))
    return Row("one stream, beside stream_generate", mine, stock, "≥ 0.97", mine >= 0.97 * stock, "tokens/s")


@contextlib.contextmanager
def both(model: str, folder: str) -> Iterator[list[Served]]:
    servers = [Served(OURS, model, folder), Served(THEIRS, model, folder)]
    try:
        for server in servers:
            server.ready()
            server.ask([{"role": "user", "content": "Hello."}], 4)
        yield servers
    finally:
        for server in servers:
            server.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="a folder, or 'demo'")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="turns,together,alone")
    given = parser.parse_args()
    folder = str(demo_model.folder()) if given.model == "demo" else given.model
    measures: dict[str, Callable[[list[Served]], Row]] = {
        "turns": lambda servers: turns(servers, given.repeats),
        "together": lambda servers: together(servers, given.repeats),
        "alone": lambda servers: alone(servers, folder, given.repeats),
    }
    rows: list[Row] = []
    console: Any = Console()
    with both(given.model, folder) as servers:
        for name in given.only.split(","):
            console.print(f"{name} ...")
            rows.append(measures[name](servers))
    table = Table(title=f"Onefold {onefold.__version__} beside mlx-lm {mlx_lm.__version__}, {given.model}")
    for column in ("", "onefold", "mlx-lm", "ratio", "target", ""):
        table.add_column(column)
    for row in rows:
        cells = [f"{row.ours:.2f} {row.unit}", f"{row.theirs:.2f} {row.unit}", f"{row.ratio:.2f}", row.target]
        table.add_row(row.what, *cells, "" if row.met else "[red]missed")
    console.print(table)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
