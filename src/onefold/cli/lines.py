"""Reads messages from a terminal or a pipe. A line that ends with a backslash continues on the next line.

A prompt is shown only on a terminal. Knows nothing of what a message means.
"""

from __future__ import annotations

import contextlib
import io
import sys
import termios
from collections.abc import Iterator

PROMPT, MORE = "> ", ". "


@contextlib.contextmanager
def keys_ignored() -> Iterator[None]:
    """While it is entered, keys that are typed show nothing, and are dropped at its end. Ctrl-C works as ever."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


class Lines:
    def __init__(self) -> None:
        self.typed = sys.stdin.isatty()
        if self.typed and sys.stdout.isatty():
            with contextlib.suppress(ImportError):  # not every Python has it; its import is what lets lines be edited
                import readline  # noqa: F401
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")

    def next(self) -> str | None:
        """Returns the next message; None at the end of the input."""
        parts: list[str] = []
        while (line := self._line(MORE if parts else PROMPT)) is not None:
            parts.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return "\n".join(parts).strip() if parts else None

    def _line(self, prompt: str) -> str | None:
        if self.typed and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                return None
        if self.typed:  # what is said goes elsewhere, and prompts are no part of it
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
