"""The door: `PrefixCache` hands out leases, takes back what they made, and keeps it under one budget.

Continue is a move, share is a borrow, commit is a move. Bookkeeping is guarded by one lock: any thread may lease,
commit and read statistics. A lease may change threads between two forwards: what a forward has written is scheduled
before its thread lets go. A buffer that another thread is writing at this moment is waited for, as long as a forward
takes; longer than `FORWARD_MOST` is a shorter hit, with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn

from onefold.cache import stats
from onefold.cache.config import CacheConfig, CacheOptions
from onefold.cache.memory import device
from onefold.cache.memory.ledger import ElasticLedger, Ledger, Purpose
from onefold.cache.memory.lock import CacheLock, Work
from onefold.cache.memory.reach import readable_length
from onefold.cache.memory.recount import recount
from onefold.cache.memory.segment import STEP, Slab, round_up
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import Fetch, Tier, TierStats
from onefold.cache.memory.tree import Node, Tokens, Tree, as_tokens
from onefold.cache.model import seam, stock
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.attention import attention
from onefold.cache.model.fingerprint import lasting_digest, model_digest, model_name
from onefold.cache.model.kinds.registry import bounded_caches
from onefold.cache.model.models import Models
from onefold.cache.model.survey import look_uncached, read_off, survey
from onefold.cache.request import adopting, closing, opening, stock_caches
from onefold.cache.request.arena import Arena
from onefold.cache.request.batch import Batch
from onefold.cache.request.lease import Lease
from onefold.cache.stats import Stats
from onefold.cache.tiers.identity import Identity
from onefold.cache.tiers.registry import open_tier
from onefold.errors import (
    BudgetError,
    ConfigError,
    DeviceError,
    IntegrityError,
    LeaseClosed,
    OnefoldError,
    WrongThread,
)
from onefold.sizes import parse_size, show_count, show_size

log = logging.getLogger("onefold")

FORWARD_MOST = 2.0
"""Seconds that a lease waits for another thread's forward."""
CLOSING_FORWARD_MOST = 60.0
"""Seconds that `close` waits for forwards: what they run on is taken out afterwards."""
CLEARING_MOST = 10.0
CLOSING_MOST = 600.0
"""Seconds that `close` waits for what is being written."""


@dataclass(frozen=True, repr=False)
class Pin:
    """A prefix kept warm until `release`."""

    cache: PrefixCache
    node: Node

    def __repr__(self) -> str:
        state = "" if self.cache.holds(self) else ", released"
        return f"<Pin of {show_count(self.node.end, 'token')}{state}>"

    def release(self) -> None:
        self.cache._unpin(self)


