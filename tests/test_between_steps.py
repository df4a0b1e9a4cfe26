"""Long work lets go of the lock between its steps: whatever other threads do there, everything stays right."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from disk_walk import Walk
from effort import effort, quick
from fake import FakeModel, Session, settled, text

import onefold
from onefold.cache.memory.segment import Slab
from onefold.cache.memory.track import Track
from onefold.cache.tiers.disk.reading_ranges import RangeReader


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is let go after every step, and nobody waits for another thread's forward."""
    monkeypatch.setattr("onefold.cache.memory.lock.STRETCH_SECONDS", -1.0)
    monkeypatch.setattr("onefold.cache.leasing.FORWARD_MOST", 0.0)


class Intruder:
    """Does something on another thread whenever the lock is let go between two steps, but not between its own."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._inside = threading.Lock()
        self._pool = ThreadPoolExecutor(1)
        self.times = 0

    def watch(self, cache: onefold.PrefixCache) -> None:
        gate, between = cache.state.lock, cache.state.lock.between

        def intruded(pause: float) -> None:
            if not self._inside.acquire(blocking=False):
                between(pause)
                return
            try:
                self.times += 1
                self._pool.submit(self._act).result(120)
            finally:
                self._inside.release()

        gate.between = intruded  # type: ignore[method-assign]


class Crowd:
    """Conversations with a cache that has no room for all of them. Every layer of every request is compared."""

    def __init__(self, kinds: tuple[str, ...], seed: int) -> None:
        self.model = FakeModel(kinds)
        self.chance = random.Random(seed)
        self.said = [text(self.chance.randint(20, 300), i) for i in range(6)]
        self.cache = onefold.PrefixCache(self.model, 1_500_000, min_checkpoint_tokens=1)
        self.intruder = Intruder(self.act)
        self.intruder.watch(self.cache)
        self.refused = 0

    def grow(self) -> None:
        tokens = self.chance.choice(self.said)
        tokens = [
            *tokens[: self.chance.randint(1, len(tokens))],
            *text(self.chance.randint(1, 200), self.chance.randint(0, 9)),
        ]
        if len(tokens) < 900:
            session = Session(self.model, self.cache, tokens)
            try:
                session.prefill(self.chance.choice([13, 61])).decode(self.chance.randint(0, 3))
                if self.chance.random() < 0.2:
                    session.commit(close=False)
                self.said[self.chance.randrange(6)] = session.commit()
            finally:
                session.lease.cancel()

    def forget(self) -> None:
        tokens = self.chance.choice(self.said)
        self.cache.inventory.forget(tokens, self.chance.randint(0, len(tokens)))

    def pin(self) -> None:
        with contextlib.suppress(onefold.ConfigError):
            self.cache.pin(self.chance.choice(self.said)).release()

    def act(self) -> None:
        acts: dict[Callable[[], object], int] = {
            self.grow: 12,
            self.cache.stats: 4,
            self.cache.check: 2,
            self.forget: 4,
            self.pin: 3,
            lambda: self.cache.inventory.shrink(self.chance.choice([0, 50_000, 300_000])): 3,
            self.cache.clear: 1,
        }
        try:
            self.chance.choices([*acts], [*acts.values()])[0]()
        except onefold.BudgetError:
            self.refused += 1


@pytest.mark.parametrize("seed", quick(range(2), 0))
@pytest.mark.parametrize(
    "kinds",
    [("full",) * 4, ("full", "recurrent", "full"), ("full", "rotating", "full"), ("full", "chunked", "full")],
    ids="+".join,
)
def test_whatever_happens_between_two_steps(kinds: tuple[str, ...], seed: int) -> None:
    crowd = Crowd(kinds, seed)
    for _ in range(effort(25, 40)):
        crowd.act()
        settled(crowd.cache)
    assert crowd.intruder.times >= 10
    crowd.cache.close()


@pytest.mark.parametrize("seed", quick(range(2), 0))
@pytest.mark.parametrize("kinds", [("full", "full"), ("full", "recurrent")], ids="+".join)
def test_whatever_happens_between_two_steps_with_a_disk(kinds: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    class Interrupted(Walk):
        def open(self) -> onefold.PrefixCache:
            cache = super().open()
            self.intruder = Intruder(self.intrude)
            self.intruder.watch(cache)
            return cache

        def intrude(self) -> None:
            self.chance.choice([self.grow, self.grow, self.shrink, self.forget, self.restore, self.cache.stats])()

    walk = Interrupted(FakeModel(kinds), tmp_path, seed)
    for _ in range(30):
        walk.step()
    walk.start_again()
    walk.cache.close()


# -- one layer at a time -------------------------------------------------------------------------------------


class Copies:
    """How many layers are copied while the lock is held once, at most and together."""

    def __init__(self, cache: onefold.PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self.all = self._now = 0
        for cls, name in ((Slab, "_rewritten"), (Track, "copied")):
            monkeypatch.setattr(cls, name, self._counting(getattr(cls, name)))
        between = cache.state.lock.between

        def counted(pause: float) -> None:
            self._now = 0
            between(pause)

        monkeypatch.setattr(cache.state.lock, "between", counted)

    def _counting(self, copy: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object) -> object:
            self._now += 1
            self.all += 1
            self.most = max(self.most, self._now)
            return copy(*args)

        return counted


LAYERS = 5


def grow(model: FakeModel, cache: onefold.PrefixCache) -> Callable[[], object]:
    session = Session(model, cache, text(250)).prefill(50)
    return lambda: (session.decode(10), session.cancel())


def trim(model: FakeModel, cache: onefold.PrefixCache) -> Callable[[], object]:
    session = Session(model, cache, text(260)).prefill(50)
    return session.commit


def shrink(model: FakeModel, cache: onefold.PrefixCache) -> Callable[[], object]:
    Session(model, cache, text(600)).prefill(50).commit()
    return lambda: cache.inventory.shrink(400 * cache.inventory.token_bytes)


def cut_in_half(model: FakeModel, cache: onefold.PrefixCache) -> Callable[[], object]:
    Session(model, cache, text(600)).prefill(50).commit()
    return lambda: cache.inventory.forget(text(600), 300)


def unite(model: FakeModel, cache: onefold.PrefixCache) -> Callable[[], object]:
    """A conversation that went on while another request read its buffer lies in two; then the other is gone."""
    tokens = Session(model, cache, text(300)).prefill(50).commit()
    reader = Session(model, cache, [*tokens, 1])
    tokens = Session(model, cache, [*tokens, 2, *text(400, 1)]).prefill(50).commit()
    reader.lease.discard()
    return lambda: Session(model, cache, [*tokens, 3]).prefill().cancel()


@pytest.mark.parametrize("how", [grow, trim, shrink, cut_in_half, unite])
def test_a_copy_is_one_layer_each_time_the_lock_is_held(
    how: Callable[[FakeModel, onefold.PrefixCache], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(("full",) * LAYERS)
    with onefold.PrefixCache(model, "64MB") as cache:
        act = how(model, cache)
        copies = Copies(cache, monkeypatch)
        act()
        assert copies.all >= LAYERS and copies.most == 1
        settled(cache)


@pytest.mark.parametrize("how", [grow, trim, shrink, cut_in_half, unite])
def test_a_request_that_needs_a_buffer_whose_copy_has_begun(
    how: Callable[[FakeModel, onefold.PrefixCache], Callable[[], object]],
) -> None:
    """It does the rest of the copy, reads what is right, and the thread that began finds it done."""
    model = FakeModel(("full",) * LAYERS)
    with onefold.PrefixCache(model, "64MB") as cache:
        act = how(model, cache)
        hits: list[int] = []

        def ask() -> None:
            known = max((text(250), text(260), text(300), text(600)), key=lambda t: cache.inventory.matched(t))
            session = Session(model, cache, [*known, 5])
            hits.append(session.cached)
            session.prefill().commit()

        Intruder(ask).watch(cache)
        act()
        assert hits and (max(hits) >= 200 or how is grow)  # what a forward is still writing is no hit
        settled(cache)


def test_clearing_where_a_copy_has_begun() -> None:
    model = FakeModel(("full",) * LAYERS)
    with onefold.PrefixCache(model, "64MB") as cache:
        act = shrink(model, cache)
        intruder = Intruder(cache.clear)
        intruder.watch(cache)
        act()
        assert intruder.times and cache.stats().stored_tokens == 0 and cache.stats().bytes["stored"] == 0
        settled(cache)


def test_closing_where_a_copy_has_begun() -> None:
    """No KV stays. A closed cache still refers to itself, and to 3 kB of arrays that show its layout: collect it."""
    model = FakeModel(("full",) * LAYERS)
    held = []
    for _ in range(3):
        cache = onefold.PrefixCache(model, "64MB")
        act = shrink(model, cache)
        intruder = Intruder(cache.close)
        intruder.watch(cache)
        act()
        assert intruder.times
        del cache, act, intruder
        gc.collect()
        mx.clear_cache()
        held.append(mx.get_active_memory())
    assert max(held) - min(held) < 4096  # one layer of one copy is 25 kB


def test_a_lease_whose_cache_is_closed_while_it_is_opened() -> None:
    model = FakeModel(("full",) * LAYERS)
    cache = onefold.PrefixCache(model, "64MB")
    act = unite(model, cache)
    Intruder(cache.close).watch(cache)
    with pytest.raises(onefold.OnefoldError):
        act()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("how", [grow, trim, shrink, cut_in_half, unite])
def test_a_copy_that_is_broken_off(
    how: Callable[[FakeModel, onefold.PrefixCache], Callable[[], object]],
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of it: what it was copying is a miss afterwards, or as it was, and never something else."""
    model = FakeModel(("full",) * LAYERS)
    with onefold.PrefixCache(model, "64MB") as cache:
        act = how(model, cache)
        evaluate, copies = mx.eval, [0]

        def failing(*arrays: object) -> None:
            copies[0] += 1
            if copies[0] == 3:
                raise error("broken off")
            evaluate(*arrays)

        with monkeypatch.context() as patch, contextlib.suppress(error, onefold.OnefoldError):
            patch.setattr("onefold.cache.memory.segment.mx.eval", failing)
            act()
        assert copies[0] >= 3
        for lease in list(cache.state.leases):
            lease.discard()
        settled(cache)
        for tokens in (text(250), text(260), text(300), text(600)):
            Session(model, cache, [*tokens, 5]).prefill(50).commit()
        cache.clear()
        assert cache.stats().bytes["stored"] == 0 and not cache.state.store.slabs


