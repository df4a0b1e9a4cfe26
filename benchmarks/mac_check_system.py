"""The checks of `make mac-check` that ask the system: versions, tests, the disk, a cache's folder, memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from mac_check_report import Found, Given, Say, Skipped, fenced, sysctl, table

ROOT = Path(__file__).resolve().parents[1]
QUICK_TESTS = ("tests/test_metal.py", "tests/test_device_failures.py", "tests/test_structure.py")
FINDERS = (".DS_Store", "._x", ".localized")
LEVELS = {"1": "normal", "2": "warning", "4": "critical"}


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB"


def versions(given: Given, say: Say) -> Found:
    """Which device MLX uses, its limits, and the default budget."""
    import onefold  # noqa: F401  first: it preloads a real BLAS

    # isort: split
    import mlx.core as mx

    from onefold.cache.memory import device
    from onefold.engine import stock

    info = dict(mx.device_info())
    working, budget = device.memory_bytes(), device.default_budget()
    rows: list[tuple[str, Any]] = list(info.items())
    rows += [("default device", mx.default_device()), ("Metal", mx.metal.is_available())]
    rows += [("memory that a process may use", _size(working)), ("default budget, no weights", _size(budget))]
    rows += [("MLX's pool at that budget", _size(device.pool_bytes(budget)))]
    faults = []
    if sys.platform == "darwin":
        stock.maybe_set_recommended_wired_limit()
        wired = mx.set_wired_limit(0)
        mx.set_wired_limit(wired)
        rows += [("wired limit that mlx-lm sets", _size(wired))]
        rows += [("iogpu.wired_limit_mb", sysctl("iogpu.wired_limit_mb") or "unknown (0: macOS's default)")]
        level = sysctl("kern.memorystatus_vm_pressure_level")
        rows += [("memory pressure", LEVELS.get(level, level or "unknown"))]
        memory = int(sysctl("hw.memsize") or 0)
        if not device.on_metal():
            faults.append(f"MLX's default device is {mx.default_device()}, not an Apple GPU")
        if not 0 < working < memory:
            faults.append(f"the working set is {_size(working)} of {_size(memory)}")
        if wired <= 0:
            faults.append("the wired limit stays 0: macOS 15 is needed for it")
    if budget != working * 4 // 5:
        faults.append(f"the default budget is {_size(budget)}, not four fifths of {_size(working)}")
    name = info.get("device_name") or info.get("architecture") or ""
    note = "" if sys.platform == "darwin" else "; not macOS, so the limits of Metal were not read"
    told = f"{mx.default_device()} {name}, {_size(working)} for a process, default budget {_size(budget)}{note}"
    return Found(told, table(("", ""), [(str(k), str(v)) for k, v in rows]), faults)


def tests(given: Given, say: Say) -> Found:
    """The quick tests, in processes of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command += list(QUICK_TESTS) if given.quick else ["-n", "2", "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "tests.xml"), Path(folder, "output.txt")
        with output.open("w") as out:
            process = subprocess.Popen(
                [*command, f"--junitxml={report}"], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
            try:
                _wait(process, output, say)
            finally:
                process.kill()
                process.wait()
        said = output.read_text(errors="replace")
        if not report.exists():
            raise RuntimeError(f"pytest ended with {process.returncode} and wrote no report: {said[-2000:]}")
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: sum(int(s.get(name) or 0) for s in suites) for name in ("tests", "failures", "errors", "skipped")}
    faults: list[str] = []
    details: list[str] = []
    for case in (case for suite in suites for case in suite.iter("testcase")):
        for kind in ("failure", "error"):
            if (fault := case.find(kind)) is not None:
                faults.append(f"`{case.get('classname')}::{case.get('name')}`: {_first_line(fault.get('message'))}")
                details += fenced(fault.text or "", 15) if len(details) < 200 else []
        if (left_out := case.find("skipped")) is not None and not given.quick:
            details.append(f"- skipped `{case.get('name')}`: {_first_line(left_out.get('message'))}")
    wrong = counts["failures"] + counts["errors"]
    if process.returncode and not wrong:
        faults.append(f"pytest ended with {process.returncode}")
        details += fenced(said)
    passed = counts["tests"] - wrong - counts["skipped"]
    return Found(f"{passed} passed, {wrong} failed, {counts['skipped']} skipped", details, faults[:60])


def _wait(process: subprocess.Popen[bytes], output: Path, say: Say) -> None:
    while process.poll() is None:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            last = output.read_text(errors="replace").strip().splitlines()[-1:]
            say(last[0][-60:] if last else "pytest is starting")


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0][:200]


