"""The budget while a cache runs: it follows the machine's memory, or stays as it was given."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from asking import Pending, ask, cold, request
from fake import FakeModel

from onefold import PrefixCache
from onefold.cache import budget
from onefold.cache.memory import device
from onefold.engine.engine import Engine
from onefold.errors import BudgetError, Busy, ConfigError
from onefold.machine import Level, Reading

WHOLE = 200_000_000


class World:
    """A machine whose memory and clock are set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.level, self.spare, self.now, self.readings = Level.NORMAL, None, 1000.0, 0
        monkeypatch.setattr(device, "gauge", lambda: self.read)
        monkeypatch.setattr(device, "default_budget", lambda *models: WHOLE)
        monkeypatch.setattr(budget, "monotonic", lambda: self.now)
        monkeypatch.setattr(budget, "LEAST_TOKENS", 64)
        monkeypatch.setattr(budget, "POOL_WHILE_SHORT", 4_000_000)

    def read(self) -> Reading:
        self.readings += 1
        return Reading(self.level, "as the test says", self.spare)

    def pass_by(self, cache: PrefixCache, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1
            cache.budget.look()
            cache.check()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def conversation(cache: PrefixCache, fake: FakeModel, n_tokens: int, seed: int = 0) -> list[int]:
    tokens = [(i * 7 + seed * 13 + i * i) % 60 for i in range(n_tokens)]
    with cache.lease(tokens) as lease:
        mx.eval(fake(mx.array(lease.rest)[None], cache=lease.layers))
        lease.commit(tokens)
    return tokens


@pytest.fixture
def fake() -> FakeModel:
    return FakeModel(("full",) * 4, dim=1024)


@pytest.fixture
def cache(world: World, fake: FakeModel) -> Iterator[PrefixCache]:
    with PrefixCache(fake) as made:
        for seed in range(8):
            conversation(made, fake, 150, seed)
        yield made
        made.check()


# -- levels that are injected ----------------------------------------------------------------------


def test_what_is_given_back_in_which_order(world: World, cache: PrefixCache, caplog: pytest.LogCaptureFixture) -> None:
    """First the pool and unused room, then a part of the stored KV, then the budget; seconds pass in between."""
    room = cache.state.store.capacity - cache.state.store.owned
    stored, pool = len(cache), cache.stats().bytes["pool"]
    assert room > 0 and pool > budget.POOL_WHILE_SHORT
    world.level = Level.WARN
    caplog.set_level(logging.INFO, "onefold")
    world.pass_by(cache, 1)
    assert cache.state.store.capacity == cache.state.store.owned
    assert (len(cache), cache.stats().budget_bytes) == (stored, WHOLE)
    assert mx.get_cache_memory() == 0 and cache.stats().bytes["pool"] <= budget.POOL_WHILE_SHORT
    world.pass_by(cache, budget.ACT_SECONDS - 1)
    assert len(cache) == stored
    world.pass_by(cache, 1)
    assert 0.7 * stored < len(cache) < 0.8 * stored and cache.stats().budget_bytes == WHOLE
    world.pass_by(cache, budget.ACT_SECONDS)
    first = cache.stats().budget_bytes
    assert first < WHOLE and cache.budget.is_lowered
    world.pass_by(cache, budget.ACT_SECONDS)
    assert cache.stats().budget_bytes < first
    said = [r.message for r in caplog.records]
    for part, message in zip(("given back", "evicted", "lowered", "lowered"), said, strict=True):
        assert part in message and "as the test says" in message


def test_it_is_never_lowered_below_its_floor(world: World, cache: PrefixCache) -> None:
    world.level = Level.CRITICAL
    world.pass_by(cache, 100)
    stats = cache.stats()
    assert stats.budget_bytes == WHOLE // budget.LEAST_SHARE
    assert stats.used_bytes <= stats.budget_bytes


def test_critical_memory_is_acted_on_at_once(world: World, cache: PrefixCache) -> None:
    stored = len(cache)
    world.level = Level.CRITICAL
    world.pass_by(cache, 1)
    assert len(cache) <= stored // 2 and cache.stats().budget_bytes <= WHOLE * 3 // 4
    assert mx.get_cache_memory() == 0


def test_it_rises_again_slowly(world: World, cache: PrefixCache, caplog: pytest.LogCaptureFixture) -> None:
    world.level = Level.CRITICAL
    world.pass_by(cache, 20)
    least = cache.stats().budget_bytes
    world.level = Level.NORMAL
    caplog.set_level(logging.INFO, "onefold")
    world.pass_by(cache, budget.CALM_SECONDS - 1)
    assert cache.stats().budget_bytes == least
    seen = [least]
    while cache.budget.is_lowered and len(seen) < 1000:
        world.pass_by(cache, 1)
        seen.append(cache.stats().budget_bytes)
    assert seen == sorted(seen) and seen[-1] == WHOLE
    steps = (WHOLE - least) / (WHOLE / budget.STEP_SHARE)
    assert len(seen) - 1 >= (steps - 1) * budget.RAISE_SECONDS + 1
    assert max(b - a for a, b in pairwise(seen)) <= WHOLE / budget.STEP_SHARE
    assert "no longer short" in caplog.text and caplog.text.count("the budget rises from") == steps
    assert "to 200.0 MB" in caplog.records[-1].message
    assert cache.stats().bytes["pool"] == device.pool_bytes(WHOLE)


def test_a_short_shortage_leaves_the_budget_as_it_is(
    world: World, cache: PrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onefold")
    world.level = Level.WARN
    world.pass_by(cache, 1)
    world.level = Level.NORMAL
    world.pass_by(cache, 100)
    assert cache.stats().bytes["pool"] == device.pool_bytes(WHOLE)
    assert [r.message.split(":")[0] for r in caplog.records][1:] == ["memory is no longer short"]


def test_it_does_not_rise_where_that_would_make_memory_short(
    world: World, cache: PrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    world.level = Level.CRITICAL
    world.pass_by(cache, 20)
    least = cache.stats().budget_bytes
    world.level, world.spare = Level.NORMAL, 1000
    caplog.set_level(logging.INFO, "onefold")
    world.pass_by(cache, 200)
    assert cache.stats().budget_bytes == least
    assert caplog.text.count("the budget stays at 50.0 MB until 25.0 MB more are available") == 1
    world.spare = 10 * WHOLE
    world.pass_by(cache, 200)
    assert cache.stats().budget_bytes == WHOLE


def test_it_waits_longer_after_it_rose_too_early(world: World, cache: PrefixCache) -> None:
    waits = []
    for _ in range(3):
        world.level = Level.CRITICAL
        world.pass_by(cache, 10)
        least, begun = cache.stats().budget_bytes, world.now
        world.level = Level.NORMAL
        while cache.stats().budget_bytes == least and world.now < begun + 1000:
            world.pass_by(cache, 1)
        waits.append(world.now - begun)
    assert waits == [30, 60, 120]


def test_it_looks_once_a_second(world: World, cache: PrefixCache, fake: FakeModel) -> None:
    before = world.readings
    for seed in range(5):
        conversation(cache, fake, 10, seed)
    assert world.readings <= before + 1


@pytest.mark.parametrize("level", [Level.WARN, Level.CRITICAL])
def test_a_given_budget_never_changes(world: World, fake: FakeModel, level: Level) -> None:
    world.level = level
    with PrefixCache(fake, WHOLE) as cache, PrefixCache(fake) as later:
        later.set_budget(WHOLE // 2)
        for each, n_bytes in ((cache, WHOLE), (later, WHOLE // 2)):
            conversation(each, fake, 100)
            world.pass_by(each, 60)
            assert (each.stats().budget_bytes, len(each)) == (n_bytes, 100)
            assert not each.budget.follows


def test_a_budget_that_is_refused_while_it_is_lowered_follows_on(
    world: World, cache: PrefixCache, fake: FakeModel
) -> None:
    world.level = Level.CRITICAL
    world.pass_by(cache, 10)
    with cache.lease([5] * 300, reserve_tokens=300), pytest.raises(BudgetError):
        cache.set_budget(1000)
    world.level = Level.NORMAL
    world.pass_by(cache, 300)
    assert cache.budget.follows and cache.stats().budget_bytes == WHOLE


def test_a_budget_that_is_given_during_a_look_is_the_last_word(
    monkeypatch: pytest.MonkeyPatch, world: World, fake: FakeModel
) -> None:
    giving: list[threading.Thread] = []

    def read() -> Reading:
        if not giving:
            giving.append(threading.Thread(target=cache.set_budget, args=(WHOLE // 2,)))
            giving[0].start()
            time.sleep(0.05)
        return Reading(Level.CRITICAL, "as the test says")

    monkeypatch.setattr(device, "gauge", lambda: read)
    with PrefixCache(fake) as cache:
        world.pass_by(cache, 1)
        giving[0].join()
        world.pass_by(cache, 60)
        assert cache.stats().budget_bytes == WHOLE // 2 and not cache.budget.follows


def test_an_elastic_budget_rises_though_more_is_live(world: World, fake: FakeModel) -> None:
    with PrefixCache(fake, elastic=True) as cache:
        lease = cache.lease([5] * 1000)
        mx.eval(fake(mx.array(lease.rest)[None], cache=lease.layers))
        world.level = Level.CRITICAL
        world.pass_by(cache, 30)
        world.level = Level.NORMAL
        world.pass_by(cache, 300)
        lease.commit([5] * 1000)


def test_auto_is_the_default_and_can_be_written(world: World, fake: FakeModel) -> None:
    with PrefixCache(fake) as unset, PrefixCache(fake, "auto") as named:
        assert unset.budget.follows and named.budget.follows
        assert unset.stats().budget_bytes == named.stats().budget_bytes == WHOLE
    with pytest.raises(ConfigError, match="cannot read 'automatic' as a size"):
        PrefixCache(fake, "automatic")


def test_open_leases_keep_what_they_have(world: World, cache: PrefixCache, fake: FakeModel) -> None:
    """Memory that a request uses is not taken from it; the budget is lowered further when it has ended."""
    tokens = [5] * 1500
    lease = cache.lease(tokens)
    for at in range(lease.cached, 1500, 300):
        mx.eval(fake(mx.array(tokens[at : at + 300])[None], cache=lease.layers))
    world.level = Level.CRITICAL
    world.pass_by(cache, 60)
    during, seen = cache.stats(), cache.stats().budget_bytes
    for _ in range(20):
        world.pass_by(cache, 1)
        assert cache.stats().budget_bytes <= seen, "while memory is critical it does not rise"
        seen = cache.stats().budget_bytes
    assert during.bytes["live"] > WHOLE // budget.LEAST_SHARE / 2 and during.used_bytes <= during.budget_bytes
    assert lease.offset == 1500 and not lease.closed
    lease.commit(tokens)
    world.pass_by(cache, 60)
    assert cache.stats().budget_bytes <= during.budget_bytes
    assert cache.stats().used_bytes <= cache.stats().budget_bytes


# -- weights that leave little ---------------------------------------------------------------------


@pytest.mark.parametrize("metal", [False, True])
def test_weights_that_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, fake: FakeModel, caplog: pytest.LogCaptureFixture, metal: bool
) -> None:
    """The budget is the least that serves a conversation, and the log names the ways out."""
    monkeypatch.setattr(device, "memory_bytes", lambda: 5_000_000_000)
    monkeypatch.setattr(device, "weight_bytes", lambda *models: 4_900_000_000)
    monkeypatch.setattr(device, "on_metal", lambda: metal)
    monkeypatch.setattr(device, "gauge", lambda: None)
    with PrefixCache(fake) as cache:
        assert cache.stats().budget_bytes == cache.parts.need(4096, chunk=256)
        assert cache.inventory.most_tokens() >= 4096
        conversation(cache, fake, 100)
        assert len(cache) == 100
    said = next(r.message for r in caplog.records if r.levelname == "WARNING")
    assert "weights take 4.9 GB of the 5.0 GB" in said
    assert ("sudo sysctl iogpu.wired_limit_mb=" in said, "--budget" in said) == (metal, metal)


# -- the engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(model))


def words(n: int, seed: int = 0) -> list[int]:
    return [(i * i * 31 + i * 7 + seed * 13) % 90 for i in range(n)]


def until(engine: Engine, lowered: bool) -> None:
    deadline = time.monotonic() + 30
    while engine.cache.budget.is_lowered != lowered:
        assert time.monotonic() < deadline, f"the budget is {engine.stats().cache.budget_bytes}"
        time.sleep(0.01)


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "ACT_SECONDS", "RAISE_SECONDS", "CALM_SECONDS"):
        monkeypatch.setattr(budget, name, 0.02)


def test_an_engine_follows_while_it_is_idle_and_while_it_is_busy(
    short_times: None, monkeypatch: pytest.MonkeyPatch, loaded: tuple[Any, Any]
) -> None:
    level = [Level.NORMAL]
    monkeypatch.setattr(device, "gauge", lambda: lambda: Reading(level[0], "as the test says"))
    monkeypatch.setattr(device, "default_budget", lambda *models: WHOLE)
    with Engine(*loaded) as engine:
        long = engine.most_tokens // 2
        assert ask(engine, words(50), 4).tokens == cold(loaded[0], words(50), 4)
        level[0] = Level.CRITICAL
        until(engine, lowered=True)
        level[0] = Level.NORMAL
        until(engine, lowered=False)
        running = Pending(engine, request(words(60, seed=1), 200))
        running.wait_for_text(2)
        level[0] = Level.WARN
        until(engine, lowered=True)
        assert running.wait().tokens == cold(loaded[0], words(60, seed=1), 200)
        engine.check()
        while engine.stats().cache.budget_bytes > WHOLE // budget.LEAST_SHARE:
            time.sleep(0.01)
        assert long > engine.cache.inventory.most_tokens()
        refused = ask(engine, words(long), 4).error
        assert isinstance(refused, Busy) and refused.retry_after == 60
        assert "budget is 50.0 MB instead of 200.0 MB" in str(refused)
        assert ask(engine, words(50, seed=2), 4).tokens == cold(loaded[0], words(50, seed=2), 4)
        level[0] = Level.NORMAL
        until(engine, lowered=False)
        engine.check()


# -- a control group's limit, for real ---------------------------------------------------------------

IN_GROUP = """
import sys, time
sys.path.insert(0, TESTS)
import mlx.core as mx
from fake import FakeModel
from onefold import PrefixCache
from onefold.cache import budget
budget.LOOK_SECONDS = budget.ACT_SECONDS = budget.RAISE_SECONDS = 0.05
budget.CALM_SECONDS, budget.LEAST_TOKENS = 0.2, 64
model = FakeModel(("full",) * 4, dim=1024)

def conversation(seed):
    tokens = [(i * 7 + seed * 13 + i * i) % 60 for i in range(150)]
    with cache.lease(tokens) as lease:
        mx.eval(model(mx.array(lease.rest)[None], cache=lease.layers))
        lease.commit(tokens)

def look(seconds, done=lambda: False):
    until = time.monotonic() + seconds
    while time.monotonic() < until and not done():
        cache.budget.look()
        time.sleep(0.01)

with PrefixCache(model, **BUDGET) as cache:
    whole = cache.stats().budget_bytes
    for seed in range(8):
        conversation(seed)
    stored = len(cache)
    hog = []
    while len(hog) < 100 and not cache.budget.is_lowered:
        hog.append(bytearray(8 << 20))
        hog[-1][::4096] = bytes([1]) * (len(hog[-1]) // 4096)
        look(0.06)
    look(1.0)
    least, left = cache.stats().budget_bytes, len(cache)
    hog.clear()
    look(20.0, done=lambda: not cache.budget.is_lowered)
    conversation(99)
    cache.check()
    print(whole, stored, left, least, cache.stats().budget_bytes)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this test's own, below the one that it runs in; skipped where none can be made."""
    for mount, controllers in (("/sys/fs/cgroup", ""), ("/sys/fs/cgroup/memory", "memory")):
        lines = Path("/proc/self/cgroup").read_text().splitlines() if sys.platform == "linux" else []
        for line in lines:
            _, names, path = line.split(":", 2)
            folder = Path(f"{mount}/{path}/onefold-test-{os.getpid()}")
            if names == controllers and (folder.parent / "cgroup.procs").exists():
                try:
                    folder.mkdir()
                except OSError:
                    continue
                try:
                    if any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
                        yield folder
                        return
                finally:
                    folder.rmdir()
    pytest.skip("no control group for memory can be made here")


@pytest.mark.slow
def test_in_a_control_group(group: Path) -> None:
    """A limit is the machine's memory there. Another use of memory within it takes KV from the cache, which gets it
    back afterwards; the process is not killed."""
    limit = next(group / n for n in ("memory.max", "memory.limit_in_bytes") if (group / n).exists())
    limit.write_text(str(GROUP_BYTES))
    code = IN_GROUP.replace("TESTS", repr(str(Path(__file__).parent))).replace("BUDGET", "{}")
    join = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    done = subprocess.run([sys.executable, "-c", join + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    whole, stored, left, least, after = map(int, done.stdout.split())
    assert GROUP_BYTES // 2 < whole <= GROUP_BYTES * 4 // 5
    assert left < stored and least < whole and after == whole


GROUP_BYTES = 400 << 20
