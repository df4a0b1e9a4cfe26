"""Replaces mlx-lm's attention function, and watches a model's forwards.

- `install` binds another attention function where a model's code looks it up.
- `watch` wraps the `__call__` of a model's class, and notifies the watchers of its layers of each forward.

Both are counted: two caches on one architecture share them, and the last one removes them.
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

from onefold.cache.model import linear
from onefold.errors import LeaseError

ATTENTION = "scaled_dot_product_attention"

# -- the attention seam ---------------------------------------------------------------------

_installed: dict[str, tuple[dict[str, Any], Any, int]] = {}


def _modules_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and globals of every module whose code this model runs and that has an attention function. Many
    models use the attention of another file's classes."""
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
    """Bind `attention` where this model's code looks attention up. Returns the modules, for `uninstall`. Counted, so
    that two caches on one architecture share the installation."""
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
"""By class: its own `__call__`, the watching one in its place, and how many caches use it."""
_attended: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Watchers of caches that are not Onefold's, by the identity of the first cache."""


def attend(caches: list[Any], watcher: Any) -> None:
    """Notify `watcher` of forwards on these caches, which are not of Onefold's classes, for as long as the watcher
    lives. The watcher must keep the caches alive."""
    _attended[id(caches[0])] = watcher


def watch(model: nn.Module) -> type:
    """Wrap the `__call__` of the model's class. Returns the class, for `unwatch`. Counted like `install`.

    Each forward notifies the `watchers()` of the first layer that it was given: `begun`, then `ended` or `failed`, then
    `left`. There is one for each row, or one with `n_rows` rows, whose `compute` runs the forward. If the first member
    of the list has a `drive` method, it only represents layers, and runs the forward with the real ones. So layers are
    reset after a forward that raised, before they are read again; what a forward wrote is scheduled before its thread
    returns; and tokens are counted for models that do not count them (mamba, rwkv7, jamba)."""
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
    """Returns a `__call__` that watches. After `unwatch` it only calls the original, because code that replaced
    `__call__` in the meantime may bind it again later."""
    first = next(iter(list(inspect.signature(original).parameters)[1:]), "inputs")

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if cls not in _watched or _watched[cls][1] is not call:
            return original(self, *args, **kwargs)
        given = [kwargs.get("cache"), *args]  # the position of the cache differs between models
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
                    "the model was given an empty list of layers. For speculative decoding, pass draft_model= to "
                    "PrefixCache: lease.layers then has the draft's layers after the target's"
                )
            return original(self, *args, **kwargs)
        n_rows = sum(getattr(watcher, "n_rows", 1) for watcher in watchers)
        if inputs is not None and inputs.shape[0] > n_rows:
            raise LeaseError(
                f"the input has {inputs.shape[0]} rows, the layers have {n_rows}: a lease is one row. Open one lease "
                "per row and use cache.batch(leases)"
            )
        others = [a for a in (*args, *kwargs.values()) if a is not inputs and isinstance(a, mx.array)]
        n_tokens = next((a.shape[1] for a in (inputs, *others) if a is not None), 0)
        notified: list[Any] = []
        written: list[mx.array] = []
        worked = stepped = False
        try:
            for row, watcher in enumerate(watchers):
                # with other arrays in addition to the tokens, the tokens do not determine the KV
                watcher.begun(self, inputs, row, n_layers=n_layers, embedded=inputs is None or bool(others))
                notified.append(watcher)
            out = _computed(notified, self, inputs, functools.partial(original, self), args, kwargs)
            worked = True
            stepped = n_tokens == 1 and isinstance(out, mx.array)
        finally:
            try:
                for watcher in notified:
                    written += watcher.ended(n_tokens, stepped) if worked else watcher.failed()
                _schedule_for(notified, [out, *written] if stepped else written)
            finally:
                for watcher in notified:
                    watcher.left()
        return out

    return call


def _computed(
    watchers: list[Any], model: nn.Module, inputs: mx.array | None, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Returns what the model computes. A watcher of all rows may compute it, by other means than a call."""

    def forward(x: mx.array | None) -> Any:
        here = {k: x if v is inputs else v for k, v in kwargs.items()}
        with linear.in_forward():
            return call(*(x if a is inputs else a for a in args), **here)

    compute = getattr(watchers[0], "compute", None)
    return forward(inputs) if compute is None or inputs is None else compute(model, inputs, forward)


def _schedule_for(watchers: list[Any], arrays: list[mx.array]) -> None:
    """Schedule what a forward has written. If that fails, call `lost` of its watchers and raise RuntimeError: MLX
    reports the failure only once, and treats the arrays as computed from then on."""
    try:
        schedule(arrays)
    except RuntimeError as error:
        for watcher in watchers:
            watcher.lost(error)
        raise


def schedule(arrays: list[mx.array]) -> None:
    """Begin to compute these arrays, without waiting. Only the thread that made a lazy array can compute it, but any
    thread can use one that is scheduled. Raises RuntimeError if MLX cannot compute them."""
    mx.async_eval(*{id(a): a for a in arrays}.values())


def _watchers(given: list[Any]) -> tuple[list[Any], int]:
    """Returns the watchers of the caches among these arguments of a forward, and the number of caches."""
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
