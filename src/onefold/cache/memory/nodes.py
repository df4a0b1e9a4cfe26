"""The stored nodes: the trees, and the KV and checkpoints that their nodes own.

- `put` stores tokens with the buffers that a request wrote; `unload` evicts a node and keeps what the tier has of it.
- A slab that no node and no track refers to is freed at once.
- Only `nodes` iterates over all nodes: orders and sums are updated with each change.
- All methods are called with the cache's lock held.

`reclaiming` decides which node is evicted, `placement` where its bytes lie. Knows nothing of models or requests.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from onefold.cache.memory import eviction
from onefold.cache.memory.checkpoints import Checkpoint, Points
from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.pieces import Piece
from onefold.cache.memory.segment import Slab, Span, Store
from onefold.cache.memory.tier import Tier
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track

log = logging.getLogger("onefold")


class NodeStore:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.trees: dict[Hashable, Tree] = {}
        self._by_root: dict[Node, Tree] = {}
        self.leaves = eviction.Leaves()
        self.points = Points()
        self.counts: Counter[str] = Counter()
        self.tier: Tier | None = None
        """The tier below memory; None if there is none."""
        self.clock = 0.0
        """The time of the last use of any node."""
        self.time: Callable[[], float] = time.time
        """The clock that uses are timed by. A replay of recorded requests sets its own."""

    # -- finding -------------------------------------------------------------------------

    def tree(self, namespace: Hashable) -> Tree:
        """Returns the tree of a namespace. Makes it at its first use."""
        tree = self.trees.get(namespace)
        if tree is None:
            tree = self.trees[namespace] = Tree(self)
            self._by_root[tree.root] = tree
        return tree

    def tree_of(self, node: Node) -> Tree:
        return self._by_root[node.root]

    def changed(self, node: Node) -> None:
        """Update the orders of eviction. The trees call this after each change of a node."""
        self.leaves.changed(node)
        self.points.changed(node)

    def branched(self, node: Node) -> None:
        self.points.branched(node)

    def nodes(self) -> Iterator[Node]:
        for tree in self.trees.values():
            yield from tree.root.walk()

    def touch(self, node: Node, *, turn_over: bool = False) -> None:
        """Mark the path that ends at `node` as used now. `turn_over`: a person is next, and not a tool."""
        self._touch(path := node.path())
        for n in path:
            n.last_use = self.clock
        if turn_over:
            node.use(self.clock, max(node.pause, eviction.PERSON_PAUSE))

    def resume(self, node: Node) -> None:
        """Mark the path that ends at `node` as used now by a request that continues it. As long as a node was left
        alone until now, it is expected to be left alone again."""
        self._touch(path := node.path())
        for n in path:
            n.use(self.clock, min(eviction.LONGEST_PAUSE, max(0.0, self.clock - n.last_use)))

    def _touch(self, path: list[Node]) -> None:
        self.clock = max(self.clock + 1e-6, self.time())
        if self.tier is not None:
            self.tier.touch(path, self.clock)

    def now(self) -> float:
        """Returns a time that is not before the last use of any node."""
        return max(self.clock, self.time())

    def hold(self, node: Node) -> None:
        for n in node.path():
            n.leases += 1

    def release(self, node: Node) -> None:
        for n in node.path():
            n.leases -= 1

    # -- storing -------------------------------------------------------------------------

    def put(self, tree: Tree, tokens: Tokens, track: Track | None) -> Node:
        """Store `tokens` in the tree, with the KV that `track` has of them. KV that the tree has already is left as it
        is, and the track keeps its own copy. Returns the node that ends where the tokens end."""
        node, matched = tree.reach(tokens)
        self._fill(tree, node.path(), track)
        pause = node.pause if node.parent is not None and not node.children else eviction.LONGEST_PAUSE
        for start, stop, piece in _ranges(track, matched, len(tokens)):
            node = tree.add(node, tokens[start:stop])
            node.use(node.last_use, pause)
            if piece is not None:
                lo = piece.lo + start - piece.pos
                node.span = Span.own(piece.slab, lo, lo + stop - start, node)
        return node

    def _fill(self, tree: Tree, path: list[Node], track: Track | None) -> None:
        """Give nodes that have no KV in memory (their conversation rotated, or it is on disk) the KV of `track`."""
        for node in path:
            if node.span is not None or node.parent is None:
                continue
            for start, stop, piece in _ranges(track, node.start, node.end):
                if piece is None or start != node.start:
                    break
                at = tree.split(node, stop) if stop < node.end else node
                lo = piece.lo + start - piece.pos
                at.span = Span.own(piece.slab, lo, lo + stop - start, at)

    def place(self, tree: Tree, tokens: Tokens, checkpoint: Checkpoint) -> bool:
        """Attach a checkpoint to the node at its position. Returns False, and closes the checkpoint, if there is no
        such node or it has a checkpoint already."""
        path, matched = tree.match(tokens[: checkpoint.position])
        if matched < checkpoint.position or not path:
            checkpoint.close()
            return False
        node = path[-1]
        if node.end > matched:
            node = tree.split(node, matched)
        if node.checkpoint is not None:
            checkpoint.close()
            return False
        node.checkpoint = checkpoint
        return True

    def drop_checkpoint(self, node: Node) -> None:
        if node.checkpoint is not None:
            node.checkpoint.close()
            node.checkpoint = None
            self.counts["checkpoints_dropped"] += 1

    def tidy(self, tree: Tree, node: Node) -> Node:
        """Join the adjacent nodes of the path to `node` that could be one. Returns `node`."""
        lower = node
        while (upper := lower.parent) is not None and upper.parent is not None:
            if not _joinable(upper, lower):
                lower = upper
                continue
            tree.join(upper, lower)
        return node

    # -- evicting ------------------------------------------------------------------------

    def drop(self, tree: Tree, node: Node) -> None:
        """Remove a leaf with everything that it owns, in the tier too."""
        if self.tier is not None:
            self.tier.leave(node)
        tree.remove(node)
        self._empty(node)

    def unload(self, tree: Tree, node: Node) -> int:
        """Evict a node from memory. What the tier has of it stays in the tree. Returns how many tokens are lost."""
        if node.below is None:
            kept = known = node.start
        else:
            kept, known = node.below.readable, node.below.known
        lost = node.end - kept
        if known < node.end and node.children and self.tier is not None:
            self.tier.drop_below(node)
        if known > node.start:
            self._empty(tree.split(node, known) if known < node.end else node)
        if known < node.end:
            self.drop(tree, node)
        return lost

    def _empty(self, node: Node) -> None:
        """Free what the node has in memory."""
        self.drop_checkpoint(node)
        if node.span is not None:
            node.span.slab.finish_copy()
            span, node.span = node.span, None
            span.drop()

    def lose(self, slab: Slab, error: Exception) -> None:
        """Evict every node with KV in this slab: the device failed while the slab was written or copied."""
        log.warning("lost a buffer of %d tokens: %s", slab.capacity, error)
        self.counts["lost_tokens"] += slab.owned
        for span in list(slab.spans):
            if span.node.parent is not None:
                tree = self.tree_of(span.node)
                for node in [*list(span.node.walk())[::-1], span.node]:
                    if node.in_memory:
                        self.unload(tree, node)


def _ranges(track: Track | None, start: int, stop: int) -> Iterator[tuple[int, int, Piece | None]]:
    """Yields [start, stop) cut where the track's pieces end. Without a track it is one range without a piece."""
    if track is None:
        if start < stop:
            yield start, stop, None
        return
    for piece in track.pieces:
        a, b = max(start, piece.pos), min(stop, piece.end)
        if a < b:
            yield a, b, piece


def _joinable(upper: Node, lower: Node) -> bool:
    if len(upper.children) != 1 or upper.checkpoint is not None:
        return False
    if upper.below is not None and (upper.below.has_point or upper.below.reaches_beyond(lower)):
        return False
    if (upper.leases, upper.pins) != (lower.leases, lower.pins):
        return False
    if upper.span is None or lower.span is None:
        return upper.span is lower.span
    return upper.span.slab is lower.span.slab and upper.span.hi == lower.span.lo
