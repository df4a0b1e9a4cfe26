"""A process that is killed again and again while it serves and writes: the folder must open, hold, and be right.

    make torture    # or: python benchmarks/torture.py [--kills 200] [--seed 0] [--seconds 0.8] [--mode both]

A child serves conversations on a small model with a disk folder: turns, branches, restores, evictions, a cache that is
closed and opened again. It says what the folder is to have kept (what `durable` says after `flush`), and is killed with
SIGKILL at a random moment, some of them in the first milliseconds of opening the folder. Then another process

- reads every record: its name, its header and its checksum must agree;
- opens the folder, which must be possible, and finds no leftover of a cut-off write afterwards;
- asks for everything that was acknowledged: nothing of it may be missing;
- takes conversations up again: every layer is compared with the tokens that it must hold, and logits with a stock run.

Most kills have a disk budget that is never reached. Some have a tight one, and damaged files too: what was acknowledged
may be gone there, and only what is reused must be right. A folder is kept over many kills. Other faults follow: a disk
that is full in the middle of a record, a folder that is removed, one whose permission is taken away.

SIGKILL ends a process, not a machine: what the operating system has accepted is not lost here. Ends with 1 if anything
is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from disk_caches import ordinary_folder
from fake import FakeModel, Session, settled, text

from onefold.cache.memory.tree import as_tokens
from onefold.cache.tiers.records.entry import BLOCK, on_disk
from onefold.cache.tiers.records.files import TEMPORARY
from onefold.cache.tiers.records.record import content_of, parse_head, parse_name
from onefold.errors import RecordError

MODELS = (("full", "full"), ("full", "recurrent"), ("rotating", "full"), ("composite", "full"))
MEMORY, PLENTY = 700_000, 4_000_000
CHUNK = 8
AMPLE, TIGHT = 1_000_000_000, 600_000
RECORD_TOKENS = 24
KILLS_PER_FOLDER = 20
LONGEST = 240
"""Tokens of a conversation."""
RESUMED = 8
"""Conversations that are taken up again after a kill."""
PATIENCE_SECONDS = 60.0
AT_OPENING = 0.2
"""Of the kills, those within the first milliseconds."""


@dataclass
class Task:
    folder: str
    kinds: tuple[str, ...]
    mode: str
    disk_budget: int
    seed: int
    acknowledged: list[tuple[list[int], int]] = field(default_factory=list)
    """Tokens, and how many of them are to be on disk."""
    keeps: bool = True
    """Whether what was acknowledged must still be there."""


def opened(task: Task, memory: int = MEMORY) -> tuple[FakeModel, onefold.PrefixCache]:
    model = FakeModel(task.kinds)
    cache = onefold.PrefixCache(
        model,
        memory,
        min_checkpoint_tokens=1,
        disk=task.folder,
        disk_budget=task.disk_budget,
        disk_mode=task.mode,
    )
    if cache._disk is not None:
        cache._disk.spiller.jobs.record_tokens = RECORD_TOKENS
    return model, cache


# -- the child ------------------------------------------------------------------------------------------


Say = Callable[..., None]


def serve(task: Task, say: Say) -> None:
    """Until it is killed."""
    rng = np.random.default_rng(task.seed)
    known = [tokens for tokens, _ in task.acknowledged[-12:]]
    say(opening=True)
    model, cache = opened(task)
    say(serving=True)
    while True:
        if rng.random() < 0.04:
            say(closing=True)
            cache.close()
            model, cache = opened(task)
        if rng.random() < 0.05:
            cache.clear(disk=False)
        if rng.random() < 0.1:
            _restore_partly(cache, known, rng)
        prompt = _prompt(known, rng)
        try:
            session = Session(model, cache, prompt)
        except onefold.BudgetError:
            say(refused=True)
            continue
        say(reused=session.cached, restored=session.lease.restored)
        session.prefill(CHUNK)
        if rng.random() < 0.1:
            session.cancel()
            continue
        tokens = session.decode(int(rng.integers(0, 4))).commit()
        known = [*known[-20:], tokens]
        said = tokens
        if task.mode == "through":
            if rng.random() < 0.5:
                continue  # the next one begins while this one is written
            if not cache.flush(PATIENCE_SECONDS):
                raise RuntimeError(f"flush: {cache.stats().disk}")
        else:
            said = known[int(rng.integers(len(known)))]
        say(tokens=said, durable=cache.durable(said))


def _prompt(known: list[list[int]], rng: np.random.Generator) -> list[int]:
    """A conversation that goes on, a branch of one, one asked again, or a new one."""
    more = text(int(rng.integers(4, 60)), int(rng.integers(1 << 30)))
    kind = rng.random()
    if not known or kind < 0.3:
        return [*text(int(rng.integers(20, 120)), int(rng.integers(1 << 30))), *more]
    base = known[int(rng.integers(len(known)))]
    if kind < 0.6 and len(base) < LONGEST:
        return [*base, *more]
    if kind < 0.9:
        return [*base[: int(rng.integers(1, len(base)))], *more][:LONGEST]
    return list(base)


def _restore_partly(cache: onefold.PrefixCache, known: list[list[int]], rng: np.random.Generator) -> None:
    if known:
        restore = cache.restore([*known[int(rng.integers(len(known)))], 1])
        if restore is not None:
            for _ in range(int(rng.integers(0, 4))):
                restore.step()
            restore.finish()


# -- what is there after a kill --------------------------------------------------------------------------


def kept_of(cache: onefold.PrefixCache, tokens: list[int], n: int) -> int:
    """How many of the first `n` tokens are kept: all, if a conversation goes on from there that can be resumed further
    on; the state at that place may then have been thinned out."""
    path, matched = cache._tree("").match(as_tokens(tokens[:n])) if n else ([], 0)
    if path and matched == n:
        beyond = [path[-1], *path[-1].walk()] if path[-1].end > n else list(path[-1].walk())
        if any(x.below is not None and x.below.has_saved_point for x in beyond):
            return n
    return cache.durable(tokens)


def check(task: Task, say: Say) -> None:
    files = record_files(task.folder)
    bad = [f"{p.name}: {reason}" for p in files if (reason := unsound(p))]
    leftovers = len(temporary_files(task.folder))
    began = time.perf_counter()
    model, cache = opened(task, PLENTY)
    seconds = time.perf_counter() - began
    wrong, lost, shorter = list[str](), 0, 0
    problems = [f"a leftover stays: {p.name}" for p in temporary_files(task.folder)]
    if cache._disk is None:
        problems.append("the folder could not be used")
    settled(cache)
    if cache.stats().disk.rejected_records and task.keeps:
        problems.append(f"records were rejected: {cache.stats().reasons}")
    for tokens, n in task.acknowledged:
        if task.keeps and (found := kept_of(cache, tokens, n)) < n:
            lost += n - found
            problems.append(f"of {n} acknowledged tokens {found} are there")
    rng = np.random.default_rng(task.seed)
    last, others = task.acknowledged[-RESUMED // 2 :], task.acknowledged[: -RESUMED // 2]
    chosen = [others[i] for i in rng.permutation(len(others))[: RESUMED // 2]]
    resumed = restored = 0
    for tokens, n in [*last, *chosen]:
        try:
            session = Session(model, cache, [*tokens, 1])
            resumed, restored = resumed + session.cached, restored + session.lease.restored
            if task.keeps and session.cached < n and cache.resumes_anywhere:
                problems.append(f"{session.cached} of {n} acknowledged tokens are reused: {session.lease.reason}")
            shorter += task.keeps and session.cached < n
            session.prefill(CHUNK).decode(1).cancel()
        except AssertionError as error:
            wrong.append(str(error)[:300])
    settled(cache)
    stats = cache.stats()
    cache.flush(PATIENCE_SECONDS)  # files of what was given up are gone then
    used = sum(on_disk(p.stat().st_size) for p in record_files(task.folder))
    if used > task.disk_budget:
        problems.append(f"{used} bytes lie there, of a budget of {task.disk_budget}")
    if bad and task.keeps:
        problems += [f"a record is not sound: {b}" for b in bad]
    cache.close()
    say(
        records=len(files),
        bad=len(bad),
        leftovers=leftovers,
        open_seconds=seconds,
        lost=lost,
        wrong=wrong,
        shorter=shorter,
        resumed=resumed,
        restored=restored,
        rejected=stats.disk.rejected_records,
        problems=problems,
    )


def record_files(folder: str) -> list[Path]:
    return [p for p in Path(folder).glob("*/*") if parse_name(p.name) is not None]


def temporary_files(folder: str) -> list[Path]:
    return list(Path(folder).glob(f"*/*{TEMPORARY}"))


def unsound(path: Path) -> str:
    """Why a record is not what its name says; empty if it is. Reads all of it."""
    data, named = path.read_bytes(), parse_name(path.name)
    try:
        head = parse_head(data)
        if named is None or isinstance(head, int):
            return "truncated"
        content = content_of(head, path.parent.name, named)
        rest = data[head.data_at + content.tokens.nbytes :]
        if content.size != len(data) or content.checksum([rest]) != head.checksum:
            return "checksum"
    except RecordError as error:
        return str(error)
    return ""


def damage(folder: str, rng: np.random.Generator) -> int:
    """Flip a byte of a record, cut it short, or empty it."""
    files = record_files(folder)
    if not files:
        return 0
    path = files[int(rng.integers(len(files)))]
    data = bytearray(path.read_bytes())
    how = rng.random()
    if how < 0.6:
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif how < 0.9:
        del data[int(rng.integers(len(data))) :]
    else:
        data.clear()
    path.write_bytes(data)
    return 1


# -- other faults: serving goes on, it is said once, answers are right --------------------------------------


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def hearing() -> Iterator[Warnings]:
    heard, log = Warnings(), logging.getLogger("onefold")
    log.addHandler(heard)
    try:
        yield heard
    finally:
        log.removeHandler(heard)


def _serve_some(task: Task, fault: Callable[[], None]) -> list[str]:
    """Some conversations, the fault, and more of them; returns what is not as it should be."""
    found = []
    with hearing() as heard:
        model, cache = opened(task)
        first = [Session(model, cache, text(100, seed)).prefill(CHUNK).commit() for seed in range(6)]
        if task.mode == "through" and not cache.flush(PATIENCE_SECONDS):
            found.append("flush failed before the fault")
        fault()
        for seed in range(30):
            base = first[seed % len(first)]
            Session(model, cache, [*base, *text(40, 100 + seed)]).prefill(CHUNK).decode(2).commit()
        flushed = cache.flush(PATIENCE_SECONDS)
        failed = cache.stats().disk.failed
        settled(cache)
        cache.close()
    if task.mode == "through" and (flushed or not failed):
        found.append(f"nobody noticed: flush() is {flushed}, failed {failed!r}")
    told = [s for s in heard.said if "switched off" in s]
    if len(told) != 1:
        found.append(f"said {len(told)} times that the disk is switched off")
    return found + [f"said: {s}" for s in heard.said if "switched off" not in s and "not used and removed" not in s]


def disk_full(task: Task, say: Say) -> None:
    """In the middle of a record: no file may become longer than half of one."""

    def fault() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    problems = _serve_some(task, fault)
    resource.setrlimit(resource.RLIMIT_FSIZE, [resource.getrlimit(resource.RLIMIT_FSIZE)[1]] * 2)
    problems += [f"a leftover stays: {p.name}" for p in temporary_files(task.folder)]
    problems += [f"a record is not sound: {p.name}" for p in record_files(task.folder) if unsound(p)]
    model, cache = opened(task)
    Session(model, cache, text(100)).prefill(CHUNK).commit()
    cache.close()
    say(problems=problems)


def folder_removed(task: Task, say: Say) -> None:
    say(problems=_serve_some(task, lambda: shutil.rmtree(task.folder)))


def permission_taken(task: Task, say: Say) -> None:
    with ordinary_folder() as made:
        folder = made / "kept"
        problems = _serve_some(replace(task, folder=str(folder)), lambda: _forbid(folder))
    say(problems=problems)


def _forbid(folder: Path) -> None:
    for path in (folder, *folder.glob("*/")):
        path.chmod(0o500)


# -- processes -------------------------------------------------------------------------------------------


ROLES: dict[str, Callable[[Task, Say], None]] = {
    role.__name__: role for role in (serve, check, disk_full, folder_removed, permission_taken)
}
FAULTS = ("disk_full", "folder_removed", "permission_taken")


class Child:
    """A role in a process of its own. What it says is read line by line.

    On Linux it is a fork of this process, which never computes anything; elsewhere it starts from nothing."""

    def __init__(self, role: str, task: Task) -> None:
        self.said: list[dict[str, Any]] = []
        self._rest = b""
        if sys.platform == "linux":
            self._out, write = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._out)
                _play(role, task, write)
            os.close(write)
            return
        command = [sys.executable, __file__, "--role", role]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as given:
            given.write(json.dumps(asdict(task)).encode())
        self.pid, self._out = self._process.pid, self._process.stdout.fileno()

    def listen(self, seconds: float, until: str = "") -> bool:
        """Read what it says for so long, or until it says that; False if it has ended."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._out], [], [], left)[0]:
                if not (data := os.read(self._out, 1 << 16)):
                    return False
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.said += [json.loads(line) for line in lines]
                if until and any(until in said for said in self.said):
                    return True
        return True

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> int:
        """Read the last of it; the exit code, or less than 0 for a signal."""
        while self.listen(PATIENCE_SECONDS):
            self.kill()
        os.close(self._out)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _play(role: str, task: Task, write: int) -> None:
    """Does not return."""

    def say(**what: Any) -> None:
        line = json.dumps(what).encode() + b"\n"
        while line:
            line = line[os.write(write, line) :]

    status = 1
    try:
        logging.getLogger("onefold").addHandler(logging.NullHandler())
        ROLES[role](task, say)
        status = 0
    except AssertionError as error:
        say(wrong_layer=str(error)[:300])
        raise
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