@pytest.mark.parametrize("how", [grow, trim, shrink, cut_in_half, unite])
def test_an_interrupt_between_two_steps(how: Callable[[FakeModel, onefold.PrefixCache], Callable[[], object]]) -> None:
    model = FakeModel(("full",) * LAYERS)
    with onefold.PrefixCache(model, "64MB") as cache:
        act, between = how(model, cache), cache.state.lock.between

        def interrupted(pause: float) -> None:
            raise KeyboardInterrupt

        cache.state.lock.between = interrupted  # type: ignore[method-assign]
        with contextlib.suppress(KeyboardInterrupt):
            act()
        cache.state.lock.between = between  # type: ignore[method-assign]
        for lease in list(cache.state.leases):
            lease.discard()
        for tokens in (text(250), text(260), text(300), text(600)):
            Session(model, cache, [*tokens, 5]).prefill(50).commit()
        settled(cache)


# -- others that want room, or the end -----------------------------------------------------------------------


def test_nobody_is_refused_while_another_thread_lowers_the_water() -> None:
    model, refused = FakeModel(("full",) * LAYERS), list[str]()
    with onefold.PrefixCache(model, 2_500_000, high_water=0.5, low_water=0.45) as cache:
        for i in range(5):
            Session(model, cache, text(200, i)).prefill(50).commit()
        lease = cache.lease(text(1700, 77))
        for chunk in lease.chunks(20):
            mx.eval(model(mx.array(chunk)[None], cache=lease.layers))

        def ask() -> None:
            try:
                cache.lease(text(2600, 99)).discard()
            except onefold.BudgetError as error:
                refused.append(str(error))
            cache.check()

        intruder = Intruder(ask)
        intruder.watch(cache)
        lease.commit()
        assert intruder.times and not refused


