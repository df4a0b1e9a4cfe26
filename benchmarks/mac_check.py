"""The first hour on a Mac: checks what docs/mac.md could not measure, and writes one file to attach to an issue.

    make mac-check                # an hour at most; make mac-check ARGS=--quick takes minutes
    python benchmarks/mac_check.py [--quick] [--only NAME,NAME] [--skip NAME,NAME] [--model M] [--out FILE]

Each check runs in a process of its own: one that fails, hangs or takes the GPU down ends alone, and the others go on.
The file is written after each check. On Linux the checks run too, and what needs macOS is skipped by name. Nothing
leaves this machine, and the file has no user name, no host name and no home folder in it. Ends with 1 if a check
failed or found something else than expected.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from mac_check_report import (
    FAILED,
    SKIPPED,
    Check,
    Found,
    Given,
    Outcome,
    Say,
    Skipped,
    judged,
    machine,
    rendered,
    scrubbed,
    unfinished,
)
from mac_check_report import fenced as block

END_SECONDS = 30.0
"""For a check to end its own servers in."""


def _late(module: str, function: str) -> Any:
    """Returns a function that is imported when it is called: MLX is imported in the process of a check only."""

    def run(given: Given, say: Say) -> Found:
        made: Found = getattr(importlib.import_module(module), function)(given, say)
        return made

    return run


_SYSTEM, _SERVING, _ENGINE = "mac_check_system", "mac_check_serving", "mac_check_engine"

CHECKS: tuple[Check, ...] = (
    Check(
        "versions",
        ("M1", "M8"),
        "on macOS: MLX computes on Metal, names a working set below the memory, and the default budget is four fifths "
        "of it less the weights",
        _late(_SYSTEM, "versions"),
        minutes=3,
    ),
    Check(
        "tests",
        ("M4", "M19"),
        "no test fails (with --quick: those of Metal, of device failures and of the structure)",
        _late(_SYSTEM, "tests"),
        minutes=40,
    ),
    Check(
        "read",
        ("M5",),
        "past the file cache (F_NOCACHE), large reads into a staging buffer are at least as fast as scattered ones",
        _late(_SYSTEM, "read"),
    ),
    Check("flush", ("M6",), "F_BARRIERFSYNC takes less time than F_FULLFSYNC", _late(_SYSTEM, "flush")),
    Check(
        "ds-store", ("M10",), "a folder with Finder's files in it opens again, and is read", _late(_SYSTEM, "ds_store")
    ),
    Check(
        "pressure",
        ("M9",),
        "the level of memory pressure can be read, and is normal on a machine that is not short of memory",
        _late(_SYSTEM, "pressure"),
        minutes=1,
    ),
    Check(
        "demo",
        ("M17", "M18"),
        "the second turn reuses the first and its text is that of a fresh run; SIGTERM ends the server with 0; the "
        "first request waits at most 0.2 s longer than the second; localhost answers on every loopback address",
        _late(_SERVING, "demo"),
    ),
    Check(
        "idle",
        ("M1",),
        "on a GPU: after a pause the first token slows down by no more than 1.2 times as much as mlx_lm.server's",
        _late(_SERVING, "idle"),
        minutes=15,
    ),
    Check(
        "decode",
        ("M7", "M15"),
        "on a GPU: one stream, and 8 at once, reach 0.9 times mlx-lm's tokens per second (8 may be slower until "
        "Onefold has a decode kernel for Metal)",
        _late(_ENGINE, "decode"),
        minutes=15,
    ),
    Check(
        "fused",
        ("M2",),
        "attention stores scores only in those shapes for which Onefold reserves bytes",
        _late(_ENGINE, "fused"),
    ),
    Check(
        "long-prompt",
        ("M2", "M3"),
        "a long prompt on heads of 256 meets no error of Metal, no chunk takes 2 s on a GPU, and the peak beyond the "
        "weights is within the budget and the ledger's own peak",
        _late(_ENGINE, "long_prompt"),
        minutes=15,
    ),
    Check(
        "ledger",
        ("M14", "M16"),
        "over five turns the peak beyond the weights is within the budget, and what MLX holds at the end is what the "
        "ledger says, within 10 % and 16 KiB for each buffer",
        _late(_ENGINE, "ledger"),
    ),
    Check(
        "donation",
        ("M20",),
        "decode steps that are queued ahead write in place: the peak grows by less than one layer's array",
        _late(_ENGINE, "donation"),
    ),
)


# -- a check's own process -------------------------------------------------------------------------------


def play(check: Check, given: Given, result: Path) -> int:
    """Runs one check and writes its outcome. Whatever it raises ends this process, and the parent tells."""
    signal.signal(signal.SIGTERM, _ended)  # what is in `finally` runs
    began = time.perf_counter()

    def say(line: str) -> None:
        print(f"    {time.perf_counter() - began:6.1f} s  {scrubbed(line)}", flush=True)

    try:
        outcome = judged(check, check.run(given, say), time.perf_counter() - began)
    except Skipped as skipped:
        outcome = unfinished(check, SKIPPED, str(skipped))
    result.write_text(json.dumps(asdict(outcome)))
    return 0


def _ended(*_: Any) -> NoReturn:
    raise SystemExit("the check was ended")


# -- the parent ------------------------------------------------------------------------------------------


def run_one(check: Check, given: Given, script: str, folder: Path) -> Outcome:
    """Runs a check in a process of its own and returns its outcome. Raises nothing but KeyboardInterrupt."""
    result, errors = folder / f"{check.name}.json", folder / f"{check.name}.txt"
    command = [sys.executable, "-X", "faulthandler", script, "--child", check.name, "--result", str(result)]
    command += (["--quick"] if given.quick else []) + (["--model", given.model] if given.model else [])
    began, why = time.perf_counter(), ""
    with errors.open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=out, start_new_session=True)
        try:
            process.wait(60 * check.minutes)
        except subprocess.TimeoutExpired:
            why = f"it did not end within {check.minutes:g} minutes"
        finally:
            _end(process)
    seconds = time.perf_counter() - began
    if not why and process.returncode == 0 and result.exists():
        read = json.loads(result.read_text())
        return replace(Outcome(**read), points=tuple(read["points"]))
    said = errors.read_text(errors="replace")
    return unfinished(check, FAILED, why or _reason(process.returncode, said), block(said), seconds)


def _stay_awake() -> None:
    """Keeps a Mac and its display on until this process ends."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            subprocess.Popen(["caffeinate", "-d", "-i", "-w", str(os.getpid())], stdin=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a check and the processes that it started, which are in its process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses where only zombies are left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(code: int, said: str) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else f"its process ended with {code} and said nothing"


