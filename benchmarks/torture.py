"""A process that is killed again and again while it serves and writes: the folder must open, hold, and be right.

    make torture    # or: python benchmarks/torture.py [--kills 200] [--seed 0] [--seconds 0.8] [--mode both]

A child serves conversations on a small model with a disk folder: turns, branches, restores, evictions, a cache that is
closed and opened again. It says what the folder is to have kept (what `durable` says after `flush`), and is killed with
SIGKILL at a random moment, some of them in the first milliseconds of opening the folder. Then another process

- reads every record: its name, its header and its checksum must agree;
- opens the folder, which must be possible, and finds no leftover of a cut-off write afterwards;
- asks for everything that was acknowledged: nothing of it may be missing;
- takes conversations up again: every layer is compared with the tokens that it must hold, and logits with a stock run.

Most kills have a disk budget that is never reached. Some have a tight one, and damaged files too: what was acknowledged
may be gone there, and only what is reused must be right. A folder is kept over many kills. Other faults follow: a disk
that is full in the middle of a record, a folder that is removed, one whose permission is taken away.

SIGKILL ends a process, not a machine: what the operating system has accepted is not lost here. Ends with 1 if anything
is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.table import Table
from torture_roles import AMPLE, FAULTS, MODELS, PATIENCE_SECONDS, ROLES, TIGHT, Task, damage  # with onefold's BLAS

KILLS_PER_FOLDER = 20
AT_OPENING = 0.2
"""Share of the kills that come within the first milliseconds."""

# -- processes -------------------------------------------------------------------------------------------


class Child:
    """A role in a process of its own. What it says is read line by line.

    It starts from nothing, or, where that is allowed, as a fork of this process, which never computes anything: that
    saves the seconds of importing MLX."""

    forks: ClassVar[bool] = False

    def __init__(self, role: str, task: Task) -> None:
        self.reports: list[dict[str, Any]] = []
        self._rest = b""
        self._process: subprocess.Popen[bytes] | None = None
        if self.forks:
            self._out, write = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._out)
                _play(role, task, write)
            os.close(write)
            return
        self._out, write = os.pipe()
        command = [sys.executable, __file__, "--role", role]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write)
        os.close(write)
        assert self._process.stdin is not None
        with self._process.stdin as given:
            given.write(json.dumps(asdict(task)).encode())
        self.pid = self._process.pid

    def listen(self, seconds: float, until: str = "") -> bool:
        """Read what it says for so long, or until it says that; False if it has ended."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._out], [], [], left)[0]:
                if not (data := os.read(self._out, 1 << 16)):
                    return False
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.reports += [json.loads(line) for line in lines]
                if until and any(until in report for report in self.reports):
                    return True
        return True

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> int:
        """Read the last of it; the exit code, or less than 0 for a signal."""
        while self.listen(PATIENCE_SECONDS):
            self.kill()
        os.close(self._out)
        if self._process is not None:
            return self._process.wait()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _play(role: str, task: Task, write: int) -> None:
    """Does not return."""

    def say(**what: Any) -> None:
        line = json.dumps(what).encode() + b"\n"
        while line:
            line = line[os.write(write, line) :]

    status = 1
    try:
        logging.getLogger("onefold").addHandler(logging.NullHandler())
        ROLES[role](task, say)
        status = 0
    except AssertionError as error:
        say(wrong_layer=str(error)[:300])
        raise
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


# -- the parent ------------------------------------------------------------------------------------------


@dataclass
class Result:
    kills: Counter[str] = field(default_factory=Counter)
    """By what the child was doing."""
    runs: Counter[str] = field(default_factory=Counter)
    records: int = 0
    bad: int = 0
    damaged: int = 0
    leftovers: int = 0
    acknowledged: int = 0
    lost: int = 0
    shorter: int = 0
    resumed: int = 0
    restored: int = 0
    served: int = 0
    refused: int = 0
    restored_serving: int = 0
    open_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def sound(self) -> bool:
        return not (self.lost or self.wrong or self.failures)


def run(folder: Path, *, kills: int, seed: int, seconds: float, mode: str, faults: bool = True) -> Result:
    result, rng = Result(), np.random.default_rng(seed)
    began = time.perf_counter()
    kept: dict[str, list[tuple[list[int], int]]] = {}
    for number in range(kills):
        modes = ("through", "back") if mode == "both" else (mode,)
        chosen = modes[0] if rng.random() < 0.65 else modes[-1]
        tight = rng.random() < 0.25
        name = f"{number // KILLS_PER_FOLDER}-{'tight' if tight else chosen}"
        kinds = MODELS[int(rng.integers(len(MODELS)))]
        acknowledged = kept.setdefault(f"{name}-{kinds}", [])
        task = Task(str(folder / name), kinds, chosen, TIGHT if tight else AMPLE, seed * 1_000_003 + number)
        task.acknowledged, task.keeps = acknowledged, not tight
        result.runs[f"{chosen}{', tight' if tight else ''}"] += 1
        _kill_once(task, result, seconds, rng)
        if tight and rng.random() < 0.5:
            result.damaged += damage(task.folder, rng)
        _check_once(task, result)
    for fault in FAULTS if faults else ():
        for fault_mode in ("through", "back"):
            task = Task(str(folder / f"{fault}-{fault_mode}"), MODELS[0], fault_mode, AMPLE, seed)
            _fault_once(fault, task, result)
    result.seconds = time.perf_counter() - began
    return result


