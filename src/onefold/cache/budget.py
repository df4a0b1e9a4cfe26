"""The budget of a cache while it runs: set by a caller, or following the memory of the machine.

A budget that a caller gave is never changed. The default, "auto", follows the machine: `look` reads the memory's level,
at most once a second, and acts on it.

- While memory is short: first MLX's pool and the unused room of stored buffers are given back, then a part of the
  stored KV is evicted, then the budget is lowered step by step. With some seconds in between; if memory is critical,
  all of that at once.
- Requests that run go on to their end. Only if memory is critical they get no more room: then the youngest is
  preempted, as always when memory runs out.
- When memory is no longer short, the budget rises again slowly. If that makes it short again, it waits for twice as
  long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

import mlx.core as mx

from onefold.cache.inventory import Inventory
from onefold.cache.memory import device
from onefold.cache.parts import Parts
from onefold.errors import BudgetError
from onefold.machine import Level, Reading, give_back_free_memory
from onefold.sizes import show_size

log = logging.getLogger("onefold")

LOOK_SECONDS = 1.0
ACT_SECONDS = 5.0
"""Between two steps while memory is short, so that the first can show: Linux's figures are means over ten seconds."""
CALM_SECONDS = 30.0
"""How long memory is not short before the budget rises."""
CALM_MOST = 600.0
CALM_FORGOTTEN = 3600.0
"""After so long with the whole budget the first wait is `CALM_SECONDS` again."""
RAISE_SECONDS = 5.0
LEAST_SHARE = 4
"""The budget is never lowered below a quarter of the whole."""
STEP_SHARE = 16
"""The budget rises by a sixteenth of the whole at a time; running requests keep that much room to grow."""
POOL_WHILE_SHORT = 32 << 20
LEAST_TOKENS, LEAST_CHUNK = 4096, 256
"""The length of a conversation, and of a chunk of its prompt, that an automatic budget has room for, whatever the
weights leave."""


