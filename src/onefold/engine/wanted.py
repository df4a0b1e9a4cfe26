"""Ends work on a thread whose result is no longer wanted: its client hung up while its prompt was prepared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from onefold.errors import RequestError

T = TypeVar("T")

_UNWANTED: ContextVar[threading.Event | None] = ContextVar("unwanted", default=None)


def run(unwanted: threading.Event, work: Callable[[], T]) -> T:
    """Does `work` on this thread. Once `unwanted` is set, `check` raises in it."""
    token = _UNWANTED.set(unwanted)
    try:
        check()
        return work()
    finally:
        _UNWANTED.reset(token)


def check() -> None:
    """Raises RequestError if the work that this thread does is no longer wanted."""
    unwanted = _UNWANTED.get()
    if unwanted is not None and unwanted.is_set():
        raise RequestError("the client closed the connection")
