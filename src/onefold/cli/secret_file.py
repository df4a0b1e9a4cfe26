"""Reads the secret that all machines of a shared store have, from a file.

The secret is the bytes of the file, without one newline at the end. It is not taken from a command line, which other
users of the machine can see in the process list.
"""

from __future__ import annotations

import contextlib
import logging
import stat
from pathlib import Path

from onefold.errors import ConfigError

log = logging.getLogger("onefold")

LEAST_BYTES = 16
MOST_BYTES = 4096
_MAKE = "make one with: head -c 32 /dev/urandom | base64"


def read_secret(path: str) -> bytes:
    """Returns the secret, of at least 16 bytes. Warns if other users can read the file. Raises ConfigError."""
    file_path = Path(path)
    try:
        with contextlib.suppress(RuntimeError):  # ~user without such a user: taken as a plain name
            file_path = file_path.expanduser()
        with file_path.open("rb") as file:
            mode = file_path.stat().st_mode
            found = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no file's name"
        raise ConfigError(f'cannot read the secret in "{file_path}": {why}. Give a file with the secret') from error
    if len(found) > MOST_BYTES:
        raise ConfigError(f'"{file_path}" has more than {MOST_BYTES:,} bytes: give the file with the secret')
    secret = found.removesuffix(b"\r\n" if found.endswith(b"\r\n") else b"\n")
    if len(secret) < LEAST_BYTES:
        least = f"at least {LEAST_BYTES} random ones are needed; {_MAKE}"
        raise ConfigError(f'the secret in "{file_path}" has {len(secret)} bytes: {least}')
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning('other users can read the secret in "%s": run chmod 600 on it', file_path)
    return secret
