"""The one seam into mlx-lm: everything of its internals that Onefold touches is named here.

Nothing else in the package imports `mlx_lm.models`. What a cache object can do is asked of it as a
capability (`kind_of`), never read off its class's name.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as _base
from mlx_lm.models import cache as _cache

ArraysCache = _cache.ArraysCache
CacheList = _cache.CacheList
ChunkedKVCache = _cache.ChunkedKVCache
RotatingKVCache = _cache.RotatingKVCache

ATTENTION = "scaled_dot_product_attention"
stock_attention: Callable[..., mx.array] = _base.scaled_dot_product_attention
attention_mask: Callable[..., Any] = _cache.create_attention_mask


class Kind(enum.Enum):
    """What a layer's cache can do. The value is the word that reports use."""

    FULL = "full"
    QUANTIZED = "quantized"
    ROTATING = "rotating"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"
    COMPOSITE = "composite"
    OWN = "own"
    UNKNOWN = "unknown"


SLICEABLE = (Kind.FULL, Kind.QUANTIZED)


def kind_of(cache: Any) -> Kind:
    """Read a cache object's capabilities."""

    def has(*names: str) -> bool:
        return all(hasattr(cache, name) for name in names)

    if has("caches", "__getitem__"):
        return Kind.COMPOSITE
    if has("cache", "__setitem__") and not has("update_and_fetch"):
        return Kind.RECURRENT
    if not has("update_and_fetch", "offset", "keys", "values"):
        return Kind.OWN if not has("update_and_fetch") and has("offset", "state") and is_plain(cache) else Kind.UNKNOWN
    if has("chunk_size", "start_position", "maybe_trim_front"):
        return Kind.CHUNKED
    if has("max_size", "keep"):
        return Kind.ROTATING
    if has("bits", "group_size"):
        return Kind.QUANTIZED
    trimmable = has("is_trimmable", "trim") and cache.is_trimmable()
    return Kind.FULL if trimmable and isinstance(cache.offset, int) else Kind.UNKNOWN


def is_plain(cache: Any) -> bool:
    """Whether a cache object's state is its attributes, and these are arrays, numbers or nothing: it can be kept and
    put back without knowing what they mean."""
    if not hasattr(cache, "__dict__") or any(vars(cls).get("__slots__") for cls in type(cache).__mro__):
        return False
    held = vars(cache).values()
    return isinstance(cache.offset, int) and all(v is None or isinstance(v, (int, float, mx.array)) for v in held)


def make_prompt_cache(model: nn.Module) -> list[Any]:
    """What mlx-lm would make for this model. Called by the factory in `anatomy`, and nowhere else."""
    return list(_cache.make_prompt_cache(model))


# -- the attention seam ---------------------------------------------------------------------

_installed: dict[str, tuple[dict[str, Any], Any, int]] = {}


def _modules_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The globals of every module whose code this model runs and that has an attention function:
    a model's top file is not enough, since many call the attention of another file's classes."""
    seen = set()
    for _, module in model.named_modules():
        for cls in type(module).__mro__:
            call = cls.__dict__.get("__call__")
            if not isinstance(call, types.FunctionType) or call.__module__ in seen:
                continue
            seen.add(call.__module__)
            space = vars(sys.modules[call.__module__]) if call.__module__ in sys.modules else call.__globals__
            if callable(space.get(ATTENTION)) and not call.__module__.startswith("mlx.nn"):
                yield call.__module__, space


def install(model: nn.Module, attention: Callable[..., mx.array]) -> list[str]:
    """Put `attention` where this model's code looks attention up. Counted, so that two caches on one
    architecture share the installation; returns the modules, for `uninstall`."""
    names = []
    for name, space in _modules_of(model):
        if name in _installed:
            space_, original, count = _installed[name]
            _installed[name] = (space_, original, count + 1)
        else:
            _installed[name] = (space, space[ATTENTION], 1)
            space[ATTENTION] = attention
        names.append(name)
    return names


def uninstall(names: list[str]) -> None:
    for name in names:
        space, original, count = _installed.pop(name)
        if count > 1:
            _installed[name] = (space, original, count - 1)
        else:
            space[ATTENTION] = original


# -- watching forwards -------------------------------------------------------------------------

_watched: dict[type, tuple[Any, int]] = {}


def watch(model: nn.Module) -> type:
    """Have the model's class say when a forward begins and how it ended, to whoever `watchers()` of the first layer
    it was given names: `begun(model, inputs)`, then `ended(n_tokens)` or `failed()`. So layers are put back after a
    forward that raised before anybody reads them again, and tokens are counted for models (mamba, rwkv7, jamba) that
    do not count them. Counted like `install`."""
    cls = type(model)
    original, count = _watched.get(cls, (cls.__call__, 0))
    _watched[cls] = (original, count + 1)
    if count == 0:

        @functools.wraps(original)
        def call(self: nn.Module, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
            given = [kwargs.get("cache"), *args]  # models do not agree on where the cache stands
            watchers: list[Any] = next((c[0].watchers() for c in given if _watchable(c)), [])
            told = None if kwargs.get("input_embeddings") is not None else inputs
            worked = False
            try:
                for row, watcher in enumerate(watchers):
                    watcher.begun(self, told if told is None or len(watchers) == 1 else told[row : row + 1])
                out = original(self, inputs, *args, **kwargs)
                worked = True
            finally:
                for watcher in watchers:
                    if worked:
                        watcher.ended(inputs.shape[1])
                    else:
                        watcher.failed()
            return out

        cls.__call__ = call  # type: ignore[method-assign]
    return cls


def _watchable(cache: Any) -> bool:
    return isinstance(cache, (list, tuple)) and len(cache) > 0 and hasattr(cache[0], "watchers")


def unwatch(cls: type) -> None:
    original, count = _watched.pop(cls)
    if count > 1:
        _watched[cls] = (original, count - 1)
    else:
        cls.__call__ = original  # type: ignore[method-assign]
