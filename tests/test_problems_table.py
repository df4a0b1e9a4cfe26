"""docs/problems.md: a row for every problem, tests that exist, and commands that can be given."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
COUNTS = {"A": 5, "B": 8, "C": 4, "D": 6}
PROBLEMS = [f"{letter}{i}" for letter, n in COUNTS.items() for i in range(1, n + 1)]


@cache
def rows() -> dict[str, list[str]]:
    """The cells of every row whose first cell names a problem."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "problems.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if line.startswith("|") and (name := re.match(r"\**([A-D][1-9])\b", cells[0])):
            assert name.group(1) not in found, f"{name.group(1)} has two rows"
            found[name.group(1)] = cells
    return found


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@cache
def proofs() -> ModuleType:
    folder = ROOT / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("problems", folder / "problems.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["problems"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def test_every_problem_has_a_row() -> None:
    assert sorted(rows()) == sorted(PROBLEMS)
    assert all(len(cells) == 6 and all(cells) for cells in rows().values())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_its_tests_and_files_exist(problem: str) -> None:
    _, mechanism, tests, _, _, _ = rows()[problem]
    named = re.findall(r"(tests/\w+\.py)::(\w+)", tests)
    assert named or "not yet" in tests.lower()
    for file, function in named:
        assert (ROOT / file).is_file(), file
        assert function in functions(file), f"{file} has no {function}"
    for file in re.findall(r"`([\w/]+\.py)`", mechanism):
        assert (ROOT / "src" / "onefold" / file).is_file(), file


@pytest.mark.parametrize("problem", PROBLEMS)
def test_its_command_runs_its_proof(problem: str) -> None:
    _, _, _, command, _, _ = rows()[problem]
    named = re.findall(r"--only (\w+)", command)
    assert named == [problem] or "not yet" in command.lower()
    assert all(name in {*proofs().PROOFS, *proofs()._CONTRACT} for name in named)


def test_nothing_is_open() -> None:
    assert [problem for problem, cells in rows().items() if any("not yet" in c.lower() for c in cells)] == []


def test_its_pictures_exist() -> None:
    text = (ROOT / "docs" / "problems.md").read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert pictures == ["memory-over-turns.svg"]
    for picture in pictures:
        drawn = ElementTree.parse(ROOT / "docs" / picture).getroot()
        assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
        lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
        assert len(lines) == 9, "three modes: memory, its peak, and tokens computed"


QUICK = ["A1", "A5", "B1", "B2", "B6", "B7", "B8", "C2", "C3", "C4"]


@pytest.mark.slow
@pytest.mark.parametrize("problem", QUICK)
def test_quick_proof_holds(problem: str) -> None:
    shown = proofs().PROOFS[problem]()
    assert shown.ok, shown
