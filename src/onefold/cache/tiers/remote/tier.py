"""The remote tier: prompts that several machines prefill are computed once, and fetched from a store that they share.

    PrefixCache(model, remote="redis://127.0.0.1:6379/0")        or a RemoteSettings

- Memory is written to the store on a fixed grid of tokens, in the background, and read back on any machine whose model
  and settings are the same (`grid`, `writing`, `fetching`).
- Checkpoints of windows and states are taken at the grid's edges, and stored in parts (`points`).
- The store belongs to others: every value is sealed (`values`). Without a secret only a store of this machine is used.
- A store that is slow, full or dead is a miss with a reason, and is tried again later (`health`).

It keeps nothing of nodes: what memory evicts is asked for again, like what another machine wrote.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from onefold.cache.memory import device
from onefold.cache.memory.lock import Work
from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import LONGEST_WAIT, REMOTE, Fetch, NoTier, TierStats, Written
from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers.identity import Identity, salt_of
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.remote.fetching import AHEAD
from onefold.cache.tiers.remote.grid import HEAD_BYTES, VALUE_BYTES, about_name, record_tokens, root_of
from onefold.cache.tiers.remote.health import Health
from onefold.cache.tiers.remote.keeping import KeptPaces
from onefold.cache.tiers.remote.planning import is_read_elsewhere, planned
from onefold.cache.tiers.remote.policy import DELAY, WRITES, Policy
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.sharing import KNOWN_SECONDS, Seen, Sharing
from onefold.cache.tiers.remote.stores.registry import address_of, open_store
from onefold.cache.tiers.remote.stores.store import StoreError, StoreSettings
from onefold.cache.tiers.remote.values import Sealing
from onefold.cache.tiers.remote.writing import REST, REST_BESIDE_GPU, RemoteWriter
from onefold.errors import BudgetError, ConfigError

log = logging.getLogger("onefold")

DEADLINE = 1.0
LEAST_PART, PART_SHARE = 1 << 16, 256
"""The bytes of a part of a checkpoint: at most this share of the budget, because three of them are always reserved, and
at least so many."""
OTHERS_MOST = 60.0
"""Seconds that a request waits for another thread that fetches the same."""
WRITING_MOST = 60.0
"""Seconds that closing a cache waits for what is still to be written."""
SAVE_SECONDS = 60.0
"""How often it is written down how quickly was read and computed."""
DAY = 24 * 3600
MOST_TTL = 3650 * DAY
THREADS = 2 + AHEAD
_LEAST_SECRET = 16


@dataclass(frozen=True)
class RemoteSettings:
    """How to open the tier. Raises ConfigError for values that cannot be used."""

    url: str = field(repr=False)  # it may have a password
    """redis://, rediss://, s3://, gs:// or file://."""
    secret: bytes = field(default=b"", repr=False)
    """Shared by all machines: only values that were sealed with it are believed. At least 16 bytes."""
    insecure: bool = False
    """Use a store of another machine without a secret: whoever can write there can put wrong KV into this cache."""
    ttl: int = 30 * DAY
    """Seconds after its last use that a value is forgotten, by stores that can."""
    deadline: float = DEADLINE
    """Seconds that the store may take to answer."""
    write: str = "shared"
    """What is written: "shared", what two conversations have in common, and the ends of turns after a while; "all", or
    "none"."""
    delay: float = DELAY
    """Seconds after which the end of a turn is written, if it was not continued."""
    paces: str | os.PathLike[str] | None = None
    """A file that keeps how quickly was read and computed, over restarts."""

    def __post_init__(self) -> None:
        address = address_of(self.url)
        if self.secret and len(self.secret) < _LEAST_SECRET:
            raise ConfigError(f"the secret has {len(self.secret)} bytes; give at least {_LEAST_SECRET} random ones")
        if not self.secret and not address.local and not self.insecure:
            raise ConfigError(
                f"{address.shown} is not on this machine: give a secret that all machines share (secret=, "
                "--remote-secret-file), or insecure=True (--remote-insecure) if nobody else can reach it"
            )
        if not 0 < self.deadline <= 60 or not 1 <= self.ttl <= MOST_TTL:
            raise ConfigError(
                "the deadline is more than 0 and at most 60 seconds, the time to live at least 1 second and at most "
                f"{MOST_TTL // DAY} days"
            )
        if self.write not in WRITES:
            raise ConfigError(f"what is written to a shared store is one of {', '.join(WRITES)}, not {self.write!r}")
        if not 0 <= self.delay <= DAY:
            raise ConfigError(f"the delay is a number of seconds, from 0 to {DAY}, not {self.delay!r}")


