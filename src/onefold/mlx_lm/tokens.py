"""The tokens that a server gives a prompt cache, images among them. Knows nothing of KV."""

from __future__ import annotations

import numpy as np

from onefold.cache.memory.tokens import NAMED, Tokens, as_tokens, unboxed
from onefold.errors import TokenError
from onefold.mlx_lm.reasons import Reasons


class TokenReader:
    """Turns lists of ids into arrays. mlx-lm names images by large negative numbers; each gets an id that no token
    has."""

    def __init__(self, reasons: Reasons) -> None:
        self._reasons = reasons
        self._ids: dict[int, int] = {}

    def read(self, tokens: list[int]) -> Tokens | None:
        """Returns the tokens as an array, or None if they are not tokens, which is counted."""
        try:
            if len(tokens) == 0:
                return np.empty(0, np.int32)
            wide = np.asarray(unboxed(tokens))
            if wide.ndim == 1 and wide.dtype.kind == "i" and wide.min() < 0:
                for name in np.unique(wide[wide < 0]).tolist():
                    self._ids.setdefault(name, NAMED + len(self._ids))
                wide = np.array([self._ids.get(t, t) for t in wide.tolist()])
            return as_tokens(wide)
        except (TokenError, ValueError, TypeError, OverflowError) as error:
            self._reasons.note("not tokens", str(error))
            return None


def inside_image(tokens: Tokens, at: int) -> bool:
    """Whether the position lies between the first and the last token of one image."""
    return bool(0 < at < len(tokens) and tokens[at] >= NAMED and tokens[at - 1] == tokens[at])


def image_start(tokens: Tokens, at: int) -> int:
    """Returns the position of the first token of the image that lies at `at`."""
    start = at
    while start and tokens[start - 1] == tokens[at]:
        start -= 1
    return start
