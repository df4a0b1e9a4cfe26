"""How much memory the device has left for the KV of a prompt cache's requests.

- A request is admitted before anything is allocated for it: its prompt must fit in addition to the memory in use, to
  what admitted requests will still allocate for their prompts, and to one more buffer step for each of them.
- KV that no request uses is evicted first, unless even all of it would not be enough.
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
        """`limit_bytes`: None is no limit."""
        self.limit_bytes = limit_bytes

    def require(self, n_bytes: int, what: str, caches: Sequence[PrefixCache], evict: Evict) -> None:
        """Makes room for a request that will allocate `n_bytes` in addition to the requests of `caches`. Raises
        BudgetError if there is none; then nothing was allocated."""
        missing = self.missing(n_bytes, caches, evict)
        if missing > 0:
            needed = n_bytes + self._promised(caches)
            left = max(0, needed - missing)
            raise BudgetError(
                f"{what} does not fit the device: it and the running requests need {show_size(needed)} more of KV, and "
                f"{show_size(left)} are left of device_limit={show_size(self.limit_bytes or 0)} (weights and KV)",
                needed_bytes=needed,
                available_bytes=left,
                advice="send fewer tokens, try again when other requests have ended, or raise device_limit",
            )

    def missing(self, n_bytes: int, caches: Sequence[PrefixCache], evict: Evict) -> int:
        """Returns how many bytes are missing for `n_bytes` and a step of every running request, after stored KV was
        evicted. 0 or less: there is room."""
        if self.limit_bytes is None:
            return 0
        # the allocator rounds, and hands out what it has
        slack = max((c.inventory.step_bytes for c in caches), default=0)
        lacking = self._lacking(n_bytes, caches)
        while 0 < lacking <= sum(c.inventory.stored_bytes for c in caches) and evict(lacking + slack):
            lacking = self._lacking(n_bytes, caches)
        return lacking

    def _lacking(self, n_bytes: int, caches: Sequence[PrefixCache]) -> int:
        return int(mx.get_active_memory()) + self._promised(caches) + n_bytes - (self.limit_bytes or 0)

    def _promised(self, caches: Sequence[PrefixCache]) -> int:
        """What the requests that run may still allocate: their prompts, and a step of each."""
        return sum(c.inventory.unallocated_bytes + c.inventory.open_leases * c.inventory.step_bytes for c in caches)
