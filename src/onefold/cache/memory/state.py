"""The state that all parts of one cache share: its lock, its ledger, its stored nodes, and the open leases.

Requests and tiers are functions of this state. `PrefixCache` makes it; they do not know `PrefixCache`.

    CacheState -- lock      one lock for all of it; long work releases it between steps
               -- ledger    every byte by purpose, under one budget;  pool, scratch: two of its accounts
               -- store     the slabs that hold KV;   nodes: the trees, and which node owns which range of a slab
               -- tier      the tier below memory, or None
               -- leases, restores: open ones;  dropped: leases that were dropped without being closed

Knows nothing of mlx-lm, of files, or of how a request runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.lock import CacheLock, Work
from onefold.cache.memory.nodes import NodeStore
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.placement import Placement
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.reclaiming import PATIENCE, Reclaiming
from onefold.cache.memory.runs import Stretch
from onefold.cache.memory.scratch import Scratch
from onefold.cache.memory.segment import Store
from onefold.cache.memory.shapes import LayerSpec
from onefold.cache.memory.tier import Tier
from onefold.cache.memory.track import Track
from onefold.errors import WrongThread

log = logging.getLogger("onefold")


class ModelTraits(Protocol):
    """The properties of the models whose KV memory and tiers hold."""

    @property
    def specs(self) -> list[LayerSpec]:
        """The arrays of each layer whose KV lies in slabs."""
        ...

    @property
    def bounds(self) -> list[int]:
        """The most tokens that each bounded model keeps."""
        ...

    @property
    def needs_checkpoints(self) -> bool:
        """Whether resuming needs a checkpoint."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether some layer's state can be restored only at the position where it was taken."""
        ...

    @property
    def contiguous(self) -> bool:
        """Whether a conversation must lie in one buffer."""
        ...

    def accepts(self, store: Store, snapshots: Sequence[Any], position: int) -> bool:
        """Whether layers of these models accept these snapshots, clamped to `position`; None is no snapshot."""
        ...

    @property
    def window(self) -> int:
        """The most entries of a window whose snapshots share runs; 0 if there is none."""
        ...

    def revive(
        self, described: str, arrays: dict[str, mx.array], windows: Mapping[int, tuple[Stretch, ...]]
    ) -> tuple[int, list[Any]]:
        """Returns the position and the snapshots of a checkpoint from its description and arrays, or the stretches of
        its windows, by the leaf's number. Raises ValueError, KeyError or TypeError if the description is invalid."""
        ...


class Holder(Protocol):
    """An open lease, as memory sees it."""

    @property
    def closed(self) -> bool: ...
    @property
    def hold(self) -> Any:
        """Its state (`request.hold.Hold`): its `track`, the `node` at the end of its path, the `thread` that used it
        last, and the tokens of its prompt that have no room yet (`unreserved`)."""
        ...

    @property
    def usage(self) -> Using:
        """Which thread is using it."""
        ...


class Using(Protocol):
    """Which thread is using a lease, as memory sees it."""

    @property
    def busy_elsewhere(self) -> bool:
        """Whether another thread is in a forward on it, or has left lazy arrays that only that thread can compute."""
        ...

    @property
    def in_forward_elsewhere(self) -> bool: ...
    def recount(self) -> None:
        """Set the ledger's account to exactly what its layers occupy."""
        ...

    def await_turn(self, seconds: float) -> bool: ...
    def discard_now(self) -> bool: ...
    def close_dropped(self) -> bool:
        """Close a lease that was dropped without being closed. Returns False if its layers' state was lost. Raises
        WrongThread if only another thread can close it."""
        ...


class Reader(Protocol):
    """A restore in progress, as memory sees it."""

    def holds(self, track: Track) -> bool: ...
    def finish(self) -> None: ...


