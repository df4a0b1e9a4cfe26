"""Where stored KV lies: compacts slabs, merges them, and moves the spans of nodes between them.

- Copies are made layer by layer: the transient is one layer, or one array where bytes are short.
- All methods are called with the cache's lock held. Long operations are `Work`: other threads may take the lock between
  their steps.

Knows nothing of models or requests.
"""

from __future__ import annotations

from onefold.cache.memory.copying import Copying
from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.lock import Work
from onefold.cache.memory.nodes import NodeStore
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.pieces import Piece
from onefold.cache.memory.segment import ROOM_SHARE, STEP, Slab, Span, rest_capacity
from onefold.cache.memory.track import Track
from onefold.errors import BudgetError, DeviceError

REMAINDER = 1024
"""The most tokens of another branch that are moved so that a conversation continues in one buffer. More than `STEP`
are moved only if the conversation is as long."""


class Placement:
    def __init__(self, nodes: NodeStore, ledger: Ledger) -> None:
        self._nodes = nodes
        self._store = nodes.store
        self._ledger = ledger

    def compacting(self, slab: Slab, room: int = 0) -> Work[bool]:
        """Shrink the slab to the tokens that nodes own and `room` more. Returns False if a track reads the slab, if
        there is no room for the copy of one array, or if the device fails."""
        if not slab.idle:
            return False
        return bool((yield from Copying(self._compacted(slab, room), [slab]).steps()))

    def _compacted(self, slab: Slab, room: int) -> Work[bool]:
        try:
            yield from slab.rewriting_to(_joined(slab.spans), slab.owned + room)
        except BudgetError:
            return False
        except DeviceError as error:
            self._nodes.lose(slab, error)
            return False
        except (RuntimeError, MemoryError):  # before anything was replaced
            return False
        except KeyboardInterrupt:
            self._nodes.lose(slab, DeviceError("its copy was interrupted"))
            raise
        at = 0
        for span in slab.spans:  # a span may have been cut or joined meanwhile, but their order is the same
            span.lo, span.hi = at, at + span.hi - span.lo
            at = span.hi
        self._nodes.counts["compactions"] += 1
        return True

    def trimming_slack(self, slab: Slab) -> Work[None]:
        """Shrink a slab after a request. Keeps room for the next turn in proportion to the slab, so that a long
        conversation is not copied at each turn. Evicts nothing for the copy."""
        rest = rest_capacity(slab.owned)
        if slab.foreign:
            return
        if slab.capacity - rest <= slab.owned // (2 * ROOM_SHARE) or slab not in self._store.slabs or not slab.idle:
            return
        if rest * self._store.array_token_bytes <= self._ledger.free_bytes:
            yield from self.compacting(slab, room=rest - slab.owned)

    def clear_behind(self, track: Track) -> bool:
        """Move nodes of another branch that lie behind the track's end in its last slab to another slab, so that the
        track can continue in place. Returns False, and moves nothing, if they are too many or cannot be moved."""
        last = track.pieces[-1]
        slab = last.slab
        behind = [s for s in slab.spans if s.lo >= last.hi]
        tokens = sum(s.hi - s.lo for s in behind)
        if slab.tracks != {track} or any(s.lo < last.hi < s.hi for s in slab.spans):
            return False
        if any(p.slab is slab and p.lo >= last.hi for p in track.pieces):
            return False  # its own earlier tokens lie there
        if not behind or tokens > min(max(track.end, STEP), REMAINDER):
            return False
        if not self._ledger.fits(tokens * self._store.token_bytes):
            return False
        self._move_out(behind, room=0)
        return True

    def bring_home(self, track: Track, upto: int | None = None) -> bool:
        """Copy the tokens that a track has in a batch's common slab behind its others, to its own slab, and leave the
        common one; but not if all of them lie from `upto` on. Returns False, and changes nothing, if there is no room,
        or another track reads what nodes own of them. The copy is not evaluated yet."""
        pieces, k = track.pieces, len(track.pieces)
        while k and pieces[k - 1].limit is not None:
            k -= 1
        tail = pieces[k:]
        if not tail or (upto is not None and tail[0].pos >= upto):
            return True
        start, n = tail[0].pos, track.end - tail[0].pos
        spans = [(s, p) for p in tail for s in p.slab.spans if p.lo <= s.lo and s.hi <= p.hi and s.lo < s.hi]
        if spans and not self._can_follow(track, pieces[:k], tail, n):
            return False
        track.pieces, covered = pieces[:k], n == 0
        try:
            covered = covered or self._extend(track, start, n)
        finally:
            if not covered:
                track.pieces = pieces
        if not covered:
            return False
        for index in range(len(self._store.specs) if n else 0):
            for p in tail:
                if p.lo < p.hi:
                    track.write(index, p.pos, tuple(a[..., p.lo : p.hi, :] for a in p.slab.arrays(index)), low=0)
        home = track.pieces[-1] if track.pieces else None
        for span, p in spans:
            assert home is not None
            span.move(home.slab, home.lo + p.pos + span.lo - p.lo - home.pos)
        for slab in {p.slab for p in tail} - {p.slab for p in track.pieces}:
            slab.leave(track)
            slab.settle()
        self._nodes.counts["tail_tokens_moved"] += n
        return True

    def _extend(self, track: Track, start: int, n: int) -> bool:
        """Have the track's pieces cover `n` more positions, from `start` on, also where the tree owns them. Returns
        False, and leaves the pieces that it had as they were, if there is no room."""
        last = track.pieces[-1] if track.pieces else None
        floor, frozen, hi, covered = track.floor, track.frozen, 0 if last is None else last.hi, False
        track.floor, track.frozen = min(floor, start), min(frozen, start)
        try:
            track.ensure(start, n)
            covered = True
        except BudgetError:
            return False
        finally:
            track.floor, track.frozen = floor, frozen
            if not covered and last is not None:
                last.hi = hi  # a part of the positions may have been covered
        return True

    def _can_follow(self, track: Track, own: list[Piece], tail: list[Piece], n: int) -> bool:
        """Whether tokens that nodes own can be moved to where the track's own slab has room: nobody else may read
        them."""
        if any(not p.slab.tracks <= p.slab.writers or p.slab.copies for p in tail):
            return False
        return bool(own) and track.writable(own[-1]) and own[-1].room >= n

    def evacuate(self, path: list[Node], track: Track) -> None:
        """Copy what the path's nodes own of a batch's common slab to another slab, because the row leaves the batch.
        Does nothing if there is no room."""
        common = {p.slab for p in track.pieces if p.limit is not None}
        spans = [n.span for n in path if n.span is not None and n.span.slab in common]
        tokens = sum(s.hi - s.lo for s in spans)
        if spans and self._ledger.fits(rest_capacity(tokens) * self._store.token_bytes):
            self._move_out(spans, room=rest_capacity(tokens) - tokens)

    def _move_out(self, spans: list[Span], room: int) -> None:
        """Copy these spans to a new slab, in this order, and release their former ranges."""
        helper = Track(self._store)
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
        """Merge the slabs of a path into one. Returns False, and changes nothing, if another track reads one of them,
        if they hold nodes that are not on the path, or if there is no room."""
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
                self._nodes.lose(slab, DeviceError(f"its copy failed: {error!r}"))
            raise
        self.repoint([span.node for slab in slabs for span in slab.spans], fresh)
        self._nodes.counts["merges"] += 1
        return True

    def repoint(self, path: list[Node], slab: Slab) -> None:
        """Point the spans of these nodes to `slab`, where their tokens lie at the index of their position."""
        for node in path:
            if node.span is None or node.span.slab is slab:
                continue
            old, node.span = node.span, Span.own(slab, node.start, node.end, node)
            old.drop()


def _joined(spans: list[Span]) -> list[tuple[int, int]]:
    """Returns the spans' ranges, with adjacent ones joined."""
    ranges: list[tuple[int, int]] = []
    for span in spans:
        if ranges and ranges[-1][1] == span.lo:
            ranges[-1] = (ranges[-1][0], span.hi)
        else:
            ranges.append((span.lo, span.hi))
    return ranges
