"""Orders of eviction, tried on a trace by blocks: which leaf of the prefix tree goes first when room is short.

An order knows what a cache knows at that time: when and how often a leaf was used, how deep it is, and, if the server
says so, whether the answer ended the turn. What a request uses is not evicted for it. docs/eviction.md has the results;
the cache's own order is in `onefold.cache.memory.eviction`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trace_bounds import common
from trace_files import Request

from onefold.cache.memory.eviction import IDLE_FACTOR, LONGEST_PAUSE, PERSON_PAUSE


@dataclass(eq=False)
class Leaf:
    """A node of the prefix tree: a range of blocks that nothing branches off from."""

    blocks: list[int]
    start: int
    parent: Leaf | None
    children: dict[int, Leaf] = field(default_factory=dict)
    born: int = 0
    last_use: float = 0.0
    uses: int = 0
    pause: float = LONGEST_PAUSE
    """Seconds between the last two uses, or what stands for it."""
    ended: bool = False
    """The last answer ended the turn."""
    seen: bool = False
    held: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)


class Order:
    """Least recently used. Other orders change `rank`, or `first` as a whole."""

    def rank(self, leaf: Leaf, now: float) -> float:
        """The lowest goes first."""
        return leaf.last_use

    def first(self, leaves: list[Leaf], now: float, room: int) -> Leaf:
        return min(leaves, key=lambda leaf: self.rank(leaf, now))

    def used(self, leaf: Leaf, idle: float) -> None:
        """A leaf was used again, after so many seconds."""

    def gone(self, leaf: Leaf, idle: float) -> None:
        """A leaf was evicted, so many seconds after its last use."""


class ByPause(Order):
    """The longest expected pause first: the last one, or twice the time since then. The cache's own order."""

    def __init__(self, *, told: bool = False, weight: float = 1.0) -> None:
        """`told`: it is known which answers ended a turn. `weight` is that of the last pause in the average of all."""
        self._told, self._weight = told, weight

    def expected(self, leaf: Leaf, now: float) -> float:
        pause = max(leaf.pause, PERSON_PAUSE) if self._told and leaf.ended else leaf.pause
        return max(pause, IDLE_FACTOR * (now - leaf.last_use))

    def rank(self, leaf: Leaf, now: float) -> float:
        return -self.expected(leaf, now)

    def used(self, leaf: Leaf, idle: float) -> None:
        idle = min(LONGEST_PAUSE, idle)
        leaf.pause = idle if leaf.uses == 1 else leaf.pause + self._weight * (idle - leaf.pause)


