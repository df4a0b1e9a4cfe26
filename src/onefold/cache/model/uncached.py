"""The caches of a model that runs uncached: nothing of them is reused, but their bytes are counted and limited.

- The watch on the model's class reports when a forward begins and ends. Before it runs, its growth is reserved, from
  the growth per token that was measured; afterwards the account is set to what the caches occupy.
- A forward whose growth does not fit is refused with BudgetError before anything is computed.
- The position is read from the caches, or counted if they have none.

Knows nothing of the tree: these caches belong to one request, and are freed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from onefold.cache.model import stock
from onefold.cache.model.anatomy import Anatomy

STEP = 256
"""Tokens by which mlx-lm's caches grow at a time."""


class Uncached:
    """One model's own caches in one lease. It is the watcher of their forwards."""

    def __init__(self, anatomy: Anatomy, caches: list[Any], admit: Callable[[Uncached, int], None]) -> None:
        """`admit(self, n_tokens)` is called before a forward, and raises to refuse it; with 0 tokens it is called after
        one."""
        self.anatomy = anatomy
        self.caches = caches
        self._admit = admit
        self._counted = 0
        self._depth = 0
        """Nested watched calls in progress: a model's `__call__` may call that of its base class."""
        self._token_bytes = anatomy.uncached_token_bytes or 0

    def admit(self, n_tokens: int) -> None:
        """Reserve a forward of `n_tokens`; see `__init__`. Raises BudgetError."""
        self._admit(self, n_tokens)

    @property
    def position(self) -> int:
        """The number of tokens that the caches hold."""
        offsets = [c.offset for top in self.caches for _, c in stock.flatten(top) if _has_offset(c)]
        return max(offsets, default=self._counted)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in stock.arrays_of(self.caches))

    def bytes_after(self, n_tokens: int) -> int:
        """Returns the bytes that the caches may occupy after `n_tokens` more."""
        held = self.nbytes
        if n_tokens == 0:
            return held
        initial = 0 if held else self.anatomy.uncached_state_bytes
        return held + initial + self._token_bytes * (n_tokens + STEP)

    def scratch_bytes(self, n_tokens: int) -> int:
        return self.anatomy.scratch_bytes(n_tokens, self.position + n_tokens)

    def begun(self, model: Any, inputs: mx.array | None, row: int, *, n_layers: int, embedded: bool) -> None:
        if not self._depth:
            self.admit(1 if inputs is None else max(1, inputs.shape[1]))
        self._depth += 1

    def ended(self, n_tokens: int, stepped: bool) -> list[mx.array]:
        if self._depth > 1:
            return []
        self._counted += n_tokens
        if self.anatomy.uncached_token_bytes is None:  # the survey could not measure it
            self._token_bytes = max(self._token_bytes, self.nbytes // max(1, self.position))
        self.admit(0)
        return stock.arrays_of(self.caches)

    def failed(self) -> list[mx.array]:
        if self._depth > 1:
            return []
        self.admit(0)
        return stock.arrays_of(self.caches)

    def lost(self, error: RuntimeError) -> None:
        pass  # nothing of it is cached

    def left(self) -> None:
        self._depth -= 1


def _has_offset(cache: Any) -> bool:
    return isinstance(getattr(cache, "offset", None), int)
