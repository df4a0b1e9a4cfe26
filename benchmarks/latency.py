"""Who waits for whom: streams, a long prompt, newcomers, and a large count_tokens, over HTTP.

    make bench-latency      # or: python benchmarks/latency.py [--only count,share] [--streams 16] [--long 30000]
                            #     [--shares 0.5,0.8] [--model FOLDER]

count   a short chat, /health and the gaps of a running stream, alone and while 4 MB are counted, in turns
share   gaps between the tokens of `--streams` streams, alone and beside a prompt of `--long` tokens; the prompt's speed
        against its speed alone; the first token of newcomers with a short prompt, alone and meanwhile

The server is a process of its own, with a local model of random weights that has a token per character. Ratios are of
two things in one run; gaps are those of all streams together, "alone" before and after the prompt, since a stream slows
down as its answer grows. Ends with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from local_model import Shape, write_model

ROOT = Path(__file__).resolve().parents[1]
SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=16384)
"""Attention at 30,000 tokens costs about as much as the weights, as it does in a model of 8 billion."""
COUNTED = 4_000_000
"""Characters."""
CHATS = 12


@dataclass(frozen=True)
class Row:
    what: str
    alone: float
    beside: float
    target: float | None
    """The most that `beside / alone` may be, or the least if it is negative."""
    unit: str = "ms"

    @property
    def ratio(self) -> float:
        return self.beside / self.alone

    @property
    def missed(self) -> bool:
        if self.target is None:
            return False
        return self.ratio < -self.target if self.target < 0 else self.ratio > self.target


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "onefold", "serve", str(model), "--port", str(port), "--budget", "2GB"]
    process = subprocess.Popen([*command, "--log-level", "warning", *flags], cwd=ROOT, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/health", trust_env=False).status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"the server did not start: exit status {process.returncode}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def words(n: int) -> str:
    chance = random.Random(time.perf_counter_ns())
    return "".join(chance.choice("abcdefghij ") for _ in range(n))


class Client:
    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=100)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)
        self._host, self._port = self._http.base_url.host, self._http.base_url.port

    async def stream(self, content: str, tokens: int, times: list[float]) -> None:
        """Appends the time of each piece of the answer. Reads the socket itself: an HTTP library would take so much of
        a core for sixteen streams that it would slow down the server it measures."""
        message = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "stream": True}
        body = json.dumps(message).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            assert b" 200 " in status, status + await reader.read()
            async for line in reader:
                if b'"content":"' in line and b'"content":""' not in line:
                    times.append(time.perf_counter())
        finally:
            writer.close()

    async def first_token(self, content: str) -> float:
        begun, times = time.perf_counter(), list[float]()
        await self.stream(content, 2, times)
        times.append(time.perf_counter())  # a model of random weights may end its answer at once
        return times[0] - begun

    async def timed(self, method: str, path: str, body: Any = None) -> float:
        begun = time.perf_counter()
        response = await self._http.request(method, path, json=body)
        assert response.status_code == 200, response.text
        return time.perf_counter() - begun

    @contextlib.asynccontextmanager
    async def streams(self, n: int) -> AsyncIterator[list[list[float]]]:
        """Begins `n` of them, and goes on when each has begun to answer."""
        times: list[list[float]] = [[] for _ in range(n)]
        tasks = [asyncio.create_task(self.stream(words(50), 100_000, t)) for t in times]
        while not all(times):
            await asyncio.sleep(0.02)
        try:
            yield times
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def gaps(times: Sequence[Sequence[float]], low: float, high: float) -> list[float]:
    return sorted(b - a for t in times for a, b in itertools.pairwise(t) if low <= a and b <= high)


def at(values: Sequence[float], quantile: float) -> float:
    return sorted(values)[int(quantile * (len(values) - 1))]


async def count(url: str) -> list[Row]:
    client = Client(url)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    def counting() -> asyncio.Task[float]:
        content = f"{time.perf_counter_ns()} " + "hello world " * (COUNTED // 12)  # another one each time
        large = {"messages": [{"role": "user", "content": content}]}
        return asyncio.create_task(client.timed("POST", "/v1/messages/count_tokens", large))

    spent: dict[str, list[float]] = {"chat": [], "chat beside": [], "health": [], "health beside": []}

    async def look(name: str, n: int) -> None:
        for _ in range(n):
            spent["chat" + name].append(await client.timed("POST", "/v1/chat/completions", chat))
            spent["health" + name].append(await client.timed("GET", "/health"))
            await asyncio.sleep(0.05)

    await client.timed("POST", "/v1/chat/completions", chat)
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(3):
        await look("", CHATS)
        under_way = counting()
        await asyncio.sleep(0.5)
        await look(" beside", CHATS)
        assert not under_way.done(), "it was counted before the chats were done: take more characters"
        await under_way
        async with client.streams(1) as times:
            a = time.perf_counter()
            await asyncio.sleep(3)
            b = time.perf_counter()
            under_way = counting()
            await asyncio.sleep(3)
            c = time.perf_counter()
            alone += gaps(times, a, b)
            beside += gaps(times, b, c)
        await under_way
    median = statistics.median
    return [
        Row("short chat, median", median(spent["chat"]), median(spent["chat beside"]), 2),
        Row("short chat, longest", max(spent["chat"]), max(spent["chat beside"]), None),
        Row("/health, longest", max(spent["health"]), max(spent["health beside"]), None),
        Row("gap of a stream, median", median(alone), median(beside), None),
        Row("gap of a stream, longest", max(alone), max(beside), None),
    ]


async def share(url: str, wanted: float, n: int, long: int) -> list[Row]:
    client = Client(url)
    await client.first_token(words(500))
    speed_alone = long / await client.first_token(words(long))
    async with client.streams(n) as times:
        a = time.perf_counter()
        await asyncio.sleep(4)
        newcomers_alone = []
        for _ in range(8):
            newcomers_alone.append(await client.first_token(words(30)))
            await asyncio.sleep(0.3)
        c = time.perf_counter()
        prefill = asyncio.create_task(client.first_token(words(long)))
        newcomers = []
        await asyncio.sleep(0.5)
        while not prefill.done():
            newcomers.append(await client.first_token(words(30)))
            await asyncio.sleep(2)
        speed = long / await prefill
        d = time.perf_counter()
        await asyncio.sleep(6)
        quiet, busy = gaps(times, a, c) + gaps(times, d + 1, time.perf_counter()), gaps(times, c, d)
    typical = statistics.median(quiet)  # as many of them before as after
    least = {0.5: -0.45, 0.8: -0.75}.get(wanted)
    at_half = wanted == 0.5
    chunk = at(busy, 0.99)
    return [
        Row(f"share {wanted}: gap, median", typical, statistics.median(busy), 2 if at_half else None),
        Row(f"share {wanted}: gap, 99 %", typical, at(busy, 0.99), 4 if at_half else None),
        Row(f"share {wanted}: gap, longest", typical, max(busy), 8 if at_half else None),
        Row(f"share {wanted}: prompt, tokens/s", speed_alone / 1000, speed / 1000, least, "tokens/s"),
        Row(
            f"share {wanted}: newcomer's first token less a chunk, median",
            statistics.median(newcomers_alone),
            max(1e-3, statistics.median(newcomers) - chunk),
            3,
        ),
        Row(f"share {wanted}: newcomer's first token, longest", max(newcomers_alone), max(newcomers), None),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="count,share")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--long", type=int, default=30_000)
    parser.add_argument("--shares", default="0.5,0.8")
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or write_model(Path(folder), SHAPE)
        if "count" in given.only:
            with serving(model) as url:
                rows += asyncio.run(count(url))
        for wanted in map(float, given.shares.split(",")) if "share" in given.only else ():
            with serving(model, "--prefill-share", str(wanted)) as url:
                rows += asyncio.run(share(url, wanted, given.streams, given.long))
    table = Table("", "alone", "beside", "ratio", "target")
    for row in rows:
        target = "" if row.target is None else f"≥ {-row.target:g}" if row.target < 0 else f"≤ {row.target:g}"
        colour = "red" if row.missed else "default"
        table.add_row(
            row.what,
            f"{row.alone * 1000:,.1f} {row.unit}",
            f"{row.beside * 1000:,.1f} {row.unit}",
            f"[{colour}]{row.ratio:.2f}[/]",
            target,
        )
    Console().print(table)
    return any(row.missed for row in rows)


if __name__ == "__main__":
    sys.exit(main())
