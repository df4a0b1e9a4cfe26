"""Ctrl-C during an answer: it takes effect between two events, and never while output is being written.

A line that is interrupted half-way may be shown twice, or not at all. Where signals are not ours to handle (another
thread than the first, or a program that has Ctrl-C ignored), nothing is changed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator

from onefold.engine.request import Event


class Interrupts:
    def __init__(self) -> None:
        self._ours = False
        self._waiting = False
        self._pressed = False

    def __enter__(self) -> Interrupts:
        first = threading.current_thread() is threading.main_thread()
        self._ours = first and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _press(self, *_: object) -> None:
        if self._waiting:
            raise KeyboardInterrupt
        self._pressed = True

    def between(self, events: Generator[Event, None, None]) -> Generator[Event, None, None]:
        """Yields the same events. Raises KeyboardInterrupt before it waits for the next one."""
        while True:
            self._waiting = True
            try:
                if self._pressed:
                    raise KeyboardInterrupt
                event = next(events)
            except StopIteration:
                return
            finally:
                self._waiting = False
            yield event
