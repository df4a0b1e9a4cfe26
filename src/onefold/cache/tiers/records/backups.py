"""Keeps the default folder of the disk tier out of the system's backups: Time Machine, on macOS.

No MLX in this file.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from onefold.cache_folder import kv_folder
from onefold.errors import ConfigError

log = logging.getLogger("onefold")

SECONDS = 5.0


def exclude_default(folder: Path) -> None:
    """Excludes a folder from Time Machine's backups, if it is the default one: what becomes of another folder is for
    its owner to say. A failure is logged at debug. Does nothing on other systems."""
    if sys.platform != "darwin":
        return
    command = ["tmutil", "addexclusion", str(folder)]
    try:
        if folder != kv_folder().absolute():
            return
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.SubprocessError, ConfigError) as error:
        log.debug("%s is not excluded from Time Machine: %s", folder, error)
        return
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        log.debug("%s is not excluded from Time Machine: %s", folder, said)
    else:
        log.debug("%s is excluded from Time Machine", folder)
