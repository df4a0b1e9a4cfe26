"""How much of a trace's prompts a cache finds: Onefold's, with stand-ins for KV, beside others and the best possible.

    python benchmarks/traces.py TRACE.jsonl [--show bounds cache orders marks disk states] [--users 8] [--half 0|1]

`trace_files.py` describes the two formats of TRACE. Shares are of all tokens of all prompts. Room is given in tokens of
16 bits (k: 1,024) of a Llama-8B shape, 128 KiB each; with fewer bits the same bytes hold more of them.

    bounds   whole conversations (mlx-lm's way), block LRU, the best possible, and the best that holds what runs
    cache    Onefold beside these, at 16 and at 4 bits
    orders   orders of eviction, by blocks
    marks    Onefold with other water marks, and not told which answers ended a turn
    disk     memory and a disk of four times its size, written back and through
    states   models that cannot be cut anywhere: recurrent states, sliding windows
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import trace_bounds as bounds
from trace_cache import Settings, Sizes, hybrid, plain, replayed, windowed
from trace_files import Request, load
from trace_orders import ORDERS, Simulation

BLOCK = 512
DISK = 4
"""The disk has so many times the bytes of memory."""
MARKS = ((0.90, 0.95, False), (0.90, 0.95, True), (0.95, 0.97, True), (0.90, 1.0, False), (0.90, 1.0, True))
"""The low and the high water mark, and whether the cache is told which answers ended a turn."""


class Given(NamedTuple):
    requests: list[Request]
    rooms: list[int]
    """Tokens of 16 bits."""

    @property
    def blocks(self) -> bounds.Blocks:
        return [r.coarse(BLOCK) for r in self.requests]


def table(head: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|---|" + "---:|" * (len(head) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def share(found: float) -> str:
    return f"{found:.3f}".removeprefix("0")


def named(room: int) -> str:
    return f"{room // 1024}k, {room * plain(16).token / 1e9:.1f} GB"


def found_of(counts: Counter[str]) -> float:
    return counts["found"] / max(1, counts["asked"])


def show_bounds(given: Given) -> None:
    rows = [[named(room), *_bounds(given, room)] for room in given.rooms]
    table(["room", "whole conversations", "block LRU", "best possible", "best that holds what runs"], rows)


def _bounds(given: Given, room: int) -> list[str]:
    blocks, n = given.blocks, room // BLOCK
    return [
        share(bounds.whole_conversations(blocks, n)),
        share(bounds.least_recently_used(blocks, n)),
        share(bounds.best_possible(blocks, n)),
        share(bounds.best_possible(blocks, n, holds_running=True)),
    ]


def show_cache(given: Given) -> None:
    rows = []
    for room in given.rooms:
        for bits in (16, 4):
            sizes, budget = plain(bits), room * plain(16).token
            counts = replayed(Settings(sizes, budget), given.requests)
            kept = counts["stored"] * sizes.token / budget / counts["requests"]
            known = _bounds(given, budget // sizes.token)
            rows.append([named(room), str(bits), *known, share(found_of(counts)), share(kept)])
    head = ["room", "bits", "whole conversations", "block LRU", "best possible", "best that holds what runs"]
    table([*head, "Onefold", "of the budget is KV"], rows)


def show_orders(given: Given) -> None:
    rows = []
    for name, make in ORDERS.items():
        found = (Simulation(room // BLOCK, make()).run(given.requests, BLOCK) for room in given.rooms)
        rows.append([name, *(share(f) for f in found)])
    table(["order", *(named(room) for room in given.rooms)], rows)


def show_marks(given: Given) -> None:
    rows = []
    for low, high, hints in MARKS:
        row = ["none" if high == 1 else f"{low:.2f}, {high:.2f}", "yes" if hints else "no"]
        for room in given.rooms:
            settings = Settings(plain(16), room * plain(16).token, low_water=low, high_water=high, hints=hints)
            row.append(share(found_of(replayed(settings, given.requests))))
        rows.append(row)
    table(["water marks", "told of turns", *(named(room) for room in given.rooms)], rows)


def show_disk(given: Given) -> None:
    rows = []
    for room in given.rooms:
        whole = (1 + DISK) * room // BLOCK
        known = [bounds.least_recently_used(given.blocks, whole), bounds.best_possible(given.blocks, whole)]
        for bits in (16, 4):
            for through in (False, True):
                budget = room * plain(16).token
                settings = Settings(plain(bits), budget, disk=DISK * budget, through=through)
                counts = replayed(settings, given.requests)
                asked = max(1, counts["asked"])
                figures = [found_of(counts), counts["from_disk"] / asked, counts["written"] / asked]
                beside = [share(k) for k in known] if bits == 16 else ["", ""]
                mode = "through" if through else "back"
                rows.append([named(room), str(bits), mode, *(share(f) for f in figures), *beside])
    head = ["memory", "bits", "mode", "found", "read from disk", "written"]
    table([*head, "block LRU in both", "best possible in both"], rows)


def show_states(given: Given) -> None:
    models: dict[str, Sizes] = {"can be cut": plain(16), "recurrent": hybrid(), "windows": windowed()}
    rows = []
    for name, sizes in models.items():
        row = [name, f"{sizes.token >> 10} KiB, {sizes.state / 1e6:.0f} MB"]
        for room in given.rooms:  # of this model's tokens
            row.append(share(found_of(replayed(Settings(sizes, room * sizes.token), given.requests))))
        rows.append(row)
    table(["model", "a token, a state", *(f"room for {room // 1024}k" for room in given.rooms)], rows)


SHOWN: dict[str, Callable[[Given], None]] = {
    "bounds": show_bounds,
    "cache": show_cache,
    "orders": show_orders,
    "marks": show_marks,
    "disk": show_disk,
    "states": show_states,
}


def tokens_of(text: str) -> int:
    return int(float(text.removesuffix("k")) * (1024 if text.endswith("k") else 1))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a file of sessions or of requests")
    parser.add_argument("--show", nargs="+", choices=list(SHOWN), default=["cache"])
    parser.add_argument("--room", default="128k,256k,512k", help="tokens, with commas (128k,256k,512k)")
    parser.add_argument("--users", type=int, default=8, help="sessions at a time (8)")
    parser.add_argument("--sessions", type=int, default=160, help="how many sessions (160)")
    parser.add_argument("--half", type=int, choices=[0, 1], help="every second session instead (0: tuned on)")
    parser.add_argument("--requests", type=int, help="only the first so many requests")
    args = parser.parse_args(arguments)
    requests = load(args.trace, users=args.users, sessions=args.sessions, half=args.half)[: args.requests]
    given = Given(requests, [tokens_of(part) for part in args.room.split(",")])
    print(f"{len(requests):,} requests, {sum(r.n_tokens for r in requests) / 1e6:,.0f} million tokens\n")
    for name in args.show:
        began = time.perf_counter()
        print(f"{name}:")
        SHOWN[name](given)
        print(f"({time.perf_counter() - began:.0f} s)\n")


if __name__ == "__main__":
    main()
