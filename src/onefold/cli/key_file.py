"""API keys in a file: what is on the command line, everybody on the machine can read in the list of processes.

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
    """The keys of the file, at least one. A file that others may read is said in the log. Raises ConfigError."""
    path = Path(name)
    try:
        with contextlib.suppress(RuntimeError):  # ~somebody, whom there is not: a name as any other
            path = path.expanduser()
        with path.open(encoding="utf-8-sig") as file:  # some editors begin a file with a mark
            mode = path.stat().st_mode
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f'the API keys in "{path}" cannot be read: {why}. Give a file with one key a line') from error
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        raise ConfigError(f'there is no API key in "{path}": write one a line, or leave --api-key-file out')
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning('others on this machine may read the API keys in "%s": chmod 600 it', path)
    return keys