class ByChance(ByPause):
    """The same, divided by the chance that a leaf of this length and number of uses is used again, as observed."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[int, int], list[float]] = {}
        self._all = [1.0, 0.5]

    def rank(self, leaf: Leaf, now: float) -> float:
        of_all = self._all[1] / self._all[0]
        n, again = self._seen.get(self._kind(leaf), (0.0, 0.0))
        return -self.expected(leaf, now) / math.sqrt(max(1e-3, (again + 4 * of_all) / (n + 4)))

    def used(self, leaf: Leaf, idle: float) -> None:
        super().used(leaf, idle)
        self._note(leaf, 1)

    def gone(self, leaf: Leaf, idle: float) -> None:
        self._note(leaf, 0)

    def _kind(self, leaf: Leaf) -> tuple[int, int]:
        return min(leaf.uses, 4), min(5, int(math.log2(1 + leaf.end) / 1.5))

    def _note(self, leaf: Leaf, again: int) -> None:
        for counts in (self._seen.setdefault(self._kind(leaf), [0.0, 0.0]), self._all):
            counts[0], counts[1] = 0.998 * counts[0] + 1, 0.998 * counts[1] + again


class ByDensity(Order):
    """The lowest hit density first, as in LHD: uses to come for each second of room, by the age since the last use."""

    AGES = 48

    def __init__(self) -> None:
        self._hits, self._ends = [0.0] * self.AGES, [0.0] * self.AGES
        self._density = [1.0 / (i + 1) for i in range(self.AGES)]
        self._events = 0

    def rank(self, leaf: Leaf, now: float) -> float:
        return self._density[self._age(now - leaf.last_use)]

    def used(self, leaf: Leaf, idle: float) -> None:
        self._note(self._hits, idle)

    def gone(self, leaf: Leaf, idle: float) -> None:
        self._note(self._ends, idle)

    def _age(self, idle: float) -> int:
        return min(self.AGES - 1, int(4 * math.log2(1 + idle)))

    def _note(self, counts: list[float], idle: float) -> None:
        counts[self._age(idle)] += 1
        self._events += 1
        if self._events % 100 == 0:
            hits = events = seconds = 0.0
            for age in range(self.AGES - 1, -1, -1):
                hits += self._hits[age]
                events += self._hits[age] + self._ends[age]
                seconds += events * (2 ** ((age + 1) / 4) - 2 ** (age / 4))
                self._density[age] = hits / seconds if seconds else 0.0
            self._hits, self._ends = [0.95 * n for n in self._hits], [0.95 * n for n in self._ends]


class OnceFirst(Order):
    """Leaves that were used once first, while they have more than a share of the room: 2Q, S3-FIFO, segmented LRU."""

    def __init__(self, share: float) -> None:
        self._share = share

    def first(self, leaves: list[Leaf], now: float, room: int) -> Leaf:
        once = [leaf for leaf in leaves if leaf.uses < 2]
        if once and sum(len(leaf.blocks) for leaf in once) > self._share * room:
            return super().first(once, now, room)
        return super().first([leaf for leaf in leaves if leaf.uses > 1] or leaves, now, room)


class Sieve(Order):
    """In the order in which they came; what was used since the hand last passed is spared once."""

    def __init__(self) -> None:
        self._hand = 0

    def first(self, leaves: list[Leaf], now: float, room: int) -> Leaf:
        queue = sorted(leaves, key=lambda leaf: (leaf.born < self._hand, leaf.born))
        for leaf in queue:
            self._hand = leaf.born
            if not leaf.seen:
                return leaf
            leaf.seen = False
        self._hand = queue[0].born
        return queue[0]

    def used(self, leaf: Leaf, idle: float) -> None:
        leaf.seen = True


class Ranked(Order):
    def __init__(self, rank: Callable[[Leaf, float], float]) -> None:
        self._rank = rank

    def rank(self, leaf: Leaf, now: float) -> float:
        return self._rank(leaf, now)


class AtRandom(Order):
    def __init__(self) -> None:
        self._random = random.Random(0)

    def first(self, leaves: list[Leaf], now: float, room: int) -> Leaf:
        return self._random.choice(leaves)


ORDERS: dict[str, Callable[[], Order]] = {
    "least recently used": Order,
    "longest pause, told of turns (the cache's)": lambda: ByPause(told=True),
    "longest pause, not told": ByPause,
    "longest pause, average of all": lambda: ByPause(weight=0.3),
    "longest pause, by chance of reuse": ByChance,
    "ended turns as 240 s older": lambda: Ranked(lambda x, now: x.last_use - PERSON_PAUSE * x.ended),
    "hit density by age (LHD)": ByDensity,
    "30 s younger for each use": lambda: Ranked(lambda x, now: x.last_use + 30 * min(x.uses, 8)),
    "used once first, above 10 % (S3-FIFO)": lambda: OnceFirst(0.1),
    "used once first, above 25 % (2Q)": lambda: OnceFirst(0.25),
    "SIEVE": Sieve,
    "1 s older for 1,000 tokens of depth": lambda: Ranked(lambda x, now: x.last_use - 0.5 * x.end),
    "1 s younger for 1,000 tokens (dear to compute)": lambda: Ranked(lambda x, now: x.last_use + 0.5 * x.end),
    "at random": AtRandom,
}


class Simulation:
    """A prefix tree of blocks with room for so many, whose leaves go in some order."""

    def __init__(self, room: int, order: Order) -> None:
        self._room, self._order = room, order
        self._root = Leaf([], 0, None)
        self._used = self._born = 0
        self._leaves: dict[Leaf, None] = {}

    def run(self, requests: Iterable[Request], block_tokens: int) -> float:
        """Returns the share of blocks that were found."""
        hits = total = 0
        for request in requests:
            blocks = request.coarse(block_tokens)
            total += len(blocks)
            hits += self._serve(blocks, request)
        return hits / max(1, total)

    def _serve(self, blocks: list[int], request: Request) -> int:
        path, found = self._match(blocks)
        for leaf in path:
            leaf.held = True
        need = min(len(blocks), self._room) - found
        need -= self._evict(self._used + need - self._room, request.time)
        if need > 0:
            path.append(self._add(path[-1] if path else self._root, blocks[found : found + need]))
        for leaf in dict.fromkeys(path):
            if leaf.uses and not leaf.children:
                self._order.used(leaf, request.time - leaf.last_use)
            leaf.uses, leaf.last_use, leaf.ended, leaf.held = leaf.uses + 1, request.time, bool(request.ended), False
        return found

    def _match(self, blocks: list[int]) -> tuple[list[Leaf], int]:
        node, at, path = self._root, 0, list[Leaf]()
        while at < len(blocks) and (child := node.children.get(blocks[at])) is not None:
            same = common(child.blocks, blocks[at:])
            node = child if same == len(child.blocks) else self._split(child, same)
            path.append(node)
            at += same
        return path, at

    def _split(self, node: Leaf, n: int) -> Leaf:
        assert node.parent is not None
        upper = Leaf(node.blocks[:n], node.start, node.parent, born=node.born, last_use=node.last_use, uses=node.uses)
        upper.pause, upper.ended, upper.seen = node.pause, node.ended, node.seen
        node.parent.children[upper.blocks[0]] = upper
        node.blocks, node.start, node.parent = node.blocks[n:], node.start + n, upper
        upper.children[node.blocks[0]] = node
        return upper

    def _add(self, parent: Leaf, blocks: list[int]) -> Leaf:
        """Add blocks behind a node: to a leaf that goes on, or as a new one."""
        self._used += len(blocks)
        if parent is not self._root and not parent.children:
            parent.blocks = parent.blocks + blocks
            return parent
        self._born += 1
        leaf = parent.children[blocks[0]] = Leaf(blocks, parent.end, parent, born=self._born)
        self._leaves[leaf] = None
        return leaf

    def _evict(self, short: int, now: float) -> int:
        """Evict so many blocks. Returns how many could not be."""
        while short > 0:
            leaves = [leaf for leaf in self._leaves if not leaf.held]
            if not leaves:
                return short
            leaf = self._order.first(leaves, now, self._room)
            n = min(short, len(leaf.blocks))
            self._used -= n
            short -= n
            if n < len(leaf.blocks):
                leaf.blocks = leaf.blocks[:-n]
                continue
            self._order.gone(leaf, now - leaf.last_use)
            assert leaf.parent is not None
            del self._leaves[leaf], leaf.parent.children[leaf.blocks[0]]
            if not leaf.parent.children and leaf.parent is not self._root:
                self._leaves[leaf.parent] = None
        return 0
