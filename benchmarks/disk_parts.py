"""The parts of the disk benchmark. `disk.py` runs each in a process of its own; a part returns its figures by name."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import process_memory
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fake import FakeModel

from onefold.cache.request import adopting
from onefold.cache.tiers.records.record import Content, What, parse_name, range_tensors

TURN = 32
BUDGET = "4GB"
DISK_BUDGET = "20GB"
PREFILL_STEP = 512
RECORDS = 10_000
DECODING = {"turn": (512, 32), "busy": (4096, 32)}
"""Tokens that are written, and tokens that are decoded meanwhile."""


@dataclass
class Settings:
    folder: str
    tokens: int
    repeats: int
    records: int = RECORDS


# -- what the parts share ---------------------------------------------------------------------------------


def conversation(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 40_000, n).tolist()


def demo() -> nn.Module:
    model, _ = onefold.load("demo")
    mx.eval(model(mx.array([[1, 2, 3, 4, 5, 6, 7, 8]])))  # whatever a first forward sets up
    return model


def opened(model: nn.Module, folder: Path | None, mode: str = "through") -> onefold.PrefixCache:
    if folder is None:
        return onefold.PrefixCache(model, BUDGET)
    return onefold.PrefixCache(model, BUDGET, disk=folder, disk_budget=DISK_BUDGET, disk_mode=mode)


def first_token(model: nn.Module, cache: onefold.PrefixCache, prompt: list[int], keep: int = 0) -> tuple[float, Any]:
    """Seconds from the request to its first token, and the lease, which is closed; `keep` tokens are committed."""
    began = time.perf_counter()
    lease = cache.lease(prompt, reserve_tokens=8)
    steps = generate_step(
        mx.array(np.asarray(lease.rest)), model, max_tokens=1, prompt_cache=lease.layers, prefill_step_size=PREFILL_STEP
    )
    next(iter(steps))
    seconds = time.perf_counter() - began
    lease.commit(prompt[:keep] if keep else prompt[: lease.cached])
    return seconds, lease


def kv_of(model: nn.Module, n: int, seed: int) -> list[Any]:
    """mlx-lm's caches for so many tokens, filled with random numbers."""
    mx.random.seed(seed)
    caches = []
    for layer in model.layers:
        attention = layer.self_attn
        shape = (1, attention.n_kv_heads, n, attention.head_dim if hasattr(attention, "head_dim") else 64)
        cache = KVCache()
        cache.keys, cache.values = mx.random.normal(shape), mx.random.normal(shape)
        cache.offset = n
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
    return caches


def written(cache: onefold.PrefixCache) -> None:
    """Wait until everything is."""
    if not cache.flush(120):
        raise RuntimeError(f"flush: {cache.stats().disk}")


