"""A stand-in of the disk for replays: it keeps which tokens were written, and no bytes.

It is a tier like the disk (`onefold.cache.memory.tier`), with a budget of its own, and as fast as needed: what is to be
written is written at once, and everything that it has is read. Beyond its budget the least recently used ends of
conversations go. In write-through mode each commit is written; in write-back mode what will be evicted next, a share of
memory ahead, as the disk tier does. Only for models without checkpoints.
"""

from __future__ import annotations

import threading

from onefold.cache.memory import eviction
from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.reach import kv_reach, readable_length
from onefold.cache.memory.segment import Slab, Span
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import KvPayload, NoTier, TierPayload
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track

AHEAD = 0.15
"""In write-back mode, of the budget: so much is written before it is evicted."""
AT_ONCE = 0.02
"""Of the disk's budget: so much is removed when it is full."""


class Written(KvPayload):
    """The first `n` tokens of a node are on the disk."""

    def __init__(self, node: Node, n: int) -> None:
        self.node, self.n = node, n

    @property
    def kv(self) -> int:
        return self.node.start + self.n

    def cut(self, at: int, upper: Node, lower: Node) -> tuple[Written | None, Written | None]:
        rest = self.n - at
        return Written(upper, min(at, self.n)), Written(lower, rest) if rest > 0 else None

    def join(self, upper: TierPayload | None) -> None:
        above = upper.n if isinstance(upper, Written) else 0
        whole = isinstance(upper, Written) and upper.kv == upper.node.end
        self.n = above + self.n if whole else above

    def moved(self, node: Node) -> Written:
        return Written(node, self.n)


class StandInDisk(NoTier):
    def __init__(self, state: CacheState, budget: int, *, through: bool) -> None:
        """`budget` is in bytes."""
        self._state, self._through = state, through
        self._most = budget // state.store.token_bytes
        self.put = self.fetched = 0
        """Tokens."""

    # -- out of memory -----------------------------------------------------------------------------

    def is_clean(self, node: Node) -> bool:
        return node.span is None or (node.below is not None and node.below.readable >= node.end)

    def committed(self, node: Node) -> None:
        if self._through:
            self._write(node)

    def saving(self, node: Node, until: float) -> Work[bool]:
        yield from ()
        return self._write(node)

    def write_ahead(self) -> None:
        """Write what will be evicted next."""
        ahead = AHEAD * self._state.ledger.budget_bytes / self._state.store.token_bytes
        if self._through or self._state.ledger.used_bytes < (1 - AHEAD) * self._state.ledger.budget_bytes:
            return
        for node in eviction.leaves(self._state.nodes.nodes(), self._state.nodes.now()):
            ahead -= node.end - node.start
            if ahead <= 0 or not self._write(node):
                return

    def _write(self, node: Node) -> bool:
        """Write the path to a node, from its beginning on. Returns False if it is larger than the disk."""
        path = node.path()
        if path[-1].end > self._most:
            return False
        for n in path:
            if not self.is_clean(n):
                self.put += n.end - max(n.start, n.start if n.below is None else n.below.kv)
                n.below = Written(n, n.end - n.start)
        self._remove_oldest(keep=set(path))
        return True

    def _remove_oldest(self, keep: set[Node]) -> None:
        there = [n for n in self._state.nodes.nodes() if isinstance(n.below, Written)]
        excess = sum(n.below.n for n in there if isinstance(n.below, Written)) - self._most
        if excess <= 0:
            return
        excess += int(AT_ONCE * self._most)
        for node in sorted(there, key=lambda n: (n.last_use, -n.end)):
            below = node.below
            if excess <= 0 or node in keep or not node.idle or not isinstance(below, Written):
                continue
            if any(child.below is not None for child in node.children.values()):
                continue
            excess -= below.n
            self._remove(node)

    def _remove(self, node: Node) -> None:
        in_memory, tree = node.span is not None, self._state.nodes.tree_of(node)
        node.below = None
        if not in_memory and not node.children:
            tree.remove(node)

    def drop_below(self, node: Node) -> None:
        tree = self._state.nodes.tree_of(node)
        for descendant in reversed(list(node.walk())):
            descendant.below = None
            tree.remove(descendant)

    # -- back into memory --------------------------------------------------------------------------

    def planning(self, tree: Tree, tokens: Tokens, reserve_tokens: int) -> Work[Read | None]:
        path, matched = tree.match(tokens)
        in_memory, _ = readable_length(self._state, path, matched)
        reach = kv_reach(self._state, path, matched)
        if reach <= in_memory:
            return None
        last, _ = tree.reach(tokens[:reach])  # a node that goes on otherwise is cut there: no more is read
        path = last.path()
        wanted = [n for n in path if n.span is None]
        for node in path:
            node.pins += 1  # else making room could evict what the tokens continue
        try:
            need = wanted[-1].end - wanted[0].start
            yield from self._state.store.making_room_for(need)
            read = Read(self._state, self._state.store.slab_for(need), wanted, in_memory)
        finally:
            for node in path:
                node.pins -= 1
        self.fetched += read.tokens
        return read


class Read:
    """What was read for a request. All of it is done at once."""

    done, rejected, waits = True, False, False
    remote_tokens = 0

    def __init__(self, state: CacheState, slab: Slab, nodes: list[Node], before: int) -> None:
        self.driver: threading.Thread | None = None
        self.owner: object = None
        self.before, self.tokens, self._track = before, 0, Track(state.store)
        slab.enter(self._track)
        for node in nodes:
            lo = node.start - nodes[0].start
            node.span = Span.own(slab, lo, lo + node.end - node.start, node)
            self.tokens += node.end - node.start
        slab.leave(self._track)
        slab.settle()

    def step(self, seconds: float = 0.0) -> bool:
        return False

    def finish(self) -> None: ...

    def holds(self, track: Track) -> bool:
        return track is self._track
