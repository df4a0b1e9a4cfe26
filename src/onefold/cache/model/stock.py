"""All of mlx-lm's internals that the cache uses.

No other file of the cache imports mlx-lm; `seam` replaces attention and watches forwards. The capabilities of a cache
object are determined by its attributes (`has`), never by the name of its class.
"""

from __future__ import annotations

import functools
import importlib
import signal
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as _base
from mlx_lm.models import cache as _cache

from onefold.cache.memory import device
from onefold.errors import ConfigError

ArraysCache = _cache.ArraysCache
BatchKVCache = _cache.BatchKVCache
CacheList = _cache.CacheList
KVCache = _cache.KVCache
ChunkedKVCache = _cache.ChunkedKVCache
QuantizedKVCache = _cache.QuantizedKVCache
RotatingKVCache = _cache.RotatingKVCache

stock_attention: Callable[..., mx.array] = _base.scaled_dot_product_attention
attention_mask: Callable[..., Any] = _cache.create_attention_mask
_original = types.SimpleNamespace(
    make_prompt_cache=_cache.make_prompt_cache, save_prompt_cache=_cache.save_prompt_cache
)
"""mlx-lm's functions. In a namespace, where `_rebind` does not replace them."""


def has(cache: Any, *names: str) -> bool:
    """Whether a cache object has all of these attributes."""
    return all(hasattr(cache, name) for name in names)


def is_composite(cache: Any) -> bool:
    """Whether a cache object is made of others."""
    return has(cache, "caches", "__getitem__")


def keeps_kv(cache: Any) -> bool:
    """Whether a cache object holds keys and values, and attention appends to them."""
    return has(cache, "update_and_fetch", "offset", "keys", "values")


def is_plain(cache: Any) -> bool:
    """Whether a cache object's state consists of attributes that are arrays, numbers or None: it can be stored and
    restored without knowing what they mean."""
    if not hasattr(cache, "__dict__") or any(vars(cls).get("__slots__") for cls in type(cache).__mro__):
        return False
    held = vars(cache).values()
    return isinstance(cache.offset, int) and all(v is None or isinstance(v, (int, float, mx.array)) for v in held)


def make_prompt_cache(model: nn.Module) -> list[Any]:
    """Returns the caches that mlx-lm makes for this model. Called by the survey, and for models that run uncached."""
    return list(_original.make_prompt_cache(model))


def arrays_of(held: Any, *, models: bool = False) -> list[mx.array]:
    """Returns every array that objects of any class hold in their attributes, once each; those of models if asked."""
    passed: tuple[type, ...] = (type, types.ModuleType, types.FunctionType, *(() if models else (nn.Module,)))
    found: list[mx.array] = []
    seen: set[int] = set()
    todo = [held]
    while todo:
        at = todo.pop()
        if id(at) in seen or isinstance(at, passed):
            continue
        seen.add(id(at))
        if isinstance(at, mx.array):
            found.append(at)
        elif isinstance(at, (list, tuple, set, frozenset, deque)):
            todo += at
        elif isinstance(at, dict):
            todo += [*at.values(), *getattr(at, "__dict__", {}).values()]  # a model is a dict that has attributes
        elif isinstance(at, types.MethodType):
            todo.append(at.__self__)
        else:
            todo += getattr(at, "__dict__", {}).values()
            slots = {name for cls in type(at).__mro__ for name in vars(cls).get("__slots__", ())}
            todo += [getattr(at, name) for name in slots if hasattr(at, name)]
    return found


def evaluate_kept(held: Any) -> None:
    """Compute every array that these models and objects keep. MLX computes a lazy array only on the thread that made
    it, so what any thread may use passes here when it is made: weights, rotary embeddings, formats, initial states.
    Raises ConfigError for arrays that another thread has left lazy."""
    try:
        device.evaluate(arrays_of(held, models=True))
    except RuntimeError as error:
        if "in current thread" not in str(error):
            raise
        raise ConfigError(
            "the model has lazy arrays that were made on another thread, which alone can compute them: evaluate them "
            f"there, or load the model with onefold.load ({error})"
        ) from error


def flatten(cache: Any, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Any]]:
    """Returns the cache objects that hold state, each with its path; of a composite one, its members."""
    if is_composite(cache):
        return [found for i, c in enumerate(cache.caches) for found in flatten(c, (*path, i))]
    return [(path, cache)]


# -- names that other modules have bound --------------------------------------------------------


def bind_everywhere(original: Any, replacement: Any) -> Callable[[], None]:
    """Binds `replacement` to every name that a loaded module has for `original`. Returns a function that undoes it,
    also in modules that were loaded in between."""
    _rebind(original, replacement)
    return functools.partial(_rebind, replacement, original)


