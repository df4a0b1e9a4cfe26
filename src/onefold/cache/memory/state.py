"""What the parts of one cache share: its lock, its ledger, its stored nodes, and who is using them.

Requests and tiers are functions of this state. `PrefixCache` makes it, and none of them needs to ask `PrefixCache`.

    CacheState -- lock      one lock for all of it; long work lets go of it between steps
               -- ledger    every byte by purpose, under one budget;  pool, scratch: two of its accounts
               -- store     the slabs that hold KV;   nodes: the trees, and which node owns what of a slab
               -- tier      what lies below memory, or None
               -- leases, restores, dropped: who uses it now, or did and was not closed

Knows nothing of mlx-lm, of files, or of how a request runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.lock import CacheLock, Work
from onefold.cache.memory.nodes import NodeStore
from onefold.cache.memory.placement import Placement
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.reclaiming import PATIENCE, Reclaiming
from onefold.cache.memory.scratch import Scratch
from onefold.cache.memory.segment import Store
from onefold.cache.memory.shapes import LayerSpec
from onefold.cache.memory.tier import Tier
from onefold.cache.memory.track import Track
from onefold.cache.memory.tree import Node
from onefold.errors import WrongThread

log = logging.getLogger("onefold")


class ModelTraits(Protocol):
    """What memory and tiers need to know of the models whose KV they hold."""

    @property
    def specs(self) -> list[LayerSpec]:
        """The arrays of each layer whose KV lies in slabs."""
        ...

    @property
    def bounds(self) -> list[int]:
        """The most tokens that each bounded model keeps."""
        ...

    @property
    def pointwise(self) -> bool:
        """Whether resuming needs a checkpoint."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether some state is good for one point alone."""
        ...

    @property
    def contiguous(self) -> bool:
        """Whether a conversation must lie in one buffer."""
        ...

    def accepts(self, store: Store, snapshots: Sequence[Any], position: int) -> bool:
        """Whether layers of these models would take these snapshots, clamped to `position`; None is no snapshot."""
        ...

    def revive(self, described: str, arrays: dict[str, mx.array]) -> tuple[int, list[Any]]:
        """The position and the snapshots of a checkpoint that was described. Raises ValueError, KeyError or TypeError
        for nonsense."""
        ...


class Holder(Protocol):
    """An open lease, as memory sees it."""

    @property
    def closed(self) -> bool: ...
    @property
    def hold(self) -> Any:
        """What it holds (`request.hold.Hold`): its `track`, the `node` at the end of its path, the `thread` that used
        it last, and the tokens of its prompt that have no room yet (`unreserved`)."""
        ...

    @property
    def usage(self) -> Using:
        """Which thread is using it."""
        ...

    def close_dropped(self) -> None:
        """It was dropped without being closed. Raises WrongThread if only another thread can close it."""
        ...


class Using(Protocol):
    """Which thread is using a lease, as memory sees it."""

    @property
    def busy_elsewhere(self) -> bool:
        """Whether another thread is in a forward on it, or has left what only that thread can compute."""
        ...

    @property
    def in_forward_elsewhere(self) -> bool: ...
    def recount(self) -> None:
        """Have the ledger say exactly what its layers occupy."""
        ...

    def await_turn(self, seconds: float) -> bool: ...
    def discard_now(self) -> bool: ...


class Reader(Protocol):
    """A restore that is under way, as memory sees it."""

    def holds(self, track: Track) -> bool: ...
    def finish(self) -> None: ...


