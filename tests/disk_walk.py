"""A walk: anything that can be done to a cache with a disk, in any order."""

from __future__ import annotations

import contextlib
import errno
import random
import time
from pathlib import Path
from typing import Any

from disk_caches import MODES, files, flip, opened, small_records
from fake import FakeModel, Session, settled, text

from onefold import PrefixCache


class Walk:
    """Some conversations that grow, branch, are evicted, restored, forgotten, cleared and closed. Every layer of every
    request is compared with a stock run.

    A disk that `fails` does so now and then, is short, and its files are damaged. On one that does not, nothing is
    rejected, and what is said to be durable is there after a restart."""

    def __init__(
        self,
        model: FakeModel,
        folder: Path,
        seed: int,
        *,
        fails: bool = False,
        bound: tuple[int, int] | None = None,
    ) -> None:
        self.model, self.folder, self.fails, self.bound = model, folder, fails, bound
        self.chance, self.faults = random.Random(seed), random.Random(seed + 1)
        self.said = [text(self.chance.randint(20, 300), i) for i in range(4)]
        self.cache = self.open()

    def open(self) -> PrefixCache:
        chance = self.chance
        cache = opened(
            self.model,
            self.folder,
            disk_mode=chance.choice(MODES),
            budget=chance.choice([4_000_000, 6_000_000, 40_000_000]),
            disk_budget=chance.choice([200_000, 600_000, 10**9]) if self.fails else 10**9,
            **({} if self.bound is None else {"max_kv_size": self.bound[0], "keep": self.bound[1]}),
        )
        small_records(cache, chance.choice([16, 50, 200, 900]))
        assert cache.parts.tier is not None
        if self.fails:
            self._make_faulty(cache.parts.tier.catalog.folder)
        return cache

    def _make_faulty(self, folder: Any) -> None:
        write = folder.write

        def faulty(*what: Any) -> None:
            luck = self.faults.random()
            if luck < 0.15:
                raise OSError(errno.EMFILE, "no descriptors")
            if luck < 0.2:
                time.sleep(0.02)
            write(*what)

        folder.write = faulty

    def grow(self) -> None:
        tokens = self.chance.choice(self.said)
        tokens = [
            *tokens[: self.chance.randint(1, len(tokens))],
            *text(self.chance.randint(1, 40), self.chance.randint(0, 5)),
        ]
        if len(tokens) < 900:
            points = [self.chance.randint(1, len(tokens))] if self.chance.random() < 0.3 else []
            session = Session(self.model, self.cache, tokens, bound=self.bound, checkpoints=points).prefill(31)
            if self.chance.random() < 0.2:
                session.commit(close=False)
            session.decode(self.chance.randint(0, 3))
            if self.chance.random() < 0.1:
                session.cancel()
            else:
                self.said[self.chance.randrange(4)] = session.commit()

    def shrink(self) -> None:
        self.cache.inventory.shrink(self.chance.choice([0, 50_000, 500_000]))

    def flush(self) -> None:
        if self.cache.parts.tier is not None and self.cache.flush(10) and self.cache.parts.tier.mode == "through":
            with self.cache.state.lock:
                assert self.cache.parts.tier.spiller.flusher.left(time.monotonic() + 10) == 0

    def restore(self) -> None:
        restore = self.cache.restore([*self.chance.choice(self.said), 1])
        if restore is not None and restore.step() and self.chance.random() < 0.5:
            restore.finish()

    def forget(self) -> None:
        tokens = self.chance.choice(self.said)
        self.cache.inventory.forget(tokens, self.chance.randint(0, len(tokens)))

    def clear(self) -> None:
        self.cache.clear(disk=self.chance.random() < 0.3)

    def clear_beside_a_request(self) -> None:
        tokens = self.chance.choice(self.said)
        tokens = [*tokens[: self.chance.randint(1, len(tokens))], *text(20, self.chance.randint(0, 5))]
        session = Session(self.model, self.cache, tokens, bound=self.bound)
        self.clear()
        session.prefill(31).commit()

    def start_again(self) -> None:
        whole = not self.fails and self.cache.flush(20, everything=True)
        durable = [self.cache.durable(tokens) for tokens in self.said] if whole else []
        self.cache.close()
        self.cache = self.open()
        found = [self.cache.durable(tokens) for tokens in self.said] if whole else []
        assert all(n >= least for n, least in zip(found, durable, strict=True)), (found, durable)
        if whole:
            i = self.chance.randrange(4)
            session = Session(self.model, self.cache, [*self.said[i], 1], bound=self.bound)
            assert session.cached >= durable[i]
            session.cancel()

    def damage(self) -> None:
        there = files(self.folder)
        if there:
            with contextlib.suppress(FileNotFoundError):
                path = self.chance.choice(there)
                flip(path, self.chance.randrange(path.stat().st_size))

    def step(self) -> None:
        acts = {
            self.grow: 60,
            self.shrink: 10,
            self.flush: 5,
            self.restore: 5,
            self.forget: 4,
            self.clear: 3,
            self.clear_beside_a_request: 3,
            self.start_again: 7,
            self.damage: 10 if self.fails else 0,
        }
        self.chance.choices([*acts], [*acts.values()])[0]()
        settled(self.cache)
        assert self.fails or self.cache.stats().disk.rejected_records == 0, self.cache.stats().reasons
