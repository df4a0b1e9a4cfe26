"""Rounds of speculative decoding: the state at the beginning of each, so that rejected tokens can be taken back.

Layers whose state is good for one point alone cannot be rewound by cutting. Where a draft model runs with the target,
every leaf's state at the beginning of a round is kept; a rewind puts it back, and the accepted tokens are fed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from onefold.errors import LeaseError

Marks = list[tuple[Any, ...]]


class Rounds:
    def __init__(self) -> None:
        self._begun: tuple[int, Marks] | None = None
        """Where the last round began, and every leaf's state there."""
        self._moved: dict[int, int] = {}
        """Leaves that a rewind has moved already, by id, and that will still be asked for it: where they stood."""
        self._refused: int | None = None
        """Where a rewind was to go that could not be done."""

    def forget(self) -> None:
        self._begun = None

    def mark(self, position: int, leaves: Sequence[Any], *, again: bool) -> None:
        """Keep the leaves' state at `position`, where a round begins: with `again`, or where none began so early."""
        if again or self._begun is None or self._begun[0] > position:
            self._begun = (position, [leaf.mark() for leaf in leaves])

    def rotated(self, leaves: Sequence[Any]) -> None:
        """The sliceable leaves have become rings, and represent what they were at the beginning of the round: a ring
        that has not wrapped can be cut to any earlier position."""
        if self._begun is not None:
            at, marks = self._begun
            pairs = zip(leaves, marks, strict=True)
            self._begun = (at, [x.mark() if x.sliceable else m for x, m in pairs])

    def bytes(self, leaves: Sequence[Any]) -> int:
        """What the state at the beginning of the round occupies in addition to the live one."""
        if self._begun is None:
            return 0
        live = {id(a) for leaf in leaves for a in leaf.live_arrays()}
        kept = {id(a): a for mark in self._begun[1] for a in _arrays_in(mark)}
        return sum(a.nbytes for i, a in kept.items() if i not in live)

    # -- rewinds -------------------------------------------------------------------------------

    def moved_already(self, layer: Any) -> int | None:
        """How far a rewind of another leaf has moved this one; None if it has not, and nothing is noted any more."""
        if id(layer) in self._moved:
            return int(self._moved.pop(id(layer)) - layer.offset)
        self._moved = {}
        return None

    def move(self, before: dict[int, int]) -> None:
        """A rewind has moved all leaves; by id, where those stood that will still be asked for it."""
        self._moved = before

    def refuse(self, to: int) -> None:
        """A rewind to `to` could not be done."""
        self._refused = to

    def check_refused(self, position: int) -> None:
        """Raises LeaseError if the layers hold tokens that a refused rewind was to take back: callers do not look
        whether a rewind was refused."""
        if self._refused is not None and position > self._refused:
            raise LeaseError(
                f"the layers could not be rewound from position {position} to {self._refused}, and hold tokens "
                "that were to be taken back: open another lease, or give the cache its draft_model="
            )
        self._refused = None

    @property
    def began_at(self) -> int | None:
        """The position where the last round began; None if there is none to go back to."""
        return None if self._begun is None else self._begun[0]

    def put_back(self, leaves: Sequence[Any], to: int) -> bool:
        """Put every leaf back to where the round began, or to `to` if that is earlier. Returns False, and changes
        nothing, if a leaf cannot be cut there."""
        assert self._begun is not None
        at, marks = self._begun
        before = [leaf.mark() for leaf in leaves]
        _reset(leaves, marks)
        if to < at and not all(leaf.can_restore(None, to) for leaf in leaves):
            _reset(leaves, before)
            return False
        for leaf in leaves:
            if leaf.offset > min(at, to) or leaf.sliceable:
                leaf.restore(None, min(at, to))
        return True


def _reset(leaves: Sequence[Any], marks: Marks) -> None:
    for leaf, mark in zip(leaves, marks, strict=True):
        leaf.reset(mark)


def _arrays_in(mark: Any) -> list[mx.array]:
    if isinstance(mark, mx.array):
        return [mark]
    if isinstance(mark, dict):
        return _arrays_in(list(mark.values()))
    return [a for part in mark for a in _arrays_in(part)] if isinstance(mark, (list, tuple)) else []
