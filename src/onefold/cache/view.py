"""What a cache holds, node by node, for people who look at it and change what stays.

The page of `onefold serve` uses it as `PrefixCache.view`. Looking is no use of the nodes. A node is named by its
number, which the last outline has; numbers of nodes that have gone are unknown.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onefold.cache.memory import device
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.outline import Outline, name_of, outlining
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.tier import TierStats
from onefold.cache.memory.tokens import Tokens
from onefold.cache.parts import Parts
from onefold.cache.pins import Pin, Pins
from onefold.errors import ConfigError, UnknownNode

STRETCH_SECONDS = 0.0005
"""How long looking holds the lock at a time."""


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

    def purposes(self) -> Purposes:
        with self._state.lock:
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
                self._state.reclaiming.reclaimable_bytes(),
            )

    def tiers(self) -> TierStats:
        """Returns the statistics of the tier below memory; those of a second one are its `below`."""
        if self._parts.tier is None:
            return self._parts.no_tier
        with self._state.lock:
            return self._parts.tier.stats()

    # -- one node ----------------------------------------------------------------------------------

    def path(self, number: int) -> Path:
        """Returns a node with the tokens that lead to it. Raises UnknownNode."""
        with self._state.lock:
            node = self._node(number)
            tree = self._state.nodes.tree_of(node)
            parts = [n.tokens for n in node.path()]
            space = next(name_of(key) for key, found in self._state.nodes.trees.items() if found is tree)
        tokens = np.concatenate(parts)
        tier = self._parts.tier
        shared = 0 if tier is None else tier.shared_tokens(tree, tokens)
        return Path(len(tokens) - len(parts[-1]), len(tokens), space, tokens, shared)

    def through(self, number: int, ends: Sequence[weakref.ref[Node] | None]) -> list[bool]:
        """Returns, for the nodes at which paths end, whether this node lies on the path. Raises UnknownNode."""
        with self._state.lock:
            wanted = self._node(number)
            return [end is not None and (at := end()) is not None and wanted in at.path() for end in ends]

    def pin(self, number: int, owner: object) -> Pin:
        """Keep a node and all above it in memory until the pin is released. Raises UnknownNode, and ConfigError if its
        KV is not in memory."""
        with self._state.lock:
            self._parts.refuse_closed()
            node = self._node(number)
            if not all(n.in_memory for n in node.path()):
                raise ConfigError("this prefix is not whole in memory, and only what is there can be pinned")
            return self._pins.pin(node, owner)

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
            raise UnknownNode("this prefix is not held any more; the page shows what is held now")
        return node
