"""The thread that writes records to a shared store, once each over all machines.

- A commit queues the path that it ended; nothing waits for it. The whole records of a path are written from its first
  token on, so that what another machine finds can be resumed. The store is asked first which of them it has.
- A record is copied out under the cache's lock, one at a time, and only from buffers that no request writes to; it is
  sealed and sent without the lock. What was evicted before its turn is not written.
- While requests run the thread takes a fortieth of one processor, unless a caller waits for a flush.
- The queue is bounded. A path that comes when it is full is dropped and counted: a later turn of the same conversation
  queues it again.

Holds trees and the lock, but not the `CacheState`, which it would keep alive.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import CacheLock
from onefold.cache.memory.payloads import Tree
from onefold.cache.memory.segment import Span
from onefold.cache.memory.segment import Store as Slabs
from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers import host
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.sharing import Sharing, name_of
from onefold.cache.tiers.remote.stores.store import StoreError
from onefold.worker import Worker

log = logging.getLogger("onefold")

COPIES = 3
"""Of one record, while it is sent: the KV, then the sealed value (or a part of the KV that lies elsewhere), and the
command of the store's client."""
WAITING_MOST = 256
"""Paths that wait to be written."""
LOOK_AGAIN = 0.5
"""Seconds after which the waiting thread looks again without being notified."""
REST = 40.0
"""While requests run: so many times as long as a record took of the processor, the thread rests."""
STOPPING_MOST = 30.0
"""Seconds that a record which is being sent is waited for at the end."""
_UNEXPECTED = (RuntimeError, ValueError, TypeError, MemoryError, OSError)


@dataclass(frozen=True, eq=False)
class Path:
    tree: Tree
    root: bytes
    """Where the chain of its namespace begins."""
    tokens: Tokens


