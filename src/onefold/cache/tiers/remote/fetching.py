"""Fetching: what a shared store has of a prompt, behind what memory has, is read into one buffer.

    tokens     0 ......... before ........................... target ......
    memory     [ KV in memory )
    store              [ record ][ record ][ record ]          the first record may begin before `before`
                                                    ^ point    where layers need checkpoints, the last one that is there
    buffer             ^ base                       ^ reached

- The first step asks the store for the whole chain at once; the others read values, a few at the same time.
- A step waits for a twentieth of a second at the most, so that other requests go on meanwhile. A look, and each value,
  that the store has not answered within the deadline is a miss.
- Where computing the tokens is quicker than reading them, they are not read: both are measured as they happen. That is
  asked again after each value, so a store that has become slow is left after one of them; and the whole fetch takes no
  longer than computing would, and a deadline.
- A value is copied to its place after its seal, its head and its size agree. The first that cannot be used ends the
  fetch, and is removed from the store. Without its checkpoint, KV of a model that needs one is not kept.

Functions are called with the cache's lock held, unless their docstring says otherwise.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from onefold.cache.memory.arrays import Bytes
from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.pieces import Piece
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import LONGEST_WAIT
from onefold.cache.memory.track import Track
from onefold.cache.tiers import host
from onefold.cache.tiers.pace import is_slower
from onefold.cache.tiers.remote.asking import WORTH_ASKING, Found, Unusable, Wanted, look
from onefold.cache.tiers.remote.grid import name_of, part_address
from onefold.cache.tiers.remote.patience import Patience
from onefold.cache.tiers.remote.points import Manifest, PointBuffer
from onefold.cache.tiers.remote.reading import Reading
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.sharing import Sharing
from onefold.cache.tiers.remote.stores.store import StoreError
from onefold.errors import BudgetError, RecordError

log = logging.getLogger("onefold")

AHEAD = 3
"""Values that are read at the same time."""
_FAULTS = (RuntimeError, ValueError, TypeError, MemoryError)


class RemoteFetch:
    """Made by `planning.planned`. Call `step` until it returns False, or `finish` to end it before."""

    rejected = False
    """Never: what comes after a value that cannot be used is no use either."""

    def __init__(self, state: CacheState, shared: Sharing, tree: Tree, wanted: Wanted, end: Node | None) -> None:
        """`end` is the last node that memory has of the tokens; the path to it is pinned."""
        self._state, self._shared, self._tree, self._wanted = state, shared, tree, wanted
        self._base = wanted.before // shared.n_tokens * shared.n_tokens
        self._reached = self._base
        self._found: Found | None = None
        self._left: deque[Reading] = deque()
        """Values that no thread was asked to read yet."""
        self._loading: deque[Reading] = deque()
        self._n_records = 0
        self._read_bytes = 0
        self._target = self._saves = 0
        """Where the request can be resumed when all is read, and how many tokens fewer are computed then."""
        self._patience: Patience | None = None
        """With the values, from when the first was asked for."""
        self._slab: Slab | None = None
        self._rows: list[Bytes] = []
        """Its arrays, as the processor sees them."""
        self._point: PointBuffer | None = None
        self._buffers: Account | None = None
        self._holder = Track(state.store)
        self._looking: concurrent.futures.Future[Found] | None = None
        self._since = time.monotonic()
        """When the store was asked what it has."""
        self._preparing = self._released = False
        self._end = end
        self.done = False
        self.driver: threading.Thread | None = None
        self.owner: object = None
        self.before, self.tokens = wanted.have, 0

    def __del__(self) -> None:
        """A fetch that was dropped before it was done is finished at the cache's next call."""
        if not getattr(self, "done", True):
            self._state.drop_restore(self)

    @property
    def remote_tokens(self) -> int:
        return self.tokens

    def begins_like(self, other: Wanted) -> bool:
        """Whether it asks first for what the other would ask for first."""
        ours = self._wanted
        if self._shared.has_points:
            return ours.points[0] == other.points[0]
        return ours.records[0] == other.records[0]

    def holds(self, track: Track) -> bool:
        return track is self._holder

    @property
    def waits(self) -> bool:
        """Whether the store has not answered yet what was asked of it."""
        with self._state.lock:
            return not self.done and not self._asked().done()

    def step(self, seconds: float = LONGEST_WAIT) -> bool:
        """Ask, or take one value; wait for it so long at the most. Returns False when there is nothing more to do.
        Called without the lock."""
        with self._state.lock:
            waiting = None if self.done else self._asked()
        if waiting is None:
            return False
        concurrent.futures.wait([waiting], seconds)
        with self._state.lock:
            if not self.done:
                self._take()
            preparing = self._preparing and not self.done
        if preparing:
            self._state.lock.run(self._prepared())
        with self._state.lock:
            return not self.done

    def finish(self) -> None:
        """End the fetch: memory owns what was read."""
        with self._state.lock:
            self._finish()

    # -- what the store has ------------------------------------------------------------------------

    def _asked(self) -> concurrent.futures.Future[Any]:
        """Returns what this step waits for."""
        if self._loading:
            return self._loading[0].future
        if self._looking is None:
            self._looking = self._shared.threads.submit(look, self._shared, self._wanted)
            self._since = time.monotonic()
        return self._looking

    def _take(self) -> None:
        """Use what has arrived, if something has."""
        shared = self._shared
        late = StoreError(RemoteReason.SLOW, "the shared store has not answered in time")
        if not self._loading:
            assert self._looking is not None
            if self._looking.done():
                self._guarded(self._learn)
            elif time.monotonic() - self._since > shared.deadline:
                self._fail(late)
        elif self._loading[0].future.done():
            self._guarded(self._took)
        elif self._loading[0].is_late(shared.deadline):
            self._fail(late)
        elif self._patience is not None and self._patience.is_over:
            self._leave(RemoteReason.SLOW)  # the threads are busy with other prompts, perhaps

    def _guarded(self, act: Callable[[], None]) -> None:
        """Ends the fetch if the act fails."""
        try:
            act()
        except StoreError as error:
            self._fail(error)
        except RecordError as error:
            self._reject(error)
        except BudgetError:
            self._shared.reasons[RemoteReason.NO_ROOM] += 1
            self._finish()
        except _FAULTS as error:  # of the device, or no more threads
            log.warning("cannot fetch tokens from the shared store, so they are computed: %s", error)
            self._reached = self._base  # arrays of a device that failed may never be computed
            self._finish()

    def _reject(self, error: RecordError) -> None:
        """A value cannot be used: have it removed, so that it is written again. What comes after it is computed."""
        shared, wanted = self._shared, self._wanted
        if isinstance(error, Unusable):
            address, reason = error.address, error.reason
        else:
            address, reason = self._loading[0].address, str(error)
        index = (self._reached - self._base) // shared.n_tokens
        shared.known.forget([address, *wanted.records[index:], *(a for _, a in wanted.points)])
        shared.reasons[reason] += 1
        lost = [address]
        if self._found is not None and self._found.address and address not in wanted.records:
            lost = [self._found.address, address]  # a manifest without all of its parts
        if reason != RemoteReason.GONE or len(lost) > 1:
            shared.counts["rejected_records"] += 1
            log.warning("a value of the shared store cannot be used and is removed: %s", reason)
            shared.threads.submit(_remove, shared, [name_of(wanted.tag, a) for a in dict.fromkeys(lost)])
        self._finish()

    def _learn(self) -> None:
        """The store has answered what it has. Raises StoreError and RecordError."""
        shared, wanted = self._shared, self._wanted
        assert self._looking is not None
        found = self._looking.result()
        shared.health.answered()
        for address in wanted.records[: found.n_records]:
            shared.known.add(address)
        shared.known.forget(wanted.records[found.n_records :])
        target = found.position if shared.has_points else self._base + found.n_records * shared.n_tokens
        if not target:
            first = wanted.points[0][1] if shared.has_points else wanted.records[0]
            shared.missed.add(first)
        elif not shared.has_points and not found.n_records:
            shared.missed.add(wanted.records[0])
        saves = min(target, len(wanted.tokens) - 1) - wanted.have
        if saves < WORTH_ASKING:
            return self._finish()
        self._n_records = max(0, target - self._base) // shared.n_tokens if wanted.records else 0
        if target <= wanted.before:
            self._n_records = 0  # memory has the KV, and only the checkpoint is missing
        n_bytes = self._n_records * shared.record_bytes + (0 if found.manifest is None else found.manifest.n_bytes)
        if is_slower(shared.read_pace, n_bytes, shared.prefill_pace, saves):
            shared.counts["skipped_tokens"] += saves
            shared.reasons[RemoteReason.SLOWER] += 1
            return self._finish()
        self._found, self._preparing = found, True
        self._target, self._saves = target, saves
        return None

    def _prepared(self) -> Work[None]:
        """Make room, reserve the buffers, and ask for the first values. May release the lock."""
        stop = self._base + self._n_records * self._shared.n_tokens
        need = max(stop, self._wanted.room) - self._base if self._n_records else 0
        manifest = None if self._found is None else self._found.manifest
        self._preparing = False
        try:
            if need:
                yield from self._state.store.making_room_for(need)
            if manifest is not None and not (yield from self._state.reclaiming.admitting_checkpoint(manifest.n_bytes)):
                raise BudgetError("a checkpoint", needed_bytes=manifest.n_bytes, available_bytes=0)
        except BudgetError:
            self._shared.reasons[RemoteReason.NO_ROOM] += 1
            self._finish()
        if not self.done:
            self._guarded(lambda: self._begin(need, stop, manifest))

    def _begin(self, need: int, stop: int, manifest: Manifest | None) -> None:
        """Reserve the buffers, and ask for the first values. Raises BudgetError, MemoryError, RuntimeError."""
        shared, wanted = self._shared, self._wanted
        largest = max(shared.record_bytes, shared.part_bytes if manifest is not None else 0)
        waiting = (AHEAD if shared.direct else AHEAD + host.TWICE_MORE + 1) * largest
        self._buffers = self._state.ledger.open(Purpose.DISK, waiting, "values on their way from a shared store")
        if need:
            self._slab = self._state.store.slab_for(need)
            self._slab.enter(self._holder)
            host.allocate(self._slab, stop - self._base, direct=shared.direct)
            if shared.direct:
                self._rows = [host.rows(array) for layer in self._slab.layers for array in layer or ()]
        for i, address in enumerate(wanted.records[: self._n_records]):
            self._left.append(Reading(address, i * shared.n_tokens, shared.n_tokens, shared.record_bytes))
        if manifest is not None:
            assert self._found is not None
            self._point = PointBuffer(self._state, shared.points, manifest, direct=shared.direct)
            at = 0
            for i, n_bytes in enumerate(manifest.parts):
                self._left.append(Reading(part_address(self._found.address, manifest.nonce, i), at, 0, n_bytes))
                at += n_bytes
        n_bytes = sum(reading.n_bytes for reading in self._left)
        self._patience = Patience(shared.prefill_pace, shared.deadline, self._saves, n_bytes)
        self._ask()
        if not self._loading:
            self._finish()

    # -- values ------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Have the next values read on other threads, each into its place; where the processor cannot address that,
        into bytes."""
        shared, places = self._shared, None
        while len(self._loading) < AHEAD and self._left:
            reading = self._left.popleft()
            if not reading.n_tokens:
                assert self._point is not None
                places = self._point.places(reading.at, reading.n_bytes)
            elif shared.direct:
                places = [rows[:, reading.at : reading.at + reading.n_tokens] for rows in self._rows]
            reading.future = shared.threads.submit(reading.read, shared, self._wanted.tag, places)
            self._loading.append(reading)

    def _took(self) -> None:
        """One more value is there and right. Raises StoreError and RecordError."""
        payload = self._loading[0].future.result()
        reading = self._loading.popleft()
        self._shared.health.answered()
        self._read_bytes += reading.n_bytes
        if payload is not None:
            assert self._slab is not None
            host.copy_in(self._slab, reading.at, reading.at + reading.n_tokens, np.frombuffer(payload, np.uint8))
        self._reached += reading.n_tokens
        assert self._patience is not None
        self._patience.took(reading.n_bytes)
        # without its checkpoint all of it is computed, otherwise what is left
        kept = 0 if self._shared.has_points else max(0, self._reached - self._wanted.have)
        coming = sum(other.n_bytes for other in self._loading)
        if self._left and self._patience.is_slower(self._saves - kept, coming):
            self._leave(RemoteReason.SLOWER)
            return
        self._ask()
        if not self._loading:
            self._finish()

    # -- the end -----------------------------------------------------------------------------------

    def _fail(self, error: StoreError) -> None:
        self._shared.health.failed(error)
        self._finish()

    def _leave(self, reason: RemoteReason) -> None:
        """End the fetch, though the store does what it is asked: it takes too long."""
        self._shared.reasons[reason] += 1
        self._shared.counts["skipped_tokens"] += self._target - max(self._reached, self._wanted.have)
        self._finish()

    def _finish(self) -> None:
        if not self.done:
            self.done = True
            self._settle()
        if self._loading and not self._released and all(r.future.done() for r in self._loading):
            self._release()

    def _settle(self) -> None:
        """Give memory what was read. Values that a thread is still reading are not waited for: the buffer is released
        when they are there, or their deadline is over."""
        shared = self._shared
        is_whole = not self._left and not self._loading
        for reading in list(self._loading):
            if reading.future.cancel():
                self._loading.remove(reading)
        if self._buffers is not None:
            shared.read_pace.took(0.0 if self._patience is None else self._patience.seconds, self._read_bytes)
            self.tokens = self._attach(is_whole)
            shared.counts["restored_tokens"] += self.tokens
            shared.counts["restored_bytes"] += self._read_bytes if self.tokens else 0
        self._unpin()
        if not self._loading:
            self._release()
            return
        for reading in list(self._loading):  # the last of them has the cache's next call release the buffer
            reading.future.add_done_callback(lambda _: self._state.drop_restore(self))

    def _release(self) -> None:
        """No thread reads any more: the buffers are the nodes' alone."""
        self._released = True
        self._rows = []
        slab = self._slab
        if slab is not None:
            if self._shared.direct and slab in slab.store.slabs and slab.layers[0] is not None:
                stop = self._n_records * self._shared.n_tokens
                host.clear(slab, self._reached - self._base, stop)  # no garbage behind what was checked
            slab.leave(self._holder)
            slab.settle()
        if self._point is not None:
            self._point.close()
        if self._buffers is not None:
            self._buffers.close()
        self._state.restores.discard(self)

    def _unpin(self) -> None:
        for node in [] if self._end is None else self._end.path():
            node.pins = max(0, node.pins - 1)
        self._end = None

    def _attach(self, is_whole: bool) -> int:
        """Store what was read in the tree. Returns how many tokens further a request can be resumed than before."""
        if self._state.closed or (self._shared.has_points and not is_whole):
            return 0
        wanted = self._wanted
        reached = self._reached
        if self._slab is not None and reached > wanted.before:
            stored = wanted.tokens[:reached]
            if self._tree.match(stored)[1] < self._base:
                return 0  # the cache was cleared meanwhile
            self._holder.pieces = [Piece(self._slab, 0, len(stored) - self._base, self._base)]
            node = self._state.nodes.put(self._tree, stored, self._holder)
            self._holder.pieces = []
            self._unpin()
            self._state.nodes.touch(self._state.nodes.tidy(self._tree, node))
        if not self._shared.has_points:
            return max(0, reached - wanted.have) if self._slab is not None else 0
        return self._place()

    def _place(self) -> int:
        """Store the checkpoint in the tree. Returns how many tokens further a request can be resumed than before."""
        found, wanted = self._found, self._wanted
        assert self._point is not None and found is not None
        tokens = wanted.tokens[: found.position]
        if not self._state.store.specs:
            self._state.nodes.put(self._tree, tokens, None)
        try:
            self._shared.require_finite(self._point.tensors())
            made = self._point.checkpoint()
        except RecordError as error:
            self._shared.reasons[str(error)] += 1
            self._shared.counts["rejected_records"] += 1
            self._shared.threads.submit(_remove, self._shared, [name_of(wanted.tag, found.address)])
            return 0
        except _FAULTS as error:
            log.warning("cannot use a checkpoint of the shared store, so tokens are computed: %s", error)
            return 0
        if not self._state.nodes.place(self._tree, tokens, made):
            return 0
        self._shared.known.add(found.address)
        return found.position - wanted.have


def _remove(shared: Sharing, names: list[str]) -> None:
    """On another thread."""
    with contextlib.suppress(StoreError):  # they are found again, and removed then
        for name in names:
            shared.store.remove(name)
