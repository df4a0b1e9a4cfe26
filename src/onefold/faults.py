"""Faults of code that is not Onefold's (models, tokenizers, MLX): which classes are caught, and how they are logged.

A fault is caught only where it would otherwise end a thread that serves other requests too. No MLX in this file.
"""

from __future__ import annotations

import logging

from onefold.errors import OnefoldError

EVERY_FAULT = (
    OnefoldError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Every class of fault that a model's code, MLX or Onefold itself raises. Catching it is as broad as `except
Exception`, on purpose: the drop-in runs inside mlx-lm's server, and an exception ends the one thread that
generates there. A caught fault costs a cache hit; an exception costs every client."""

UNEXPECTED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Every class of fault that a tokenizer, a parser or a model raises for input it was not made for. Catching it is broad
on purpose: the engine has one thread, and a fault must fail the requests that caused it and not all others.
AssertionError and IntegrityError are not in it: they are bugs of Onefold, and end the engine."""

NOT_CAUGHT: tuple[type[Exception], ...] = ()
"""Faults that are raised even where `EVERY_FAULT` is caught. Empty in production. Tests put AssertionError and
IntegrityError here, so that no bug passes as a cache miss."""


class FaultLog:
    """Logs caught faults: the first of each class with its traceback as a warning, later ones in one line. Their
    tracebacks are logged at debug level."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._seen: set[tuple[str, type[BaseException]]] = set()

    def caught(self, what: str, error: BaseException) -> None:
        """Logs `error`. `what` is a sentence about the work that failed."""
        kind = (what, type(error))
        if kind not in self._seen:
            self._seen.add(kind)
            self._log.warning("%s", what, exc_info=error)
            return
        self._log.warning("%s (%s: %s)", what, type(error).__name__, error)
        self._log.debug("%s", what, exc_info=error)
