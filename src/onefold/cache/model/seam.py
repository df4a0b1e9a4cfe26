"""Where Onefold stands between a model and mlx-lm: the attention function, and the watch on forwards.

- `install` binds another attention function where a model's code looks it up.
- `watch` has the model's class tell the owners of its layers when a forward begins and how it ended.

Both are counted: two caches on one architecture share them, and the last one takes them out.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from onefold.errors import LeaseError

ATTENTION = "scaled_dot_product_attention"

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

_watched: dict[type, tuple[Any, Any, int]] = {}
"""By class: its own `__call__`, the watching one in its place, and how many caches want it."""
_attended: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Watchers of caches that are not ours, by the identity of the first of them."""


def attend(caches: list[Any], watcher: Any) -> None:
    """Have the watch tell `watcher` of forwards on these caches, which are not of our classes. Holds for as long as the
    watcher lives; it must keep the caches alive."""
    _attended[id(caches[0])] = watcher


def watch(model: nn.Module) -> type:
    """Have the model's class say when a forward begins and how it ended, to whoever `watchers()` of the first layer
    it was given names: `begun`, then `ended` or `failed`, then `left`. A list whose first member can `drive` only
    stands in for layers, and runs the forward itself, with theirs. So layers are put back after a forward that raised
    before anybody reads them again, what was written is scheduled before its thread lets go, and tokens are counted
    for models (mamba, rwkv7, jamba) that do not count them. Counted like `install`."""
    cls = type(model)
    if cls in _watched:
        original, watching, count = _watched[cls]
        _watched[cls] = (original, watching, count + 1)
    else:
        original = cls.__call__
        watching = _watching(cls, original)
        cls.__call__ = watching  # type: ignore[method-assign]
        _watched[cls] = (original, watching, 1)
    return cls


def _watching(cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `__call__` that watches. Once it was taken out it passes everything through: code that replaced
    `__call__` while it was in place may put it back later."""
    first = next(iter(list(inspect.signature(original).parameters)[1:]), "inputs")

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if cls not in _watched or _watched[cls][1] is not call:
            return original(self, *args, **kwargs)
        given = [kwargs.get("cache"), *args]  # models do not agree on where the cache stands
        inputs = args[0] if args else kwargs.get(first)
        stand_in = next((c for c in given if _listed(c, "drive")), None)
        if stand_in is not None:

            def run(x: mx.array, layers: list[Any]) -> Any:
                changed = {id(inputs): x, id(stand_in): layers}
                here = {k: changed.get(id(v), v) for k, v in kwargs.items()}
                return call(self, *(changed.get(id(a), a) for a in args), **here)

            return stand_in[0].drive(run, inputs, len(stand_in))
        watchers, n_layers = _watchers(given)
        if not watchers:
            if any(isinstance(c, list) and not c for c in given):
                raise LeaseError(
                    "a model was given an empty list of layers. For speculative decoding, pass draft_model= to "
                    "PrefixCache: a lease has the draft's layers behind the target's then"
                )
            return original(self, *args, **kwargs)
        if inputs is not None and inputs.shape[0] > len(watchers):
            raise LeaseError(
                f"{inputs.shape[0]} rows were fed to the layers of {len(watchers)}: a lease is one row. Open one lease "
                "per row and use cache.batch(leases)"
            )
        others = [a for a in (*args, *kwargs.values()) if a is not inputs and isinstance(a, mx.array)]
        n_tokens = next((a.shape[1] for a in (inputs, *others) if a is not None), 0)
        told: list[Any] = []
        written: list[mx.array] = []
        worked = stepped = False
        try:
            for row, watcher in enumerate(watchers):
                # with other arrays beside the tokens, what the model is fed is not the tokens alone
                watcher.begun(self, inputs, row, n_layers=n_layers, embedded=inputs is None or bool(others))
                told.append(watcher)
            out = original(self, *args, **kwargs)
            worked = True
            stepped = n_tokens == 1 and isinstance(out, mx.array)
        finally:
            try:
                for watcher in told:
                    written += watcher.ended(n_tokens, stepped) if worked else watcher.failed()
                _schedule_for(told, [out, *written] if stepped else written)
            finally:
                for watcher in told:
                    watcher.left()
        return out

    return call


def _schedule_for(watchers: list[Any], arrays: list[mx.array]) -> None:
    """Schedule what a forward has written. If it cannot be computed, MLX says so once, and calls it computed from then
    on: those whose forward it was are told, and the error is raised."""
    try:
        schedule(arrays)
    except RuntimeError as error:
        for watcher in watchers:
            watcher.lost(error)
        raise


def schedule(arrays: list[mx.array]) -> None:
    """Begin to compute these, without waiting: an array that is only described can be computed by the thread that
    described it and by no other. Raises RuntimeError if MLX finds that it cannot."""
    mx.async_eval(*{id(a): a for a in arrays}.values())


def _watchers(given: list[Any]) -> tuple[list[Any], int]:
    """Who watches the caches among these arguments of a forward, and how many caches there are."""
    for caches in given:
        if _listed(caches, "watchers"):
            return caches[0].watchers(), len(caches)
        if isinstance(caches, (list, tuple)) and len(caches) > 0 and id(caches[0]) in _attended:
            return [_attended[id(caches[0])]], len(caches)
    return [], 0


def _listed(cache: Any, capability: str) -> bool:
    return isinstance(cache, (list, tuple)) and len(cache) > 0 and hasattr(cache[0], capability)


def unwatch(cls: type) -> None:
    original, watching, count = _watched.pop(cls)
    if count > 1:
        _watched[cls] = (original, watching, count - 1)
    elif cls.__call__ is watching:
        cls.__call__ = original  # type: ignore[method-assign]
