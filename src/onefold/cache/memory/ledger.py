"""The ledger: every byte, by purpose, under one hard budget.

- Reserve before allocate. A reservation that does not fit is refused, and nothing changes.
- Its figures come from its own accounts; MLX's counters are never read here.
- used = the sum over all purposes, and used <= budget, always.
- An account is closed exactly once. It knows its purpose, so bytes can move between purposes
  without being counted twice or not at all.
- When bytes are short, the ledger calls `make_room` to free some.

Knows nothing of MLX, of nodes, or of the arrays that an account covers.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from onefold.cache.memory.lock import Work
from onefold.errors import BudgetError, ConfigError
from onefold.sizes import show_size


def _nothing(missing: int) -> Work[None]:
    yield from ()


class Purpose(enum.Enum):
    LIVE = "live"  # buffers that an open lease writes, and its window and recurrent states
    STORED = "stored"  # committed segments that no lease writes
    CHECKPOINT = "checkpoint"  # window and recurrent states kept at a point of the tree
    INFLIGHT = "inflight"  # one layer being copied: growth, compaction, a merge
    DISK = "disk_buffers"  # buffers for bytes on their way to the disk, or from it
    SCRATCH = "scratch"  # activations and attention scores of a running forward
    PADDING = "padding"  # what Metal may round the arrays of slabs up by, at most
    POOL = "pool"  # what MLX may keep in its own buffer pool


HELD: Final = (Purpose.LIVE, Purpose.STORED, Purpose.CHECKPOINT)
"""The purposes whose bytes lie in arrays between two steps."""


class Account:
    """Some reserved bytes. Made by `Ledger.open`, released by `close`."""

    __slots__ = ("_ledger", "bytes", "closed", "purpose")

    def __init__(self, ledger: Ledger, purpose: Purpose, n_bytes: int) -> None:
        self._ledger = ledger
        self.purpose = purpose
        self.bytes = n_bytes
        self.closed = False

    def resize(self, n_bytes: int, *, force: bool = False) -> None:
        """Grow or shrink. Growing raises BudgetError if there is no room, unless `force`: that records bytes that exist
        already."""
        self._ledger._resize(self, n_bytes, force)

    def move(self, purpose: Purpose) -> None:
        self._ledger._move(self, purpose)

    def close(self) -> None:
        self._ledger._close(self)

    def close_later(self) -> None:
        """Close before the ledger is next read. For finalizers, which run on any thread and at any time."""
        self._ledger._ended.append(self)


class Ledger:
    elastic = False
    """Whether it grants every reservation."""

    def __init__(self, budget_bytes: int, lock: threading.RLock | None = None) -> None:  # type: ignore[valid-type]
        """`lock` is the cache's, so that `make_room` can wait on it."""
        if budget_bytes <= 0:
            raise ConfigError(f"the budget must be positive, got {budget_bytes} bytes")
        self._lock: Any = lock or threading.RLock()
        self._budget = budget_bytes
        self._accounts: set[Account] = set()
        self._ended: deque[Account] = deque()
        self._by_purpose = dict.fromkeys(Purpose, 0)
        self.peak_bytes = 0
        self.make_room: Callable[[int], None] | None = None
        """Called with the number of missing bytes; frees them if that is possible."""
        self.making_room: Callable[[int], Work[None]] = _nothing
        """The same, as work that may release the lock between its steps."""
        self.headroom: Callable[[], int] = lambda: 0
        """Bytes that only copies in flight may use, so that reclaiming itself has room."""
        self.reclaimable: Callable[[], int] = lambda: 0
        """Bytes that `make_room` could free."""
        self.spare: Callable[[], int] = lambda: 0
        """Reserved bytes that can be released on demand: MLX's pool."""
        self.give_way: Callable[[int], None] = lambda n_bytes: None
        """Releases so many of the spare bytes. Called before a reservation is refused."""

    @property
    def budget_bytes(self) -> int:
        return self._budget

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._close_ended()
            return sum(self._by_purpose.values())

    @property
    def held_bytes(self) -> int:
        """The bytes that the cache's arrays occupy between steps (no scratch, no pool)."""
        with self._lock:
            self._close_ended()
            return sum(self._by_purpose[p] for p in HELD)

    @property
    def free_bytes(self) -> int:
        return self._budget - self.used_bytes

    def bytes_for(self, purpose: Purpose) -> int:
        """Returns the bytes that are reserved for this purpose."""
        with self._lock:
            self._close_ended()
            return self._by_purpose[purpose]

    def by_purpose(self) -> dict[str, int]:
        with self._lock:
            self._close_ended()
            return {p.value: n for p, n in self._by_purpose.items()}

    def open(self, purpose: Purpose, n_bytes: int, what: str = "") -> Account:
        """Reserve bytes. Raises BudgetError, with both numbers, if room cannot be made."""
        with self._lock:
            account = Account(self, purpose, 0)
            self._take(purpose, n_bytes, what or purpose.value)
            account.bytes = n_bytes
            self._accounts.add(account)
            self._add(purpose, n_bytes)
            return account

    def open_both(self, first: tuple[Purpose, int], second: tuple[Purpose, int], what: str) -> tuple[Account, Account]:
        """Reserve bytes for two purposes, or for none. Raises BudgetError."""
        opened = self.open(*first, what)
        try:
            return opened, self.open(*second, what)
        except BudgetError:
            opened.close()
            raise

    def granting(self, purpose: Purpose, n_bytes: int) -> Work[None]:
        """Makes room for a reservation that follows, and may release the lock meanwhile. If another thread takes that
        room in between, the reservation makes room once more."""
        if n_bytes > 0 and (missing := self._missing(purpose, n_bytes)) > 0:
            yield from self.making_room(missing)
            if (missing := self._missing(purpose, n_bytes) - self.spare()) > 0:
                yield from self.making_room(missing)

    def fits(self, n_bytes: int) -> bool:
        """Whether a reservation would be granted now, without freeing anything."""
        with self._lock:
            return n_bytes <= self.free_bytes - self.headroom()

    def attainable(self, n_bytes: int) -> bool:
        """Whether a reservation would be granted, if necessary by freeing what can be freed."""
        with self._lock:
            return n_bytes <= self.free_bytes - self.headroom() + self.reclaimable()

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget while running. Frees what no longer fits first; raises BudgetError if that is not
        possible."""
        if budget_bytes <= 0:
            raise ConfigError(f"the budget must be positive, got {budget_bytes} bytes")
        with self._lock:
            missing = self.used_bytes + self.headroom() - budget_bytes  # or nothing could be copied afterwards
            if missing > 0 and self.make_room is not None:
                self.make_room(missing)
            if self.used_bytes > budget_bytes:
                raise BudgetError(
                    f"cannot lower the budget to {show_size(budget_bytes)}: "
                    f"{show_size(self.used_bytes)} are in use and cannot be freed now",
                    needed_bytes=self.used_bytes,
                    available_bytes=budget_bytes,
                )
            self._budget = budget_bytes

    def recount(self) -> list[str]:
        """Sums the accounts from scratch; returns a sentence for each running total that differs."""
        with self._lock:
            totals = dict.fromkeys(Purpose, 0)
            for account in self._accounts:
                totals[account.purpose] += account.bytes
            findings = [
                f"ledger says {self._by_purpose[p]} bytes are {p.value}, its accounts sum to {n}"
                for p, n in totals.items()
                if n != self._by_purpose[p]
            ]
            if self.used_bytes > self._budget and not self.elastic:
                findings.append(f"{self.used_bytes} bytes used of a budget of {self._budget}")
            return findings

    # -- for Account ------------------------------------------------------------------

    def _take(self, purpose: Purpose, n_bytes: int, what: str) -> None:
        if n_bytes < 0:
            raise ValueError(f"cannot reserve {n_bytes} bytes for {what}")
        if n_bytes == 0:
            return

        def missing() -> int:
            return self._missing(purpose, n_bytes)

        if missing() > 0 and self.make_room is not None:
            self.make_room(missing())
        if missing() > 0 and (spare := self.spare()):
            if missing() > spare and self.make_room is not None:
                self.make_room(missing() - spare)
            if 0 < missing() <= spare:
                self.give_way(missing())
        if missing() > 0:
            available = max(0, n_bytes - missing())
            raise BudgetError(
                f"{show_size(n_bytes)} needed for {what}, {show_size(available)} available "
                f"of a budget of {show_size(self._budget)}",
                needed_bytes=n_bytes,
                available_bytes=available,
            )

    def _missing(self, purpose: Purpose, n_bytes: int) -> int:
        """Returns how many bytes a reservation lacks now; 0 or less if none."""
        kept = 0 if purpose is Purpose.INFLIGHT else self.headroom()
        return self.used_bytes + n_bytes + kept - self._budget

    def _add(self, purpose: Purpose, n_bytes: int) -> None:
        self._by_purpose[purpose] += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _resize(self, account: Account, n_bytes: int, force: bool) -> None:
        with self._lock:
            if account.closed:
                raise RuntimeError("resize of a closed account")
            if n_bytes < 0:
                raise ValueError(f"an account cannot hold {n_bytes} bytes")
            delta = n_bytes - account.bytes
            if delta > 0 and not force:
                self._take(account.purpose, delta, account.purpose.value)
                delta = n_bytes - account.bytes  # making room may have changed this very account
            account.bytes = n_bytes
            self._add(account.purpose, delta)

    def _close_ended(self) -> None:
        while self._ended:
            self._ended.popleft().close()

    def _move(self, account: Account, purpose: Purpose) -> None:
        with self._lock:
            self._by_purpose[account.purpose] -= account.bytes
            account.purpose = purpose
            self._by_purpose[purpose] += account.bytes

    def _close(self, account: Account) -> None:
        with self._lock:
            if account.closed:
                raise RuntimeError("an account is closed exactly once")
            account.closed = True
            self._accounts.remove(account)
            self._by_purpose[account.purpose] -= account.bytes
            account.bytes = 0


class ElasticLedger(Ledger):
    """For a server that can neither wait nor refuse (an exception in the middle of a batch ends mlx-lm's server
    thread).

    The budget is for KV alone, and stored KV is evicted for live KV. A live request that needs more than the whole
    budget is granted: it exceeds the budget while it runs, and evicts nothing, because that would not make it fit.
    """

    elastic = True

    @property
    def used_bytes(self) -> int:
        return self.held_bytes

    def _take(self, purpose: Purpose, n_bytes: int, what: str) -> None:
        if n_bytes < 0:
            raise ValueError(f"cannot reserve {n_bytes} bytes for {what}")
        if (missing := self._missing(purpose, n_bytes)) > 0 and self.make_room is not None:
            self.make_room(missing)

    def _missing(self, purpose: Purpose, n_bytes: int) -> int:
        return self.used_bytes + n_bytes - self._budget if purpose in HELD else 0

    def fits(self, n_bytes: int) -> bool:
        return n_bytes <= self.free_bytes

    def attainable(self, n_bytes: int) -> bool:
        return True
