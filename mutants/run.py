"""Whether the tests notice bugs: each mutation of the lists is made in a copy of the source, and its tests are run.

    make mutants    # or: python mutants/run.py [--jobs 2] [--only ID ...] [--list] [--check] [--logs FOLDER]

First the tests run without a mutation, and must pass. Then each mutation is made in turn, and the tests that cover its
module run until one fails. A test that takes longer than a minute fails, and tests that do not end within the limit
are stopped: a hang is noticed, too. Each job has a copy of `src`, `tests` and `pyproject.toml` in a temporary folder,
which the interpreter imports `onefold` from, wherever it is installed.

Ends with 1 if less than nine tenths of all mutations are killed, if one survives that the list does not explain, or if
one could not be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from mutations import ROOT, Mutation, findings, load

LEAST_KILLED = 0.9
LIMIT_SECONDS = 300.0
"""For the tests of one mutation."""
TEST_SECONDS = 60
"""For one test."""
COPIED = ("src", "tests", "pyproject.toml")
ELSEWHERE = 97
"""How a child ends that imported another copy of the package."""
CHILD = f"""
import pathlib, sys
import onefold
print("onefold is", onefold.__file__, flush=True)
if not pathlib.Path(onefold.__file__).resolve().is_relative_to(pathlib.Path(sys.argv[1]).resolve()):
    sys.exit({ELSEWHERE})
import pytest

class FirstFailure:
    def pytest_configure(self):
        from hypothesis import Phase, settings
        settings.register_profile("first failure", phases=[Phase.explicit, Phase.generate])
        settings.load_profile("first failure")

sys.exit(pytest.main(sys.argv[2:], plugins=[FirstFailure()]))
"""
"""Says where the package is, and runs pytest. Hypothesis need not look for the shortest example that fails."""
RUNNING: set[subprocess.Popen[bytes]] = set()


class Verdict(enum.Enum):
    KILLED = "killed"
    SURVIVED = "survived"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Ran:
    """How some tests ended."""

    verdict: Verdict
    by: str
    """The test that failed, or what else ended them."""
    seconds: float
    output: str


class Workplace:
    """A copy of the source and the tests, where one mutation at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, folder / name)

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        path = self.folder / mutation.path
        text = path.read_text()
        try:
            self._write(path, mutation.applied(text))
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # what was compiled counts as current if the file has the same size, and was written within the same second
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def run(self, tests: Iterable[str], limit: float) -> Ran:
        """Run these tests until one fails."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=short"]
        options += [f"--timeout={TEST_SECONDS}", "--hypothesis-seed=0"]
        command = [sys.executable, "-c", CHILD, str(self.folder), *options, *(f"tests/{test}" for test in tests)]
        log = self.folder / "output"
        began = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            RUNNING.add(child)
            try:
                code: int | None = child.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _stop(child)
                child.wait()
                RUNNING.discard(child)
        said = log.read_text(errors="replace")
        return Ran(*_verdict(code, said), time.monotonic() - began, said)

    def _environment(self) -> dict[str, str]:
        """As tests/conftest.py has it where several processes run: one thread for each."""
        return os.environ | {
            "PYTHONPATH": str(self.folder / "src"),
            "HYPOTHESIS_STORAGE_DIRECTORY": tempfile.mkdtemp(dir=self.folder),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }


def _verdict(code: int | None, said: str) -> tuple[Verdict, str]:
    """What an exit status means (pytest's: 0 all passed, 1 some failed, others nothing was tested)."""
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.*?)(?: - .*)?$", said, re.MULTILINE)
    if code is None:
        return Verdict.KILLED, "the time limit"
    if code < 0:
        return Verdict.KILLED, f"a crash ({signal.Signals(-code).name})"
    if code == 0:
        return Verdict.SURVIVED, ""
    if code == 1 and failed is not None:
        return Verdict.KILLED, failed[1]
    if code == ELSEWHERE:
        return Verdict.NOT_TRIED, "another copy of onefold was imported"
    return Verdict.NOT_TRIED, f"the tests ended with {code}"


class Workplaces:
    """As many as there are jobs; a job has one of them for as long as it runs."""

    def __init__(self, folder: Path, n: int) -> None:
        self._free: queue.Queue[Workplace] = queue.Queue()
        for i in range(n):
            self._free.put(Workplace(folder / str(i)))

    @contextlib.contextmanager
    def one(self) -> Iterator[Workplace]:
        place = self._free.get()
        try:
            yield place
        finally:
            self._free.put(place)


