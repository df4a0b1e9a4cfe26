"""The models of one cache, the target and optionally a draft, as memory and tiers see them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from onefold.cache.memory.runs import Stretch
from onefold.cache.memory.segment import Store
from onefold.cache.memory.shapes import LayerSpec
from onefold.cache.memory.track import Track
from onefold.cache.model.anatomy import Anatomy


class Models:
    def __init__(self, anatomies: Sequence[Anatomy]) -> None:
        self.anatomies = list(anatomies)
        self.specs: list[LayerSpec] = [spec for a in anatomies for spec in a.specs]
        """The arrays of each layer whose KV lies in slabs."""
        self.needs_checkpoints = any(a.needs_checkpoints for a in anatomies)
        """Whether resuming needs a checkpoint."""
        self.recurrent = any(a.recurrent for a in anatomies)
        """Whether some layer's state can be restored only at the position where it was taken."""
        self.contiguous = any(a.contiguous for a in anatomies)
        """Whether a conversation must lie in one buffer."""
        self._empty: list[Any] | None = None
        """Empty layers, for `can_restore`; never changed."""
        self._leaves = [leaf for a in anatomies for leaf in a.leaves if leaf.used]
        """The leaves in the order of a checkpoint's snapshots."""
        self.bounds = [a.bound.max_size for a in anatomies if a.bound is not None]
        whole = self.recurrent or bool(self.bounds)
        self.window = 0 if whole else max((leaf.window for leaf in self._leaves), default=0)
        """The most entries of a window whose snapshots share runs; 0 if there is none, or other states or a bound."""

    def accepts(self, store: Store, snapshots: Sequence[Any], position: int) -> bool:
        """Whether layers of these models accept these snapshots, clamped to `position`; None is no snapshot."""
        if self._empty is None:
            self._empty = [leaf for a in self.anatomies for leaf in a.make(Track(store))[1]]
        layers = self._empty
        if len(layers) != len(snapshots):
            return False
        return all(s is None or x.can_restore(s, position) for x, s in zip(layers, snapshots, strict=True))

    def revive(
        self, described: str, arrays: dict[str, mx.array], windows: Mapping[int, tuple[Stretch, ...]]
    ) -> tuple[int, list[Any]]:
        """Returns the position and the snapshots of a checkpoint from its description and arrays, or the stretches of
        its windows, by the leaf's number. Raises ValueError, KeyError or TypeError if the description is invalid."""
        checkpoint = json.loads(described)
        snapshots: list[Any] = []
        for i, (leaf, snapshot) in enumerate(zip(self._leaves, checkpoint["leaves"], strict=True)):
            if snapshot is None:
                snapshots.append(None)
                continue
            if i in windows:
                snapshots.append(leaf.revive_window(snapshot, windows[i]))
                continue
            slots = [arrays[f"state.{i}.{j}"] if used else None for j, used in enumerate(snapshot["slots"])]
            snapshots.append(leaf.revive(snapshot, slots))
        return int(checkpoint["position"]), snapshots

    def describe(self) -> list[dict[str, Any]]:
        """Returns the layout of a checkpoint of these models: an entry for each snapshot, in values that JSON has."""
        return [leaf.describe(a.bound) for a in self.anatomies for leaf in a.leaves if leaf.used]
