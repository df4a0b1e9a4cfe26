"""Puts `LRUPromptCache` in the place of mlx-lm's class in the whole process, and runs mlx-lm's server on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import mlx.nn as nn

from onefold.cache.config import CacheConfig
from onefold.cache.model import stock
from onefold.cache.model.survey import survey
from onefold.errors import ConfigError, Unstorable
from onefold.mlx_lm.prompt_cache import LRUPromptCache
from onefold.mlx_lm.reasons import Reasons

_POSITIONAL = ("max_size", "max_bytes")


class Installed:
    """This prompt cache in the place of mlx-lm's, until `uninstall` or the end of a `with` block."""

    _options: ClassVar[dict[str, Any]] = {}
    _count: ClassVar[int] = 0
    _restore: ClassVar[Callable[[], None]]

    def __init__(self, options: dict[str, Any]) -> None:
        if Installed._count and options != Installed._options:
            raise ConfigError(
                f"LRUPromptCache is installed with the options {Installed._options}; uninstall it before you install "
                "it with others"
            )
        if not Installed._count:
            Installed._options = options
            Installed._restore = stock.install_prompt_cache(_with_options(options))
        Installed._count += 1
        self._installed = True

    def uninstall(self) -> None:
        """Puts mlx-lm's class back, unless another caller installed ours too. Caches that were made stay."""
        if self._installed:
            self._installed = False
            Installed._count -= 1
            if not Installed._count:
                Installed._restore()

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in Installed._options.items())
        return f"<Installed: LRUPromptCache({options})>" if self._installed else "<Installed, uninstalled>"

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(**options: Any) -> Installed:
    """Replaces mlx-lm's class by a subclass of `LRUPromptCache` in every loaded module, and in modules that are loaded
    later. Returns an object that undoes it. A server that makes its prompt cache after that makes one of ours;
    `options` are the defaults for arguments that it does not give. Raises ConfigError for options that are wrong."""
    LRUPromptCache(**options).close()  # checks the options here, and not in the server
    return Installed(options)


def _with_options(options: dict[str, Any]) -> type[LRUPromptCache]:
    """Returns a subclass: uninstalling it leaves `LRUPromptCache` itself as it was for modules that import that."""

    class InPlace(LRUPromptCache):
        def __init__(self, *args: Any, **given: Any) -> None:
            named = {name: value for name, value in options.items() if name not in _POSITIONAL[: len(args)]}
            super().__init__(*args, **(named | given))

    InPlace.__name__ = InPlace.__qualname__ = LRUPromptCache.__name__
    return InPlace


def serve(**options: Any) -> None:
    """Runs mlx-lm's server, with its own arguments, on this cache made with these options. Raises Unstorable, and
    serves nothing, if KV of the model that it is started with cannot be held in the format `kv`."""
    made = LRUPromptCache(**options)
    made.close()
    config = CacheConfig.of({"kv": made.kv, "max_kv_size": made.max_kv_size, "keep": made.keep})

    def accept(models: list[nn.Module]) -> None:
        for model in models:
            look = functools.partial(survey, model, kv=config.format(), bound=config.bound())
            Reasons().attempt(look, None, but=(Unstorable,))  # of other faults, requests decide

    stock.run_server(functools.partial(LRUPromptCache, **options), None if config.format().plain else accept)
