"""Simulates 1 to 64 servers on a trace: what they find in their own caches, and what in a store that they share.

    python benchmarks/fleet.py TRACE.jsonl [--servers 1,2,4,8,16,32,64] [--writes shared|all] [--room 256k]
                               [--store 512GB] [--ttl 30d] [--token 37888] [--no-refresh] [--real]

THIS IS A SIMULATION. Nothing is served, computed or sent; caches and the store are lists of blocks of 512 tokens, and a
request takes no time. `traces.py --show bounds cache` compares such a list (block LRU) with the real cache.

- Requests come at the trace's times. A server's cache and the store evict what was used least recently. Of blocks that
  a server used together the last one goes first; of those that the store was asked for together, any.
- A write, a read and a server's look before it writes count as uses in the store (`--no-refresh`: a look does not).
- Round robin sends each request to the next server. Affinity sends all requests of a conversation to one server, by
  consistent hashing. All prompts of the trace begin with the same blocks, if any; two requests are of the same
  conversation if they also have the next block in common. So no two conversations share more than that beginning.
- A request takes from the store what it has behind the server's own blocks, always.
- What is written follows `policy.Policy`. `--writes all`: each prompt, at once. `--writes shared`: at once what two
  prompts of a server share, up to where they part, and the rest of a prompt after 30 s, unless a prompt of that server
  continues it before then. What was evicted in the meantime is not written. In both, a server asks the store first, and
  sends what it has from the first block on that the store does not have.

`--real`: what servers without a store find is also replayed through the real cache, as in `traces.py`.

Shares are of the tokens in whole blocks of prompts. Answers are not in the trace's hashes, and do not count.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import heapq
import itertools
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
from rich.console import Console
from rich.table import Table
from trace_files import HASHED, Request, load

from onefold.cache.tiers.remote.grid import record_tokens
from onefold.cache.tiers.remote.policy import DELAY

SERVERS = "1,2,4,8,16,32,64"
WINDOW = 10.0
"""Seconds over which the busiest moment of the store is averaged."""
POINTS = 128
"""Of each server on the ring of the consistent hash."""
TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SIZES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class Setup:
    """One fleet."""

    servers: int
    room: int
    """Blocks of each server's cache."""
    affinity: bool = False
    writes: str = ""
    """`all`, `shared`, or empty: there is no store."""
    store: int = 0
    """Blocks of the store."""
    ttl: float = 30 * 86400.0
    """Seconds after its last use that the store forgets a block."""
    refresh: bool = True
    """Whether a server that writes a prompt has the store keep what it already has of it."""

    @property
    def name(self) -> str:
        return f"{'affinity' if self.affinity else 'round robin'}{' + store' if self.writes else ''}"


@dataclass
class Figures:
    """What one fleet did, in blocks."""

    seconds: float = 0.0
    asked: int = 0
    local: int = 0
    remote: int = 0
    looked: int = 0
    """Blocks that the store was asked for by requests."""
    sent: int = 0
    """Blocks that servers sent to the store, new there or not."""
    stored: int = 0
    """Blocks that the store has at the end."""
    computed: Counter[int] = field(default_factory=Counter)
    """By server."""
    served_in: Counter[int] = field(default_factory=Counter)
    """Blocks read, by window of `WINDOW` seconds."""
    sent_in: Counter[int] = field(default_factory=Counter)

    @property
    def imbalance(self) -> float:
        """Returns what the busiest server computes, as a multiple of the mean. Servers that compute nothing count."""
        return max(self.computed.values()) * len(self.computed) / max(1, self.computed.total())


class Ring:
    """A consistent hash: a server that joins or leaves moves only the keys that it takes or had."""

    def __init__(self, servers: int, points: int = POINTS) -> None:
        self._points = sorted((_hashed(f"{s}/{p}"), s) for s in range(servers) for p in range(points))

    def server_of(self, key: str) -> int:
        """Returns the server whose point follows the key's."""
        at = bisect.bisect(self._points, (_hashed(key), 0))
        return self._points[at % len(self._points)][1]


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def conversations(prompts: Sequence[list[int]]) -> list[str]:
    """Returns a name for the conversation of each prompt: its first block behind those with which all prompts begin. A
    prompt that has none is a conversation of its own."""
    long = [p for p in prompts if p]
    first, last = (min(long), max(long)) if long else ([], [])
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return [str(p[shared]) if len(p) > shared else f"alone {i}" for i, p in enumerate(prompts)]


