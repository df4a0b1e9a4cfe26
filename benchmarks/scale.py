"""When KV from another machine pays, how much of it a store holds, and what many machines ask of a store.

    python benchmarks/scale.py [--show pays holds breaks seals] [--redis redis://127.0.0.1:6379/0]
    python benchmarks/scale.py --show pays --token 98304 --state 0 --link 0.6 --prefill 450

Computed from sizes; only `seals` and `redis` measure, on this machine.

    pays     tokens a second at which the KV of a hit arrives, by model and link: a hit pays where this is more than
             the prefill speed
    holds    conversations that a store of some size holds, in a Redis (as its `maxmemory` counts) and in a bucket
    breaks   what 10, 100 and 1,000 machines ask of one store, beside what one Redis does
    seals    how fast one thread checks the seals of values
    redis    with `--redis`: what a value takes there, and how fast the tier's client writes, reads and asks; how many
             tokens a second the writer may write while requests run

`--token` adds a model of your own: bytes of KV of a token; `--state` the bytes of a checkpoint of its other layers.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
from rich.console import Console
from rich.table import Table

from onefold.cache.tiers.remote.grid import HEAD_BYTES, VALUE_BYTES, record_tokens
from onefold.cache.tiers.remote.values import Sealing
from onefold.cache.tiers.remote.writing import REST, REST_BESIDE_GPU

GB = 1e9
KEY_BYTES = 150
"""What Redis takes for a name, its place in two hash tables and the time to live (measured: `--redis`)."""
STRING_BYTES = 10
"""What Redis has in one allocation with a value: a header and a zero."""
AHEAD = 3
"""Values that a fetch reads at the same time."""
NAME = "onefold/1/0123456789abcdef/"


@dataclass(frozen=True)
class Shape:
    """What a model stores."""

    name: str
    token: int
    """Bytes of KV."""
    state: int = 0
    """Bytes of a checkpoint of the layers that cannot be cut: one is read with each hit."""


QWEN_STATE = 48 * (48 * 128 * 128 * 4 + 3 * (48 + 2 * 16) * 128 * 2)
"""48 of 64 layers: 48 heads of 128 x 128 in 32 bits, and the last three inputs of a convolution in 16."""
SHAPES = (
    Shape("Llama-8B, 16", 2 * 32 * 8 * 128 * 2),
    Shape("Llama-8B, 8", 32 * 8 * 264),
    Shape("Llama-8B, 4", 32 * 8 * 148),
    Shape("Qwen3.5-27B, 16", 2 * 16 * 4 * 256 * 2, QWEN_STATE),
    Shape("Qwen2.5-3B, 16", 2 * 36 * 2 * 128 * 2),
)
FLEET = SHAPES[2]
"""Whose figures of the simulation are the defaults of a machine's load."""


class Link(NamedTuple):
    name: str
    rate: float
    """Bytes a second that arrive."""


LINKS = (
    Link("1 GbE", 0.117 * GB),
    Link("2.5 GbE", 0.293 * GB),
    Link("10 GbE", 1.17 * GB),
    Link("Thunderbolt bridge", 2.5 * GB),
    Link("25 GbE", 2.93 * GB),
    Link("100 GbE", 11.7 * GB),
)


WIRES = tuple(link for link in LINKS if "GbE" in link.name)
LOOKS_A_SECOND = 143e3
"""One Redis, by LMCache's measurement: 8.2, four threads for sockets, eight connections, values of 4 MB."""
GET_A_SECOND, SET_A_SECOND = 5.9 * GB, 4.4 * GB


# -- sizes ------------------------------------------------------------------------------------------------


def head_bytes(n_tokens: int) -> int:
    """Returns what a value of so many tokens has beside KV: magic, head and seal."""
    head = {"kind": "kv", "tokens": n_tokens, "layout": "0" * 32, "device": "metal"}
    return len(Sealing().seal(bytes(32), head, []))


