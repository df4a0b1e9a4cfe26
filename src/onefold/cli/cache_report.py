"""How `onefold cache` looks. Nothing is found out here; names that others chose cannot move a terminal's cursor."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from onefold.cli.screen import CONTROL
from onefold.sizes import show_size

PLAIN_WIDTH = 160
"""Of what is no terminal."""
MOST_ROWS = 40
MOST_NAMES = 10


class Bar:
    """Of bytes; one that is not shown does nothing."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task("verifying", total=None)

    def begin(self, total_bytes: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=total_bytes)

    def advance(self, n_bytes: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=n_bytes)


@contextmanager
def bar(*, shown: bool) -> Iterator[Bar]:
    if not (shown and sys.stdout.isatty() and sys.stderr.isatty()):
        yield Bar(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress)


def show(action: str, told: dict[str, Any], *, every: bool = False) -> None:
    made = Console(highlight=False)
    console = made if made.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
    match action:
        case "ls" if "namespace" in told:
            _records(console, told, every)
        case "ls":
            _namespaces(console, told)
        case "stat":
            _stat(console, told)
        case "verify":
            _verified(console, told)
        case "prune":
            _pruned(console, told)
        case "clear":
            _cleared(console, told)


# -- words -------------------------------------------------------------------------------------------


def plain(text: object) -> str:
    """A name as it can be shown: without control characters, and with something for what is no text."""
    return os.fsencode(str(text)).decode(errors="replace").translate(CONTROL).replace("\n", " ").replace("\t", " ")


def age(moment: float | None, now: float | None = None) -> str:
    if moment is None:
        return "-"
    seconds = (time.time() if now is None else now) - moment
    if seconds < -60:
        return "in the future"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:,.0f} {unit} ago"
    return "just now"


def n_of(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _say(console: Console, text: str) -> None:
    console.print(Text(plain(text)), soft_wrap=True)


def _names(console: Console, names: list[str], what: str) -> None:
    if names:
        more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
        _say(console, f"{what}: {', '.join(names[:MOST_NAMES])}{more}")


# -- tables ------------------------------------------------------------------------------------------


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column != "model")
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(Text(plain(cell)) for cell in cells))


def _count(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _namespaces(console: Console, told: dict[str, Any]) -> None:
    if not told["namespaces"]:
        _say(console, f"{told['folder']} is empty")
        return
    table = _table(
        "namespace", "model", "kv", "salted", "records", "tokens", "size", "last used", "oldest",
        right=("kv", "records", "tokens", "size"),
    )  # fmt: skip
    for space in sorted(told["namespaces"], key=lambda s: -(s["last_used"] or 0)):
        salted = {True: "yes", False: "no"}.get(space["salted"], "?")
        kv = "?" if space["kv"] is None else space["kv"]
        counts = _count(space["records"]), _count(space["tokens"]), show_size(space["bytes"])
        _add(table, space["short"], space["label"], kv, salted, *counts, age(space["last_used"]), age(space["oldest"]))
    console.print(table)
    bad = sum(space["unusable"] for space in told["namespaces"])
    if bad:
        _say(console, f"{n_of(bad, 'record')} cannot be used: onefold cache verify says why, prune deletes them")


def _records(console: Console, told: dict[str, Any], every: bool) -> None:
    space, records = told["namespace"], told["records"]
    _say(console, f"{space['id']}: {space['label']}, {n_of(len(records), 'record')}, {show_size(space['bytes'])}")
    if not records:
        return
    table = _table("start", "tokens", "kind", "size", "last used", "record", right=("start", "tokens", "size"))
    shown = records if every else records[:MOST_ROWS]
    for record in shown:
        name = record["name"].partition("-")[2].partition(".")[0][:12]
        problem = f"{name}  {record['problem']}" if record["problem"] else name
        size, used = show_size(record["bytes"]), age(record["last_used"])
        _add(table, f"{record['start']:,}", _count(record["tokens"]), record["kind"], size, used, problem)
    console.print(table)
    if len(shown) < len(records):
        _say(console, f"and {len(records) - len(shown):,} more: --all shows them")


def _stat(console: Console, told: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [
        ("folder", told["folder"]),
        ("in use by", told["in_use_by"] or "nobody"),
        ("size", show_size(told["bytes"])),
        ("records", f"{told['records']:,} in {n_of(told['namespaces'], 'namespace')}"),
        ("last used", age(told["last_used"])),
        ("oldest", age(told["oldest"])),
        ("written", f"{show_size(told['written_today_bytes'])} today, {show_size(told['written_ever_bytes'])} ever"),
        ("leftovers", f"{n_of(len(told['leftovers']), 'file')}, {show_size(told['leftover_bytes'])}"),
        ("free", f"{show_size(told['free_bytes'])} of {show_size(told['file_system_bytes'])}"),
    ]
    for name, value in rows:
        _add(table, name, value)
    console.print(table, soft_wrap=True)
    _names(console, told["strangers"], "not ours")


def _verified(console: Console, told: dict[str, Any]) -> None:
    for bad in told["bad"]:
        _say(console, f"bad: {bad['namespace']}/{bad['name']}: {bad['reason']}")
    _names(console, told["of_another_format"], "of another format, not checked")
    _names(console, told["strangers"], "not ours")
    result = f"{n_of(len(told['bad']), 'bad one')}" if told["bad"] else "all good"
    if told["going_on_from_bad"]:
        result += f", and {n_of(told['going_on_from_bad'], 'record')} beyond those"
    _say(console, f"{n_of(told['records'], 'record')}, {show_size(told['bytes'])}: {result}")
    if told["removed_records"]:
        _say(console, f"deleted {n_of(told['removed_records'], 'record')}, {show_size(told['removed_bytes'])}")


def _pruned(console: Console, told: dict[str, Any]) -> None:
    _removed(console, told, "would delete" if told["dry_run"] else "deleted")
    why = told["why"]
    for count, words in (
        (why["unusable"], "that no cache could use"),
        (why["older"], "not used for so long"),
        (why["beyond_budget"], "beyond the budget"),
    ):
        if count:
            _say(console, f"  {count:,} {words}")
    verb = "would be left" if told["dry_run"] else "left"
    _say(console, f"{verb}: {n_of(told['left_records'], 'record')}, {show_size(told['left_bytes'])}")


def _cleared(console: Console, told: dict[str, Any]) -> None:
    if not told["agreed"]:
        _say(console, "nothing was deleted")
        return
    _removed(console, told, "deleted")
    _names(console, told["strangers"], "not ours, and left there")


def _removed(console: Console, told: dict[str, Any], verb: str) -> None:
    if told["namespaces"]:
        table = _table("namespace", "model", "records", "size", right=("records", "size"))
        for space in told["namespaces"]:
            _add(table, space["short"], space["label"], f"{space['records']:,}", show_size(space["bytes"]))
        console.print(table)
    left = f" and {n_of(told['leftovers'], 'leftover')}" if told["leftovers"] else ""
    _say(console, f"{verb} {n_of(told['records'], 'record')}, {show_size(told['bytes'])}{left}")
