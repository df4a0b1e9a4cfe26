"""Our prompt cache in the place of mlx-lm's, behind mlx-lm's own server: what it holds, copies and takes.

    make bench-dropin          # or: python benchmarks/dropin.py [--only continue,concurrent,...] [--tokens 4096]

Every figure is measured on both classes in the same run, each time in a new process (`dropin_measures.py`, which says
what exactly is measured). The model is a local one with random weights in which KV outweighs all else.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from local_model import Shape, write_model
from prompt_caches import AVAILABLE

HERE = Path(__file__).resolve().parent
Result = dict[str, Any]
PATHS = ("single", "draft", "batched")
NAMES = {"single": "served alone", "draft": "with a draft model", "batched": "in a batch of one"}


@dataclass
class Row:
    what: str
    values: dict[str, float]
    """By whose cache it is."""
    target: Callable[[float], bool] | None = None
    said: str = "—"
    form: str = "{:.2f}"

    def met(self) -> bool:
        return self.target is None or "onefold" not in self.values or self.target(self.values["onefold"])


def at_most(limit: float) -> dict[str, Any]:
    return {"target": lambda value: value <= limit, "said": f"≤ {limit:g}"}


@dataclass
class Bench:
    """Runs the measurements, and keeps the answers that came with them."""

    caches: list[str]
    tokens: int
    repeats: int
    model: Path
    draft: Path
    token_bytes: int
    draft_bytes: int
    answers: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def measure(self, cache: str, measure: str, *flags: str, path: str = "batched", tokens: int = 0) -> Result:
        drafted = path == "draft"
        command = [sys.executable, str(HERE / "dropin_measures.py"), measure, f"--cache={cache}", f"--path={path}"]
        command += [f"--model={self.model}", *([f"--draft={self.draft}"] if drafted else []), *flags]
        command += [f"--tokens={tokens or self.tokens}"]
        command += [f"--token-bytes={self.token_bytes + (self.draft_bytes if drafted else 0)}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"failed: {' '.join(command)}")
        return json.loads(done.stdout.splitlines()[-1])

    def heard(self, what: str, cache: str, result: Result) -> Result:
        self.answers.setdefault(what, {})[cache] = result["answers"]
        return result

    def bench_continue(self) -> Iterator[Row]:
        for path in PATHS:
            what = f"continue by a short turn, {NAMES[path]}"
            found = {c: self.heard(what, c, self.measure(c, "continue", path=path)) for c in self.caches}
            limit = 1.25 if path == "batched" else 1.10
            yield Row(f"{what}: peak KV / entry", {c: r["ratio"] for c, r in found.items()}, **at_most(limit))
            yield Row("  held before that turn / entry", {c: r["held"] for c, r in found.items()})
        truth = self.measure("none", "continue")["answers"]  # greedy: the same answers on every path
        for path in PATHS:
            self.answers[f"continue by a short turn, {NAMES[path]}"]["none"] = truth

    def bench_concurrent(self) -> Iterator[Row]:
        for what, flags in (("6 requests at once", []), ("6 at once on one system prompt", ["--shared"])):
            found = {c: self.heard(what, c, self.measure(c, "concurrent", *flags)) for c in [*self.caches, "none"]}
            ours = {c: found[c] for c in self.caches}
            yield Row(f"{what}, afterwards: held / reported", {c: r["ratio"] for c, r in ours.items()}, **at_most(1.02))
            yield Row("  held, MB", {c: r["held"] / 1e6 for c, r in ours.items()}, form="{:.0f}")

    def bench_fetch(self) -> Iterator[Row]:
        found = {c: self.measure(c, "fetch", f"--times={1 if c == 'stock' else 9}", tokens=65536) for c in self.caches}
        for key, name in (
            ("half", "a branch at half"),
            ("early", "a branch at 100 tokens"),
            ("extend", "an extension"),
        ):
            values = {c: r[key] for c, r in found.items()}
            yield Row(f"fetch_nearest_cache, 65,536 tokens: {name}, ms", values, **at_most(2), form="{:.1f}")

    def bench_converse(self) -> Iterator[Row]:
        for path in PATHS:
            what = f"5 turns, {NAMES[path]}"
            runs: dict[str, list[float]] = {c: [] for c in self.caches}
            for _ in range(self.repeats):  # in turn, so that what else the machine does falls on both alike
                for c in self.caches:
                    runs[c].append(self.heard(what, c, self.measure(c, "converse", path=path))["seconds"])
            ratios = {c: statistics.median(a / b for a, b in zip(runs[c], runs["stock"], strict=True)) for c in runs}
            yield Row(f"{what}: time / mlx-lm's", ratios)
        truth = self.measure("none", "converse")["answers"]
        for path in PATHS:
            self.answers[f"5 turns, {NAMES[path]}"]["none"] = truth

    def answer_rows(self) -> Iterator[Row]:
        for what, by in self.answers.items():
            truth = by["none"]
            right = {c: float(sum(a == b for a, b in zip(by[c], truth, strict=True))) for c in self.caches}
            n = len(truth)
            yield Row(f"{what}: answers as without a cache", right, partial(operator.eq, n), f"{n} of {n}", "{:.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated: continue,concurrent,fetch,converse")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the conversation that is continued")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="of the five turns, for the median of the ratios")
    parser.add_argument("--caches", default=",".join(AVAILABLE), help="stock,onefold or stock alone")
    args = parser.parse_args()
    shape = Shape("llama", layers=args.layers, intermediate=256)
    small = replace(shape, layers=max(1, args.layers // 8))
    console = Console(width=150)
    caches = args.caches.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        model, draft = (write_model(Path(scratch) / name, s) for name, s in (("model", shape), ("draft", small)))
        bench = Bench(caches, args.tokens, args.repeats, model, draft, shape.token_bytes, small.token_bytes)
        benches = {
            "continue": bench.bench_continue,
            "concurrent": bench.bench_concurrent,
            "fetch": bench.bench_fetch,
            "converse": bench.bench_converse,
        }
        rows: list[Row] = []
        for name in [b for b in args.only.split(",") if b] or benches:
            with console.status(name):
                rows += benches[name]()
        rows += bench.answer_rows()
    table = Table(title=f"mlx-lm's server, {args.layers} layers, {args.tokens} tokens")
    for column in ("what", "target", "", *caches):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        state = "" if row.target is None or "onefold" not in caches else "ok" if row.met() else "MISSED"
        table.add_row(row.what, row.said, state, *(row.form.format(row.values[c]) for c in caches))
    console.print(table)
    return 0 if all(row.met() for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
