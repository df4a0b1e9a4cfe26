"""The models of one cache, the target and perhaps its draft, as memory and tiers see them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from onefold.cache.memory.segment import Store
from onefold.cache.memory.shapes import LayerSpec
from onefold.cache.memory.track import Track
from onefold.cache.model.anatomy import Anatomy


class Models:
    def __init__(self, anatomies: Sequence[Anatomy]) -> None:
        self.anatomies = list(anatomies)
        self.specs: list[LayerSpec] = [spec for a in anatomies for spec in a.specs]
        """The arrays of each layer whose KV lies in slabs."""
        self.pointwise = any(a.pointwise for a in anatomies)
        """Whether resuming needs a checkpoint."""
        self.recurrent = any(a.recurrent for a in anatomies)
        """Whether some state is good for one point alone."""
        self.contiguous = any(a.contiguous for a in anatomies)
        """Whether a conversation must lie in one buffer."""
        self._empty: list[Any] | None = None
        """Layers that hold nothing, which are asked and never changed."""
        self._leaves = [leaf for a in anatomies for leaf in a.leaves if leaf.used]
        """In the order of a checkpoint's snapshots."""
        self.bounds = [a.bound.max_size for a in anatomies if a.bound is not None]

    def accepts(self, store: Store, snapshots: Sequence[Any], position: int) -> bool:
        """Whether layers of these models would take these snapshots, clamped to `position`; None is no snapshot."""
        if self._empty is None:
            self._empty = [leaf for a in self.anatomies for leaf in a.make(Track(store))[1]]
        layers = self._empty
        if len(layers) != len(snapshots):
            return False
        return all(s is None or x.can_restore(s, position) for x, s in zip(layers, snapshots, strict=True))

    def revive(self, described: str, arrays: dict[str, mx.array]) -> tuple[int, list[Any]]:
        """The position and the snapshots of a checkpoint that was described. Raises ValueError, KeyError or TypeError
        for nonsense."""
        said = json.loads(described)
        snapshots: list[Any] = []
        for i, (leaf, told) in enumerate(zip(self._leaves, said["leaves"], strict=True)):
            if told is None:
                snapshots.append(None)
                continue
            slots = [arrays[f"state.{i}.{j}"] if used else None for j, used in enumerate(told["slots"])]
            snapshots.append(leaf.revive(told, slots))
        return int(said["position"]), snapshots

    def describe(self) -> list[dict[str, Any]]:
        """What a checkpoint of these models is made of: an entry for each of its snapshots, in values that JSON has."""
        return [leaf.describe(a.bound) for a in self.anatomies for leaf in a.leaves if leaf.used]
