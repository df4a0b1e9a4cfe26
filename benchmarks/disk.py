"""The disk tier's figures: what a restart costs, what writing costs, and what lies on the disk.

    make bench-disk     # or: python benchmarks/disk.py [--only restart,restore,decode,commit,turns,open] [--repeats 5]

On the demo model, and a conversation of 4096 tokens. Each part runs in a process of its own, and what is compared runs
in turn. A restart is a new process; before anything is read back, the operating system is asked to drop the files from
its file cache (which macOS cannot), so they come from the device, or from its own cache. KV that is only written or
moved, never computed with, is random numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
from disk_parts import DECODING, PARTS, RECORDS, Settings
from rich.console import Console
from rich.table import Table

from onefold.sizes import show_size


@dataclass
class Row:
    what: str
    value: str
    target: str = ""
    met: bool | None = None
    """None: there is no target."""
    note: str = ""


def in_a_process(part: str, given: Settings) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", part, "--folder", given.folder]
    command += ["--tokens", str(given.tokens), "--repeats", str(given.repeats), "--records", str(given.records)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


# -- figures ------------------------------------------------------------------------------------------------


def _again(given: Settings, repeats: int) -> Settings:
    return Settings(given.folder, given.tokens, repeats, given.records)


def bench_restart(given: Settings) -> Iterator[Row]:
    made = in_a_process("cold", given)
    restarts = [in_a_process("restart", _again(given, 10 + i)) for i in range(given.repeats)]
    restart = statistics.median(r["restart"] for r in restarts)
    warm = statistics.median([*made["warm"], *(r["warm"] for r in restarts)])
    seconds = f"{restart:.2f} s; cold {made['cold']:.1f} s, in memory {warm:.2f} s"
    state = "file cache dropped" if all(r["dropped"] for r in restarts) else "file cache warm"
    where = f"new process, {state}; opening {1000 * statistics.median(r['opening'] for r in restarts):.0f} ms"
    yield Row("first token after a restart / cold prefill", f"{restart / made['cold']:.3f}", note=seconds)
    yield Row("first token after a restart / in memory", f"{restart / warm:.2f}", note=where)
    ratio, blocks = made["file_bytes"] / made["kv_bytes"], made["disk_bytes"] / made["kv_bytes"]
    note = f"{made['records']} records, {show_size(made['file_bytes'])}; in blocks {blocks:.4f}"
    yield Row("bytes of the files / bytes of KV", f"{ratio:.4f}", "≤ 1.02", ratio <= 1.02, note)


def bench_restore(given: Settings) -> Iterator[Row]:
    found = in_a_process("restore", given)
    pairs = list(zip(found["restore"], found["plain"], strict=True))
    ratio = statistics.median(plain / restore for restore, plain in pairs)
    rates = [found["bytes"] / statistics.median(x) / 1e9 for x in (found["restore"], found["plain"])]
    note = f"{rates[0]:.2f} GB/s and {rates[1]:.2f} GB/s; each of {len(pairs)}: "
    note += " ".join(f"{plain / restore:.2f}" for restore, plain in pairs)
    yield Row("restore bandwidth / plain reads", f"{ratio:.2f}", "≥ 0.70", ratio >= 0.7, note)
    peak = found["peak"] / found["entry"]
    process = f"; the process: {found['rss_peak'] / found['rss_entry']:.3f}" if found["rss_entry"] else ""
    note = f"{show_size(found['peak'])} of {show_size(found['entry'])}{process}"
    yield Row("peak memory of a restore / the entry", f"{peak:.3f}", "≤ 1.05", peak <= 1.05, note)


def bench_decode(given: Settings) -> Iterator[Row]:
    measured = in_a_process("decode", given)
    for name, what in (("turn", "while a 512-token turn is written"), ("busy", "while 4096 tokens are written")):
        found, (_, n) = measured[name], DECODING[name]
        ratio, spread = statistics.median(found["ratios"]), sorted(found["ratios"])
        note = f"{show_size(int(statistics.median(found['bytes'])))} written during {n} tokens; "
        note += f"{spread[0]:.2f} to {spread[-1]:.2f}; {found['writing']} of {len(spread)} still writing at the end"
        yield Row(f"decode {what} / without", f"{ratio:.3f}", "≥ 0.97", ratio >= 0.97, note)


def bench_commit(given: Settings) -> Iterator[Row]:
    found = {k: [1000 * s for s in v] for k, v in in_a_process("commit", given).items()}
    middle = {k: statistics.median(v) for k, v in found.items()}
    note = f"without disk {middle['none']:.2f} ms; while the turn before is written {middle['busy']:.2f} ms; "
    note += f"worst {max(found['disk']):.1f}, {max(found['none']):.1f}, {max(found['busy']):.1f} ms"
    yield Row("commit of 512 tokens, written through", f"{middle['disk']:.2f} ms", "≤ 2 ms", middle["disk"] <= 2, note)


def bench_turns(given: Settings) -> Iterator[Row]:
    found = in_a_process("turns", given)
    plain = statistics.median(found["none"]["seconds"])
    for name, what in (("disk", "written through"), ("slow", "written through, 30 ms more for each fsync")):
        run = found[name]
        ratio = statistics.median(run["seconds"]) / plain
        note = f"{run['elsewhere']} went on elsewhere; a turn takes {ratio:.2f} times as long as without a disk"
        value, met = f"{run['in_place']} of 192", run["in_place"] >= 190
        yield Row(f"turns that go on in place, {what}", value, "≥ 190", met, note)


def bench_open(given: Settings) -> Iterator[Row]:
    made = in_a_process("records", given)
    first = in_a_process("open", _again(given, 0))
    runs = [in_a_process("open", _again(given, i)) for i in range(max(2, given.repeats // 2 * 2))]
    cold = statistics.median(r["seconds"] for r in runs if r["cold"])
    warm = statistics.median(r["seconds"] for r in runs if not r["cold"])
    each = 1e6 * statistics.median(r["processor"] for r in runs) / made["records"]
    note = f"file cache dropped; {warm:.2f} s with it, {first['seconds']:.2f} s the first time; "
    note += f"{show_size(made['bytes'])}; closing {statistics.median(r['closing'] for r in runs):.2f} s"
    most = made["records"] / 10_000
    yield Row(f"opening {made['records']} records", f"{cold:.2f} s", f"≤ {most:.1f} s", cold <= most, note)
    note = f"{1e6 * first['processor'] / made['records']:.0f} µs the first time; "
    note += f"memory {statistics.median(r['rss'] for r in runs) / made['records']:.0f} bytes for each"
    yield Row("processor time of opening, for each record", f"{each:.0f} µs", "≤ 60 µs", each <= 60, note)
    for name, seconds in in_a_process("commands", given).items():
        yield Row(f"onefold cache {name}", f"{seconds:.2f} s", "≤ 3 s", seconds <= 3)


BENCHES = {"restart": bench_restart, "restore": bench_restore, "decode": bench_decode, "commit": bench_commit}
BENCHES |= {"turns": bench_turns, "open": bench_open}


def show(title: str, benches: dict[str, Callable[[], Iterable[Row]]], only: str) -> int:
    """Runs those benches whose names are in `only`, all if it is empty, and prints their table. Returns 0."""
    console = Console(width=170)
    table = Table(title=title)
    for column in ("what", "Onefold", "target", "", "in this run"):
        table.add_column(column, justify="left" if column in ("what", "in this run") else "right")
    missed = 0
    for name in [b for b in only.split(",") if b] or list(benches):
        with console.status(name):
            rows = list(benches[name]())
        for row in rows:
            missed += row.met is False
            verdict = "" if row.met is None else "met" if row.met else "MISSED"
            table.add_row(row.what, row.value, row.target, verdict, row.note)
    console.print(table)
    console.print(f"{missed} of the targets missed." if missed else "Every target met.")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"comma-separated: {','.join(BENCHES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--records", type=int, default=RECORDS, help="that are opened")
    parser.add_argument("--folder", help="kept afterwards, and must be empty; a temporary one if not given")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](Settings(args.folder, args.tokens, args.repeats, args.records))))
        return 0
    title = f"Onefold {onefold.__version__}, MLX {version('mlx')}, {mx.default_device()}"
    with contextlib.ExitStack() as stack:
        folder = args.folder or stack.enter_context(tempfile.TemporaryDirectory())
        given = Settings(folder, args.tokens, args.repeats, args.records)
        return show(title, {name: partial(bench, given) for name, bench in BENCHES.items()}, args.only)


if __name__ == "__main__":
    raise SystemExit(main())