class CacheState:
    def __init__(self, model: ModelTraits, ledger: Ledger, lock: CacheLock) -> None:
        self.model = model
        self.ledger = ledger
        self.lock = lock
        # an elastic budget is for KV alone: the pool beside it has the machine's share
        self.pool = device.Pool(
            ledger, device.pool_bytes(device.memory_bytes() if ledger.elastic else ledger.budget_bytes)
        )
        self.store = Store(model.specs, ledger)
        self.store.run = lock.run_held
        self.nodes = NodeStore(self.store)
        self.placement = Placement(self.nodes, ledger)
        self.reclaiming = Reclaiming(self.nodes, self.placement, ledger, lock, pointwise=model.pointwise)
        self.scratch = Scratch(ledger, lock)
        self.leases: weakref.WeakSet[Any] = weakref.WeakSet()
        """Open ones (`Holder`)."""
        self.restores: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those under way (`Reader`)."""
        self.dropped: list[Holder] = []
        """Leases that were dropped without being closed, and are settled at the next call."""
        self.dropped_restores: list[Reader] = []
        self.on_dropped: Callable[[Any], None] = lambda lease: None
        """Told of leases that were dropped without being closed, when they have been settled."""
        self.totals: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.min_checkpoint_tokens = 1
        self.water = (1.0, 1.0)
        """Of the budget: reclaiming begins above the second, and goes down to the first."""
        self.uncached_reason = ""
        """Why nothing is kept; empty if it is."""
        self.closing = False
        """No request is begun any more."""
        self.closed = False
        self._said_rotation = False

    @property
    def tier(self) -> Tier | None:
        """What lies below memory; None if nothing does."""
        return self.nodes.tier

    # -- leases that nobody closes -------------------------------------------------------------

    def drop(self, lease: Holder) -> None:
        """Settle this lease at the next call: for finalisers, which run on any thread and at any time."""
        self.dropped.append(lease)

    def leave(self, hold: Any) -> None:
        """The lease that has this hold is closed. Called with the lock held."""
        for lease in [x for x in self.leases if x.hold is hold]:
            self.leases.discard(lease)

    def drop_restore(self, restore: Reader) -> None:
        self.dropped_restores.append(restore)

    def sweep(self) -> None:
        """Settle leases that were dropped without being closed. One whose state only another thread can compute waits
        for that thread."""
        if not self.dropped and not self.dropped_restores:
            return
        with self.lock:
            while self.dropped_restores:
                self.dropped_restores.pop().finish()
            for lease in list(self.dropped):
                self.leases.add(lease)  # the cyclic collector may have taken it out
                with contextlib.suppress(WrongThread):
                    lease.close_dropped()
                    self.dropped.remove(lease)

    def thread_left(self, thread: int) -> None:
        """Release the scratch of a thread that no open lease was used by last. Called with the lock held."""
        if not any(lease.hold.thread == thread for lease in self.leases if not lease.closed):
            self.scratch.release(thread)

    def busy_writer(self, node: Node) -> Holder | None:
        """The lease that another thread is using at this moment to write where this node lies."""
        writers = node.span.slab.writers if node.span is not None else ()
        found = (x for x in self.leases if x.hold.track in writers and x.usage.busy_elsewhere)
        return next(found, None) if writers else None

    # -- memory --------------------------------------------------------------------------------

    def reclaim(self, excess: Callable[[], int], *, patience: float = PATIENCE, before: float | None = None) -> None:
        """Free so many bytes, in stretches between which other threads get in; nothing if they cannot all be freed.
        `patience` and `before` are `Reclaiming.making_room`'s."""
        self.lock.run(self._reclaiming(excess, patience, before))

    def _reclaiming(self, excess: Callable[[], int], patience: float, before: float | None) -> Work[None]:
        last = math.inf
        if self.tier is not None:  # nothing can be freed where the writer is copying
            yield from self.tier.awaiting_copies(self.store.busy)
        while not self.closed and last > (missing := excess()) > 0:
            last = missing
            yield from self.reclaiming.making_room(missing, patience=patience, before=before)

    def note_rotation(self, n_tokens: int, max_size: int) -> None:
        """A conversation outgrows the bound: counted each time, logged once."""
        self.reasons[Reason.ROTATED] += 1
        if not self._said_rotation:
            self._said_rotation = True
            log.warning(
                "a conversation of %d tokens outgrows max_kv_size=%d: from now on the model sees its first tokens and "
                "its latest ones, and not what lies between. This is logged once. How many conversations outgrew it: "
                "PrefixCache.stats().reasons['rotated'], or \"rotated\" in a server's GET /v1/cache",
                n_tokens,
                max_size,
            )
