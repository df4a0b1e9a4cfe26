"""What `make mac-check` writes: the outcome of a check, the machine, and one Markdown file without personal data.

No MLX in this file: it runs in the parent process, which must survive whatever a check does to the GPU.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onefold import __version__, backend

AS_EXPECTED, NOT_AS_EXPECTED, SKIPPED, FAILED = "as expected", "not as expected", "skipped", "failed"

Say = Callable[[str], None]


class Skipped(Exception):
    """A check that does not apply here. Its text says why."""


@dataclass(frozen=True)
class Given:
    """What the user asked for."""

    model: str | None = None
    """A folder or an id; None: the demo model, and generated models with random weights."""
    quick: bool = False


@dataclass(frozen=True)
class Found:
    """What a check found: one sentence, the lines below it, and what is not as expected."""

    found: str
    details: Sequence[str] = ()
    faults: Sequence[str] = ()
    not_judged: str = ""
    """Why nothing of it can be compared with what is expected here."""


@dataclass(frozen=True)
class Check:
    name: str
    points: tuple[str, ...]
    """The points of docs/mac.md that it settles."""
    expected: str
    run: Callable[[Given, Say], Found]
    minutes: float = 10.0
    """After so long its process is ended."""


@dataclass
class Outcome:
    """One check as the report shows it."""

    name: str
    points: tuple[str, ...]
    expected: str
    verdict: str
    found: str
    details: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def wrong(self) -> bool:
        return self.verdict in (FAILED, NOT_AS_EXPECTED)

    @property
    def told(self) -> str:
        """The verdict, with the reason where there is one."""
        return f"{self.verdict}: {self.found}" if self.verdict in (SKIPPED, FAILED) else self.verdict


def judged(check: Check, found: Found, seconds: float) -> Outcome:
    """Returns the outcome of a check that ran to its end."""
    if found.not_judged and not found.faults:
        return unfinished(check, SKIPPED, f"{found.not_judged}. {found.found}", found.details, seconds)
    verdict = NOT_AS_EXPECTED if found.faults else AS_EXPECTED
    details = [*(f"**Not as expected:** {fault}" for fault in found.faults), *found.details]
    return Outcome(check.name, check.points, check.expected, verdict, found.found, details, seconds)


def unfinished(check: Check, verdict: str, why: str, details: Iterable[str] = (), seconds: float = 0.0) -> Outcome:
    """Returns the outcome of a check that was skipped or has failed."""
    return Outcome(check.name, check.points, check.expected, verdict, why, list(details), seconds)


# -- the machine -----------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[1]
SYSCTLS = ("hw.model", "hw.memsize", "iogpu.wired_limit_mb", "kern.memorystatus_vm_pressure_level")
DISTRIBUTIONS = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "numpy", "transformers")


def said(*command: str) -> str:
    """Returns what a command prints; nothing if it is not there, fails or hangs."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def sysctl(name: str) -> str:
    """Returns a value of the kernel; nothing if there is none of this name."""
    return said("sysctl", "-n", name) if sys.platform == "darwin" else ""


def machine() -> dict[str, str]:
    """Returns what the report says of the machine. Nothing in it names a person or a machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "machine": platform.machine(),
        "chip": sysctl("machdep.cpu.brand_string") or _linux_chip(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory / 2**30:.1f} GiB",
        "system": _system(),
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "onefold": f"{__version__} {said('git', '-C', str(ROOT), 'describe', '--always', '--dirty')}".strip(),
    }
    facts |= {name: version for name in DISTRIBUTIONS if (version := backend.version_of(name))}
    facts |= {name: value for name in SYSCTLS if (value := sysctl(name))}
    if sys.platform == "darwin":
        power = said("pmset", "-g", "batt").partition("\n")[0].removeprefix("Now drawing from ").strip("'")
        low = re.search(r"lowpowermode\s+(\d)", said("pmset", "-g"))
        facts |= {
            "power": power or "unknown",
            "Low Power Mode": {"0": "off", "1": "on"}.get(low[1] if low else "", "?"),
        }
    return {name: value for name, value in facts.items() if value}


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} ({said('sw_vers', '-buildVersion')})"
    return f"{platform.system()} {platform.release()}"


def _linux_chip() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# -- personal data ---------------------------------------------------------------------------------------


def scrubbed(text: str, *, home: str = "", user: str = "", hosts: Iterable[str] = ()) -> str:
    """Returns the text without the home folder, the user's name, the machine's name and the temporary folder's path.
    What is not given is this machine's."""
    home = home or str(Path.home())
    for folder in sorted({home, os.path.realpath(home)} - {"/"}, key=len, reverse=True):
        text = re.sub(r"(?<!\w)" + re.escape(folder) + r"(?![\w.-])", "~", text)
    temporary = tempfile.gettempdir()
    for folder in sorted({temporary, os.path.realpath(temporary)} - {"/tmp", "/"}, key=len, reverse=True):
        text = text.replace(folder, "$TMPDIR")
    text = re.sub(r"(?<![\w.])/(?:Users|home)/(?!Shared\b)[^/\s\"'`:]+", "~", text)
    text = re.sub(r"(?<![\w.])/Volumes/[^/\n\"'`:]+", "/Volumes/VOLUME", text)
    for host in hosts or _hosts():
        text = _without(text, host, "HOST")
    name = user or _user()
    return text if name == "root" else _without(text, name, "USER")


def _without(text: str, word: str, instead: str) -> str:
    """Without a word as a whole, in any case; `_` may follow or precede it."""
    return re.sub(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", instead, text, flags=re.IGNORECASE) if word else text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no name for this id
        return ""


def _hosts() -> list[str]:
    whole = socket.gethostname()
    return [name for name in (whole, whole.partition(".")[0]) if name and name != "localhost"]


# -- the file --------------------------------------------------------------------------------------------


def rendered(facts: dict[str, str], outcomes: Sequence[Outcome], options: str, when: str) -> str:
    """Returns the report as Markdown, scrubbed."""
    counts = [f"{n} {verdict}" for verdict in (AS_EXPECTED, NOT_AS_EXPECTED, FAILED, SKIPPED)
              if (n := sum(o.verdict == verdict for o in outcomes))]  # fmt: skip
    command = f'`make mac-check ARGS="{options.strip()}"`' if options.strip() else "`make mac-check`"
    lines = ["# Onefold: mac-check", "", f"{when}, {command}. {', '.join(counts) or 'No checks'}.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items()), ""]
    lines += ["## Summary", "", "| check | points | verdict | found | s |", "|---|---|---|---|---:|"]
    for o in outcomes:
        cells = (o.name, ", ".join(o.points), f"**{o.verdict}**" if o.wrong else o.verdict, o.found)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} | {o.seconds:.0f} |")
    lines += ["", "## Details"]
    for o in outcomes:
        lines += ["", f"### {o.name} ({', '.join(o.points)})", "", f"- Expected: {o.expected}"]
        lines += [f"- Found: {o.found}"] if o.verdict not in (SKIPPED, FAILED) else []
        lines += [f"- Verdict: {o.told}", ""]
        lines += o.details
    return re.sub(r"\n{3,}", "\n\n", scrubbed("\n".join(lines))).rstrip() + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table, with an empty line before it."""
    made = ["", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return [*made, *(f"| {' | '.join(_cell(str(cell)) for cell in row)} |" for row in rows)]


def fenced(text: str, most_lines: int = 30) -> list[str]:
    """Returns the last lines of a text as a block of code; no lines for an empty text."""
    lines = text.replace("```", "'''").strip().splitlines()[-most_lines:]
    return ["", "```text", *lines, "```"] if lines else []