def run_all(checks: Sequence[Check], given: Given, script: str, out: Path, options: str) -> list[Outcome]:
    """Runs the checks one after the other, prints each, and writes the report after each."""
    facts, when = machine(), time.strftime("%Y-%m-%d %H:%M")
    _stay_awake()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, check in enumerate(checks, 1):
            print(f"[{number}/{len(checks)}] {check.name} ({', '.join(check.points)})\n    expected: {check.expected}")
            sys.stdout.flush()
            try:
                outcome = run_one(check, given, script, Path(folder))
            except KeyboardInterrupt:
                left = checks[number - 1 :]
                outcomes += [unfinished(other, SKIPPED, "interrupted") for other in left]
                break
            finally:
                out.write_text(rendered(facts, outcomes, options, when), encoding="utf-8")
            outcomes.append(outcome)
            if outcome.verdict not in (SKIPPED, FAILED):
                print(f"    found:    {scrubbed(outcome.found)}")
            print(f"    verdict:  {scrubbed(outcome.told)}\n", flush=True)
    out.write_text(rendered(facts, outcomes, options, when), encoding="utf-8")
    return outcomes


def _chosen(parser: argparse.ArgumentParser, checks: Sequence[Check], only: str, skip: str) -> list[Check]:
    known = {check.name for check in checks}
    wanted, left_out = ({name for name in given.split(",") if name} for given in (only, skip))
    if unknown := sorted((wanted | left_out) - known):
        parser.error(f"there is no check {', '.join(unknown)}; the checks are {', '.join(c.name for c in checks)}")
    return [c for c in checks if (not wanted or c.name in wanted) and c.name not in left_out]


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS, script: str = __file__) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the file to write; mac-check-DATE-TIME.md here if not given")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="run these checks")
    parser.add_argument("--skip", default="", metavar="NAME,NAME", help="leave these checks out")
    parser.add_argument("--model", help="a folder or an id; the demo model and random weights if not given")
    parser.add_argument("--quick", action="store_true", help="smaller models and shorter prompts: minutes, not an hour")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    given = Given(options.model, options.quick)
    if options.child:
        return play(next(check for check in checks if check.name == options.child), given, options.result)
    chosen = _chosen(parser, checks, options.only, options.skip)
    out = options.out or Path(f"mac-check-{time.strftime('%Y-%m-%d-%H%M')}.md")
    told = {"--quick": options.quick, "--only": options.only, "--skip": options.skip, "--model": options.model}
    shown = "".join(f" {name}" if value is True else f" {name} {value}" for name, value in told.items() if value)
    outcomes = run_all(chosen, given, script, out, shown)
    print(scrubbed(f"{out.resolve()}: read it, then attach it to an issue"))
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