@pytest.mark.parametrize("at", [1, 2, 3])
def test_nothing_is_evicted_for_bytes_that_a_copy_will_free(at: int) -> None:
    """Another thread has begun to cut a buffer to size: that is done first."""
    model = FakeModel(("full",) * LAYERS)
    with onefold.PrefixCache(model, 4_000_000) as cache:
        for i in range(4):
            Session(model, cache, text(400, i)).prefill(50).commit()
        lease = cache.lease(text(600, 77), reserve_tokens=3000)
        for chunk in lease.chunks(100):
            mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
        seen: list[int] = []

        def ask() -> None:
            seen.append(cache.inventory.evicted_tokens)
            if len(seen) == at:
                cache.lease(text(1500, 99)).discard()

        Intruder(ask).watch(cache)
        lease.cancel()
        assert len(seen) >= at and cache.inventory.evicted_tokens < 200


def test_threads_that_want_one_conversation_from_disk_read_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, load = FakeModel(("full", "full")), RangeReader._load

    def slow(reader: RangeReader, record: Any) -> Any:
        time.sleep(0.05)
        return load(reader, record)

    monkeypatch.setattr(RangeReader, "_load", slow)
    with onefold.PrefixCache(model, 8_000_000, disk=tmp_path) as cache:
        tokens = Session(model, cache, text(900)).prefill(50).commit()
    with onefold.PrefixCache(model, 8_000_000, disk=tmp_path) as cache, ThreadPoolExecutor(4) as pool:
        leases = list(pool.map(lambda i: cache.lease([*tokens, i]), range(4)))
        assert [lease.cached for lease in leases] == [len(tokens)] * 4
        for lease in leases:
            lease.discard()
        stats = cache.stats()
        assert stats.disk.restored_tokens == len(tokens) and stats.tokens_from_disk == len(tokens)