class RemoteTier(NoTier):
    def __init__(self, settings: RemoteSettings, state: CacheState, identity: Identity) -> None:
        """Raises ConfigError if the store cannot be opened, and BudgetError if there is no room for its buffers."""
        address = address_of(settings.url)
        self._shown = address.shown
        self._state: CacheState = weakref.proxy(state)  # the tier outlives the cache, which the state may refer to
        self._about, self._secret = identity.about, settings.secret
        self._roots: weakref.WeakKeyDictionary[Tree, bytes | None] = weakref.WeakKeyDictionary()
        """Where the chain of each tree's namespace begins; None if it has no name that other machines know."""
        reasons: Counter[str] = Counter()
        made_by = "cuda" if device.on_cuda() else "metal" if device.on_metal() else "cpu"
        self._shared = Sharing(
            open_store(_store_settings(settings)),
            Sealing(settings.secret),
            Health("read", address.shown, reasons),
            Health("written", address.shown, reasons),
            concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="onefold-remote-read"),
            record_tokens(state.store.token_bytes, edges=state.model.needs_checkpoints),
            state.store.specs,
            points=Layout(None, identity.points),
            has_points=state.model.needs_checkpoints,
            part_bytes=max(LEAST_PART, min(VALUE_BYTES - HEAD_BYTES, state.ledger.budget_bytes // PART_SHARE)),
            deadline=settings.deadline,
            reasons=reasons,
            known=Seen(min(KNOWN_SECONDS, settings.ttl / 2)),
        )
        self.shared_tokens = functools.partial(_shared_tokens, self._roots, self._shared)
        key = f"{address.shown} {identity.label} {made_by}"
        self._paces = None if settings.paces is None else KeptPaces(settings.paces, key)
        self._saved_at = time.monotonic()
        if self._paces is not None:
            self._paces.load(self._shared.read_pace, self._shared.prefill_pace)
        policy, leases = Policy(settings.write, settings.delay), state.leases
        self._lock = state.lock
        self._writer: RemoteWriter | None = None
        if policy.writes:
            about = {
                "model": identity.label,
                "kv": identity.about.get("kv"),
                "adapter": identity.about.get("adapter", ""),
                "tokens": self._shared.n_tokens,
                "token_bytes": state.store.token_bytes,
                "device": made_by,
            }
            self._writer = RemoteWriter(
                self._shared,
                state.store,
                state.lock,
                policy,
                about,
                rest=REST_BESIDE_GPU if device.on_cuda() or device.on_metal() else REST,
                are_running=lambda: len(leases) > 0,
            )

        self.grid = self._shared.n_tokens if self._shared.has_points and policy.writes else 0

    # -- requests ------------------------------------------------------------------------------------

    def attach(self, tree: Tree, namespace: Hashable) -> None:
        if tree not in self._roots:
            salt = salt_of(namespace)
            self._roots[tree] = None if salt is None else root_of(self._about, salt, self._secret)

    def planning(self, tree: Tree, tokens: Tokens, reserve_tokens: int) -> Work[Fetch | None]:
        root = self._roots.get(tree)
        until = time.monotonic() + OTHERS_MOST
        while root is not None and not self._state.closing:
            if time.monotonic() > until or not is_read_elsewhere(self._state, self._shared, tree, root, tokens):
                return planned(self._state, self._shared, tree, root, tokens, reserve_tokens)
            yield LONGEST_WAIT
        return None

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        self._shared.prefill_pace.took(seconds, n_tokens)
        if self._paces is not None and time.monotonic() - self._saved_at > SAVE_SECONDS:
            self._saved_at = time.monotonic()
            self._shared.threads.submit(self._paces.save, self._shared.read_pace, self._shared.prefill_pace)

    # -- writing ---------------------------------------------------------------------------------------

    def committed(self, node: Node) -> None:
        if self._writer is None:
            return
        root = self._roots.get(self._state.nodes.tree_of(node))
        if root is None:
            self._shared.reasons[RemoteReason.NAMELESS] += 1
            return
        self._writer.committed(node, root)

    def flush(self, *, everything: bool, until: float, reports: bool = False) -> bool:
        return self._writer is None or self._writer.flush(until)

    def give_up(self) -> None:
        if self._writer is not None:
            self._writer.give_up()

    def stop(self, until: float | None) -> None:
        if self._writer is None:
            return
        if until is not None:
            self._writer.flush(min(until, time.monotonic() + WRITING_MOST))
        self._writer.stop()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._disconnect()

    def abandon(self) -> None:
        if self._lock.is_elsewhere:
            return
        self.stop(None)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._paces is not None:
            self._paces.save(self._shared.read_pace, self._shared.prefill_pace)
        self._shared.threads.shutdown(wait=False, cancel_futures=True)
        self._shared.store.close()

    @property
    def written(self) -> Written:
        return Written(shared=self._shared.counts["written_bytes"])

    # -- the whole of it -------------------------------------------------------------------------------

    def stats(self) -> TierStats:
        counts = self._shared.counts
        return TierStats(
            mode=REMOTE,
            folder=self._shown,
            pending=self._writer is not None and self._writer.pending,
            written_bytes=counts["written_bytes"],
            records=counts["written_records"],
            spilled_tokens=counts["spilled_tokens"],
            restored_tokens=counts["restored_tokens"],
            restored_bytes=counts["restored_bytes"],
            skipped_tokens=counts["skipped_tokens"],
            rejected_records=counts["rejected_records"],
            failed=self._shared.health.fault or self._shared.writing.fault,
            record_tokens=self._shared.n_tokens,
        )

    def reasons(self) -> Counter[str]:
        return Counter({f"remote: {reason}": n for reason, n in self._shared.reasons.items()})


def _shared_tokens(roots: Mapping[Tree, bytes | None], shared: Sharing, tree: Tree, tokens: Tokens) -> int:
    root, found = roots.get(tree), 0
    for address in () if root is None else shared.addresses(root, tokens):
        if address not in shared.known:
            break
        found += shared.n_tokens
    return found


def fault_of(settings: RemoteSettings) -> str:
    """Asks the store once. Returns why it does not answer within the deadline; "" if it does. Raises ConfigError."""
    store = open_store(_store_settings(settings))
    try:
        store.look([about_name("none")])
    except StoreError as error:
        return str(error)
    finally:
        store.close()
    return ""


def _store_settings(settings: RemoteSettings) -> StoreSettings:
    return StoreSettings(address_of(settings.url), settings.deadline, settings.ttl)


def open_remote(settings: RemoteSettings, state: CacheState, identity: Identity) -> RemoteTier | TierStats:
    """Open the tier of a shared store. If nothing can be shared, that is logged, and only its statistics are returned.
    Raises ConfigError if the settings are wrong."""
    why = ""
    if not record_tokens(state.store.token_bytes):
        why = f"a token has {state.store.token_bytes} bytes of KV, more than a value of a shared store may have"
    try:
        if not why:
            return RemoteTier(settings, state, identity)
    except BudgetError as error:
        why = str(error)
    log.warning("nothing is shared with other machines: %s", why)
    return TierStats(mode=REMOTE, failed=why)