class CacheState:
    def __init__(self, model: ModelTraits, ledger: Ledger, lock: CacheLock) -> None:
        self.model = model
        self.ledger = ledger
        self.lock = lock
        # an elastic budget is for KV alone: the pool's share is of the machine's memory
        self.pool = device.Pool(
            ledger, device.pool_bytes(device.memory_bytes() if ledger.elastic else ledger.budget_bytes)
        )
        self.store = Store(model.specs, ledger, device.page_bytes())
        self.store.run = lock.run_held
        self.nodes = NodeStore(self.store)
        self.placement = Placement(self.nodes, ledger)
        self.reclaiming = Reclaiming(
            self.nodes, self.placement, ledger, lock, needs_checkpoints=model.needs_checkpoints
        )
        self.scratch = Scratch(ledger, lock)
        self.leases: weakref.WeakSet[Any] = weakref.WeakSet()
        """Open leases (`Holder`)."""
        self.restores: weakref.WeakSet[Any] = weakref.WeakSet()
        """Restores in progress (`Reader`)."""
        self.dropped: list[Holder] = []
        """Leases that were dropped without being closed. The next call closes them."""
        self.dropped_restores: list[Reader] = []
        self.on_dropped: Callable[[Any], None] = lambda lease: None
        """Called with each dropped lease after it was closed."""
        self.totals: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.min_checkpoint_tokens = 1
        self.water = (1.0, 1.0)
        """Fractions of the budget: reclaiming begins above the second, and ends at the first."""
        self.buffer_limit = device.buffer_limit()
        """Buffers that the device has at most; None if there is no limit."""
        self.uncached_reason = ""
        """Why nothing is cached; empty if KV is cached."""
        self.closing = False
        """No new request is accepted."""
        self.closed = False
        self._has_logged_rotation = False

    @property
    def tier(self) -> Tier | None:
        """The tier below memory; None if there is none."""
        return self.nodes.tier

    @property
    def buffers(self) -> int:
        """The buffers of the device that slabs and checkpoints occupy."""
        return len(self.store.slabs) * self.store.slab_arrays + self.nodes.points.arrays

    # -- leases that were dropped ----------------------------------------------------------------

    def drop(self, lease: Holder) -> None:
        """Close this lease at the next call. For finalizers, which run on any thread and at any time."""
        self.dropped.append(lease)

    def leave(self, hold: Any) -> None:
        """Remove the lease that has this hold from the open ones. Called with the lock held."""
        for lease in [x for x in self.leases if x.hold is hold]:
            self.leases.discard(lease)

    def drop_restore(self, restore: Reader) -> None:
        self.dropped_restores.append(restore)

    def sweep(self) -> None:
        """Close leases that were dropped without being closed. One whose state only another thread can compute stays
        until that thread closes it."""
        if not self.dropped and not self.dropped_restores:
            return
        with self.lock:
            while self.dropped_restores:
                self.dropped_restores.pop().finish()
            for lease in list(self.dropped):
                self.leases.add(lease)  # the cyclic collector may have removed it
                with contextlib.suppress(WrongThread):
                    if lease.usage.close_dropped():
                        self.on_dropped(lease)
                    self.reasons[Reason.DROPPED] += 1
                    self.dropped.remove(lease)

    def thread_left(self, thread: int) -> None:
        """Release the scratch of a thread that is not the last user of any open lease. Called with the lock held."""
        if not any(lease.hold.thread == thread for lease in self.leases if not lease.closed):
            self.scratch.release(thread)

    def busy_writer(self, node: Node) -> Holder | None:
        """Returns the lease with which another thread is writing this node's slab at this moment; None if there is
        none."""
        writers = node.span.slab.writers if node.span is not None else ()
        found = (x for x in self.leases if x.hold.track in writers and x.usage.busy_elsewhere)
        return next(found, None) if writers else None

    # -- memory --------------------------------------------------------------------------------

    def reclaim(self, excess: Callable[[], int], *, patience: float = PATIENCE, before: float | None = None) -> None:
        """Free `excess()` bytes, releasing the lock for other threads in between; nothing if they cannot all be freed.
        For `patience` and `before` see `Reclaiming.making_room`."""
        self.lock.run(self._reclaiming(excess, patience, before))

    def _reclaiming(self, excess: Callable[[], int], patience: float, before: float | None) -> Work[None]:
        last = math.inf
        if self.tier is not None:  # a slab that the writer is copying cannot be freed
            yield from self.tier.awaiting_copies(self.store.busy)
        while not self.closed and last > (missing := excess()) > 0:
            last = missing
            yield from self.reclaiming.making_room(missing, patience=patience, before=before)

    def note_rotation(self, n_tokens: int, max_size: int) -> None:
        """Count that a conversation outgrows the bound; log it once per cache."""
        self.reasons[Reason.ROTATED] += 1
        if not self._has_logged_rotation:
            self._has_logged_rotation = True
            log.warning(
                "a conversation of %d tokens outgrows max_kv_size=%d: from now on the model sees only its first and "
                "its latest tokens. This is logged once; PrefixCache.stats().reasons['rotated'], or \"rotated\" in a "
                "server's GET /v1/cache, counts such conversations",
                n_tokens,
                max_size,
            )