# -- the parent ------------------------------------------------------------------------------------------


@dataclass
class Result:
    kills: Counter[str] = field(default_factory=Counter)
    """By what the child was doing."""
    runs: Counter[str] = field(default_factory=Counter)
    records: int = 0
    bad: int = 0
    damaged: int = 0
    leftovers: int = 0
    acknowledged: int = 0
    lost: int = 0
    shorter: int = 0
    resumed: int = 0
    restored: int = 0
    served: int = 0
    refused: int = 0
    restored_serving: int = 0
    open_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def sound(self) -> bool:
        return not (self.lost or self.wrong or self.failures)


def run(folder: Path, *, kills: int, seed: int, seconds: float, mode: str, faults: bool = True) -> Result:
    result, rng = Result(), np.random.default_rng(seed)
    began = time.perf_counter()
    kept: dict[str, list[tuple[list[int], int]]] = {}
    for number in range(kills):
        modes = ("through", "back") if mode == "both" else (mode,)
        chosen = modes[0] if rng.random() < 0.65 else modes[-1]
        tight = rng.random() < 0.25
        name = f"{number // KILLS_PER_FOLDER}-{'tight' if tight else chosen}"
        kinds = MODELS[int(rng.integers(len(MODELS)))]
        acknowledged = kept.setdefault(f"{name}-{kinds}", [])
        task = Task(str(folder / name), kinds, chosen, TIGHT if tight else AMPLE, seed * 1_000_003 + number)
        task.acknowledged, task.keeps = acknowledged, not tight
        result.runs[f"{chosen}{', tight' if tight else ''}"] += 1
        _kill_once(task, result, seconds, rng)
        if tight and rng.random() < 0.5:
            result.damaged += damage(task.folder, rng)
        _check_once(task, result)
    for fault in FAULTS if faults else ():
        for fault_mode in ("through", "back"):
            task = Task(str(folder / f"{fault}-{fault_mode}"), MODELS[0], fault_mode, AMPLE, seed)
            _fault_once(fault, task, result)
    result.seconds = time.perf_counter() - began
    return result