def routes(setup: Setup, requests: Sequence[Request]) -> list[int]:
    """Returns the server of each request."""
    if not setup.affinity:
        return [i % setup.servers for i in range(len(requests))]
    ring = Ring(setup.servers)
    return [ring.server_of(name) for name in conversations([r.coarse(HASHED) for r in requests])]


def pauses(requests: Sequence[Request], names: Sequence[str]) -> list[float]:
    """Returns the seconds between each two requests of a conversation that follow each other, the shortest first."""
    last: dict[str, float] = {}
    found = []
    for request, name in zip(requests, names, strict=True):
        if name in last:
            found.append(request.time - last[name])
        last[name] = request.time
    return sorted(found)


class Lru:
    """Blocks in the order of their last use."""

    def __init__(self, room: int, ttl: float = float("inf")) -> None:
        self._room, self._ttl = room, ttl
        self._used: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, block: int) -> bool:
        return block in self._used

    def leading(self, blocks: Sequence[int]) -> int:
        """Returns how many of these blocks are there, from the first on."""
        return next((i for i, b in enumerate(blocks) if b not in self._used), len(blocks))

    def use(self, blocks: Iterable[int], now: float) -> list[int]:
        """Make these the most recently used ones, in this order. Returns what was evicted."""
        for block in blocks:
            self._used[block] = now
            self._used.move_to_end(block)
        return [self._used.popitem(last=False)[0] for _ in range(len(self._used) - self._room)]

    def expire(self, now: float) -> None:
        """Forget what was not used for as long as the time to live."""
        while self._used and next(iter(self._used.values())) < now - self._ttl:
            self._used.popitem(last=False)


class Server:
    def __init__(self, room: int) -> None:
        self.cache = Lru(room)
        self.waiting: dict[int, float] = {}
        """When a prompt that waits to be written is due, by its last block."""
        self._following: dict[int, int] = {}
        """The block that came behind a block last."""

    def use(self, blocks: Sequence[int], now: float) -> int:
        """Cache a prompt. Returns how many blocks it shares, up to where it parts from another one in the cache."""
        shared = 0
        for i, (block, following) in enumerate(itertools.pairwise(blocks)):
            before = self._following.get(block, following)
            if before != following:
                shared = i + 1
            self._following[block] = following
        for block in self.cache.use(reversed(blocks), now):
            self._following.pop(block, None)
        return shared


