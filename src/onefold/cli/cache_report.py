"""Prints what `onefold cache` found. Control characters in names of folders and models are removed.

A table has fewer columns on a narrow terminal, and what is too long takes more lines: nothing is cut.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from onefold.cli.screen import CONTROL
from onefold.sizes import show_size

PLAIN_WIDTH = 1_000_000
"""The width where the output is no terminal: as wide as needed."""
GAP = 2
FOLDED, LEAST = 24, 8
"""The width that a folding column gets if others can go for it, and if none can."""
REASONS = {
    "checksum": "its checksum does not agree",
    "misnamed": "its name does not agree with what it holds",
    "truncated": "its end is missing",
    "too long": "it is longer than its header says",
    "no header of ours": "its header is not as a cache writes it",
    "of another layout": "it does not hold what records of its namespace do",
}
"""What is wrong with a record, for people; what is not here says it already."""
STORE_REASONS = REASONS | {
    "wrong seal": "its seal does not agree: it is damaged, or was sealed with another secret",
    "too large": "it is larger than a value can be",
    "of another format": "it is not as a cache writes it",
}
"""The same for a value of a shared store."""
MOST_ROWS = 40
MOST_NAMES = 10


class Bar:
    """A progress bar of bytes. Does nothing if it is not shown."""

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
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
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


def show_store(action: str, told: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    match action:
        case "ls" if "namespace" in told:
            _values(console, told)
        case "ls":
            _shared_namespaces(console, told)
        case "stat":
            _shared_stat(console, told)
        case "verify":
            _shared_verified(console, told)
        case "clear":
            _shared_cleared(console, told)


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


def _table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Collection[str] = (),
    spare: Sequence[str] = (),
    folds: str = "",
) -> None:
    """Where there is no room for all columns the `spare` ones go, one by one, for the one that `folds`."""
    cells = [[plain(cell) for cell in row] for row in rows]
    wide = {name: max(cell_len(row[i]) for row in (columns, *cells)) for i, name in enumerate(columns)}
    shown = list(columns)

    def room() -> int:
        """Width that the other columns leave."""
        return console.width - sum(wide[name] + GAP for name in shown if name != folds)

    wanted = min(wide[folds], FOLDED) if folds else -GAP
    for name in spare:
        if room() < wanted:
            shown.remove(name)
    if folds:
        wide[folds] = min(wide[folds], max(room(), LEAST))
    console.width = max(console.width, sum(wide[name] + GAP for name in shown))
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for name in shown:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=justify, width=wide[name], no_wrap=name != folds, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for name, cell in zip(columns, row, strict=True) if name in shown))
    console.print(table, crop=False)


def _count(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _namespaces(console: Console, told: dict[str, Any]) -> None:
    if not told["namespaces"]:
        _say(console, f"{told['folder']} is empty")
        return
    rows = []
    for space in sorted(told["namespaces"], key=lambda s: -(s["last_used"] or 0)):
        salted = {True: "yes", False: "no"}.get(space["salted"], "?")
        kv = "?" if space["kv"] is None else space["kv"]
        counts = _count(space["records"]), _count(space["tokens"]), show_size(space["bytes"])
        used = age(space["last_used"]), age(space["oldest"])
        rows.append((space["short"], space["label"], kv, salted, *counts, *used))
    _table(
        console,
        ("namespace", "model", "--kv", "private", "records", "tokens", "size", "last used", "oldest"),
        rows,
        right=("--kv", "records", "tokens", "size"),
        spare=("oldest", "private", "--kv", "tokens", "records", "last used"),
        folds="model",
    )
    bad = sum(space["unusable"] for space in told["namespaces"])
    if bad:
        _say(console, f"{n_of(bad, 'record')} cannot be used: see `onefold cache verify`; `prune` deletes them")


def _records(console: Console, told: dict[str, Any], every: bool) -> None:
    space, records = told["namespace"], told["records"]
    _say(console, f"{space['id']}: {space['label']}, {n_of(len(records), 'record')}, {show_size(space['bytes'])}")
    if not records:
        return
    shown = records if every else records[:MOST_ROWS]
    columns = ["record", "start", "tokens", "kind", "size", "last used", "problem"]
    rows: list[tuple[str, ...]] = [
        (
            _branch(record) + record["name"].partition("-")[2].partition(".")[0][:12],
            f"{record['start']:,}",
            _count(record["tokens"]),
            record["kind"],
            show_size(record["bytes"]),
            age(record["last_used"]),
            REASONS.get(record["problem"], record["problem"]),
        )
        for record in shown
    ]
    folds = "problem"
    if not any(record["problem"] for record in shown):
        columns, rows, folds = columns[:-1], [row[:-1] for row in rows], ""
    numbers, spare = ("start", "tokens", "size"), ("last used", "kind", "size", "tokens")
    _table(console, columns, rows, right=numbers, spare=spare, folds=folds)
    if any(record["level"] for record in shown):
        _say(console, "+ begins a conversation or, further in, a branch off the last record above that is less far in")
    if len(shown) < len(records):
        _say(console, f"and {len(records) - len(shown):,} more; --all lists them")


def _branch(record: dict[str, Any]) -> str:
    """Returns the indent of a record, which shows its parent: without a plus the record above at its level."""
    if record["level"] is None:
        return ""
    return "  " * record["level"] + ("+ " if record["begins"] else "  ")


def _stat(console: Console, told: dict[str, Any]) -> None:
    rows = [
        ("folder", told["folder"]),
        ("in use by", told["in_use_by"] or "no process"),
        ("size", show_size(told["bytes"])),
        ("records", f"{told['records']:,} in {n_of(told['namespaces'], 'namespace')}"),
        ("last used", age(told["last_used"])),
        ("oldest", age(told["oldest"])),
        ("written", f"{show_size(told['written_today_bytes'])} today, {show_size(told['written_ever_bytes'])} ever"),
        ("leftovers", f"{n_of(len(told['leftovers']), 'file')}, {show_size(told['leftover_bytes'])}"),
        ("free", f"{show_size(told['free_bytes'])} of {show_size(told['file_system_bytes'])}"),
    ]
    for name, value in rows:
        _say(console, f"{name:<9}  {value}")
    _names(console, told["strangers"], "not ours")


def _verified(console: Console, told: dict[str, Any]) -> None:
    for bad in told["bad"]:
        _say(console, f"bad: {bad['namespace']}/{bad['name']}: {REASONS.get(bad['reason'], bad['reason'])}")
    _names(console, told["of_another_format"], "of another format, not checked")
    _names(console, told["strangers"], "not ours")
    for namespace, n in told["not_compared"].items():
        which = f"{n_of(n, 'record')} could not be compared with the model"
        _say(console, f"{namespace}: {which}: its about.json does not describe their layers")
    result = f"{n_of(len(told['bad']), 'bad one')}" if told["bad"] else "all good"
    if told["going_on_from_bad"]:
        result += f", and {n_of(told['going_on_from_bad'], 'record')} beyond those"
    _say(console, f"{n_of(told['records'], 'record')}, {show_size(told['bytes'])}: {result}")
    if told["unread"]:
        left = n_of(told["unread"], "record")
        _say(console, f"{left} left there: check the disk and the permissions, and verify again")
    if told["removed_records"]:
        _say(console, f"deleted {n_of(told['removed_records'], 'record')}, {show_size(told['removed_bytes'])}")
    if told["removable_records"]:
        command = "onefold cache verify" + (f" --namespace {told['namespace']}" if told["namespace"] else "")
        these = "this 1" if told["removable_records"] == 1 else f"these {told['removable_records']:,}"
        _say(console, f"`{command} --remove` deletes {these} ({show_size(told['removable_bytes'])})")


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
        rows = [(s["short"], s["label"], f"{s['records']:,}", show_size(s["bytes"])) for s in told["namespaces"]]
        columns, numbers = ("namespace", "model", "records", "size"), ("records", "size")
        _table(console, columns, rows, right=numbers, spare=("records",), folds="model")
    left = f" and {n_of(told['leftovers'], 'leftover')}" if told["leftovers"] else ""
    _say(console, f"{verb} {n_of(told['records'], 'record')}, {show_size(told['bytes'])}{left}")


# -- a shared store ------------------------------------------------------------------------------------


def _model(space: dict[str, Any]) -> str:
    """Returns what is known of a namespace's model."""
    if space["unknown"]:
        return f"unknown ({space['unknown']})"
    adapter = f", adapter {space['adapter']}" if space["adapter"] else ""
    return (space["model"] or "?") + adapter


