"""A thread whose end can be waited for, also by a caller that was interrupted while waiting.

`Thread.join` takes a thread for ended when the wait for it is interrupted (Python 3.11), and whoever leaves the process
then leaves it with MLX at work, which aborts. And a child of this process has no such thread, whatever it remembers.

No MLX in this file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Worker(threading.Thread):
    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._over = threading.Event()
        self._process = os.getpid()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the thread has ended, or for so long. Returns whether it has ended."""
        return not self.working or self._over.wait(seconds)

    @property
    def working(self) -> bool:
        here = os.getpid() == self._process
        return here and self.ident is not None and not self._over.is_set()

    @property
    def is_this_thread(self) -> bool:
        return self is threading.current_thread()
