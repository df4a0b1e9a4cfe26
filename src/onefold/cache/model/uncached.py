"""The caches of a model that is not understood: nothing of them is reused, but their bytes are counted and limited.

- The watch on the model's class says when a forward begins and ends. Before it runs, its growth is reserved, by what
  the model's caches were seen to grow per token; afterwards the account is brought to what they occupy.
- A forward whose growth does not fit is refused with BudgetError before anything is computed.
- Where the caches stand is read off them, or counted if they do not say.

Knows nothing of the tree: these caches are the request's alone, and end with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from onefold.cache.model import stock
from onefold.cache.model.anatomy import Anatomy

STEP = 256
"""mlx-lm's caches grow by so many tokens at a time."""


class Uncached:
    """One model's own caches in one lease. It is the watcher of their forwards."""

    def __init__(self, anatomy: Anatomy, caches: list[Any], admit: Callable[[Uncached, int], None]) -> None:
        """`admit(self, n_tokens)` is asked before a forward, and refuses by raising; with 0 tokens it is told that one
        has ended."""
        self.anatomy = anatomy
        self.caches = caches
        self._admit = admit
        self._counted = 0
        self._depth = 0
        """Watched calls that are under way: a model's call may be made of that of a class it derives from."""
        self._token_bytes = anatomy.uncached_token_bytes or 0

    def admit(self, n_tokens: int) -> None:
        """Reserve a forward of `n_tokens`; see `__init__`. Raises BudgetError."""
        self._admit(self, n_tokens)

    @property
    def position(self) -> int:
        """Tokens that the caches hold."""
        said = [c.offset for top in self.caches for _, c in stock.flatten(top) if _says_where(c)]
        return max(said, default=self._counted)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in stock.arrays_of(self.caches))

    def bytes_after(self, n_tokens: int) -> int:
        """What the caches may occupy after `n_tokens` more."""
        held = self.nbytes
        if n_tokens == 0:
            return held
        begins = 0 if held else self.anatomy.uncached_state_bytes
        return held + begins + self._token_bytes * (n_tokens + STEP)

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
        if self.anatomy.uncached_token_bytes is None:  # could not be seen beforehand
            self._token_bytes = max(self._token_bytes, self.nbytes // max(1, self.position))
        self.admit(0)
        return stock.arrays_of(self.caches)

    def failed(self) -> list[mx.array]:
        if self._depth > 1:
            return []
        self.admit(0)
        return stock.arrays_of(self.caches)

    def lost(self, error: RuntimeError) -> None:
        pass  # nothing of it is kept

    def left(self) -> None:
        self._depth -= 1


def _says_where(cache: Any) -> bool:
    return isinstance(getattr(cache, "offset", None), int)
