"""How a long fetch is shown: a bar on a terminal, one line elsewhere; always on stderr, as stdout is the program's.

Knows nothing of what is fetched. Nobody has to look: what it shows changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

Show = Callable[..., None]
"""Called with the current step, the bytes that are done of it, and those that it has, if they are others."""


@contextmanager
def showing(what: str, total: int) -> Iterator[Show]:
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"onefold: {what}", file=sys.stderr, flush=True)
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def show(now: str, done: int, whole: int = total) -> None:
            bar.update(task, description=now, completed=min(done, whole), total=whole)

        yield show
