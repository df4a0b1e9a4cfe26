"""Whether the device has room for a request of a prompt cache, and stored KV evicted for it.

A request is refused where its caller gets the exception: in `admit`, when a batch takes on a row, or at the forward of
a row that is in no batch. `room.py` does the sums.
"""

from __future__ import annotations

import threading

from onefold.cache.memory.segment import STEP
from onefold.cache.memory.tokens import Tokens
from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.request.lease import Lease
from onefold.errors import BudgetError
from onefold.mlx_lm.eviction import Eviction
from onefold.mlx_lm.reasons import Reasons
from onefold.mlx_lm.room import Room
from onefold.mlx_lm.stores import Stores
from onefold.sizes import show_count

NO_ROOM = "no room on the device"


class Admission:
    def __init__(self, room: Room, stores: Stores, eviction: Eviction, reasons: Reasons, lock: threading.RLock) -> None:
        """`lock` is held by every caller but `before_alone`, which takes it."""
        self.room = room
        self.in_advance = False
        """Whether the server admits requests before it fetches for them."""
        self._stores = stores
        self._eviction = eviction
        self._reasons = reasons
        self._lock = lock

    def admit(self, cache: PrefixCache, tokens: Tokens) -> None:
        """Makes room for a request for these tokens. Raises BudgetError if there is none."""
        known = cache.inventory.matched(tokens)
        pin = cache.pin(tokens) if known else None  # what the request will read is not evicted for it
        try:
            needed = cache.inventory.prompt_bytes(tokens) + cache.inventory.step_bytes
            self._require(needed, f"a prompt of {show_count(len(tokens), 'token')}")
        finally:
            if pin is not None:
                pin.release()

    def admit_row(self) -> None:
        """Makes room for a row that a batch takes on, unless it was admitted in advance. Raises BudgetError."""
        if not self.in_advance:
            self._require(0, "the next request")

    def is_short(self) -> bool:
        """Whether the device has no room for another step of all running rows, after stored KV was evicted."""
        missing = self._reasons.attempt(lambda: self.room.missing(0, self._stores.caches(), self._eviction.free), 0)
        if missing > 0:
            self._reasons.note(NO_ROOM, "the newest row is ended by its length")
        return missing > 0

    def before_alone(self, lease: Lease, n_tokens: int) -> None:
        """Makes room for a forward of a row that is in no batch: where its prompt begins, unless it was admitted in
        advance, and for each step of its buffer after the prompt. Raises BudgetError to the row's caller."""
        start, end = lease.offset, lease.offset + n_tokens
        grows = end > len(lease.tokens) and start // STEP < end // STEP
        if grows or (start == lease.cached and not self.in_advance):
            with self._lock:
                prompt = f"a prompt of {show_count(len(lease.tokens), 'token')}"
                self._require(0, "the next token" if grows else prompt)

    def _require(self, n_bytes: int, what: str) -> None:
        try:
            self.room.require(n_bytes, what, self._stores.caches(), self._eviction.free)
        except BudgetError as error:
            self._reasons.note(NO_ROOM, str(error))
            raise
