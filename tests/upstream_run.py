"""Runs mlx-lm's own test files on a prompt cache of our choice. A program of its own: it replaces a class of mlx-lm.

    python tests/upstream_run.py --cache onefold --report report.json test_server.py ...

The report says for each test "passed", or why not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx_lm.server
from prompt_caches import prompt_cache_class


class Recorded(unittest.TestResult):
    """Outcomes by test."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def _record(self, test: Any, outcome: str) -> None:
        name = test.id().rpartition(".tests.")[2]
        if self.outcomes.get(name, "passed") == "passed":  # what failed first is what is wanted
            self.outcomes[name] = outcome

    def addSuccess(self, test: Any) -> None:
        self._record(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._record(test, f"skipped: {reason}")

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._record(test, self.failures[-1][1])

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._record(test, self.errors[-1][1])

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._record(test, "".join(text for _, text in (self.failures + self.errors)[-1:]))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    mlx_lm.server.LRUPromptCache = prompt_cache_class(args.cache)
    result = Recorded()
    for file in args.files:
        module = load(file)  # after the class was replaced: it imports it by name
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    args.report.write_text(json.dumps(result.outcomes))
    mx.clear_streams()


if __name__ == "__main__":
    main()
