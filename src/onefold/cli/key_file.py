"""Reads API keys from a file. Other users of the machine can see keys on a command line in the process list.

One key a line; empty lines and those that begin with # are left out.
"""

from __future__ import annotations

import contextlib
import logging
import stat
from pathlib import Path

from onefold.errors import ConfigError

log = logging.getLogger("onefold")


def read_keys(name: str) -> tuple[str, ...]:
    """Returns the keys of the file, at least one. Warns if other users can read the file. Raises ConfigError."""
    path = Path(name)
    try:
        with contextlib.suppress(RuntimeError):  # ~user without such a user: taken as a plain name
            path = path.expanduser()
        with path.open(encoding="utf-8-sig") as file:  # some editors begin a file with a mark
            mode = path.stat().st_mode
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f'cannot read the API keys in "{path}": {why}. Give a file with one key per line') from error
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        raise ConfigError(f'"{path}" contains no API key: write one per line, or leave --api-key-file out')
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning('other users can read the API keys in "%s": run chmod 600 on it', path)
    return keys
