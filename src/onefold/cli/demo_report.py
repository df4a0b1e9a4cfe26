"""Prints the demo: progress while it runs, and tables of time and memory at the end.

Every figure is measured: by the client, or by the server and asked of it. Nothing is computed from them but sums,
ratios and, for a copy per conversation, the tokens of all conversations times the bytes of a token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from onefold.cli.demo_agents import Asked, News, Played
from onefold.cli.holding import held_bytes
from onefold.cli.screen import CONTROL
from onefold.sizes import show_size

PLAIN_WIDTH = 110
"""The width where the output is no terminal."""
SHOWN_ANSWERS = 4


def console() -> Console:
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


# -- while it runs ----------------------------------------------------------------------------


@contextmanager
def waiting(screen: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Shows a status. Yields a function that changes its text."""
    if not screen.is_terminal:
        screen.print(what)
        yield lambda _: None
        return
    with screen.status(Text(what)) as status:
        yield lambda now: status.update(Text(f"{what}: {now}", no_wrap=True, overflow="ellipsis"))


@dataclass
class _Line:
    turn: int = 0
    text: str = ""
    told: str = "waits"


@dataclass
class Stage:
    """Who says what at this moment."""

    turns: int
    lines: dict[str, _Line] = field(default_factory=dict)
    begun_at: float = field(default_factory=time.monotonic)

    def hear(self, news: News) -> None:
        line = self.lines.setdefault(news.agent, _Line())
        if isinstance(news, Asked):
            line.told = f"turn {news.turn + 1} of {self.turns}: {tell(news)}"
            return
        if line.turn != news.turn:
            line.turn, line.text = news.turn, ""
        line.text += news.text
        line.told = f"turn {news.turn + 1} of {self.turns}: {flat(line.text)[-60:]}"

    def __rich__(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, line in self.lines.items():
            table.add_row(Text(name, "bold"), Text(line.told, no_wrap=True, overflow="ellipsis"))
        table.add_row("", Text(f"{time.monotonic() - self.begun_at:.0f} s", "dim"))
        return table


@contextmanager
def stage(screen: Console, names: list[str], turns: int) -> Iterator[Callable[[News], None]]:
    """A moving picture on a terminal; elsewhere a line for each answer."""
    if not screen.is_terminal:

        def line(news: News) -> None:
            if isinstance(news, Asked):
                screen.print(Text(f"{news.agent}, turn {news.turn + 1} of {turns}: {tell(news)}"), soft_wrap=True)

        yield line
        return
    shown = Stage(turns, {name: _Line() for name in names})
    shown.lines[names[0]].told = "asks, alone"
    with Live(shown, console=screen, refresh_per_second=6, transient=True):
        yield shown.hear


def tell(asked: Asked) -> str:
    seconds = asked.reading.seconds_to_first or 0.0
    said = f"{asked.cached_tokens:,} of {asked.prompt_tokens:,} prompt tokens reused, first token after"
    return f"{said} {seconds:.2f} s"


# -- at the end -------------------------------------------------------------------------------


def report(screen: Console, played: Played, stats: Mapping[str, Any]) -> None:
    screen.print()
    screen.print(_speed(played))
    screen.print()
    screen.print(_memory(played, stats))
    screen.print()
    screen.print("Some of the answers:", style="bold")
    for asked in _samples(played):
        screen.print(Text.assemble((f"{asked.agent}: ", "bold"), (asked.question, "dim")), soft_wrap=True)
        screen.print(Text(f"    {flat(asked.reading.text) or '(nothing)'}"), soft_wrap=True)


def _speed(played: Played) -> Table:
    cold, warm = played.cold, played.warm
    table = Table(title="Speed", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("cold: the first, alone", justify="right")
    table.add_column(f"warm: {len(warm)} more, at once", justify="right")
    waits = [asked.reading.seconds_to_first or 0.0 for asked in warm]
    middle = f"{statistics.median(waits):.2f} s (slowest {max(waits):.2f} s)" if waits else "-"
    table.add_row("time to the first token", f"{cold.reading.seconds_to_first or 0.0:.2f} s", middle)
    table.add_row("prompt tokens reused", _share([cold]), _share(warm))
    table.add_row("prompt tokens computed", _computed([cold]), _computed(warm))
    rates = ((played.cold_seconds, [cold]), (played.warm_seconds, warm))
    table.add_row("answer tokens per second", *(f"{_answered(s) / t:.1f}" if s else "-" for t, s in rates))
    table.caption = "Times are as a client sees them; warm is the median. Rates are of all agents, waiting included."
    return table


def _memory(played: Played, stats: Mapping[str, Any]) -> Table:
    token_bytes = int(stats["cache"]["token_bytes"])
    tokens = sum(asked.total_tokens for asked in played.last)
    held, copies = held_bytes(stats), tokens * token_bytes
    table = Table(title="Memory for KV", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("memory", justify="right")
    table.add_column("")
    stored = stats["cache"]["stored_tokens"]
    table.add_row("held by Onefold", show_size(held), f"{stored:,} tokens, each once, and room to grow")
    each = f"conversations: {len(played.last)}, with {tokens:,} tokens of {show_size(token_bytes)}"
    table.add_row("a copy for each conversation", show_size(copies), each)
    table.add_row("so a copy each is", f"{copies / held:.1f} times" if held else "-", "as much")
    return table


def _samples(played: Played) -> list[Asked]:
    """The first answer of each of the first agents."""
    first = [asked for asked in (played.cold, *played.warm) if asked.turn == 0]
    return first[:SHOWN_ANSWERS]


def _share(some: list[Asked] | tuple[Asked, ...]) -> str:
    cached, prompted = sum(a.cached_tokens for a in some), sum(a.prompt_tokens for a in some)
    return f"{cached:,} of {prompted:,} ({cached / prompted:.0%})" if prompted else "-"


def _computed(some: list[Asked] | tuple[Asked, ...]) -> str:
    return f"{sum(a.prompt_tokens - a.cached_tokens for a in some):,}"


def _answered(some: list[Asked] | tuple[Asked, ...]) -> int:
    return sum(a.reading.completion_tokens for a in some)


def flat(text: str) -> str:
    return " ".join(text.translate(CONTROL).split())