def _strangers(console: Console, told: dict[str, Any], more: str = "") -> None:
    if told["strangers"]:
        _say(console, f"not ours{more}: {n_of(told['strangers'], 'name')}")


def _shared_namespaces(console: Console, told: dict[str, Any]) -> None:
    if not told["namespaces"]:
        _say(console, f"{told['store']} is empty")
    else:
        rows = []
        for space in told["namespaces"]:
            counts = f"{space['values']:,}", show_size(space["bytes"]), _count(space["tokens"])
            rows.append((space["short"], _model(space), space["kv"] or "?", *counts, space["device"] or "?"))
        _table(
            console,
            ("namespace", "model", "--kv", "values", "size", "tokens a record", "device"),
            rows,
            right=("--kv", "values", "size", "tokens a record"),
            spare=("device", "tokens a record", "--kv", "values"),
            folds="model",
        )
    _strangers(console, told)


def _values(console: Console, told: dict[str, Any]) -> None:
    space, values = told["namespace"], told["values"]
    _say(console, f"{space['id']}: {_model(space)}, {n_of(space['values'], 'value')}, {show_size(space['bytes'])}")
    rows = [(value["name"].rpartition("/")[2], show_size(value["bytes"])) for value in values]
    _table(console, ("value", "size"), rows, right=("size",), folds="value")
    if len(values) < space["values"]:
        _say(console, f"and {space['values'] - len(values):,} more; --all lists them")
    _strangers(console, told)


