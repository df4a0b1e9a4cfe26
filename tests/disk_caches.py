"""Caches with a disk, for tests: a folder that is opened, a turn of a conversation, the files, and damage to one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fake import FakeModel, Session

from onefold import PrefixCache

BUDGET = 40_000_000
MODES = ("back", "through")
NOBODY = 65534


def opened(model: FakeModel, folder: Path, **options: Any) -> PrefixCache:
    """A cache on this folder. These models compute in no time: that computing may be quicker than reading is left out,
    but where it is the point."""
    options = {"budget": BUDGET, "min_checkpoint_tokens": 1, "disk": folder, "disk_budget": "1GB", **options}
    cache = PrefixCache(model, **options)
    if cache.parts.tier is not None:
        cache.parts.tier.reading.prefill_pace.estimate = lambda units: None  # type: ignore[method-assign]
    return cache


def turn(model: FakeModel, cache: PrefixCache, prompt: list[int], new: int = 3, **options: Any) -> list[int]:
    return Session(model, cache, prompt, **options).prefill(31).decode(new).commit()


def small_records(cache: PrefixCache, tokens: int = 50) -> None:
    assert cache.parts.tier is not None
    cache.parts.tier.spiller.jobs.record_tokens = tokens


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


def disk_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in files(folder))


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    """Some bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


@contextlib.contextmanager
def ordinary_folder() -> Iterator[Path]:
    """A folder of an ordinary user's, and nobody is root meanwhile: to root nothing is forbidden."""
    folder = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    if root:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(folder)


class Held:
    """A disk on which a write takes as long as the test wants, or fails then."""

    def __init__(self, cache: PrefixCache) -> None:
        assert cache.parts.tier is not None
        self._folder = cache.parts.tier.catalog.folder
        self._write = self._folder.write
        self._go = threading.Event()
        self.begun = threading.Event()
        self.fails: list[OSError] = []
        self._folder.write = self._held  # type: ignore[method-assign]

    def _held(self, *what: Any) -> None:
        self.begun.set()
        assert self._go.wait(30)
        if self.fails:
            raise self.fails.pop()
        self._write(*what)

    def go(self) -> None:
        self._go.set()
