"""Fetching: the records of a prompt that a shared store has, behind what memory has, are read into one buffer.

    tokens     0 ......... before ........................... target
    memory     [ KV in memory )
    store              [ record ][ record ][ record ]          the first record may begin before `before`
    buffer             ^ base                       ^ reached

- The first step asks the store for the whole chain at once; the others read records, a few at the same time.
- A step waits for a twentieth of a second at the most, so that other requests go on meanwhile. What the store has not
  done within its deadline is a miss.
- Where computing the tokens is quicker than reading them, they are not read: both are measured as they happen.
- A record is copied to its place after its seal, its head and its size agree. The first that cannot be used ends the
  fetch, and is removed from the store.

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

from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.pieces import Piece
from onefold.cache.memory.reach import readable_length
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track
from onefold.cache.tiers import host
from onefold.cache.tiers.pace import is_slower
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.sharing import Sharing, name_of
from onefold.cache.tiers.remote.stores.store import StoreError
from onefold.errors import BudgetError, RecordError

log = logging.getLogger("onefold")

AHEAD = 3
"""Records that are read at the same time."""
STEP_SECONDS = 0.05
"""The most that a step waits."""
WORTH_ASKING = 16
"""Fewer tokens than this are computed without asking."""


def planned(
    state: CacheState, shared: Sharing, tree: Tree, root: bytes, tokens: Tokens, reserve_tokens: int
) -> RemoteFetch | None:
    """Returns a fetch of what the store may have of these tokens; None if nothing is worth asking for."""
    path, matched = tree.match(tokens)
    before, _ = readable_length(state, path, matched)
    n = shared.n_tokens
    target = min(len(tokens) // n * n, len(tokens) - 1)
    if target - before < WORTH_ASKING or not shared.health.usable:
        return None
    wanted = list(shared.addresses(root, tokens))[before // n :]
    if not wanted or wanted[0] in shared.missed:
        return None
    end = next((node for node in reversed(path) if node.start < before), None)
    fetch = RemoteFetch(state, shared, tree, tokens, before, wanted, len(tokens) + reserve_tokens, end)
    for node in [] if end is None else end.path():
        node.pins += 1  # else making room could evict what the records continue
    state.restores.add(fetch)
    return fetch


class RemoteFetch:
    """Made by `planned`. Call `step` until it returns False, or `finish` to end it before."""

    def __init__(
        self,
        state: CacheState,
        shared: Sharing,
        tree: Tree,
        tokens: Tokens,
        before: int,
        addresses: list[bytes],
        room: int,
        end: Node | None,
    ) -> None:
        """`end` is the last node that memory has of the tokens; the path to it is pinned."""
        self._state, self._shared, self._tree, self._tokens, self._room = state, shared, tree, tokens, room
        self._addresses = addresses
        self._base = before // shared.n_tokens * shared.n_tokens
        self._reached = self._base
        self._given = 0
        """Records that a thread was asked to read."""
        self._slab: Slab | None = None
        self._buffers: Account | None = None
        self._holder = Track(state.store)
        self._looking: concurrent.futures.Future[int] | None = None
        self._loading: deque[concurrent.futures.Future[memoryview | None]] = deque()
        self._since = time.monotonic()
        """When the store was asked for what it has not answered yet."""
        self._began = 0.0
        self._released = False
        self._end = end
        self.done = False
        self.rejected = False
        """Never: what comes after a record that cannot be used is no use either."""
        self.driver: threading.Thread | None = None
        self.owner: object = None
        self.before, self.tokens = before, 0

    def __del__(self) -> None:
        """A fetch that was dropped before it was done is finished at the cache's next call."""
        if not getattr(self, "done", True):
            self._state.drop_restore(self)

    def holds(self, track: Track) -> bool:
        return track is self._holder

    def step(self) -> bool:
        """Ask, or take one record. Returns False when there is nothing more to do. Called without the lock."""
        with self._state.lock:
            waiting: concurrent.futures.Future[Any] | None = None if self.done else self._asked()
        if waiting is None:
            return False
        concurrent.futures.wait([waiting], STEP_SECONDS)
        with self._state.lock:
            if not self.done:
                self._take()
            return not self.done

    def finish(self) -> None:
        """End the fetch: memory owns what was read."""
        with self._state.lock:
            self._finish()

    # -- what the store has ------------------------------------------------------------------------

    def _asked(self) -> concurrent.futures.Future[Any] | None:
        """Returns what this step waits for."""
        if self._looking is None:
            names = [name_of(a) for a in self._addresses]
            self._looking = self._shared.threads.submit(self._shared.store.leading, names)
            self._since = time.monotonic()
        return self._loading[0] if self._loading else self._looking

    def _take(self) -> None:
        """Use what has arrived, if something has."""
        waiting: concurrent.futures.Future[Any] | None = self._loading[0] if self._loading else self._looking
        assert waiting is not None
        if not waiting.done():
            if time.monotonic() - self._since > self._shared.deadline:
                self._fail(StoreError(RemoteReason.SLOW, "the shared store has not answered in time"))
            return
        try:
            if self._loading:
                self._took(waiting.result())
            else:
                self._begin(waiting.result())
        except StoreError as error:
            self._fail(error)
        except RecordError as error:
            self._reject(self._addresses[self._index :], error)
        except BudgetError:
            self._shared.reasons[RemoteReason.NO_ROOM] += 1
            self._finish()
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:  # of the device, or no more threads
            log.warning("cannot fetch tokens from the shared store, so they are computed: %s", error)
            self._reached = self._base  # arrays of a device that failed may never be computed
            self._finish()

    def _reject(self, addresses: list[bytes], error: RecordError) -> None:
        """The first of these records cannot be used: have it removed, so that it is written again. What comes after it
        is computed."""
        shared = self._shared
        shared.known.forget(addresses)
        shared.reasons[str(error)] += 1
        if str(error) != RemoteReason.GONE:
            shared.counts["rejected_records"] += 1
            log.warning("a value of the shared store cannot be used and is removed: %s", error)
            shared.threads.submit(_remove, shared, addresses[0])
        self._finish()

    @property
    def _index(self) -> int:
        """The record that is taken next."""
        return (self._reached - self._base) // self._shared.n_tokens

    def _begin(self, n_records: int) -> None:
        """The store has so many of the records. Reserve the buffer, and ask for the first. Raises BudgetError."""
        shared = self._shared
        if not n_records:
            shared.health.answered()
            shared.missed.add(self._addresses[0])
        for address in self._addresses[:n_records]:
            shared.known.add(address)
        shared.known.forget(self._addresses[n_records:])
        self._addresses = self._addresses[:n_records]
        stop = self._base + n_records * shared.n_tokens
        saves = min(stop, len(self._tokens) - 1) - self.before
        if saves < WORTH_ASKING:
            return self._finish()
        if is_slower(shared.read_pace, n_records * shared.record_bytes, shared.prefill_pace, saves):
            shared.counts["skipped_tokens"] += saves
            shared.reasons[RemoteReason.SLOWER] += 1
            return self._finish()
        need = max(stop, self._room) - self._base
        self._state.lock.run(self._state.store.making_room_for(need))
        waiting = (AHEAD if shared.direct else AHEAD + host.TWICE_MORE + 1) * shared.record_bytes
        self._buffers = self._state.ledger.open(Purpose.DISK, waiting, "records on their way from a shared store")
        self._slab = self._state.store.slab_for(need)
        self._slab.enter(self._holder)
        host.allocate(self._slab, stop - self._base, direct=shared.direct)
        self._began = time.perf_counter()
        self._ask()
        return None

    # -- records -----------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Have the next records read."""
        self._since = time.monotonic()
        while len(self._loading) < AHEAD and self._given < len(self._addresses):
            at = self._given * self._shared.n_tokens
            self._loading.append(self._shared.threads.submit(self._load(self._addresses[self._given], at)))
            self._given += 1

    def _load(self, address: bytes, at: int) -> Callable[[], memoryview | None]:
        """Returns what reads a record on another thread: into its place, or where the processor cannot address that,
        into bytes that it returns. Raises RecordError and StoreError there."""
        shared, slab = self._shared, self._slab
        assert slab is not None
        places = host.places(slab, at, at + shared.n_tokens) if shared.direct else None

        def load() -> memoryview | None:
            value = shared.store.get(name_of(address))
            if value is None:
                raise RecordError(RemoteReason.GONE)
            payload = shared.opened(address, value)
            if places is None:
                return payload
            host.scatter(places, payload)
            return None

        return load

    def _took(self, payload: memoryview | None) -> None:
        """One more record is there and right."""
        self._loading.popleft()
        self._shared.health.answered()
        at, n = self._reached - self._base, self._shared.n_tokens
        assert self._slab is not None
        if payload is not None:
            host.copy_in(self._slab, at, at + n, np.frombuffer(payload, np.uint8))
        self._reached += n
        self._ask()
        if not self._loading:
            self._finish()

    # -- the end -----------------------------------------------------------------------------------

    def _fail(self, error: StoreError) -> None:
        self._shared.health.failed(error)
        self._finish()

    def _finish(self) -> None:
        if not self.done:
            self.done = True
            self._settle()
        if self._loading and not self._released and all(f.done() for f in self._loading):
            self._release()

    def _settle(self) -> None:
        """Give memory what was read. Records that a thread is still reading are not waited for: the buffer is released
        when they are there, or their deadline is over."""
        shared = self._shared
        for load in list(self._loading):
            if load.cancel():
                self._loading.remove(load)
        if self._slab is not None:
            n_bytes = (self._reached - self._base) // shared.n_tokens * shared.record_bytes
            shared.read_pace.took(time.perf_counter() - self._began, n_bytes)
            self.tokens = self._attach(self._slab)
            shared.counts["restored_tokens"] += self.tokens
            shared.counts["restored_bytes"] += n_bytes if self.tokens else 0
        self._unpin()
        if all(f.done() for f in self._loading):
            self._release()
            return
        for load in list(self._loading):  # the last of them has the cache's next call release the buffer
            load.add_done_callback(lambda _: self._state.drop_restore(self))

    def _release(self) -> None:
        """No thread reads any more: the buffer is the nodes' alone."""
        self._released = True
        slab = self._slab
        if slab is not None:
            if self._shared.direct and slab in slab.store.slabs and slab.layers[0] is not None:
                stop = len(self._addresses) * self._shared.n_tokens
                host.clear(slab, self._reached - self._base, stop)  # no garbage behind what was checked
            slab.leave(self._holder)
            slab.settle()
        if self._buffers is not None:
            self._buffers.close()
        self._state.restores.discard(self)

    def _unpin(self) -> None:
        for node in [] if self._end is None else self._end.path():
            node.pins = max(0, node.pins - 1)
        self._end = None

    def _attach(self, slab: Slab) -> int:
        """Store what was read in the tree. Returns how many tokens memory has more than before."""
        stored = self._tokens[: self._reached]
        if self._reached <= self.before or self._state.closed or self._tree.match(stored)[1] < self._base:
            return 0  # nothing was read, or the cache was closed or cleared meanwhile
        self._holder.pieces = [Piece(slab, 0, len(stored) - self._base, self._base)]
        node = self._state.nodes.put(self._tree, stored, self._holder)
        self._holder.pieces = []
        self._unpin()
        self._state.nodes.touch(self._state.nodes.tidy(self._tree, node))
        return len(stored) - self.before


def _remove(shared: Sharing, address: bytes) -> None:
    """On another thread."""
    with contextlib.suppress(StoreError):  # it is found again, and removed then
        shared.store.remove(name_of(address))