def _shared_stat(console: Console, told: dict[str, Any]) -> None:
    rows = [
        ("store", told["store"]),
        ("size", show_size(told["bytes"])),
        ("values", f"{told['values']:,} in {n_of(told['namespaces'], 'namespace')}"),
    ]
    for name, value in rows:
        _say(console, f"{name:<9}  {value}")
    _strangers(console, told)


def _shared_verified(console: Console, told: dict[str, Any]) -> None:
    single = [bad for bad in told["bad"] if bad["namespace"] not in told["all_bad"]]
    for bad in single[:MOST_ROWS]:
        _say(console, f"bad: {bad['name']}: {STORE_REASONS.get(bad['reason'], bad['reason'])}")
    if len(single) > MOST_ROWS:
        _say(console, f"and {len(single) - MOST_ROWS:,} more; --json lists them")
    for namespace, n in told["all_bad"].items():
        why = "they were sealed with another secret, or are damaged, which cannot be told apart"
        if not told["has_secret"]:
            why = "they are sealed with a secret, or damaged, which cannot be told apart without --remote-secret-file"
        _say(console, f"{namespace}: {f'all {n:,} values fail' if n > 1 else 'its 1 value fails'}: {why}")
    _strangers(console, told)
    result = f"{n_of(len(told['bad']), 'bad one')}" if told["bad"] else "all good"
    _say(console, f"{n_of(told['values'], 'value')}, {show_size(told['bytes'])}: {result}")
    if told["removed_values"]:
        _say(console, f"deleted {n_of(told['removed_values'], 'value')}, {show_size(told['removed_bytes'])}")
    if told["removable_values"]:
        command = "onefold cache verify" + (f" --namespace {told['namespace']}" if told["namespace"] else "")
        these = "this 1" if told["removable_values"] == 1 else f"these {told['removable_values']:,}"
        _say(console, f"`{command} --remove` deletes {these} ({show_size(told['removable_bytes'])})")
    if told["all_bad"] and told["namespace"] is None:
        _say(console, "--remove leaves a namespace there of which all values fail, unless --namespace ID names it")


def _shared_cleared(console: Console, told: dict[str, Any]) -> None:
    if not told["agreed"]:
        _say(console, "nothing was deleted")
        return
    _say(console, f"deleted {n_of(told['values'], 'value')}, {show_size(told['bytes'])}")
    _strangers(console, told, ", and left there")