def _named(task: Task) -> str:
    return f"{Path(task.folder).name}, {'/'.join(task.kinds)}, written {task.mode}, seed {task.seed}"


def _kill_once(task: Task, result: Result, seconds: float, rng: np.random.Generator) -> None:
    child = Child("serve", task)
    alive = child.listen(PATIENCE_SECONDS, until="opening")
    early = rng.random() < AT_OPENING
    delay = float(rng.uniform(0, 0.02) if early else rng.uniform(0.02, max(0.03, seconds)))
    alive = alive and child.listen(delay)
    child.kill()
    status = child.ended()
    if not alive or status != -signal.SIGKILL:
        result.failures.append(f"a child ended by itself with {status}: {_named(task)}")
    result.wrong += [f"{report['wrong_layer']}: {_named(task)}" for report in child.reports if "wrong_layer" in report]
    last = child.reports[-1] if child.reports else {}
    result.kills["opening" if "opening" in last else "closing" if "closing" in last else "serving"] += 1
    new = [(report["tokens"], report["durable"]) for report in child.reports if "tokens" in report]
    task.acknowledged += new
    result.acknowledged += sum(n for _, n in new)
    result.served += sum("reused" in report for report in child.reports)
    result.refused += sum("refused" in report for report in child.reports)
    result.restored_serving += sum(report.get("restored", 0) for report in child.reports)


def _check_once(task: Task, result: Result) -> None:
    child = Child("check", task)
    status = child.ended()
    if status or not child.reports:
        result.failures.append(f"the folder could not be checked: {status}: {_named(task)}")
        return
    report = child.reports[-1]
    for name in ("records", "bad", "leftovers", "lost", "shorter", "resumed", "restored"):
        setattr(result, name, getattr(result, name) + report[name])
    result.open_seconds = max(result.open_seconds, report["open_seconds"])
    result.wrong += report["wrong"]
    result.failures += report["problems"]


def _fault_once(fault: str, task: Task, result: Result) -> None:
    child = Child(fault, task)
    status = child.ended()
    report = child.reports[-1] if child.reports else {}
    problems = report.get("problems", ["it reported nothing"])
    if status:
        problems = [*problems, f"it ended with {status}"]
    name = f"{fault.replace('_', ' ')}, {task.mode}"
    result.faults[name] = "; ".join(problems) or "serving continues, logged once"
    result.failures += [f"{name}: {p}" for p in problems]


def table(result: Result) -> Table:
    made = Table(title=f"{result.kills.total()} kills, {result.seconds:.0f} s")
    count = lambda c: ", ".join(f"{k}: {v}" for k, v in sorted(c.items()))  # noqa: E731
    for name, value in (
        ("kills, by what was going on", count(result.kills)),
        ("kills, by mode and disk budget", count(result.runs)),
        ("records read whole after a kill", str(result.records)),
        ("of them not sound / damaged on purpose", f"{result.bad} / {result.damaged}"),
        ("leftovers swept", str(result.leftovers)),
        ("slowest opening", f"{1000 * result.open_seconds:.0f} ms"),
        ("requests served / refused for lack of memory", f"{result.served} / {result.refused}"),
        ("tokens restored while serving", str(result.restored_serving)),
        ("tokens reused after a kill / of them from disk", f"{result.resumed} / {result.restored}"),
        ("conversations reused less far than acknowledged", str(result.shorter)),
        ("acknowledged tokens", str(result.acknowledged)),
        ("lost tokens", str(result.lost)),
        ("wrong layers", str(len(result.wrong))),
        *result.faults.items(),
        ("failures", str(len(result.failures))),
    ):
        made.add_row(name, value)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.8, help="the longest that a child may live")
    parser.add_argument("--mode", choices=("through", "back", "both"), default="both")
    parser.add_argument("--folder", type=Path, help="kept afterwards; a temporary one if not given")
    forked = sys.platform == "linux"
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork" if forked else "spawn", help="children")
    parser.add_argument("--no-faults", action="store_true", help="leave the other faults of a disk out")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    given = parser.parse_args()
    Child.forks = given.start == "fork"
    if given.role:
        _play(given.role, Task(**json.load(sys.stdin)), sys.stdout.fileno())
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = {"kills": given.kills, "seed": given.seed, "seconds": given.seconds, "mode": given.mode}
        result = run(folder, **options, faults=not given.no_faults)
    console = Console()
    console.print(table(result))
    for problem in [*result.wrong[:5], *result.failures[:15]]:
        console.print(problem, style="red", markup=False)
    return 0 if result.sound() else 1


if __name__ == "__main__":
    sys.exit(main())
