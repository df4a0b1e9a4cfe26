"""Makes room when bytes are short: decides which nodes and checkpoints are evicted, and in which order.

- Reclaiming frees bytes, allocates at most one layer, and never evicts a leased or pinned node. If it cannot free as
  many bytes as are missing, it frees none.
- Clean nodes are evicted first; then dirty ones, after the tier has written them or `PATIENCE` has passed.
- All methods are called with the cache's lock held. Long operations are `Work`: other threads may take the lock between
  their steps.

Knows nothing of models or requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from onefold.cache.memory import eviction
from onefold.cache.memory.checkpoints import POINTS_SHARE, may_drop, missed_least, superfluous
from onefold.cache.memory.ledger import Ledger, Purpose
from onefold.cache.memory.lock import CacheLock, Work, run_through
from onefold.cache.memory.nodes import NodeStore
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.placement import Placement
from onefold.cache.memory.segment import Slab

PATIENCE = 2.0
"""Seconds that a request waits for dirty nodes to be written. Evicting a node that is not written by then loses it."""
NODES_PER_STEP = 256
"""Of counting."""


class Reclaiming:
    """Frees bytes for the ledger when a reservation does not fit."""

    def __init__(
        self, nodes: NodeStore, placement: Placement, ledger: Ledger, lock: CacheLock, *, needs_checkpoints: bool
    ) -> None:
        self._nodes = nodes
        self._store = nodes.store
        self._placement = placement
        self._ledger = ledger
        self._lock = lock
        self._needs_checkpoints = needs_checkpoints
        self._reclaiming = False
        ledger.make_room = self.make_room
        ledger.making_room = self.making_room
        ledger.headroom = self._headroom
        ledger.reclaimable = self._attainable_bytes

    def admit_checkpoint(self, n_bytes: int) -> bool:
        """`admitting_checkpoint` in one go."""
        return self._lock.run_held(self.admitting_checkpoint(n_bytes))

    def admitting_checkpoint(self, n_bytes: int) -> Work[bool]:
        """Make room for a checkpoint in the checkpoints' share of the budget, by dropping others: first surplus ones,
        then those that a deeper one replaces, in the conversation that was used least recently, and there the one that
        is missed least. A dirty one is written first. Returns False if there is no room."""
        limit = self._ledger.budget_bytes // POINTS_SHARE
        of_requests = self._ledger.bytes_for(Purpose.CHECKPOINT) - self._nodes.points.bytes
        if of_requests + n_bytes > limit:
            return False  # dropping all others would not help
        points, until = self._nodes.points, time.monotonic() + PATIENCE / 4

        def exceeds() -> bool:  # open requests have checkpoints, too, that are not in the trees yet
            return self._ledger.bytes_for(Purpose.CHECKPOINT) + n_bytes > limit

        yield from self._thinning(exceeds, until, self._nodes.now())
        try:
            while exceeds() and (node := points.pop()) is not None:
                if may_drop(node):
                    points.changed(node)  # back in the order, for other threads
                    yield from self._dropping_checkpoint(missed_least(node), until)
                else:
                    points.pass_over(node)
        finally:
            points.put_back()
        return not exceeds()

    def _thinning(self, is_short: Callable[[], bool], until: float, last: float) -> Work[None]:
        """Drop surplus checkpoints of paths that were used no later than `last`, while bytes are short. Dirty ones are
        written first, until then; with 0 they stay."""
        points, tier = self._nodes.points, self._nodes.tier
        for end in list(points.crowded):
            if not is_short():
                return
            yield 0.0
            if end.parent is None or end not in points.crowded or end.last_use > last:
                continue
            for node in superfluous([n for n in end.path() if n.checkpoint is not None]):
                if not is_short():
                    return
                if may_drop(node) and (until or tier is None or tier.is_clean(node)):
                    yield from self._dropping_checkpoint(node, until)
            if end.parent is not None:
                points.crowd(end)

    def _dropping_checkpoint(self, node: Node, until: float) -> Work[None]:
        """Drop a checkpoint; a dirty one is written first. Keeps it if it is needed by then."""
        if self._nodes.tier is not None:
            saved = yield from self._nodes.tier.saving(node, until)
            if node.parent is None or not may_drop(node):
                return
            if not saved:
                self._nodes.tier.count_lost(node)
        self._nodes.drop_checkpoint(node)
        yield 0.0

    def frees(self, node: Node) -> int:
        """Returns how many bytes evicting this leaf would really free."""
        freed = node.checkpoint.frees if node.checkpoint is not None else 0
        if node.span is not None and node.span.slab.idle:
            slab = node.span.slab
            tokens = node.span.hi - node.span.lo
            alone = len(slab.spans) == 1
            freed += slab.bytes + slab.padding.bytes if alone else tokens * self._store.token_bytes
        elif node.span is None or not self._store.token_bytes:
            freed += 1  # an empty node keeps its parent from being evicted
        return freed

    def reclaimable_bytes(self) -> int:
        """`reckoning` in one go."""
        return run_through(self.reckoning())

    def reckoning(self) -> Work[int]:
        """Returns how many bytes evicting every node without a lease or pin would free. Iterates over the nodes that
        are held, not over all. If the lock is released between two steps, what changes meanwhile may be left out."""
        tokens, with_points = 0, list[Node]()
        for i, node in enumerate(list(self._nodes.leaves.busy), 1):
            if node.checkpoint is not None:
                with_points.append(node)
            if node.span is not None and node.span.slab.idle:
                tokens -= node.span.hi - node.span.lo
            if i % NODES_PER_STEP == 0:
                yield 0.0
        tokens += self._store.capacity - sum(slab.capacity for slab in self._store.busy)
        points = self._nodes.points.bytes - self._nodes.points.held_bytes(with_points)
        padding = self._store.padding_bytes * (len(self._store.slabs) - len(self._store.busy))
        return tokens * self._store.token_bytes + points + padding

    def _attainable_bytes(self) -> int:
        """Returns how many bytes making room could free: the reclaimable ones, and the tier's buffers."""
        return self.reclaimable_bytes() + (0 if self._nodes.tier is None else self._nodes.tier.extra_bytes)

    def releasing_room(self) -> Work[None]:
        """Compact every slab that no track reads and that has room which nothing was written to yet. Evicts nothing."""
        yield from self._store.finishing_copies()
        yield from self._squeezing(0)

    def make_room(self, missing: int) -> None:
        """`making_room` in one go."""
        self._lock.run_held(self.making_room(missing))

    def making_room(self, missing: int, *, patience: float = PATIENCE, before: float | None = None) -> Work[None]:
        """Free at least `missing` bytes, and as few more as possible; nothing if that is not possible. Dirty nodes are
        written before they are evicted, for at most `patience` seconds; with 0 they stay in memory. Evicts only nodes
        that were last used no later than `before` (by default now), so that it ends while other threads add nodes."""
        if self._reclaiming:
            return
        self._reclaiming = True
        try:
            for pause in self._making_room(missing, patience, self._nodes.now() if before is None else before):
                self._reclaiming = False  # other threads may make room while this one waits for the lock
                yield pause
                self._reclaiming = True
        finally:
            self._reclaiming = False  # with the lock held, also if this is interrupted

    def _making_room(self, missing: int, patience: float, last: float) -> Work[None]:
        self._nodes.leaves.put_back()
        if self._nodes.tier is not None:
            yield from self._nodes.tier.awaiting_copies(self._store.busy)
        goal = self._ledger.used_bytes - missing
        yield from self._store.finishing_copies()  # a slab that is being copied cannot be freed
        until = time.monotonic() + patience
        if self._nodes.tier is not None and self._ledger.used_bytes - goal > self.reclaimable_bytes():
            yield from self._nodes.tier.draining(until)  # its buffers came from free bytes that are needed now
            yield from self._nodes.tier.awaiting_copies(self._store.busy)  # the writer may have begun other copies
        if self._ledger.used_bytes - goal > self.reclaimable_bytes():
            return
        # if compacting cannot free enough, evict the difference first, so that evicted buffers are not copied
        before = math.inf
        while before > (used := self._ledger.used_bytes) > goal + self._room_bytes():
            before = used
            yield from self._giving_up(goal + self._room_bytes(), patience, until, last)
        yield from self._squeezing(goal)
        yield from self._giving_up(goal, patience, until, last)

    def _room_bytes(self) -> int:
        """Returns how many bytes compacting every idle slab would free."""
        room = self._store.capacity - self._store.owned
        return (room - sum(s.capacity - s.owned for s in self._store.busy)) * self._store.token_bytes

    def _giving_up(self, goal: int, patience: float, until: float, last: float) -> Work[None]:
        """Evict nodes that were used no later than `last`, until no more than `goal` bytes are used: surplus
        checkpoints first, then clean nodes, then the rest."""
        if self._needs_checkpoints:
            yield from self._thinning(lambda: self._ledger.used_bytes > goal, until if patience else 0.0, last)
        if self._nodes.tier is not None:
            yield from self._evicting_down_to(goal, self._nodes.tier.is_clean, 0.0, last)
        if self._nodes.tier is None or patience:
            yield from self._evicting_down_to(goal, lambda node: True, until, last)

    def _squeezing(self, goal: int) -> Work[None]:
        """Compact slabs until no more than `goal` bytes are used."""
        roomy = self._store.roomy
        try:
            for _ in range(len(roomy)):
                if self._ledger.used_bytes <= goal or (slab := roomy.first()) is None:
                    break
                if not (yield from self._placement.compacting(slab)) and slab in self._store.slabs:
                    roomy.pass_over(slab, slab.owned - slab.capacity)
        finally:
            roomy.put_back()

    def _evicting_down_to(self, goal: int, may: Callable[[Node], bool], until: float, last: float) -> Work[None]:
        while (short := self._ledger.used_bytes - goal) > 0:
            touched, freed = dict[Slab, None](), 0
            try:
                while freed < short and (node := self._nodes.leaves.pop(self._nodes.now())) is not None:
                    if node.last_use > last:
                        self._nodes.leaves.pass_over(node)
                        continue
                    frees, may_cut = self.frees(node), not self._needs_checkpoints
                    victim = eviction.consider(node, short - freed, frees, self._store.token_bytes, may_cut=may_cut)
                    if victim is None or not may(node):
                        self._nodes.leaves.pass_over(node)
                    else:
                        freed += yield from self._evicting(victim, touched, until)
                    yield 0.0
            finally:
                self._nodes.leaves.put_back()
            for slab in touched:
                if slab in self._store.slabs and slab.capacity > slab.owned:
                    yield from self._placement.compacting(slab)
            if not freed:
                return

    def _evicting(self, victim: eviction.Victim, touched: dict[Slab, None], until: float) -> Work[int]:
        """Evict a leaf that was removed from the order. Returns the bytes that it freed: 0 if it was used while it was
        being written to disk, and stays."""
        node, tree = victim.node, self._nodes.tree_of(victim.node)
        if victim.keep_tokens:
            tree.split(node, node.start + victim.keep_tokens)
        if self._nodes.tier is not None and until:
            self._nodes.changed(node)  # back in the order, for other threads, while it is written
            last_use = node.last_use
            saved = yield from self._nodes.tier.saving(node, until)
            if not eviction.is_leaf(node) or node.last_use > last_use:
                return 0
            if not saved:
                self._nodes.tier.count_lost(node)
        freed = self.frees(node)
        self._nodes.counts["evicted_nodes"] += 1
        self._nodes.counts["evicted_tokens"] += node.end - node.start
        if node.span is not None:
            touched[node.span.slab] = None
        self._nodes.counts["discarded_tokens"] += self._nodes.unload(tree, node)
        return freed

    def _headroom(self) -> int:
        """Returns the bytes of one array of the largest idle slab, which compacting it needs. A slab that a lease reads
        does not count: if there is no room to compact it later, its nodes are evicted whole."""
        return self._store.array_token_bytes * self._store.largest
