"""The statistics of a cache."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import REMOTE, TierStats
from onefold.cache.model.kernels import current
from onefold.cache.tiers.disk.tier import DiskStats


@dataclass(frozen=True)
class Stats:
    """The statistics of a cache at a moment. Tokens are totals since it was made; `bytes` is by purpose."""

    requests: int
    """Leases that were opened. Those that were refused are counted in `reasons`."""
    hits: int
    tokens_requested: int
    tokens_matched: int
    tokens_cached: int
    moves: int
    borrows: int
    stored_tokens: int
    nodes: int
    checkpoints: int
    open_leases: int
    evicted_tokens: int
    discarded_tokens: int
    merges: int
    compactions: int
    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    token_bytes: int
    """The bytes of one more token of a conversation."""
    bytes: dict[str, int]
    reasons: dict[str, int]
    buffers: int = 0
    """The device's buffers that stored and live KV occupies. Metal has a limit for a process, about 499,000."""
    decoded_bytes: int = 0
    """KV that was written by decode steps of batches."""
    moved_bytes: int = 0
    """How much of it was copied from a batch's common slab to the rows' own: each token at most once."""
    attention: dict[str, int] = field(default_factory=dict)
    """Calls of attention on several pieces in this process: those that the decode kernel has computed ("kernel"), and
    the others, by the reason why it has not. Empty where there is no kernel."""
    tokens_from_disk: int = 0
    """How many of the cached tokens were read from disk; the others were in memory."""
    tokens_from_remote: int = 0
    """How many of the cached tokens came from a store that machines share."""
    disk: DiskStats = field(default_factory=DiskStats)
    remote: TierStats = field(default_factory=TierStats)
    """Of the shared store."""


def count(state: CacheState, tier: TierStats, tier_reasons: Counter[str]) -> Stats:
    """Returns the statistics at this moment. Called with the lock held."""
    is_remote = tier.mode == REMOTE
    disk, remote = (TierStats(), tier) if is_remote else (tier, tier.below or TierStats())
    for lease in state.leases:
        lease.usage.recount()
    t, counts = state.totals, state.nodes.counts
    return Stats(
        requests=t["requests"],
        hits=t["hits"],
        tokens_requested=t["tokens_requested"],
        tokens_matched=t["tokens_matched"],
        tokens_cached=t["tokens_cached"],
        moves=t["moves"],
        borrows=t["borrows"],
        stored_tokens=state.store.owned,
        nodes=sum(tree.size for tree in state.nodes.trees.values()),
        checkpoints=state.nodes.points.count,
        open_leases=len(state.leases),
        evicted_tokens=counts["evicted_tokens"],
        discarded_tokens=t["discarded_tokens"] + counts["discarded_tokens"],
        merges=counts["merges"],
        compactions=counts["compactions"],
        budget_bytes=state.ledger.budget_bytes,
        used_bytes=state.ledger.used_bytes,
        peak_bytes=state.ledger.peak_bytes,
        token_bytes=state.store.token_bytes,
        bytes=state.ledger.by_purpose(),
        reasons={str(reason): n for reason, n in (state.reasons + tier_reasons).items()},
        buffers=state.buffers,
        decoded_bytes=t["batch_tokens"] * state.store.token_bytes,
        moved_bytes=counts["tail_tokens_moved"] * state.store.token_bytes,
        attention=current.calls(),
        tokens_from_disk=t["tokens_from_disk"],
        tokens_from_remote=t["tokens_from_remote"],
        disk=dataclasses.replace(disk, below=None),
        remote=remote,
    )
