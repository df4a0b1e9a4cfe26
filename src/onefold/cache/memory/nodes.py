"""The stored nodes: the trees together with what their nodes own.

- Everything that is stored is put here (`put`), found here, and given up here (`make_room`).
- A span is re-pointed, never copied twice; a slab that no node and no track refers to is freed at once.
- Reclaiming frees bytes, allocates at most one layer, and never touches a leased or pinned node. A request for
  more than could ever be freed frees nothing.
- No call looks through all nodes or all slabs, but for `nodes` and `check`: orders and sums are kept as things change.
- All methods are called with the cache's lock held. What takes long is `Work`: others may have the lock between its
  steps.

Knows nothing of models or requests.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from onefold.cache.memory import eviction
from onefold.cache.memory.checkpoints import POINTS_SHARE, Checkpoint, Points, superfluous
from onefold.cache.memory.copying import Copying
from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.lock import CacheLock, Work
from onefold.cache.memory.segment import ROOM_SHARE, Slab, Span, Store, rest_capacity
from onefold.cache.memory.tier import Tier
from onefold.cache.memory.track import Piece, Track
from onefold.cache.memory.tree import Node, Tokens, Tree
from onefold.errors import BudgetError, DeviceError

log = logging.getLogger("onefold")

PATIENCE = 2.0
"""Seconds that memory is waited for; what is not on disk by then is given up."""
REMAINDER = 1024
"""Tokens of another branch that are moved out of the way, so that a conversation goes on in one buffer."""


class NodeStore:
    def __init__(self, store: Store, ledger: Ledger, lock: CacheLock, *, pointwise: bool) -> None:
        self.store = store
        self._lock = lock
        self.ledger = ledger
        self.pointwise = pointwise
        self.trees: dict[Hashable, Tree] = {}
        self._by_root: dict[Node, Tree] = {}
        self.leaves = eviction.Leaves()
        self.points = Points()
        self.counts: Counter[str] = Counter()
        self.tier: Tier | None = None
        """Where what is given up here may lie on."""
        self.clock = 0.0
        """When something was used last."""
        self._reclaiming = False
        store.run = lock.run_held
        ledger.make_room = self.make_room
        ledger.making_room = self.making_room
        ledger.headroom = self._headroom
        ledger.reclaimable = self._attainable_bytes

    # -- finding -------------------------------------------------------------------------

    def tree(self, namespace: Hashable) -> Tree:
        """The tree of a namespace, made at its first use."""
        tree = self.trees.get(namespace)
        if tree is None:
            tree = self.trees[namespace] = Tree(self)
            self._by_root[tree.root] = tree
        return tree

    def changed(self, node: Node) -> None:
        """Told by the trees, as their watch."""
        self.leaves.changed(node)
        self.points.changed(node)

    def branched(self, node: Node) -> None:
        self.points.branched(node)

    def nodes(self) -> Iterator[Node]:
        for tree in self.trees.values():
            yield from tree.root.walk()

    def touch(self, node: Node) -> None:
        self.clock = max(self.clock + 1e-6, time.time())
        path = node.path()
        for n in path:
            n.last_use = self.clock
        if self.tier is not None:
            self.tier.touch(path, self.clock)

    def now(self) -> float:
        """Nothing was used later than this, so far."""
        return max(self.clock, time.time())

    def hold(self, node: Node) -> None:
        for n in node.path():
            n.leases += 1

    def release(self, node: Node) -> None:
        for n in node.path():
            n.leases -= 1

    # -- storing -------------------------------------------------------------------------

    def put(self, tree: Tree, tokens: Tokens, track: Track | None) -> Node:
        """Make the tree hold `tokens`, with what `track` has of them. What the tree has already is left as it is,
        and the track's copy of it stays the track's. Returns the node that ends where the tokens end."""
        node, matched = tree.reach(tokens)
        self._fill(tree, node.path(), track)
        for start, stop, piece in _ranges(track, matched, len(tokens)):
            node = tree.add(node, tokens[start:stop])
            if piece is not None:
                lo = piece.lo + start - piece.pos
                node.span = Span.own(piece.slab, lo, lo + stop - start, node)
        return node

    def _fill(self, tree: Tree, path: list[Node], track: Track | None) -> None:
        """Nodes that have no bytes in memory (a conversation rotated, or they are on disk) get them from one that has
        them."""
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
        """Attach a checkpoint where it belongs; it is closed if that place is gone or taken."""
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

    def thin(self, node: Node) -> None:
        """Keep the best few checkpoints of the path that ends at `node`. Those on disk are thinned when a new one has
        arrived there, and not before: a crash must not find the old one gone and the new one not there."""
        for n in superfluous([n for n in node.path() if n.checkpoint is not None]):
            self.drop_checkpoint(n)

    def drop_checkpoint(self, node: Node) -> None:
        if node.checkpoint is not None:
            node.checkpoint.close()
            node.checkpoint = None
            self.counts["checkpoints_dropped"] += 1

    def admit_checkpoint(self, n_bytes: int) -> bool:
        """`admitting_checkpoint` in one go."""
        return self._lock.run_held(self.admitting_checkpoint(n_bytes))

    def admitting_checkpoint(self, n_bytes: int) -> Work[bool]:
        """Room under the checkpoints' share of the budget, by dropping others: those that one further on makes up for
        first, then the least recently used; one that belongs on disk and is not there is written first."""
        limit = self.ledger.budget_bytes // POINTS_SHARE
        if n_bytes > limit:
            return False
        until = time.monotonic() + PATIENCE / 4
        try:
            while self.points.bytes + n_bytes > limit and (node := self.points.pop()) is not None:
                if not node.idle:
                    self.points.pass_over(node)
                    continue
                if self.tier is not None:
                    self.points.changed(node)  # the others see it while it is written
                    saved = yield from self.tier.saving(node, until)
                    if not node.idle or node.checkpoint is None:
                        continue
                    if not saved:
                        self.tier.count_lost(node)
                self.drop_checkpoint(node)
                yield 0.0
        finally:
            self.points.put_back()
        return self.points.bytes + n_bytes <= limit

    def tidy(self, tree: Tree, node: Node) -> Node:
        """Join what a split or a turn left in two though it lies together; returns the node that ends there."""
        lower = node
        while (upper := lower.parent) is not None and upper.parent is not None:
            if not _joinable(upper, lower):
                lower = upper
                continue
            tree.join(upper, lower)
        return node

    # -- giving up -----------------------------------------------------------------------

    def drop(self, tree: Tree, node: Node) -> None:
        """Take a leaf out, with all it owns, on disk too."""
        if self.tier is not None:
            self.tier.leave(node)
        tree.remove(node)
        self._empty(node)

    def unload(self, tree: Tree, node: Node) -> int:
        """Give up what a node has in memory. What is on disk of it stays; returns how many tokens are lost."""
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
        """Let go of what it has in memory."""
        self.drop_checkpoint(node)
        if node.span is not None:
            node.span.slab.finish_copy()
            span, node.span = node.span, None
            span.drop()

    def frees(self, node: Node) -> int:
        """Bytes that dropping this leaf would really free."""
        freed = node.checkpoint.account.bytes if node.checkpoint is not None else 0
        if node.span is not None and node.span.slab.idle:
            slab = node.span.slab
            tokens = node.span.hi - node.span.lo
            freed += slab.bytes if len(slab.spans) == 1 else tokens * self.store.token_bytes
        elif node.span is None or not self.store.token_bytes:
            freed += 1  # an empty node holds up its parent
        return freed

    def reclaimable_bytes(self) -> int:
        """What evicting everything that nobody holds would free. Looks at what is held, not at what is stored."""
        tokens = self.store.capacity - sum(slab.capacity for slab in self.store.busy)
        points = self.points.bytes
        for node in self.leaves.busy:
            if node.span is not None and node.span.slab.idle:
                tokens -= node.span.hi - node.span.lo
            if node.checkpoint is not None:
                points -= node.checkpoint.account.bytes
        return tokens * self.store.token_bytes + points

    def _attainable_bytes(self) -> int:
        """What making room could free: beside that, what comes back when records that wait for the disk are written."""
        return self.reclaimable_bytes() + (0 if self.tier is None else self.tier.extra_bytes)

    def make_room(self, missing: int) -> None:
        """`making_room` in one go."""
        self._lock.run_held(self.making_room(missing))

    def making_room(self, missing: int, *, patience: float = PATIENCE, before: float | None = None) -> Work[None]:
        """Free at least `missing` bytes if that is possible, and as little more as can be. What is not on disk yet and
        should be is written first, for so many seconds at most; with none to spare it stays in memory. Only nodes go
        that were last used no later than `before` (by default now), so that it ends while others keep adding."""
        if self._reclaiming:
            return
        self._reclaiming = True
        try:
            for pause in self._making_room(missing, patience, self.now() if before is None else before):
                self._reclaiming = False  # others may do the same while this waits for the lock
                yield pause
                self._reclaiming = True
        finally:
            self._reclaiming = False  # with the lock held, also where this is broken off

    def _making_room(self, missing: int, patience: float, last: float) -> Work[None]:
        self.leaves.put_back()
        if self.tier is not None:
            yield from self.tier.awaiting_copies(self.store.busy)
        goal = self.ledger.used_bytes - missing
        yield from self.store.finishing_copies()  # nothing can be freed where another thread has begun one
        until = time.monotonic() + patience
        if self.tier is not None and self.ledger.used_bytes - goal > self.reclaimable_bytes():
            yield from self.tier.draining(until)  # what nobody used then is needed now
            yield from self.tier.awaiting_copies(self.store.busy)  # of what the writer has turned to since
        if self.ledger.used_bytes - goal > self.reclaimable_bytes():
            return
        # what room alone cannot make up for goes first, so that its buffers are not copied before
        before = math.inf
        while before > (used := self.ledger.used_bytes) > goal + self._room_bytes():
            before = used
            yield from self._giving_up(goal + self._room_bytes(), patience, until, last)
        yield from self._squeezing(goal)
        yield from self._giving_up(goal, patience, until, last)

    def _room_bytes(self) -> int:
        """What compacting every idle slab would free."""
        room = self.store.capacity - self.store.owned
        return (room - sum(s.capacity - s.owned for s in self.store.busy)) * self.store.token_bytes

    def _giving_up(self, goal: int, patience: float, until: float, last: float) -> Work[None]:
        """Evict what was used no later than `last`, until no more than `goal` bytes are used: what is on disk too
        first, then the rest."""
        if self.tier is not None:
            yield from self._evicting_down_to(goal, self.tier.is_clean, 0.0, last)
        if self.tier is None or patience:
            yield from self._evicting_down_to(goal, lambda node: True, until, last)

    def _squeezing(self, goal: int) -> Work[None]:
        """Give back room that no node owns, until no more than `goal` bytes are used."""
        roomy = self.store.roomy
        try:
            for _ in range(len(roomy)):
                if self.ledger.used_bytes <= goal or (slab := roomy.first()) is None:
                    break
                if not (yield from self.compacting(slab)) and slab in self.store.slabs:
                    roomy.pass_over(slab, slab.owned - slab.capacity)
        finally:
            roomy.put_back()

    def _evicting_down_to(self, goal: int, may: Callable[[Node], bool], until: float, last: float) -> Work[None]:
        while (short := self.ledger.used_bytes - goal) > 0:
            touched, freed = dict[Slab, None](), 0
            try:
                while freed < short and (node := self.leaves.pop()) is not None:
                    if node.last_use > last:  # as are all that follow
                        self.leaves.pass_over(node)
                        break
                    victim = eviction.consider(
                        node, short - freed, self.frees(node), self.store.token_bytes, may_cut=not self.pointwise
                    )
                    if victim is None or not may(node):
                        self.leaves.pass_over(node)
                    else:
                        freed += yield from self._evicting(victim, touched, until)
                    yield 0.0
            finally:
                self.leaves.put_back()
            for slab in touched:
                if slab in self.store.slabs and slab.capacity > slab.owned:
                    yield from self.compacting(slab)
            if not freed:
                return

    def _evicting(self, victim: eviction.Victim, touched: dict[Slab, None], until: float) -> Work[int]:
        """Give up a leaf that was taken out of the order; returns the bytes that it freed: 0 if it was used while it
        was being written to disk, and stays."""
        node, tree = victim.node, self.tree_of(victim.node)
        if victim.keep_tokens:
            tree.split(node, node.start + victim.keep_tokens)
        if self.tier is not None and until:
            self.changed(node)  # the others see it while it is written
            last_use = node.last_use
            saved = yield from self.tier.saving(node, until)
            if not eviction.is_leaf(node) or node.last_use > last_use:
                return 0
            if not saved:
                self.tier.count_lost(node)
        freed = self.frees(node)
        self.counts["evicted_nodes"] += 1
        self.counts["evicted_tokens"] += node.end - node.start
        if node.span is not None:
            touched[node.span.slab] = None
        self.counts["discarded_tokens"] += self.unload(tree, node)
        return freed

    def tree_of(self, node: Node) -> Tree:
        return self._by_root[node.root]

    # -- where bytes lie -------------------------------------------------------------------

    def compacting(self, slab: Slab, room: int = 0) -> Work[bool]:
        """Keep just what nodes own, and `room`. Refused (False) if a track reads the slab, or if there is no
        room even for one layer's copy."""
        if not slab.idle:
            return False
        return bool((yield from Copying(self._compacted(slab, room), [slab]).steps()))

    def _compacted(self, slab: Slab, room: int) -> Work[bool]:
        try:
            yield from slab.rewriting_to(_joined(slab.spans), slab.owned + room)
        except BudgetError:
            return False
        except DeviceError as error:
            self.lose(slab, error)
            return False
        except KeyboardInterrupt:
            self.lose(slab, DeviceError("its copy was interrupted"))
            raise
        at = 0
        for span in slab.spans:  # some may have been cut in two meanwhile, or joined: they are in the same order
            span.lo, span.hi = at, at + span.hi - span.lo
            at = span.hi
        self.counts["compactions"] += 1
        return True

    def lose(self, slab: Slab, error: Exception) -> None:
        """The device failed while this was being written or copied: what lay there is a miss now."""
        log.warning("a buffer of %d tokens was lost: %s", slab.capacity, error)
        self.counts["lost_tokens"] += slab.owned
        for span in list(slab.spans):
            if span.node.parent is not None:
                tree = self.tree_of(span.node)
                for node in [*list(span.node.walk())[::-1], span.node]:
                    if node.in_memory:
                        self.unload(tree, node)

    def trimming_slack(self, slab: Slab) -> Work[None]:
        """After a request: leave some room for the next turn, in proportion, so that a long conversation is not copied
        at each turn; and no more. Nothing is evicted for that."""
        rest = rest_capacity(slab.owned)
        if slab.foreign:
            return
        if slab.capacity - rest <= slab.owned // (2 * ROOM_SHARE) or slab not in self.store.slabs or not slab.idle:
            return
        if rest * self.store.array_token_bytes <= self.ledger.free_bytes:
            yield from self.compacting(slab, room=rest - slab.owned)

    def clear_behind(self, track: Track) -> bool:
        """Nodes of another branch lie behind the track's end in its last slab: move them to a slab of their own, if
        they are few, so that the track goes on in place."""
        last = track.pieces[-1]
        slab = last.slab
        behind = [s for s in slab.spans if s.lo >= last.hi]
        tokens = sum(s.hi - s.lo for s in behind)
        if slab.tracks != {track} or any(s.lo < last.hi < s.hi for s in slab.spans):
            return False
        if any(p.slab is slab and p.lo >= last.hi for p in track.pieces):
            return False  # its own earlier tokens lie there
        if not behind or tokens > min(track.end, REMAINDER) or not self.ledger.fits(tokens * self.store.token_bytes):
            return False
        self._move_out(behind, room=0)
        return True

    def evacuate(self, path: list[Node], track: Track) -> None:
        """A row leaves a batch: what its nodes own of the batch's common slab gets a slab of its own."""
        common = {p.slab for p in track.pieces if p.limit is not None}
        spans = [n.span for n in path if n.span is not None and n.span.slab in common]
        tokens = sum(s.hi - s.lo for s in spans)
        if spans and self.ledger.fits(rest_capacity(tokens) * self.store.token_bytes):
            self._move_out(spans, room=rest_capacity(tokens) - tokens)

    def _move_out(self, spans: list[Span], room: int) -> None:
        """Copy these spans to a slab of their own, in this order, and let go of where they lay."""
        helper = Track(self.store)
        for span in spans:
            helper.pieces.append(Piece(span.slab, span.lo, span.hi, helper.end))
        fresh = helper.merge(helper.end + room)
        at, left = 0, {s.slab for s in spans}
        for span in spans:
            span.move(fresh, at)
            at = span.hi
        helper.free()
        for slab in left:
            slab.settle()

    def uniting(self, track: Track, path: list[Node], room: int) -> Work[bool]:
        """Merge a path of several slabs into one, where nobody else reads them and nothing else branches off."""
        slabs = {p.slab for p in track.pieces}
        if len(track.pieces) < 2 or any(s.tracks != {track} or s.copies for s in slabs):
            return False
        on_path = {id(n.span) for n in path}
        if any(id(s) not in on_path for slab in slabs for s in slab.spans):
            return False
        if any(len(n.children) > 1 for n in path[:-1]) or any(n.leases > 1 for n in path):
            return False
        return bool((yield from Copying(self._united(track, frozenset(slabs), room), list(slabs)).steps()))

    def _united(self, track: Track, slabs: frozenset[Slab], room: int) -> Work[bool]:
        try:
            fresh = yield from track.merging(track.end + room, slabs)
        except BudgetError:
            return False
        except (DeviceError, RuntimeError, MemoryError, KeyboardInterrupt) as error:
            for slab in slabs:
                self.lose(slab, DeviceError(f"its copy failed: {error!r}"))
            raise
        self.repoint([span.node for slab in slabs for span in slab.spans], fresh)
        self.counts["merges"] += 1
        return True

    def repoint(self, path: list[Node], slab: Slab) -> None:
        """These nodes' tokens now lie in `slab`, at the index of their position."""
        for node in path:
            if node.span is None or node.span.slab is slab:
                continue
            old, node.span = node.span, Span.own(slab, node.start, node.end, node)
            old.drop()

    def _headroom(self) -> int:
        """One array of the largest slab that may be compacted, which one that is read or written may not. When it no
        longer is, and there is no room to compact it, it is given up whole."""
        return self.store.array_token_bytes * self.store.largest

    # -- recounting ----------------------------------------------------------------------

    def check(self) -> list[str]:
        found = self.ledger.recount() + self.store.check()
        found += self.leaves.check(self.nodes()) + self.points.check(self.nodes())
        spans = set()
        for tree in self.trees.values():
            for node in tree.root.walk():
                found += _check_node(node)
                if node.span is not None:
                    spans.add(id(node.span))
        for slab in self.store.slabs:
            found += _check_slab(slab)
            found += [f"a span [{s.lo}, {s.hi}) belongs to no node" for s in slab.spans if id(s) not in spans]
        return found + ([] if self.tier is None else self.tier.check())


