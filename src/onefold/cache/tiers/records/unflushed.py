"""Records that have their names and that a power loss could still take: on macOS, until the device's cache is emptied.

Called by the thread that writes. No MLX in this file.
"""

from __future__ import annotations

from onefold.cache.tiers.records import system
from onefold.cache.tiers.records.directory import absent_is_empty
from onefold.cache.tiers.records.locking import FolderLock


class Unflushed:
    def __init__(self, lock: FolderLock) -> None:
        self._lock = lock
        self._namespaces: set[str] = set()

    def __bool__(self) -> bool:
        """Whether there are any; never so where each file is durable when it has its name."""
        return bool(self._namespaces)

    def add(self, namespace: str) -> None:
        """A record was written there."""
        if system.chosen.flushes_later:
            self._namespaces.add(namespace)

    def flush(self) -> None:
        """Make all of them durable. Raises OSError; then none counts as durable."""
        with self._lock.changing() as top:
            for namespace in self._namespaces:
                with absent_is_empty(), top.below(namespace) as inside:
                    inside.push()
            top.flush_device()
        self._namespaces.clear()
