"""What a cache holds, node by node, for people who look at it and change what stays.

The page of `onefold serve` uses it as `PrefixCache.view`. Looking is no use of the nodes. A node is named by its
number, which the last outline has; numbers of nodes that have gone are unknown.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onefold.cache.memory import device
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.outline import NodeFacts, Outline, name_of, outlining
from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.tier import TierStats, nothing_shared
from onefold.cache.memory.tokens import Tokens
from onefold.cache.parts import Parts
from onefold.cache.pins import Pin, Pins
from onefold.errors import ConfigError, UnknownNode

STRETCH_SECONDS = 0.0005
"""How long looking holds the lock at a time."""
NODES_PER_STEP = 256
"""Of a path, or of what is counted."""
CLIMBS = 4
"""How often a path is read that changes meanwhile."""
GONE = "this prefix is not held any more; the page shows what is held now"


@dataclass(frozen=True)
class Purposes:
    """The budget, by what bytes are for."""

    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    by_purpose: dict[str, int]
    """As the ledger names them."""
    room_bytes: int
    """The part of the stored and live bytes that is room to grow of buffers that no request uses."""
    weight_bytes: int
    """Of the model. They lie beside the budget."""
    token_bytes: int
    stored_tokens: int
    evictable_bytes: int
    """Stored bytes that no request and no pin holds."""
    pinned_bytes: int
    """Of the KV and the checkpoints that pins hold."""


@dataclass(frozen=True)
class Path:
    """A node and the tokens that lead to it."""

    start: int
    end: int
    space: str
    tokens: Tokens
    """From the beginning of the conversation to the node's end."""
    shared_tokens: int
    """How many of them, from the first on, a store of several machines is known to have."""


