"""Memory over turns, for a sliding-window model: RAM-only, with a disk, and mlx-lm. Writes docs/memory-over-turns.svg.

    python benchmarks/picture.py [--out FILE]

Conversations with a model in gemma4's shape grow, a turn of each after the other, under a limit that has room for some
of them. Every mode runs in a process of its own. After each turn MLX's active memory less the weights is noted, the
peak over the turn, and how many tokens of the prompt had to be computed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
from problems_driving import Stock
from problems_figures import Turn, round_robin
from shapes import gemma_model

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 64_000_000
SHAPE = {"conversations": 6, "turns": 10, "first": 200, "question": 100, "answer": 20, "step": 32}
MODES = {"ram": "RAM-only", "disk": "with a disk", "stock": "mlx-lm"}
COLOURS = {"ram": "#2f7ed8", "disk": "#1a9e62", "stock": "#d9822b"}
"""Readable on white and on black."""


def measure(mode: str) -> list[Turn]:
    model = gemma_model(window=32, head_dim=128)
    if mode == "stock":  # the same limit, on what it stores
        return round_robin(model, Stock(model, max_bytes=BUDGET), **SHAPE)[0]
    with tempfile.TemporaryDirectory() as folder:
        disk: dict[str, Any] = {"disk": folder, "disk_budget": "4GB"} if mode == "disk" else {}
        with onefold.PrefixCache(model, BUDGET, **disk) as cache:
            found, _ = round_robin(model, cache, **SHAPE)
            cache.check()
    return found


# -- drawing --------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT = 760, 64, 16
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 }
  .title { font-size: 13px; font-weight: 600 }
  .axis { stroke: #888; stroke-width: 1 }
  .grid { stroke: #888; stroke-opacity: 0.2; stroke-width: 1 }
  .line { fill: none; stroke-width: 1.5; stroke-linejoin: round }
  .peak { stroke-width: 1; stroke-dasharray: 2 3 }
  .limit { stroke: #c0392b; stroke-width: 1; stroke-dasharray: 6 4 }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } .limit { stroke: #ff7b6b } }
"""


class Panel:
    """A box with axes, in which runs of numbers over turns are drawn."""

    def __init__(self, top: int, height: int, title: str, most: float, step: float, turns: int) -> None:
        self.top, self.height, self.most, self.turns = top, height, most, turns
        self.parts = [f'<text class="title" x="{LEFT}" y="{top - 10}">{title}</text>']
        at = 0.0
        while at <= most:
            y = self.y(at)
            kind = "grid" if at else "axis"
            self.parts.append(f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
            self.parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{at:,.0f}</text>')
            at += step
        self.parts.append(f'<line class="axis" x1="{LEFT}" y1="{top}" x2="{LEFT}" y2="{top + height}"/>')
        for turn in range(10, turns + 1, 10):
            x, y = self.x(turn), top + height
            self.parts.append(f'<line class="axis" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}"/>')
            self.parts.append(f'<text x="{x:.1f}" y="{y + 17}" text-anchor="middle">{turn}</text>')

    def x(self, turn: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * turn / self.turns

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - value / self.most)

    def line(self, values: list[float], colour: str, kind: str = "") -> None:
        points = " ".join(f"{self.x(i + 1):.1f},{self.y(v):.1f}" for i, v in enumerate(values))
        self.parts.append(f'<polyline class="line {kind}" stroke="{colour}" points="{points}"/>')


def draw(runs: dict[str, list[Turn]]) -> str:
    turns = SHAPE["conversations"] * SHAPE["turns"]
    highest = max(t.peak for run in runs.values() for t in run) / 1e6
    most = -(-highest // 20) * 20
    memory = Panel(64, 230, "KV and activations, MB: after each turn, and its peak (dotted)", most, 20, turns)
    y = memory.y(BUDGET / 1e6)
    memory.parts.append(f'<line class="limit" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
    memory.parts.append(f'<text x="{LEFT + 6}" y="{y - 5:.1f}">limit, {BUDGET / 1e6:.0f} MB</text>')
    computed = -(-max(t.prefilled for run in runs.values() for t in run) // 500) * 500
    tokens = Panel(366, 120, "prompt tokens computed in the turn", computed, 500, turns)
    for mode, run in runs.items():
        memory.line([t.peak / 1e6 for t in run], COLOURS[mode], "peak")
        memory.line([t.active / 1e6 for t in run], COLOURS[mode])
        tokens.line([float(t.prefilled) for t in run], COLOURS[mode])
    legend = []
    for i, mode in enumerate(runs):
        x = LEFT + 130 * i
        legend.append(f'<line x1="{x}" y1="18" x2="{x + 22}" y2="18" stroke="{COLOURS[mode]}" stroke-width="2"/>')
        legend.append(f'<text x="{x + 28}" y="22">{MODES[mode]}</text>')
    height = 530
    foot = f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 8}" text-anchor="middle">turn</text>'
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    about = "Memory over turns of a sliding-window model: RAM-only, with a disk, and mlx-lm"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{about}">',
            f"<style>{STYLE}</style>",
            *legend,
            *memory.parts,
            *tokens.parts,
            foot,
            "</svg>\n",
        ]
    )


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "memory-over-turns.svg")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        print(json.dumps([vars(t) for t in measure(args.mode)]))
        return 0
    runs = {}
    for mode, name in MODES.items():
        done = subprocess.run([sys.executable, __file__, "--mode", mode], check=True, stdout=subprocess.PIPE)
        run = runs[mode] = [Turn(**t) for t in json.loads(done.stdout)]
        held, peak = max(t.active for t in run) / 1e6, max(t.peak for t in run) / 1e6
        print(
            f"{name}: held at most {held:.1f} MB, highest peak {peak:.1f} MB ({peak * 1e6 / BUDGET:.2f} of the limit), "
            f"{sum(t.prefilled for t in run):,} prompt tokens computed, {sum(t.new for t in run):,} of them new"
        )
    args.out.write_text(draw(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
