"""The kinds of layers. To add one, add a file in this folder and a line in `KINDS`: see docs/extending.md."""

from __future__ import annotations

from typing import Any

from onefold.cache.model import stock
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.chunked import ChunkedLeaf
from onefold.cache.model.kinds.full import FullLeaf
from onefold.cache.model.kinds.leaf import Leaf, Unknown
from onefold.cache.model.kinds.own import OwnLeaf
from onefold.cache.model.kinds.quantized import QuantizedLeaf
from onefold.cache.model.kinds.recurrent import RecurrentLeaf
from onefold.cache.model.kinds.rotating import RotatingLeaf

KINDS: list[type[Leaf]] = [
    RecurrentLeaf,
    ChunkedLeaf,
    RotatingLeaf,
    QuantizedLeaf,
    FullLeaf,
    OwnLeaf,
]
"""The first one that recognises a cache object is its kind."""


def kind_of(cache: Any) -> type[Leaf]:
    """Returns the kind of a cache object that is not composite; `Unknown` if no kind recognises it."""
    return next((kind for kind in KINDS if kind.recognises(cache)), Unknown)


def leaves_of(caches: list[Any]) -> list[Leaf]:
    """Returns the leaves of a model's caches. `caches` are as the model makes them."""
    found = [(path, cache) for i, top in enumerate(caches) for path, cache in stock.flatten(top, (i,))]
    return [kind_of(cache)(cache, path) for path, cache in found]


def bounded_caches(made: list[Any], bound: Bound | None) -> list[Any]:
    """Returns these empty caches, with a ring in place of each that grows and can be bounded."""
    return made if bound is None else [_bounded(cache, bound) for cache in made]


def _bounded(cache: Any, bound: Bound) -> Any:
    if stock.is_composite(cache):
        return stock.CacheList(*(_bounded(member, bound) for member in cache.caches))
    return kind_of(cache)(cache, ()).bounded(cache, bound)


def opaque(cache: Any) -> bool:
    """Whether no kind recognises the object and it holds no arrays."""
    if stock.is_composite(cache) or kind_of(cache).known or not hasattr(cache, "nbytes"):
        return False
    plain = (str, bytes, bool, int, float, type(None))
    return all(isinstance(x, plain) for x in getattr(cache, "__dict__", {"unknown": cache}).values())
