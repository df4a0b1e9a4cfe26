"""What a cache says of itself: statistics, and the recount from nothing that they have to stand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onefold.cache.tiers.disk.tier import DiskStats

if TYPE_CHECKING:
    from onefold.cache.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Stats:
    """A moment of the cache. Tokens and bytes are totals; `bytes` is by purpose."""

    requests: int
    """Leases that were opened. One that found no room is among the reasons."""
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
    """What one more token of a conversation takes."""
    bytes: dict[str, int]
    reasons: dict[str, int]
    tokens_from_disk: int = 0
    """Of the cached tokens, those that were read from disk; the others were in memory."""
    disk: DiskStats = field(default_factory=DiskStats)


def count(cache: PrefixCache) -> Stats:
    """With the lock held."""
    for lease in cache._leases:
        lease._recount()
    nodes = list(cache._shelf.nodes())
    t, counts = cache._totals, cache._shelf.counts
    return Stats(
        requests=t["requests"],
        hits=t["hits"],
        tokens_requested=t["tokens_requested"],
        tokens_matched=t["tokens_matched"],
        tokens_cached=t["tokens_cached"],
        moves=t["moves"],
        borrows=t["borrows"],
        stored_tokens=sum(n.end - n.start for n in nodes if n.span is not None),
        nodes=len(nodes),
        checkpoints=sum(n.checkpoint is not None for n in nodes),
        open_leases=len(cache._leases),
        evicted_tokens=counts["evicted_tokens"],
        discarded_tokens=t["discarded_tokens"] + counts["discarded_tokens"],
        merges=counts["merges"],
        compactions=counts["compactions"],
        budget_bytes=cache._ledger.budget_bytes,
        used_bytes=cache._ledger.used_bytes,
        peak_bytes=cache._ledger.peak_bytes,
        token_bytes=cache._store.token_bytes,
        bytes=cache._ledger.by_purpose(),
        reasons=dict(cache._reasons + (Counter() if cache._disk is None else cache._disk.all_reasons())),
        tokens_from_disk=t["tokens_from_disk"],
        disk=cache._no_disk if cache._disk is None else cache._disk.stats(),
    )


def recount(cache: PrefixCache) -> list[str]:
    """What is not as the books have it. With the lock held."""
    known, restores = list(cache._leases), list(cache._restores)  # nothing is collected in between
    cache.sweep()
    leases = [lease for lease in known if lease in cache._leases]
    for lease in leases:
        lease._recount()
    found = cache._shelf.check()
    through: Counter[int] = Counter()
    for lease in leases:
        if lease._node is not None:
            through.update(id(n) for n in lease._node.path())
    for node in cache._shelf.nodes():
        if node.leases != through[id(node)]:
            found.append(f"node [{node.start}, {node.end}) counts {node.leases} leases, {through[id(node)]} are open")
    for slab in cache._store.slabs:
        for track in slab.tracks:
            held = any(lease._track is track for lease in leases)
            if not held and not any(restore.holds(track) for restore in restores):
                found.append(f"a slab of {slab.capacity} is held by a lease that is not open")
    return found
