"""What a model keeps in one cache object, as far as it is known before there is a request.

A kind of layer is a subclass of `Leaf`, which knows the cache objects of mlx-lm that it stands for, and a live layer
(`base.Watched`) that it makes for each request. `kinds.KINDS` lists the kinds; nothing else names them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx

from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.memory.track import Track
from onefold.cache.model.kinds.base import ForwardListener, Snapshot
from onefold.cache.model.kinds.plain import Bound

Forms = dict[str, list[tuple[mx.Dtype, tuple[int, ...]] | None]]


class Leaf:
    """One cache object that holds state: a layer, or a member of a composite layer. As it stands it is the leaf of an
    object that no kind recognises, for which nothing can be reused."""

    kind: str = "unknown"
    """The word that reports use."""
    known: ClassVar[bool] = True
    sliceable: ClassVar[bool] = False
    """Its state lies in slabs and can be cut at any position."""
    one_point: ClassVar[bool] = False
    """Its state is good for the position where it was taken, and for no earlier one."""
    says_offset: ClassVar[bool] = True
    """mlx-lm's cache object says at which position it stands."""
    takes_bound: ClassVar[bool] = True
    """It does not grow without end under `max_kv_size`."""
    of_the_model: ClassVar[bool] = False
    """It is a cache class of the model's own: how it begins is not known without the model, nor what it grows by."""

    @classmethod
    def recognises(cls, cache: Any) -> bool:
        """Whether a cache object that mlx-lm or the model made is of this kind. Asks what it can do, not its name."""
        raise NotImplementedError

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        """`cache` is as the model makes it; `path` is its place among the layers and members of a composite one."""
        self.path = path
        self.class_name = type(cache).__name__
        self.used = True
        """The model writes to it."""
        self.spec: LayerSpec | None = None
        """Its arrays in a slab."""
        self.index = -1
        """Its place among the sliceable leaves."""
        self.codec: Any = None
        self.native: Any = None
        """The codec by which the model quantises this layer itself."""
        self.packed = False
        """It is handed out as mlx-lm's own quantised cache, which the stock attention reads."""
        self.plain: tuple[ArraySpec, ArraySpec] | None = None
        """Its keys and values, as the model makes them."""
        self.token_bytes = 0
        self.state_bytes = 0
        self.seen: Forms = {}
        """The arrays of a state, by name: type and shape after each forward of the survey, None where it was absent."""

    # -- the survey ----------------------------------------------------------------------------

    def see(self, cache: Any) -> None:
        """Note what the cache holds after a forward of the survey."""
        for name, array in self.state_of(cache).items():
            self.seen.setdefault(name, []).append(None if array is None else (array.dtype, tuple(array.shape)))

    def state_of(self, cache: Any) -> dict[str, mx.array | None]:
        """The arrays, by name, of a state whose shapes do not follow from its keys and values."""
        return {}

    def refusal(self, cache: Any) -> str:
        """Why what the cache holds cannot be kept; empty if it can."""
        return ""

    def read(self, cache: Any) -> None:
        """Read off a cache that was written to what it is made of."""
        self.used = cache.keys is not None
        if self.used:
            k, v = self.plain = key_values(cache)
            self.token_bytes = k.token_bytes + v.token_bytes

    def set_codec(self, codec: Any) -> None:
        """Keep its keys and values by `codec`. Sliceable kinds only."""
        raise NotImplementedError

    # -- requests ------------------------------------------------------------------------------

    def make(
        self,
        track: Track,
        listener: ForwardListener | None,
        *,
        first_index: int = 0,
        bound: Bound | None = None,
        always_handles: bool = False,
    ) -> Any:
        """A live layer for one request, empty."""
        raise NotImplementedError

    def point_bytes(self, offset: int, n_tokens: int) -> int:
        """The most bytes that its state takes beyond the slabs, after a forward of `n_tokens` at `offset`."""
        return 0

    # -- caches that mlx-lm made and filled -------------------------------------------------------

    def fits(self, cache: Any) -> bool:
        """Whether a cache of this kind, which was written to, has the shape that this model makes."""
        return cache.keys is not None and all(a.shape[0] == 1 for a in arrays_of(cache))

    def rewinds(self, cache: Any, to: int) -> bool:
        """Whether what the cache holds can be cut at `to`."""
        return bool(cache.offset == to)

    def bounded(self, cache: Any, bound: Bound) -> Any:
        """An empty cache of mlx-lm's in the place of `cache`, which is empty, that keeps to the bound."""
        return cache

    # -- checkpoints ---------------------------------------------------------------------------

    def describe(self, bound: Bound | None) -> dict[str, Any]:
        """The arrays of its snapshots in values that JSON has; see `tiers.records.layout`."""
        return {"in_ranges": False, "slots": [entries(a) for a in self.plain or ()]}

    def revive(self, described: dict[str, Any], arrays: list[mx.array | None]) -> Snapshot:
        """A snapshot that was described and read again. Raises KeyError, TypeError or ValueError for nonsense."""
        return Snapshot.revive(described, arrays)


class Unknown(Leaf):
    """The leaf of a cache object that no kind recognises."""

    known = False
    takes_bound = False


def arrays_of(cache: Any) -> list[mx.array]:
    """The keys' arrays, then the values'."""

    def parts(x: Any) -> list[mx.array]:
        return list(x) if isinstance(x, (tuple, list)) else [x]

    return parts(cache.keys) + parts(cache.values)


def key_values(cache: Any) -> tuple[ArraySpec, ArraySpec]:
    """The heads, dimension and type of a cache's keys and values, plain or packed."""

    def spec(array: Any) -> ArraySpec:
        if isinstance(array, (tuple, list)):  # packed words, scales and biases
            packed, scales = array[0], array[1]
            return ArraySpec(packed.shape[1], packed.shape[3] * 32 // cache.bits, scales.dtype)
        return ArraySpec(array.shape[1], array.shape[3], array.dtype)

    return spec(cache.keys), spec(cache.values)


def entries(a: ArraySpec) -> list[Any]:
    """The one form of a window's array: "entries" is as many as the window, or chunk, has at the leaf's end."""
    return [[type_name(a.dtype), [1, a.heads, "entries", a.dim]]]


def window(keep: int, size: int, arrays: Any) -> dict[str, Any]:
    return {"window": [keep, size], "slots": [entries(a) for a in arrays]}


def forms(seen: list[tuple[mx.Dtype, tuple[int, ...]] | None]) -> list[Any]:
    """The forms of a state's array, by type and number of axes; an axis that was seen with several lengths may have
    any, and null says that the array may be absent."""
    found: dict[tuple[str, int], list[Any]] = {}
    for one in seen:
        if one is not None:
            dtype, shape = one
            known = found.setdefault((type_name(dtype), len(shape)), list(shape))
            known[:] = [a if a == b else None for a, b in zip(known, shape, strict=True)]
    told: list[Any] = [[dtype, shape] for (dtype, _), shape in found.items()]
    return [*told, None] if None in seen else told


def type_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
