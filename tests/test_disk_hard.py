"""Hard cases of the disk tier: what goes wrong only when several things meet.

Every layer of every request is compared with a stock run beside it (`fake.Session`).
"""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from disk_caches import MODES, files, flip, opened, small_records, turn
from effort import quick
from fake import FakeModel, Session, settled, text
from forking import forks

from onefold import BudgetError, PrefixCache
from onefold.cache.memory.reclaiming import Reclaiming
from onefold.cache.tiers import host
from onefold.cache.tiers.disk.reading_ranges import RangeReader
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.heads import read_content
from onefold.cache.tiers.records.record import Content, parse_name
from onefold.errors import ConfigError, FolderInUse


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(("full", "full"), dim=64)


def written(cache: PrefixCache) -> None:
    with cache.state.lock:
        assert cache.parts.tier is not None
        cache.parts.tier.flush(everything=True, until=time.monotonic() + 30)


# -- never another's tokens, never garbage -----------------------------------------------------------


def by_forgetting(cache: PrefixCache, prefix: list[int], said: list[int]) -> None:
    cache.inventory.forget(said, len(prefix))


def by_clearing_beside_a_lease(cache: PrefixCache, prefix: list[int], said: list[int]) -> None:
    lease = cache.lease([*prefix, 63])
    cache.clear()
    lease.discard()


@pytest.mark.parametrize("drop", [by_forgetting, by_clearing_beside_a_lease])
@pytest.mark.parametrize("mode", MODES)
def test_a_record_that_reaches_beyond_its_node_is_not_the_next_turns(
    mode: str, drop: Callable[..., None], model: FakeModel, tmp_path: Path
) -> None:
    """The end of a conversation is given up, its record stays for its beginning; then it goes on otherwise."""
    prefix, end = text(80), text(20, 1)
    other = [(end[0] + 1) % 60, *text(12, 2)]
    with opened(model, tmp_path, disk_mode=mode) as cache:
        said = turn(model, cache, [*prefix, *end])
        written(cache)
        drop(cache, prefix, said)
        again = turn(model, cache, [*prefix, *other])
        written(cache)
        assert cache.durable(again) == len(again)
        cache.clear(disk=False)
        session = Session(model, cache, [*again, 5])
        assert session.cached == len(again)
        session.prefill().decode(2).commit()
        settled(cache)


