"""What our commands have in common on the command line: a complaint is one line on stderr that names the command.

Does not know any command's options.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

NONSENSE = 2
"""The exit code for what cannot be used as given."""
INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage before it, which is longer than what went wrong."""
        raise SystemExit(complain(self.prog, message))


def complain(command: str, message: str, code: int = NONSENSE) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code
