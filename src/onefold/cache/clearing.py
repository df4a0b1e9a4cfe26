"""Empties a cache: drops everything that no lease holds, in memory and, if requested, in the tier."""

from __future__ import annotations

import time

from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Node
from onefold.cache.parts import Parts
from onefold.cache.pins import Pins

FLUSH_MOST = 10.0
"""Seconds that clearing waits for writes."""


class Clearing:
    def __init__(self, parts: Parts, pins: Pins) -> None:
        self._parts = parts
        self._state = parts.state
        self._pins = pins

    def run(self, *, disk: bool, pins: bool = True) -> None:
        """See `PrefixCache.clear`."""
        if not disk:
            self._flush(everything=True)
        self._state.lock.run(self.dropping(disk=disk, pins=pins))
        if disk:
            self._flush(everything=False)

    def _flush(self, *, everything: bool) -> None:
        if self._parts.tier is not None:
            with self._state.lock.inner:  # so that requests continue meanwhile
                self._parts.tier.flush(everything=everything, until=time.monotonic() + FLUSH_MOST)

    def dropping(self, *, disk: bool, pins: bool = True) -> Work[None]:
        """Drop the nodes that no lease holds and that were not used since this began. With `disk=False` what the tier
        has stays, with `pins=False` what is pinned."""
        self._state.sweep()
        for restore in list(self._state.restores):
            restore.finish()
        if pins:
            self._pins.clear()
        began = self._state.nodes.now()
        for tree in list(self._state.nodes.trees.values()):
            for node in tree.children_first():
                if node.parent is None or not node.idle or not _is_leaf(node, disk) or node.last_use > began:
                    continue
                if disk:
                    self._state.totals["discarded_tokens"] += node.end - node.start
                    self._state.nodes.drop(tree, node)
                else:
                    self._state.totals["discarded_tokens"] += self._state.nodes.unload(tree, node)
                yield 0.0
        if disk and self._state.tier is not None:
            self._state.tier.clear()


def _is_leaf(node: Node, disk: bool) -> bool:
    """Whether the node has no children; or, if what is on disk stays, none in memory."""
    if disk:
        return not node.children
    return node.in_memory and not node.held_below
