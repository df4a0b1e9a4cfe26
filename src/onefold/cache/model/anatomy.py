"""The anatomy of a model's cache, and the only factory of its live layers.

- `survey` makes it. A model that cannot take handles in place of arrays is `contiguous`: its KV is one buffer.
- `Anatomy.make` makes every live layer in Onefold, so that a bound (`max_kv_size`) applies to all of them.
- A model with caches that Onefold does not recognise is not cached; `reason` gives the reason.

Knows nothing of trees, leases or budgets.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.segment import round_up
from onefold.cache.memory.shapes import LayerSpec
from onefold.cache.memory.track import Track
from onefold.cache.model.fused import FEW_QUERIES, is_fused
from onefold.cache.model.kernels import current
from onefold.cache.model.kernels.decode import BLANK, MOST_SCHEDULED, Shape, scratch_bytes
from onefold.cache.model.kernels.work_table import MOST_QUERIES
from onefold.cache.model.kinds.base import ForwardListener
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.composite import CompositeLayer
from onefold.cache.model.kinds.leaf import Leaf, Making
from onefold.cache.model.kinds.rotating import ring_entries
from onefold.cache.model.region_plan import padding
from onefold.cache.model.step_plan import StepPlan

SCRATCH_TOKENS = 64
"""Scratch is estimated for a multiple of so many tokens."""


class StepBytes(NamedTuple):
    """The scratch of decode steps of some rows."""

    rows: int
    least: int
    """Of rows of one token each."""
    per_token: int
    padded: int
    """Of one column of the scores that no row sees."""

    def at(self, tokens: int, longest: int) -> int:
        """Returns the bytes where rows have so many tokens together, and the longest of them so many."""
        padded = self.padded * padding(self.rows, tokens)
        return self.least + self.per_token * (longest - 1) * (-(-tokens // longest) + 1) + padded


@dataclass
class Anatomy:
    """The shape of one model's cache. `reason` is empty if its KV can be reused."""

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
    hides_offsets: bool = False
    """The model does not report to its recurrent layers how many tokens passed; `seam.watch` does."""
    notes: list[str] = field(default_factory=list)
    uncached_state_bytes: int = 0
    """The initial bytes of the caches of a model that runs uncached."""
    uncached_token_bytes: int | None = None
    """The bytes that they grow by per token; None if that could not be measured."""
    logit_tokens: int | None = None
    """The logits of a forward with more tokens than this are never evaluated."""

    @property
    def sliceable(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.sliceable and leaf.used]

    @property
    def specs(self) -> list[LayerSpec]:
        return [leaf.spec for leaf in self.sliceable if leaf.spec is not None]

    @property
    def made_type(self) -> mx.Dtype | None:
        """The type of the keys of its sliceable layers, as the model makes them."""
        return next((leaf.plain[0].dtype for leaf in self.sliceable if leaf.plain is not None), None)

    @property
    def recurrent(self) -> bool:
        """Whether some layer's state can be restored only at the position where it was taken."""
        return any(leaf.one_point and leaf.used for leaf in self.leaves)

    @property
    def own(self) -> bool:
        """Whether some layers are of a class of the model's own, which can only be copied whole."""
        return any(leaf.of_the_model for leaf in self.leaves)

    @functools.cached_property
    def needs_checkpoints(self) -> bool:
        """Whether resuming needs a checkpoint."""
        return any(not leaf.sliceable and leaf.used for leaf in self.leaves)

    @property
    def kinds(self) -> dict[str, int]:
        counted: dict[str, int] = {}
        for leaf in self.leaves:
            counted[leaf.kind] = counted.get(leaf.kind, 0) + 1
        return counted

    def make(
        self,
        track: Track,
        listener: ForwardListener | None = None,
        *,
        first_index: int = 0,
        always_handles: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Makes the layers of one request: nested as mlx-lm expects them, and as a flat list of those that hold
        state."""
        given = Making(track, listener, first_index, self.bound, always_handles, StepPlan())
        flat = {leaf.path: leaf.make(given) for leaf in self.leaves}
        made = [_nest(flat, (i,)) for i in range(self.n_layers)]
        return made, [flat[leaf.path] for leaf in self.leaves if leaf.used]

    def compile_kernels(self) -> None:
        """Compile the device's kernels for this model, unless that is done. A variant that is compiled in the middle of
        a step delays it by a second or two."""
        kernel = current.kernel()
        if kernel is None or self.contiguous:
            return
        for leaf, shape in self._kernel_shapes():
            blank = [mx.zeros((1, a.heads, BLANK, a.dim), a.dtype) for a in leaf.spec.arrays]
            kernel.compile_all(shape, self.heads, leaf.plain[0].heads, blank)
            if leaf.codec.coding is not None:
                current.compile_coding(leaf.codec.coding)

    @property
    def is_in_kernel(self) -> bool:
        """Whether the device's kernel computes all attention of a decode step, and is faster than MLX's own."""
        kernel = current.kernel()
        if kernel is None or not kernel.replaces_stock or self.contiguous or len(self.sliceable) < len(self.leaves):
            return False
        shapes = {shape for _, shape in self._kernel_shapes()}
        return bool(shapes) and not any(kernel.shape_reason(shape) for shape in shapes)

    def _kernel_shapes(self) -> list[tuple[Any, Shape]]:
        """Returns the layers that a kernel may read, with what it is compiled for."""
        found = [(leaf, leaf.plain) for leaf in self.sliceable if leaf.spec is not None and leaf.plain is not None]
        return [(x, Shape(k.dim, v.dim, k.dtype, x.codec.kernel_format)) for x, (k, v) in found]

    # -- bytes ---------------------------------------------------------------------------

    def scratch_bytes(self, n_tokens: int, total_tokens: int, *, joins: bool = True) -> int:
        """Returns an upper estimate of one forward's activations and attention scratch. Where attention is fused, the
        scores of a chunk are never stored whole. `joins`: whether the pieces of a layer may be concatenated. It is the
        same for every `SCRATCH_TOKENS` tokens, so most decode steps need not change their reservation."""
        total_tokens = round_up(total_tokens, SCRATCH_TOKENS)
        per_token = self.widest * self.itemsize * 8
        scores = 3 * self.heads * n_tokens * total_tokens * 4
        if self._is_fused(n_tokens):
            few = min(n_tokens, FEW_QUERIES)
            scores = (3 * self.heads * few * 4 + 2 * n_tokens) * total_tokens
        joined = max((leaf.joined_bytes for leaf in self.leaves), default=0) * total_tokens if joins else 0
        evaluated = n_tokens if self.logit_tokens is None else min(n_tokens, self.logit_tokens)
        logits = 3 * evaluated * self.vocab * max(4, self.itemsize)
        partials = self._kernel_bytes(1, n_tokens)
        return n_tokens * per_token + scores + joined + logits + partials + (1 << 16)

    def step_bytes(self, rows: int) -> StepBytes:
        """Returns an upper estimate of the scratch of decode steps of so many rows."""
        least, more = (self.scratch_bytes(1, n, joins=self._joins) for n in (1, SCRATCH_TOKENS + 1))
        padded = 0 if device.on_gpu() else 3 * self.heads * 4
        return StepBytes(rows, rows * least + self._kernel_bytes(rows, 1), (more - least) // SCRATCH_TOKENS, padded)

    def _kernel_bytes(self, rows: int, queries: int) -> int:
        """Returns the most bytes of the decode kernel's partial results. The device may hold those of all layers at
        once, because a step is scheduled whole, and those of a prompt's chunk up to `MOST_SCHEDULED`."""
        kernel = current.kernel()
        if self.contiguous or kernel is None or queries > kernel.most_queries:
            return 0
        found = [leaf.plain for leaf in self.sliceable if leaf.plain is not None]
        each = [scratch_bytes(rows, queries, self.heads, k.heads, v.dim) for k, v in found]
        return sum(each) if queries <= MOST_QUERIES else min(sum(each), MOST_SCHEDULED + max(each, default=0))

    @property
    def _joins(self) -> bool:
        """Whether a decode step may concatenate a layer's pieces."""
        return self.contiguous or any(leaf.codec is not None and not leaf.codec.plain for leaf in self.leaves)

    def _is_fused(self, n_tokens: int) -> bool:
        """Whether no layer's attention stores the scores of a forward of so many tokens whole. Models outside the seam
        may do so themselves."""
        if self.contiguous or not device.on_gpu():
            return False
        shapes = {(k.dim, v.dim, k.heads) for k, v in (leaf.plain for leaf in self.leaves if leaf.plain is not None)}
        return all(is_fused(n_tokens, k, v, -(-self.heads // heads)) for k, v, heads in shapes)

    def point_bytes(self, offset: int, n_tokens: int) -> int:
        """Returns the most bytes that windows and recurrent states occupy after a forward of `n_tokens` at `offset`."""
        return sum(leaf.point_bytes(offset, n_tokens) for leaf in self.leaves if leaf.used)

    def ring_bytes(self, offset: int, n_tokens: int) -> int:
        """Returns the most bytes that bounded layers occupy once they have become rings; 0 without a bound."""
        if self.bound is None:
            return 0
        entries = ring_entries(self.bound.max_size, offset, n_tokens)
        return entries * sum(leaf.token_bytes for leaf in self.sliceable)


def _nest(flat: dict[tuple[int, ...], Any], path: tuple[int, ...]) -> Any:
    if path in flat:
        return flat[path]
    n = 1 + max(p[len(path)] for p in flat if p[: len(path)] == path)
    return CompositeLayer(*(_nest(flat, (*path, i)) for i in range(n)))
