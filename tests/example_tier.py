"""A complete small tier: it keeps the KV of evicted nodes as bytes, and gives it back.

    registry.OPENERS[KeptSettings] = open_kept          # the one line that registers it
    PrefixCache(model, "64MB", disk=KeptSettings("1GB"))

It saves what eviction takes, and nothing before that; it does not outlive the process. Checkpoints are not kept, so it
serves models whose layers can be resumed anywhere, and a node with a checkpoint is lost as without a tier.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from onefold.cache.memory.lock import Work
from onefold.cache.memory.reach import kv_reach, readable_length
from onefold.cache.memory.segment import Slab, Span
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import KvPayload, NoTier, TierPayload, TierStats
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track
from onefold.cache.memory.tree import Node, Tree
from onefold.cache.tiers.identity import Identity
from onefold.sizes import parse_size

Arrays = list[list[np.ndarray[Any, Any]]]
"""By layer, then by array: [1, heads, tokens, bytes of a head]."""


@dataclass(frozen=True)
class KeptSettings:
    """What a user gives as `disk=`."""

    budget: int | str


class Kept(KvPayload):
    """What hangs on a node: the KV of its first tokens, of all unless the node was joined with one that had none."""

    def __init__(self, node: Node, arrays: Arrays) -> None:
        self.node, self.arrays = node, arrays

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for layer in self.arrays for a in layer)

    @property
    def kv(self) -> int:
        return self.node.start + self.arrays[0][0].shape[2]

    def cut(self, at: int, upper: Node, lower: Node) -> tuple[Kept, Kept]:
        above = Kept(upper, [[a[..., :at, :] for a in layer] for layer in self.arrays])
        return above, Kept(lower, [[a[..., at:, :] for a in layer] for layer in self.arrays])

    def join(self, upper: TierPayload | None) -> None:
        if not isinstance(upper, Kept):
            self.arrays = [[a[..., :0, :] for a in layer] for layer in self.arrays]
            return
        if upper.kv < upper.node.end:
            self.arrays = upper.arrays
            return
        pairs = [list(zip(*layers, strict=True)) for layers in zip(upper.arrays, self.arrays, strict=True)]
        self.arrays = [[np.concatenate(pair, axis=2) for pair in layer] for layer in pairs]

    def moved(self, node: Node) -> Kept:
        return Kept(node, self.arrays)


class KeptTier(NoTier):
    def __init__(self, state: CacheState, budget_bytes: int) -> None:
        self._state = weakref.proxy(state)  # the tier outlives the cache, which the state may refer to
        self._budget_bytes = budget_bytes
        self.spilled = self.fetched = 0

    def _nodes(self) -> list[Node]:
        return [n for n in self._state.nodes.nodes() if n.below is not None]

    def _used_bytes(self) -> int:
        return sum(n.below.nbytes for n in self._nodes() if isinstance(n.below, Kept))

    # -- out of memory: what eviction asks -----------------------------------------------------

    def is_clean(self, node: Node) -> bool:
        return node.below is not None and node.below.readable >= node.end and node.checkpoint is None

    def saving(self, node: Node, until: float) -> Work[bool]:
        yield from ()
        if self.is_clean(node) or node.span is None or node.checkpoint is not None:
            return self.is_clean(node)
        span, n_bytes = node.span, (node.end - node.start) * self._state.store.token_bytes
        if self._used_bytes() + n_bytes > self._budget_bytes:
            return False
        layers = range(len(self._state.store.specs))
        arrays = [[np.array(a[..., span.lo : span.hi, :].view(mx.uint8)) for a in span.slab.arrays(i)] for i in layers]
        node.below = Kept(node, arrays)
        self.spilled += node.end - node.start
        return True

    def drop_below(self, node: Node) -> None:
        tree = self._state.nodes.tree_of(node)
        for descendant in reversed(list(node.walk())):  # children first
            descendant.below = None
            tree.remove(descendant)

    # -- back into memory: what a request asks -----------------------------------------------------

    def planning(self, tree: Tree, tokens: Tokens, reserve_tokens: int) -> Work[KeptFetch | None]:
        path, matched = tree.match(tokens)
        in_memory, _ = readable_length(self._state, path, matched)
        reach = kv_reach(self._state, path, matched)
        wanted = [n for n in path if n.span is None and n.start < reach]
        if self._state.model.needs_checkpoints or reach <= in_memory or not wanted:
            return None
        for node in path:
            node.pins += 1  # else making room could evict what the fetched tokens continue
        try:
            need = wanted[-1].end - wanted[0].start
            yield from self._state.store.making_room_for(need)
            slab = self._state.store.slab_for(need)  # raises BudgetError
            there = [n for n in wanted if n.span is None and n.below is not None]  # others had the lock meanwhile
            fetch = KeptFetch(self._state, slab, there, in_memory)
            fetch.run()
        finally:
            for node in path:
                node.pins = max(0, node.pins - 1)
        self.fetched += fetch.tokens
        return fetch

    # -- the whole of it ---------------------------------------------------------------------------

    def stats(self) -> TierStats:
        return TierStats(
            mode="back",
            budget_bytes=self._budget_bytes,
            used_bytes=self._used_bytes(),
            records=len(self._nodes()),
            spilled_tokens=self.spilled,
            restored_tokens=self.fetched,
        )

    def check(self) -> list[str]:
        used = self._used_bytes()
        return [f"{used} bytes kept of {self._budget_bytes}"] if used > self._budget_bytes else []


class KeptFetch:
    """All of it is done at once: copying is quick."""

    remote_tokens = 0

    def __init__(self, state: CacheState, slab: Slab, nodes: list[Node], before: int) -> None:
        self._state, self._slab, self._nodes, self._track = state, slab, nodes, Track(state.store)
        self.driver: threading.Thread | None = None
        self.owner: object = None
        self.before, self.tokens = before, 0
        self.done, self.rejected = False, False

    def run(self) -> None:
        """Fill the slab, and give each node its range of it."""
        self._slab.enter(self._track)
        base = self._nodes[0].start if self._nodes else 0
        made = [
            [np.zeros((1, a.heads, self._slab.capacity, a.dim * a.dtype.size), np.uint8) for a in spec.arrays]
            for spec in self._state.store.specs
        ]
        for node in self._nodes:
            assert isinstance(node.below, Kept)
            for layer, kept in zip(made, node.below.arrays, strict=True):
                for whole, part in zip(layer, kept, strict=True):
                    whole[..., node.start - base : node.end - base, :] = part
        for index, (layer, spec) in enumerate(zip(made, self._state.store.specs, strict=True)):
            self._slab.layers[index] = [mx.array(a).view(s.dtype) for a, s in zip(layer, spec.arrays, strict=True)]
        self._slab.evaluate()
        for node in self._nodes:
            node.span = Span.own(self._slab, node.start - base, node.end - base, node)
            self.tokens += node.end - node.start
        self.finish()

    waits = False

    def step(self, seconds: float = 0.0) -> bool:
        return False

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self._slab.leave(self._track)
            self._slab.settle()

    def holds(self, track: Track) -> bool:
        return track is self._track


def open_kept(settings: KeptSettings, state: CacheState, identity: Identity) -> KeptTier:
    """Opens the tier: the function that the registry names."""
    return KeptTier(state, parse_size(settings.budget))
