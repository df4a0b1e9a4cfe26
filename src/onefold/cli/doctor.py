"""`onefold doctor`: checks the installation and this machine, and suggests a remedy for each problem.

Each check is ok, a warning or a problem, in one sentence. A check that fails is a problem; the others still run. Exit
code 0: no problem; 1: a problem; 2: arguments that cannot be used. Nothing is installed or changed; on a GPU the
results of the kernels' trials are kept.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import onefold
from onefold import backend
from onefold.cache.model.formats.names import NAMES
from onefold.cli import doctor_device, doctor_install
from onefold.cli.cache import DISK
from onefold.cli.command_line import Parser
from onefold.cli.doctor_finding import Finding, guarded
from onefold.sizes import show_count

HELP = "check the installation and this machine, and suggest remedies"
NAME = "onefold doctor"
SECONDS = 240.0
"""That the checks which need MLX may take together."""
TOKENS = 1024
"""Of the text with which formats are tried."""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog=NAME,
        description="Checks the installation and this machine: versions, MLX's backend and device, the speed of "
        "matrix products, memory, a forward on a small model, on a GPU its decode kernel and, with --disk, a cache's "
        "folder.",
        epilog="Exit codes: 0 no problem was found, perhaps warnings; 1 a problem was found; 2 wrong arguments.",
        allow_abbrev=False,
    )
    DISK.add_to(made)
    made.set_defaults(disk=None)  # `run` reads the variable
    made.add_argument("--kv", metavar="MODEL", help="instead, try every format of stored KV on this model")
    made.add_argument("--text", metavar="FILE", help="with --kv: try them on this text (default: Python's reference)")
    made.add_argument("--tokens", type=int, help=f"with --kv: so many tokens of it (default: {TOKENS})")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    if given.disk is not None and not given.disk.strip():
        parser().error("--disk is empty: give a folder, or leave the option out")
    if given.kv is None and (given.text is not None or given.tokens is not None):
        parser().error("--text and --tokens are for --kv: name a model with it")
    if given.kv is not None and given.disk is not None:
        parser().error("--kv tries formats and does not check a folder: give --kv or --disk")
    if given.kv in NAMES and not Path(given.kv).exists():
        parser().error(f"--kv tries every format on a model: give its name or folder in place of {given.kv}")
    if given.text is not None and not given.text.strip():
        parser().error("--text is empty: give a file, or leave the option out")
    if given.kv is not None:
        from onefold.cli import doctor_kv

        tokens = TOKENS if given.tokens is None else given.tokens
        return doctor_kv.run(NAME, given.kv, given.text, tokens, as_json=given.json)
    report = examine(DISK.from_environment if given.disk is None else given.disk)
    if given.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0 if report["ok"] else 1


def examine(folder: str | None) -> dict[str, Any]:
    """Run every check and return the report, as --json prints it."""
    again = f"Run: {backend.how_to_install()}"
    found = [
        guarded("versions", doctor_install.versions, again),
        guarded("backend", doctor_install.check_backend, again),
    ]
    skipped = list(doctor_device.CHECKS)
    if not backend.missing():
        measured, skipped = on_device([sys.executable, "-m", doctor_device.__name__])
        found += measured
    if folder is not None:
        found.append(guarded("disk", partial(doctor_install.disk, folder), "Give another folder with --disk"))
    problems, warnings = (sum(f.state == state for f in found) for state in ("problem", "warning"))
    return {
        "ok": not problems,
        "onefold": onefold.__version__,
        "problems": problems,
        "warnings": warnings,
        "checks": [asdict(f) for f in found],
        "skipped": skipped,
    }


def on_device(command: list[str], seconds: float = SECONDS) -> tuple[list[Finding], list[str]]:
    """Run the checks that need MLX in a process of their own; return what they found, and which were not run."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        late = False
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            out, err = process.communicate()
        except KeyboardInterrupt:
            process.kill()
            raise
    found, at = list[Finding](), next(iter(doctor_device.CHECKS))
    for line in out.splitlines():
        said = _parsed(line)
        if "finding" in said:
            found.append(Finding(**said["finding"]))
        at = said.get("begins", at)
    if (late or process.returncode) and at not in {f.check for f in found}:
        why = f"did not finish in {seconds:.0f} seconds" if late else _ended(process.returncode, err)
        found.append(Finding(at, "problem", f"the process of this check {why}", doctor_device.reinstall()))
    done = {f.check for f in found}
    return found, [name for name in doctor_device.CHECKS if name not in done]


def _parsed(line: str) -> dict[str, Any]:
    """Return the object on this line; an empty one if it is something else, which a library printed."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _ended(code: int, err: str) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    last = (err.strip().splitlines() or ["it gave no reason"])[-1]
    return f"failed with exit code {code}: {last}"


def show(report: dict[str, Any]) -> None:
    """Print the report for people: a line for each check, and its remedy below it."""
    print(f"onefold {report['onefold']}")
    for check in report["checks"]:
        print(f"{check['state']:<8} {check['check']:<9} {_printable(check['message'])}")
        if check["remedy"]:
            print(f"{'':<18} {_printable(check['remedy'])}")
    if report["skipped"]:
        print(f"not run: {', '.join(report['skipped'])}")
    counts = [show_count(report[f"{kind}s"], kind) for kind in ("problem", "warning") if report[f"{kind}s"]]
    print(", ".join(counts) or "no problems")


def _printable(text: str) -> str:
    """Without what could move a terminal's cursor: names of folders are not ours."""
    return "".join(c if c.isprintable() else "?" for c in text)
