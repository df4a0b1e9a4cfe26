"""Shared stores: a real Redis server, a real folder, and what each does when it cannot do what it is asked."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bucket_server import BUCKET, bucket_server
from redis_server import free_port, redis_server

from onefold.cache.tiers.remote.grid import VALUE_BYTES
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores import store as stores
from onefold.cache.tiers.remote.stores.redis_connection import MOST_ANSWERED
from onefold.cache.tiers.remote.stores.registry import STORES, address_of, open_store
from onefold.cache.tiers.remote.stores.store import Point, Store, StoreError, StoreSettings
from onefold.errors import ConfigError, RecordError

REDIS = pytest.mark.system("redis-server")


def opened(url: str, deadline: float = 30.0, ttl: int = 3600) -> Store:
    return open_store(StoreSettings(address_of(url), deadline, ttl))


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    with bucket_server() as environment:
        yield environment


@pytest.fixture(params=[pytest.param("redis", marks=REDIS), "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "s3":
        for name, value in request.getfixturevalue("bucket").items():
            monkeypatch.setenv(name, value)
        found = opened(f"s3://{BUCKET}/{tmp_path.name}")
        yield found
        found.close()
        return
    if request.param == "file":
        found = opened(f"file://{tmp_path / 'a store'}".replace(" ", "%20"))
        yield found
        found.close()
        return
    with redis_server(tmp_path) as server:
        found = opened(server.url)
        yield found
        found.close()


def test_a_value_is_stored_once_and_read_as_it_is(store: Store) -> None:
    assert store.get("of/a") is None
    assert store.add("of/a", b"\0\xff" * 9)
    assert not store.add("of/a", b"another")
    assert store.get("of/a") == b"\0\xff" * 9
    store.remove("of/a")
    store.remove("of/a")
    assert store.get("of/a") is None


def test_the_largest_value_comes_back(store: Store) -> None:
    value = bytes(range(256)) * (VALUE_BYTES // 256)
    assert store.add("of/large", value) and store.get("of/large") == value


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 13, 40])
def test_a_chain_is_known_up_to_its_first_gap(store: Store, n: int) -> None:
    names = [f"of/{i}" for i in range(40)]
    for i, name in enumerate(names):
        if i != n:
            store.add(name, b"x")
    assert store.look(names, patient=True) == (n, -1)
    assert store.look([]) == (0, -1)


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 34, 40, 999, 1000])
def test_a_reader_finds_the_end_of_a_long_chain_and_its_last_point(
    store: Store, n: int, request: pytest.FixtureRequest
) -> None:
    if n > 100 and "s3" in request.node.name:
        pytest.skip("a thousand objects take that server ten seconds")
    names = [f"of/{i}" for i in range(1000)]
    for name in names[:n]:
        store.add(name, b"x")
    points = [Point(k, f"point/{k}") for k in range(0, 1001, 10)]
    for k in (10, 30, 40, 900, 1000):
        store.add(f"point/{k}", b"x")
    expected = max((i for i, p in enumerate(points) if p.needs <= n and p.needs in (10, 30, 40, 900, 1000)), default=-1)
    assert store.look(names, points) == store.look(names, points, patient=True) == (n, expected)
    assert store.look([], [Point(0, "point/10"), Point(0, "point/11")]) == (0, 0)


def test_names_are_listed_by_their_beginning(store: Store) -> None:
    for name in ("of/a1", "of/a2", "of/b*1", "of/bc1", "other"):
        store.add(name, b"four")
    assert sorted(store.names("of/a")) == [("of/a1", 4), ("of/a2", 4)]
    assert list(store.names("of/b*")) == [("of/b*1", 4)]  # no pattern
    assert len(list(store.names(""))) == 5


def test_two_machines_that_write_the_same_at_once_write_it_once(store: Store) -> None:
    told: list[bool] = []
    ready = threading.Barrier(4)

    def write(i: int) -> None:
        ready.wait(60)
        told.append(store.add("of/same", bytes([i]) * 100_000))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(told) == [False] * 3 + [True]
    value = store.get("of/same")
    assert value is not None and len(value) == 100_000 and len(set(value)) == 1


@REDIS
def test_a_look_at_a_chain_is_one_round_trip_and_reading_renews(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        store = opened(server.url, ttl=1000)
        store.add("of/a", b"x")
        client = store._store._client  # type: ignore[attr-defined]
        client.expire("of/a", 5)
        assert store.get("of/a") == b"x" and client.ttl("of/a") > 900
        looking = opened(server.url, ttl=0)
        client.expire("of/a", 500)
        assert looking.get("of/a") == b"x" and looking.look(["of/a"]).leading == 1 and client.ttl("of/a") <= 500
        assert looking.add("of/stays", b"x") and client.ttl("of/stays") == -1
        looking.close()
        assert store.look(["of/a"]).leading == 1 and client.ttl("of/a") > 900
        before = client.info("stats")["total_reads_processed"]
        assert store.look(["of/a"] * 500).leading == 500
        assert client.info("stats")["total_reads_processed"] - before <= 4  # 500 questions, in a few packets
        store.close()


@REDIS
def test_what_lies_there_and_is_no_value_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        store = opened(server.url)
        client = store._store._client  # type: ignore[attr-defined]
        client.set("of/large", bytes(VALUE_BYTES + 1))
        client.lpush("of/list", "x")
        client.set("of/empty", b"")
        for name, reason in (("of/large", RemoteReason.TOO_LARGE), ("of/list", RemoteReason.OTHER_FORMAT)):
            with pytest.raises(RecordError, match=reason):
                store.get(name)
            store.remove(name)
            assert store.get(name) is None
        assert store.get("of/empty") == b""
        client.lpush("of/list", "x")
        assert ("of/list", 0) in list(store.names("of/"))
        store.close()


@REDIS
def test_a_full_server_says_so_and_still_answers(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        store = opened(server.url)
        with pytest.raises(StoreError) as failed:
            for i in range(9):
                store.add(f"of/{i}", bytes(500_000))
        assert failed.value.reason is RemoteReason.FULL
        assert store.look(["of/0"]).leading == 1
        store.close()


@REDIS
def test_a_wrong_password_is_refused_and_never_shown(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "right") as server:
        right = opened(f"redis://:right@127.0.0.1:{server.port}/0")
        assert right.add("a", b"x")
        wrong = opened(f"redis://:not-this-one@127.0.0.1:{server.port}/0")
        with pytest.raises(StoreError) as failed:
            wrong.get("a")
        assert failed.value.reason is RemoteReason.REFUSED
        assert "not-this-one" not in str(failed.value)
        right.close()
        wrong.close()


@REDIS
def test_a_server_that_is_killed_is_an_error_and_serves_again_when_it_is_back(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        store = opened(server.url)
        store.add("a", b"x")
        port = server.port
    with pytest.raises(StoreError) as failed:
        store.get("a")
    assert failed.value.reason is RemoteReason.UNREACHABLE
    with redis_server(tmp_path, port=port):
        deadline = time.monotonic() + 60
        while True:
            try:
                assert store.get("a") is None
                break
            except StoreError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    store.close()


def test_a_server_that_accepts_and_never_answers_is_given_up_at_the_deadline() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        store = opened(f"redis://127.0.0.1:{deaf.getsockname()[1]}/0", deadline=0.2)
        for ask in (lambda: store.look(["a"]), lambda: store.get("a"), lambda: store.add("a", b"x")):
            begun = time.monotonic()
            with pytest.raises(StoreError) as failed:
                ask()
            assert failed.value.reason is RemoteReason.SLOW
            assert time.monotonic() - begun < 30
        store.close()


class Blocked:
    """A store none of whose calls returns before it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def _wait(self, *_: Any, **__: Any) -> Any:
        self.released.wait()

    look = get = add = remove = _wait

    def close(self) -> None: ...


