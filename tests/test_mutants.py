"""The mutations of `make mutants` fit the source; what their run means is said right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "mutants"))
    import mutations

    return mutations


@pytest.fixture
def run(mutations: Any) -> Any:
    import run

    return run


def test_each_changes_one_place_of_a_file_that_compiles_then(mutations: Any) -> None:
    every = mutations.load()
    assert len(every) == 93
    assert mutations.findings(every) == []


def test_what_no_longer_fits_is_said(mutations: Any) -> None:
    known = mutations.load()[0]
    fields = {name: getattr(known, name) for name in ("id", "file", "old", "new", "bug", "tests")}
    for change, said in (
        ({"old": "no such text"}, "occurs 0 times"),
        ({"old": "self"}, "times in"),
        ({"new": "if ("}, "was never closed"),
        ({"file": "memory/none.py"}, "No such file"),
        ({"tests": ("test_none.py",)}, "there is no test_none.py"),
        ({"tests": ("test_tree.py::test_none",)}, "there is no test_tree.py::test_none"),
        ({"new": known.old}, "changes nothing"),
    ):
        (found,) = mutations.findings([mutations.Mutation(**{**fields, **change})])
        assert found.startswith(known.id) and said in found
    assert "2 entries" in mutations.findings([known, known])[0]


@pytest.mark.parametrize(
    ("code", "said", "verdict", "by"),
    [
        (0, "3 passed", "survived", ""),
        (1, "FAILED tests/test_a.py::test_b[c d] - assert 1 == 2", "killed", "test_a.py::test_b[c d]"),
        (1, "ERROR tests/test_a.py::test_b", "killed", "test_a.py::test_b"),
        (1, "Traceback", "not tried", "the tests ended with 1"),
        (2, "ERROR tests/test_a.py", "not tried", "the tests ended with 2"),
        (97, "", "not tried", "another copy of onefold was imported"),
        (-11, "", "killed", "a crash (SIGSEGV)"),
        (None, "", "killed", "the time limit"),
    ],
)
def test_how_tests_ended(run: Any, code: int | None, said: str, verdict: str, by: str) -> None:
    found, why = run._verdict(code, f"onefold is here\n{said}\n")
    assert (found.value, why) == (verdict, by)


def test_survivors_are_explained_and_few(run: Any, mutations: Any) -> None:
    def ended(killed: int, survived: int, why: str = "", not_tried: int = 0) -> list[str]:
        verdicts = [run.Verdict.KILLED] * killed + [run.Verdict.SURVIVED] * survived
        verdicts += [run.Verdict.NOT_TRIED] * not_tried
        found = {
            mutations.Mutation(str(i), "a.py", "a", "b", "wrong", ("test_a.py",), why): run.Ran(verdict, "", 1.0, "")
            for i, verdict in enumerate(verdicts)
        }
        return run.judged(found, all_of_them=True)  # type: ignore[no-any-return]

    assert ended(20, 0) == [] and ended(18, 2, "it is the same") == []
    assert ended(19, 1) == ["19 survives, and the list does not say why: wrong"]
    assert ended(17, 3, "it is the same") == ["17 of 20 are killed, which is less than 90%"]
    assert ended(19, 0, not_tried=1) == ["19 could not be tried: "]