class PrefixCache:
    """Holds the KV of many conversations with one model, each token's once."""

    kv_bits = 16
    """Of stored KV: 16 (as the model makes it), 8 or 4."""

    def __init__(
        self,
        model: nn.Module,
        budget: int | float | str | None = None,
        **options: Unpack[CacheOptions],
    ) -> None:
        """Makes a cache for `model`, which it does not keep alive, under `budget`: bytes, "8GB" or "60%" of the
        device's memory; by default four fifths of that memory less the weights.

        The keywords are explained in `CacheConfig`: `draft_model`, `kv`, `max_kv_size`, `keep`, `adapter`,
        `min_checkpoint_tokens`, `high_water`, `low_water`, `elastic`, `logit_tokens`, `disk`, `disk_budget`,
        `disk_mode`, `disk_daily_limit`, `tokenizer`, `label`.

        Raises ConfigError for a value that cannot be used, and Unbounded, a ConfigError, if `max_kv_size` is given for
        a model with a cache class that grows and takes no bound."""
        config = CacheConfig.of(options)
        models = config.models(model)
        form, bound = config.format(), config.bound()
        budget_bytes = (
            device.default_budget(*models) if budget is None else parse_size(budget, total_bytes=device.memory_bytes())
        )
        mx.eval([m.parameters() for m in models])
        anatomies = [survey(m, kv=form, bound=bound) for m in models]
        for anatomy in anatomies:
            anatomy.logit_tokens = config.logit_tokens
        disk = config.disk_settings()
        lock = CacheLock()
        ledger = (ElasticLedger if config.elastic else Ledger)(budget_bytes, lock.inner)
        digest = model_digest(*models)
        self._set_up(models, anatomies, ledger, (digest, config.adapter, form.bits, bound), lock)
        try:
            self._refuse_tiny(budget_bytes)
        except ConfigError:
            self.close()
            raise
        self.kv_bits = form.bits
        self.state.min_checkpoint_tokens = config.min_checkpoint_tokens
        self.state.water = (config.low_water, config.high_water)
        if disk is not None and not self.state.uncached_reason:
            about = {"adapter": config.adapter, "tokenizer": config.tokenizer, "kv": form.bits, "bound": bound}
            about["model"] = lasting_digest(digest, *models)
            try:
                self._open_tier(disk, about, config.label)
            except (OnefoldError, ValueError):
                self.close()
                raise

    @classmethod
    def of_layers(cls, layers: list[Any], budget: int) -> PrefixCache:
        """A cache for a model that is not known but for the caches it uses, which hold something already. Its layers
        are contiguous, and it is elastic."""
        self = cls.__new__(cls)
        gate = CacheLock()
        self._set_up([], [read_off(layers)], ElasticLedger(budget, gate.inner), (), gate)
        return self

    def _set_up(
        self, models: list[nn.Module], anatomies: list[Anatomy], ledger: Ledger, form: Hashable, lock: CacheLock
    ) -> None:
        self._refs = [weakref.ref(m) for m in models]
        self._models = Models(anatomies)
        self.state = CacheState(self._models, ledger, lock)
        """For the engine, the drop-in and tests: what all parts of the cache share."""
        self._no_disk = TierStats()
        self._disk: Tier | None = None
        self._seam = [name for m in models for name in seam.install(m, attention)]
        self._watched = [seam.watch(m) for m in models]
        stock.hook_saving()
        self._format = form
        self._pins: set[int] = set()
        self._endings: list[Callable[[], object]] = []
        """What `close` has begun, and has still to do."""
        self.state.uncached_reason = next((a.reason for a in anatomies if a.reason), "")
        for anatomy in anatomies:
            for note in anatomy.notes:
                log.warning("%s", note)
        if self.state.uncached_reason and models:
            for anatomy, model in zip(anatomies, models, strict=True):
                look_uncached(anatomy, model)
            log.warning("this model runs uncached: %s", self.state.uncached_reason)

    @property
    def uncached_reason(self) -> str:
        """Why nothing is kept for this model; empty if it is."""
        return self.state.uncached_reason

    @property
    def min_checkpoint_tokens(self) -> int:
        return self.state.min_checkpoint_tokens

    @min_checkpoint_tokens.setter
    def min_checkpoint_tokens(self, n_tokens: int) -> None:
        self.state.min_checkpoint_tokens = n_tokens

    @property
    def model(self) -> nn.Module | None:
        return self._refs[0]() if self._refs else None

    @property
    def draft_model(self) -> nn.Module | None:
        return self._refs[1]() if len(self._refs) > 1 else None

    @property
    def max_kv_size(self) -> int | None:
        """Tokens that a conversation is bounded to; None is no bound."""
        return None if (bound := self._models.anatomies[0].bound) is None else bound.max_size

    @property
    def keep(self) -> int:
        """The first tokens of a bounded conversation, which stay; 0 without a bound."""
        return 0 if (bound := self._models.anatomies[0].bound) is None else bound.keep

    def rebind(self, *models: nn.Module) -> bool:
        """Go on with other objects of the same weights (a model that was unloaded and loaded again). False if they are
        others, or if a request is still running."""
        with self.state.lock:
            self.sweep()
            if self.state.leases or [*map(type, models)] != self._watched:
                return False
            if not isinstance(self._format, tuple) or model_digest(*models) != self._format[0]:
                return False
            self._refs = [weakref.ref(m) for m in models]
            return True

    # -- requests -------------------------------------------------------------------------

    def lease(
        self,
        tokens: Any,
        *,
        namespace: Hashable = "",
        checkpoints: Iterable[int] = (),
        reserve_tokens: int = 0,
        after: Fetch | Sequence[Fetch] | None = None,
    ) -> Lease:
        """Hold what is cached of `tokens`, with room for the rest and `reserve_tokens` more.

        `checkpoints` are positions where a later request will branch off, such as the end of the prompt as the next
        turn will render it. What is on disk of them is read first, unless the caller has seen to that: `after` is its
        `restore`, or several, or none (`[]`). Raises BudgetError if the rest can not be given room; then nothing stored
        was lost.
        """
        found = as_tokens(tokens).copy()  # the caller may go on with its buffer
        asked = _positions(checkpoints, reserve_tokens, namespace)
        self._await_writers(found, namespace)
        self._open_for_use()
        restores = list(after) if isinstance(after, Sequence) else [] if after is None else [after]
        if after is None and self._disk is not None:
            restores = self._read_disk(found, namespace, reserve_tokens)
        return self.state.lock.run(self._leasing(found, namespace, asked, reserve_tokens, restores))

    def _leasing(
        self,
        tokens: Tokens,
        namespace: Hashable,
        checkpoints: frozenset[int],
        reserve_tokens: int,
        restores: list[Fetch],
    ) -> Work[Lease]:
        self._open_for_use()
        self.sweep()
        models = [ref() for ref in self._refs]
        anatomies = [] if self.state.uncached_reason else self._models.anatomies
        lease = Lease(self.state, tokens, (namespace, self._format), anatomies, models, checkpoints)
        lease.owner = self
        self.state.leases.add(lease)
        opened = False
        try:
            if self.state.uncached_reason:
                self._open_uncached(lease)
            else:
                opening.begin(lease.hold)
                yield from opening.giving_room(lease.hold, reserve_tokens)
            opened = True
        except BudgetError as error:
            self.state.reasons["no room"] += 1
            raise error.advised("shorten the prompt, end other leases, release pins, or raise the budget") from None
        except LeaseClosed:
            self._open_for_use()  # closed by another thread meanwhile
            raise
        finally:
            if not opened:
                closing.release(lease.hold)
        self.state.totals["requests"] += 1
        self.state.totals["tokens_requested"] += len(tokens)
        self.state.totals["hits"] += lease.cached > 0
        self.state.totals["tokens_matched"] += lease.matched
        self.state.totals["tokens_cached"] += lease.cached
        if restores:
            lease.hold.from_disk = min(sum(r.tokens for r in restores), max(0, lease.cached - restores[0].before))
        if any(r.rejected for r in restores) and lease.reason in ("", "nothing known", "no checkpoint"):
            lease.hold.reason = "damaged on disk"
        self.state.totals["tokens_from_disk"] += lease.restored
        if lease.reason:
            self.state.reasons[lease.reason] += 1
        return lease

    def _await_writers(self, tokens: Tokens, namespace: Hashable) -> None:
        """Wait, without the lock, while other threads are in forwards that write where these tokens lie: what a forward
        has written can be read by all threads when it has returned. A forward that takes longer costs a shorter hit."""
        until = time.monotonic() + FORWARD_MOST
        while (left := until - time.monotonic()) > 0 and not self.state.lock.is_held_here:
            with self.state.lock:
                if self.state.closed or not any(x.usage.in_forward_elsewhere for x in self.state.leases):
                    return
                path = self._tree(namespace).match(tokens).path
                busy = next((x for n in path if (x := self.state.busy_writer(n)) is not None), None)
            if busy is None or not busy.usage.in_forward_elsewhere or not busy.usage.await_turn(left):
                return

    def batch(self, leases: list[Lease], *, pooled: bool | None = None) -> Batch:
        """Rows for one decode step at a time: see `Batch`. `pooled` keeps their tails in one slab, which saves
        operations at the price of some arithmetic: by default on a GPU, and not on a CPU."""
        self._open_for_use()
        pooled = device.on_gpu() if pooled is None else pooled
        arena = Arena(self.state.store) if pooled else None
        if self.model is None:
            raise ConfigError("the model of this cache is gone")
        return Batch(self.model, self._models.anatomies[0], leases, arena, self.state)

    def pin(self, tokens: Any, *, namespace: Hashable = "") -> Pin:
        """Keep the cached part of `tokens` from being evicted, until the pin is released."""
        found = as_tokens(tokens)
        with self.state.lock:
            self._open_for_use()
            tree = self._tree(namespace)
            node, matched = tree.reach(found)
            if matched == 0:
                given = show_count(len(found), "token")
                raise ConfigError(f"nothing of these {given} is cached; commit them once, then pin")
            for n in node.path():
                n.pins += 1
            pin = Pin(self, node)
            self._pins.add(id(pin))
            return pin

    def restore(self, tokens: Any, *, namespace: Hashable = "", reserve_tokens: int = 0) -> Fetch | None:
        """Begin to read what is on disk of `tokens`, for a caller that has other things to do in between: `step()` it
        until that returns False, then give it to `lease`. None if there is nothing that is worth reading. Raises
        BudgetError if there is no room for it now."""
        found = as_tokens(tokens)
        with self.state.lock:
            self._open_for_use()
            self.sweep()
            if self._disk is None or self.state.uncached_reason:
                return None
            tree = self._tree(namespace)
        made = self.state.lock.run(self._disk.planning(tree, found, reserve_tokens))
        if made is not None:
            made.owner = self
        return made

    def _read_disk(self, tokens: Tokens, namespace: Hashable, reserve_tokens: int) -> list[Fetch]:
        """All that is on disk of these tokens; again, where a record turned out to be damaged."""
        restores: list[Fetch] = []
        while not restores or restores[-1].rejected:
            try:
                with self.state.lock:
                    tree = self._tree(namespace)
                assert self._disk is not None
                self.state.lock.run(self._disk.awaiting_others(tree, tokens))
                found = self.restore(tokens, namespace=namespace, reserve_tokens=reserve_tokens)
            except BudgetError:
                self.state.reasons["no room to restore"] += 1
                found = None
            if found is None:
                break
            restores.append(found)
            found.driver = threading.current_thread()
            try:
                while found.step():
                    pass
            finally:
                found.finish()
        return restores

    def flush(self, timeout: float | None = None, *, everything: bool = False) -> bool:
        """Wait until what was committed so far is on disk, as the mode has it: with "back" nothing is owed before
        `close`, unless `everything` that is in memory is to be written now. Not from within a lease's forward. False if
        `timeout` seconds were not enough, if something could not be written, or if the disk failed."""
        if self._disk is None:
            return not self._no_disk.failed
        until = time.monotonic() + (timeout if timeout is not None else 1e9)
        self.state.lock.refuse_elsewhere()
        with self.state.lock.inner:  # requests go on meanwhile
            return self._disk.flush(everything=everything, until=until, reports=True)

    def durable(self, tokens: Any, *, namespace: Hashable = "") -> int:
        """How many of these tokens, from the first on, would survive the end of this process. Touches nothing."""
        with self.state.lock:
            self._open_for_use()
            if self._disk is None:
                return 0
            path, matched = self._tree(namespace).match(as_tokens(tokens))
            kv = resumable = 0
            for node in path:
                if node.below is None:
                    break
                kv = node.below.kv if kv == node.start else kv
                if node.below.known < node.end:
                    break
                if node.below.has_saved_point and node.end <= matched:
                    resumable = node.end
            return resumable if self.state.model.pointwise else max(resumable, min(kv, matched))

    def clear(self, *, disk: bool = True) -> None:
        """Drop everything that no lease holds; pins too. When it returns, the files of this model are gone from disk as
        well, in every namespace; with `disk=False` what is on disk stays there, and what is not is written first, for
        some seconds at most."""
        if not disk and self._disk is not None:
            self._flush_for_clearing(everything=True)
        self.state.lock.run(self._clearing(disk=disk))
        if disk and self._disk is not None:
            self._flush_for_clearing(everything=False)

    def _flush_for_clearing(self, *, everything: bool) -> None:
        assert self._disk is not None
        with self.state.lock.inner:  # requests go on meanwhile
            self._disk.flush(everything=everything, until=time.monotonic() + CLEARING_MOST)

    def _clearing(self, *, disk: bool) -> Work[None]:
        """What was used last before now, and is not held."""
        self.sweep()
        for restore in list(self.state.restores):
            restore.finish()
        for node in list(self.state.nodes.leaves.busy):
            node.pins = 0
        self._pins.clear()
        began = self.state.nodes.now()
        for tree in list(self.state.nodes.trees.values()):
            for node in tree.children_first():
                if node.parent is None or not node.idle or not _is_leaf(node, disk) or node.last_use > began:
                    continue
                if disk:
                    self.state.totals["discarded_tokens"] += node.end - node.start
                    self.state.nodes.drop(tree, node)
                else:
                    self.state.totals["discarded_tokens"] += self.state.nodes.unload(tree, node)
                yield 0.0
        if disk and self.state.tier is not None:
            self.state.tier.clear()

    def set_budget(self, budget: int | float | str) -> None:
        """Change the budget while running. Frees what no longer fits; refuses what cannot be freed now. Below what a
        forward needs, requests are refused until it is raised again."""
        n_bytes = parse_size(budget, total_bytes=device.memory_bytes())
        ledger, share = self.state.ledger, 0 if self.state.ledger.elastic else device.pool_bytes(n_bytes)
        if n_bytes > 0:
            self.state.reclaim(lambda: ledger.used_bytes - ledger.spare() + share + ledger.headroom() - n_bytes)
            if mx.get_cache_memory() > device.pool_bytes(n_bytes):
                mx.clear_cache()  # here, since it takes long where many buffers were freed
        with self.state.lock:
            self._open_for_use()
            self.sweep()
            before = self.state.ledger.budget_bytes
            self.state.pool.set_share(min(device.pool_bytes(n_bytes), device.pool_bytes(before)))
            try:
                self.state.ledger.set_budget(n_bytes)
            except BudgetError:
                self.state.pool.set_share(device.pool_bytes(before))
                raise
            self.state.pool.set_share(device.pool_bytes(n_bytes))

    def _refuse_tiny(self, budget_bytes: int) -> None:
        """Raises ConfigError for a budget that no forward fits, where that is known beforehand."""
        if self.state.ledger.elastic or self.state.uncached_reason or not self.state.store.specs:
            return
        if 0 < budget_bytes < self._need(1, states=1):
            raise ConfigError(
                f"a budget of {show_size(budget_bytes)} has no room for a forward of this model: give at least "
                f"{show_size(self._need(STEP))}, which is {STEP} tokens of KV and the scratch of a forward"
            )

    def close(self) -> None:
        """Let go of everything, leases included, and take the attention seam out again. In a child of the process that
        made it there is nothing to let go of: neither MLX nor the folder works there."""
        if self.state.lock.is_elsewhere:
            return
        self.state.closing = True
        self._end_leases()
        with self.state.lock:
            if not self.state.closed:
                self._settle_all()
                self._endings = [
                    self._leave_disk,
                    lambda: self.state.lock.run_held(self._clearing(disk=True)),
                    functools.partial(seam.uninstall, self._seam),
                    *(functools.partial(seam.unwatch, cls) for cls in self._watched),
                    stock.unhook_saving,
                    self._close_accounts,
                    mx.clear_cache,
                ]
                self.state.closed = True
        if self._disk is not None:
            self._disk.stop(time.monotonic() + CLOSING_MOST if self._endings else None)
        with self.state.lock:
            while self._endings:  # whoever is interrupted here may close once more
                self._endings[0]()
                del self._endings[0]

    def _end_leases(self) -> None:
        """Have leases that other threads are using settled by those threads, when their forwards have returned."""
        until = time.monotonic() + CLOSING_FORWARD_MOST
        while time.monotonic() < until:
            with self.state.lock:
                leases = [x for x in self.state.leases if x.usage.in_forward_elsewhere]
            if not leases:
                return
            for lease in leases:
                if not lease.usage.discard_now():
                    lease.usage.await_turn(max(0.0, until - time.monotonic()))

    def _settle_all(self) -> None:
        for lease in [*self.state.leases, *self.state.dropped]:
            with contextlib.suppress(DeviceError, WrongThread):
                if not lease.usage.discard_now():  # its thread settles it
                    continue
            if not lease.closed:  # only a thread that is still there could compute what it holds
                closing.release(lease.hold)
        self.state.dropped.clear()
        for restore in list(self.state.restores):
            restore.finish()

    @property
    def written_bytes(self) -> int | None:
        """To disk so far, by this cache; None without a disk. Does not wait for whoever has the lock."""
        return None if self._disk is None else self._disk.written_bytes

    def close_soon(self) -> None:
        """Closing, on whatever thread, waits no longer for what is not on disk yet: that is lost."""
        if self._disk is not None:
            self._disk.give_up()

    def _leave_disk(self) -> None:
        if self._disk is not None:
            self._disk.close()
            self.state.nodes.tier = None

    def _close_accounts(self) -> None:
        self.state.scratch.close()
        self.state.pool.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """Tokens whose KV is stored, each counted once."""
        with self.state.lock:
            return self.state.store.owned

    def __bool__(self) -> bool:
        return True  # an empty cache is still a cache

    def __repr__(self) -> str:
        if self.state.closed:
            return "<PrefixCache, closed>"
        held, budget = show_size(self.state.ledger.held_bytes), show_size(self.budget_bytes)  # settles nothing
        uncached = f", uncached: {self.state.uncached_reason}" if self.state.uncached_reason else ""
        return f"<PrefixCache of {model_name(self.model)}, {held} of {budget} held{uncached}>"

    @property
    def nbytes(self) -> int:
        """Bytes of KV and states that are held now: live, stored and in checkpoints."""
        return self.held_bytes

    def stats(self) -> Stats:
        with self.state.lock:
            self.sweep()
            if self._disk is None:
                return stats.count(self.state, self._no_disk, Counter())
            return stats.count(self.state, self._disk.stats(), self._disk.reasons())

    def check(self) -> None:
        """Recount everything from nothing; raises IntegrityError with every finding."""
        with self.state.lock:
            if found := recount(self.state):
                raise IntegrityError(found)

    def _tree(self, namespace: Hashable) -> Tree:
        """The tree of a caller's namespace; it knows what is on disk."""
        tree = self.state.nodes.tree((namespace, self._format))
        if self._disk is not None:
            self._disk.attach(tree, namespace)
        return tree

    def _open_tier(self, settings: object, about: dict[str, Any], label: str) -> None:
        """Open the tier below memory. If it cannot be used, the cache runs without. Raises ConfigError."""
        opened = open_tier(settings, self.state, Identity(about, self._models.describe(), label))
        if isinstance(opened, TierStats):
            self._no_disk = opened
            return
        self._disk = self.state.nodes.tier = opened
        weakref.finalize(self, opened.abandon)
        self._tree("")

    def _open_for_use(self) -> None:
        if self.state.closing:
            raise ConfigError("this cache is closed")

    @property
    def closed(self) -> bool:
        """Whether it is closed, or being closed."""
        return self.state.closing

    def sweep(self) -> None:
        """Settle leases that were dropped without being closed."""
        self.state.sweep()

    def _open_uncached(self, lease: Lease) -> None:
        """A model that we do not understand gets its own caches, and nothing is kept."""
        lease.hold.reason = "unknown cache"
        models = [m for ref in self._refs if (m := ref()) is not None]
        made = [bounded_caches(stock.make_prompt_cache(m), self._models.anatomies[0].bound) for m in models]
        stock_caches.hand_out(lease.usage, list(zip(self._models.anatomies, made, strict=False)))

    # -- for a server's own notion of entries ------------------------------------------------

    @property
    def closing_seconds(self) -> float:
        """How long `close` may take."""
        return 0.0 if self._disk is None else CLOSING_MOST

    @property
    def held_bytes(self) -> int:
        """KV that is held now: live, stored and in checkpoints."""
        with self.state.lock:
            self.sweep()
            for lease in self.state.leases:
                lease.usage.recount()
            return self.state.ledger.held_bytes

    @property
    def open_leases(self) -> int:
        self.sweep()
        return len(self.state.leases)

    @property
    def budget_bytes(self) -> int:
        return self.state.ledger.budget_bytes

    @property
    def token_bytes(self) -> int:
        """What one more token of a conversation takes."""
        return self.state.store.token_bytes

    @property
    def step_bytes(self) -> int:
        """What a conversation's buffer grows by at a time, with the copy of one layer."""
        return STEP * (self.state.store.token_bytes + self.state.store.layer_token_bytes)

    @property
    def unallocated_bytes(self) -> int:
        """What the prompts of open leases will allocate at their first forward."""
        with self.state.lock:
            return sum(round_up(lease.hold.unreserved) for lease in self.state.leases) * self.state.store.token_bytes

    def prompt_bytes(self, tokens: Any) -> int:
        """What a request for these tokens would allocate for its prompt: KV that the tree does not have, and states."""
        found = as_tokens(tokens)
        most = max(self._models.bounds, default=len(found))
        points = sum(a.point_bytes(len(found), 1) for a in self._models.anatomies)
        return round_up(max(0, min(len(found), most) - self.matched(found))) * self.state.store.token_bytes + points

    @property
    def evicted_tokens(self) -> int:
        return self.state.nodes.counts["evicted_tokens"]

    def fits(self, layers: list[Any]) -> bool:
        """Whether these caches of mlx-lm's are such as this model's."""
        return adopting.fits(layers, self._models.anatomies)

    @property
    def stored_bytes(self) -> int:
        """What no request is using."""
        return self.held_bytes - self.state.ledger.by_purpose()[Purpose.LIVE.value]

    def in_memory(self, tokens: Any, *, namespace: Hashable = "") -> int:
        """How far these tokens can be had without the disk, as far as segments go; touches nothing."""
        with self.state.lock:
            path, matched = self._tree(namespace).match(as_tokens(tokens))
            return readable_length(self.state, path, matched)[0]

    def matched(self, tokens: Any, *, namespace: Hashable = "") -> int:
        """How far these tokens are known; touches nothing."""
        with self.state.lock:
            return self._tree(namespace).match(as_tokens(tokens)).matched

    def continuation(self, tokens: Any, *, most: int = 32, namespace: Hashable = "") -> Tokens:
        """What is known to follow where these tokens stop being known: the conversation used last. Touches nothing."""
        with self.state.lock:
            tree = self._tree(namespace)
            path, matched = tree.match(as_tokens(tokens))
            node = path[-1] if path else tree.root
            if matched < node.end:
                return node.tokens[matched - node.start :][:most].copy()
            latest = max(node.children.values(), key=lambda n: n.last_use, default=None)
            return (node.tokens[:0] if latest is None else latest.tokens[:most]).copy()

    @property
    def resumes_anywhere(self) -> bool:
        """Whether a conversation can be taken up at any of its tokens; else only where there is a checkpoint."""
        return not self.state.model.pointwise

    def most_tokens(self) -> int:
        """The longest conversation that the budget has room for, if it had all of it, MLX's pool included."""
        if self.state.uncached_reason:
            return sys.maxsize  # what an unknown cache takes is not known
        free = self.state.ledger.budget_bytes - (self.state.pool.bytes if self.state.ledger.elastic else 0)
        bounds = self._models.bounds
        if bounds and self._need(max(bounds) + 512) <= free:
            return sys.maxsize  # it rotates from there on, and grows no more
        low, high = 0, free // max(1, self.state.store.token_bytes) + 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._need(middle) <= free else (low, middle - 1)
        return low

    def _need(self, n_tokens: int, *, states: int = 3) -> int:
        """What a lone conversation of so many tokens takes, with a forward of one token; and where it must lie in one
        buffer, with a copy of one array, which growing takes. Of windows and recurrent layers so many states: one that
        runs, one that is stored, and one that is being made."""
        copied = self.state.store.array_token_bytes if self.state.model.contiguous else 0
        slab = n_tokens * (self.state.store.token_bytes + copied)
        scratch = sum(a.scratch_bytes(1, n_tokens) for a in self._models.anatomies)
        points = sum(a.point_bytes(n_tokens, 1) for a in self._models.anatomies)
        return slab + scratch + states * points

    def forget(self, tokens: Any, keep: int, *, namespace: Hashable = "") -> None:
        """Give up what is known of `tokens` from position `keep` on, but for what others share, and what a lease or a
        pin holds."""
        if not isinstance(keep, int) or keep < 0:
            raise ConfigError(f"keep is the number of tokens that stay, from 0 on, got {keep!r}")
        self.state.lock.run(self._forgetting(as_tokens(tokens), keep, namespace))

    def _forgetting(self, tokens: Tokens, keep: int, namespace: Hashable) -> Work[None]:
        tree = self._tree(namespace)
        path, matched = tree.match(tokens)
        slabs: dict[Slab, None] = {}
        for node in reversed(path):
            if node.children or not node.idle or node.end > matched or node.end <= keep:
                break
            if node.start < keep:
                tree.split(node, keep)
            self.state.totals["discarded_tokens"] += node.end - node.start
            if node.span is not None:
                node.span.slab.finish_copy()
                slabs[node.span.slab] = None
            self.state.nodes.drop(tree, node)
        for slab in slabs:
            yield from self.state.placement.trimming_slack(slab)

    def shrink(self, n_bytes: int) -> None:
        """Evict until at most `n_bytes` are stored, or nothing more can be. Other threads get in meanwhile."""
        self.state.reclaim(lambda: min(self.stored_bytes - n_bytes, self.state.reclaiming.reclaimable_bytes()))

    def adopt(self, tokens: Any, layers: list[Any]) -> tuple[int, str]:
        """Take over what a list of mlx-lm's own caches holds: the KV of `tokens`. Returns how many of them could be
        kept, and why not all. Buffers that only the list refers to are moved."""
        found = as_tokens(tokens)
        with self.state.lock:
            anatomies = self._models.anatomies
            kept, reason = adopting.sound_length(layers, anatomies, len(found))
            if kept == 0:
                return 0, reason
            with self.lease(found[:kept] if kept < len(found) else found) as lease:
                if lease.matched < kept or self.state.model.pointwise:
                    adopting.fill(lease.hold, layers, kept)
                    lease.commit(found[:kept])
            return kept, reason

    # -- for leases -------------------------------------------------------------------------

    def holds(self, pin: Pin) -> bool:
        """Whether the pin keeps its prefix: it was neither released nor cleared."""
        return id(pin) in self._pins

    def _unpin(self, pin: Pin) -> None:
        with self.state.lock:
            if id(pin) in self._pins:
                self._pins.discard(id(pin))
                for n in pin.node.path():
                    n.pins = max(0, n.pins - 1)


PrefixCache.__signature__ = CacheConfig.signature()  # type: ignore[attr-defined]


def _is_leaf(node: Node, disk: bool) -> bool:
    """Nothing hangs on it; or, with what is on disk to stay, nothing in memory does."""
    if disk:
        return not node.children
    return node.in_memory and not node.held_below


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