class Fleet:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._servers = [Server(setup.room) for _ in range(setup.servers)]
        self._store = Lru(setup.store, setup.ttl)
        self._due: list[tuple[float, int, tuple[int, ...]]] = []
        self._chance = random.Random(0)
        self.figures = Figures(computed=Counter(dict.fromkeys(range(setup.servers), 0)))

    def run(self, requests: Sequence[Request]) -> Figures:
        """Serve these requests, which are in the order of time."""
        for request, number in zip(requests, routes(self._setup, requests), strict=True):
            self._write_due(request.time)
            self._serve(number, request.coarse(HASHED), request.time)
        self._write_due(float("inf"))
        self.figures.seconds = requests[-1].time - requests[0].time if requests else 0.0
        self.figures.stored = len(self._store)
        return self.figures

    def _serve(self, number: int, blocks: list[int], now: float) -> None:
        figures, server = self.figures, self._servers[number]
        local, remote = server.cache.leading(blocks), 0
        if self._setup.writes:
            self._store.expire(now)
            behind = blocks[local:]
            remote = self._store.leading(behind)
            self._touch(behind[:remote], now)
            figures.looked += len(behind)
            figures.served_in[int(now // WINDOW)] += remote
        figures.asked += len(blocks)
        figures.local += local
        figures.remote += remote
        figures.computed[number] += len(blocks) - local - remote
        shared = server.use(blocks, now)
        if self._setup.writes == "all":
            self._write(server, blocks, now)
        elif self._setup.writes:
            self._write(server, blocks[:shared], now)
            self._wait(number, blocks, now)

    def _wait(self, number: int, blocks: list[int], now: float) -> None:
        waiting = self._servers[number].waiting
        for block in blocks:
            waiting.pop(block, None)  # a prompt that this one continues
        if blocks:
            waiting[blocks[-1]] = now + DELAY
            heapq.heappush(self._due, (now + DELAY, number, tuple(blocks)))

    def _write_due(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            due, number, blocks = heapq.heappop(self._due)
            server = self._servers[number]
            if server.waiting.get(blocks[-1]) == due:
                del server.waiting[blocks[-1]]
                self._write(server, blocks, due)

    def _write(self, server: Server, blocks: Sequence[int], now: float) -> None:
        self._store.expire(now)
        there = self._store.leading(blocks)
        if self._setup.refresh:
            self._touch(blocks[:there], now)
        sent = blocks[there : there + server.cache.leading(blocks[there:])]
        self._touch(sent, now)
        self.figures.sent += len(sent)
        self.figures.sent_in[int(now // WINDOW)] += len(sent)

    def _touch(self, blocks: Sequence[int], now: float) -> None:
        """Redis tells uses apart by the second, so the order within a request is any."""
        self._store.use(self._chance.sample(blocks, len(blocks)), now)


def in_real_caches(setup: Setup, requests: Sequence[Request]) -> float:
    """Returns what the servers' own caches find if each is the real one, with stand-ins for KV (`trace_cache`), and a
    budget for as many tokens."""
    from trace_cache import Replay, Settings, plain

    sizes = plain(4)
    servers = [Replay(Settings(sizes, setup.room * HASHED * sizes.token)) for _ in range(setup.servers)]
    for request, number in zip(requests, routes(setup, requests), strict=True):
        servers[number].run([request])
    counts = sum((server.counts for server in servers), Counter[str]())
    for server in servers:
        server.close()
    return counts["found"] / max(1, counts["asked"])


def setups(servers: Iterable[int], room: int, store: int, writes: str, ttl: float, refresh: bool) -> list[Setup]:
    """Returns the four fleets of each number of servers: both ways to choose a server, without a store and with it."""
    return [
        Setup(n, room, affinity, mode, store if mode else 0, ttl, refresh)
        for n in servers
        for mode in ("", writes)
        for affinity in (False, True)
    ]


COLUMNS = [
    "servers",
    "fleet",
    "found locally",
    "found in the store",
    "computed",
    "tokens/s a server computes (busiest)",
    "store serves, MB/s (busiest 10 s)",
    "store takes, MB/s (busiest 10 s)",
    "stored, GB",
    "looks/s",
]


def row(setup: Setup, figures: Figures, token_bytes: int) -> list[str]:
    """Returns what one fleet did as the text of a row."""
    asked, seconds = max(1, figures.asked), max(1.0, figures.seconds)
    block, done = HASHED * token_bytes, figures.computed.total()
    each = done * HASHED / seconds / setup.servers

    def rate(counts: Counter[int]) -> str:
        mean, most = counts.total() * block / seconds, max(counts.values(), default=0) * block / WINDOW
        return f"{mean / 1e6:,.0f} ({most / 1e6:,.0f})" if setup.writes else ""

    return [
        str(setup.servers),
        setup.name,
        f"{figures.local / asked:.3f}",
        f"{figures.remote / asked:.3f}" if setup.writes else "",
        f"{done / asked:.3f}",
        f"{each:,.0f} ({figures.imbalance * each:,.0f})",
        rate(figures.served_in),
        rate(figures.sent_in),
        f"{figures.stored * block / 1e9:,.0f}" if setup.writes else "",
        f"{figures.looked * HASHED / record_tokens(token_bytes) / seconds:,.0f}" if setup.writes else "",
    ]


def traffic(requests: Sequence[Request]) -> str:
    """Returns a sentence about the trace."""
    prompts = [r.coarse(HASHED) for r in requests]
    names = conversations(prompts)
    waited = pauses(requests, names)
    middle, most = (waited[int(len(waited) * share)] for share in (0.5, 0.9)) if waited else (0.0, 0.0)
    asked = HASHED * sum(map(len, prompts)) / 1e6
    distinct = HASHED * len({b for p in prompts for b in p}) / 1e6
    return (
        f"{len(requests):,} requests of {len(set(names)):,} conversations; {asked:,.0f} million tokens in whole "
        f"blocks, {distinct:,.0f} million of them distinct. Half of {len(waited):,} pauses in a conversation are up to "
        f"{middle:.0f} s, nine tenths up to {most:.0f} s."
    )


def seconds_of(text: str) -> float:
    """Returns the seconds of `90s`, `5m`, `1h` or `30d`. Raises ValueError."""
    if text[-1:] not in TIMES:
        raise ValueError(f"{text!r} is no time: write 90s, 5m, 1h or 30d")
    return float(text[:-1]) * TIMES[text[-1:]]


def bytes_of(text: str) -> float:
    """Returns the bytes of `64GB`, say. Raises ValueError."""
    if text[-2:] not in SIZES:
        raise ValueError(f"{text!r} is no size: write 512MB, 64GB or 4TB")
    return float(text[:-2]) * SIZES[text[-2:]]


def tokens_of(text: str) -> int:
    """Returns the tokens of `256k` (k: 1,024) or `1000`. Raises ValueError."""
    return int(float(text.removesuffix("k")) * (1024 if text.endswith("k") else 1))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a file of requests or of sessions")
    parser.add_argument("--servers", default=SERVERS, help=f"how many, with commas ({SERVERS})")
    parser.add_argument("--room", type=tokens_of, default="256k", help="tokens of each server's cache (256k)")
    parser.add_argument("--store", type=bytes_of, default="512GB", help="bytes of KV of the store (512GB)")
    parser.add_argument(
        "--ttl", type=seconds_of, default="30d", help="the store forgets what was not used so long (30d)"
    )
    parser.add_argument("--token", type=int, default=37888, help="bytes of KV of a token (37888: Llama-8B in `4`)")
    parser.add_argument("--writes", choices=["shared", "all"], default="shared", help="what is written, and when")
    parser.add_argument(
        "--no-refresh", dest="refresh", action="store_false", help="writing a prompt renews nothing of it in the store"
    )
    parser.add_argument("--real", action="store_true", help="without a store, also replay through the real cache")
    parser.add_argument("--requests", type=int, help="only the first so many requests")
    args = parser.parse_args(arguments)
    if not record_tokens(args.token):
        parser.error(f"a token of {args.token:,} bytes does not fit into a value of the store")
    requests = load(args.trace)[: args.requests]
    began, store = time.perf_counter(), int(args.store / (HASHED * args.token))
    numbers = [int(n) for n in args.servers.split(",")]
    fleets = setups(numbers, args.room // HASHED, store, args.writes, args.ttl, args.refresh)
    what = (
        f"A simulation: caches of {args.room * args.token / 1e9:.1f} GB, a store of {args.store / 1e9:,.0f} GB, "
        f"{args.token:,} bytes a token, writes: {args.writes}{'' if args.refresh else ', not renewed'}"
    )
    table = Table(*COLUMNS, *(["found in real caches"] if args.real else []), title=what)
    for n, setup in enumerate(fleets, 1):
        cells = row(setup, Fleet(setup).run(requests), args.token)
        if args.real and not setup.writes:
            cells.append(f"{in_real_caches(setup, requests):.3f}")
        table.add_row(*cells, end_section=n % 4 == 0)
    console = Console()
    console.print(traffic(requests))
    console.print(table)
    console.print(f"({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