def _ranges(track: Track | None, start: int, stop: int) -> Iterator[tuple[int, int, Piece | None]]:
    """Cut [start, stop) where the track's pieces end; without a track it is one range that has no bytes."""
    if track is None:
        if start < stop:
            yield start, stop, None
        return
    for piece in track.pieces:
        a, b = max(start, piece.pos), min(stop, piece.end)
        if a < b:
            yield a, b, piece


def _joined(spans: list[Span]) -> list[tuple[int, int]]:
    """Their ranges, those that follow each other as one."""
    ranges: list[tuple[int, int]] = []
    for span in spans:
        if ranges and ranges[-1][1] == span.lo:
            ranges[-1] = (ranges[-1][0], span.hi)
        else:
            ranges.append((span.lo, span.hi))
    return ranges


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


def _check_node(node: Node) -> list[str]:
    found, where = [], f"node [{node.start}, {node.end})"
    if len(node.tokens) != node.end - node.start or node.parent is None or node.start != node.parent.end:
        found.append(f"{where} has {len(node.tokens)} tokens and does not follow its parent")
    if node.parent is not None and node.parent.children.get(int(node.tokens[0])) is not node:
        found.append(f"{where} is not its parent's child")
    if node.span is not None:
        if node.span.hi - node.span.lo != node.end - node.start:
            found.append(f"{where} owns [{node.span.lo}, {node.span.hi}), which is another length")
        if node.span.node is not node or node.span not in node.span.slab.spans:
            found.append(f"{where} and its span disagree")
    if node.checkpoint is not None:
        if node.checkpoint.position != node.end:
            found.append(f"{where} has a checkpoint of {node.checkpoint.position}")
        if node.checkpoint.bytes != node.checkpoint.account.bytes:
            found.append(
                f"{where}: checkpoint of {node.checkpoint.bytes} bytes counted {node.checkpoint.account.bytes}"
            )
    return found


def _check_slab(slab: Slab) -> list[str]:
    if slab.rewriting:  # by a thread that has let go of the lock
        return []
    found, where = [], f"slab of {slab.capacity}"
    if slab.bytes != slab.capacity * slab.store.token_bytes:
        found.append(f"{where} is counted {slab.bytes} bytes, not {slab.capacity * slab.store.token_bytes}")
    for index, layer in enumerate(slab.layers):
        if layer is not None:
            real = sum(a.nbytes for a in layer)
            if real != slab.capacity * slab.store.specs[index].token_bytes:
                found.append(f"{where}: layer {index} has {real} bytes")
    edges = sorted((s.lo, s.hi) for s in slab.spans)
    if any(a[1] > b[0] for a, b in itertools.pairwise(edges)) or (edges and edges[-1][1] > slab.capacity):
        found.append(f"{where}: spans overlap or overrun: {edges}")
    if not slab.spans and not slab.tracks and not slab.copies:
        found.append(f"{where} belongs to nobody")
    return found