def _rebind(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            space = vars(module)
            for name in [name for name, value in list(space.items()) if value is old]:
                space[name] = new


def install_prompt_cache(cls: type) -> Callable[[], None]:
    """Binds `cls` wherever mlx-lm's `LRUPromptCache` is bound. Returns a function that undoes it; no module may have
    bound `cls` before."""
    return bind_everywhere(_cache.LRUPromptCache, cls)


# -- saving ------------------------------------------------------------------------------------

_savers = 0


@functools.wraps(_original.save_prompt_cache)
def _save_exported(file_name: str, cache: list[Any], metadata: dict[str, str] | None = None) -> None:
    """mlx-lm's own function, for leased layers too. It writes the name of a layer's class, and reads only its own
    classes, so leased layers are exported first. (A layer's `state` cannot be a copy, because mlx-lm's loops evaluate
    it at every chunk.)"""
    _original.save_prompt_cache(file_name, [c.export() if hasattr(c, "export") else c for c in cache], metadata)


_original.save_exported = _save_exported


def hook_saving() -> None:
    """Replace `save_prompt_cache` by one that saves leased layers, in every module that has bound it. Counted like
    `seam.install`."""
    global _savers
    _savers += 1
    _rebind(_original.save_prompt_cache, _original.save_exported)


def unhook_saving() -> None:
    global _savers
    _savers -= 1
    if _savers == 0:
        _rebind(_original.save_exported, _original.save_prompt_cache)


# -- the stock server -------------------------------------------------------------------------


class Listener(Protocol):
    def made(self, model: nn.Module) -> None:
        """Called after caches were made for this model, by mlx-lm or a caller's loop."""
        ...

    def row(self, model: nn.Module, tokens: list[int]) -> list[Any] | None:
        """Called when a batch inserts a row for which nothing is cached. Returns layers for it, or None to use mlx-lm's
        own."""
        ...

    def take_on(self) -> None:
        """Called before a batch inserts rows, after their layers are chosen. Raises if they have no room."""
        ...

    def is_short(self) -> bool:
        """Whether the device has no room for another step of all running rows."""
        ...


class Made(NamedTuple):
    """The model for which mlx-lm made a cache object, and whether it has a bound."""

    model: weakref.ref[nn.Module]
    bounded: bool


_made: weakref.WeakKeyDictionary[Any, Made] = weakref.WeakKeyDictionary()
_listeners: list[Listener] = []
_unlistened: list[Callable[[], None]] = []


def models_of(layers: list[Any]) -> list[nn.Module]:
    """Returns the models for which mlx-lm made these layers, in the layers' order; empty if it did not make all of
    them."""
    found: list[nn.Module] = []
    for layer in layers:
        known = _made.get(layer) if _rememberable(layer) else None
        model = known.model() if known is not None else None
        if model is None:
            return []
        if not any(model is m for m in found):
            found.append(model)
    return found


def _is_fresh(layers: list[Any], model: nn.Module) -> bool:
    """Whether mlx-lm made these layers for this model, without a bound, and they are still empty."""
    known = [_made.get(layer) if _rememberable(layer) else None for layer in layers]
    ours = all(k is not None and k.model() is model and not k.bounded for k in known)
    return bool(known) and ours and all(layer.empty() for layer in layers)


def _rememberable(cache: Any) -> bool:
    return type(cache).__hash__ is not None and type(cache).__weakrefoffset__ != 0


def listen(listener: Listener) -> None:
    """Notify `listener` of every cache that mlx-lm makes, in its server, in its batches or for a caller's own loop:
    only there can a prompt cache learn its model."""
    if not _listeners:
        _unlistened[:] = [_hook_server(), _hook_caches(), _hook_batches()]
    _listeners.append(listener)


def unlisten(listener: Listener) -> None:
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners:
            for restore in _unlistened:
                restore()


def _hook_server() -> Callable[[], None]:
    """Call the prompt cache's `admit`, if it has one, with each request and its model after tokenising: there the
    server can still answer with an error. A later exception, in a batch, would end the server's generation thread."""
    generator: Any = importlib.import_module("mlx_lm.server").ResponseGenerator
    original = generator._tokenize

    @functools.wraps(original)
    def tokenize(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        prompt, vision, provider = found[0], found[-1], self.model_provider
        plain = vision is None and self.cli_args.kv_bits is None and not self._is_distributed
        if plain and hasattr(self.prompt_cache, "admit"):
            self.prompt_cache.admit(provider.model_key, prompt, provider.model, provider.draft_model)
        return found

    def restore() -> None:
        generator._tokenize = original

    generator._tokenize = tokenize
    return restore


def _hook_caches() -> Callable[[], None]:
    original = _original.make_prompt_cache

    @functools.wraps(original)
    def make(model: nn.Module, max_kv_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        made = original(model, max_kv_size, *args, **kwargs)
        bounded = max_kv_size is not None and not hasattr(model, "make_cache")  # which takes no bound
        for cache in made:
            if _rememberable(cache):
                _made[cache] = Made(weakref.ref(model), bounded)
        for listener in list(_listeners):
            listener.made(model)
        return made

    return bind_everywhere(original, make)


def _hook_batches() -> Callable[[], None]:
    batches: Any = importlib.import_module("mlx_lm.generate").BatchGenerator
    original = batches.insert_segments

    @functools.wraps(original)
    def insert_segments(
        self: Any,
        segments: Any,
        max_tokens: Any = None,
        caches: Any = None,
        all_tokens: Any = None,
        *args: Any,
        **rest: Any,
    ) -> Any:
        if self.max_kv_size is None:
            caches = list(caches or [None] * len(segments))
            for i, known in enumerate(all_tokens or [[]] * len(segments)):
                if caches[i] is None or _is_fresh(caches[i], self.model):
                    tokens = [t for part in (known, *segments[i]) for t in part]
                    given = (listener.row(self.model, tokens) for listener in list(_listeners))
                    caches[i] = next((layers for layers in given if layers is not None), caches[i])
        for listener in list(_listeners):
            listener.take_on()
        return original(self, segments, max_tokens, caches, all_tokens, *args, **rest)

    following = batches._next

    @functools.wraps(following)
    def next_step(self: Any) -> Any:
        rows = self._generation_batch
        if rows.uids and any(listener.is_short() for listener in list(_listeners)):
            rows.max_tokens[-1] = min(rows.max_tokens[-1], rows._num_tokens[-1] + 1)  # the newest ends with this step
        return following(self)

    def restore() -> None:
        batches.insert_segments, batches._next = original, following

    batches.insert_segments, batches._next = insert_segments, next_step
    return restore


def run_server(
    make_cache: Callable[[int, int | None], Any], accept: Callable[[list[nn.Module]], None] | None = None
) -> None:
    """Run mlx-lm's own server, with its own command line, on the prompt cache that `make_cache(max_size, max_bytes)`
    returns. With `accept`, the server listens when it has loaded the model of its command line and `accept` has
    returned; what that raises ends the server, and is raised here. Call it on the main thread: SIGTERM, and SIGHUP of a
    terminal that closes, end a server that listens as Ctrl-C does."""
    server: Any = importlib.import_module("mlx_lm.server")
    run, lru, generator = server.run, server.LRUPromptCache, server.ResponseGenerator
    generate, listen = generator._run_generate, server._run_http_server
    loaded = _Loaded(accept)

    @functools.wraps(run)
    def run_with(host: str, port: int, provider: Any, *args: Any, **kwargs: Any) -> Any:
        limit = getattr(provider.cli_args, "prompt_cache_bytes", None)
        server.LRUPromptCache = lambda max_size=10, *_: make_cache(max_size, limit)
        loaded.watch(provider)
        return run(host, port, provider, *args, **kwargs)

    @functools.wraps(generate)
    def run_generate(self: Any) -> None:
        try:
            generate(self)
        finally:
            loaded.ended.set()  # without a model, if that could not be loaded
            mx.clear_streams()  # else the streams of this thread can abort the process at exit

    @functools.wraps(listen)
    def listen_if_accepted(host: str, port: int, generator: Any, *args: Any, **kwargs: Any) -> Any:
        if not loaded.accepted():
            generator.stop_and_join()
            return None
        told = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
        for number in told:
            signal.signal(number, signal.default_int_handler)  # Ctrl-C, at which mlx-lm's server ends in order
        try:
            return listen(host, port, generator, *args, **kwargs)
        finally:
            for number in told:
                signal.signal(number, signal.SIG_DFL)

    server.run, generator._run_generate, server._run_http_server = run_with, run_generate, listen_if_accepted
    try:
        server.main()
    finally:
        server.run, server.LRUPromptCache, generator._run_generate = run, lru, generate
        server._run_http_server = listen
    if loaded.refusal is not None:
        raise loaded.refusal


class _Loaded:
    """The model of mlx-lm's command line, which its server loads on a thread of its own, and if it is accepted."""

    def __init__(self, accept: Callable[[list[nn.Module]], None] | None) -> None:
        self._accept = accept
        self.refusal: ConfigError | None = None
        self.ended = threading.Event()
        """Set when the model is loaded and judged, or there will be none."""

    def watch(self, provider: Any) -> None:
        """Judge what the server loads when it starts."""
        load, accept = provider.load_default, self._accept
        if accept is None:
            self.ended.set()
            return

        def load_and_judge() -> None:
            load()
            models = [m for m in (provider.model, provider.draft_model) if m is not None]
            try:
                accept(models)
            except ConfigError as error:
                self.refusal = error.with_traceback(None)  # whose frames hold the model
            self.ended.set()

        provider.load_default = load_and_judge

    def accepted(self) -> bool:
        """Wait until the model is judged. Returns False if it is refused, or the user interrupts."""
        try:
            self.ended.wait()
        except KeyboardInterrupt:
            return False
        return self.refusal is None
