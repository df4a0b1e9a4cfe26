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


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made for them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/**/*.md")]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda p: p.name)
def test_kv_is_spelt_out_where_a_page_begins_to_use_it(page: Path) -> None:
    first, _, rest = page.read_text().partition("KV")
    assert not rest or "keys and values" in first + rest[:600]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = (page.parent / link).resolve() if link else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), f"{link}#{anchor}"
