"""A request on the model's own caches: nothing is reused, but their bytes are counted, and growth can be refused."""

from __future__ import annotations

import weakref
from typing import Any

from onefold.cache.model import seam
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.uncached import Uncached
from onefold.cache.request import forward
from onefold.cache.request.hold import Hold
from onefold.cache.request.usage import Usage


def hand_out(usage: Usage, made: list[tuple[Anatomy, list[Any]]]) -> None:
    """Give these caches of mlx-lm's to the caller, and count their bytes from now on."""
    known = weakref.ref(usage)

    def admit(part: Uncached, n_tokens: int) -> None:
        here = known()
        if here is None:
            return
        if n_tokens == 0:
            here.recount()
        else:
            here.require_usable()
            forward.admit_uncached(here.hold, part, n_tokens)

    hold = usage.hold
    for anatomy, caches in made:
        hold.handed.give(caches)
        if caches:
            hold.uncached.append(Uncached(anatomy, caches, admit))
    for part in hold.uncached:
        seam.attend(part.caches, part)


def reserve(hold: Hold, n_tokens: int) -> None:
    """Reserve the bytes of a forward of the target, if it runs uncached. Raises BudgetError."""
    for part in hold.uncached[:1]:
        part.admit(n_tokens)