def records(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*/*") if parse_name(p.name) is not None)


def drop_from_file_cache(paths: list[Path]) -> bool:
    """Have the operating system drop these files from its file cache. Returns False if it cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        held = os.open(path, os.O_RDONLY)
        try:
            os.fsync(held)
            os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(held)
    return True


# -- parts: each in a process of its own ---------------------------------------------------------------------


def part_cold(given: Settings) -> dict[str, Any]:
    """The conversation is computed and written through; then its next turn is asked for, in memory."""
    model, folder = demo(), Path(given.folder) / "conversation"
    history = conversation(given.tokens, 0)
    with opened(model, folder) as cache:
        cold, _ = first_token(model, cache, [*history, *conversation(TURN, 1)], keep=len(history))
        written(cache)
        warm = []
        for i in range(given.repeats):
            seconds, lease = first_token(model, cache, [*history, *conversation(TURN, 2 + i)])
            if lease.cached != len(history):
                raise RuntimeError(f"{lease.cached} tokens were reused: {lease.reason}")
            warm.append(seconds)
        kv_bytes = len(history) * cache.inventory.token_bytes
    files = records(folder)
    return {
        "cold": cold,
        "warm": warm,
        "kv_bytes": kv_bytes,
        "file_bytes": sum(p.stat().st_size for p in files),
        "disk_bytes": sum(512 * p.stat().st_blocks for p in files),
        "records": len(files),
    }


def part_restart(given: Settings) -> dict[str, Any]:
    """The next turn in a new process."""
    model, folder = demo(), Path(given.folder) / "conversation"
    history = conversation(given.tokens, 0)
    dropped = drop_from_file_cache(records(folder))
    began = time.perf_counter()
    with opened(model, folder, "back") as cache:
        opening = time.perf_counter() - began
        seconds, lease = first_token(model, cache, [*history, *conversation(TURN, given.repeats)])
        if lease.restored != len(history):
            raise RuntimeError(f"{lease.restored} tokens came from disk: {lease.reason}, {cache.stats().reasons}")
        again, _ = first_token(model, cache, [*history, *conversation(TURN, 1000 + given.repeats)])
    return {"restart": seconds, "warm": again, "opening": opening, "dropped": dropped}


def part_restore(given: Settings) -> dict[str, Any]:
    """Reading the conversation back, and reading its files: in turn, each from a cold file cache."""
    model, folder = demo(), Path(given.folder) / "restore"
    tokens = conversation(given.tokens, 0)
    with opened(model, folder) as cache:
        cache.inventory.adopt(tokens, kv_of(model, given.tokens, 0))
        written(cache)
    files, found = records(folder), dict[str, Any](restore=[], plain=[], checked=[])
    with opened(model, folder) as cache:
        for i in range(2 * given.repeats + 2):
            drop_from_file_cache(files)
            if i % 2:
                found["plain"].append(timed(lambda: [_read(path) for path in files]))
                continue
            mx.clear_cache()
            process_memory.forget_most()
            mx.reset_peak_memory()
            before, rss_before = mx.get_active_memory(), process_memory.now()
            began = time.perf_counter()
            restore = cache.restore([*tokens, 1])
            while restore is not None and restore.step():
                pass
            found["restore"].append(time.perf_counter() - began)
            if restore is None or restore.tokens != len(tokens):
                raise RuntimeError(f"{0 if restore is None else restore.tokens} tokens came back")
            found["peak"] = mx.get_peak_memory() - before
            found["entry"] = mx.get_active_memory() - before
            found["rss_peak"] = process_memory.most() - rss_before
            found["rss_entry"] = process_memory.now() - rss_before
            del restore
            cache.clear(disk=False)
    found["bytes"] = sum(p.stat().st_size for p in files)
    found["restore"], found["plain"] = found["restore"][1:], found["plain"][1:]  # the first pair warms up
    return found


def _read(path: Path) -> int:
    with open(path, "rb") as file:
        return len(file.read())


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def part_decode(given: Settings) -> dict[str, Any]:
    """Greedy decode while another conversation is written, and just before and after that, while nothing is."""
    model, folder = demo(), Path(given.folder) / "decode"
    found: dict[str, Any] = {name: {"ratios": [], "bytes": [], "writing": 0} for name in DECODING}
    with opened(model, folder) as cache, cache.lease(conversation(64, 5), reserve_tokens=4096) as lease:
        layers = lease.layers
        mx.eval(model(mx.array([lease.rest.tolist()]), cache=layers))
        speed(model, layers, 8)
        for i in range(2 * given.repeats):
            for name, (tokens, n) in DECODING.items():
                other, kv = conversation(tokens, 100 + i), kv_of(model, tokens, i)
                before = speed(model, layers, n)
                written_before = cache.stats().disk.written_bytes
                cache.inventory.adopt(other, kv)
                del kv
                writing = speed(model, layers, n)
                disk = cache.stats().disk
                found[name]["bytes"].append(disk.written_bytes - written_before)
                found[name]["writing"] += disk.pending
                written(cache)
                found[name]["ratios"].append(2 * writing / (before + speed(model, layers, n)))
                cache.inventory.forget(other, 0)
                written(cache)
        lease.cancel()
    return found


def speed(model: nn.Module, layers: list[Any], n: int) -> float:
    """Tokens per second, greedily."""
    token = mx.array([[7]])
    began = time.perf_counter()
    for _ in range(n):
        token = mx.argmax(model(token, cache=layers)[:, -1:], axis=-1)
        mx.eval(token)
    return n / (time.perf_counter() - began)


def part_commit(given: Settings) -> dict[str, Any]:
    """A conversation that grows by turns of 512 tokens, in a cache with a disk and in one without."""
    model, folder = demo(), Path(given.folder) / "commit"
    found: dict[str, Any] = {"disk": [], "busy": [], "none": []}
    kv = kv_of(model, given.tokens, 0)
    with opened(model, folder) as on_disk, opened(model, None) as in_memory:
        for i in range(given.repeats + 1):
            tokens = conversation(given.tokens, 300 + i)
            for name, cache in (("disk", on_disk), ("none", in_memory), ("busy", on_disk)):
                if name == "busy":  # the turn before is still being written
                    tokens = conversation(given.tokens, 400 + i)
                for upto in range(512, given.tokens + 1, 512):
                    with cache.lease(tokens[:upto]) as lease:
                        adopting.fill(lease.hold, kv, upto)
                        found[name].append(timed(lambda: lease.commit(tokens[:upto])))  # noqa: B023
                    if name != "busy":
                        written(cache)
                written(cache)
                cache.clear()
            if i == 0:
                found = {name: [] for name in found}  # the first round warms up
    return found


def part_turns(given: Settings) -> dict[str, Any]:
    """200 turns of 100 tokens, 25 to a conversation, each at once after the last; on a disk and on a slow one."""
    model, fsync = FakeModel(["full", "full"]), os.fsync
    found: dict[str, Any] = {}
    for name, slow in (("none", 0.0), ("disk", 0.0), ("slow", 0.03)):

        def slow_fsync(fd: Any, slow: float = slow) -> None:
            time.sleep(slow)
            fsync(fd)

        os.fsync = slow_fsync
        folder = Path(given.folder) / "turns" / name
        options: dict[str, Any] = {} if name == "none" else {"disk": folder, "disk_mode": "through"}
        seconds: list[float] = []
        tokens: list[int] = []
        with onefold.PrefixCache(model, "64MB", **options) as cache:
            for i in range(200):
                new = [t % 60 for t in conversation(100, i)]
                tokens = new if i % 25 == 0 else [*tokens, *new]
                seconds.append(timed(lambda: _turn(model, cache, tokens)))  # noqa: B023
            stats = cache.stats()
            written(cache)
        found[name] = {"in_place": stats.moves, "elsewhere": stats.borrows, "seconds": seconds}
    os.fsync = fsync
    return found


def _turn(model: nn.Module, cache: onefold.PrefixCache, tokens: list[int]) -> None:
    with cache.lease(tokens) as lease:
        mx.eval(model(mx.array([tokens[lease.cached :]]), cache=lease.layers))
        lease.commit(tokens)


def part_records(given: Settings) -> dict[str, Any]:
    """Small records, as a cache would have written them: conversations short and long, and branches."""
    model, folder, rng = FakeModel(["full"] * 4), Path(given.folder) / "open", np.random.default_rng(0)
    with onefold.PrefixCache(model, "1GB", disk=folder, disk_mode="through") as held:
        _turn(model, held, [1, 2, 3, 4])
        written(held)
    (first,) = records(folder)
    inside, about = first.parent, json.loads((first.parent / "about.json").read_text())
    layout = [[(heads, dim, dtype.rpartition(".")[2]) for heads, dim, dtype in arrays] for arrays in about["layout"]]
    tensors = range_tensors(layout, 4)
    payload = bytes(sum(t.nbytes for t in tensors))
    ends: list[Content | None] = [None]
    above, left, count = None, 0, 1
    while count < given.records:
        if not left:  # another conversation, from the start or where an earlier one was
            left = int(rng.choice([4, 16, 64, 500]))
            above = ends[int(rng.integers(len(ends)))]
        tokens = rng.integers(0, 60, 4).astype(np.int32)
        start, parent = (0, b"") if above is None else (above.end, above.address)
        above = Content(What.RANGE, inside.name, parent, start, tokens, tensors)
        header = above.header(above.checksum([payload]))
        (inside / above.name).write_bytes(header + tokens.tobytes() + payload)
        if rng.random() < 0.1:
            ends.append(above)
        left, count = left - 1, count + 1
    files = records(folder)
    return {"records": len(files), "bytes": sum(p.stat().st_size for p in files)}


def part_open(given: Settings) -> dict[str, Any]:
    """Opening a cache on the folder and using it, less doing that with one without, in a new process."""
    model, folder = FakeModel(["full"] * 4), Path(given.folder) / "open"
    onefold.PrefixCache(model, "1GB").close()
    if given.repeats % 2:
        drop_from_file_cache(records(folder))
    before = process_memory.now()
    began, worked = time.perf_counter(), time.process_time()
    cache = onefold.PrefixCache(model, "1GB", disk=folder, disk_budget="10GB")
    cache.inventory.matched([1, 2, 3, 4])
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    count, held = cache.stats().disk.records, process_memory.now() - before
    closing = timed(cache.close)
    cold = bool(given.repeats % 2)
    return {
        "seconds": seconds, "processor": processor, "cold": cold, "records": count, "rss": held, "closing": closing
    }  # fmt: skip


def part_commands(given: Settings) -> dict[str, Any]:
    """What `onefold cache` takes, with the start of the process; and listing a namespace's records."""
    folder = Path(given.folder) / "open"
    space = next(p.name for p in folder.iterdir() if p.is_dir())
    found = {}
    for name in ("ls", "stat", f"ls {space}"):
        command = [sys.executable, "-m", "onefold", "cache", *name.split(), "--disk", str(folder)]
        runs = [timed(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True)) for _ in range(3)]  # noqa: B023
        found[name.split()[0] + (" of a namespace" if " " in name else "")] = statistics.median(runs)
    return found


PARTS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    name.removeprefix("part_"): part for name, part in list(globals().items()) if name.startswith("part_")
}