class View:
    def __init__(self, parts: Parts, pins: Pins) -> None:
        self._parts = parts
        self._state = parts.state
        self._pins = pins
        self._nodes: dict[int, weakref.ref[Node]] = {}
        self._weight_bytes = device.weight_bytes(*(ref() for ref in parts.refs))

    def outline(self) -> Outline:
        """Returns an outline of all trees. Holds the lock for about half a millisecond at a time."""
        made = self._state.lock.run(outlining(self._state.nodes), STRETCH_SECONDS)
        self._nodes = {facts.number: facts.node for facts in made.nodes}
        return made

    def sharing(self, outline: Outline) -> Callable[[NodeFacts], int]:
        """Returns a function that tells how many tokens of the path to a node of the outline, from the first on, a
        store of several machines is known to have. It does not take the lock, and so tells 0 if the path has changed.
        """
        tier = self._parts.tier
        if tier is None or tier.shared_tokens is nothing_shared:
            return lambda n: 0
        facts = {n.number: n for n in outline.nodes}

        def shared(n: NodeFacts) -> int:
            parts: list[Tokens] = []
            at: NodeFacts | None = n
            while at is not None:
                node = at.node()
                if node is None or (node.start, node.end) != (at.start, at.end):
                    return 0
                parts.append(node.tokens)
                at = facts.get(at.above)
            return tier.shared_tokens(outline.trees[n.space], np.concatenate(parts[::-1]))

        return shared

    def purposes(self) -> Purposes:
        lock = self._state.lock
        evictable = lock.run(self._state.reclaiming.reckoning(), STRETCH_SECONDS)
        pinned = lock.run(self._counting_pinned(), STRETCH_SECONDS)
        with lock:
            ledger, store = self._state.ledger, self._state.store
            stored = ledger.bytes_for(Purpose.STORED)
            room = store.capacity - store.owned - sum(slab.capacity - slab.owned for slab in store.busy)
            return Purposes(
                ledger.budget_bytes,
                ledger.used_bytes,
                ledger.peak_bytes,
                ledger.by_purpose(),
                min(room * store.token_bytes, stored),
                self._weight_bytes,
                store.token_bytes,
                store.owned,
                max(0, evictable),
                pinned,
            )

    def _counting_pinned(self) -> Work[int]:
        tokens = points = 0
        for i, node in enumerate(list(self._state.nodes.leaves.busy), 1):
            if node.pins and node.span is not None:
                tokens += node.span.hi - node.span.lo
            if node.pins and node.checkpoint is not None:
                points += node.checkpoint.frees
            if i % NODES_PER_STEP == 0:
                yield 0.0
        return tokens * self._state.store.token_bytes + points

    def tiers(self) -> TierStats:
        """Returns the statistics of the tier below memory; those of a second one are its `below`."""
        if self._parts.tier is None:
            return self._parts.no_tier
        with self._state.lock:
            return self._parts.tier.stats()

    # -- one node ----------------------------------------------------------------------------------

    def path(self, number: int) -> Path:
        """Returns a node with the tokens that lead to it. Raises UnknownNode."""
        tree, parts = self._state.lock.run(self._climbing(number), STRETCH_SECONDS)
        space = next((name_of(key) for key, found in list(self._state.nodes.trees.items()) if found is tree), "")
        tokens = np.concatenate(parts)
        tier = self._parts.tier
        shared = 0 if tier is None else tier.shared_tokens(tree, tokens)
        return Path(len(tokens) - len(parts[-1]), len(tokens), space, tokens, shared)

    def _climbing(self, number: int) -> Work[tuple[Tree, list[Tokens]]]:
        """Returns a node's tree, and the tokens of its path, node by node. Begins again if the path has changed between
        two steps, and in the end takes it in one step. Raises UnknownNode."""
        for attempt in range(CLIMBS):
            node = at = self._node(number)
            parts: list[Tokens] = []
            while at.parent is not None:
                parts.append(at.tokens)
                at = at.parent
                if len(parts) % NODES_PER_STEP == 0 and attempt < CLIMBS - 1:
                    yield 0.0
            if self._node(number) is node and sum(map(len, parts)) == node.end:
                return self._state.nodes.tree_of(at), parts[::-1]
        raise UnknownNode(GONE)

    def through(self, number: int, ends: Sequence[weakref.ref[Node] | None]) -> list[bool]:
        """Returns, for the nodes at which paths end, whether this node lies on the path. A path that changes meanwhile
        may be left out. Raises UnknownNode."""
        return self._state.lock.run(self._passing(number, ends), STRETCH_SECONDS)

    def _passing(self, number: int, ends: Sequence[weakref.ref[Node] | None]) -> Work[list[bool]]:
        wanted, steps = self._node(number), 0
        passes: dict[Node, bool] = {wanted: True}
        """What is known of a node: paths have most of theirs in common."""
        found = []
        for end in ends:
            at = None if end is None else end()
            walked: list[Node] = []
            while at is not None and at not in passes:
                walked.append(at)
                at = at.parent
                steps += 1
                if steps % NODES_PER_STEP == 0:
                    yield 0.0
            answer = at is not None and passes[at]
            passes.update(dict.fromkeys(walked, answer))
            found.append(answer)
        return found

    def pin(self, number: int, owner: object) -> Pin:
        """Keep a node and all above it in memory until the pin is released. Raises UnknownNode, and ConfigError if its
        KV is not in memory."""
        with self._state.lock:
            self._parts.refuse_closed()
            node = self._node(number)
            if not all(n.in_memory for n in node.path()):
                raise ConfigError("this prefix is not whole in memory, and only what is there can be pinned")
            return self._pins.pin(node, owner)

    @property
    def pins(self) -> int:
        """How many pins there are, of all callers."""
        return self._pins.count

    def forget(self, number: int) -> int:
        """Drop a node and everything below it, in memory and in the machine's own tier, except what a lease or a pin
        holds. Returns how many tokens were dropped. Raises UnknownNode."""
        with self._state.lock:
            self._parts.refuse_closed()
            node = self._node(number)
        return self._state.lock.run(self._forgetting(node))

    def _forgetting(self, node: Node) -> Work[int]:
        dropped, slabs = 0, dict[Slab, None]()
        for at in [*reversed(list(node.walk())), node]:
            if at.parent is None or at.children or not at.idle:
                continue
            if at.span is not None:
                at.span.slab.finish_copy()
                slabs[at.span.slab] = None
            dropped += at.end - at.start
            self._state.nodes.drop(self._state.nodes.tree_of(at), at)
            yield 0.0
        self._state.totals["discarded_tokens"] += dropped
        for slab in slabs:
            yield from self._state.placement.trimming_slack(slab)
        return dropped

    def _node(self, number: int) -> Node:
        """Called with the lock held."""
        ref = self._nodes.get(number)
        node = None if ref is None else ref()
        if node is None or node.parent is None:
            raise UnknownNode(GONE)
        return node
