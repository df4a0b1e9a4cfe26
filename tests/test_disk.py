"""Conversations survive a restart: for every kind of layer, in both modes, and what comes back equals a stock run.

A restart here is a cache that is closed, and a new one on the same folder with the same weights. `fake.Session`
compares every call's logits and every layer's tokens with a stock run beside it.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from disk_caches import MODES, disk_bytes, files, flip, opened, small_records, turn
from effort import quick
from fake import FakeModel, Session, assert_holds, settled, text
from test_scenarios_fake import CASES, Case
from tiny import tiny

from onefold import ConfigError, PrefixCache
from onefold.cache.memory import arrays
from onefold.cache.model import fingerprint
from onefold.cache.tiers import host, registry
from onefold.cache.tiers.disk.tier import DiskSettings, DiskStats
from onefold.cache.tiers.pace import Pace
from onefold.cache.tiers.records import system
from onefold.cache.tiers.records.entry import on_disk
from onefold.errors import FolderInUse
from onefold.sizes import show_size


def model_of(case: Case) -> FakeModel:
    options = {k: v for k, v in case.options.items() if k in ("dim", "advances")}
    return FakeModel(case.kinds, **options)


def kv(case: Case) -> dict[str, Any]:
    return {"kv": case.kv}


WAYS = list(itertools.product(MODES, [True, False]))


@pytest.mark.parametrize(
    "way",
    quick(WAYS, ("back", True), ("through", False)),
    ids=[f"{mode}-{'in place' if direct else 'by operations'}" for mode, direct in WAYS],
)
@pytest.mark.parametrize("name", CASES)
def test_a_conversation_goes_on_after_a_restart(
    name: str, way: tuple[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both ways that bytes have into memory and out of it, whichever this machine takes."""
    mode, direct = way
    monkeypatch.setattr(arrays, "addressable", lambda: direct)
    case = CASES[name]
    model = model_of(case)
    prompt = text(90)
    with opened(model, tmp_path, disk_mode=mode, **kv(case)) as cache:
        first = Session(model, cache, prompt, kv=case.kv).prefill().decode(6).commit()
        if mode == "through":
            assert cache.flush(30)
            assert cache.durable(first) == len(first)
    with opened(model, tmp_path, disk_mode=mode, **kv(case)) as cache:
        again = Session(model, cache, [*first, *text(20, 1)], kv=case.kv)
        assert again.cached == len(first), again.lease.reason
        assert again.lease.restored == again.cached
        again.prefill().decode(4).commit()
        stats = cache.stats()
        assert stats.tokens_from_disk == len(first) == stats.disk.restored_tokens
        assert stats.disk.rejected_records == 0
        settled(cache)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(("full", "full"))


HYBRID = ("full", "recurrent", "rotating")


@pytest.mark.parametrize("kinds", [("full", "full"), HYBRID, ("recurrent",)], ids=["full", "hybrid", "recurrent"])
@pytest.mark.parametrize("mode", quick(MODES, "back"))
def test_what_made_way_in_memory_comes_back_from_disk(kinds: tuple[str, ...], mode: str, tmp_path: Path) -> None:
    """Twenty conversations under a budget that has room for a few; each goes on where it was."""
    model = FakeModel(kinds, dim=64)
    with opened(model, tmp_path, budget="3MB", disk_mode=mode) as cache:
        said = [turn(model, cache, [i, *text(120, i)]) for i in range(20)]
        assert cache.stats().evicted_tokens > 0 or kinds == ("recurrent",)
        assert cache.stats().discarded_tokens == 0
        for i, tokens in enumerate(said):
            again = Session(model, cache, [*tokens, *text(9, 100 + i)])
            assert again.cached == len(tokens), (i, again.lease.reason)
            again.prefill().decode(2).commit()
        stats = cache.stats()
        assert stats.disk.restored_tokens == stats.tokens_from_disk
        assert stats.tokens_from_disk > 0 or kinds == ("recurrent",)
        assert stats.tokens_cached == sum(len(t) for t in said)
        settled(cache)


def test_what_conversations_share_is_on_disk_once(model: FakeModel, tmp_path: Path) -> None:
    common = text(200)
    with opened(model, tmp_path) as cache:
        said = [turn(model, cache, [*common, i, *text(30, i)]) for i in range(6)]
        token_bytes = cache.inventory.token_bytes
    kv_bytes = (200 + sum(len(t) - 200 for t in said)) * (token_bytes + 4)
    heads = sum(int.from_bytes(p.read_bytes()[:8], "little") + 8 for p in files(tmp_path))
    assert disk_bytes(tmp_path) - heads == kv_bytes
    with opened(model, tmp_path) as cache:
        for tokens in said:
            again = Session(model, cache, [*tokens, 1])
            assert again.cached == len(tokens)
            again.prefill().commit()
        assert cache.stats().disk.restored_tokens == kv_bytes // (token_bytes + 4), "the prefix was read more than once"
        settled(cache)


