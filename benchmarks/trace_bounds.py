"""What other ways of keeping prompts find of a trace, by blocks: whole conversations, block LRU, the best possible.

Each function takes the requests as lists of block ids (`trace_files.Request.coarse`) and the number of blocks that
there is room for, and returns the share of blocks that were found.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

Blocks = list[list[int]]
NEVER = 1 << 60


def common(a: list[int], b: list[int]) -> int:
    """Returns how many blocks two prompts share. Ids name prefixes, so they agree up to there and nowhere behind."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def whole_conversations(requests: Blocks, room: int) -> float:
    """As mlx-lm's prompt cache keeps them: an entry for each prompt, which replaces those that it continues, least
    recently used first."""
    entries: OrderedDict[int, list[int]] = OrderedDict()
    used = hits = total = 0
    for number, blocks in enumerate(requests):
        total += len(blocks)
        best, key = max(((common(e, blocks), k) for k, e in entries.items()), default=(0, -1))
        hits += best
        if best and best == len(entries[key]):
            used -= len(entries.pop(key))
        elif best:
            entries.move_to_end(key)
        entries[number] = blocks
        used += len(blocks)
        while used > room:
            _, evicted = entries.popitem(last=False)
            used -= len(evicted)
    return hits / max(1, total)


def least_recently_used(requests: Blocks, room: int) -> float:
    """Each block once, the least recently used one first; of a prompt its end first."""
    used: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for blocks in requests:
        total += len(blocks)
        hits += next((i for i, b in enumerate(blocks) if b not in used), len(blocks))
        for block in reversed(blocks):
            used[block] = None
            used.move_to_end(block)
        while len(used) > room:
            used.popitem(last=False)
    return hits / max(1, total)


def best_possible(requests: Blocks, room: int, *, holds_running: bool = False) -> float:
    """The block whose next use is furthest away goes first. With `holds_running` there must be room for all blocks of a
    request while it runs, as in a real cache; without, the request itself takes none."""
    uses = _next_uses(requests)
    next_use: dict[int, int] = {}
    queue: list[tuple[int, int, int]] = []
    hits = total = 0
    for blocks, following in zip(requests, uses, strict=True):
        total += len(blocks)
        known = next((i for i, b in enumerate(blocks) if b not in next_use), len(blocks))
        hits += known
        kept = min(len(blocks), room) if holds_running else len(blocks)
        if holds_running:
            for block in blocks[:known]:
                del next_use[block]  # what it uses is not evicted for it
            _evict(next_use, queue, room - kept)
        for depth, block in enumerate(blocks[:kept]):
            next_use[block] = following[depth]
            heapq.heappush(queue, (-following[depth], -depth, block))
        _evict(next_use, queue, room)
    return hits / max(1, total)


def _evict(next_use: dict[int, int], queue: list[tuple[int, int, int]], room: int) -> None:
    while len(next_use) > room:
        use, _, block = heapq.heappop(queue)
        if next_use.get(block) == -use:
            del next_use[block]


def _next_uses(requests: Blocks) -> Blocks:
    """Returns, for each block of each request, the number of the next request that has it."""
    following: dict[int, int] = {}
    uses: Blocks = []
    for number in range(len(requests) - 1, -1, -1):
        uses.append([following.get(b, NEVER) for b in requests[number]])
        following.update(dict.fromkeys(requests[number], number))
    return uses[::-1]
