"""Makes a checkpoint of the tensors that a tier has read of it.

A checkpoint whose windows continue those of earlier points comes as a chain of contents, oldest first. Each becomes a
run; the last one is the checkpoint, and has all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import own_bytes
from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.runs import Run, Stretch
from onefold.cache.memory.state import CacheState
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import Content
from onefold.errors import RecordError

_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


class PointBuilder:
    def __init__(self, state: CacheState, layout: Layout, position: int) -> None:
        """For the checkpoint at this position."""
        self._state, self._layout, self._position = state, layout, position
        self._begin = max(0, position - state.model.window)
        """The entries of windows before this position are not needed."""
        self._stretches: dict[int, list[Stretch]] = {}
        """What was read of each leaf's window, by the leaf's number, oldest first."""

    def add(self, content: Content, read: dict[str, mx.array], run: Run, *, last: bool) -> Checkpoint | None:
        """Add the tensors of the next content, which was compared with the layout before; `run` owns them from now on
        if they are windows. Returns the checkpoint if this is the last; one that is no windows takes over the run's
        account. Raises RecordError if the model's layers do not accept it."""
        try:
            leaves = json.loads(content.state)["leaves"]
            in_runs = self._layout.are_windows(leaves) and self._state.model.window > 0
            if in_runs:
                self._add_windows(leaves, read, run)
            elif not last:
                raise RecordError(DiskReason.OTHER_LAYOUT)
            if not last:
                return None
            windows = {i: tuple(found) for i, found in self._stretches.items()} if in_runs else {}
            position, snapshots = self._state.model.revive(content.state, {} if in_runs else read, windows)
        except _NONSENSE as error:
            raise RecordError(DiskReason.NO_HEADER) from error
        if position != self._position or not self._state.model.accepts(self._state.store, snapshots, position):
            raise RecordError(DiskReason.OTHER_LAYOUT)
        account = self._state.ledger.open(Purpose.CHECKPOINT, 0) if in_runs else run.account
        return Checkpoint.of(position, snapshots, account)

    def clear(self) -> None:
        """Refer to no run any more."""
        self._stretches = {}

    def _add_windows(self, leaves: list[Any], read: dict[str, mx.array], run: Run) -> None:
        """Add the entries of each leaf's window that are needed to those of the contents before, which they continue.
        Entries that those have already are left out; those before the window only if they are more than half: a copy
        without them would take more memory for a moment."""
        for i, leaf in enumerate(leaves):
            if leaf is None:
                continue
            known = self._stretches.setdefault(i, [])
            for start, end, arrays in _parts(i, leaf, read):
                begin = start if 2 * (end - self._begin) >= end - start else self._begin
                at = max(start, begin, known[-1].end if known else 0)
                if known and start > known[-1].end:
                    known.clear()  # what this leaf needs begins here
                if at < end:
                    if at > start:
                        arrays = [own_bytes(a[..., at - start :, :]) for a in arrays]
                        device.evaluate(arrays)
                    known.append(run.add(arrays, at, end))


def _parts(i: int, leaf: dict[str, Any], read: dict[str, mx.array]) -> Iterator[tuple[int, int, list[mx.array]]]:
    """Yields keys and values of a leaf's window, with where they begin and end; takes them out of `read`."""
    end = int(leaf["end"])
    n = len(leaf["slots"]) // 2
    edges = leaf.get("runs") or [[end - read[f"state.{i}.0"].shape[2], end]]
    for r in range(n):
        arrays = [read.pop(f"state.{i}.{2 * r + j}") for j in range(2)]
        yield int(edges[r][0]), int(edges[r][1]), arrays