def test_what_was_restored_is_not_written_again(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        tokens = turn(model, cache, text(300))
    before = {p: p.stat().st_ino for p in files(tmp_path)}
    with opened(model, tmp_path) as cache:
        again = Session(model, cache, [*tokens, 5])
        assert again.lease.restored == len(tokens)
        again.lease.discard()
        for _ in range(3):
            hit = Session(model, cache, [*tokens, 5])
            assert (hit.cached, hit.lease.restored) == (len(tokens), 0), "a hit in memory from then on"
            hit.lease.discard()
        assert cache.stats().disk.restored_tokens == len(tokens)
    assert {p: p.stat().st_ino for p in files(tmp_path)} == before


def test_a_branch_goes_off_inside_a_record(model: FakeModel, tmp_path: Path) -> None:
    whole = text(300)
    with opened(model, tmp_path) as cache:
        turn(model, cache, whole)
    with opened(model, tmp_path) as cache:
        other = turn(model, cache, [*whole[:150], 63, *text(40, 7)])
        settled(cache)
    with opened(model, tmp_path) as cache:
        for tokens in (whole, other):
            again = Session(model, cache, [*tokens, 5])
            assert again.cached == len(tokens)
            again.prefill().commit()
        settled(cache)


def test_a_request_that_knows_only_the_beginning_gets_just_that(model: FakeModel, tmp_path: Path) -> None:
    whole = text(400)
    with opened(model, tmp_path) as cache:
        small_records(cache)
        turn(model, cache, whole)
    with opened(model, tmp_path) as cache:
        again = Session(model, cache, [*whole[:160], 63, 62])
        assert again.cached == 160 == again.lease.restored
        again.prefill().decode(2).commit()
        assert cache.stats().moves == 1, "it went on in the buffer that was read into"
        settled(cache)


def test_without_a_disk_nothing_is_written_and_evicted_is_gone(model: FakeModel, tmp_path: Path) -> None:
    threads = threading.active_count()
    with PrefixCache(model, "1MB", min_checkpoint_tokens=1) as cache:
        first = turn(model, cache, text(300))
        for i in range(30):
            turn(model, cache, [i, *text(200, i)])
        stats = cache.stats()
        assert stats.disk == DiskStats() and stats.disk.mode == "off"
        assert stats.discarded_tokens == stats.evicted_tokens > 0
        assert stats.bytes["disk_buffers"] == 0
        assert Session(model, cache, [*first, 1]).cached < len(first)
        assert cache.flush() and cache.durable(first) == 0 and cache.restore(first) is None
        assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def buffers(cache: PrefixCache) -> set[int]:
    """Where the buffers of all conversations lie."""
    arrays = [a for slab in cache.state.store.slabs for layer in slab.layers if layer for a in layer]
    return {int(np.asarray(a).__array_interface__["data"][0]) for a in arrays}


def made_by(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """The most Python bytes (bytes objects and numpy's arrays are among them) and device bytes at a time that `run`
    added, and what it returned."""
    mx.synchronize()
    mx.clear_cache()
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tracemalloc.start()
    try:
        found = run()
        python_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return python_bytes, max(mx.get_peak_memory(), mx.get_active_memory()) - before, found


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_a_store_and_a_hit_in_memory_make_no_bytes_and_no_buffer(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committing moves the buffers that were written, and a hit reads them where they lie: at the same addresses, and
    never through the host's memory."""
    model = FakeModel(("full",) * 4, dim=256)
    tokens = text(1000)
    if mode == "off":
        names = [(host, n) for n in ("bytes_of", "rows", "copy_out", "places", "copy_in", "array_in")]
        for module, name in [*names, (arrays, "Payload"), (arrays, "bytes_of")]:
            monkeypatch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} without a disk"))
    options = {} if mode == "off" else {"disk": tmp_path, "disk_budget": "1GB", "disk_mode": mode}
    with PrefixCache(model, "600MB", **options) as cache:
        lease = cache.lease(tokens)
        mx.eval(model(mx.array(tokens)[None], cache=lease.layers), [c.state for c in lease.layers])
        written = buffers(cache)
        entry = cache.stats().bytes["live"]
        python_bytes, device_bytes, _ = made_by(lambda: lease.commit(tokens))
        assert buffers(cache) == written and len(written) == 8
        assert (device_bytes, cache.stats().bytes["stored"]) == (0, entry)
        assert python_bytes < entry / 100
        assert cache.flush()
        python_bytes, device_bytes, lease = made_by(lambda: cache.lease([*tokens, 1, 2]))
        assert (lease.cached, lease.restored, device_bytes) == (len(tokens), 0, 0)
        assert buffers(cache) == written
        assert python_bytes < entry / 100
        mx.eval(model(mx.array([[1, 2]]), cache=lease.layers), [c.state for c in lease.layers])
        assert_holds(model, lease.layers, [*tokens, 1, 2])
        lease.commit([*tokens, 1, 2])
        assert buffers(cache) == written


def test_namespaces_are_apart_on_disk_too(model: FakeModel, tmp_path: Path) -> None:
    tokens = text(80)
    for namespace in ("", "a", "b", ("a", 1), b"a"):
        with opened(model, tmp_path) as cache:
            first = Session(model, cache, tokens, namespace=namespace)
            assert first.matched == 0, f"{namespace!r} sees another's"
            first.prefill().commit()
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 5
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*tokens, 1], namespace="a").cached == len(tokens)
    assert not any(b'"a"' in p.read_bytes() for p in tmp_path.glob("*/about.json"))