def _named(task: Task) -> str:
    return f"{Path(task.folder).name}, {'/'.join(task.kinds)}, written {task.mode}, seed {task.seed}"


def _kill_once(task: Task, result: Result, seconds: float, rng: np.random.Generator) -> None:
    child = Child("serve", task)
    alive = child.listen(PATIENCE_SECONDS, until="opening")
    early = rng.random() < AT_OPENING
    delay = float(rng.uniform(0, 0.02) if early else rng.uniform(0.02, max(0.03, seconds)))
    alive = alive and child.listen(delay)
    child.kill()
    status = child.ended()
    if not alive or status != -signal.SIGKILL:
        result.failures.append(f"a child ended by itself with {status}: {_named(task)}")
    result.wrong += [f"{said['wrong_layer']}: {_named(task)}" for said in child.said if "wrong_layer" in said]
    last = child.said[-1] if child.said else {}
    result.kills["opening" if "opening" in last else "closing" if "closing" in last else "serving"] += 1
    new = [(said["tokens"], said["durable"]) for said in child.said if "tokens" in said]
    task.acknowledged += new
    result.acknowledged += sum(n for _, n in new)
    result.served += sum("reused" in said for said in child.said)
    result.refused += sum("refused" in said for said in child.said)
    result.restored_serving += sum(said.get("restored", 0) for said in child.said)


