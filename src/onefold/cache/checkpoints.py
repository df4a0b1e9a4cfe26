"""Checkpoints: the state of every window and recurrent layer at one position, and which of them to keep.

- A checkpoint is about a point, a segment about a range. One that holds only windows that are not full yet
  can be clamped to any earlier point; a recurrent state cannot.
- At most `PER_PATH` stay on a path: the deepest first, then points where the tree branches, then those whose
  loss would cost the most, which thins a grid exponentially towards the start.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import mlx.core as mx

from onefold.cache.kinds.base import Snapshot
from onefold.cache.kinds.own import OwnSnapshot
from onefold.cache.ledger import Account
from onefold.cache.tree import Node

PER_PATH = 4
POINTS_SHARE = 4
"""Checkpoints have a quarter of the budget."""
GRID = 8192


class Checkpoint:
    """Snapshots by leaf; None where the leaf's state lies in the path's segments."""

    __slots__ = ("_closing", "_holders", "account", "position", "snapshots", "spanless")

    def __init__(self, position: int, snapshots: list[Any], account: Account, *, spanless: bool) -> None:
        self.position = position
        self.snapshots = snapshots
        self.account = account
        self.spanless = spanless
        """No leaf needs the path's segments: every one is in here."""
        self._holders = 0
        self._closing = False

    @property
    def bytes(self) -> int:
        return sum(s.size for s in self.snapshots if s is not None)

    def array_ids(self) -> set[int]:
        return {id(a) for s in self.snapshots if s is not None for a in s.arrays if a is not None}

    def hold(self) -> None:
        """It is being written elsewhere: its bytes are there, and counted, until `release`."""
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._closing and not self._holders:
            self.close()

    def close(self) -> None:
        if self._holders:
            self._closing = True
            return
        for snapshot in self.snapshots:
            if snapshot is not None:
                snapshot.close()
        self.snapshots = []
        self.account.close()

    def arrays(self) -> dict[str, mx.array]:
        """By name, in a fixed order: what it consists of, with `describe`."""
        return {
            f"state.{i}.{j}": a
            for i, s in enumerate(self.snapshots)
            if s is not None
            for j, a in enumerate(s.arrays)
            if a is not None
        }

    def describe(self) -> str:
        """The rest of it, as JSON. Raises ValueError or TypeError for what JSON does not have."""
        leaves = [None if s is None else s.describe() for s in self.snapshots]
        return json.dumps({"position": self.position, "leaves": leaves}, separators=(",", ":"), allow_nan=False)


def revive(described: str, arrays: dict[str, mx.array]) -> tuple[int, list[Any]]:
    """The position and the snapshots of a checkpoint that was described. Raises ValueError, KeyError or TypeError on
    nonsense."""
    said = json.loads(described)
    snapshots: list[Any] = []
    for i, leaf in enumerate(said["leaves"]):
        if leaf is None:
            snapshots.append(None)
            continue
        slots = [arrays[f"state.{i}.{j}"] if used else None for j, used in enumerate(leaf["slots"])]
        snapshots.append((OwnSnapshot if "names" in leaf else Snapshot).revive(leaf, slots))
    return int(said["position"]), snapshots


class Place(NamedTuple):
    """A checkpoint on a path, as far as keeping it goes."""

    position: int
    branches: bool
    """Another conversation goes off here."""


def surplus(places: list[Place], limit: int = PER_PATH) -> list[int]:
    """Positions to give up, for a path whose checkpoints are `places` (shallow to deep)."""
    kept, gone = sorted(places), list[int]()
    while len(kept) > limit:
        end = kept[-1].position

        def worth(i: int, kept: list[Place] = kept, end: int = end) -> tuple[bool, float]:
            before = kept[i - 1].position if i else 0
            lost = kept[i].position - before  # tokens to prefill again if this one is gone
            return kept[i].branches, lost / (end - kept[i].position + 1)

        victim = min(range(len(kept) - 1), key=worth)
        gone.append(kept.pop(victim).position)
    return gone


def superfluous(held: list[Node]) -> list[Node]:
    """Of the nodes of a path that have a checkpoint, those whose checkpoint is to go."""
    gone = set(surplus([Place(n.end, len(n.children) > 1) for n in held]))
    return [n for n in held if n.end in gone]


def wanted(position: int, last: int, prompt_tokens: int, asked: frozenset[int]) -> bool:
    """Whether a forward boundary at `position` deserves a checkpoint, the last one being at `last`."""
    if position <= last:
        return False
    if position in asked:
        return True
    if position >= prompt_tokens - 1 > last:
        return True
    return position // GRID > last // GRID
