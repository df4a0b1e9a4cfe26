"""README.md: its example runs, and its tree names the files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FOLDERS = {"src": "py", "tests": "py", "benchmarks": "py", "examples": "py", "docs": "md"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def tree() -> list[str]:
    """The files of the drawn tree, as paths from the root."""
    (drawn,) = blocks("text")
    folders: list[str] = []
    found = []
    for line in drawn.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        del folders[len(indent) // 2 :]
        if name.endswith("/"):
            folders.append(name)
        else:
            assert len(line.split()) > 1, f"{name} has no line of its own words"
            found.append("".join([*folders, name]))
    return found


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


def test_what_the_tree_names_exists() -> None:
    missing = [file for file in tree() if not (ROOT / file).is_file()]
    assert not missing
    assert len(set(tree())) == len(tree())


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_tree_names_every_file(folder: str) -> None:
    there = {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob(f"*.{FOLDERS[folder]}")}
    assert there - set(tree()) == set()
    assert {f for f in tree() if f.startswith(f"{folder}/")} - there == set()


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / link).is_file(), link
