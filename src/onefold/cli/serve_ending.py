"""The end of `onefold serve`: dirty data is written to disk and to a shared store, and lines say how much that was."""

from __future__ import annotations

import logging
import signal
import time
from typing import TYPE_CHECKING

from onefold.sizes import show_size

if TYPE_CHECKING:
    from onefold.cache.memory.tier import TierStats, Written
    from onefold.cache.stats import Stats
    from onefold.engine.engine import Engine

log = logging.getLogger("onefold")


class Ending:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: Written | None = None
        """When the engine was first told to end."""
        self._began = 0.0

    def begin(self) -> None:
        """Notes how much has been written, and the time, before the engine is told to end. Called again, it does
        nothing."""
        if not self._began:
            self._before, self._began = self._engine.cache.inventory.written, time.monotonic()

    def stop(self) -> None:
        """Writes what is not below memory yet, then stops the engine. An interrupt skips the rest of the writing."""
        self.begin()
        engine, before, why = self._engine, self._before, ""
        assert before is not None
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if where := _where(before):
                log.info("writing to %s what is not there yet; interrupt again to skip it", where)
            engine.stop()
        except KeyboardInterrupt:
            why = "interrupted"
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # no thread may be left when the process ends: MLX would abort it
        if why:
            engine.cache.ending.hurry()
            engine.stop()
        seconds, stats = time.monotonic() - self._began, engine.cache.stats()
        if before.disk is not None:
            log.info("%s", _farewell(stats, before.disk, seconds, why))
        if before.shared is not None:
            log.info("%s", _shared(stats.remote, before.shared, seconds, why))


def _where(before: Written) -> str:
    """Returns where something may be written, as text."""
    named = (("disk", before.disk), ("the shared store", before.shared))
    return " and ".join(name for name, n_bytes in named if n_bytes is not None)


def _shared(after: TierStats, before: int, seconds: float, why: str) -> str:
    """Returns a line about what was written to the shared store; `before` is how many bytes had been written."""
    written = after.written_bytes - before
    said = f"{show_size(written)} were written to {after.folder} in {seconds:.1f} s" if written else ""
    if why := why or after.failed:
        return f"{said or f'nothing was written to {after.folder}'}: {why}"
    return said or f"nothing had to be written to {after.folder}"


def _farewell(after: Stats, before: int, seconds: float, why: str) -> str:
    """Returns a line about what was written; `before` is how many bytes had been written until then."""
    written, held = after.disk.written_bytes - before, show_size(after.disk.used_bytes)
    said = f"{show_size(written)} were written in {seconds:.1f} s; {held} are on disk"
    if after.disk.left_tokens:
        refused = [r for r in ("daily limit", "no room on disk", "disk too slow") if after.reasons.get(f"disk: {r}")]
        why = why or after.disk.failed or ", ".join(refused) or "the reason is not known"
        return f"{said}; {after.disk.left_tokens:,} tokens were not written: {why}"
    return said if written else f"nothing had to be written; {held} are on disk"
