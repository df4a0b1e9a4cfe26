"""The figures of a store that machines share: what a second server saves, what goes over the wire, what writing costs.

    make bench-remote     # or: python benchmarks/remote.py [--only turn,restore,decode] [--repeats 5] [--url URL]

On the demo model, and a conversation of 4096 tokens, with a real `redis-server` on loopback, or the store of `--url`.
Each machine is a process of its own, and what is compared runs in turn. KV that is only written or read, never computed
with, is random numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import process_memory
from disk import Row, show
from disk_parts import BUDGET, DECODING, TURN, conversation, demo, drop_from_file_cache, first_token, kv_of, speed
from disk_parts import opened as with_disk
from disk_parts import records as files_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from redis_server import redis_server

from onefold.cache.tiers.remote.fetching import AHEAD
from onefold.cache.tiers.remote.grid import PREFIX, VALUE_BYTES
from onefold.cache.tiers.remote.stores.registry import address_of, open_store
from onefold.cache.tiers.remote.stores.store import Store, StoreSettings
from onefold.cache.tiers.remote.tier import RemoteSettings
from onefold.sizes import show_size

DEADLINE = 30.0


class Settings(NamedTuple):
    url: str
    folder: str
    tokens: int
    repeats: int
    secret: str = ""


def settings_of(given: Settings, write: str) -> RemoteSettings:
    return RemoteSettings(given.url, given.secret.encode(), insecure=True, deadline=DEADLINE, write=write)


def opened(model: Any, given: Settings, write: str = "all") -> onefold.PrefixCache:
    return onefold.PrefixCache(model, BUDGET, remote=settings_of(given, write))


def written(cache: onefold.PrefixCache) -> None:
    """Wait until everything is in the store. Raises RuntimeError if it is not."""
    if not cache.flush(120):
        raise RuntimeError(f"flush: {cache.stats().remote}")


def store_of(given: Settings) -> Store:
    return open_store(StoreSettings(address_of(given.url), DEADLINE, 3600))


def wire(given: Settings) -> tuple[int, int]:
    """Returns how many bytes a Redis server has received and sent; zeros for another store."""
    if not given.url.startswith("redis"):
        return 0, 0
    import redis

    found: Any = redis.Redis.from_url(given.url).info("stats")
    return int(found["total_net_input_bytes"]), int(found["total_net_output_bytes"])


# -- parts: each in a process of its own -------------------------------------------------------------------


def part_first(given: Settings) -> dict[str, Any]:
    """The first server computes a conversation, and writes it to the store; then a copy to its disk."""
    model, history = demo(), conversation(given.tokens, 0)
    with opened(model, given) as cache:
        before = wire(given)
        cold, _ = first_token(model, cache, [*history, *conversation(TURN, 1)], keep=len(history))
        written(cache)
        sent, token_bytes = wire(given)[0] - before[0], cache.inventory.token_bytes
        stats = cache.stats()
        again, _ = first_token(model, cache, [*history, *conversation(TURN, 2)])
    with with_disk(model, Path(given.folder) / "disk") as cache:
        cache.inventory.adopt(history, kv_of(model, given.tokens, 0))
        if not cache.flush(120):
            raise RuntimeError(f"flush: {cache.stats().disk}")
    return {"cold": cold, "warm": again, "sent": sent, "kv": stats.remote.spilled_tokens * token_bytes}


def part_second(given: Settings) -> dict[str, Any]:
    """The next turn on a second server, which has nothing but the store."""
    model, history = demo(), conversation(given.tokens, 0)
    with opened(model, given, "none") as cache:
        before = wire(given)
        seconds, lease = first_token(model, cache, [*history, *conversation(TURN, given.repeats)])
        kv = lease.hold.from_remote * cache.inventory.token_bytes
        if lease.hold.from_remote < len(history) - 256:
            raise RuntimeError(f"{lease.hold.from_remote} tokens came from the store: {cache.stats().reasons}")
        return {"seconds": seconds, "received": wire(given)[1] - before[1], "kv": kv, "tokens": lease.hold.from_remote}


def part_disk(given: Settings) -> dict[str, Any]:
    """The next turn after a restart, from the local disk."""
    model, history, folder = demo(), conversation(given.tokens, 0), Path(given.folder) / "disk"
    drop_from_file_cache(files_of(folder))
    with with_disk(model, folder, "back") as cache:
        seconds, lease = first_token(model, cache, [*history, *conversation(TURN, given.repeats)])
        return {"seconds": seconds, "tokens": lease.restored}


def part_restore(given: Settings) -> dict[str, Any]:
    """Fetching the conversation, and plain GETs of the same values, in turn."""
    model, tokens, store = demo(), conversation(given.tokens, 7), store_of(given)
    found = dict[str, Any](restore=[], plain=[], one=[])
    with opened(model, given) as cache:
        before = {held.name for held in store.names(PREFIX)}
        cache.inventory.adopt(tokens, kv_of(model, given.tokens, 7))
        written(cache)
        names = sorted({held.name for held in store.names(PREFIX)} - before)
    with opened(model, given, "none") as cache:
        for _ in range(given.repeats + 1):
            mx.clear_cache()
            process_memory.forget_most()
            mx.reset_peak_memory()
            active, began = mx.get_active_memory(), time.perf_counter()
            restore = cache.restore([*tokens, 1])
            while restore is not None and restore.step():
                pass
            found["restore"].append(time.perf_counter() - began)
            if restore is None or restore.tokens < len(tokens) - 256:
                raise RuntimeError(f"{0 if restore is None else restore.tokens} tokens came: {cache.stats().reasons}")
            found["peak"], found["entry"] = mx.get_peak_memory() - active, mx.get_active_memory() - active
            found["bytes"] = restore.tokens * cache.inventory.token_bytes
            del restore
            cache.clear(disk=False)
            found["plain"].append(read_all(store, names, AHEAD))
            found["one"].append(read_all(store, names, 1))
    return found


def read_all(store: Store, names: list[str], threads: int) -> float:
    """Returns the seconds that so many threads take to read these values into memory, each on a connection of its
    own."""
    values: list[bytes | None] = []

    def read(begin: int) -> None:
        for name in names[begin::threads]:
            values.append(store.get(name))

    running = [threading.Thread(target=read, args=(i,)) for i in range(threads)]
    began = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return time.perf_counter() - began


def part_decode(given: Settings) -> dict[str, Any]:
    """Greedy decode while another conversation is written, and just before and after that, while nothing is."""
    model = demo()
    found: dict[str, Any] = {name: {"ratios": [], "bytes": [], "writing": 0} for name in DECODING}
    with opened(model, given) as cache, cache.lease(conversation(64, 5), reserve_tokens=4096) as lease:
        layers = lease.layers
        mx.eval(model(mx.array([lease.rest.tolist()]), cache=layers))
        speed(model, layers, 8)
        for i in range(2 * given.repeats):
            for name, (tokens, n) in DECODING.items():
                other, kv = conversation(tokens, 100 + i), kv_of(model, tokens, i)
                before = speed(model, layers, n)
                written_before = cache.stats().remote.written_bytes
                cache.inventory.adopt(other, kv)
                del kv
                writing = speed(model, layers, n)
                remote = cache.stats().remote
                found[name]["bytes"].append(remote.written_bytes - written_before)
                found[name]["writing"] += remote.pending
                written(cache)
                found[name]["ratios"].append(2 * writing / (before + speed(model, layers, n)))
                cache.inventory.forget(other, 0)
        lease.cancel()
    return found


PARTS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "first": part_first, "second": part_second, "disk": part_disk, "restore": part_restore, "decode": part_decode
}  # fmt: skip


def in_a_process(part: str, given: Settings) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", part, "--url", given.url, "--folder", given.folder]
    command += ["--secret", given.secret] if given.secret else []
    ran = subprocess.run(
        [*command, "--tokens", str(given.tokens), "--repeats", str(given.repeats)], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


# -- figures -----------------------------------------------------------------------------------------------


def bench_turn(given: Settings) -> Iterator[Row]:
    made = in_a_process("first", given)
    second, disk = [], []
    for i in range(given.repeats):
        second.append(in_a_process("second", given._replace(repeats=10 + i)))
        disk.append(in_a_process("disk", given._replace(repeats=10 + i)))
    ours, local = (statistics.median(run["seconds"] for run in runs) for runs in (second, disk))
    note = f"{ours:.2f} s; cold {made['cold']:.1f} s, in memory of the first {made['warm']:.2f} s; "
    note += f"{second[0]['tokens']} tokens from the store"
    yield Row("first token on a second server / cold prefill", f"{ours / made['cold']:.3f}", note=note)
    yield Row("the same / after a restart, from the local disk", f"{ours / local:.2f}", note=f"{local:.2f} s")
    if made["sent"]:
        for what, n_bytes, kv in (
            ("written", made["sent"], made["kv"]),
            ("read", max(run["received"] for run in second), second[0]["kv"]),
        ):
            ratio = n_bytes / kv
            note = f"{show_size(n_bytes)} of {show_size(kv)}, as the server counts them"
            yield Row(f"bytes on the wire / bytes of KV, {what}", f"{ratio:.4f}", "≤ 1.02", ratio <= 1.02, note)


def bench_restore(given: Settings) -> Iterator[Row]:
    found = in_a_process("restore", given)
    sealed = in_a_process("restore", given._replace(secret="a secret for this benchmark alone"))
    for run, name, what, target in (
        (found, "plain", f"plain GETs on {AHEAD} connections", True),
        (found, "one", "plain GETs on one connection", True),
        (sealed, "one", "the same, sealed with a secret", False),
    ):
        ours, theirs = (run[which][1:] for which in ("restore", name))  # the first ones warm up
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ratios)
        rates = [run["bytes"] / statistics.median(x) / 1e9 for x in (ours, theirs)]
        note = f"{rates[0]:.2f} GB/s and {rates[1]:.2f} GB/s; each: " + " ".join(f"{r:.2f}" for r in ratios)
        if not target:
            note += f"; SHA-256 on one core: {sha256_rate() / 1e9:.2f} GB/s"
        yield Row(f"restore bandwidth / {what}", f"{ratio:.2f}", "≥ 0.70", ratio >= 0.7, note)
    peak = found["peak"] / found["entry"]
    note = f"{show_size(found['peak'])} of {show_size(found['entry'])}"
    yield Row("peak memory of a restore / the entry", f"{peak:.3f}", "≤ 1.05", peak <= 1.05, note)


def sha256_rate() -> float:
    """Returns how many bytes a second this machine hashes."""
    data, began = bytes(VALUE_BYTES), time.perf_counter()
    for _ in range(8):
        hashlib.sha256(data).digest()
    return 8 * len(data) / (time.perf_counter() - began)


def bench_decode(given: Settings) -> Iterator[Row]:
    measured = in_a_process("decode", given)
    for name, what in (("turn", "while a 512-token turn is written"), ("busy", "while 4096 tokens are written")):
        found, (_, n) = measured[name], DECODING[name]
        ratio, spread = statistics.median(found["ratios"]), sorted(found["ratios"])
        note = f"{show_size(int(statistics.median(found['bytes'])))} written during {n} tokens; "
        note += f"{spread[0]:.2f} to {spread[-1]:.2f}; {found['writing']} of {len(spread)} still writing at the end"
        yield Row(f"decode {what} / without", f"{ratio:.3f}", "≥ 0.97", ratio >= 0.97, note)


BENCHES = {"turn": bench_turn, "restore": bench_restore, "decode": bench_decode}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"comma-separated: {','.join(BENCHES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--url", help="a store to use in place of a redis-server on loopback; what is written stays")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--secret", default="", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](Settings(args.url, args.folder, args.tokens, args.repeats, args.secret))))
        return 0
    title = f"Onefold {onefold.__version__}, MLX {version('mlx')}, {mx.default_device()}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = args.url or stack.enter_context(redis_server(Path(folder), "--io-threads", "2")).url
        given = Settings(url, folder, args.tokens, args.repeats)
        return show(title, {name: partial(bench, given) for name, bench in BENCHES.items()}, args.only)


if __name__ == "__main__":
    raise SystemExit(main())