class Budget:
    def __init__(self, parts: Parts, inventory: Inventory, gauge: Callable[[], Reading] | None) -> None:
        """Follows what `gauge` reads; None: the budget stays as it is."""
        self._parts = parts
        self._inventory = inventory
        self._gauge = gauge
        self._ledger = parts.state.ledger
        self.whole_bytes = self._ledger.budget_bytes
        """The budget while memory is not short."""
        self._next_look = 0.0
        self._next_step = 0.0
        self._steps = 0
        """Steps that were begun since memory became short; 0 if it is not."""
        self._short_at: float | None = None
        """When memory was last short; None if it was not since the budget is whole."""
        self._calm_seconds = CALM_SECONDS
        self._has_told_wait = False
        self._whole_at = 0.0
        """When the budget was last whole again."""
        self._lock = threading.Lock()

    @property
    def follows(self) -> bool:
        """Whether the budget follows the machine's memory."""
        return self._gauge is not None

    @property
    def look_seconds(self) -> float | None:
        """After how long a server that has no work is to call `look`; None: it need not."""
        return LOOK_SECONDS if self.follows else None

    @property
    def is_lowered(self) -> bool:
        return self._ledger.budget_bytes < self.whole_bytes

    def fix(self, n_bytes: int) -> None:
        """Change the budget for good: it follows the machine no longer. Raises BudgetError if that is not possible
        now."""
        with self._lock:  # no step of `look` may follow
            self._set(n_bytes)
            self._gauge, self._steps, self._short_at = None, 0, None
            self.whole_bytes = n_bytes
            self._share_pool()

    def raise_to_least(self) -> bool:
        """Raises an automatic budget to the least that serves a conversation, and returns whether it had to."""
        least = self.least_bytes()
        if self._ledger.budget_bytes >= least:
            return False
        self._set(least)
        self.whole_bytes = least
        return True

    def least_bytes(self) -> int:
        """Returns the bytes that serve a conversation of `LEAST_TOKENS`; 0 if that is not known."""
        return 0 if self._parts.state.uncached_reason else self._parts.need(LEAST_TOKENS, chunk=LEAST_CHUNK)

    # -- following ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the memory's level if the last time was a second ago, and act on it. Does nothing to a budget that was
        given. Called between two steps."""
        if self._gauge is None or monotonic() < self._next_look or not self._lock.acquire(blocking=False):
            return
        try:
            self._look(monotonic())
        finally:
            self._lock.release()

    def _look(self, now: float) -> None:
        if self._gauge is None or now < self._next_look or self._parts.state.closing:
            return
        self._next_look = now + LOOK_SECONDS
        try:
            reading = self._gauge()
        except OSError as error:
            log.warning("the machine's memory cannot be read, and the budget follows it no longer: %s", error)
            self._gauge = None
            return
        if reading.level is Level.NORMAL:
            self._relax(now, reading)
        elif reading.level is Level.CRITICAL or now >= self._next_step:
            self._press(now, reading)
        else:
            self._short_at = now

    def _press(self, now: float, reading: Reading) -> None:
        if self._steps == 0 and self._short_at is not None:  # the budget was rising
            self._calm_seconds = min(CALM_MOST, 2 * self._calm_seconds)
        elif self._steps == 0 and now > self._whole_at + CALM_FORGOTTEN:
            self._calm_seconds = CALM_SECONDS
        critical = reading.level is Level.CRITICAL
        self._steps += 1
        if self._steps == 1 or critical:
            self._give_back(reading)
        if self._steps == 2 or critical:
            self._evict(reading)
        if self._steps > 2 or critical:
            self._lower(reading)
        self._short_at, self._next_step = now, now + ACT_SECONDS

    def _give_back(self, reading: Reading) -> None:
        """Give back MLX's pool, and the room of stored buffers that nothing was written to yet."""
        state = self._parts.state
        before = self._ledger.held_bytes + mx.get_cache_memory()
        self._share_pool()
        state.lock.run(state.reclaiming.releasing_room())
        _release()
        freed = before - self._ledger.held_bytes - mx.get_cache_memory()
        if self._steps == 1:
            self._say(reading, f"{show_size(max(0, freed))} of MLX's pool and of unused room are given back")

    def _evict(self, reading: Reading) -> None:
        """Evict a quarter of the stored KV; half of it if memory is critical."""
        before = self._inventory.stored_bytes
        self._inventory.shrink(before // 2 if reading.level is Level.CRITICAL else before * 3 // 4)
        _release()
        if freed := before - self._inventory.stored_bytes:
            self._say(reading, f"{show_size(freed)} of stored KV are evicted")

    def _lower(self, reading: Reading) -> None:
        """Lower the budget: first to what is used and a little more, then by an eighth, or a quarter if memory is
        critical. Running requests keep what they have, and room to grow unless memory is critical."""
        state, ledger, before = self._parts.state, self._ledger, self._ledger.budget_bytes
        critical = reading.level is Level.CRITICAL
        with state.lock:
            used = ledger.used_bytes - ledger.spare()
            lasting = used - state.reclaiming.reclaimable_bytes() + ledger.headroom() + POOL_WHILE_SHORT
        growth = self.whole_bytes // STEP_SHARE
        target = min(before * 3 // 4 if critical else before * 7 // 8, used + growth)
        least = max(self.whole_bytes // LEAST_SHARE, min(self.whole_bytes, self.least_bytes()))
        target = max(least, target, lasting + (0 if critical else growth))
        target = min(target, before if critical else self.whole_bytes)
        if target == before:
            return
        try:
            self._set(target)
        except BudgetError:  # a request took room meanwhile; the next step tries again
            return
        _release()
        what = "lowered" if target < before else "raised for running requests"
        self._say(reading, f"the budget is {what} from {show_size(before)} to {show_size(target)}")

    def _relax(self, now: float, reading: Reading) -> None:
        if self._short_at is None or now < self._short_at + self._calm_seconds or now < self._next_step:
            return
        if self._steps:
            self._steps = 0
            log.info("memory is no longer short: %s", reading.why)
        before = self._ledger.budget_bytes
        step = min(self.whole_bytes // STEP_SHARE, self.whole_bytes - before)
        if reading.spare_bytes is not None and reading.spare_bytes < 2 * step:
            if not self._has_told_wait:
                self._has_told_wait = True
                more = show_size(2 * step - reading.spare_bytes)
                log.info("the budget stays at %s until %s more are available", show_size(before), more)
            return
        self._next_step, self._has_told_wait = now + RAISE_SECONDS, False
        try:
            self._set(before + step)
        except BudgetError:  # an elastic budget may be exceeded by what is live
            return
        if step:
            log.info("the budget rises from %s to %s", show_size(before), show_size(before + step))
        if before + step == self.whole_bytes:
            self._short_at, self._whole_at = None, now

    def _say(self, reading: Reading, done: str) -> None:
        level = "critically short" if reading.level is Level.CRITICAL else "short"
        log.warning("memory is %s (%s): %s", level, reading.why, done)

    # -- setting -----------------------------------------------------------------------------------

    def _set(self, n_bytes: int) -> None:
        """Change the budget. Evicts what no longer fits; raises BudgetError if that is not possible now."""
        state, ledger = self._parts.state, self._ledger
        share = 0 if ledger.elastic else self._pool_bytes(n_bytes)
        if n_bytes > 0:
            state.reclaim(lambda: ledger.used_bytes - ledger.spare() + share + ledger.headroom() - n_bytes)
            if mx.get_cache_memory() > self._pool_bytes(n_bytes):
                device.clear_pool()  # without the lock, because it takes long if many buffers were freed
        with state.lock:
            self._parts.refuse_closed()
            state.sweep()
            before = ledger.budget_bytes
            state.pool.set_share(min(self._pool_bytes(n_bytes), self._pool_bytes(before)))
            try:
                ledger.set_budget(n_bytes)
            except BudgetError:
                state.pool.set_share(self._pool_bytes(before))
                raise
            state.pool.set_share(self._pool_bytes(n_bytes))

    def _share_pool(self) -> None:
        """Give MLX's pool its share of the budget, which is small while memory is short."""
        with self._parts.state.lock:
            self._parts.state.pool.set_share(self._pool_bytes(self._ledger.budget_bytes))

    def _pool_bytes(self, n_bytes: int) -> int:
        share = device.pool_bytes(n_bytes)
        return min(share, POOL_WHILE_SHORT) if self._steps else share


def _release() -> None:
    """Return freed memory to the machine: what MLX's pool keeps, and what the allocator below it does."""
    device.clear_pool()
    give_back_free_memory()