def test_closing_beside_threads_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them hears that the cache is closed, and nothing is left of what they did."""
    monkeypatch.setattr("onefold.cache.memory.lock.STRETCH_SECONDS", 0.005)
    model, heard = FakeModel(("full",) * 3), list[BaseException]()
    for _ in range(3):
        cache = onefold.PrefixCache(model, "64MB")

        def decode(seed: int, cache: onefold.PrefixCache = cache) -> None:
            try:
                while True:
                    lease = cache.lease(text(60 + seed, seed))
                    mx.eval(model(mx.array(lease.rest)[None], cache=lease.layers))
                    for _ in range(5):
                        mx.eval(model(mx.array([[5]]), cache=lease.layers))
                    lease.commit()
            except (onefold.OnefoldError, TypeError, RuntimeError) as error:
                heard.append(error)

        threads = [threading.Thread(target=decode, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        cache.close()
        for thread in threads:
            thread.join(60)
        assert not any(cache.state.ledger.by_purpose().values())
    assert len(heard) == 18 and all(isinstance(e, (onefold.LeaseClosed, onefold.ConfigError)) for e in heard), heard


def test_a_growth_that_only_its_own_thread_can_compute() -> None:
    """It called a part of the model, so what it wrote is not scheduled: another request has a shorter hit, and neither
    an error nor a hand in it."""
    model = FakeModel(("full",) * LAYERS)
    with onefold.PrefixCache(model, "64MB") as cache:
        tokens = text(300)
        lease = cache.lease(tokens)
        mx.eval(model(mx.array(tokens)[None], cache=lease.layers))
        lease.commit(tokens, close=False)

        def part(fed: list[int]) -> list[mx.array]:
            return [
                layer(mx.array(fed)[None], c, lambda where: None)
                for layer, c in zip(model.layers, lease.layers, strict=True)
            ]

        part([1] * 5)
        hits: list[int] = []

        def ask() -> None:
            other = cache.lease([*tokens, 9])
            hits.append(other.cached)
            other.discard()

        Intruder(ask).watch(cache)
        mx.eval(part([1] * 600))
        assert hits
        lease.cancel()
        cache.check()
