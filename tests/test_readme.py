"""README.md: its example runs, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_example_runs(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (code,) = blocks("python")
    assert len(code.splitlines()) <= 24
    code, replaced = re.subn(r'onefold\.load\("demo"\)', f"onefold.load({str(model)!r})", code)
    assert replaced == 1
    exec(compile(code, "README.md", "exec"), {})
    *_, reused, last = capsys.readouterr().out.splitlines()
    cached, asked = map(int, re.findall(r"\d+", reused))
    assert asked > 2 * 50 and cached > asked / 3
    assert last == "turns continued in place: 1"


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / link).is_file(), link
