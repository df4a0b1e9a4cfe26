"""What the disk tier promised, kept: when it is interrupted, when the disk is slow or fails in the middle, and when
somebody else waits.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from disk_caches import Held, files, flip, opened, small_records, turn
from disk_walk import Walk
from effort import effort, quick
from fake import FakeModel, Session, settled, text
from mlx_lm.tuner.lora import LoRALinear

from onefold import ConfigError, PrefixCache
from onefold.cache.memory import arrays
from onefold.cache.memory.lock import CacheLock
from onefold.cache.model import fingerprint
from onefold.cache.tiers import host
from onefold.worker import Worker


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(("full", "full"), dim=64)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Tests may run where Ctrl-C is ignored: in the background of a shell, say."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


# -- right or not at all -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("direct", [True, False], ids=["in place", "by operations"])
def test_a_step_that_is_broken_off_believes_nothing_more(
    error: type[BaseException], direct: bool, model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that was being looked at is damaged; whoever goes on afterwards is not given it."""
    monkeypatch.setattr(arrays, "addressable", lambda: direct)
    with opened(model, tmp_path) as cache:
        small_records(cache)
        tokens = turn(model, cache, text(200))
    flip(files(tmp_path)[1], -5)
    with opened(model, tmp_path) as cache:
        restore = cache.restore([*tokens, 1])
        assert restore is not None and restore.step()
        believe = restore._ranges._believe

        def once(*_: Any) -> None:
            restore._ranges._believe = believe  # type: ignore[method-assign]
            raise error

        restore._ranges._believe = once  # type: ignore[method-assign]
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                restore.step()
        else:
            assert not restore.step()
        assert not restore.step() and restore.done
        assert cache.inventory.in_memory(tokens) <= 50
        session = Session(model, cache, [*tokens, 1])
        assert session.cached == 50
        session.prefill().commit()
        settled(cache)


