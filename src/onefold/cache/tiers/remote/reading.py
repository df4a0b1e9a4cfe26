"""One value of a shared store on its way into memory, and how long it may take."""

from __future__ import annotations

import concurrent.futures
import time

from onefold.cache.memory.arrays import Bytes
from onefold.cache.tiers import host
from onefold.cache.tiers.remote.sharing import KV, PART, Sharing


class Reading:
    """One value that a thread reads, or will read."""

    def __init__(self, address: bytes, at: int, n_tokens: int, n_bytes: int) -> None:
        """`n_tokens` of KV, which belong `at` tokens into the slab; or a part of a checkpoint, with 0 tokens, which
        begins `at` bytes into it."""
        self.address, self.at, self.n_tokens, self.n_bytes = address, at, n_tokens, n_bytes
        self.begun: float | None = None
        self.future: concurrent.futures.Future[memoryview | None]

    def is_late(self, deadline: float) -> bool:
        """Whether the store takes longer than the deadline. What waits for a thread is not late."""
        return self.begun is not None and time.monotonic() - self.begun > deadline

    def read(self, shared: Sharing, tag: str, places: list[Bytes] | None) -> memoryview | None:
        """Reads the value, on a thread of its own, into its places; without any, returns its payload. Raises
        RecordError and StoreError."""
        self.begun = time.monotonic()
        payload = shared.fetched(KV if self.n_tokens else PART, tag, self.address, self.n_bytes)
        if self.n_tokens:
            shared.require_finite(shared.tensors_of(payload))
        if places is None:
            return payload
        host.scatter(places, payload)
        return None
