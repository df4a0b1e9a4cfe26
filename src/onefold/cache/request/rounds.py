"""Rounds of speculative decoding: keeps the state at the beginning of each, so that rejected tokens can be removed.

Layers whose state belongs to one position cannot be rewound by cutting. If a draft model runs with the target, every
leaf's state at the beginning of a round is kept; a rewind restores it, and feeds the accepted tokens again.
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
        """The position where the last round began, and every leaf's state there."""
        self._moved: dict[int, int] = {}
        """The former positions, by id, of leaves that a rewind has moved and whose own `trim` is still to come."""
        self._refused: int | None = None
        """The target of a rewind that was not possible."""

    def forget(self) -> None:
        self._begun = None

    def mark(self, position: int, leaves: Sequence[Any], *, again: bool) -> None:
        """Keep the leaves' state at `position`, where a round begins, if `again` is set or no round began so early."""
        if again or self._begun is None or self._begun[0] > position:
            self._begun = (position, [leaf.mark() for leaf in leaves])

    def rotated(self, leaves: Sequence[Any]) -> None:
        """Mark the sliceable leaves again, because they have become rings. A ring that has not wrapped can be cut to
        any earlier position, so this mark serves for the beginning of the round."""
        if self._begun is not None:
            at, marks = self._begun
            pairs = zip(leaves, marks, strict=True)
            self._begun = (at, [x.mark() if x.sliceable else m for x, m in pairs])

    def bytes(self, leaves: Sequence[Any]) -> int:
        """Returns the bytes of the state at the beginning of the round that the live state does not share."""
        if self._begun is None:
            return 0
        live = {id(a) for leaf in leaves for a in leaf.live_arrays()}
        kept = {id(a): a for mark in self._begun[1] for a in _arrays_in(mark)}
        return sum(a.nbytes for i, a in kept.items() if i not in live)

    # -- rewinds -------------------------------------------------------------------------------

    def moved_already(self, layer: Any) -> int | None:
        """Returns by how many tokens a rewind of another leaf has moved this one. If it has not, returns None and
        forgets the rewind."""
        if id(layer) in self._moved:
            return int(self._moved.pop(id(layer)) - layer.offset)
        self._moved = {}
        return None

    def move(self, before: dict[int, int]) -> None:
        """Note that a rewind has moved all leaves. `before` has the former positions, by id, of the other leaves."""
        self._moved = before

    def refuse(self, to: int) -> None:
        """Note that a rewind to `to` was not possible."""
        self._refused = to

    def check_refused(self, position: int) -> None:
        """Raises LeaseError if the layers hold tokens that a refused rewind should have removed: callers do not check
        the result of `trim`."""
        if self._refused is not None and position > self._refused:
            raise LeaseError(
                f"the layers could not be rewound from position {position} to {self._refused}, and still hold the "
                "rejected tokens: open another lease, or pass draft_model= to PrefixCache"
            )
        self._refused = None

    @property
    def began_at(self) -> int | None:
        """The position where the last round began; None if no round is kept."""
        return None if self._begun is None else self._begun[0]

    def put_back(self, leaves: Sequence[Any], to: int) -> bool:
        """Restore every leaf to where the round began, or to `to` if that is earlier. Returns False, and changes
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
