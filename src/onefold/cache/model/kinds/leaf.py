"""Describes the content of one cache object of a model, before there is a request.

A kind of layer is a subclass of `Leaf`, which recognises cache objects of mlx-lm, and a live layer (`base.Watched`),
which it makes for each request. `registry.KINDS` lists the kinds; no other file names them.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.runs import Stretch
from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.memory.track import Track
from onefold.cache.model.formats.codec import StockForm
from onefold.cache.model.kinds.base import ForwardListener, Snapshot
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.step_plan import StepPlan

Forms = dict[str, list[tuple[mx.Dtype, tuple[int, ...]] | None]]


class Making(NamedTuple):
    """What a live layer of one request is made with."""

    track: Track
    """Where sliceable layers have their KV."""
    listener: ForwardListener | None = None
    """The owner of the layer; None for a layer that stands alone."""
    first_index: int = 0
    """Where the model's sliceable layers begin among those of all models."""
    bound: Bound | None = None
    always_handles: bool = False
    """Return handles even where a plain slice would do, to test whether the model takes them."""
    plan: StepPlan | None = None
    """Shared by the layers of one request and model."""


class Leaf:
    """One cache object that holds state: a layer, or a member of a composite layer. The base class of the kinds."""

    kind: str = "unknown"
    """The name of the kind in reports."""
    known: ClassVar[bool] = True
    sliceable: ClassVar[bool] = False
    """Its state lies in slabs and can be cut at any position."""
    one_point: ClassVar[bool] = False
    """Its state can be restored only at the position where it was taken."""
    says_offset: ClassVar[bool] = True
    """mlx-lm's cache object has its position as `offset`."""
    takes_bound: ClassVar[bool] = True
    """`max_kv_size` limits its size."""
    of_the_model: ClassVar[bool] = False
    """It is a cache class of the model's own: its initial state and its growth are not known without the model."""

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        """Whether a cache object that mlx-lm or the model made is of this kind. Checks attributes, not the class."""
        raise NotImplementedError

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        """`cache` is as the model makes it; `path` is the index of its layer, and of its members in composite ones."""
        self.path = path
        self.class_name = type(cache).__name__
        self.used = True
        """The model writes to it."""
        self.spec: LayerSpec | None = None
        """Its arrays in a slab."""
        self.index = -1
        """Its index among the sliceable leaves."""
        self.codec: Any = None
        self.native: StockForm | None = None
        """How the model quantises this layer itself; None if it does not."""
        self.packed = False
        """Its live layer is mlx-lm's own quantised cache, which the stock attention reads."""
        self.plain: tuple[ArraySpec, ArraySpec] | None = None
        """The shapes of its keys and values, as the model makes them."""
        self.token_bytes = 0
        self.state_bytes = 0
        self.seen: Forms = {}
        """The arrays of a state, by name: type and shape after each forward of the survey, None where it was absent."""

    @property
    def joined_bytes(self) -> int:
        """The bytes of a token when the layer's pieces are concatenated for a forward: decoded (on a CPU in 32 bits),
        and once more."""
        if self.codec is None or self.codec.plain or self.plain is None:
            return self.token_bytes
        return 2 * sum(a.heads * a.dim * (a.dtype.size if device.on_gpu() else 4) for a in self.plain)

    # -- the survey ----------------------------------------------------------------------------

    def see(self, cache: Any) -> None:
        """Record the types and shapes of the cache's state after a forward of the survey."""
        for name, array in self.state_of(cache).items():
            self.seen.setdefault(name, []).append(None if array is None else (array.dtype, tuple(array.shape)))

    def state_of(self, cache: Any) -> dict[str, mx.array | None]:
        """Returns the arrays, by name, of a state that does not consist of keys and values."""
        return {}

    def refusal(self, cache: Any) -> str:
        """Returns the reason why the cache's state cannot be stored; empty if it can."""
        return ""

    def read(self, cache: Any) -> None:
        """Read shapes and sizes from a cache that was written to."""
        self.used = cache.keys is not None
        if self.used:
            k, v = self.plain = key_values(cache)
            self.token_bytes = k.token_bytes + v.token_bytes

    def set_codec(self, codec: Any) -> None:
        """Encode its keys and values with `codec`. Sliceable kinds only."""
        raise NotImplementedError

    # -- requests ------------------------------------------------------------------------------

    def make(self, given: Making) -> Any:
        """Returns an empty live layer for one request."""
        raise NotImplementedError

    def point_bytes(self, offset: int, n_tokens: int) -> int:
        """Returns the most bytes that its state takes outside of slabs, after a forward of `n_tokens` at `offset`."""
        return 0

    # -- caches that mlx-lm made and filled -------------------------------------------------------

    def fits(self, cache: Any) -> bool:
        """Whether a cache of this kind that was written to has the shapes of this model."""
        return cache.keys is not None and all(a.shape[0] == 1 for a in arrays_of(cache))

    def rewinds(self, cache: Any, to: int) -> bool:
        """Whether the cache's state can be cut at `to`."""
        return bool(cache.offset == to)

    def bounded(self, cache: Any, bound: Bound) -> Any:
        """Returns an empty cache of mlx-lm's that keeps to the bound, in place of the empty `cache`."""
        return cache

    # -- checkpoints ---------------------------------------------------------------------------

    def describe(self, bound: Bound | None) -> dict[str, Any]:
        """Returns the layout of its snapshots' arrays, in values that JSON has; see `tiers.records.layout`."""
        return {"in_ranges": False, "slots": [entries(a) for a in self.plain or ()]}

    def revive(self, described: dict[str, Any], arrays: list[mx.array | None]) -> Snapshot:
        """Returns a snapshot from its description and arrays. Raises KeyError, TypeError or ValueError if the
        description is invalid."""
        return Snapshot.revive(described, arrays)

    @property
    def window(self) -> int:
        """The entries of a window whose snapshots share runs; 0 of every other kind."""
        return 0

    def revive_window(self, described: dict[str, Any], stretches: tuple[Stretch, ...]) -> Snapshot:
        """Returns a snapshot of a window from its description and the stretches that have its entries. Raises KeyError,
        TypeError or ValueError if the description is invalid, or some entries are missing."""
        raise ValueError("not a window")


