"""What the device has left for the KV of a prompt cache's requests.

- A request is admitted before anything is allocated for it: its prompt must fit beside what is in use, what admitted
  requests will still allocate for their prompts, and one more buffer step for each of them.
- KV that no request is using makes way first, unless all of it would not be enough.
- A row that runs may find no room for its next buffer step. One in a batch is then ended by its length; a lone one is
  refused at its next forward. A step's room is asked for one step ahead, so the step that ends a row still fits.

    limit   [ active: weights, KV, activations ][ prompts admitted, not yet allocated ][ a step per request ][ free ]

Counts KV alone: the limit is to leave room for activations. Knows nothing of keys, entries or mlx-lm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from onefold.cache.prefix_cache import PrefixCache
from onefold.errors import BudgetError
from onefold.sizes import show_size

Evict = Callable[[int], int]
"""Frees so many stored bytes, or what it can of them; returns how many it freed."""


class Room:
    def __init__(self, limit_bytes: int | None) -> None:
        """Without a limit nothing is ever short."""
        self.limit_bytes = limit_bytes

    def require(self, n_bytes: int, what: str, caches: Sequence[PrefixCache], evict: Evict) -> None:
        """Makes room for a request that will allocate `n_bytes` beside the requests of `caches`. Raises BudgetError if
        that cannot be done; then nothing was allocated."""
        missing = self.missing(n_bytes, caches, evict)
        if missing > 0:
            needed = max(n_bytes, missing)
            raise BudgetError(
                f"{what} does not fit the device: {show_size(missing)} of KV are missing of a limit of "
                f"{show_size(self.limit_bytes or 0)}; send fewer tokens, or try again when other requests have ended",
                needed_bytes=needed,
                available_bytes=needed - missing,
            )

    def missing(self, n_bytes: int, caches: Sequence[PrefixCache], evict: Evict) -> int:
        """What `n_bytes`, and a step of every running request, lack after stored KV has made way; at most 0 if
        nothing."""
        if self.limit_bytes is None:
            return 0
        slack = max((c.step_bytes for c in caches), default=0)  # the allocator rounds, and hands out what it has
        lacking = self._lacking(n_bytes, caches)
        while 0 < lacking <= sum(c.stored_bytes for c in caches) and evict(lacking + slack):
            lacking = self._lacking(n_bytes, caches)
        return lacking

    def _lacking(self, n_bytes: int, caches: Sequence[PrefixCache]) -> int:
        running = sum(c.unallocated_bytes + c.open_leases * c.step_bytes for c in caches)
        return int(mx.get_active_memory()) + running + n_bytes - (self.limit_bytes or 0)