# -- the disk --------------------------------------------------------------------------------------------


def read(given: Given, say: Say) -> Found:
    """How fast records are read."""
    return _disk(given, say, "read scattered, F_NOCACHE", "read staged, F_NOCACHE", "GB/s", more_is_better=True)


def flush(given: Given, say: Say) -> Found:
    """How long a flush takes."""
    return _disk(given, say, "F_FULLFSYNC", "F_BARRIERFSYNC", "ms", more_is_better=False)


def _disk(given: Given, say: Say, former: str, ours: str, unit: str, *, more_is_better: bool) -> Found:
    """Measures reads or flushes, and compares the one that Onefold uses on macOS with the one that it does not."""
    import disk_io

    kind = disk_io.READS if more_is_better else disk_io.FLUSHES
    with tempfile.TemporaryDirectory() as folder:
        say("reading and flushing files in a temporary folder")
        measured = disk_io.main(folder, 32 if given.quick else disk_io.MEGABYTES)
    found = {name: f"{value:.3g} {unit}" for name, value in measured.items() if name in kind}
    told = "; ".join(f"{name}: {value}" for name, value in found.items()) or "no figures"
    faults, not_judged = [], ""
    if former not in measured or ours not in measured:
        not_judged = "only macOS has both ways to compare"
    elif (measured[ours] < measured[former]) is more_is_better:
        faults.append(f"{ours}: {found[ours]}, and {former}: {found[former]}")
    return Found(told, table(("", ""), found.items()), faults, not_judged)


def ds_store(given: Given, say: Say) -> Found:
    """Whether a cache's folder may hold Finder's files."""
    import onefold  # first: it preloads a real BLAS

    # isort: split
    import mlx.core as mx
    from shapes import llama_model

    model = llama_model(layers=2)
    tokens = [1 + i % 100 for i in range(300)]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "kv.noindex")
        with onefold.PrefixCache(model, "100MB", disk=str(folder)) as cache, cache.lease(tokens) as lease:
            mx.eval(model(mx.array([lease.rest.tolist()]), cache=lease.layers))
            lease.commit()
        inner = [path for path in sorted(folder.iterdir()) if path.is_dir()]
        for place in (folder, *inner):
            for name in FINDERS:
                (place / name).write_bytes(b"\0" * 6148)
        say(f"{len(FINDERS)} files of Finder's in {1 + len(inner)} folders")
        with onefold.PrefixCache(model, "100MB", disk=str(folder)) as cache, cache.lease([*tokens, 7]) as lease:
            found = lease.restored
        left = sum((place / name).exists() for place in (folder, *inner) for name in FINDERS)
    placed = len(FINDERS) * (1 + len(inner))
    faults = [] if found == len(tokens) else [f"{found} of {len(tokens)} tokens were read from disk"]
    faults += [] if left == placed else [f"{placed - left} of Finder's files were removed"]
    return Found(f"{found} of {len(tokens)} tokens came back from a folder with {', '.join(FINDERS)}", (), faults)


# -- memory ----------------------------------------------------------------------------------------------


def pressure(given: Given, say: Say) -> Found:
    """The level of memory pressure, as the automatic budget reads it."""
    from onefold import machine

    gauge = machine.gauge()
    if gauge is None:
        raise Skipped(f"{sys.platform} says nothing of its memory")
    readings = []
    for _ in range(3):
        readings.append(gauge())
        time.sleep(0.5)
    faults = ["nothing can be read"] if machine.NOTHING_KNOWN in readings else []
    faults += [f"memory is short: {r.why}" for r in readings[-1:] if r.level is not machine.Level.NORMAL]
    details = [
        "To see what a server does under pressure: start one with `--budget auto`, then run `sudo memory_pressure -S "
        "-l warn` (and `-l critical`) in another terminal, which simulates it, and watch its log and `/metrics`."
    ]
    return Found(f"level {readings[-1].level.name.lower()}: {readings[-1].why}", details, faults)
