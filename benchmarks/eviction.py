"""Which leaf goes first: leaf-first LRU against cost-aware orders, on a trace of real traffic.

    python benchmarks/eviction.py TRACE.jsonl [--share 0.01,0.05,0.1,0.25]

A trace has one request a line with `hash_ids`, the hashes of its 512-token prefix blocks. Prints the share of blocks
that hit, for caches of a share of all distinct blocks. No MLX: only the order of eviction is at stake.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable
from pathlib import Path

Order = Callable[[int, int, int], float]
"""(last use, depth in blocks, uses) to a rank: the lowest goes first."""

ORDERS: dict[str, Order] = {
    "least recently used": lambda used, depth, uses: used,
    "LRU, deep tails dearer": lambda used, depth, uses: used + 20 * depth,
    "LRU, deep tails cheaper": lambda used, depth, uses: used - 20 * depth,
    "LRU, 10 requests per use": lambda used, depth, uses: used + 10 * min(uses, 8),
    "LRU, 30 requests per use": lambda used, depth, uses: used + 30 * min(uses, 8),
    "LRU, 100 requests per use": lambda used, depth, uses: used + 100 * min(uses, 8),
    "LRU, 300 requests per use": lambda used, depth, uses: used + 300 * min(uses, 8),
}


def hit_rate(requests: list[list[int]], capacity: int, order: Order) -> float:
    """Blocks form a tree by prefix; only leaves are evicted, as in the cache."""
    last: dict[int, int] = {}
    depth: dict[int, int] = {}
    uses: dict[int, int] = {}
    parent: dict[int, int] = {}
    children: dict[int, int] = {}
    queue: list[tuple[float, int, int]] = []
    hits = total = 0
    for now, blocks in enumerate(requests):
        total += len(blocks)
        known = 0
        while known < len(blocks) and blocks[known] in last:
            known += 1
        hits += known
        for i, block in enumerate(blocks):
            if block not in last:
                parent[block] = blocks[i - 1] if i else -1
                children[parent[block]] = children.get(parent[block], 0) + 1
                depth[block] = i
            last[block], uses[block] = now, uses.get(block, 0) + 1
        if blocks:
            leaf = blocks[-1]
            heapq.heappush(queue, (order(now, depth[leaf], uses[leaf]), now, leaf))
        while len(last) > capacity and queue:
            _, stamp, block = heapq.heappop(queue)
            if last.get(block) != stamp or children.get(block):
                continue
            del last[block]
            up = parent.pop(block)
            children[up] -= 1
            if up in last and not children[up]:
                heapq.heappush(queue, (order(last[up], depth[up], uses[up]), last[up], up))
    return hits / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--share", default="0.01,0.05,0.1,0.25")
    args = parser.parse_args()
    requests = [json.loads(line)["hash_ids"] for line in args.trace.read_text().splitlines()]
    distinct = len({block for blocks in requests for block in blocks})
    shares = [float(s) for s in args.share.split(",")]
    print(f"{len(requests)} requests, {distinct} distinct blocks")
    print(f"{'order':26s}" + "".join(f"{s:>9.0%}" for s in shares))
    for name, order in ORDERS.items():
        rates = [hit_rate(requests, int(distinct * s), order) for s in shares]
        print(f"{name:26s}" + "".join(f"{r:9.3f}" for r in rates))


if __name__ == "__main__":
    main()