@contextlib.contextmanager
def _pool(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that end what they run, and begin nothing more, when this is interrupted."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in list(RUNNING):
            _stop(child)
        raise
    finally:
        pool.shutdown()


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End it, and what its tests have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Trial:
    """What one run does."""

    places: Workplaces
    jobs: int
    limit: float
    logs: Path | None

    def without_mutations(self, mutations: Sequence[Mutation]) -> bool:
        """Run the tests of all of them once, file by file. Returns whether they pass."""
        by_file: dict[str, list[str]] = {}
        for test in dict.fromkeys(test for m in mutations for test in m.tests):
            by_file.setdefault(test.split("::")[0], []).append(test)
        groups = {file: [file] if file in tests else tests for file, tests in by_file.items()}
        passed = True
        with _pool(self.jobs) as pool:
            ran = {pool.submit(self._plain, group): file for file, group in groups.items()}
            for done in as_completed(ran):
                found = done.result()
                passes = found.verdict is Verdict.SURVIVED
                _say("unmutated", "passes" if passes else "FAILS", found.by or ran[done], found.seconds)
                if not passes:
                    passed = False
                    print(found.output, flush=True)
        return passed

    def _plain(self, tests: list[str]) -> Ran:
        with self.places.one() as place:
            return place.run(tests, 3 * self.limit)

    def each(self, mutations: Sequence[Mutation]) -> dict[Mutation, Ran]:
        found: dict[Mutation, Ran] = {}
        with _pool(self.jobs) as pool:
            trials = {pool.submit(self._try, m): m for m in mutations}
            for done in as_completed(trials):
                m, ran = trials[done], done.result()
                found[m] = ran
                _say(m.id, ran.verdict.value, ran.by or m.survives or f"NOT EXPLAINED: {m.bug}", ran.seconds)
        return found

    def _try(self, mutation: Mutation) -> Ran:
        with self.places.one() as place, place.mutated(mutation):
            ran = place.run(mutation.tests, self.limit)
        if self.logs is not None:
            (self.logs / f"{mutation.id}.txt").write_text(ran.output)
        return ran


def _say(*row: object) -> None:
    what, verdict, why, seconds = row
    print(f"{what:<34} {verdict:<9} {seconds:>6.1f} s  {why}", flush=True)


def judged(found: dict[Mutation, Ran], *, all_of_them: bool) -> list[str]:
    """Returns a sentence for each reason why the run has failed."""
    wrong = []
    killed = sum(ran.verdict is Verdict.KILLED for ran in found.values())
    for m, ran in found.items():
        if ran.verdict is Verdict.NOT_TRIED:
            wrong.append(f"{m.id} could not be tried: {ran.by}")
        elif ran.verdict is Verdict.SURVIVED and not m.survives:
            wrong.append(f"{m.id} survives, and the list does not say why: {m.bug}")
    if all_of_them and killed < LEAST_KILLED * len(found):
        wrong.append(f"{killed} of {len(found)} are killed, which is less than {LEAST_KILLED:.0%}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the tests on mutations of the source.")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="ID", help="just these mutations")
    parser.add_argument("--list", action="store_true", help="say what the mutations are, and end")
    parser.add_argument("--check", action="store_true", help="see whether all of them fit the source, and end")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for the tests of one mutation")
    parser.add_argument("--logs", type=Path, help="write what each run printed into this folder")
    options = parser.parse_args(arguments)
    every = load()
    chosen = [m for m in every if options.only is None or m.id in options.only]
    if unknown := set(options.only or ()) - {m.id for m in chosen}:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}; --list names them all")
    if options.list:
        for m in chosen:
            print(f"{m.id:<34} {m.file:<28} {m.bug}")
        return 0
    wrong = findings(every)
    if options.check or wrong:
        print("\n".join(wrong) or f"{len(every)} mutations fit the source")
        return 1 if wrong else 0
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began, jobs = time.monotonic(), max(1, options.jobs)
    with tempfile.TemporaryDirectory(prefix="onefold-mutants-") as folder:
        trial = Trial(Workplaces(Path(folder), jobs), jobs, options.limit, options.logs)
        if not trial.without_mutations(chosen):
            print("the tests fail without a mutation: nothing was tried")
            return 1
        found = trial.each(chosen)
    wrong = judged(found, all_of_them=options.only is None)
    killed = sum(ran.verdict is Verdict.KILLED for ran in found.values())
    minutes = (time.monotonic() - began) / 60
    print("\n".join(["", *wrong, f"{killed} of {len(found)} mutations killed, in {minutes:.1f} minutes"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