def test_no_thread_to_read_with_is_a_miss(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(model, tmp_path) as cache:
        tokens = turn(model, cache, text(100))
    with opened(model, tmp_path) as cache:
        assert cache.parts.tier is not None

        def none_left(*_: Any) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(cache.parts.tier.reader, "submit", none_left)
            session = Session(model, cache, [*tokens, 1])
            assert session.cached == 0
            session.prefill().commit()
        assert cache.stats().reasons["disk: failed to restore"] == 1
        assert "can't start new thread" in caplog.text
        settled(cache)


class Adapted(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        mx.random.seed(0)
        self.l = LoRALinear(16, 16, r=4, scale=scale)
        self.table = [mx.arange(4)]
        self._hidden = mx.arange(8)
        self.sizes = [1, 2]


def a_scale(model: Adapted) -> None:
    model.l.scale = 1.0


def an_array_in_a_list(model: Adapted) -> None:
    model.table = [mx.arange(4) + 1]


def a_list(model: Adapted) -> None:
    model.sizes = [1, 3]


@pytest.mark.parametrize("change", [a_scale, an_array_in_a_list, a_list], ids=lambda f: f.__name__)
def test_what_a_module_was_told_is_another_model(change: Callable[[Adapted], None]) -> None:
    def digest(model: nn.Module) -> str:
        return fingerprint.lasting_digest(fingerprint.model_digest(model), model)

    one, other = Adapted(20.0), Adapted(20.0)
    assert digest(one) == digest(other)
    other.eval()
    other._hidden = mx.arange(9)  # made at a first forward, say
    assert digest(one) == digest(other)
    change(other)
    assert digest(one) != digest(other)


class Secret(str):
    def __repr__(self) -> str:
        return "Secret('***')"


@pytest.mark.parametrize("wrap", [Secret, lambda s: (Secret(s), 1)], ids=["itself", "in a tuple"])
def test_names_that_are_shown_alike_are_not_one_namespace(
    wrap: Callable[[str], Any], model: FakeModel, tmp_path: Path
) -> None:
    with opened(model, tmp_path) as cache:
        tokens = turn(model, cache, text(100), namespace=wrap("alice"))
    with opened(model, tmp_path) as cache:
        assert cache.inventory.matched(tokens, namespace=wrap("bob")) == 0


# -- on disk or not said to be ---------------------------------------------------------------------------


def test_what_was_staged_behind_a_record_that_fails_is_not_written(model: FakeModel, tmp_path: Path) -> None:
    """Two branches go on from a record that the disk has no room for."""
    common = text(200)
    with opened(model, tmp_path, disk_mode="through") as cache:
        disk = Held(cache)
        disk.fails.append(OSError(errno.EMFILE, "no descriptors"))
        turn(model, cache, [*common, 61, *text(20)])
        assert disk.begun.wait(10)
        branch = turn(model, cache, [*common, 63, *text(20, 1)])
        turn(model, cache, [*branch, *text(10, 2)])
        disk.go()
        cache.flush(30)
        settled(cache)
        cache.inventory.shrink(0)
        settled(cache)
        said = turn(model, cache, [*branch, *text(10, 2)])
        assert cache.flush(30) and cache.durable(said) == len(said)
        assert Session(model, cache, [*said, 1]).cached == len(said)


class Slow(set[Any]):
    """A set that is empty for a while, between two statements."""

    def __init__(self, held: set[Any], seen: threading.Event) -> None:
        super().__init__(held)
        self._seen = seen

    def discard(self, item: Any) -> None:
        super().discard(item)
        if not self and threading.current_thread() is threading.main_thread():
            self._seen.set()
            time.sleep(0.2)


def test_a_record_between_two_nodes_is_written(model: FakeModel, tmp_path: Path) -> None:
    """While a node takes over another's records, they are nobody's for a moment."""
    with opened(model, tmp_path / "one", disk_mode="through") as cache:
        assert cache.parts.tier is not None
        writer = cache.parts.tier.spiller._writer
        write, taken, seen = writer._write, threading.Event(), threading.Event()

        def late(staged: Any) -> None:
            if not seen.is_set():
                staged.job.record.nodes = Slow(staged.job.record.nodes, seen)
                taken.set()
                seen.wait(60)
            write(staged)

        writer._write = late  # type: ignore[method-assign]
        first = Session(model, cache, text(200)).prefill(31).commit()
        assert taken.wait(10)
        said = turn(model, cache, [*first, 1, 2, 3])
        assert seen.is_set()
        assert cache.flush(30) and cache.durable(said) == len(said)
        shutil.copytree(tmp_path / "one", tmp_path / "copy")  # as a crash would leave it
    with opened(model, tmp_path / "copy") as cache:
        assert cache.lease([*said, 5]).cached == len(said)


def test_flush_tells_of_what_made_way_unwritten(model: FakeModel, tmp_path: Path) -> None:
    """The disk was too slow for it: once, and then it is told."""
    with opened(model, tmp_path, disk_mode="through") as cache:
        disk = Held(cache)
        said = [turn(model, cache, text(100, i)) for i in range(2)]
        assert disk.begun.wait(10)
        cache.inventory.shrink(0)
        disk.go()
        assert not cache.flush(30)
        assert 0 in [cache.durable(tokens) for tokens in said]
        again = turn(model, cache, text(100, 3))
        assert cache.flush(30) and cache.durable(again) == len(again)


def test_a_copy_that_is_interrupted_is_no_promise(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, tmp_path, disk_mode="through") as cache:
        small_records(cache)
        assert cache.parts.tier is not None
        staging = cache.parts.tier.spiller._staging
        free = len(staging._free)
        disk = Held(cache)
        turn(model, cache, text(60, 2))
        assert disk.begun.wait(10)
        said = turn(model, cache, text(100, 1))
        with monkeypatch.context() as patched:
            patched.setattr(host, "copy_out", interrupt)
            with pytest.raises(KeyboardInterrupt):
                cache.lease([*said, 1, 2])
        disk.go()
        assert cache.flush(30) == (cache.durable(said) == len(said))
        said = turn(model, cache, [*said, 1, 2])
        assert cache.flush(30) and cache.durable(said) == len(said)
        assert len(staging._free) == free and not staging.extra_bytes
        assert not any(slab.copies for slab in cache.state.store.slabs)
        settled(cache)
    with opened(model, tmp_path) as cache:
        assert cache.lease([*said, 5]).cached == len(said)


def test_memory_is_emptied_onto_the_disk(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        said = [turn(model, cache, text(100, i)) for i in range(4)]
        cache.clear(disk=False)
        assert cache.stats().stored_tokens == 0
        assert [cache.lease([*tokens, 1]).cached for tokens in said] == [len(tokens) for tokens in said]


def test_what_has_tokens_and_no_kv_is_not_durable(tmp_path: Path) -> None:
    model = FakeModel(("full",))
    bound = {"max_kv_size": 64, "keep": 4, "disk_mode": "through"}
    with opened(model, tmp_path, **bound) as cache:
        said = turn(model, cache, text(200), bound=(64, 4))
        assert cache.flush(30)
        durable = [cache.durable(said), cache.durable(said[:150])]
    with opened(model, tmp_path, **bound) as cache:
        assert [cache.lease([*said, 1]).cached, cache.lease([*said[:150], 1]).cached] == durable


def test_everything_can_be_written_without_closing(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        said = turn(model, cache, text(100))
        assert cache.flush(30) and cache.durable(said) == 0, "nothing is owed yet"
        assert cache.flush(30, everything=True) and cache.durable(said) == len(said)


def test_a_disk_that_was_never_there_is_no_promise(model: FakeModel) -> None:
    with PrefixCache(model, "40MB", disk="/proc/nowhere") as cache:
        assert not cache.flush()
        assert cache.stats().disk.failed and cache.stats().disk.folder == "/proc/nowhere"


@pytest.mark.parametrize(
    "told", [{"disk_budget": "1GB"}, {"disk_mode": "through"}, {"disk_daily_limit": "1GB"}], ids=str
)
def test_what_is_said_of_a_folder_needs_one(told: dict[str, Any], model: FakeModel) -> None:
    with pytest.raises(ConfigError, match="give disk="):
        PrefixCache(model, "40MB", **told)


def test_closing_tells_what_was_not_written(model: FakeModel, tmp_path: Path) -> None:
    cache = opened(model, tmp_path, disk_daily_limit="1kB")
    said = turn(model, cache, text(100))
    cache.close()
    assert cache.stats().disk.left_tokens == len(said)
    with pytest.raises(ConfigError, match="closed"):
        cache.durable(said)


def test_closing_can_be_told_not_to_wait(model: FakeModel, tmp_path: Path) -> None:
    cache = opened(model, tmp_path)
    small_records(cache)
    disk = Held(cache)
    said = turn(model, cache, text(500))
    closing = threading.Thread(target=cache.close)
    closing.start()
    assert disk.begun.wait(10)
    cache.ending.hurry()
    disk.go()
    closing.join(10)
    assert not closing.is_alive()
    left = cache.stats().disk.left_tokens
    assert left > 0
    with opened(model, tmp_path) as again:
        assert again.lease([*said, 1]).cached >= len(said) - left


def test_what_lay_in_memory_was_not_restored(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        said = turn(model, cache, text(100))
    with opened(model, tmp_path) as cache:
        Session(model, cache, said[:31]).prefill().commit()
        lease = cache.lease(said)
        assert (lease.cached, lease.restored) == (len(said) - 1, len(said) - 1 - 31)


# -- nobody else waits ------------------------------------------------------------------------------------


def test_requests_go_on_while_somebody_waits_for_the_disk(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path, disk_mode="through") as cache:
        disk = Held(cache)
        turn(model, cache, text(100))
        assert disk.begun.wait(10)
        flushed: list[bool] = []
        waiting = threading.Thread(target=lambda: flushed.append(cache.flush(30)))
        waiting.start()
        time.sleep(0.1)
        turn(model, cache, text(100, 1))
        assert not flushed
        disk.go()
        waiting.join(30)
        assert flushed == [True]
        settled(cache)


@pytest.mark.usefixtures("interruptible")
def test_a_gate_that_was_interrupted_on_the_way_in_is_open() -> None:
    gate = CacheLock()
    inside, leave = threading.Event(), threading.Event()

    def writer() -> None:
        with gate.inner:
            inside.set()
            leave.wait(60)

    held = threading.Thread(target=writer)
    held.start()
    inside.wait(10)

    def press() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        leave.set()

    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=press).start()
            with gate:
                time.sleep(60)
    finally:
        held.join(10)
    entered: list[int] = []

    def other() -> None:
        with gate:
            entered.append(1)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    thread.join(10)
    assert entered


@pytest.mark.usefixtures("interruptible")
def test_a_worker_is_waited_for_though_the_wait_was_interrupted() -> None:
    leave = threading.Event()
    worker = Worker(lambda: leave.wait(60) and None, "test")
    assert not worker.working
    worker.start()
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        worker.wait(60)
    assert worker.working and not worker.wait(0.05)
    leave.set()
    assert worker.wait(10) and not worker.working


def test_closing_that_was_interrupted_can_be_done_again(model: FakeModel, tmp_path: Path) -> None:
    cache = opened(model, tmp_path, disk_mode="through")
    said = turn(model, cache, text(100))
    assert cache.parts.tier is not None
    thread = cache.parts.tier.spiller._writer._thread
    wait = thread.wait

    def once(seconds: float | None = None) -> bool:
        thread.wait = wait  # type: ignore[method-assign]
        raise KeyboardInterrupt

    thread.wait = once  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    cache.close()
    cache.close()
    assert sum(cache.state.ledger.by_purpose().values()) == 0
    with opened(model, tmp_path) as again:
        assert again.lease([*said, 1]).cached == len(said)


def test_a_cache_that_is_collected_on_the_writers_thread_is_written(model: FakeModel, tmp_path: Path) -> None:
    """The collector runs where it likes: the thread does not wait for itself."""
    cache = opened(model, tmp_path, disk_mode="through")
    assert cache.parts.tier is not None
    folder, thread, go = cache.parts.tier.catalog.folder, cache.parts.tier.spiller._writer._thread, threading.Event()
    write = folder.write

    def collecting(*what: Any) -> None:
        go.wait(10)
        gc.collect()
        write(*what)

    folder.write = collecting  # type: ignore[method-assign]
    gc.disable()
    try:
        said = [turn(model, cache, text(100, i)) for i in range(2)]
        cache.me = cache  # type: ignore[attr-defined]
        del cache
        go.set()
        thread.join(120)
        assert not thread.is_alive()
    finally:
        gc.enable()
    deadline = time.monotonic() + 60
    while any(t.name == "onefold-abandon" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    with opened(model, tmp_path) as again:
        assert [again.lease([*tokens, 1]).cached for tokens in said] == [len(tokens) for tokens in said]


# -- anything, in any order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", quick(range(3), 0))
@pytest.mark.parametrize(
    "kinds", [("full", "full"), ("full", "recurrent"), ("full", "rotating"), ("recurrent",)], ids="+".join
)
@pytest.mark.parametrize("direct", [True, False], ids=["in place", "by operations"])
def test_any_order_of_things_on_a_disk_that_fails_leaves_everything_right(
    direct: bool, kinds: tuple[str, ...], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "addressable", lambda: direct)
    walk = Walk(FakeModel(kinds), tmp_path, seed + 100 * direct, fails=True)
    for _ in range(effort(30, 50)):
        walk.step()
    walk.cache.close()


@pytest.mark.parametrize("seed", quick(range(3), 0))
@pytest.mark.parametrize("bound", [None, (100, 4)], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("kinds", [("full", "full"), ("full", "recurrent"), ("recurrent",)], ids="+".join)
@pytest.mark.parametrize("direct", [True, False], ids=["in place", "by operations"])
def test_any_order_of_things_on_a_sound_disk_loses_nothing(
    direct: bool,
    kinds: tuple[str, ...],
    bound: tuple[int, int] | None,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is said to be durable is there after a restart, and no record is ever rejected."""
    monkeypatch.setattr(arrays, "addressable", lambda: direct)
    walk = Walk(FakeModel(kinds), tmp_path, seed + 100 * direct, bound=bound)
    for _ in range(effort(30, 50)):
        walk.step()
    walk.start_again()
    walk.cache.close()
