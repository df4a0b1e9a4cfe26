"""The thread that writes to a shared store: records of KV, and checkpoints, once each over all machines.

- A commit queues the end of its path; nothing waits for it. The whole records of a path are written from its first
  token on, so that what another machine finds can be resumed. The store is asked first which of them it has.
- What is written is chosen by `Policy`: everything at once, or only what several conversations share, and the ends of
  turns after a while. A turn that is continued in time is written with the next one.
- A value is copied out under the cache's lock, one at a time, and only from buffers that no request writes to; it is
  sealed and sent without the lock. What was evicted before its turn is not written.
- While requests run the thread takes a fortieth of one processor, unless a caller waits for a flush.
- The queue is bounded. A path that comes when it is full is dropped and counted: a later turn of the same conversation
  queues it again.

Holds nodes and the lock, but not the `CacheState`, which it would keep alive.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onefold.cache.memory.arrays import Payload
from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import CacheLock
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.segment import Span
from onefold.cache.memory.segment import Store as Slabs
from onefold.cache.tiers import host
from onefold.cache.tiers.remote.grid import about_name, name_of, part_address, point_address, tag_of
from onefold.cache.tiers.remote.points import manifest_of, new_nonce, parts_of
from onefold.cache.tiers.remote.policy import Policy
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.sharing import ABOUT, KV, PART, POINT, Sharing
from onefold.cache.tiers.remote.stores.store import StoreError
from onefold.worker import Worker

log = logging.getLogger("onefold")

COPIES = 3
"""Of one value, while it is sent: its bytes, then the sealed value (or a part of the KV that lies elsewhere), and the
command of the store's client."""
WAITING_MOST = 1024
"""Paths that wait to be written."""
LOOK_AGAIN = 0.5
"""Seconds after which the waiting thread looks again without being notified."""
REST, REST_BESIDE_GPU = 40.0, 4.0
"""While requests run: so many times as long as a value took of the processor, the thread rests. Beside a GPU most of
the processor is idle; to seal a value takes most of that time, and no interpreter."""
STOPPING_MOST = 30.0
"""Seconds that a value which is being sent is waited for at the end."""
_UNEXPECTED = (RuntimeError, ValueError, TypeError, MemoryError, OSError)


class Path(NamedTuple):
    node: Node
    """Where it ends."""
    root: bytes
    """Where the chain of its namespace begins."""