def _check_once(task: Task, result: Result) -> None:
    child = Child("check", task)
    status = child.ended()
    if status or not child.said:
        result.failures.append(f"the folder could not be checked: {status}: {_named(task)}")
        return
    said = child.said[-1]
    for name in ("records", "bad", "leftovers", "lost", "shorter", "resumed", "restored"):
        setattr(result, name, getattr(result, name) + said[name])
    result.open_seconds = max(result.open_seconds, said["open_seconds"])
    result.wrong += said["wrong"]
    result.failures += said["problems"]


def _fault_once(fault: str, task: Task, result: Result) -> None:
    child = Child(fault, task)
    status = child.ended()
    said = child.said[-1] if child.said else {}
    problems = said.get("problems", ["it said nothing"])
    if status:
        problems = [*problems, f"it ended with {status}"]
    name = f"{fault.replace('_', ' ')}, {task.mode}"
    result.faults[name] = "; ".join(problems) or "serving goes on, said once"
    result.failures += [f"{name}: {p}" for p in problems]


def table(result: Result) -> Table:
    made = Table(title=f"{result.kills.total()} kills, {result.seconds:.0f} s")
    count = lambda c: ", ".join(f"{k}: {v}" for k, v in sorted(c.items()))  # noqa: E731
    for name, value in (
        ("kills, by what was going on", count(result.kills)),
        ("kills, by mode and disk budget", count(result.runs)),
        ("records read whole after a kill", str(result.records)),
        ("of them not sound / damaged on purpose", f"{result.bad} / {result.damaged}"),
        ("leftovers swept", str(result.leftovers)),
        ("slowest opening", f"{1000 * result.open_seconds:.0f} ms"),
        ("requests served / refused for lack of memory", f"{result.served} / {result.refused}"),
        ("tokens restored while serving", str(result.restored_serving)),
        ("tokens reused after a kill / of them from disk", f"{result.resumed} / {result.restored}"),
        ("conversations reused less far than acknowledged", str(result.shorter)),
        ("acknowledged tokens", str(result.acknowledged)),
        ("lost tokens", str(result.lost)),
        ("wrong layers", str(len(result.wrong))),
        *result.faults.items(),
        ("failures", str(len(result.failures))),
    ):
        made.add_row(name, value)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.8, help="the longest that a child may live")
    parser.add_argument("--mode", choices=("through", "back", "both"), default="both")
    parser.add_argument("--folder", type=Path, help="kept afterwards; a temporary one if not given")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        _play(given.role, Task(**json.load(sys.stdin)), sys.stdout.fileno())
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = {"kills": given.kills, "seed": given.seed, "seconds": given.seconds, "mode": given.mode}
        result = run(folder, **options)
    console = Console()
    console.print(table(result))
    for problem in [*result.wrong[:5], *result.failures[:15]]:
        console.print(problem, style="red", markup=False)
    return 0 if result.sound() else 1


if __name__ == "__main__":
    sys.exit(main())
