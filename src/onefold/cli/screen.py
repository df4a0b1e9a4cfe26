"""How a chat looks.

On a terminal there is colour, and everything is on it. Elsewhere there is none: what the model answers goes to stdout
and all else to stderr, so that a pipe gets the answers alone. Models say what they like, and a terminal obeys control
characters: they are left out there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

CONTROL = dict.fromkeys(c for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t")


class Screen:
    def __init__(self) -> None:
        self._terminal = Console(highlight=False) if sys.stdout.isatty() else None
        self._open = False
        """The last line has no end yet."""
        self._thinking = False

    # -- an answer -----------------------------------------------------------------------------

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Shows a status until the block ends. Yields a function that changes its text."""
        if self._terminal is None:
            yield lambda _: None
            return
        with self._terminal.status(Text(what, "dim")) as status:
            yield lambda now: status.update(Text(now, "dim"))

    def answer(self, text: str) -> None:
        if self._thinking:
            self.end_line()
            self._thinking = False
        if self._terminal is None:
            print(text, end="", flush=True)
        else:
            self._terminal.out(text.translate(CONTROL), end="", highlight=False)
        self._note_line(text)

    def thought(self, text: str) -> None:
        if self._terminal is None:
            print(text, end="", file=sys.stderr, flush=True)
        else:
            self._terminal.out(text.translate(CONTROL), end="", style="dim italic", highlight=False)
        self._thinking = True
        self._note_line(text)

    def _note_line(self, text: str) -> None:
        self._open = not text.endswith("\n") if text else self._open

    def end_line(self) -> None:
        if self._open:
            print(file=sys.stderr if self._terminal is None and self._thinking else sys.stdout, flush=True)
        self._open = False

    def end_answer(self) -> None:
        self.end_line()
        self._thinking = False

    # -- what is no answer ---------------------------------------------------------------------

    def note(self, text: str) -> None:
        if self._terminal is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._terminal.print(Text(text.translate(CONTROL), "dim"), soft_wrap=True)

    def complaint(self, text: str) -> None:
        if self._terminal is None:
            print(f"onefold chat: {text}", file=sys.stderr, flush=True)
        else:
            self._terminal.print(Text(text.translate(CONTROL), "red"), soft_wrap=True)

    def rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Names and what there is to say of each."""
        if self._terminal is None:
            for name, value in rows:
                print(f"{name}: {value}", file=sys.stderr, flush=True)
            return
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in rows:
            table.add_row(Text(name, "dim"), Text(value.translate(CONTROL)))
        self._terminal.print(table)
