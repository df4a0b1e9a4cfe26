"""Keeps in a file how quickly a shared store was read and prompts were computed, so that a restart need not measure it.

One JSON object for each store and model. A file that cannot be read or written is no file.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

from onefold.cache.tiers.pace import Pace

log = logging.getLogger("onefold")

MOST = 256
"""Stores and models that the file remembers: the oldest goes."""
_READ, _PREFILL = "seconds_per_byte", "seconds_per_token"


class KeptPaces:
    def __init__(self, path: str | os.PathLike[str], key: str) -> None:
        """`key` says which store and which model."""
        self._path, self._key = Path(path), key

    def load(self, read: Pace, prefill: Pace) -> None:
        """Give these paces what was measured by the last process, if it left something."""
        found = self._all().get(self._key)
        if isinstance(found, dict):
            for pace, name in ((read, _READ), (prefill, _PREFILL)):
                seconds = found.get(name)
                if isinstance(seconds, (int, float)) and 0 < seconds < float("inf"):
                    pace.took(seconds, 1)

    def save(self, read: Pace, prefill: Pace) -> None:
        """Write down what was measured. Logs what cannot be written."""
        measured = {name: pace.estimate(1) for pace, name in ((read, _READ), (prefill, _PREFILL))}
        kept = {name: seconds for name, seconds in measured.items() if seconds is not None}
        if not kept:
            return
        known = self._all()
        known.pop(self._key, None)
        known[self._key] = kept
        try:
            self._write(json.dumps(dict(list(known.items())[-MOST:]), indent=1))
        except OSError as error:
            log.debug("cannot keep how quick the shared store is: %s", error)

    def _write(self, text: str) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self._path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

    def _all(self) -> dict[str, object]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}
