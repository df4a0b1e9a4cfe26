"""Shared by all commands: an error is one line on stderr that names the command; a command that is told to end, or
whose terminal closes, ends what it began.

Does not know any command's options.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

NONSENSE = 2
"""The exit code for wrong arguments or settings."""
INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints the error without the usage, which is longer than the error. Names what a mistyped option may be."""
        typed = [word.split("=")[0] for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized arguments") and typed:
            known = re.findall(r"--[a-z][a-z-]*", self.format_help())
            close = dict.fromkeys(found for word in typed for found in difflib.get_close_matches(word, known, 1, 0.75))
            message += f": did you mean {' and '.join(close)}?" if close else f"; {self.prog} --help lists all options"
        raise SystemExit(complain(self.prog, message))


def complain(command: str, message: str, code: int = NONSENSE) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def write_no_more() -> None:
    """Discards what could not be written: Python would try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ending_signals() -> list[signal.Signals]:
    """Returns the signals that tell a command to end, those that this thread may handle: SIGTERM, and SIGHUP of a
    terminal that closes unless it is ignored, as `nohup` has it."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Turns the first SIGTERM or SIGHUP in the block into SystemExit, so that the block ends what it began, such as a
    server or an engine. Later ones are ignored: they would interrupt that."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
