"""The list of mutations: what each changes, and whether it still fits the source."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LISTS = ("memory.toml", "request.toml", "model.toml")
PACKAGE = Path("src") / "onefold" / "cache"


@dataclass(frozen=True)
class Mutation:
    """One change of one file of `src/onefold/cache`."""

    id: str
    file: str
    """Below `src/onefold/cache`."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    bug: str
    """What would be wrong then, in one line."""
    tests: tuple[str, ...]
    """What should fail, as pytest takes it, the quick ones first; below `tests`."""
    survives: str = ""
    """Why no test can fail, if that is so."""

    @property
    def path(self) -> Path:
        """Below the root of the repository."""
        return PACKAGE / self.file

    def applied(self, text: str) -> str:
        """The text with the change. Raises ValueError if the old text is not there exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.id}: the old text occurs {found} times in {self.path}, not once")
        return text.replace(self.old, self.new)


def load(folder: Path = ROOT / "mutants") -> list[Mutation]:
    """All mutations, in the order of the lists. Raises ValueError for an entry that is not one."""
    found: list[Mutation] = []
    for name in LISTS:
        entries: list[dict[str, Any]] = tomllib.loads((folder / name).read_text())["mutation"]
        for entry in entries:
            try:
                found.append(Mutation(**{**entry, "tests": tuple(entry["tests"])}))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{name}: {entry.get('id', 'an entry without an id')}: {error}") from error
    return found


def findings(mutations: list[Mutation], root: Path = ROOT) -> list[str]:
    """Returns a sentence for each entry that does not fit the source or the tests."""
    found = [f"{name}: {n} entries have this id" for name, n in Counter(m.id for m in mutations).items() if n > 1]
    tests = {test.split("::")[0] for m in mutations for test in m.tests}
    functions = {file: _functions(root / "tests" / file) for file in tests}
    for m in mutations:
        try:
            text = m.applied((root / m.path).read_text())
            compile(text, str(m.path), "exec")
        except (OSError, ValueError, SyntaxError) as error:
            found.append(f"{m.id}: {error}")
        if m.old == m.new or not m.bug or not m.tests:
            found.append(f"{m.id}: changes nothing, or does not say what is wrong then, or has no tests")
        for test in m.tests:
            file, _, name = test.partition("::")
            known = functions[file]
            if known is None or (name and name.split("[")[0] not in known):
                found.append(f"{m.id}: there is no {test} below tests")
    return found


def _functions(path: Path) -> set[str] | None:
    """The functions of a file of tests; None if there is no such file."""
    if not path.is_file():
        return None
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
