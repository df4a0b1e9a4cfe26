"""`make mac-check` on any machine: its checks are those of docs/mac.md, one that fails ends alone, nobody is named."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPT = BENCHMARKS / "mac_check.py"

WITHOUT_A_CHECK = {"M11", "M12", "M13"}
"""Advice of docs/mac.md on launchd, Time Machine and sleep: nothing to run."""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mac_check

    yield mac_check


def test_every_point_has_a_check_and_the_documents_say_which(scripts: Any) -> None:
    points = {check.name: check.points for check in scripts.CHECKS}
    assert len(points) == len(scripts.CHECKS)
    settled = {point for found in points.values() for point in found}
    assert settled | WITHOUT_A_CHECK == {f"M{n}" for n in range(1, 21)} and not settled & WITHOUT_A_CHECK
    rows = re.findall(r"^\| `([a-z-]+)` \| ([M0-9, ]+) \|", (ROOT / "docs" / "mac.md").read_text(), re.MULTILINE)
    assert {name: tuple(found.split(", ")) for name, found in rows} == points


def test_every_check_is_a_function(scripts: Any) -> None:
    """The registry names them by their text, as they are imported in a process of their own."""
    for module, name in re.findall(r"_late\(_(\w+), \"(\w+)\"\)", SCRIPT.read_text()):
        text = (BENCHMARKS / f"mac_check_{module.lower()}.py").read_text()
        assert f"\ndef {name}(given: Given, say: Say) -> Found:" in text, name
    assert SCRIPT.read_text().count("_late(_") == len(scripts.CHECKS)


def test_a_report_has_all_of_it(scripts: Any) -> None:
    import mac_check_report as report

    check = report.Check("one", ("M1",), "a | b", lambda given, say: report.Found(""))
    outcomes = [
        report.judged(check, report.Found("two | three", ["- detail"]), 1.4),
        report.judged(check, report.Found("found", ["- detail"], ["it differs"]), 0),
        report.judged(check, report.Found("7 ms", not_judged="no GPU here"), 0),
        report.unfinished(check, report.FAILED, "RuntimeError: no"),
    ]
    assert [o.wrong for o in outcomes] == [False, True, False, True]
    text = report.rendered({"chip": "M9"}, outcomes, " --quick", "today")
    assert "1 as expected, 1 not as expected, 1 failed, 1 skipped" in text and "| chip | M9 |" in text
    assert "| one | M1 | as expected | two \\| three | 1 |" in text
    assert "- Verdict: skipped: no GPU here. 7 ms" in text and "- Verdict: failed: RuntimeError: no" in text
    assert "**Not as expected:** it differs" in text and text.count("- Expected: a | b") == 4


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/Users/anna/models/x and /Users/anna", "~/models/x and ~"),
        ("/Users/annabel/x", "~/x"),  # somebody else on this machine
        ("/Users/Shared/models", "/Users/Shared/models"),
        ("by anna on annas-mac.local, annas-mac", "by USER on HOST, HOST"),
        ("a savanna", "a savanna"),
        ("/private/Users/anna", "/private/Users/USER"),
    ],
)
def test_personal_data_is_scrubbed(scripts: Any, text: str, left: str) -> None:
    import mac_check_report as report

    hosts = ["annas-mac.local", "annas-mac"]
    assert report.scrubbed(text, home="/Users/anna", user="anna", hosts=hosts) == left


def test_a_check_that_fails_ends_alone(tmp_path: Path) -> None:
    script = tmp_path / "checks.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, signal, sys, time
            sys.path.insert(0, {str(BENCHMARKS)!r})
            from pathlib import Path
            from mac_check import main
            from mac_check_report import Check, Found, Skipped

            def raises(given, say):
                raise RuntimeError(f"[METAL] Impacting Interactivity in {{Path.home()}}/x")

            def dies(given, say):
                os.kill(os.getpid(), signal.SIGKILL)

            def hangs(given, say):
                time.sleep(60)

            def skips(given, say):
                raise Skipped("no such thing here")

            def works(given, say):
                say("under way")
                return Found(f"quick is {{given.quick}}")

            checks = [Check(f.__name__, ("M1",), "it works", f, minutes=1) for f in (raises, dies, skips, works)]
            checks.insert(2, Check("hangs", ("M1",), "it works", hangs, minutes=0.5 / 60))
            sys.exit(main(checks=checks, script=__file__))
        """)
    )
    out = tmp_path / "report.md"
    ran = subprocess.run(
        [sys.executable, script, "--out", out, "--quick"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 1 and not ran.stderr, ran
    for verdict in (
        "failed: RuntimeError: [METAL] Impacting Interactivity in ~/x",
        "failed: its process was ended by SIGKILL",
        "failed: it did not end within 0.00833333 minutes",
        "skipped: no such thing here",
        "as expected",
    ):
        assert f"verdict:  {verdict}\n" in ran.stdout and f"- Verdict: {verdict}\n" in out.read_text(), verdict
    assert "under way" in ran.stdout and "quick is True" in out.read_text()
    assert str(Path.home()) + "/x" not in out.read_text()


def test_two_checks_run_and_write_the_file(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--only", "versions,ds-store", "--quick"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (written,) = tmp_path.glob("mac-check-*.md")
    text = written.read_text()
    assert "| versions | M1, M8 | as expected |" in text and "| ds-store | M10 | as expected |" in text
    assert "| onefold |" in text and "300 of 300 tokens came back" in text


def test_a_check_that_is_not_there_is_refused() -> None:
    ran = subprocess.run([sys.executable, SCRIPT, "--only", "version"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "there is no check version; the checks are versions, tests," in ran.stderr