class RemoteWriter:
    def __init__(
        self,
        shared: Sharing,
        slabs: Slabs,
        lock: CacheLock,
        policy: Policy,
        about: dict[str, Any],
        rest: float,
        are_running: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`about` describes a namespace, for people; its "device" names what computes here. `rest` is `REST`, or that
        beside a GPU. `are_running()`: whether requests run. Raises BudgetError."""
        self._shared, self._slabs, self._lock, self._policy, self._about = shared, slabs, lock, policy, about
        self._rest_times, self._are_running, self._clock = rest, are_running, clock
        self._due: dict[Node, tuple[float, bytes]] = {}
        """By the node where a path ends: when it is to be written, and the root of its chain."""
        self._nonces: dict[bytes, tuple[weakref.ref[Checkpoint], bytes]] = {}
        """By the addresses of checkpoints that were begun and are not whole in the store."""
        self._busy = self._stop = self._given_up = False
        self._hurries = 0
        value = max(shared.record_bytes, shared.part_bytes if shared.has_points else 0)
        copies = COPIES + (0 if shared.direct else host.COPIED)
        self._account = slabs.ledger.open(Purpose.DISK, copies * value, "values on their way to a shared store")
        self._buffer = np.empty(value, np.uint8)
        self._thread = Worker(self._run, "onefold-remote")
        self._thread.start()

    # -- asked by the cache, with its lock held ----------------------------------------------------

    def committed(self, node: Node, root: bytes) -> None:
        """Queue what is to be written of a path that was committed. A path that it continues is not queued any more."""
        if node.end < self._shared.n_tokens or self._ends:
            return
        for above in node.path()[:-1]:
            if above in self._due and not self._policy.is_shared(above):
                del self._due[above]
        for end, delay in self._policy.ends(node):
            if end not in self._due and len(self._due) >= WAITING_MOST:
                self._forget_removed()
            if end not in self._due and len(self._due) >= WAITING_MOST:
                self._shared.reasons[RemoteReason.TOO_MANY] += 1
                continue
            self._due[end] = (self._clock() + delay, root)
        self._lock.notify_all()

    def _forget_removed(self) -> None:
        self._due = {node: due for node, due in self._due.items() if node.parent is not None}

    @property
    def _ends(self) -> bool:
        return self._stop or self._given_up

    @property
    def pending(self) -> bool:
        """Whether something is being written, or is due."""
        return self._busy or self._next_due() is not None

    def close(self) -> None:
        """After `stop`: forget what waits, and release the memory for a value."""
        self._due.clear()
        self._account.close()

    # -- without the lock ----------------------------------------------------------------------------

    def flush(self, until: float) -> bool:
        """Write everything that is queued, whether it is due or not, and wait for that. Returns False if it is not in
        the store by then, or cannot be."""
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
        """Write no more than the value that is being sent; every flush returns False from now on."""
        with self._lock.inner:
            self._given_up = True
            self._due.clear()
            self._lock.notify_all()

    def stop(self) -> None:
        """End the thread. A value that is being sent is waited for."""
        with self._lock.inner:
            self._stop = True
            self._lock.notify_all()
        if self._thread.working and not self._thread.is_this_thread and not self._thread.wait(STOPPING_MOST):
            log.warning("the shared store still takes a value after %.0f s; not waiting for it", STOPPING_MOST)

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

    def _next_due(self) -> Node | None:
        """Returns the end of a path that is due, all are while a caller waits; None if there is none."""
        now = float("inf") if self._hurries else self._clock()
        return next((node for node, (due, _) in self._due.items() if due <= now), None)

    def _next(self) -> Path | None:
        """Wait for a path. Returns None when it is time to end."""
        with self._lock.inner:
            self._busy = False
            self._lock.notify_all()
            node = None
            while not self._stop and not (self._shared.writing.usable and (node := self._next_due()) is not None):
                self._lock.wait(LOOK_AGAIN)
            if self._stop or node is None:
                return None
            self._busy = True
            return Path(node, self._due.pop(node)[1])

    def _again(self, path: Path) -> None:
        """Queue this path again, unless it is queued, and wait: others may be in the same state."""
        with self._lock.inner:
            if self._ends:
                return
            self._due.setdefault(path.node, (self._clock(), path.root))
            self._lock.wait(LOOK_AGAIN)

    def _write(self, path: Path) -> bool:
        """Write what the store does not have of a path and memory has. Returns False if a request writes where some of
        it lies: it can be written later. Raises StoreError."""
        shared, tag = self._shared, tag_of(path.root)
        with self._lock.inner:
            if path.node.parent is None:
                return True  # evicted
            tokens = np.concatenate([n.tokens for n in path.node.path()])
        chain = list(shared.addresses(path.root, tokens))
        if chain and chain[0] not in shared.known:
            shared.known.forget([tag.encode()])  # the store may have lost everything
        self._describe(tag)
        if shared.record_bytes and not self._write_records(path, tag, chain):
            return False
        if shared.has_points:
            self._write_points(path, tag, chain)
        return True

    def _write_records(self, path: Path, tag: str, chain: list[bytes]) -> bool:
        """As `_write`."""
        shared = self._shared
        first = next((i for i, address in enumerate(chain) if address not in shared.known), len(chain))
        if first < len(chain):
            look = shared.store.look([name_of(tag, a) for a in chain[first:]], patient=True)
            for address in chain[first : first + look.leading]:
                shared.known.add(address)
        for i, address in enumerate(chain):
            if address in shared.known:
                continue
            began = time.thread_time()
            with self._lock.inner:
                parts = None if self._ends else self._parts(path.node, i)
                if parts is None:
                    return True  # evicted, or the end
                if not all(host.is_quiet(span.slab) for span, *_ in parts):
                    return False
                self._copy(parts)
            new = self._send(KV, tag, address, self._buffer[: shared.record_bytes])
            shared.counts["written_records"] += new
            shared.counts["spilled_tokens"] += shared.n_tokens if new else 0
            self._rest(time.thread_time() - began)
        return True

    def _send(self, kind: str, tag: str, address: bytes, payload: Any) -> bool:
        """Send a value. Returns whether the store had none under its name. Raises StoreError."""
        shared = self._shared
        value = shared.sealed(kind, address, [payload], self._about["device"])
        new = shared.store.add(name_of(tag, address), value)
        shared.known.add(address)
        shared.missed.forget([address])
        shared.writing.answered()
        shared.counts["written_bytes"] += len(value) if new else 0
        return new

    def _describe(self, tag: str) -> None:
        """Say in the store what this namespace is, for its administrator, unless another machine did."""
        shared, address = self._shared, tag.encode()
        if address in shared.known:
            return
        if not shared.store.look([about_name(tag)]).leading:  # a look begins its time anew
            payload = json.dumps(self._about).encode()
            shared.store.add(about_name(tag), shared.sealed(ABOUT, address, [payload], self._about["device"]))
        shared.known.add(address)

    # -- records -------------------------------------------------------------------------------------

    def _parts(self, end: Node, i: int) -> list[tuple[Span, int, int]] | None:
        """Returns the spans in which record `i` of the path to `end` lies, each with its first index of the slab and
        its number of tokens; None if memory does not have all of it. Called with the inner lock held."""
        n = self._shared.n_tokens
        begin, stop = i * n, (i + 1) * n
        found, covered = [], 0
        for node in end.path() if end.parent is not None else []:
            lo, hi = max(begin, node.start), min(stop, node.end)
            if lo < hi:
                if node.span is None:
                    return None
                found.append((node.span, node.span.lo + lo - node.start, hi - lo))
                covered += hi - lo
        return found if covered == n else None

    def _copy(self, parts: list[tuple[Span, int, int]]) -> None:
        """Copy a record into the buffer. Called with the inner lock held."""
        at, direct, into = 0, self._shared.direct, self._buffer[: self._shared.record_bytes]
        if len(parts) == 1:
            span, lo, n = parts[0]
            return host.copy_out(span.slab, lo, lo + n, into, direct=direct)
        whole = host.split(self._slabs.specs, self._shared.n_tokens, into)
        for span, lo, n in parts:
            piece = np.empty(n * self._slabs.token_bytes, np.uint8)
            host.copy_out(span.slab, lo, lo + n, piece, direct=direct)
            for target, part in zip(whole, host.split(self._slabs.specs, n, piece), strict=True):
                target[:, at : at + n] = part
            at += n
        return None

    # -- checkpoints ---------------------------------------------------------------------------------

    def _write_points(self, path: Path, tag: str, chain: list[bytes]) -> None:
        """Write the last checkpoint of the path at an edge of the grid, if memory has one that the store does not have.
        Raises StoreError."""
        shared = self._shared
        with self._lock.inner:
            found = None if self._ends else self._last_point(path.node, chain)
            if found is None:
                return
            position, address, checkpoint = found
            checkpoint.hold()
        try:
            if shared.store.look([name_of(tag, address)], patient=True).leading:
                shared.known.add(address)
                return
            manifest = manifest_of(checkpoint, position, shared.part_bytes, self._nonce(address, checkpoint))
            parts = [part_address(address, manifest.nonce, i) for i in range(len(manifest.parts))]
            payload = Payload(checkpoint.arrays().values(), shared.part_bytes, direct=shared.direct)
            for where, part in zip(parts, parts_of(payload, shared.part_bytes, self._buffer), strict=True):
                if where in shared.known:
                    continue  # of a try that failed
                began = time.thread_time()
                self._send(PART, tag, where, part)
                if self._given_up:
                    return
                self._rest(time.thread_time() - began)
            if self._send(POINT, tag, address, manifest.text()):
                shared.counts["written_records"] += 1
            else:  # another machine has written one meanwhile
                shared.known.forget(parts)
                for where in parts:
                    shared.store.remove(name_of(tag, where))
            self._nonces.pop(address, None)
        finally:
            with self._lock.inner:
                checkpoint.release()

    def _nonce(self, address: bytes, checkpoint: Checkpoint) -> bytes:
        """Returns the nonce of a checkpoint's parts: that of an earlier try with the same arrays, which wrote some of
        them, or a new one."""
        of, nonce = self._nonces.pop(address, (None, b""))
        if of is None or of() is not checkpoint:
            nonce = new_nonce()
        while len(self._nonces) >= WAITING_MOST:
            del self._nonces[next(iter(self._nonces))]
        self._nonces[address] = weakref.ref(checkpoint), nonce
        return nonce

    def _last_point(self, end: Node, chain: list[bytes]) -> tuple[int, bytes, Checkpoint] | None:
        n = self._shared.n_tokens
        for node in reversed(end.path() if end.parent is not None else []):
            if node.checkpoint is not None and node.end % n == 0 and node.end // n <= len(chain):
                address = point_address(chain[node.end // n - 1])
                return None if address in self._shared.known else (node.end, address, node.checkpoint)
        return None

    def _rest(self, worked: float) -> None:
        until = time.monotonic() + self._rest_times * worked
        with self._lock.inner:
            while (
                (left := until - time.monotonic()) > 0 and not self._stop and not self._hurries and self._are_running()
            ):
                self._lock.wait(min(left, LOOK_AGAIN))
