"""Shared by all commands: an error is one line on stderr that names the command.

Does not know any command's options.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

NONSENSE = 2
"""The exit code for wrong arguments or settings."""
INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints the error without the usage, which is longer than the error."""
        raise SystemExit(complain(self.prog, message))


def complain(command: str, message: str, code: int = NONSENSE) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code