@pytest.mark.parametrize("kv", ["16", "8", "4"])
def test_nothing_behind_a_restore_that_ended_early_is_read(kv: str, model: FakeModel, tmp_path: Path) -> None:
    """The second record comes back as NaNs: they must not stay in the buffer's room, which some kernels multiply."""
    with opened(model, tmp_path, kv=kv) as cache:
        small_records(cache)
        tokens = turn(model, cache, text(300), kv=kv)
    damaged = files(tmp_path)[1]
    data = bytearray(damaged.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little") + 4 * 50
    data[begin:] = b"\xff" * (len(data) - begin)
    damaged.write_bytes(data)
    with opened(model, tmp_path, kv=kv) as cache:
        session = Session(model, cache, [*tokens, *text(20, 1)], kv=kv)
        assert session.cached == 50
        for slab in cache.state.store.slabs:
            for layer in slab.layers:
                assert all(bool(mx.isfinite(a).all()) for a in layer or () if a.dtype == mx.float32)
        session.prefill().decode(3).commit()


def test_a_slab_is_not_copied_while_it_is_merged(model: FakeModel, tmp_path: Path) -> None:
    """A buffer whose layers are gone gives no record at all, rather than a record of something else."""
    with opened(model, tmp_path) as cache:
        turn(model, cache, text(100))
        (slab,) = cache.state.store.slabs
        kept, slab.layers = slab.layers, [None] * len(slab.layers)
        with pytest.raises(RuntimeError, match="bytes were there"):
            host.copy_out(slab, 0, 10, np.empty(10 * cache.inventory.token_bytes, np.uint8), direct=True)
        slab.layers = kept
        slab.rewriting = True
        with cache.state.lock:
            assert cache.parts.tier is not None
            assert not cache.parts.tier.spiller.jobs.is_writable(next(iter(slab.spans)).node)
        slab.rewriting = False


def test_a_checkpoint_of_other_layers_is_a_miss(tmp_path: Path) -> None:
    """Its checksum is right, and it is not what this model has."""
    model = FakeModel(("full", "recurrent", "rotating"))
    with opened(model, tmp_path) as cache:
        tokens = turn(model, cache, text(90))
    for path in tmp_path.glob("*/*.point.safetensors"):
        named = parse_name(path.name)
        assert named is not None
        file = os.open(path, os.O_RDONLY)
        head, content = read_content(file, path.parent.name, named, os.fstat(file).st_size)
        os.close(file)
        payload = path.read_bytes()[head.data_at :]
        state = json.loads(content.state)
        state["leaves"] = state["leaves"][:2]
        kept = tuple(t for t in content.tensors if not t.name.startswith("state.2"))
        lying = Content(
            content.what, content.namespace, content.parent, content.start, content.tokens, kept, json.dumps(state)
        )
        payload = payload[: sum(t.nbytes for t in kept)]
        path.write_bytes(lying.header(lying.checksum([payload])) + payload)
    with opened(model, tmp_path) as cache:
        session = Session(model, cache, [*tokens, 5])
        assert session.cached == 0 and cache.stats().reasons["disk: of another layout"] >= 1
        session.prefill().decode(2).commit()


# -- trouble that passes ----------------------------------------------------------------------------


def test_running_out_of_descriptors_costs_no_record(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        small_records(cache)
        tokens = turn(model, cache, text(300))
    before = files(tmp_path)
    with opened(model, tmp_path) as cache:
        assert cache.inventory.matched(tokens) == len(tokens)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(n) for n in os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 64
        taken: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
            session = Session(model, cache, [*tokens, 1])
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert session.cached == 0 and files(tmp_path) == before
        session.prefill().commit()
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*tokens, 1]).cached == len(tokens)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EINTR, errno.ENOMEM])
def test_a_write_that_fails_for_now_does_not_end_it_all(
    code: int, model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, tmp_path, disk_mode="through") as cache:

        def fails(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr("onefold.cache.tiers.records.files.write_all", fails)
            first = turn(model, cache, text(60))
            assert not cache.flush(10) and cache.stats().disk.failed == ""
        again = turn(model, cache, [*first, 7])
        assert cache.flush(10) and cache.durable(again) == len(again)


def test_a_disk_that_is_too_slow_is_waited_for_once(model: FakeModel, tmp_path: Path, monkeypatch: Any) -> None:
    write = Folder.write
    release, waited = threading.Event(), list[bool]()

    def slow(self: Folder, *what: Any) -> None:
        waited.append(release.wait(200))
        write(self, *what)

    monkeypatch.setattr(Folder, "write", slow)
    monkeypatch.setattr("onefold.cache.memory.reclaiming.PATIENCE", 0.2)
    with opened(model, tmp_path, budget="3MB") as cache:
        for i in range(20):
            turn(model, cache, [i, *text(120, i)])
        assert not waited, "nobody waited until something was written"
        assert cache.stats().reasons["disk: disk too slow"] > 1 and cache.stats().discarded_tokens > 0
        release.set()


# -- what is said is so -------------------------------------------------------------------------------


def test_flush_says_so_if_something_is_not_on_disk(model: FakeModel, tmp_path: Path) -> None:
    for i, options in enumerate(({"disk_budget": 5000}, {"disk_daily_limit": 1})):
        with opened(model, tmp_path / str(i), disk_mode="through", **options) as cache:
            said = turn(model, cache, text(300))
            assert not cache.flush(10) and cache.durable(said) == 0
    with opened(model, tmp_path / "open", disk_mode="through") as cache:
        session = Session(model, cache, text(100)).prefill()
        session.commit(close=False)
        assert not cache.flush(10), "its request is still writing there"
        said = session.commit()
        assert cache.flush(10) and cache.durable(said) == len(said)


def test_closing_evaluates_what_an_open_lease_has_begun(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        said = turn(model, cache, text(300))
        lease = cache.lease([*said, 1, 2])
        model(mx.array([[1]]), cache=lease.layers)  # and never evaluated
        del lease
    with opened(model, tmp_path) as cache:
        assert cache.durable(said) == len(said)


def test_a_thread_that_ends_is_not_waited_for(model: FakeModel, tmp_path: Path, monkeypatch: Any) -> None:
    """Whatever the writer meets that it was not made for: it is said, and the cache goes on without."""
    monkeypatch.setattr("threading.excepthook", lambda args: None)

    def breaks(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    with opened(model, tmp_path, disk_mode="through") as cache:
        with monkeypatch.context() as patched:
            patched.setattr(host, "copy_out", breaks)
            said = turn(model, cache, text(60))
            assert not cache.flush(5)
        assert "has ended" in cache.stats().disk.failed
        assert turn(model, cache, [*said, 1])


# -- what is let go of ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_restore_that_is_interrupted_lets_go(
    error: type[BaseException], model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, tmp_path) as cache:
        small_records(cache)
        tokens = turn(model, cache, text(300))
    with opened(model, tmp_path) as cache:

        def interrupted(*_: Any) -> None:
            raise error

        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(RangeReader, "_believe", interrupted)
            cache.lease([*tokens, 1])
        assert not cache.state.restores and cache.stats().bytes["live"] == 0
        settled(cache)
        assert Session(model, cache, [*tokens, 1]).cached == len(tokens)


def test_a_device_without_room_for_a_restore_is_a_miss(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, tmp_path) as cache:
        tokens = turn(model, cache, text(300))
    with opened(model, tmp_path) as cache:

        def full(*_: Any) -> None:
            raise RuntimeError("[malloc] Unable to allocate")

        with monkeypatch.context() as patched:
            patched.setattr(host, "uninitialised", full)
            with cache.lease([*tokens, 1]) as lease:
                assert lease.cached == 0
        assert not cache.state.restores and cache.stats().disk.rejected_records == 0
        assert Session(model, cache, [*tokens, 1]).cached == len(tokens)


def test_a_restore_that_is_dropped_lets_go_at_the_next_call(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        small_records(cache)
        tokens = turn(model, cache, text(300))
    with opened(model, tmp_path) as cache:
        restore = cache.restore([*tokens, 1])
        assert restore is not None and restore.step()
        del restore
        deadline = time.monotonic() + 10
        while cache.stats().bytes["live"] and time.monotonic() < deadline:
            time.sleep(0.01)  # records that are being read ahead
        assert cache.stats().bytes["live"] == 0
        settled(cache)
        assert all(n.idle for n in cache.state.nodes.nodes())


def test_a_cache_that_is_dropped_gives_its_folder_back(model: FakeModel, tmp_path: Path) -> None:
    cache = opened(model, tmp_path)
    del cache
    gc.collect()
    opened(model, tmp_path).close()


@forks
def test_a_child_process_does_not_keep_the_folder(tmp_path: Path) -> None:
    """The lock ends with the process that took it, also if that had a child."""
    script = f"""
        import os, sys, time
        from onefold.cache.tiers.records.folder import Folder
        folder = Folder.make({str(tmp_path)!r})
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        os._exit(0)
    """
    done = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert done.stdout is not None
    child = int(done.stdout.readline())
    done.wait()
    deadline = time.monotonic() + 20
    try:
        while True:
            try:
                Folder.make(tmp_path).unlock()
                break
            except FolderInUse:  # the child has not run yet
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        os.kill(child, 9)
        done.stdout.close()


@forks
@pytest.mark.parametrize("mode", quick(["off", "back", "through"], "through"))
def test_a_child_process_lets_the_cache_be_and_ends(tmp_path: Path, mode: str) -> None:
    """MLX does not work in a child, and the writer is not there: nobody waits for either. The parent goes on."""
    script = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from disk_caches import turn
        from fake import FakeModel, text
        from onefold import ConfigError, PrefixCache

        model = FakeModel(("full", "full"))
        options = {{}} if {mode!r} == "off" else {{"disk": {str(tmp_path / "kept")!r}, "disk_mode": {mode!r}}}
        with PrefixCache(model, "40MB", **options) as cache:
            turn(model, cache, text(300))
            child = os.fork()
            if child == 0:
                for use in (lambda: cache.lease(text(300)), lambda: cache.flush(1, everything=True)):
                    try:
                        use()
                    except ConfigError as error:
                        print(error, flush=True)
                sys.exit(0)
            print(os.waitpid(child, 0)[1], flush=True)
            assert cache.lease([*text(300), 1]).cached == 300
        print(os.getpid())
    """
    ran = subprocess.run(
        # Python 3.12 warns of fork in a process with threads
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0 and not ran.stderr, ran
    *refused, status, pid = ran.stdout.splitlines()
    made = f"a PrefixCache cannot be used after a fork: this one was made in process {pid}"
    words = f"{made}. Make another one in the child"
    assert status == "0" and refused == [words] * (1 if mode == "off" else 2)
    assert bool(files(tmp_path / "kept")) == (mode != "off")


def test_a_checkpoint_is_counted_until_it_has_been_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(("recurrent", "rotating"), dim=64)
    write, begun, hold = Folder.write, threading.Event(), threading.Event()

    def slow(self: Folder, namespace: str, name: str, *what: Any) -> None:
        if ".point." in name:
            begun.set()
            hold.wait(60)
        write(self, namespace, name, *what)

    monkeypatch.setattr(Folder, "write", slow)
    monkeypatch.setattr("onefold.cache.clearing.FLUSH_MOST", 0.1)
    with opened(model, tmp_path, disk_mode="through") as cache:
        mx.set_cache_limit(0)  # a buffer from the pool may be larger than what was asked for
        gc.collect()
        before = mx.get_active_memory()
        tokens = text(90)
        with cache.lease(tokens) as lease:
            mx.eval(model(mx.array(tokens)[None], cache=lease.layers))
            lease.commit(tokens)
        assert begun.wait(60)
        cache.clear()
        gc.collect()
        assert cache.stats().bytes["checkpoint"] == mx.get_active_memory() - before
        hold.set()
        assert cache.flush(10)
        assert cache.stats().bytes["checkpoint"] == 0


# -- the folder ----------------------------------------------------------------------------------------


def test_a_namespace_that_is_a_link_is_not_written_through(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path / "cache") as cache:
        turn(model, cache, text(60))
    space = files(tmp_path / "cache")[0].parent
    shutil.rmtree(space)
    (tmp_path / "outside").mkdir()
    space.symlink_to(tmp_path / "outside")
    with opened(model, tmp_path / "cache", disk_mode="through") as cache:
        turn(model, cache, text(60))
        cache.flush(5)
        assert cache.stats().reasons["disk: something else in its place"] >= 1
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_pipe_in_place_of_a_small_file_is_not_waited_for(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        turn(model, cache, text(60))
    for name in ("written.json",):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    record = files(tmp_path)[0]
    record.unlink()
    os.mkfifo(record)
    opened(model, tmp_path).close()


def test_records_from_the_future_make_way_too(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        for i in range(4):
            turn(model, cache, [i, *text(80, i)])
    for path in files(tmp_path):
        os.utime(path, (time.time() + 86_400,) * 2)
    size = sum(p.stat().st_size for p in files(tmp_path))
    with opened(model, tmp_path, disk_mode="through", disk_budget=size + 10_000) as cache:
        said = turn(model, cache, [50, *text(80, 9)])
        assert cache.flush(10) and cache.durable(said) == len(said)


def test_clearing_reaches_namespaces_that_were_not_used_since(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        Session(model, cache, text(60), namespace="tenant").prefill().commit()
    other = FakeModel(("full",))
    with opened(other, tmp_path) as cache:
        Session(other, cache, text(60)).prefill().commit()
    assert len(files(tmp_path)) == 2
    with opened(model, tmp_path) as cache:
        cache.clear()
        assert cache.flush(10)
    assert len(files(tmp_path)) == 1, "another model's are not this one's to clear"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use any folder")
def test_somebody_elses_folder_is_refused(model: FakeModel) -> None:
    with pytest.raises((ConfigError, PermissionError)):
        opened(model, Path("/"))


def test_what_the_disk_refuses_is_not_waited_for(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daily limit is reached: making room in memory gives up at once what cannot be written."""
    monkeypatch.setattr(Reclaiming.making_room, "__kwdefaults__", {"patience": 200.0, "before": None})
    with opened(model, tmp_path, budget="3MB", disk_daily_limit=1) as cache:
        began = time.monotonic()
        for i in range(20):
            turn(model, cache, [i, *text(120, i)])
        assert time.monotonic() - began < 150, "less than one wait"
        stats = cache.stats()
        assert stats.evicted_tokens == stats.discarded_tokens > 0
        assert "disk: disk too slow" not in stats.reasons


def test_clearing_returns_when_the_files_are_gone(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path, disk_mode="through") as cache:
        turn(model, cache, text(300))
        cache.clear()
        assert files(tmp_path) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_script_that_ends_without_closing(mode: str, tmp_path: Path) -> None:
    """Written through, nothing is lost; written back, it is said."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import onefold
        from pathlib import Path
        from fake import FakeModel, text
        from disk_caches import opened, turn
        model = FakeModel(("full", "full"), dim=64)
        cache = opened(model, Path({str(tmp_path)!r}), disk_mode={mode!r})
        turn(model, cache, text(300))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ("not closed" in done.stderr) == (mode == "back")
    assert bool(files(tmp_path)) == (mode == "through")


def test_what_was_written_is_noted_when_the_writing_is_over(model: FakeModel, tmp_path: Path) -> None:
    """Not only at the end: a crash must not set the daily limit back."""
    with opened(model, tmp_path, disk_mode="through") as cache:
        turn(model, cache, text(300))
        assert cache.flush(10)
        deadline = time.monotonic() + 10
        while not (tmp_path / "written.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        noted = json.loads((tmp_path / "written.json").read_text())
        assert noted["today"] == noted["ever"] == cache.stats().disk.written_bytes > 0


def test_a_damaged_record_is_the_reason_that_is_given(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        tokens = turn(model, cache, text(100))
    (path,) = files(tmp_path)
    flip(path, -1)
    with opened(model, tmp_path) as cache:
        assert cache.lease([*tokens, 1]).reason == "damaged on disk"


def test_a_restore_without_room_leaves_nothing_held(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        tokens = turn(model, cache, text(600))
    with opened(model, tmp_path, budget="4MB") as cache:
        other = Session(model, cache, text(500, 9)).prefill(31)  # has much of it
        for _ in range(2):
            with pytest.raises(BudgetError):
                cache.restore([*tokens, 1], reserve_tokens=1200)
            gc.collect()
            settled(cache)
            assert all(n.pins == 0 for n in cache.state.nodes.nodes())
            assert cache.parts.tier is not None and all(r.pins == 0 for r in cache.parts.tier.catalog.records())
        other.commit()