ASKS: dict[str, Callable[[Store], Any]] = {
    "look": lambda store: store.look(["a"]),
    "patient": lambda store: store.look(["a"] * 1000, patient=True),
    "get": lambda store: store.get("a"),
    "add": lambda store: store.add("a", b"x"),
    "remove": lambda store: store.remove("a"),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_call_that_blocks_ends_at_the_deadline(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked()
    monkeypatch.setattr(stores, "_MARGIN", 0.0)
    monkeypatch.setattr(stores, "_THREADS", 4)
    monkeypatch.setitem(STORES, "file", STORES["file"]._replace(opener=lambda settings: blocked))  # type: ignore
    store = opened("file:///srv/a", deadline=0.01)
    for _ in range(6):  # more often than there are threads
        with pytest.raises(StoreError) as failed:
            ASKS[ask](store)
        assert failed.value.reason is RemoteReason.SLOW
    here = [t for t in threading.enumerate() if t.name == "onefold-store"]
    assert len(here) == 4 and all(t.daemon for t in here)
    blocked.released.set()
    store.close()
    for thread in here:
        thread.join(60)
        assert not thread.is_alive()


def test_opening_a_folder_that_blocks_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setitem(STORES, "file", STORES["file"]._replace(opener=lambda settings: released.wait()))  # type: ignore
    with pytest.raises(ConfigError, match="file:///srv/a has not answered in time"):
        opened("file:///srv/a", deadline=0.01)
    released.set()


SHARING_WITH_THE_DEAF = """
import socket
import time

import test_remote_stores as stores
from test_remote_tier import machine, served, words
from tiny import tiny

model = tiny("llama_q")
stores.STORES["file"] = stores.STORES["file"]._replace(opener=lambda settings: stores.Blocked())
deaf = socket.create_server(("127.0.0.1", 0), backlog=100)
address = f"127.0.0.1:{deaf.getsockname()[1]}"
stores.os.environ.update(
    AWS_ENDPOINT=f"http://{address}", AWS_ALLOW_HTTP="true", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="a"
)
for url in ("file:///srv/a", f"redis://{address}/0", "s3://bucket/a"):
    cache = machine(model, url, deadline=0.1, insecure=True)
    served(cache, model, words(300))
    begun = time.monotonic()
    cache.close()
    print(f"{time.monotonic() - begun:.3f}", flush=True)
left_open = machine(model, "file:///srv/a", deadline=0.1)
served(left_open, model, words(300))
"""


@pytest.mark.slow
def test_a_store_that_never_answers_delays_no_close_and_no_exit() -> None:
    """Neither one that blocks in the file system, nor a server that accepts connections."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run(
        [sys.executable, "-c", SHARING_WITH_THE_DEAF], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert [float(seconds) < 20 for seconds in ended.stdout.split()] == [True] * 3


class Answering:
    """A server that answers the first GETRANGE bit by bit, or without end."""

    def __init__(self, begin: bytes, then: bytes, pause: float) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}/0"
        self._begin, self._then, self._pause = begin, then, pause
        self.sent, self.ended = 0, 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._socket.accept()[0]
                with client, contextlib.suppress(OSError):
                    client.settimeout(60)
                    while b"GETRANGE" not in (asked := client.recv(1 << 16)):
                        client.sendall(b"+OK\r\n" * asked.count(b"SETINFO"))
                    client.sendall(self._begin)
                    while True:
                        client.sendall(self._then)
                        self.sent += len(self._then)
                        time.sleep(self._pause)
                self.ended += 1

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize(
    "then, pause, reason", [(b"x", 0.02, RemoteReason.SLOW), (bytes(1 << 16), 0.0, RemoteReason.UNREACHABLE)]
)
def test_an_answer_without_end_ends_at_the_deadline_or_at_its_most(
    then: bytes, pause: float, reason: RemoteReason
) -> None:
    server = Answering(b"$100000000000\r\n", then, pause)
    store = opened(server.url, deadline=0.5 if pause else 20)
    begun = time.monotonic()
    with pytest.raises(StoreError) as failed:
        store.get("a")
    assert failed.value.reason is reason and time.monotonic() - begun < 15
    store.close()
    deadline = time.monotonic() + 60
    while not server.ended:  # the connection is closed: nothing is read any more
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.sent < 30 * MOST_ANSWERED
    server.close()


@REDIS
def test_a_replica_is_read_and_cannot_be_written(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        store = opened(server.url)
        assert store.add("of/a", b"x")
        store._store._client.replicaof("127.0.0.1", free_port())  # type: ignore[attr-defined]
        assert store.get("of/a") == b"x" and store.look(["of/a", "of/b"]).leading == 1
        with pytest.raises(StoreError) as failed:
            store.add("of/b", b"x")
        assert failed.value.reason is RemoteReason.REFUSED
        store.close()


@REDIS
def test_a_store_that_is_closed_in_mid_call_leaves_no_connection(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        store = opened(server.url)
        client = store._store._client  # type: ignore[attr-defined]
        assert store.get("a") is None
        asking = [threading.Thread(target=ask, args=(store,)) for _ in range(3)]
        client.client_pause(300)
        for thread in asking:
            thread.start()
        time.sleep(0.1)
        store.close()
        for thread in asking:
            thread.join(60)
        pool = client.connection_pool
        assert all(c._sock is None for c in (*pool._available_connections, *pool._in_use_connections))


def ask(store: Store) -> None:
    with contextlib.suppress(StoreError):
        store.get("a")


def test_a_bucket_that_refuses_or_is_not_there(bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    missing = opened("s3://there-is-none/a", deadline=5)
    with pytest.raises(StoreError, match="s3://there-is-none/a failed"):
        missing.add("of/a", b"x")
    missing.close()
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    gone = opened(f"s3://{BUCKET}/a", deadline=1)
    with pytest.raises(StoreError) as failed:
        gone.get("of/a")
    assert failed.value.reason is RemoteReason.UNREACHABLE
    gone.close()


def test_a_server_that_is_not_there_is_unreachable() -> None:
    store = opened(f"redis://127.0.0.1:{free_port()}/0", deadline=5)
    with pytest.raises(StoreError) as failed:
        store.look(["a"])
    assert failed.value.reason is RemoteReason.UNREACHABLE
    store.close()


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(f"file://{tmp_path}/file")


def modes(folder: Path) -> dict[str, int]:
    """Returns the permissions of what lies below a folder."""
    return {p.relative_to(folder).as_posix(): stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*")}


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_nobody_else_can_read_what_a_folder_holds(
    tmp_path: Path, open_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    born: list[int] = []

    def noting(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        file = os_open(path, flags, *arguments, **options)
        if flags & os.O_CREAT:
            born.append(stat.S_IMODE(os.fstat(file).st_mode))
        return file

    os_open = os.open
    monkeypatch.setattr(os, "open", noting)
    store = opened(f"file://{tmp_path}/new/store")
    assert store.add("of/a/b", b"x")
    monkeypatch.undo()
    store.close()
    assert modes(tmp_path) == {"new": 0o700, "new/store": 0o700, "new/store/of": 0o700, "new/store/of/a": 0o700} | {
        "new/store/of/a/b": 0o600
    }
    assert set(born) == {0o600}  # before there was anything in it


@pytest.mark.parametrize(
    "mode, folders, files", [(0o755, 0o700, 0o600), (0o770, 0o700, 0o600), (0o2770, 0o2770, 0o640)]
)
def test_a_folder_that_is_there_keeps_its_mode_and_is_shared_with_a_group_if_it_says_so(
    mode: int, folders: int, files: int, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    store = opened(f"file://{tmp_path}/store")
    assert store.add("of/a", b"x")
    store.close()
    assert modes(tmp_path) == {"store": mode, "store/of": folders, "store/of/a": files}


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    """Whoever may change the folder cannot have files elsewhere listed, read, written or removed."""
    store, elsewhere = opened(f"file://{tmp_path}/store"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a").write_bytes(b"mine")
    store.add("of/b", b"x")
    (tmp_path / "store/of/link").symlink_to(elsewhere)
    (tmp_path / "store/of/file").symlink_to(elsewhere / "a")
    assert sorted(held.name for held in store.names("of/")) == ["of/b", "of/file", "of/link"]
    assert store.get("of/link/a") is None and store.look(["of/link/a"]).leading == 0
    with pytest.raises(RecordError, match=RemoteReason.OTHER_FORMAT):
        store.get("of/file")
    with pytest.raises(StoreError):
        store.add("of/link/new", b"x")
    for name in ("of/link/a", "of/link", "of/file"):
        store.remove(name)
    assert [(p.name, p.read_bytes()) for p in elsewhere.iterdir()] == [("a", b"mine")]
    assert [held.name for held in store.names("of/")] == ["of/b"]
    store.close()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    store = opened(f"file://{tmp_path}/store")
    store.add("of/a", b"x")
    os.mkfifo(tmp_path / "store/of/pipe")
    (tmp_path / "store/of/folder").mkdir()
    for name in ("of/pipe", "of/folder"):
        with pytest.raises(RecordError, match=RemoteReason.OTHER_FORMAT):
            store.get(name)
    store.remove("of/pipe")
    assert store.get("of/pipe") is None and store.add("of/pipe", b"y") and store.get("of/pipe") == b"y"
    store.close()


@pytest.mark.parametrize(
    "failure, reason",
    [(errno.ENOSPC, RemoteReason.FULL), (errno.EACCES, RemoteReason.REFUSED), (errno.EIO, RemoteReason.UNREACHABLE)],
)
def test_a_value_that_cannot_be_written_leaves_nothing(
    failure: int, reason: RemoteReason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(failure, os.strerror(failure))

    store = opened(f"file://{tmp_path}/store")
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreError, match="failed") as failed:
        store.add("of/a", b"x")
    assert failed.value.reason is reason and list((tmp_path / "store/of").iterdir()) == []
    store.close()


def test_what_a_writer_left_that_ended_goes_when_the_store_is_listed(tmp_path: Path) -> None:
    store = opened(f"file://{tmp_path}/store")
    store.add("of/a", b"x")
    for name, age in (("a#old", 3600), ("a#new", 0)):
        (tmp_path / "store/of" / name).write_bytes(b"half of it")
        os.utime(tmp_path / "store/of" / name, (time.time() - age,) * 2)
    assert [held.name for held in store.names("of/")] == ["of/a"]
    assert {path.name for path in (tmp_path / "store/of").iterdir()} == {"a", "a#new"}
    store.close()


@pytest.mark.parametrize(
    "url, said",
    [
        ("", "such as redis://"),
        ("/tmp/somewhere", "such as redis://"),
        ("http://127.0.0.1/", "such as redis://"),
        ("redis:///0", "names no machine"),
        ("s3:///folder", "names no bucket"),
        ("redis://127.0.0.1:x/0", "no URL"),
        ("redis://[::1/0", "no URL"),
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        address_of(url)


@pytest.mark.parametrize(
    "url, said",
    [
        ("redis://127.0.0.1:6379/0?db=x", "no URL of a Redis server"),
        ("redis://127.0.0.1:6379/0?foo=bar", "no URL of a Redis server"),
        ("rediss://127.0.0.1:6379/0?ssl_cert_reqs=bogus", "no URL of a Redis server"),
        ("redis://127.0.0.1:6379/0?socket_timeout=7", "cannot set socket_timeout"),
        ("file:b", "whole path"),
        ("file://machine/srv/a", "on this machine"),
        ("file:///srv/a?b", "on this machine"),
        ("file:///srv/a#b", "on this machine"),
    ],
)
def test_a_url_with_other_faults_is_refused_when_the_store_is_opened(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(url)


@pytest.mark.parametrize(
    "url, shown, local",
    [
        ("redis://me:secret@127.0.0.1:1/2", "redis://127.0.0.1:1/2", True),
        ("redis://secret@127.0.0.1:1/2", "redis://127.0.0.1:1/2", True),
        ("rediss://:secret@cache.example/0?x=secret", "rediss://cache.example/0", False),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0", True),
        ("redis://localhost/0", "redis://localhost/0", True),
        ("redis://10.0.0.1/0", "redis://10.0.0.1/0", False),
        ("s3://localhost/a", "s3://localhost/a", False),
        ("file:///srv/a", "file:///srv/a", True),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str, local: bool) -> None:
    address = address_of(url)
    assert (address.shown, address.local) == (shown, local)


@pytest.mark.parametrize("package, url", [("redis", "redis://127.0.0.1/0"), ("obstore", "s3://bucket/a")])
def test_a_package_that_is_missing_is_named(package: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'onefold\[remote\]'"):
        opened(url)


def test_every_store_has_an_example_that_is_one() -> None:
    for scheme, kind in STORES.items():
        assert address_of(kind.example).url.startswith(f"{scheme}://")
