"""The problems that Onefold is there to solve, each shown on a small model, mlx-lm's own figure beside it.

    make problems              # or: python benchmarks/problems.py [--only A1,B4,...]

docs/problems.md has a row for each. The models have random weights in shapes where KV outweighs activations;
what is measured is MLX's own count of memory, less the weights, and the tokens that come out.

Each group of problems has a file of its own, problems_*.py.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
from problems_bound import c1_bound_everywhere, c2_off_unless_asked, c3_same_below, c4_oldest_first
from problems_driving import NONE, Shown, pytest_counts
from problems_figures import b7_statistics, b8_over_turns
from problems_peak import a1_move, a2_share, a3_draft, a4_budget, a5_reserve
from problems_ram import b1_ram_only, b2_arrays, b3_quantised, b4_real_state
from problems_states import b5_snapshots, b6_failed_restore
from rich.console import Console
from rich.table import Table

# -- D. the contract ------------------------------------------------------------------------------------

_CONTRACT = {
    "D1": "snapshot: live state unchanged, None for nothing new, pins its own bytes",
    "D2": "restore(None, target): rewinds, or is refused and changes nothing",
    "D3": "restore(snapshot, target): clamps, or is refused; the write position comes back",
    "D4": "merge and split consume their inputs; what cannot split stays with the child",
    "D5": "rotating: growth, rotation, order of tokens, as in mlx-lm's own rings",
    "D6": "free releases everything, offset 0",
}


def contract(points: list[str]) -> dict[str, Shown]:
    counts = pytest_counts(["tests/test_kinds_contract.py"], r"(?<=^test_)d[1-6](?=_)")
    shown = {}
    for point in points:
        found = counts.get(point.lower(), Counter())
        total = found["passed"] + found["failed"]
        ok = total > 0 and not found["failed"]
        shown[point] = Shown(_CONTRACT[point], f"{found['passed']} of {total} tests", NONE, ok)
    return shown


# -- all of them ----------------------------------------------------------------------------------------

PROOFS: dict[str, Callable[[], Shown]] = {
    "A1": a1_move,
    "A2": a2_share,
    "A3": a3_draft,
    "A4": a4_budget,
    "A5": a5_reserve,
    "B1": b1_ram_only,
    "B2": b2_arrays,
    "B3": b3_quantised,
    "B4": b4_real_state,
    "B5": b5_snapshots,
    "B6": b6_failed_restore,
    "B7": b7_statistics,
    "B8": b8_over_turns,
    "C1": c1_bound_everywhere,
    "C2": c2_off_unless_asked,
    "C3": c3_same_below,
    "C4": c4_oldest_first,
}


def prove(name: str) -> Shown:
    """A proof that raises has failed; what it raised is the figure, and the others go on."""
    try:
        return PROOFS[name]()
    except Exception as error:
        return Shown(f"{type(error).__name__}: {error}"[:160], "raised", NONE, False)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", default="", help="comma-separated, such as A1,B4,D3")
    args = parser.parse_args()
    names = [*PROOFS, *_CONTRACT]
    chosen = [n.strip().upper() for n in args.only.split(",") if n.strip()] or names
    if unknown := [n for n in chosen if n not in names]:
        parser.error(f"no such problem: {', '.join(unknown)}")
    console = Console(width=150)
    title = f"Onefold {onefold.__version__}, MLX {version('mlx')}, {mx.default_device()}"
    table = Table(title=title, show_lines=True)
    for column in ("problem", "what was shown", "Onefold", "mlx-lm", ""):
        table.add_column(column, justify="right" if column in ("Onefold", "mlx-lm") else "left")
    failed = 0
    points = [n for n in chosen if n in _CONTRACT]
    with console.status("") as status:
        shown: dict[str, Shown] = {}
        for name in chosen:
            if name in PROOFS:
                status.update(name)
                shown[name] = prove(name)
        if points:
            status.update("D")
            shown |= contract(points)
    for name, row in shown.items():
        failed += not row.ok
        table.add_row(name, row.what, row.figure, row.stock, "ok" if row.ok else "[bold red]FAILED")
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
