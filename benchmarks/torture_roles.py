"""What the children of the torture do: serve until they are killed, check a folder after a kill, or meet another fault.

A role reports to the parent with `say`, and judges nothing but what it can see itself.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import onefold  # first: it preloads a real BLAS

# isort: split
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from disk_caches import ordinary_folder
from fake import FakeModel, Session, settled, text

from onefold.cache.memory.tokens import as_tokens
from onefold.cache.tiers.disk.tier import Disk
from onefold.cache.tiers.records.entry import BLOCK, on_disk
from onefold.cache.tiers.records.files import TEMPORARY
from onefold.cache.tiers.records.record import content_of, parse_head, parse_name
from onefold.errors import RecordError

MODELS = (("full", "full"), ("full", "recurrent"), ("rotating", "full"), ("composite", "full"))
MEMORY, PLENTY = 700_000, 4_000_000
CHUNK = 8
AMPLE, TIGHT = 1_000_000_000, 600_000
RECORD_TOKENS = 24
LONGEST = 240
"""Tokens of a conversation."""
RESUMED = 8
"""Conversations that are taken up again after a kill."""
PATIENCE_SECONDS = 60.0


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
    if isinstance(cache.parts.tier, Disk):
        cache.parts.tier.spiller.jobs.record_tokens = RECORD_TOKENS
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
    """Returns the prompt of a continued conversation, a branch of one, one asked again, or a new one."""
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
    """How many of the first `n` tokens are kept: all, if a conversation that continues them can be resumed further
    on; the checkpoint at that place may then have been thinned out."""
    path, matched = cache.parts.tree("").match(as_tokens(tokens[:n])) if n else ([], 0)
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
    if cache.parts.tier is None:
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
            if task.keeps and session.cached < n and cache.inventory.resumes_anywhere:
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


# -- other faults: serving continues, the fault is logged once, answers are right --------------------------------------


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.logged: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.logged.append(record.getMessage())


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
        found.append(f"not noticed: flush() is {flushed}, failed {failed!r}")
    switched_off = [s for s in heard.logged if "switched off" in s]
    if len(switched_off) != 1:
        found.append(f"logged {len(switched_off)} times that the disk is switched off")
    expected = ("switched off", "removed unusable record")
    return found + [f"logged: {s}" for s in heard.logged if not any(e in s for e in expected)]


def disk_full(task: Task, say: Say) -> None:
    """In the middle of a record: no file may become longer than half of one."""

    def fault() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    problems = _serve_some(task, fault)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
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


ROLES: dict[str, Callable[[Task, Say], None]] = {
    role.__name__: role for role in (serve, check, disk_full, folder_removed, permission_taken)
}
FAULTS = ("disk_full", "folder_removed", "permission_taken")
