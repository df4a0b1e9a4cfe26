"""How a long fetch is shown: a bar on a terminal, one line elsewhere; always on stderr, as stdout is the program's.

Knows nothing of what is fetched. Nobody has to look: what it shows changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


class Show(Protocol):
    def __call__(self, now: str, done: int, other: int | None = None, /) -> None:
        """Show the current step, and how many of its bytes are done. `other`: so many bytes has this step."""


@contextmanager
def showing(what: str, total: int) -> Iterator[Show]:
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"onefold: {what}", file=sys.stderr, flush=True)
        yield lambda now, done, other=None: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def show(now: str, done: int, other: int | None = None) -> None:
            whole = other or total
            bar.update(task, description=now, completed=min(done, whole), total=whole)

        yield show
