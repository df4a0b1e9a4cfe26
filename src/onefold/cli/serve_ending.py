"""The end of `onefold serve`: dirty data is written to disk, and a line says how much that was."""

from __future__ import annotations

import logging
import signal
import time
from typing import TYPE_CHECKING

from onefold.sizes import show_size

if TYPE_CHECKING:
    from onefold.cache.stats import Stats
    from onefold.engine.engine import Engine

log = logging.getLogger("onefold")


class Ending:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: int | None = None
        """Bytes that had been written when the engine was first told to end; None without a disk."""
        self._began = 0.0

    def begin(self) -> None:
        """Notes how much has been written, and the time, before the engine is told to end. Called again, it does
        nothing."""
        if not self._began:
            self._before, self._began = self._engine.cache.inventory.written_bytes, time.monotonic()

    def stop(self) -> None:
        """Writes dirty data to disk, then stops the engine. An interrupt skips the rest of the writing."""
        self.begin()
        engine, why = self._engine, ""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._before is not None:
                log.info("writing dirty data to disk; interrupt again to skip it")
            engine.stop()
        except KeyboardInterrupt:
            why = "interrupted"
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # no thread may be left when the process ends: MLX would abort it
        if why:
            engine.cache.ending.hurry()
            engine.stop()
        if self._before is not None:
            log.info("%s", _farewell(engine.cache.stats(), self._before, time.monotonic() - self._began, why))


def _farewell(after: Stats, before: int, seconds: float, why: str) -> str:
    """Returns a line about what was written; `before` is how many bytes had been written until then."""
    written, held = after.disk.written_bytes - before, show_size(after.disk.used_bytes)
    said = f"{show_size(written)} were written in {seconds:.1f} s; {held} are on disk"
    if after.disk.left_tokens:
        refused = [r for r in ("daily limit", "no room on disk", "disk too slow") if after.reasons.get(f"disk: {r}")]
        why = why or after.disk.failed or ", ".join(refused) or "the reason is not known"
        return f"{said}; {after.disk.left_tokens:,} tokens were not written: {why}"
    return said if written else f"nothing had to be written; {held} are on disk"
