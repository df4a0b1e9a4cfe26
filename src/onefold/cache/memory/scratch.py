"""Reserves what forwards need in addition to the KV, before they run, for each thread that runs them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from onefold.cache.memory.ledger import Account, Ledger, Purpose
from onefold.cache.memory.lock import CacheLock, Work
from onefold.errors import BudgetError

SMALLER_FORWARDS = "feed the prompt with lease.chunks(), run fewer rows in a batch, or raise the budget"


class Scratch:
    """One forward runs on a thread at a time, so each thread has one reservation."""

    def __init__(self, ledger: Ledger, lock: CacheLock) -> None:
        self._ledger, self._lock = ledger, lock
        self._accounts: dict[int, Account] = {}
        self._batched: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """The bytes that this thread has reserved."""
        account = self._accounts.get(threading.get_ident())
        return 0 if account is None else account.bytes

    def reserve(self, n_bytes: int) -> None:
        """Reserve bytes for this thread's next forward, in place of its former reservation. Raises BudgetError."""
        thread = threading.get_ident()
        account = self._accounts.get(thread)
        if account is None:
            account = self._accounts[thread] = self._ledger.open(Purpose.SCRATCH, 0)
        try:
            account.resize(max(n_bytes, self._batched.get(thread, 0)))
        except BudgetError as error:
            raise error.advised(SMALLER_FORWARDS) from None

    def reserving(self, n_bytes: int) -> Work[None]:
        """Like `reserve`, but may release the lock while room is made."""
        more = max(n_bytes, self._batched.get(threading.get_ident(), 0)) - self.bytes
        if more:
            yield from self._ledger.granting(Purpose.SCRATCH, more)
            self.reserve(n_bytes)

    @contextlib.contextmanager
    def for_a_batch(self, n_bytes: int) -> Iterator[None]:
        """Reserves the scratch of all rows together for a batch's step; a row's own reservation cannot lower it
        meanwhile. Raises BudgetError."""
        thread = threading.get_ident()
        self._batched[thread] = n_bytes
        try:
            self._lock.run(self.reserving(n_bytes))
            yield
        finally:
            with self._lock:
                self._batched.pop(thread, None)

    def release(self, thread: int) -> None:
        """Release the reservation of a thread that has no lease any more."""
        if thread in self._accounts:
            self._accounts.pop(thread).close()

    def close(self) -> None:
        for thread in list(self._accounts):
            self.release(thread)
