"""What a model's cache is made of, and the one factory that makes it.

- `survey` finds it out. A model that cannot take handles in place of arrays is `contiguous`: it gets one buffer.
- Every live cache in Onefold is made by `Anatomy.make`: a bound (`max_kv_size`) given once is everywhere.
- What is not understood is not cached: `reason` says why.

Knows nothing of trees, leases or budgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.segment import ArraySpec, LayerSpec
from onefold.cache.memory.track import Track
from onefold.cache.model.kinds.base import ForwardListener
from onefold.cache.model.kinds.chunked import ChunkedLayer
from onefold.cache.model.kinds.composite import CompositeLayer
from onefold.cache.model.kinds.full import Bound, PlainCodec, SegmentedLayer
from onefold.cache.model.kinds.own import OwnLayer
from onefold.cache.model.kinds.quantized import AffineCodec, PackedLayer
from onefold.cache.model.kinds.recurrent import RecurrentLayer
from onefold.cache.model.kinds.rotating import RotatingLayer
from onefold.cache.model.stock import SLICEABLE, Kind
from onefold.errors import ConfigError


@dataclass(frozen=True)
class KvFormat:
    """How KV is kept: 16 (as the model makes it), 8 or 4 bits (affine, mlx-lm's own)."""

    bits: int = 16

    @classmethod
    def parse(cls, kv: str | int) -> KvFormat:
        text = str(kv).strip()
        if text not in ("16", "8", "4"):
            raise ConfigError(f"kv must be '16', '8' or '4', got {kv!r}")
        return cls(int(text))

    def codec(self, k: ArraySpec, v: ArraySpec) -> PlainCodec | AffineCodec:
        if self.bits < 16:
            for group in (64, 32):
                if k.dim % group == 0 and v.dim % group == 0:
                    return AffineCodec(self.bits, group)
        return PlainCodec()


@dataclass
class Leaf:
    """One cache object that holds state: a layer, or a member of a composite layer."""

    kind: Kind
    path: tuple[int, ...]
    used: bool = True
    spec: LayerSpec | None = None
    index: int = -1  # among the sliceable ones
    codec: Any = None
    size: int = 0  # slots of a recurrent layer
    window: tuple[int, int] = (0, 0)  # max_size and keep, or chunk_size
    token_bytes: int = 0
    state_bytes: int = 0
    plain: tuple[ArraySpec, ArraySpec] | None = None
    native: AffineCodec | None = None
    """The model quantises this layer by itself."""
    packed: bool = False
    """It is handed out as mlx-lm's own quantised cache, which the stock attention reads."""
    pristine: Any = None
    """As the model makes it: a cache class of the model's own."""
    class_name: str = ""
    seen: dict[str, list[tuple[mx.Dtype, tuple[int, ...]] | None]] = field(default_factory=dict)
    """Of a recurrent layer's slots, and of a model's own class' attributes: what was there after each forward of the
    survey, None for nothing."""

    def see(self, cache: Any) -> None:
        """Note what a cache holds now."""
        if self.kind is Kind.RECURRENT:
            held: dict[str, Any] = {str(slot): array for slot, array in enumerate(cache.cache)}
        elif self.kind is Kind.OWN:
            held = {n: v for n, v in getattr(cache, "__dict__", {}).items() if isinstance(v, mx.array)}
        else:
            return
        for name, array in held.items():
            self.seen.setdefault(name, []).append(None if array is None else (array.dtype, tuple(array.shape)))


@dataclass
class Anatomy:
    """The shape of one model's cache. `reason` is empty if it can be reused."""

    leaves: list[Leaf]
    n_layers: int
    reason: str = ""
    contiguous: bool = False
    ragged: bool = False
    bound: Bound | None = None
    widest: int = 0
    vocab: int = 0
    heads: int = 1
    itemsize: int = 4
    silent: bool = False
    """The recurrent layers are not told how many tokens passed, but by `stock.watch`."""
    notes: list[str] = field(default_factory=list)
    uncached_state_bytes: int = 0
    """What the caches of a model that runs uncached begin with."""
    uncached_token_bytes: int | None = None
    """What they grow by per token; None if that could not be seen."""
    logit_tokens: int | None = None
    """Of a longer forward than this the logits are never evaluated."""

    @property
    def sliceable(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind in SLICEABLE and leaf.used]

    @property
    def specs(self) -> list[LayerSpec]:
        return [leaf.spec for leaf in self.sliceable if leaf.spec is not None]

    @property
    def recurrent(self) -> bool:
        """Whether some state is good for one point alone."""
        return any(leaf.kind in (Kind.RECURRENT, Kind.OWN) and leaf.used for leaf in self.leaves)

    @property
    def own(self) -> bool:
        """Whether some layers are of a class of the model's own, which can only be copied whole."""
        return any(leaf.kind is Kind.OWN for leaf in self.leaves)

    @property
    def pointwise(self) -> bool:
        """Whether resuming needs a checkpoint."""
        return any(leaf.kind not in SLICEABLE and leaf.used for leaf in self.leaves)

    @property
    def kinds(self) -> dict[str, int]:
        counted: dict[str, int] = {}
        for leaf in self.leaves:
            counted[leaf.kind.value] = counted.get(leaf.kind.value, 0) + 1
        return counted

    def make(
        self,
        track: Track,
        pulse: ForwardListener | None = None,
        *,
        first_index: int = 0,
        always_handles: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """The factory: layers as mlx-lm wants them, and the leaves that hold state, flat."""
        made: list[Any] = []
        flat: dict[tuple[int, ...], Any] = {}
        for leaf in self.leaves:
            flat[leaf.path] = self._make_leaf(leaf, track, pulse, first_index, always_handles)
        for i in range(self.n_layers):
            made.append(_nest(flat, (i,)))
        return made, [flat[leaf.path] for leaf in self.leaves if leaf.used]

    def _make_leaf(
        self, leaf: Leaf, track: Track, pulse: ForwardListener | None, first_index: int, always_handles: bool
    ) -> Any:
        if leaf.kind in SLICEABLE:
            index = first_index + max(0, leaf.index)
            if leaf.packed:
                return PackedLayer(track, index, leaf.codec, pulse=pulse)
            return SegmentedLayer(
                track, index, leaf.codec, pulse=pulse, bound=self.bound, always_handles=always_handles
            )
        if leaf.kind is Kind.ROTATING:
            return RotatingLayer(*leaf.window, pulse=pulse)
        if leaf.kind is Kind.CHUNKED:
            return ChunkedLayer(leaf.window[0], pulse=pulse)
        if leaf.kind is Kind.OWN:
            return OwnLayer.like(leaf.pristine, pulse)
        return RecurrentLayer(leaf.size, pulse=pulse)

    # -- bytes ---------------------------------------------------------------------------

    def scratch_bytes(self, n_tokens: int, total_tokens: int, *, joins: bool = True) -> int:
        """An upper estimate of one forward's activations and attention scratch. On a GPU a chunk's scores are never
        laid out whole, unless the model does so itself (those outside the seam). `joins` says whether the pieces of a
        layer may be put side by side."""
        per_token = self.widest * self.itemsize * 8
        scores = 3 * self.heads * n_tokens * total_tokens * 4
        if device.on_gpu() and not self.contiguous:
            few = min(n_tokens, 16)
            scores = (3 * self.heads * few * 4 + 2 * n_tokens) * total_tokens
        joined = max((leaf.token_bytes for leaf in self.leaves), default=0) * total_tokens if joins else 0
        spoken = n_tokens if self.logit_tokens is None else min(n_tokens, self.logit_tokens)
        logits = 3 * spoken * self.vocab * max(4, self.itemsize)
        return n_tokens * per_token + scores + joined + logits + (1 << 16)

    def point_bytes(self, offset: int, n_tokens: int) -> int:
        """What windows and recurrent states may occupy after a forward of `n_tokens` at `offset`."""
        total = 0
        for leaf in self.leaves:
            if not leaf.used or leaf.kind in SLICEABLE:
                continue
            if leaf.kind is Kind.RECURRENT:
                total += leaf.state_bytes
            elif leaf.kind is Kind.OWN:
                total += leaf.state_bytes + leaf.token_bytes * (offset + n_tokens)
            elif leaf.kind is Kind.ROTATING:
                total += ring_entries(leaf.window[0], offset, n_tokens) * leaf.token_bytes
            else:
                entries = min(offset, leaf.window[0] + 256) + math.ceil(n_tokens / 256) * 256 + 256
                total += entries * leaf.token_bytes
        return total

    def ring_bytes(self, offset: int, n_tokens: int) -> int:
        """What bounded layers may occupy once they have become rings."""
        if self.bound is None:
            return 0
        entries = ring_entries(self.bound.max_size, offset, n_tokens)
        return entries * sum(leaf.token_bytes for leaf in self.sliceable)


def ring_entries(max_size: int, offset: int, n_tokens: int) -> int:
    """The most entries that a ring's buffer can have after a forward."""
    if n_tokens > 1:
        return min(offset, max_size + n_tokens) + n_tokens
    return max(max_size, min(offset, 2 * max_size)) if offset + 256 >= max_size else offset + 256


def _nest(flat: dict[tuple[int, ...], Any], path: tuple[int, ...]) -> Any:
    if path in flat:
        return flat[path]
    n = 1 + max(p[len(path)] for p in flat if p[: len(path)] == path)
    return CompositeLayer(*(_nest(flat, (*path, i)) for i in range(n)))
