"""Every architecture of the installed mlx-lm on a tiny model: what its cache is made of, how it is reused, whether that
is right. Writes docs/models.md.

    make models                # or: python benchmarks/models.py [NAME ...]

Each architecture has a process of its own, so that one that crashes or hangs is a failed row and not the end. With
names, only those are tried, and nothing is written. The exit status says whether every row is as it should be.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests"))

import onefold  # noqa: E402, F401  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx  # noqa: E402
import zoo  # noqa: E402
from trial import Trial  # noqa: E402

LIMIT_S = 300
"""The most that one architecture may take; it takes about 5 seconds."""
WORKERS = 2
ENOUGH = 0.95
"""The share of what can be constructed that must be reused."""

HEAD = """\
# Architectures

<!-- Written by `make models` (benchmarks/models.py). Changes made here will be lost. -->

Every model module of mlx-lm {mlx_lm}, on MLX {mlx}, {where}. {summary}

Each is a tiny model with random fp32 weights and every kind of layer that the architecture has (`tests/zoo.py`):
windows of 16 tokens, both kinds of layer in a hybrid, a few experts. It runs the trial of `tests/trial.py`: cold,
continue, branch, rewind, exact repeat, two concurrent readers, a batch, eviction and return, retry after a cancel. In
each of these the logits are those of a cold run on the same calls (1e-4 of their scale, greedy tokens too), all tokens
that the layers allow are reused, all layers stand at one offset, the ledger equals MLX's active memory less the weights
(1 % or 1 KiB), and closing the cache returns memory to the weights. Then each
layer's cached state is disturbed in turn: the trial must notice it, or it would prove nothing.

How it is reused:

- **shared in place**: requests on one prefix read its KV (keys and values) in place; a single request appends to it.
- **moved**: a single request appends to the existing buffers. The model reads its KV in its own way, so a second
  request on a prefix that another one holds gets a copy, within the budget.
- **checkpointed**: windows and recurrent states are restored at checkpoints: at the end of a prompt and of a
  turn, and at requested positions.
- **uncached**: the model runs on mlx-lm's own caches and nothing is kept.

How a batch is stepped: rows of 30, 14 and 19 tokens decode 4 tokens each, and the logits of each must be those of the
row alone on mlx-lm's own caches (1e-4 of their scale).

- **together**: one forward of the model for all rows.
- **singly**: one forward for each row, because the model's code takes one position for all rows, or reads its KV
  otherwise than through mlx-lm's attention function.

| architecture | caches, by layer | reused | batched | trial | remarks |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    name: str
    kinds: str = ""
    reuse: str = ""
    batched: str = ""
    trial: str = ""
    remarks: str = ""
    constructed: bool = False
    reused: bool = False
    ok: bool = False
    """As it should be: it passed, or it cannot be reused for a reason that is known."""


def examine(name: str) -> Row:
    """Build one architecture and have it stand the trial. In a process of its own."""
    new = "" if name in zoo.KNOWN else "new: not in the record of `tests/zoo.py`, tried with its general config."
    known = zoo.LEFT_OUT.get(name, "") or ("" if mx.metal.is_available() else zoo.STANDS_IN.get(name, ""))
    try:
        model = zoo.model(name)
    except (Exception, SystemExit) as error:  # whatever another project's code raises is a line of the table
        why = f"{type(error).__name__}: {error}"
        return Row(name, trial="not constructed", remarks=_said(new, known or "Needs a config in `tests/zoo.py`.", why))
    report = Trial(model).run()
    failed = [f"{o.scenario} ({o.failure})" for o in report.failures]
    result = "failed: " + ", ".join(failed) if failed else "passed" if report.outcomes else "not run"
    reused = not (report.uncached or report.defect or failed)
    excused = name in zoo.LEFT_OUT and bool(report.uncached or report.defect)
    remarks = _said(new, known, report.defect, report.uncached)
    found = (report.kinds, report.reuse, report.batched, result, remarks)
    return Row(name, *found, constructed=True, reused=reused, ok=reused or excused)


def _said(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def in_a_process(name: str) -> Row:
    environment = {**os.environ, "MLX_DISABLE_COMPILE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--examine", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return Row(name, trial=f"failed: no end after {LIMIT_S} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return Row(name, trial=f"failed: the process ended with {done.returncode}", remarks=last[:200])
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def rows_of(names: list[str]) -> list[Row]:
    """A row for each, in order, with progress on the terminal."""
    found: dict[str, Row] = {}
    began = time.monotonic()
    with ThreadPoolExecutor(WORKERS) as pool:
        for future in as_completed([pool.submit(in_a_process, name) for name in names]):
            row = future.result()
            found[row.name] = row
            mark = "" if row.ok else "  <--"
            print(f"{len(found):4} of {len(names)}  {row.name}: {row.reuse or '-'}, {row.trial}{mark}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    return [found[name] for name in names]


def gone() -> list[Row]:
    """What the record has and the installed mlx-lm has not."""
    missing = sorted(zoo.KNOWN - set(zoo.installed()), key=str.lower)
    return [Row(name, trial="—", remarks="gone: not in this mlx-lm", ok=True) for name in missing]


def summary(rows: list[Row]) -> str:
    constructed = [r for r in rows if r.constructed]
    reused = sum(r.reused for r in constructed)
    share = 100 * reused / max(1, len(constructed))
    return (
        f"{len(rows)} architectures, {len(constructed)} constructed, {reused} reused and right in every trial"
        f" ({share:.1f} %)."
    )


def page(rows: list[Row], vanished: list[Row]) -> str:
    def cell(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|") or "—"

    head = HEAD.format(
        mlx=importlib.metadata.version("mlx"),
        mlx_lm=importlib.metadata.version("mlx-lm"),
        where=f"run on a {'GPU' if mx.default_device() == mx.gpu else 'CPU'}",
        summary=summary(rows),
    )
    ordered = sorted([*rows, *vanished], key=lambda r: r.name.lower())
    columns = [(r.name, r.kinds, r.reuse, r.batched, r.trial, r.remarks) for r in ordered]
    lines = [f"| {' | '.join(map(cell, texts))} |" for texts in columns]
    return head + "\n".join(lines) + "\n"


def as_it_should_be(rows: list[Row]) -> bool:
    constructed = sum(r.constructed for r in rows)
    return all(r.ok for r in rows) and sum(r.reused for r in rows) >= ENOUGH * constructed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="architectures; all of them if none is named")
    parser.add_argument("--examine", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.examine:
        print(json.dumps(asdict(examine(given.examine))))
        return 0
    rows = rows_of(given.names or zoo.installed())
    if not given.names:
        PAGE.write_text(page(rows, gone()))
        print(f"{PAGE.relative_to(ROOT)} written")
    print(summary(rows))
    for row in rows:
        if not row.ok:
            print(f"  {row.name}: {row.trial}. {row.remarks}")
    return 0 if as_it_should_be(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
