"""Cuts a prompt into chunks that fit in the budget and end where checkpoints belong."""

from __future__ import annotations

from typing import Any

from onefold.cache.memory import device
from onefold.cache.memory.checkpoints import GRID
from onefold.cache.memory.tokens import Tokens
from onefold.cache.model import metal
from onefold.cache.request.hold import Hold

LEAST_CHUNK = 16
"""Tokens. Prefill is cut into smaller chunks only if evicting and shrinking MLX's pool do not make room."""
SCRATCH_SHARE = 64
"""For scratch of up to a 64th of the budget stored KV is evicted; more must be free. A full cache is the rule, and
short chunks compute a prompt much more slowly."""


def chunk_limit(hold: Hold, limit: int = 2048) -> int:
    """See `Lease.chunk_limit`."""
    if device.on_metal():
        limit = min(limit, metal.longest_chunk(hold.offset + limit))
    parts: list[Any] = [*hold.watchers, *hold.uncached]
    ledger, held = hold.state.ledger, hold.state.scratch.bytes - 2 * hold.points.bytes
    evicting = ledger.budget_bytes // SCRATCH_SHARE

    def is_cheap(n_bytes: int) -> bool:
        return ledger.fits(n_bytes) or (n_bytes <= evicting and ledger.attainable(n_bytes))

    while limit > LEAST_CHUNK and not all(is_cheap(b.scratch_bytes(limit) - held) for b in parts):
        limit //= 2
    held += ledger.spare()
    while limit > 1 and not all(ledger.attainable(b.scratch_bytes(limit) - held) for b in parts):
        limit //= 2
    return limit


def next_chunk(hold: Hold, start: int, limit: int = 2048) -> Tokens:
    """Returns the chunk that begins at `start`; empty if only the last token is left."""
    end = len(hold.tokens) - 1
    stops = {end, *hold.asked, *hold.edges, (start // GRID + 1) * GRID}
    if hold.state.model.needs_checkpoints and hold.matched > hold.cached:
        stops.add(hold.matched)  # where this request branched off
    stop = min([start + chunk_limit(hold, limit), *(s for s in stops if start < s <= end)])
    return hold.tokens[start : min(stop, end)]