def values_of(shape: Shape, tokens: int) -> list[tuple[int, int]]:
    """Returns how many values, and of how many bytes, the whole records of so many tokens are, and one checkpoint."""
    n = record_tokens(shape.token, edges=shape.state > 0)
    values = [(tokens // n, n * shape.token + head_bytes(n))] if n else []
    most = VALUE_BYTES - HEAD_BYTES
    if shape.state >= most:
        values.append((shape.state // most, most + head_bytes(0)))
    if shape.state % most:
        values.append((1, shape.state % most + head_bytes(0)))
    return values


def hit_bytes(shape: Shape, tokens: int) -> int:
    """Returns what is read for a hit of so many tokens."""
    return sum(n * size for n, size in values_of(shape, tokens))


def arrival(shape: Shape, rate: float, tokens: int) -> float:
    """Returns the tokens a second at which a hit of so many arrives, over a link of so many bytes a second."""
    n = record_tokens(shape.token, edges=shape.state > 0)
    return tokens // n * n * rate / hit_bytes(shape, tokens)


def pays_from(shape: Shape, rate: float, prefill: float) -> float:
    """Returns how many tokens a hit must have at least to arrive sooner than they are computed; infinity where none
    does. Without a state it is one record."""
    n = record_tokens(shape.token, edges=shape.state > 0)
    a_token = 1 / prefill - (n * shape.token + head_bytes(n)) / n / rate
    state = sum(k * size for k, size in values_of(shape, 0)) / rate
    return float("inf") if a_token <= 0 else float(n * max(1, math.ceil(state / a_token / n)))


def allocated(n_bytes: int) -> int:
    """Returns what jemalloc takes for so many bytes: the next of four sizes between powers of two. From 16 KiB on; it
    has more sizes below."""
    step = 1 << max(0, (n_bytes - 1).bit_length() - 3)
    return -(-n_bytes // step) * step


def in_redis(value_bytes: int) -> int:
    """Returns what a value takes of `maxmemory`."""
    return allocated(value_bytes + STRING_BYTES) + KEY_BYTES


def conversation_bytes(shape: Shape, tokens: int, *, redis: bool) -> int:
    """Returns what a conversation takes that shares nothing, with one checkpoint."""
    return sum(n * (in_redis(size) if redis else size) for n, size in values_of(shape, tokens))


# -- many machines ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What one machine does."""

    prompt_tokens: float
    """Tokens of prompts a second."""
    found: float
    """The share of them that the store has."""
    written: float
    """The share of them that is sent to the store."""
    looked: float
    """The share of them that the store is asked for."""
    peak: float
    """The busiest ten seconds, as a multiple of the mean."""


class Demand(NamedTuple):
    """Of all machines together, a second."""

    looks: float
    served: float
    taken: float


def demand(machines: int, load: Load, shape: Shape) -> Demand:
    n = record_tokens(shape.token, edges=shape.state > 0)
    token = (n * shape.token + head_bytes(n)) / n
    tokens = machines * load.prompt_tokens
    return Demand(tokens * load.looked / n, tokens * load.found * token, tokens * load.written * token)


def breaking(asked: Demand, peak: float) -> list[str]:
    """Returns what one store does not have enough of, the first to break first. Reads come in their busiest seconds, as
    somebody waits for them; writes on average, because they are queued. A link carries as much in each direction."""
    served = peak * asked.served
    short = [(link.rate, link.name) for link in WIRES if max(served, asked.taken) > link.rate]
    if served / GET_A_SECOND + asked.taken / SET_A_SECOND > 1:
        short.append((SET_A_SECOND, "one Redis"))
    if peak * asked.looks > LOOKS_A_SECOND:
        short.append((float("inf"), "looks"))
    return [name for _, name in sorted(short)]


# -- tables -------------------------------------------------------------------------------------------------


def size_of(n_bytes: float) -> str:
    return f"{n_bytes / 1e12:g} TB" if n_bytes >= 1e12 else f"{n_bytes / GB:g} GB"


def show_pays(args: argparse.Namespace, shapes: list[Shape]) -> Table:
    links = [*LINKS, *([Link("own link", args.link * GB)] if args.link else [])]
    title = f"Tokens a second at which a hit of {args.hit:,} tokens arrives"
    if args.prefill:
        title += f" (as a multiple of {args.prefill:,.0f}; the least tokens that pay)"
    table = Table("model", "KiB a token", "record", *(link.name for link in links), title=title)
    for shape in shapes:
        cells = []
        for link in links:
            rate = arrival(shape, link.rate, args.hit)
            cells.append(f"{rate:,.0f}")
            if args.prefill:
                least = pays_from(shape, link.rate, args.prefill)
                told = "never" if least == float("inf") else f"from {least:,.0f}"
                cells[-1] += f" ({rate / args.prefill:.1f} x, {told})"
        n = record_tokens(shape.token, edges=shape.state > 0)
        state = f" + {shape.state / 1e6:.0f} MB" if shape.state else ""
        table.add_row(shape.name, f"{shape.token / 1024:g}{state}", f"{n} tokens", *cells)
    return table


def show_holds(args: argparse.Namespace, shapes: list[Shape]) -> Table:
    lengths = [int(n) for n in args.lengths.split(",")]
    sizes = [float(s) * GB for s in args.stores.split(",")]
    heads = [f"{size_of(s)}, {n:,}" for s in sizes for n in lengths]
    title = "Conversations in a store: in a Redis | in a bucket, by the size of the store and tokens of a conversation"
    table = Table("model", "Redis takes", *heads, title=title)
    for shape in shapes:
        longest = lengths[-1]
        more = conversation_bytes(shape, longest, redis=True) / conversation_bytes(shape, longest, redis=False)
        cells = []
        for size in sizes:
            for n in lengths:
                held = [size / conversation_bytes(shape, n, redis=redis) for redis in (True, False)]
                cells.append(" | ".join(f"{h:,.0f}" for h in held))
        table.add_row(shape.name, f"{more:.2f} x", *cells)
    return table


def show_breaks(args: argparse.Namespace, shapes: list[Shape]) -> Table:
    load = Load(args.tokens, args.found, args.written, args.looked, args.peak)
    shape, memory = shapes[0] if args.token else FLEET, args.memory * GB
    title = (
        f"One store, {shape.name}: each machine has {load.prompt_tokens:,.0f} tokens of prompts a second; "
        f"{load.found:.2f} come from the store, {load.written:.2f} are written"
    )
    heads = ["machines", "looks/s", "serves, GB/s", f"in the busiest 10 s (x {load.peak:g})", "takes, GB/s"]
    table = Table(*heads, f"{size_of(memory)} of a Redis last", "too little", title=title)
    n = record_tokens(shape.token, edges=shape.state > 0)
    value = n * shape.token + head_bytes(n)
    for machines in args.machines:
        asked = demand(machines, load, shape)
        seconds = memory * value / in_redis(value) / asked.taken if asked.taken else float("inf")
        table.add_row(
            f"{machines:,}",
            f"{asked.looks:,.0f}",
            f"{asked.served / GB:.2f}",
            f"{asked.served * load.peak / GB:.2f}",
            f"{asked.taken / GB:.2f}",
            f"{seconds:,.0f} s",
            ", ".join(breaking(asked, load.peak)) or "nothing",
        )
    return table


def show_seals(args: argparse.Namespace, shapes: list[Shape]) -> Table:
    table = Table("threads", "GB/s", title="Seals checked on this machine")
    sealing, name = Sealing(bytes(32)), bytes(32)
    value = sealing.seal(name, {"kind": "kv"}, [os.urandom(VALUE_BYTES - HEAD_BYTES)])

    def check(times: int) -> None:
        for _ in range(times):
            sealing.open(name, value, {})

    for threads in (1, AHEAD):
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(check, [50] * threads))
            table.add_row(str(threads), f"{50 * threads * len(value) / (time.perf_counter() - began) / GB:.2f}")
    return table


def show_redis(url: str, shapes: list[Shape]) -> Table:
    """Measures at a Redis; writes at most 64 values at a time there, and removes them."""
    import redis

    client = redis.Redis.from_url(url, protocol=2)
    info = client.info("server")
    heads = ["value", "bytes", "MEMORY USAGE", "computed", "processor to seal and SET"]
    heads += ["tokens/s beside requests on a CPU", "on a GPU"]
    heads += ["SET, GB/s", f"GET, GB/s, {AHEAD} threads", "looks/s"]
    table = Table(*heads, title=f"Redis {info['redis_version']}, the package redis as client, on this machine")
    names, sealing = [f"{NAME}{i:064x}" for i in range(64)], Sealing(bytes(32))
    for shape in shapes:
        n = record_tokens(shape.token, edges=shape.state > 0)
        payload, value = os.urandom(n * shape.token), b""
        worked, taken = 0.0, 0.0
        for name in names:
            since = time.thread_time()
            value = sealing.seal(
                bytes(32), {"kind": "kv", "tokens": n, "layout": "0" * 32, "device": "metal"}, [payload]
            )
            began = time.perf_counter()
            client.set(name, value, nx=True, ex=600)
            taken += time.perf_counter() - began
            worked += (time.thread_time() - since) / len(names)
        used = client.memory_usage(names[0])
        with ThreadPoolExecutor(AHEAD) as pool:
            began = time.perf_counter()
            list(pool.map(client.get, names))
            read = len(names) * len(value) / (time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(20):
            with client.pipeline(transaction=False) as pipeline:
                for name in names * 8:
                    pipeline.expire(name, 600)
                pipeline.execute()
        looked = 20 * 8 * len(names) / (time.perf_counter() - began)
        client.delete(*names)
        table.add_row(
            shape.name,
            f"{len(value):,}",
            f"{used:,}",
            f"{in_redis(len(value)):,}",
            f"{worked * 1e3:.1f} ms",
            f"{n / worked / (1 + REST):,.0f}",
            f"{n / worked / (1 + REST_BESIDE_GPU):,.0f}",
            f"{len(names) * len(value) / taken / GB:.2f}",
            f"{read / GB:.2f}",
            f"{looked:,.0f}",
        )
    client.close()
    return table


SHOWN: dict[str, Callable[[argparse.Namespace, list[Shape]], Table]] = {
    "pays": show_pays,
    "holds": show_holds,
    "breaks": show_breaks,
    "seals": show_seals,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", nargs="*", choices=list(SHOWN), default=["pays", "holds", "breaks"])
    parser.add_argument("--token", type=int, help="bytes of KV of a token of your model")
    parser.add_argument("--state", type=int, default=0, help="bytes of a checkpoint of it (0)")
    parser.add_argument("--link", type=float, help="GB/s of your link")
    parser.add_argument("--prefill", type=float, help="tokens a second that your machine computes")
    parser.add_argument("--hit", type=int, default=8192, help="tokens of a hit (8192)")
    parser.add_argument("--stores", default="64,512,4000", help="GB, with commas (64,512,4000)")
    parser.add_argument("--lengths", default="8192,65536", help="tokens of a conversation, with commas (8192,65536)")
    parser.add_argument("--memory", type=float, default=512, help="GB of the store, for breaks (512)")
    fleet = parser.add_argument_group("what a machine does, for breaks: by default as benchmarks/fleet.py has it")
    fleet.add_argument("--machines", type=int, nargs="+", default=[10, 100, 1000], help="how many (10 100 1000)")
    fleet.add_argument("--tokens", type=float, default=630, help="tokens of prompts a second (630)")
    fleet.add_argument("--found", type=float, default=0.28, help="the share that the store has (0.28)")
    fleet.add_argument("--written", type=float, default=0.66, help="the share that is written (0.66)")
    fleet.add_argument("--looked", type=float, default=0.94, help="the share that the store is asked for (0.94)")
    fleet.add_argument("--peak", type=float, default=3.7, help="the busiest ten seconds, of the mean (3.7)")
    parser.add_argument("--redis", help="URL of a Redis to measure at; 64 values are written there, and removed")
    args = parser.parse_args(arguments)
    own = [Shape("own model", args.token, args.state)] if args.token else []
    if any(not record_tokens(shape.token, edges=shape.state > 0) for shape in own):
        parser.error(f"a token of {args.token:,} bytes does not fit into a value of {VALUE_BYTES:,}")
    shapes, console = own or list(SHAPES), Console()
    for name in args.show:
        console.print(SHOWN[name](args, shapes))
    if args.redis:
        console.print(show_redis(args.redis, shapes))


if __name__ == "__main__":
    main()
