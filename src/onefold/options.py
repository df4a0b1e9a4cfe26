"""Keyword options as a frozen dataclass: checked like a function's own keywords, and shown in its signature.

`PrefixCache` and `Engine` take their options as `**options: Unpack[...]`; a dataclass has their defaults and meanings.
No MLX in this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


def from_options(config: type[T], caller: str, options: Mapping[str, Any]) -> T:
    """Returns the dataclass `config` made of these keywords. Raises TypeError for a keyword that it does not have, as a
    call of `caller` would."""
    known = {f.name for f in fields(config)}  # type: ignore[arg-type]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise TypeError(f"{caller}() got an unexpected keyword argument {unknown!r}")
    return config(**options)


def shown_as(signature: inspect.Signature) -> Callable[[F], F]:
    """Returns a decorator that gives a method, and the class whose `__init__` it is, this signature."""

    def decorate(method: F) -> F:
        shown = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *signature.parameters.values()]
        method.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return method

    return decorate


def positional(name: str, annotation: str, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """Returns a parameter that comes before the options."""
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )


def signature(config: type, first: Iterable[inspect.Parameter]) -> inspect.Signature:
    """Returns a signature of `first` and every keyword of `config` with its default, for `help` and for editors."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(f.name, keyword, default=f.default, annotation=f.type) for f in fields(config)]
    return inspect.Signature([*first, *options])