class Unknown(Leaf):
    """The leaf of a cache object that no kind recognises. Nothing of it can be reused."""

    known = False
    takes_bound = False


def arrays_of(cache: Any) -> list[mx.array]:
    """Returns the keys' arrays, then the values'."""

    def parts(x: Any) -> list[mx.array]:
        return list(x) if isinstance(x, (tuple, list)) else [x]

    return parts(cache.keys) + parts(cache.values)


def key_values(cache: Any) -> tuple[ArraySpec, ArraySpec]:
    """Returns the heads, dimension and type of a cache's keys and values, plain or packed."""

    def spec(array: Any) -> ArraySpec:
        if isinstance(array, (tuple, list)):  # packed words, scales and biases
            packed, scales = array[0], array[1]
            return ArraySpec(packed.shape[1], packed.shape[3] * 32 // cache.bits, scales.dtype)
        return ArraySpec(array.shape[1], array.shape[3], array.dtype)

    return spec(cache.keys), spec(cache.values)


def entries(a: ArraySpec) -> list[Any]:
    """Returns the only form of a window's array. "entries" is the number of entries of the window, or chunk, at the
    snapshot's end."""
    return [[type_name(a.dtype), [1, a.heads, "entries", a.dim]]]


def window(keep: int, size: int, arrays: Any) -> dict[str, Any]:
    return {"window": [keep, size], "slots": [entries(a) for a in arrays]}


def forms(seen: list[tuple[mx.Dtype, tuple[int, ...]] | None]) -> list[Any]:
    """Returns the forms of a state's array, by type and number of axes. An axis that was seen with several lengths may
    have any; a None among the forms means that the array may be absent."""
    found: dict[tuple[str, int], list[Any]] = {}
    for one in seen:
        if one is not None:
            dtype, shape = one
            known = found.setdefault((type_name(dtype), len(shape)), list(shape))
            known[:] = [a if a == b else None for a, b in zip(known, shape, strict=True)]
    known_forms: list[Any] = [[dtype, shape] for (dtype, _), shape in found.items()]
    return [*known_forms, None] if None in seen else known_forms


def type_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
