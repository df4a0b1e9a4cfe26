"""Opens leases: waits for other threads' writes, fetches KV from the tier, then matches."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable

from onefold.cache.memory.lock import Work
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.tier import Fetch
from onefold.cache.memory.tokens import Tokens
from onefold.cache.model import stock
from onefold.cache.model.kinds.registry import bounded_caches
from onefold.cache.parts import Parts
from onefold.cache.request import closing, opening, stock_caches
from onefold.cache.request.lease import Lease
from onefold.errors import BudgetError, ConfigError, LeaseClosed

_HIDDEN = (Reason.NONE, Reason.NOTHING_KNOWN, Reason.NO_CHECKPOINT)
"""Reasons that a damaged record explains better."""
FORWARD_MOST = 2.0
"""Seconds that a lease waits for another thread's forward."""


class Leasing:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._state = parts.state

    def lease(
        self,
        tokens: Tokens,
        namespace: Hashable = "",
        *,
        checkpoints: Iterable[int] = (),
        reserve_tokens: int = 0,
        after: Fetch | Iterable[Fetch] | None = None,
        owner: object = None,
    ) -> Lease:
        """See `PrefixCache.lease`. The lease keeps `owner` alive."""
        asked = _positions(checkpoints, reserve_tokens, namespace)
        self._await_writers(tokens, namespace)
        self._parts.refuse_closed()
        fetches: list[Fetch] = [] if after is None else list(after) if isinstance(after, Iterable) else [after]
        if after is None and self._parts.tier is not None:
            fetches = self._fetch_all(tokens, namespace, reserve_tokens)
        opened = self._state.lock.run(self._opening(tokens, namespace, asked, reserve_tokens, fetches))
        opened.owner = owner
        return opened

    def fetch(
        self,
        tokens: Tokens,
        namespace: Hashable,
        reserve_tokens: int,
        *,
        owner: object = None,
        driver: threading.Thread | None = None,
    ) -> Fetch | None:
        """See `PrefixCache.restore`. The fetch keeps `owner` alive. `driver` is the thread that runs all steps, if one
        does: other threads then wait for it."""
        with self._state.lock:
            self._parts.refuse_closed()
            self._state.sweep()
            if self._parts.tier is None or self._state.uncached_reason:
                return None
            tree = self._parts.tree(namespace)
        planning = self._parts.tier.planning(tree, tokens, reserve_tokens)

        def planned() -> Work[Fetch | None]:
            made = yield from planning
            if made is not None:
                made.owner, made.driver = owner, driver  # with the lock held, before another thread sees it
            return made

        return self._state.lock.run(planned())

    def _fetch_all(self, tokens: Tokens, namespace: Hashable, reserve_tokens: int) -> list[Fetch]:
        """Fetch everything that is on disk of these tokens. After a damaged record, fetch what is left."""
        fetches: list[Fetch] = []
        while not fetches or fetches[-1].rejected:
            try:
                with self._state.lock:
                    tree = self._parts.tree(namespace)
                assert self._parts.tier is not None
                self._state.lock.run(self._parts.tier.awaiting_others(tree, tokens))
                found = self.fetch(tokens, namespace, reserve_tokens, driver=threading.current_thread())
            except BudgetError:
                self._state.reasons[Reason.NO_ROOM_TO_RESTORE] += 1
                found = None
            if found is None:
                break
            fetches.append(found)
            try:
                while found.step():
                    pass
            finally:
                found.finish()
        return fetches

    def _opening(
        self,
        tokens: Tokens,
        namespace: Hashable,
        checkpoints: frozenset[int],
        reserve_tokens: int,
        fetches: list[Fetch],
    ) -> Work[Lease]:
        self._parts.refuse_closed()
        self._state.sweep()
        models = [ref() for ref in self._parts.refs]
        anatomies = [] if self._state.uncached_reason else self._parts.models.anatomies
        lease = Lease(self._state, tokens, self._parts.key(namespace), anatomies, models, checkpoints)
        if self._parts.tier is not None:
            lease.hold.grid = self._parts.tier.grid
        self._state.leases.add(lease)
        opened = False
        try:
            if self._state.uncached_reason:
                self._open_uncached(lease)
            else:
                opening.begin(lease.hold)
                yield from opening.giving_room(lease.hold, reserve_tokens)
            opened = True
        except BudgetError as error:
            self._state.reasons[Reason.NO_ROOM] += 1
            raise error.advised("shorten the prompt, end other leases, release pins, or raise the budget") from None
        except LeaseClosed:
            self._parts.refuse_closed()  # another thread may have closed the cache meanwhile
            raise
        finally:
            if not opened:
                closing.release(lease.hold)
        self._state.totals["requests"] += 1
        self._state.totals["tokens_requested"] += len(tokens)
        self._state.totals["hits"] += lease.cached > 0
        self._state.totals["tokens_matched"] += lease.matched
        self._state.totals["tokens_cached"] += lease.cached
        if fetches:
            gained = max(0, lease.cached - fetches[0].before)
            lease.hold.from_remote = min(sum(r.remote_tokens for r in fetches), gained)
            lease.hold.from_disk = min(sum(r.tokens for r in fetches), gained) - lease.hold.from_remote
        if any(r.rejected for r in fetches) and lease.hold.reason in _HIDDEN:
            lease.hold.reason = Reason.DAMAGED
        self._state.totals["tokens_from_disk"] += lease.hold.from_disk
        self._state.totals["tokens_from_remote"] += lease.hold.from_remote
        if lease.hold.reason:
            self._state.reasons[lease.hold.reason] += 1
        return lease

    def _await_writers(self, tokens: Tokens, namespace: Hashable) -> None:
        """Wait, without the lock, while other threads are in forwards that write the slabs of these tokens: other
        threads can read a slab only after the forward has returned. A forward that takes longer causes a shorter
        hit."""
        until = time.monotonic() + FORWARD_MOST
        while (left := until - time.monotonic()) > 0 and not self._state.lock.is_held_here:
            with self._state.lock:
                if self._state.closed or not any(x.usage.in_forward_elsewhere for x in self._state.leases):
                    return
                path = self._parts.tree(namespace).match(tokens).path
                busy = next((x for n in path if (x := self._state.busy_writer(n)) is not None), None)
            if busy is None or not busy.usage.in_forward_elsewhere or not busy.usage.await_turn(left):
                return

    def _open_uncached(self, lease: Lease) -> None:
        """Give the lease the model's own caches, because the model runs uncached."""
        lease.hold.reason = Reason.UNCACHED
        models = [m for ref in self._parts.refs if (m := ref()) is not None]
        made = [bounded_caches(stock.make_prompt_cache(m), self._parts.models.anatomies[0].bound) for m in models]
        stock_caches.hand_out(lease.usage, list(zip(self._parts.models.anatomies, made, strict=False)))


def _positions(checkpoints: Iterable[int], reserve_tokens: int, namespace: Hashable) -> frozenset[int]:
    try:
        hash(namespace)
    except TypeError as error:
        raise ConfigError(f"namespace must be hashable, such as a string or a tuple of strings: {error}") from error
    try:
        found = frozenset(int(c) for c in checkpoints)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"checkpoints must be token positions, such as [120, 480]: {error}") from error
    if reserve_tokens < 0:
        raise ConfigError(f"reserve_tokens must not be negative, got {reserve_tokens}")
    return found