class RemoteWriter:
    def __init__(
        self, shared: Sharing, slabs: Slabs, lock: CacheLock, made_by: str, are_running: Callable[[], bool]
    ) -> None:
        """`made_by` names the device. `are_running()`: whether requests run. Raises BudgetError."""
        self._shared, self._slabs, self._lock, self._made_by = shared, slabs, lock, made_by
        self._are_running = are_running
        self._paths: deque[Path] = deque()
        self._busy = self._stop = self._given_up = False
        self._hurries = 0
        n_bytes = COPIES * shared.record_bytes
        self._account = slabs.ledger.open(Purpose.DISK, n_bytes, "records on their way to a shared store")
        self._buffer = np.empty(shared.record_bytes, np.uint8)
        self._thread = Worker(self._run, "onefold-remote")
        self._thread.start()

    # -- asked by the cache, with its lock held ----------------------------------------------------

    def want(self, path: Path) -> None:
        """Queue a path. One that continues a queued path replaces it."""
        if len(path.tokens) < self._shared.n_tokens:
            return
        for queued in self._paths:
            if _continues(path, queued):
                self._paths.remove(queued)
                break
        if len(self._paths) >= WAITING_MOST:
            self._shared.reasons[RemoteReason.TOO_MANY] += 1
            return
        self._paths.append(path)
        self._lock.notify_all()

    @property
    def _ends(self) -> bool:
        return self._stop or self._given_up

    @property
    def pending(self) -> bool:
        return self._busy or bool(self._paths)

    def close(self) -> None:
        """After `stop`: forget what waits, and release the memory for a record."""
        self._paths.clear()
        self._account.close()

    # -- without the lock ----------------------------------------------------------------------------

    def flush(self, until: float) -> bool:
        """Wait until everything that is queued is in the store. Returns False if it is not by then, or cannot be."""
        with self._lock.inner:
            self._hurries += 1
            self._lock.notify_all()
            try:
                while self.pending and self._thread.working and not self._ends and self._shared.writing.usable:
                    left = until - time.monotonic()
                    if left <= 0:
                        return False
                    self._lock.wait(min(left, LOOK_AGAIN))
                return not self.pending and self._thread.working and not self._given_up
            finally:
                self._hurries -= 1

    def give_up(self) -> None:
        """Write no more than the record that is being sent; every flush returns False from now on."""
        with self._lock.inner:
            self._given_up = True
            self._paths.clear()
            self._lock.notify_all()

    def stop(self) -> None:
        """End the thread. A record that is being sent is waited for."""
        with self._lock.inner:
            self._stop = True
            self._lock.notify_all()
        if self._thread.working and not self._thread.is_this_thread and not self._thread.wait(STOPPING_MOST):
            log.warning("the shared store still takes a record after %.0f s; not waiting for it", STOPPING_MOST)

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (path := self._next()) is not None:
                try:
                    if not self._write(path):
                        self._again(path)
                except StoreError as error:
                    self._shared.writing.failed(error)
                    self._again(path)
                except _UNEXPECTED as error:  # of the device, say: this path is lost, and not the thread
                    self._shared.reasons[RemoteReason.FAILED] += 1
                    log.warning("cannot write a conversation to the shared store: %s: %s", type(error).__name__, error)
                path = None  # while it waits, the thread holds on to no tree
        finally:
            with self._lock.inner:
                self._busy = False
                self._lock.notify_all()
            host.leave_thread()

    def _next(self) -> Path | None:
        """Wait for a path. Returns None when it is time to end."""
        with self._lock.inner:
            self._busy = False
            self._lock.notify_all()
            while not self._stop and not (self._paths and self._shared.writing.usable):
                self._lock.wait(LOOK_AGAIN)
            if self._stop:
                return None
            self._busy = True
            return self._paths.popleft()

    def _again(self, path: Path) -> None:
        """Queue this path again, unless one that continues it is queued, and wait: others may be in the same state."""
        with self._lock.inner:
            if self._ends:
                return
            if not any(_continues(queued, path) for queued in self._paths):
                self._paths.append(path)
            self._lock.wait(LOOK_AGAIN)

    def _write(self, path: Path) -> bool:
        """Write the records of a path that the store does not have and memory has. Returns False if a request writes
        where one of them lies: it can be written later. Raises StoreError."""
        shared = self._shared
        records = list(shared.addresses(path.root, path.tokens))
        first = next((i for i, address in enumerate(records) if address not in shared.known), len(records))
        if first < len(records):
            there = first + shared.store.leading([name_of(a) for a in records[first:]])
            for address in records[first:there]:
                shared.known.add(address)
        for i, address in enumerate(records):
            if address in shared.known:
                continue
            began = time.thread_time()
            with self._lock.inner:
                parts = None if self._ends else self._parts(path, i)
                if parts is None:
                    return True  # evicted, or the end
                if not all(host.is_quiet(span.slab) for span, *_ in parts):
                    return False
                self._copy(parts)
            value = shared.sealed(address, self._buffer, self._made_by)
            new = shared.store.add(name_of(address), value)
            shared.known.add(address)
            shared.missed.forget([address])
            shared.writing.answered()
            shared.counts["written_bytes"] += len(value) if new else 0
            shared.counts["written_records"] += new
            shared.counts["spilled_tokens"] += shared.n_tokens if new else 0
            self._rest(time.thread_time() - began)
        return True

    def _parts(self, path: Path, i: int) -> list[tuple[Span, int, int]] | None:
        """Returns the spans in which record `i` lies, each with its first index of the slab and its number of tokens;
        None if memory does not have all of it. Called with the inner lock held."""
        n = self._shared.n_tokens
        begin, end = i * n, (i + 1) * n
        nodes, matched = path.tree.match(path.tokens[:end])
        found = []
        for node in nodes:
            lo, hi = max(begin, node.start), min(end, node.end)
            if lo < hi:
                if node.span is None:
                    return None
                found.append((node.span, node.span.lo + lo - node.start, hi - lo))
        return found if matched >= end else None

    def _copy(self, parts: list[tuple[Span, int, int]]) -> None:
        """Copy a record into the buffer. Called with the inner lock held."""
        at, direct = 0, self._shared.direct
        if len(parts) == 1:
            span, lo, n = parts[0]
            return host.copy_out(span.slab, lo, lo + n, self._buffer, direct=direct)
        whole = host.split(self._slabs.specs, self._shared.n_tokens, self._buffer)
        for span, lo, n in parts:
            piece = np.empty(n * self._slabs.token_bytes, np.uint8)
            host.copy_out(span.slab, lo, lo + n, piece, direct=direct)
            for into, part in zip(whole, host.split(self._slabs.specs, n, piece), strict=True):
                into[:, at : at + n] = part
            at += n
        return None

    def _rest(self, worked: float) -> None:
        until = time.monotonic() + REST * worked
        with self._lock.inner:
            while (
                (left := until - time.monotonic()) > 0 and not self._stop and not self._hurries and self._are_running()
            ):
                self._lock.wait(min(left, LOOK_AGAIN))


def _continues(longer: Path, path: Path) -> bool:
    n = len(path.tokens)
    return longer.tree is path.tree and n <= len(longer.tokens) and bool((longer.tokens[:n] == path.tokens).all())
