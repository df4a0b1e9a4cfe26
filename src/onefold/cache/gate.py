"""The lock of a cache, which one thread holds while it changes something, and which the disk writer can still get past.

Whoever calls the cache goes through both doors, so that no other caller sees a change half done. The writer thread uses
the inner one alone. A caller that must wait for the writer opens the inner door for that long, and not the outer.
"""

from __future__ import annotations

import threading


class Gate:
    def __init__(self) -> None:
        self._outer = threading.RLock()
        self.inner = threading.RLock()
        self._changed = threading.Condition(self.inner)

    def __enter__(self) -> None:
        self._outer.acquire()
        entered = False
        try:
            self.inner.acquire()
            entered = True
        finally:
            if not entered:  # interrupted while the writer was inside
                self._outer.release()

    def __exit__(self, *_: object) -> None:
        try:
            self.inner.release()
        finally:
            self._outer.release()

    def wait(self, seconds: float) -> None:
        """Until something has changed, or so long. Both the writer and those who wait for it call this, inside."""
        self._changed.wait(seconds)

    def tell(self) -> None:
        """Something has changed. Called inside."""
        self._changed.notify_all()
