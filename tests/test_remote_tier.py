"""A store that several machines share: what one has computed, another reads, and nothing else is believed.

A machine is a cache here: two caches of one process share only the store.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from bucket_server import BUCKET, bucket_server
from redis_server import free_port, redis_server
from tiny import tiny

import onefold
from onefold.cache.memory.checkpoints import POINTS_SHARE
from onefold.cache.memory.ledger import Purpose
from onefold.cache.tiers import host
from onefold.cache.tiers.pace import Pace
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.remote import asking, health, sharing, tier
from onefold.cache.tiers.remote.fetching import AHEAD
from onefold.cache.tiers.remote.grid import ABOUT, part_address
from onefold.cache.tiers.remote.patience import Patience
from onefold.cache.tiers.remote.points import MANIFEST_MOST, read_manifest
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.store import StoreError
from onefold.cache.tiers.remote.tier import RemoteSettings
from onefold.cache.tiers.remote.values import Sealing
from onefold.cache.tiers.remote.writing import COPIES
from onefold.errors import RecordError

LONG = 1e6
"""Seconds: more than a test takes, however busy the machine is."""
RECORD, EDGE = 248, 256
"""Tokens of a record of a tiny model: the most, without and with checkpoints."""
CHUNK = 64
SECRET = b"a secret of more than sixteen bytes"


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


def served(cache: onefold.PrefixCache, model: Any, tokens: list[int], **options: Any) -> tuple[int, mx.array]:
    """Returns how many tokens were reused, and the logits after the last one."""
    with cache.lease(tokens, **options) as lease:
        cached = lease.cached
        at = cached
        while at < len(tokens):
            end = min(len(tokens), (at // CHUNK + 1) * CHUNK)  # where a conversation rotates depends on chunks
            out = model(mx.array(tokens[at:end])[None], cache=lease.layers)[:, -1]
            mx.eval(out)
            at = end
        lease.commit(tokens)
    cache.check()
    return cached, out


class Unmeasured(Pace):
    def took(self, seconds: float, units: int) -> None: ...


def machine(
    model: Any, url: str, budget: str = "64MB", kv: str = "16", extra: dict[str, Any] | None = None, **options: Any
) -> onefold.PrefixCache:
    """Returns a cache that fetches whatever it finds: a tiny model computes about as fast as a busy machine reads."""
    settings = RemoteSettings(url, **{"deadline": 30.0, "write": "all", **options})
    cache = onefold.PrefixCache(model, budget, kv=kv, remote=settings, **(extra or {}))
    remote = getattr(cache.parts.tier, "remote", cache.parts.tier)
    if remote is not None:
        remote._shared.prefill_pace = Unmeasured()
    return cache


def reason(cache: onefold.PrefixCache, which: RemoteReason) -> int:
    return cache.stats().reasons.get(f"remote: {which}", 0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama_q", seed=3)


def values(url: str) -> list[Path]:
    """Returns what a store has, but for the descriptions of namespaces."""
    return sorted(p for p in Path(url.removeprefix("file://")).rglob("*") if p.is_file() and p.name != ABOUT)


@pytest.fixture
def filled(model: Any, url: str) -> str:
    """A store with the records of a conversation of 700 tokens."""
    with machine(model, url) as first:
        assert served(first, model, words(700))[0] == 0
        assert first.flush(60)
    return url


@pytest.fixture(scope="module")
def cold(model: Any) -> mx.array:
    with onefold.PrefixCache(model, "64MB") as cache:
        return served(cache, model, words(700))[1]


def same(a: mx.array, b: mx.array, share: float = 1e-4) -> bool:
    return bool(mx.abs(a - b).max() <= share * mx.abs(b).max())


@pytest.mark.parametrize("kv", ["16", "8", "4", "affine4", "turbo4"])
def test_what_one_machine_computed_another_reads(kv: str, model: Any, url: str) -> None:
    tokens = words(700)
    with machine(model, url, kv=kv) as first:
        expected = served(first, model, tokens)[1]
        assert first.flush(60)
        stored = first.stats().remote
        assert (stored.records, stored.spilled_tokens) == (2, 2 * RECORD)
        kv_bytes = 2 * RECORD * first.stats().token_bytes
        assert kv_bytes < stored.written_bytes <= 1.02 * kv_bytes + 1024  # tiny records
    assert len(values(url)) == 2
    with machine(model, url, kv=kv) as second:
        cached, found = served(second, model, tokens)
        assert cached == 2 * RECORD and same(found, expected, 3e-2 if kv != "16" else 1e-4)
        stats = second.stats()
        assert stats.tokens_from_remote == stats.remote.restored_tokens == 2 * RECORD
        assert second.flush(60) and second.stats().remote.records == 0  # all of it is there already
        assert served(second, model, [*tokens, 1, 2])[0] == 700


def test_a_branch_reads_the_whole_records_before_it(model: Any, filled: str, cold: mx.array) -> None:
    tokens = [*words(400), *words(300, seed=1)]
    with machine(model, filled) as second:
        assert served(second, model, tokens)[0] == RECORD
        assert served(second, model, words(700))[0] == 2 * RECORD  # the second record, behind what memory has
        assert second.flush(60)
    assert len(values(filled)) == 3


def test_a_record_that_begins_inside_what_memory_has(model: Any, filled: str, cold: mx.array) -> None:
    with machine(model, filled, deadline=0.001) as second:
        second.parts.tier._shared.health._until = 1e18  # type: ignore[union-attr]
        assert served(second, model, words(700)[:300])[0] == 0
        second.parts.tier._shared.health.answered()  # type: ignore[union-attr]
        second.parts.tier._shared.deadline = 30.0  # type: ignore[union-attr]
        cached, found = served(second, model, words(700))
        assert cached == 2 * RECORD and same(found, cold)
        assert second.stats().tokens_from_remote == 2 * RECORD - 300


def test_a_longer_turn_writes_only_what_is_new(model: Any, filled: str) -> None:
    with machine(model, filled) as second:
        served(second, model, words(700) + words(400, seed=2))
        assert second.flush(60) and second.stats().remote.records == 2
    assert len(values(filled)) == 4


def test_what_was_evicted_comes_back(model: Any, filled: str, cold: mx.array) -> None:
    with machine(model, filled) as second:
        served(second, model, words(700))
        second.clear(disk=False)
        assert second.stats().nodes == 0
        cached, found = served(second, model, words(700))
        assert cached == 2 * RECORD and same(found, cold)


@pytest.mark.parametrize(
    "other",
    ["model", "format", "tenant", "no name", "adapter"],
)
def test_nothing_is_shared_with_another(other: str, model: Any, filled: str) -> None:
    theirs, kv, options, extra = model, "16", dict[str, Any](), dict[str, Any]()
    if other == "model":
        theirs = tiny("llama_q", seed=4)
    elif other == "format":
        kv = "8"
    elif other == "adapter":
        extra["adapter"] = "x"
    else:
        options["namespace"] = "tenant" if other == "tenant" else object()
    settings = RemoteSettings(filled, deadline=30.0, write="all")
    with onefold.PrefixCache(theirs, "64MB", kv=kv, remote=settings, **extra) as second:
        assert served(second, theirs, words(700), **options)[0] == 0
        assert second.flush(60)
        assert (reason(second, RemoteReason.NAMELESS) > 0) == (other == "no name")
    assert len(values(filled)) == (2 if other == "no name" else 4)


@pytest.mark.parametrize("theirs, ours", [(b"", SECRET), (SECRET, b""), (SECRET, SECRET + b"!")])
def test_nothing_is_shared_with_another_secret(
    theirs: bytes, ours: bytes, model: Any, url: str, cold: mx.array
) -> None:
    with machine(model, url, secret=theirs) as first:
        served(first, model, words(700))
        assert first.flush(60)
    with machine(model, url, secret=ours) as second:
        cached, found = served(second, model, words(700))
        assert cached == 0 and same(found, cold)
        assert second.flush(60)
    assert len(values(url)) == 4  # under addresses that those with another secret cannot compute


def test_a_forged_value_is_not_believed(model: Any, url: str, cold: mx.array) -> None:
    """Under the right address, sealed without the secret: by one who can write to the store, and has seen its names."""
    with machine(model, url, secret=SECRET) as first:
        served(first, model, words(700))
        assert first.flush(60)
        shared = first.parts.tier._shared  # type: ignore[union-attr]
        for path in values(url):
            address = bytes.fromhex(path.name)
            head, payload = shared.sealing.open(address, path.read_bytes(), {})
            path.write_bytes(Sealing().seal(address, head, [bytes(len(payload))]))
    with machine(model, url, secret=SECRET) as second:
        cached, found = served(second, model, words(700))
        assert cached == 0 and same(found, cold)
        assert reason(second, RemoteReason.SEAL) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap", "longer", "pipe"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_value_is_a_miss_from_there_on(
    damage: str, which: int, model: Any, filled: str, cold: mx.array
) -> None:
    first, second = values(filled)
    with machine(model, filled) as cache:
        root = cache.parts.tier._roots[cache.parts.tree("")]  # type: ignore[union-attr]
        addresses = list(cache.parts.tier._shared.addresses(root, mx.array(words(700))))  # type: ignore[union-attr]
    at, other = (first, second) if first.name == addresses[which].hex() else (second, first)
    content = bytearray(at.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    content = content[: {"cut": len(content) - 7, "empty": 0}.get(damage, len(content))]
    if damage == "pipe":  # which nobody writes to
        at.unlink()
        os.mkfifo(at)
    else:
        at.write_bytes(other.read_bytes() if damage == "swap" else bytes(content) + b"x" * (damage == "longer"))
    with machine(model, filled) as cache:
        cached, found = served(cache, model, words(700))
        assert cached == which * RECORD and same(found, cold)
        assert cache.stats().remote.rejected_records == 1
        assert cache.flush(60)
        assert cache.stats().bytes["disk_buffers"] == COPIES * RECORD * cache.stats().token_bytes
    with machine(model, filled) as cache:
        assert served(cache, model, words(700))[0] == 2 * RECORD  # it was removed, and written again



def test_a_store_that_is_emptied_is_a_miss(model: Any, url: str) -> None:
    tokens = words(20 * RECORD)
    with machine(model, url) as first:
        expected = served(first, model, tokens)[1]
        assert first.flush(60) and len(values(url)) == 20
    with machine(model, url) as cache:
        fetch = cache.restore(tokens)
        assert fetch is not None
        while not fetch._loading:  # type: ignore[attr-defined]
            assert fetch.step()  # asks, and learns what there is
        for path in values(url):
            path.unlink()
        while fetch.step():
            pass
        assert reason(cache, RemoteReason.GONE) == 1
        known = fetch.tokens
        cached, found = served(cache, model, tokens)
        assert cached == known <= AHEAD * RECORD and same(found, expected)
        assert cache.flush(60)
    assert len(values(url)) == 20 - known // RECORD


def test_a_fetch_in_steps_can_be_ended_early_or_dropped(model: Any, filled: str, cold: mx.array) -> None:
    with machine(model, filled) as cache:
        for end in ("finish", "drop", "clear", "close"):
            fetch = cache.restore(words(700))
            assert fetch is not None
            fetch.step()
            if end == "finish":
                fetch.finish()
                cache.check()
                cache.clear(disk=False)
            elif end == "drop":
                del fetch
                gc.collect()
                cache.stats()
                cache.check()
                cache.clear(disk=False)
            elif end == "clear":
                cache.clear(disk=False)
                while fetch.step():
                    pass
                cache.check()
                cache.clear(disk=False)
            else:
                cache.close()
                assert not fetch.step()


def test_pins_end_with_the_fetch_though_nodes_are_split_meanwhile(model: Any, filled: str) -> None:
    with machine(model, filled) as cache:
        served(cache, model, words(700)[:400])
        fetch = cache.restore([*words(700)[:300], *words(900, seed=1)])
        assert fetch is None or fetch.step() in (True, False)
        branch = [*words(700)[:280], *words(50, seed=2)]
        served(cache, model, branch)  # splits the node that the fetch has pinned
        while fetch is not None and fetch.step():
            pass
        served(cache, model, words(700))
        assert not any(node.pins for node in cache.state.nodes.nodes())


def test_a_payload_of_another_size_is_refused_and_removed(model: Any, filled: str, cold: mx.array) -> None:
    with machine(model, filled) as cache:
        shared = cache.parts.tier._shared  # type: ignore[union-attr]
        for path in values(filled):
            path.write_bytes(shared.sealing.seal(bytes.fromhex(path.name), shared.head("kv"), [bytes(1000)]))
        cached, found = served(cache, model, words(700))
        assert cached == 0 and same(found, cold) and reason(cache, RemoteReason.OTHER_LAYOUT) == 1


NOT_FINITE = {
    "F32": struct.pack("<f", float("nan")), "F16": struct.pack("<e", float("-inf")), "BF16": b"\x80\x7f",
    "U32": struct.pack("<e", float("inf")),  # the last half of a row: a scale
}  # fmt: skip


@pytest.mark.parametrize(
    ("kv", "made", "spoilt"),
    [
        ("16", mx.float32, "F32"),
        ("16", mx.float16, "F16"),
        ("16", mx.bfloat16, "BF16"),
        ("affine4", mx.float32, "F16"),
        ("4", mx.float32, "U32"),
        ("turbo3", mx.float16, "U32"),
    ],
)
@pytest.mark.parametrize("secret", [b"", SECRET])
def test_numbers_that_are_not_finite_are_refused_unless_a_secret_seals_them(
    kv: str, made: mx.Dtype, spoilt: str, secret: bytes, url: str
) -> None:
    model = tiny("llama_q", seed=3)
    model.set_dtype(made)
    with machine(model, url, kv=kv, secret=secret) as first:
        served(first, model, words(300))
        assert first.flush(60)
        shared = first.parts.tier._shared  # type: ignore[union-attr]
        (path,) = values(url)
        address, at = bytes.fromhex(path.name), 0
        head, payload = shared.sealing.open(address, path.read_bytes(), {})
        for tensor in host.range_tensors(shared.specs, shared.n_tokens):
            at += tensor.nbytes
            if tensor.dtype == spoilt:
                end = at
        number = NOT_FINITE[spoilt]
        spoiled = bytes(payload[: end - len(number)]) + number + bytes(payload[end:])
        path.write_bytes(shared.sealing.seal(address, head, [spoiled]))
    with machine(model, url, kv=kv, secret=secret) as second:
        assert served(second, model, words(300))[0] == (RECORD if secret else 0)
        assert reason(second, RemoteReason.NOT_FINITE) == second.stats().remote.rejected_records == (not secret)
        assert second.flush(60)
    with machine(model, url, kv=kv, secret=secret) as third:
        assert served(third, model, words(300))[0] == RECORD  # it was removed, and written again


class Trickling:
    """A server that answers each command a byte at a time, after it was asked to."""

    def __init__(self, port: int) -> None:
        self._to, self.slow = port, False
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._sock.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours = self._sock.accept()[0]
                try:
                    theirs = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    ours.close()
                    continue
                for a, b, back in ((ours, theirs, False), (theirs, ours, True)):
                    threading.Thread(target=self._pass, args=(a, b, back), daemon=True).start()

    def _pass(self, a: socket.socket, b: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(1 << 16):
                for i in range(0, len(data), 1):
                    if not (self.slow and back and len(data) > 1000):
                        b.sendall(data[i:])
                        break
                    b.sendall(data[i : i + 1])
                    time.sleep(0.1)
        a.close()
        b.close()

    def close(self) -> None:
        self._sock.close()


@pytest.mark.system("redis-server")
def test_a_store_that_trickles_holds_up_nobody(
    model: Any, tmp_path: Path, cold: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE", LONG)
    with redis_server(tmp_path) as server:
        with machine(model, server.url) as first:
            served(first, model, words(700))
            assert first.flush(60)
        between = Trickling(server.port)
        with machine(model, between.url, deadline=1.0) as cache:
            between.slow = True
            begun = time.monotonic()
            cached, found = served(cache, model, words(700))
            assert cached == 0 and same(found, cold) and reason(cache, RemoteReason.SLOW) == 1
            assert cache.restore(words(700, seed=1)) is None
            cache.clear(disk=False)
            cache.stats()
            assert time.monotonic() - begun < 40
            between.slow = False
            server.stop()  # ends what trickles
        between.close()


@pytest.mark.system("redis-server")
def test_a_full_store_is_still_read(model: Any, tmp_path: Path, cold: mx.array) -> None:
    with redis_server(tmp_path) as server:
        with machine(model, server.url) as first:
            served(first, model, words(700))
            assert first.flush(60)
        with machine(model, server.url) as second:
            client = second.parts.tier._shared.store._store._client  # type: ignore[union-attr]
            client.config_set("maxmemory", "1")
            served(second, model, words(700, seed=7))
            assert not second.flush(5) and reason(second, RemoteReason.FULL) >= 1
            cached, found = served(second, model, words(700))
            assert cached == 2 * RECORD and same(found, cold)


def test_a_prompt_that_is_not_there_is_asked_for_once(
    model: Any, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "MISSED_SECONDS", LONG)
    with machine(model, filled) as cache:
        fetch = cache.restore(words(700, seed=8))
        assert fetch is not None
        while fetch.step():
            pass
        assert cache.restore(words(700, seed=8)) is None


def test_a_prompt_without_room_for_what_is_there_is_a_miss(model: Any, filled: str) -> None:
    with machine(model, filled) as cache:
        cache.parts.tier._shared.read_pace.took(1e-9, 1)  # type: ignore[union-attr]
        least = cache.state.ledger.used_bytes + 64 * cache.stats().token_bytes
        cache.set_budget(least + 2_000_000)
        fetch = cache.restore(words(700), reserve_tokens=1_000_000)
        assert fetch is not None
        while fetch.step():
            pass
        assert fetch.tokens == 0 and reason(cache, RemoteReason.NO_ROOM) == 1
        cache.check()


def test_where_computing_is_quicker_nothing_is_read(model: Any, filled: str) -> None:
    with machine(model, filled) as cache:
        shared = cache.parts.tier._shared  # type: ignore[union-attr]
        shared.read_pace.took(100.0, 1)
        shared.prefill_pace = Pace()
        shared.prefill_pace.took(1e-9, 1_000_000)
        assert served(cache, model, words(700))[0] == 0
        assert reason(cache, RemoteReason.SLOWER) == 1 and cache.stats().remote.skipped_tokens == 2 * RECORD


def test_a_short_prompt_asks_nothing(model: Any, filled: str) -> None:
    with machine(model, filled) as cache:
        assert cache.restore(words(RECORD - 1)) is None
        assert cache.restore(words(asking.WORTH_ASKING)) is None
        assert cache.restore(words(RECORD)) is not None  # 255 of its tokens can be reused


@pytest.mark.system("redis-server")
def test_two_machines_that_write_the_same_prefix_at_once(model: Any, tmp_path: Path, cold: mx.array) -> None:
    found: list[mx.array] = []
    with redis_server(tmp_path) as server:
        caches = [machine(model, server.url) for _ in range(2)]
        for cache in caches:
            served(cache, model, words(700))
        flushed = [threading.Thread(target=cache.flush, args=(60,)) for cache in caches]
        for thread in flushed:
            thread.start()
        for thread in flushed:
            thread.join(60)
        assert sum(cache.stats().remote.records for cache in caches) == 2
        for cache in caches:
            cache.close()
        with machine(model, server.url) as third:
            cached, out = served(third, model, words(700))
            found.append(out)
            assert cached == 2 * RECORD
    assert same(found[0], cold)


@pytest.mark.system("redis-server")
def test_a_store_that_dies_is_a_miss_and_comes_back_by_itself(model: Any, tmp_path: Path, cold: mx.array) -> None:
    with redis_server(tmp_path) as server:
        port = server.port
        cache = machine(model, server.url)
        served(cache, model, words(700))
        assert cache.flush(60)
    cache.clear(disk=False)
    cached, found = served(cache, model, words(700))
    assert cached == 0 and same(found, cold)
    assert reason(cache, RemoteReason.UNREACHABLE) >= 1 and "cannot be reached" in cache.stats().remote.failed
    cache.clear(disk=False)
    with redis_server(tmp_path, port=port):
        deadline = time.monotonic() + 60
        while cache.stats().remote.failed:
            assert time.monotonic() < deadline
            fetch = cache.restore(words(700, seed=5))
            while fetch is not None and fetch.step():
                pass
            time.sleep(0.05)
        served(cache, model, words(700))
        assert cache.flush(60)
        cache.clear(disk=False)
        assert served(cache, model, words(700))[0] == 2 * RECORD
        cache.close()


def test_a_store_is_left_alone_longer_after_each_failure() -> None:
    now, reasons = [0.0], Counter[str]()
    store = health.Health("read", "redis://a", reasons, lambda: now[0])
    assert store.usable
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        store.failed(StoreError(RemoteReason.SLOW, "too slow"))
        now[0] += pause - 0.5
        assert not store.usable and store.fault == "too slow"
        now[0] += 0.5
        assert store.usable
    assert reasons == {RemoteReason.SLOW: 8}
    store.answered()
    assert store.usable and not store.fault
    store.failed(StoreError(RemoteReason.FULL, "full"))
    now[0] += 1
    assert store.usable


@pytest.fixture
def deaf() -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        yield f"redis://127.0.0.1:{found.getsockname()[1]}/0"


def test_a_store_that_never_answers_costs_one_deadline(
    model: Any, deaf: str, cold: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE", LONG)
    with machine(model, deaf, deadline=0.3) as cache:
        found = served(cache, model, words(700))[1]
        assert same(found, cold) and reason(cache, RemoteReason.SLOW) >= 1
        assert cache.restore(words(700, seed=1)) is None  # it is not asked again for a while
        assert not cache.flush(60)


def test_one_step_of_a_fetch_does_not_wait_for_a_slow_store(model: Any, deaf: str) -> None:
    with machine(model, deaf, deadline=20.0) as cache:
        fetch = cache.restore(words(700))
        assert fetch is not None
        begun = time.monotonic()
        assert fetch.step() and fetch.step()
        assert time.monotonic() - begun < 15
        fetch.finish()


def test_memory_while_fetching_is_the_entry_and_little_more(url: str) -> None:
    model = tiny("llama_q", seed=3)
    tokens = words(33 * RECORD)
    with machine(model, url, "1GB") as first:
        served(first, model, tokens)
        assert first.flush(60)
        entry = len(tokens) * first.stats().token_bytes
    with machine(model, url, "1GB") as second:
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        fetch = second.restore([*tokens, 1])
        assert fetch is not None
        while fetch.step():
            pass
        assert fetch.tokens == len(tokens)
        assert mx.get_peak_memory() - before <= 1.05 * entry * 9 / 8  # an eighth of a slab is room to grow


def test_a_cache_that_is_dropped_leaves_no_thread_and_no_memory(model: Any, filled: str) -> None:
    cache = machine(model, filled)
    served(cache, model, words(700))
    before = {t.name for t in threading.enumerate()}
    assert "onefold-remote" in before
    del cache
    gc.collect()
    deadline = time.monotonic() + 60
    while any(t.name.startswith("onefold-remote") for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_request_still_writes_to_is_written_when_it_ends(model: Any, url: str) -> None:
    with machine(model, url) as cache, cache.lease(words(700)) as lease:
        for at in range(0, 700, CHUNK):
            mx.eval(model(mx.array(words(700)[at : at + CHUNK])[None], cache=lease.layers))
        lease.commit(words(700), close=False)
        assert not cache.flush(0.1) and not values(url)
        lease.commit(words(700))
        assert cache.flush(60) and len(values(url)) == 2
        cache.check()


def test_paths_that_wait_for_their_requests_are_not_tried_all_the_time(
    model: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    with machine(model, url) as cache, contextlib.ExitStack() as stack:
        store = cache.parts.tier._shared.store  # type: ignore[union-attr]
        look = store.look

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            return look(*args, **options)

        monkeypatch.setattr(store, "look", counted)
        for seed in (0, 1):
            lease = stack.enter_context(cache.lease(words(300, seed)))
            mx.eval(model(mx.array(lease.rest)[None], cache=lease.layers))
            lease.commit(words(300, seed), close=False)
        assert not cache.flush(1.5) and not values(url)
        assert asked <= 20


def test_closing_writes_what_waits(model: Any, url: str) -> None:
    with machine(model, url) as cache:
        served(cache, model, words(700))
    assert len(values(url)) == 2


KINDS = [
    "llama_sliding", "gemma3", "gemma3n", "gpt_oss", "llama4", "qwen3_next", "falcon_h1", "nemotron_h", "mamba2",
    "deepseek_v32", "deepseek_v41", "longcat_flash_ngram",
]  # fmt: skip


@pytest.mark.parametrize("family", KINDS)
def test_every_kind_of_layer_is_resumed_at_an_edge_of_the_grid(family: str, url: str) -> None:
    """Windows, chunks, recurrent states, several kinds in a layer, a model's own class of cache."""
    ours, tokens = tiny(family, seed=3), words(700)
    with machine(ours, url) as first:
        n, expected = served(first, ours, tokens)
        assert n == 0 and first.flush(60)
        grid = first.parts.tier._shared.n_tokens  # type: ignore[union-attr]
        expected_more = served(first, ours, [*tokens, *words(300, seed=1)])[1]
        assert first.flush(60)
    last = 699 // grid * grid
    with machine(ours, url) as second:
        cached, found = served(second, ours, tokens)
        assert cached == last and same(found, expected, 1e-3), second.stats().reasons
        assert second.stats().tokens_from_remote == last
        second.clear(disk=False)
        cached, found = served(second, ours, [*tokens, *words(300, seed=1)])
        assert cached >= last and same(found, expected_more, 1e-3)
        second.clear(disk=False)
        assert served(second, ours, [*words(600), *words(100, seed=2)])[0] <= 600 // grid * grid
        second.check()
        assert second.stats().remote.rejected_records == 0


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"url": "redis://10.0.0.1/0"}, "not on this machine: give a secret"),
        ({"url": "s3://bucket/a"}, "not on this machine: give a secret"),
        ({"url": "redis://localhost/0", "secret": b"short"}, "at least 16"),
        ({"url": "redis://localhost/0", "deadline": 0}, "deadline"),
        ({"url": "http://localhost/0"}, "such as redis://"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(onefold.ConfigError, match=said):
        RemoteSettings(**settings)


def test_a_secret_is_never_shown() -> None:
    settings = RemoteSettings("redis://:word@10.0.0.1/0", secret=SECRET)
    assert "secret of" not in repr(settings)
    assert RemoteSettings("redis://10.0.0.1/0", insecure=True).insecure


# -- checkpoints -----------------------------------------------------------------------------------


HYBRID = "qwen3_next"


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return tiny(HYBRID, seed=3)


@pytest.fixture(scope="module")
def hybrid_cold(hybrid: Any) -> mx.array:
    with onefold.PrefixCache(hybrid, "64MB") as cache:
        return served(cache, hybrid, words(700))[1]


@pytest.fixture
def hybrid_store(hybrid: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with a conversation of 700 tokens, whose checkpoint is in several parts."""
    monkeypatch.setattr(tier, "PART_SHARE", 1 << 16)
    monkeypatch.setattr(tier, "LEAST_PART", (1 << 10) + 1)  # some end in the middle of a number
    with machine(hybrid, url) as first:
        served(first, hybrid, words(700))
        assert first.flush(60)
    assert len(by_kind(url)["part"]) > 2 and len(by_kind(url)["point"]) == 1
    return url


def by_kind(url: str) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {"kv": [], "point": [], "part": []}
    for path in values(url):
        head, _ = Sealing().open(bytes.fromhex(path.name), path.read_bytes(), {})
        found[head["kind"]].append(path)
    return found


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swap"])
@pytest.mark.parametrize("kind", ["point", "part", "kv"])
def test_a_damaged_checkpoint_is_a_miss_and_is_written_again(
    damage: str, kind: str, hybrid: Any, hybrid_store: str, hybrid_cold: mx.array
) -> None:
    at = by_kind(hybrid_store)[kind][-1]
    content = bytearray(at.read_bytes())
    if damage == "gone":
        at.unlink()
    elif damage == "swap":
        at.write_bytes(by_kind(hybrid_store)["part"][0].read_bytes() if kind != "part" else b"x" * len(content))
    else:
        content[len(content) // 2] ^= 1
        at.write_bytes(bytes(content[:-3] if damage == "cut" else content))
    with machine(hybrid, hybrid_store) as cache:
        for _ in range(3):  # what cannot be used is removed, then missing, then written again
            cache.clear(disk=False)
            cached, found = served(cache, hybrid, words(700))
            assert same(found, hybrid_cold, 1e-3) and cached in (0, 2 * EDGE)
            assert cache.flush(60)
            time.sleep(0.2)  # a removal is under way
            cache.parts.tier._shared.missed.forget(  # type: ignore[union-attr]
                list(cache.parts.tier._shared.missed._seen)  # type: ignore[union-attr]
            )
    with machine(hybrid, hybrid_store) as cache:
        assert served(cache, hybrid, words(700))[0] == 2 * EDGE
        assert not any(node.pins for node in cache.state.nodes.nodes())


def test_a_checkpoint_that_is_not_finite_is_a_miss_and_is_written_again(
    hybrid: Any, hybrid_store: str, hybrid_cold: mx.array
) -> None:
    kinds = by_kind(hybrid_store)
    paths, point = {p.name: p for p in kinds["part"]}, bytes.fromhex(kinds["point"][0].name)
    said = json.loads(bytes(Sealing().open(point, kinds["point"][0].read_bytes(), {})[1]))
    parts = [part_address(point, bytes.fromhex(said["nonce"]), i) for i in range(len(said["parts"]))]
    opened = [Sealing().open(part, paths[part.hex()].read_bytes(), {}) for part in parts]
    whole = bytearray(b"".join(payload for _, payload in opened))
    assert said["tensors"][-1][1] == "F32"
    at = (len(whole) - 1) // len(opened[0][1]) * len(opened[0][1]) // 4 * 4
    whole[at : at + 4] = NOT_FINITE["F32"]  # begins in one part, and ends in the next
    for part, (head, payload) in zip(parts, opened, strict=True):
        paths[part.hex()].write_bytes(Sealing().seal(part, head, [bytes(whole[: len(payload)])]))
        del whole[: len(payload)]
    with machine(hybrid, hybrid_store) as cache:
        cached, found = served(cache, hybrid, words(700))
        assert cached == 0 and same(found, hybrid_cold, 1e-3)
        assert reason(cache, RemoteReason.NOT_FINITE) == cache.stats().remote.rejected_records == 1
        deadline = time.monotonic() + 60
        while kinds["point"][0].exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_fetch_of_a_checkpoint_can_be_ended_at_every_step(hybrid: Any, hybrid_store: str) -> None:
    with machine(hybrid, hybrid_store) as cache:
        steps, ended = 0, False
        while not ended:
            fetch = cache.restore(words(700))
            assert fetch is not None
            ended = not all(fetch.step() for _ in range(steps))
            fetch.finish()
            assert fetch.tokens == (2 * EDGE if ended else 0)
            cache.clear(disk=False)
            cache.check()
            steps += 1
        assert steps > 3
        deadline = time.monotonic() + 60
        while cache.stats().bytes["checkpoint"] or cache.state.restores:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_checkpoint_without_room_is_a_miss(hybrid: Any, hybrid_store: str) -> None:
    with machine(hybrid, hybrid_store) as cache:
        share = cache.state.ledger.budget_bytes // POINTS_SHARE
        taken = cache.state.ledger.open(Purpose.CHECKPOINT, share, "checkpoints of other requests")
        fetch = cache.restore(words(700))
        assert fetch is not None
        while fetch.step():
            pass
        assert fetch.tokens == 0 and reason(cache, RemoteReason.NO_ROOM) == 1
        taken.close()
        cache.check()


def test_an_answer_leaves_a_checkpoint_at_the_last_edge_it_passed(hybrid: Any, url: str) -> None:
    prompt = words(300)
    with machine(hybrid, url) as first, first.lease(prompt) as lease:
        answer: list[int] = []
        out = hybrid(mx.array(prompt[:256])[None], cache=lease.layers)
        out = hybrid(mx.array(prompt[256:])[None], cache=lease.layers)
        for _ in range(600):
            answer.append(int(mx.argmax(out[0, -1])))
            out = hybrid(mx.array(answer[-1:])[None], cache=lease.layers)
        said = [*prompt, *answer]
        assert {256, 768} <= {c.position for c in lease.hold.taken} and 512 not in {
            c.position for c in lease.hold.taken
        }
        lease.commit(said)
        assert first.flush(60)
    with machine(hybrid, url) as second:
        assert served(second, hybrid, [*said, 1, 2, 3])[0] == 768


@pytest.mark.parametrize("family", ["llama_q", "llama_sliding"])
def test_conversations_with_a_bound_are_shared_too(family: str, url: str) -> None:
    model, tokens = tiny(family, seed=3), words(700)
    bound = {"max_kv_size": 1024, "keep": 16}
    expected = []
    for n in (700, 1500, 1600):
        with onefold.PrefixCache(model, "64MB", **bound) as cache:  # type: ignore[arg-type]
            expected.append(served(cache, model, words(n))[1])
    with machine(model, url, extra=bound) as first:
        served(first, model, words(1500))
        served(first, model, tokens)
        assert first.flush(60)
    for n, logits in zip((700, 1500, 1600), expected, strict=True):
        with machine(model, url, extra=bound) as second:
            cached, found = served(second, model, words(n))
            assert same(found, logits, 1e-3) and cached >= 2 * RECORD, (n, cached)
    with machine(model, url) as other:
        assert served(other, model, tokens)[0] == 0  # another bound, other KV


def test_memory_while_fetching_a_checkpoint_is_the_entry_and_little_more(url: str) -> None:
    model = tiny(HYBRID, seed=3)
    tokens = words(2048)
    with machine(model, url, "1GB") as first:
        served(first, model, tokens)
        assert first.flush(60)
    with machine(model, url, "1GB") as second:
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        fetch = second.restore([*tokens, 1])
        assert fetch is not None
        while fetch.step():
            pass
        entry = second.stats().bytes["stored"] + second.stats().bytes["checkpoint"]
        assert fetch.tokens == len(tokens)
        assert mx.get_peak_memory() - before <= 1.05 * entry * 9 / 8


# -- what is written, and when ---------------------------------------------------------------------


def test_only_what_is_shared_is_written_at_once(model: Any, url: str) -> None:
    with machine(model, url, write="shared", delay=LONG / 100) as cache:
        served(cache, model, words(700))
        assert not cache.stats().remote.pending and not values(url)
        served(cache, model, [*words(600), *words(300, seed=1)])  # shares 600 tokens with the first
        deadline = time.monotonic() + 60
        while cache.stats().remote.pending or not values(url):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(values(url)) == 600 // RECORD
        assert cache.flush(60) and len(values(url)) == 600 // RECORD + 1  # and the end of the second one
    assert len(values(url)) == 3


def test_the_end_of_a_turn_is_written_after_a_while_and_one_that_is_continued_is_not(model: Any, url: str) -> None:
    with machine(model, url, write="shared", delay=100.0) as cache:
        writer, now = cache.parts.tier._writer, [0.0]  # type: ignore[union-attr]
        writer._clock = lambda: now[0]
        served(cache, model, words(300))
        now[0] = 90.0
        served(cache, model, [*words(300), *words(300, seed=1)])
        assert len(writer._due) == 1
        now[0] = 110.0
        assert not cache.stats().remote.pending
        now[0] = 191.0
        assert cache.stats().remote.pending
        deadline = time.monotonic() + 60
        while cache.stats().remote.pending:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(values(url)) == 2


def test_a_machine_that_only_reads_writes_nothing(model: Any, filled: str) -> None:
    with machine(model, filled, write="none") as cache:
        assert served(cache, model, words(700))[0] == 2 * RECORD
        served(cache, model, words(700, seed=1))
        assert cache.flush(1) and "onefold-remote" not in {t.name for t in threading.enumerate()}
    assert len(values(filled)) == 2


# -- the disk and a store --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama_q", HYBRID])
def test_the_disk_is_read_first_and_then_the_store(family: str, url: str, tmp_path: Path) -> None:
    model, tokens = tiny(family, seed=3), words(700)
    last = 4 * (RECORD if family == "llama_q" else EDGE)
    with machine(model, url) as first:
        longer = served(first, model, [*tokens, *words(400, seed=1)])[1]
        assert first.flush(60)
    disk = {"disk": tmp_path / "disk", "disk_mode": "through"}
    with machine(model, url, extra=disk, write="none") as second:
        served(second, model, tokens)
        assert second.flush(60)
        assert second.stats().disk.mode == "through" and second.stats().remote.mode == "remote"
    with machine(model, url, extra=disk) as third:
        cached, found = served(third, model, [*tokens, *words(400, seed=1)])
        stats = third.stats()
        assert same(found, longer, 1e-3) and cached == last, stats.reasons
        assert (stats.tokens_from_disk, stats.tokens_from_remote) == (700, last - 700)
        third.check()
        third.clear(disk=False)
        assert third.flush(60, everything=True)
    with machine(model, url, extra=disk) as fourth:  # what came from the store is on this machine's disk now
        assert served(fourth, model, [*tokens, *words(400, seed=1)])[0] >= last
        assert fourth.stats().tokens_from_remote == 0
        fourth.clear()
    assert values(url)  # it is others', too


def unwritable(path: Any) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_a_disk_or_a_store_that_cannot_be_used_leaves_the_other(
    model: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "make", unwritable)
    with machine(model, url, extra={"disk": tmp_path / "locked"}) as cache:
        assert cache.stats().disk.failed and not cache.stats().remote.failed
        served(cache, model, words(700))
        assert cache.flush(60)
    assert len(values(url)) == 2
    monkeypatch.undo()
    with machine(model, f"redis://127.0.0.1:{free_port()}/0", extra={"disk": tmp_path / "disk"}) as cache:
        served(cache, model, words(700))
        assert cache.stats().remote.failed and not cache.stats().disk.failed
    with machine(model, url, extra={"disk": tmp_path / "disk"}) as cache:
        assert served(cache, model, words(700))[0] == 699 and cache.stats().tokens_from_disk == 699


# -- whether it pays -------------------------------------------------------------------------------


def test_how_quick_the_store_is_survives_a_restart(model: Any, filled: str, tmp_path: Path) -> None:
    paces = tmp_path / "deeper" / "paces.json"
    settings = RemoteSettings(filled, deadline=30.0, write="none", paces=paces)
    with onefold.PrefixCache(model, "64MB", remote=settings, label="a") as cache:
        shared = cache.parts.tier._shared  # type: ignore[union-attr]
        shared.read_pace.took(100.0, 1)
        shared.prefill_pace.took(1e-9, 1_000_000)
    for label, skipped in (("a", 2 * RECORD), ("b", 0)):
        with onefold.PrefixCache(model, "64MB", remote=settings, label=label) as cache:
            fetch = cache.restore(words(700))
            while fetch is not None and fetch.step():
                pass
            assert cache.stats().remote.skipped_tokens == skipped
    paces.write_text("[1")
    with onefold.PrefixCache(model, "64MB", remote=settings, label="a") as cache:
        assert cache.restore(words(700)) is not None


def test_two_threads_fetch_the_same_prompt_once(model: Any, url: str) -> None:
    tokens = words(8 * RECORD)
    with machine(model, url) as first:
        served(first, model, tokens)
        assert first.flush(60)
    with machine(model, url) as cache:
        store, reads = cache.parts.tier._shared.store, []  # type: ignore[union-attr]
        get = store.get

        def slowly(name: str) -> bytes | None:
            reads.append(name)
            time.sleep(0.05)
            found: bytes | None = get(name)
            return found

        store.get = slowly  # type: ignore[method-assign]
        fetched: list[int] = []

        def lease() -> None:
            with cache.lease([*tokens, 1]):
                fetched.append(1)

        threads = [threading.Thread(target=lease) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(fetched) == 3 and len(reads) == 8
        assert cache.stats().remote.restored_tokens == 8 * RECORD


def slowed(cache: onefold.PrefixCache, seconds: float) -> list[str]:
    """From now on each value takes so long to read. Returns the names of those that are read."""
    store, reads = cache.parts.tier._shared.store, []  # type: ignore[union-attr]
    get = store.get

    def slowly(name: str) -> bytes | None:
        reads.append(name)
        time.sleep(seconds)
        found: bytes | None = get(name)
        return found

    store.get = slowly  # type: ignore[method-assign]
    return reads


def test_a_store_that_has_become_slow_is_left_after_a_value(model: Any, url: str) -> None:
    tokens = words(12 * RECORD)
    with machine(model, url, "128MB") as first:
        served(first, model, tokens)
        assert first.flush(60)
    with machine(model, url, "128MB") as cache:
        shared = cache.parts.tier._shared  # type: ignore[union-attr]
        shared.prefill_pace = Pace()
        shared.prefill_pace.took(0.1, len(tokens))
        reads = slowed(cache, 0.2)
        fetch = cache.restore([*tokens, 1])
        while fetch is not None and fetch.step():
            pass
        assert fetch is not None and len(reads) <= 2 * AHEAD and reason(cache, RemoteReason.SLOWER) == 1
        assert RECORD <= fetch.tokens <= 6 * RECORD  # what was read and right is kept
        assert cache.stats().remote.skipped_tokens == len(tokens) - fetch.tokens
        assert not shared.health.fault
        cache.check()


def test_a_fetch_is_left_when_the_rest_takes_longer_than_computing() -> None:
    now, computing = [0.0], Pace()
    computing.took(10.0, 1000)
    patience = Patience(computing, 1.0, 1000, 100, lambda: now[0])
    assert not patience.is_slower(1000, 30)
    now[0] = 3.0
    patience.took(10)  # the first of three that come at the same time: 10 bytes a second
    assert not patience.is_slower(900, 20)
    assert patience.is_slower(600, 20) and patience.is_slower(900, 0)
    assert not patience.is_over
    now[0] = 11.1
    assert patience.is_over
    unknown = Patience(Pace(), 1.0, 1000, 100, lambda: now[0])
    unknown.took(1)
    now[0] += 3.9
    assert not unknown.is_slower(1, 0) and not unknown.is_over
    now[0] += 0.2
    assert unknown.is_over


def test_a_fetch_takes_no_longer_than_computing_and_a_deadline(model: Any, url: str) -> None:
    tokens = words(8 * RECORD)
    with machine(model, url) as first:
        served(first, model, tokens)
        assert first.flush(60)
    with machine(model, url, deadline=0.5) as cache:
        shared = cache.parts.tier._shared  # type: ignore[union-attr]
        shared.prefill_pace = Pace()
        shared.prefill_pace.took(0.1, len(tokens))
        busy = threading.Event()
        for _ in range(tier.THREADS + 1):  # with other prompts
            shared.threads.submit(busy.wait, LONG)
        fetch = cache.restore([*tokens, 1])
        assert fetch is not None
        assert fetch.step(0.0) and fetch.waits
        while fetch.step():
            pass
        assert fetch.tokens == 0 and not fetch.waits and reason(cache, RemoteReason.SLOW) == 1
        busy.set()


def test_a_thread_reads_the_disk_while_another_fetches_from_the_store(url: str, tmp_path: Path, model: Any) -> None:
    here, there = words(700), words(6 * RECORD, seed=1)
    with machine(model, url) as first:
        served(first, model, there)
        assert first.flush(60)
    disk = {"disk": tmp_path / "disk", "disk_mode": "through"}
    with machine(model, url, extra=disk, write="none") as second:
        served(second, model, here)
        assert second.flush(60)
    with machine(model, url, extra=disk) as third:
        remote = third.parts.tier.remote  # type: ignore[union-attr]
        begun, go = threading.Event(), threading.Event()
        get = remote._shared.store.get

        def held_up(name: str) -> bytes | None:
            begun.set()
            go.wait(60)
            found: bytes | None = get(name)
            return found

        remote._shared.store.get = held_up
        fetched: list[int] = []

        def lease() -> None:
            with third.lease([*there, 1]) as lease:
                fetched.append(lease.cached)

        thread = threading.Thread(target=lease)
        thread.start()
        assert begun.wait(60)
        with third.lease([*here, 1]) as lease_here:
            assert lease_here.cached == 700
        go.set()
        thread.join(60)
        assert fetched == [6 * RECORD]


def test_machines_that_write_one_checkpoint_leave_the_parts_of_one(
    hybrid: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "PART_SHARE", 1 << 16)
    monkeypatch.setattr(tier, "LEAST_PART", 1 << 10)
    caches = [machine(hybrid, url, write="shared", delay=3600.0) for _ in range(3)]
    looked = threading.Barrier(3)
    for cache in caches:
        served(cache, hybrid, words(700))
        store = cache.parts.tier._shared.store  # type: ignore[union-attr]
        look = store.look

        def together(names: Any, points: Any = (), *, patient: bool = False, look: Any = look) -> Any:
            found = look(names, points, patient=patient)
            if patient and len(names) == 1:  # of the checkpoint
                looked.wait(60)
            return found

        store.look = together  # type: ignore[method-assign]
    threads = [threading.Thread(target=cache.flush, args=(60,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    for cache in caches:
        cache.close()
    kinds = by_kind(url)
    assert len(kinds["point"]) == 1
    _, payload = Sealing().open(bytes.fromhex(kinds["point"][0].name), kinds["point"][0].read_bytes(), {})
    assert len(kinds["part"]) == len(json.loads(bytes(payload))["parts"]) > 2
    with machine(hybrid, url) as cache:
        assert served(cache, hybrid, words(700))[0] == 2 * EDGE


def test_a_checkpoint_that_is_tried_again_has_the_same_parts(
    hybrid: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "PART_SHARE", 1 << 16)
    monkeypatch.setattr(tier, "LEAST_PART", 1 << 10)
    monkeypatch.setattr(health, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(health, "LONGEST_PAUSE", 0.01)
    with machine(hybrid, url) as cache:
        store = cache.parts.tier._shared.store  # type: ignore[union-attr]
        add, tries = store.add, []

        def failing(name: str, value: bytes) -> bool:
            tries.append(name)
            if len(tries) % 3 == 0:
                raise StoreError(RemoteReason.UNREACHABLE, "cannot be reached")
            return bool(add(name, value))

        store.add = failing  # type: ignore[method-assign]
        served(cache, hybrid, words(700))
        deadline = time.monotonic() + 60
        while not cache.flush(1):
            assert time.monotonic() < deadline
    kinds = by_kind(url)
    _, payload = Sealing().open(bytes.fromhex(kinds["point"][0].name), kinds["point"][0].read_bytes(), {})
    assert len(kinds["part"]) == len(json.loads(bytes(payload))["parts"]) > 2
    assert len(tries) > len(set(tries)) == len(kinds["kv"]) + len(kinds["part"]) + len(kinds["point"]) + 1  # about


def test_a_store_that_has_lost_everything_is_described_again(model: Any, url: str) -> None:
    folder = Path(url.removeprefix("file://"))
    with machine(model, url) as cache:
        served(cache, model, words(300))
        assert cache.flush(60) and len([p for p in folder.rglob(ABOUT) if p.is_file()]) == 1
        for path in [p for p in folder.rglob("*") if p.is_file()]:
            path.unlink()
        served(cache, model, words(300, seed=1))
        assert cache.flush(60)
    assert len([p for p in folder.rglob(ABOUT) if p.is_file()]) == 1 == len(values(url))


def test_a_manifest_of_huge_numbers_is_refused_at_once() -> None:
    digits = "9" * 4000
    for shape in (f"[{digits}]", "[" + ",".join(["2"] * 1000) + "]", "[-1]"):
        text = f'{{"tensors": [["a", "F16", {shape}]], "parted": false, "position": 1, "state": "", "parts": [1]}}'
        with pytest.raises(RecordError, match="layout"):
            read_manifest(memoryview(text.encode()), 1, Layout(None, ()))
    with pytest.raises(RecordError, match="large"):
        read_manifest(memoryview(b" " * (MANIFEST_MOST + 1)), 1, Layout(None, ()))


def test_what_may_have_expired_is_looked_for_again(model: Any, url: str) -> None:
    with machine(model, url, ttl=1) as cache:
        served(cache, model, words(700))
        assert cache.flush(60) and len(values(url)) == 2
        for path in values(url):
            path.unlink()
        time.sleep(0.6)
        served(cache, model, [*words(700), *words(300, seed=1)])
        assert cache.flush(60)
    assert len(values(url)) == 4


def test_machines_share_a_bucket_though_their_clocks_differ(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, now = words(700), time.time
    with bucket_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/kv"
        with machine(model, url, secret=SECRET) as first:
            expected = served(first, model, tokens)[1]
            assert first.flush(60)
        monkeypatch.setattr(time, "time", lambda: now() + 24 * 3600)
        with machine(model, url, secret=SECRET) as second:
            cached, found = served(second, model, tokens)
            assert cached == 2 * RECORD and same(found, expected)
            served(second, model, [*tokens, *words(300, seed=2)])
            assert second.flush(60)
        monkeypatch.setattr(time, "time", lambda: now() - 24 * 3600)
        with machine(model, url, secret=SECRET) as third:
            assert served(third, model, [*tokens, *words(300, seed=2)])[0] == 4 * RECORD
