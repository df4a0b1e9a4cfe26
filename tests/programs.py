"""Tests that need a program which pip does not install, such as make or node.

    @pytest.mark.system("make")

Without the program such a test is skipped, and the end of the run says how many were. `make test-system`
(ONEFOLD_TEST_SYSTEM=1) runs these tests alone, and there a program that is missing is a failure.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter

import pytest

MISSING = "not installed: "


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "system(program, ...): needs programs that pip does not install")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = {program for mark in item.iter_markers("system") for program in mark.args}
    missing = sorted(program for program in needed if shutil.which(program) is None)
    if missing and os.environ.get("ONEFOLD_TEST_SYSTEM") == "1":
        pytest.fail(MISSING + ", ".join(missing), pytrace=False)
    if missing:
        pytest.skip(MISSING + ", ".join(missing))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: how many tests were skipped for want of a program, and how to run them."""
    skipped: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if MISSING in reason:
            skipped[reason.partition(MISSING)[2]] += 1
    if skipped:
        programs = sorted({program for names in skipped for program in names.split(", ")})
        terminalreporter.write_line(
            f"{skipped.total()} skipped because a program is not installed ({', '.join(programs)}): "
            "install it and run `make test-system`"
        )