def test_a_namespace_without_a_lasting_name_stays_in_memory(
    model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tenant = object()
    with opened(model, tmp_path, disk_mode="through") as cache:
        Session(model, cache, text(80), namespace=tenant).prefill().commit()
        assert cache.flush()
    assert files(tmp_path) == []
    assert "stays in memory" in caplog.text


@pytest.mark.parametrize("other", ["weights", "order of weights", "adapter", "tokenizer", "kv", "bound", "code"])
def test_what_changes_the_bytes_changes_the_namespace(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = FakeModel(("full",), dim=64), dict[str, Any]()
    tokens = text(80)
    with opened(model, tmp_path) as cache:
        turn(model, cache, tokens)
    if other == "weights":
        weight = np.array(model.lm_head.weight)
        weight[1, 2] += 1  # one number, which no sample would see
        model.lm_head.weight = mx.array(weight)
    elif other == "order of weights":
        weight = np.array(model.lm_head.weight)
        weight[1, [2, 3]] = weight[1, [3, 2]]
        model.lm_head.weight = mx.array(weight)
    elif other == "code":
        monkeypatch.setattr(fingerprint, "_source", lambda module: b"changed")
    else:
        options = {
            "adapter": {"adapter": "lora"},
            "tokenizer": {"tokenizer": "another"},
            "kv": {"kv": "8"},
            "bound": {"max_kv_size": 4096},
        }[other]
    with opened(model, tmp_path, **options) as cache:
        assert cache.lease([*tokens, 1]).matched == 0


def test_kv_of_another_format_is_not_read_and_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = FakeModel(("full",), dim=64)
    with opened(model, tmp_path) as cache:
        turn(model, cache, text(80))
        turn(model, cache, text(90, seed=1), namespace="tenant")
    stored = sum(on_disk(p.stat().st_size) for p in files(tmp_path))
    with opened(FakeModel(("full", "full"), dim=64), tmp_path, kv="8") as another:
        assert another.stats().disk.used_bytes == stored > 0 and caplog.text == ""
    with opened(model, tmp_path, kv="8") as cache:
        assert cache.lease([*text(80), 1]).matched == 0
    (said,) = caplog.messages
    assert f"{tmp_path} has KV of this model that is not used, because this cache has kv='8': " in said
    names = {p.parent.name[:8] for p in files(tmp_path)}
    lists = (", ".join(n) for n in itertools.permutations(names))
    assert any(f" {show_size(stored)} with kv='16' (namespaces {n}). " in said for n in lists)
    caplog.clear()
    with opened(model, tmp_path) as cache:
        assert cache.lease([*text(80), 1]).matched == 80 and caplog.text == ""


def test_kv_of_another_bound_is_named_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, model = tmp_path / "a folder", FakeModel(("full",), dim=64)
    with opened(model, folder, max_kv_size=4096, keep=7) as cache:
        turn(model, cache, text(80))
    assert caplog.text == ""
    with opened(model, folder):
        (said,) = caplog.messages
    assert "this cache has kv='16' and no max_kv_size: " in said
    assert " with kv='16', max_kv_size=4096, keep=7 (namespace " in said
    assert f"`onefold cache clear --disk '{folder}' --namespace ID`" in said
    (described,) = folder.glob("*/about.json")
    for bound in (7, [7], "x" * 9, {}):
        described.write_text(json.dumps(json.loads(described.read_text()) | {"bound": bound}))
        with opened(model, folder):
            assert "a bound that this version does not know" in caplog.messages[-1]


@pytest.mark.parametrize("tag", [8, "of tomorrow", ["r8r8"], "r5r4+" + "9" * 5000])
def test_kv_of_a_format_that_no_name_reads_is_not_promised(
    tag: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """8 is how 0.6.0 stored models of 32 bits. The others come from a later version, or from elsewhere."""
    model = FakeModel(("full",), dim=64)
    with opened(model, tmp_path) as cache:
        turn(model, cache, text(80))
    (described,) = tmp_path.glob("*/about.json")
    described.write_text(json.dumps(json.loads(described.read_text()) | {"kv": tag}))
    with opened(model, tmp_path, kv="8"):
        (said,) = caplog.messages
        assert "with a format that no kv of this version reads (namespace " in said


@pytest.mark.parametrize("tag", [8, None])
def test_kv_that_is_read_is_not_called_unused(tag: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The name of a namespace's folder says what it is, and not its `about.json`."""
    model = FakeModel(("full",), dim=64)
    with opened(model, tmp_path) as cache:
        turn(model, cache, text(80))
    (described,) = tmp_path.glob("*/about.json")
    described.write_text(json.dumps(json.loads(described.read_text()) | {"kv": tag}))
    with opened(model, tmp_path) as cache:
        assert cache.lease([*text(80), 1]).matched == 80 and caplog.text == ""


def test_many_formats_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel(("full",), dim=64)
    for i in range(8):
        with opened(model, tmp_path) as cache:
            turn(model, cache, text(80), namespace=f"tenant {i}")
    for i, described in enumerate(tmp_path.glob("*/about.json")):
        described.write_text(json.dumps(json.loads(described.read_text()) | {"kv": f"r8r8+{i + 1}"}))
    with opened(model, tmp_path):
        (said,) = caplog.messages
    assert said.count(" with kv='8+") == 5 and "; and 3 more. " in said


def test_the_name_of_a_model_does_not_matter(model: FakeModel, tmp_path: Path) -> None:
    tokens = text(80)
    with opened(model, tmp_path, label="one") as cache:
        said = turn(model, cache, tokens)
    with opened(FakeModel(("full", "full")), tmp_path, label="two") as cache:
        assert cache.lease([*said, 1]).cached == len(said)


@pytest.mark.parametrize("mode", MODES)
def test_the_disk_budget_is_hard(mode: str, tmp_path: Path) -> None:
    """Never exceeded, not even in between; what goes is the least recently used, and never something that another
    record goes on from."""
    model = FakeModel(("full",), dim=64)
    most = 300_000
    with opened(model, tmp_path, budget="4MB", disk_budget=most, disk_mode=mode) as cache:
        assert cache.parts.tier is not None
        seen, write = [], cache.parts.tier.catalog.folder.write

        def measured(*what: Any) -> None:
            write(*what)
            seen.append(disk_bytes(tmp_path))

        cache.parts.tier.catalog.folder.write = measured  # type: ignore[method-assign]
        for i in range(12):
            last = turn(model, cache, [i, *text(60, i)])
            cache.flush()
            settled(cache)
    assert max(seen) <= most
    with opened(model, tmp_path, budget="4MB", disk_budget=most) as cache:
        assert cache.stats().disk.evicted_records == 0
        assert Session(model, cache, [*last, 1]).cached == len(last), "the newest is there"
        assert cache.stats().disk.rejected_records == 0


def test_the_disk_budget_holds_at_the_start_too(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        said = []
        for i in range(10):
            said.append(turn(model, cache, [i, *text(200, i)]))
    whole = disk_bytes(tmp_path)
    with opened(model, tmp_path, disk_budget=whole // 2) as cache:
        assert disk_bytes(tmp_path) <= whole // 2
        assert cache.stats().disk.evicted_records > 0
        assert Session(model, cache, [*said[-1], 1]).cached == len(said[-1])
        assert Session(model, cache, [*said[0], 1]).cached == 0
        settled(cache)


def test_a_daily_limit_pauses_writing(model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(model, tmp_path, disk_mode="through", disk_daily_limit="100kB") as cache:
        for i in range(12):
            turn(model, cache, [i, *text(200, i)])
            cache.flush()
        stats = cache.stats()
        assert 0 < stats.disk.written_today_bytes <= 100_000
        assert stats.disk.written_today_bytes == stats.disk.written_bytes == disk_bytes(tmp_path)
        assert stats.reasons["disk: daily limit"] > 0
    assert caplog.text.count("would pass the daily limit") == 1
    with opened(model, tmp_path, disk_mode="through", disk_daily_limit="100kB") as cache:
        again = cache.stats().disk
        assert again.written_today_bytes == again.written_ever_bytes == stats.disk.written_today_bytes
        assert cache.parts.tier is not None
        cache.parts.tier.catalog.writes.clock = lambda: time.time() + 86_400
        turn(model, cache, text(90, 99))
        assert cache.flush()
        assert 0 < cache.stats().disk.written_today_bytes < cache.stats().disk.written_ever_bytes


def test_a_second_cache_on_the_folder_is_told_plainly(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path), pytest.raises(FolderInUse, match=f"in use by process {os.getpid()}"):
        opened(model, tmp_path)
    opened(model, tmp_path).close()


def test_what_is_quicker_to_compute_is_not_read(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        tokens = turn(model, cache, text(300))
    with opened(model, tmp_path) as cache:
        disk = cache.parts.tier
        assert disk is not None
        disk.reading.prefill_pace = Pace()
        disk.reading.read_pace.took(10.0, 1)
        disk.reading.prefill_pace.took(1e-9, 1)
        again = Session(model, cache, [*tokens, 5])
        assert (again.cached, again.matched, again.lease.reason) == (0, len(tokens), "left on disk")
        again.prefill(50).decode(2).commit()
        stats = cache.stats()
        assert stats.disk.skipped_tokens == len(tokens) and stats.reasons["disk: slower than prefill"] == 1
        written = stats.disk.written_bytes
        assert cache.flush() and cache.stats().disk.written_bytes == written, "it is on disk already"
        assert Session(model, cache, [*tokens, 5]).cached == len(tokens), "from memory"
        settled(cache)
    with opened(model, tmp_path) as cache:
        assert cache.parts.tier is not None
        cache.parts.tier.reading.prefill_pace = Pace()
        cache.parts.tier.reading.read_pace.took(1e-12, 1)
        cache.parts.tier.reading.prefill_pace.took(10.0, 1)
        assert Session(model, cache, [*tokens, 5]).lease.restored == len(tokens)


def test_both_paces_are_measured(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        assert cache.parts.tier is not None
        cache.parts.tier.reading.prefill_pace = Pace()
        tokens = turn(model, cache, text(300))
        assert cache.parts.tier.reading.prefill_pace.estimate(1) is not None
        assert cache.parts.tier.reading.read_pace.estimate(1) is None
    with opened(model, tmp_path) as cache:
        Session(model, cache, [*tokens, 5])
        assert cache.parts.tier is not None and cache.parts.tier.reading.read_pace.estimate(1) is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_that_rotated_survives_too(mode: str, tmp_path: Path) -> None:
    model, bound = FakeModel(("full", "full")), (64, 4)
    options = {"max_kv_size": 64, "keep": 4, "disk_mode": mode}
    with opened(model, tmp_path, **options) as cache:
        said = turn(model, cache, text(100), 5, bound=bound)
    with opened(model, tmp_path, **options) as cache:
        again = Session(model, cache, [*said, *text(5, 1)], bound=bound)
        assert again.cached == len(said), again.lease.reason
        again.prefill().decode(3).commit()
        settled(cache)


def test_a_draft_model_comes_back_with_its_target(tmp_path: Path) -> None:
    model, draft = FakeModel(("full", "full")), FakeModel(("full",), seed=1)
    tokens = text(90)

    def run(cache: PrefixCache, prompt: list[int]) -> int:
        with cache.lease(prompt) as lease:
            own, drafts = lease.layers[:2], lease.layers[2:]
            for m, layers in ((model, own), (draft, drafts)):
                mx.eval(m(mx.array(prompt[lease.cached :])[None], cache=layers))
                assert_holds(m, layers, prompt)
            lease.commit(prompt)
            return lease.cached

    for cached in (0, len(tokens)):
        with opened(model, tmp_path, draft_model=draft) as cache:
            assert run(cache, [*tokens, 1][: len(tokens) + bool(cached)]) == cached


def test_writing_through_keeps_up_with_turns_that_follow_at_once(tmp_path: Path) -> None:
    """Each turn begins the moment the last one was committed: what was committed is on its way to the disk all the
    same, and the conversation stays in few buffers."""
    model = FakeModel(("full", "full"), dim=64)
    with opened(model, tmp_path, disk_mode="through") as cache:
        tokens = text(200)
        for i in range(12):
            before = list(tokens)
            session = Session(model, cache, tokens)
            session.prefill().decode(3)
            if i:
                deadline = time.monotonic() + 20
                while cache.durable(before) < len(before) - 10 and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert cache.durable(before) >= len(before) - 10, "nothing is written while requests run"
            tokens = [*session.commit(), *text(7, i)]
        assert cache.stats().moves >= 6
        settled(cache)


def test_a_restore_is_taken_in_steps_beside_other_requests(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        small_records(cache)
        tokens = turn(model, cache, text(300))
    with opened(model, tmp_path) as cache:
        other = Session(model, cache, [9, *text(40, 5)]).prefill()
        restore = cache.restore([*tokens, 5])
        assert restore is not None
        steps = 0
        while restore.step():
            other.decode(1)
            cache.check()
            steps += 1
        assert steps >= 2
        again = cache.lease([*tokens, 5], after=restore)
        assert (again.cached, again.restored) == (len(tokens), len(tokens))
        again.discard()
        other.commit()
        assert cache.stats().tokens_from_disk == len(tokens)


def test_a_restore_that_is_left_half_way_keeps_what_it_read(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path) as cache:
        small_records(cache)
        tokens = turn(model, cache, text(300))
    with opened(model, tmp_path) as cache:
        restore = cache.restore([*tokens, 5])
        assert restore is not None and restore.step()
        restore.finish()
        settled(cache)
        assert 0 < restore.tokens < len(tokens)
        again = Session(model, cache, [*tokens, 5])
        assert again.cached == len(tokens) and again.lease.restored == len(tokens) - restore.tokens
        again.prefill().commit()
        settled(cache)


def test_memory_during_a_restore_is_the_entry_and_no_more(tmp_path: Path) -> None:
    model = FakeModel(("full",) * 4, dim=256)
    with opened(model, tmp_path, budget="600MB") as cache:
        tokens = text(4000)
        with cache.lease(tokens) as lease:
            for chunk in [*lease.chunks(500), tokens[-1:]]:
                mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
            lease.commit(tokens)
    with opened(model, tmp_path, budget="600MB") as cache:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        lease = cache.lease([*tokens, 5])
        assert lease.restored == len(tokens)
        entry = cache.stats().bytes["live"] + cache.stats().bytes["stored"]
        through = 0 if arrays.addressable() else host.TWICE_MORE * max(p.stat().st_size for p in files(tmp_path))
        assert mx.get_peak_memory() - before <= 1.02 * entry + through
        assert mx.get_active_memory() - before == pytest.approx(entry, rel=0.01)
        lease.discard()


@pytest.mark.parametrize("direct", [True, False], ids=["in place", "by operations"])
@pytest.mark.parametrize("kinds", [("full",) * 4, ("full", "recurrent")], ids=["ranges", "a point too"])
def test_what_is_on_its_way_from_disk_is_in_the_ledger(
    kinds: tuple[str, ...], direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bytes cannot be read into their place, the buffers that they go through are counted; else there are none,
    but on macOS (`test_disk_system`). The ledger has room for all that MLX was seen to take."""
    monkeypatch.setattr(system, "chosen", system.Posix())
    monkeypatch.setattr(arrays, "addressable", lambda: direct)
    model = FakeModel(kinds, dim=256)
    with opened(model, tmp_path, budget="64MB") as cache:
        tokens = turn(model, cache, text(1500))
    with opened(model, tmp_path, budget="64MB") as cache:
        mx.clear_cache()
        before, idle = mx.get_active_memory(), cache.stats().bytes["disk_buffers"]
        mx.reset_peak_memory()
        restore = cache.restore([*tokens, 5])
        assert restore is not None
        while restore.step():
            held = cache.stats().bytes["disk_buffers"] - idle
            assert (held == 0) if direct else (held >= 3 * max(p.stat().st_size for p in files(tmp_path)))
        assert cache.stats().bytes["disk_buffers"] == idle
        assert mx.get_peak_memory() - before <= cache.stats().peak_bytes - idle
        assert restore.tokens == len(tokens)
        settled(cache)


def test_the_copies_of_what_leaves_for_the_disk_are_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(("full",) * 4, dim=256)
    monkeypatch.setattr(arrays, "addressable", lambda: True)
    with opened(model, tmp_path / "direct", budget="128MB") as cache:
        in_place = cache.stats().bytes["disk_buffers"]
    monkeypatch.setattr(arrays, "addressable", lambda: False)
    with opened(model, tmp_path / "composed", budget="128MB") as cache:
        assert cache.parts.tier is not None
        slot = cache.parts.tier.spiller.jobs.record_tokens * cache.inventory.token_bytes
        assert cache.stats().bytes["disk_buffers"] == in_place + host.COPIED * slot
        turn(model, cache, text(1500))
        (slab,) = cache.state.store.slabs
        into = np.empty(slot, np.uint8)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        host.copy_out(slab, 0, cache.parts.tier.spiller.jobs.record_tokens, into, direct=False)
        elsewhere = 1  # the last copy is in memory that is not MLX's
        assert mx.get_peak_memory() - before <= 1.05 * (host.COPIED - elsewhere) * slot


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [1, 64, 1000, 10**6])
def test_the_bytes_of_an_array_come_in_pieces_and_in_order(direct: bool, most: int) -> None:
    made = mx.arange(7 * 5 * 6, dtype=mx.float32).reshape(7, 5, 6)
    for array in (made, made.T, made[:, ::2], made[2:3, 1:], made.astype(mx.bfloat16), made > 9, mx.array(3.0)):
        mx.eval(array)
        payload = arrays.Payload([array], most, direct=direct)
        whole = mx.contiguous(array).astype(mx.float32) if array.dtype == mx.bfloat16 else array
        for _ in range(2):
            found = b"".join(part.tobytes() for part in payload)
            if array.dtype == mx.bfloat16:
                assert found == b"".join(v.tobytes()[2:] for v in np.array(whole).reshape(-1))
            else:
                assert found == np.ascontiguousarray(np.array(whole)).tobytes()
        if not direct:
            assert max(len(part) for part in payload) <= max(most, 4)


def test_requests_on_several_threads(tmp_path: Path) -> None:
    model = FakeModel(("full", "full"), dim=64)
    failed: list[BaseException] = []
    with opened(model, tmp_path, budget="6MB", disk_mode="back") as cache:

        def work(seed: int) -> None:
            try:
                said = [turn_alone(cache, [seed, i, *text(60, i)]) for i in range(8)]
                for tokens in said:
                    turn_alone(cache, [*tokens, 3])
            except BaseException as error:
                failed.append(error)
            finally:
                mx.clear_streams()

        def turn_alone(cache: PrefixCache, prompt: list[int]) -> list[int]:
            with cache.lease(prompt) as lease:
                mx.eval(model(mx.array(prompt[lease.cached :])[None], cache=lease.layers))
                assert_holds(model, lease.layers, prompt)
                lease.commit(prompt)
            return prompt

        threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        settled(cache)


def test_closing_writes_what_is_in_memory_newest_first(tmp_path: Path) -> None:
    model = FakeModel(("full",), dim=64)
    with opened(model, tmp_path, disk_budget=300_000) as cache:
        said = [turn(model, cache, [i, *text(60, i)]) for i in range(30)]
        assert files(tmp_path) == [], "nothing had to make way"
    with opened(model, tmp_path) as cache:
        kept = [cache.inventory.matched(t) > 0 for t in said]
        assert any(kept) and not all(kept)
        assert kept == sorted(kept), "the newest"


def test_clearing_the_cache_clears_the_disk(model: FakeModel, tmp_path: Path) -> None:
    with opened(model, tmp_path, disk_mode="through") as cache:
        tokens = turn(model, cache, text(300))
        assert cache.flush()
        cache.clear(disk=False)
        assert cache.stats().stored_tokens == 0 and files(tmp_path)
        with cache.lease([*tokens, 1]) as lease:
            assert lease.restored == len(tokens)
        cache.clear()
        assert cache.flush()
        assert cache.inventory.matched(tokens) == 0 and files(tmp_path) == []
        settled(cache)


def test_files_are_private(model: FakeModel, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    with opened(model, folder) as cache:
        turn(model, cache, text(50))
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    "options",
    [
        {"disk_mode": "sideways"},
        {"disk_budget": "much"},
        {"disk_budget": 0},
        {"disk_budget": -5},
        {"disk_daily_limit": "x"},
        {"disk": ""},
        {"disk": 7},
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], model: FakeModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        opened(model, tmp_path, **options)


def test_a_folder_that_holds_other_things_is_refused(model: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds other things"):
        opened(model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", [".DS_Store", "._onefold.json", ".Spotlight-V100", "lost+found"])
def test_a_folder_may_hold_what_the_system_puts_there(name: str, model: FakeModel, tmp_path: Path) -> None:
    (tmp_path / name).write_text("by the system")
    with opened(model, tmp_path) as cache:
        Session(model, cache, text(40)).prefill(16).commit()
        assert cache.flush()
    assert (tmp_path / name).read_text() == "by the system"


def test_settings_may_be_of_a_derived_class(model: FakeModel, tmp_path: Path) -> None:
    class Mine(DiskSettings):
        pass

    with PrefixCache(model, "64MB", disk=Mine(tmp_path)) as cache:
        Session(model, cache, text(40)).prefill(16).commit()
        assert cache.flush(everything=True) and files(tmp_path)


def test_a_tier_that_cannot_be_opened_leaves_no_open_cache(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise LookupError("a bug of the opener")

    closed: list[PrefixCache] = []
    close = PrefixCache.close
    monkeypatch.setattr(PrefixCache, "close", lambda self: (closed.append(self), close(self))[1])
    monkeypatch.setitem(registry.OPENERS, DiskSettings, fail)
    with pytest.raises(LookupError, match="a bug of the opener"):
        PrefixCache(model, "64MB", disk=tmp_path)
    assert len(closed) == 1 and closed[0].state.closed


def branched(folder: Path) -> tuple[FakeModel, list[int], list[int]]:
    """Two conversations on disk, the second of which leaves the first inside its one record."""
    model = FakeModel(("full", "full"))
    first = text(60, 1)
    with opened(model, folder, disk_mode="through") as cache:
        for tokens in (first, second := [*first[:11], *text(40, 2)]):
            Session(model, cache, tokens).prefill().commit()
            assert cache.flush()
    return model, first, second


def test_a_restore_left_between_a_record_and_the_branch_inside_it(tmp_path: Path) -> None:
    model, _, second = branched(tmp_path)
    with opened(model, tmp_path) as cache:
        restore = cache.restore([*second, 1])
        assert restore is not None and restore.step()
        restore.finish()
        assert restore.tokens == 11, "the rest of that record is the other conversation's"
        Session(model, cache, [*second, 1]).prefill().commit()
        settled(cache)


def test_a_branch_that_is_damaged_gets_nothing_of_the_other(tmp_path: Path) -> None:
    model, first, second = branched(tmp_path)
    path = next(p for p in files(tmp_path) if p.name.startswith("00000011-"))
    flip(path, -5)
    with opened(model, tmp_path) as cache:
        again = Session(model, cache, [*second, 1])
        assert again.cached == 11
        again.prefill().commit()
        assert Session(model, cache, [*first, 1]).cached == len(first)


def test_a_forward_that_fills_a_buffer_exactly_is_written(tmp_path: Path) -> None:
    """Its arrays are left as the model made them, not in the order of a buffer."""
    model = tiny("llama")
    tokens = [i % 50 for i in range(256)]
    with PrefixCache(model, "64MB", disk=tmp_path, disk_budget="1GB", disk_mode="through") as cache:
        with cache.lease(tokens) as lease:
            mx.eval(model(mx.array(tokens)[None], cache=lease.layers))
            lease.commit(tokens)
        assert cache.flush(20) and cache.durable(tokens) == 256
    with PrefixCache(model, "64MB", disk=tmp_path, disk_budget="1GB") as cache, cache.lease([*tokens, 1]) as lease:
        assert lease.restored == 256
        warm = model(mx.array([[1]]), cache=lease.layers)
        cold = model(mx.array([[*tokens, 1]]))[:, -1:]
        assert mx.allclose(warm, cold, atol=1e-4)


def test_only_what_can_be_resumed_is_called_durable(tmp_path: Path) -> None:
    model = FakeModel(("full", "recurrent"))
    tokens = text(90)
    with opened(model, tmp_path, disk_mode="through") as cache:
        said = turn(model, cache, tokens)
        assert cache.flush()
        assert cache.durable(said) == len(said)
        assert cache.durable(said[:30]) == 0, "there is no state at its end, or before"
        assert Session(model, cache, [*said[:30], 1]).cached == 0


def test_a_damaged_end_costs_only_the_end(tmp_path: Path) -> None:
    """The state at an earlier point is sound: the same request goes on from there."""
    model = FakeModel(("full", "recurrent"))
    with opened(model, tmp_path) as cache:
        first = turn(model, cache, text(60))
        second = turn(model, cache, [*first, *text(40, 1)])
    last = max((p for p in files(tmp_path) if "point" in p.name), key=lambda p: p.name)
    flip(last, -5)
    with opened(model, tmp_path) as cache:
        again = Session(model, cache, [*second, 1])
        assert len(first) <= again.cached < len(second)
        again.prefill().commit()
        assert cache.stats().disk.rejected_records == 1
        settled(cache)


def test_checkpoints_make_way_for_each_other_without_being_lost(tmp_path: Path) -> None:
    """More conversations than the checkpoints' share of memory has room for, written back."""
    model = FakeModel(("rotating",) * 4, dim=64)
    with opened(model, tmp_path, budget="2MB") as cache:
        said = [turn(model, cache, [i, *text(40, i)]) for i in range(24)]
        assert cache.stats().checkpoints < 24
        for tokens in said:
            again = Session(model, cache, [*tokens, 1])
            assert again.cached == len(tokens), again.lease.reason
            again.prefill().commit()
        settled(cache)
