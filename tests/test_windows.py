"""Windows in runs: checkpoints that overlap share their KV in memory, and have each token once on disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from disk_caches import files, flip, opened, turn
from fake import WINDOW, FakeModel, Session, settled, text
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from test_disk_unread import unreadable
from tiny import tiny

from onefold import PrefixCache
from onefold.cache.memory import runs
from onefold.cache.memory.ledger import Ledger, Purpose
from onefold.cache.memory.runs import Run, shared
from onefold.cache.tiers.disk import jobs
from onefold.cache.tiers.records.record import parse_head, parse_name

SHARING = [("full", "rotating"), ("rotating", "rotating"), ("chunked", "full"), ("full", "chunked", "rotating")]
WHOLE = [("full", "rotating_keep"), ("full", "recurrent", "rotating")]
BOUNDED = ("full", "rotating")


def other(token: int) -> int:
    return (token + 1) % 97


def points(cache: PrefixCache) -> list[Any]:
    with cache.state.lock:
        return sorted(
            (n.checkpoint for n in cache.state.nodes.nodes() if n.checkpoint is not None), key=lambda c: c.position
        )


def point_files(folder: Path) -> list[Path]:
    return [p for p in files(folder) if ".point." in p.name]


def payload(paths: list[Path]) -> int:
    """The bytes of these records without their headers."""
    heads = [(p, parse_head(p.read_bytes())) for p in paths]
    return sum(p.stat().st_size - head.data_at for p, head in heads if not isinstance(head, int))


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", SHARING, ids="+".join)
def test_checkpoints_of_short_turns_share_their_windows(kinds: tuple[str, ...]) -> None:
    model, tokens = FakeModel(kinds), text(3 * WINDOW, 1)
    with PrefixCache(model, budget=40_000_000) as cache:
        known = turn(model, cache, tokens)
        alone = cache.stats().bytes["checkpoint"]
        for i in range(3):
            known = turn(model, cache, [*known, *text(2, i + 5)], 1)
        held = points(cache)
        assert len(held) >= 3 and all(c.bytes == 0 and c.runs for c in held)
        assert len({run for c in held for run in c.runs}) < sum(len(c.runs) for c in held)
        assert cache.stats().bytes["checkpoint"] < 2 * alone
        cache.clear()
        assert cache.stats().bytes["checkpoint"] == 0


@pytest.mark.parametrize("kinds", [*WHOLE, BOUNDED], ids="+".join)
def test_other_states_are_kept_whole(kinds: tuple[str, ...], tmp_path: Path) -> None:
    model = FakeModel(kinds)
    options: dict[str, Any] = {"max_kv_size": 200} if kinds == BOUNDED else {}
    with opened(model, tmp_path, disk_mode="through", **options) as cache:
        known = turn(model, cache, text(3 * WINDOW, 1))
        known = turn(model, cache, [*known, 5, 6])
        assert all(not c.runs and c.bytes for c in points(cache))
    assert {parse_name(p.name).version for p in files(tmp_path)} == {2}  # type: ignore[union-attr]
    with opened(model, tmp_path, **options) as cache:
        assert Session(model, cache, [*known, 1]).prefill().cached == len(known)


def test_what_is_mostly_out_of_the_window_is_not_shared() -> None:
    ledger = Ledger(1 << 20)
    first, second = (Run(ledger.open(Purpose.CHECKPOINT, 0)) for _ in range(2))
    known = (first.add([mx.zeros(1)] * 2, 0, 10), second.add([mx.zeros(1)] * 2, 10, 12))
    assert shared(known, 5, 15) == known
    assert shared(known, 6, 16) == known[1:]
    assert shared(known, 12, 22) == () == shared(known, 2, 11)
    third = Run(ledger.open(Purpose.CHECKPOINT, 0))
    known = (*known, third.add([mx.zeros(1)] * 2, 12, 13))
    second.close()
    assert shared(known, 5, 15) == known[:1]  # the longer part of what is left
    first.close()
    assert shared(known, 5, 15) == known[2:] == shared(known, 10, 20)


def test_a_window_of_too_many_runs_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST", 4)
    model, known = FakeModel(("full", "rotating")), text(2 * WINDOW, 1)
    with PrefixCache(model, budget=40_000_000) as cache:
        for i in range(8):
            known = turn(model, cache, [*known, i], 1)
        assert max(len(c.snapshots[1].stretches) for c in points(cache)) <= 4


def test_restoring_shared_windows_allocates_nothing() -> None:
    model, known = FakeModel(("full", "rotating"), dim=256), text(2 * WINDOW, 1)
    with PrefixCache(model, budget=40_000_000) as cache:
        for i in range(3):
            known = turn(model, cache, [*known, i], 1)
        mx.synchronize()
        before = mx.get_active_memory()
        lease = cache.lease([*known, 1])
        assert lease.cached == len(known) and len(lease.hold.checkpoint.snapshots[1].stretches) > 1  # type: ignore[union-attr]
        assert mx.get_active_memory() - before < 4096
        lease.cancel()
        settled(cache)


@pytest.mark.parametrize("back", [1, 4])
def test_a_rewind_below_a_checkpoint_ends_its_sharing(back: int) -> None:
    """The entries before it are written again, with other tokens."""
    model, prompt = FakeModel(("full", "rotating")), text(WINDOW - 6, 1)
    with PrefixCache(model, budget=40_000_000) as cache:
        known = turn(model, cache, prompt, 2)
        session = Session(model, cache, [*known, 1])
        assert session.cached == len(known)
        session.prefill()
        for layer in (*session.lease.layers, *session.stock):
            layer.trim(back + 1)
        session.tokens = session.tokens[: -back - 1]
        session.feed([other(t) for t in known[-back:]])
        session.feed([3, 4])
        changed = session.commit()
        again = Session(model, cache, [*changed, 9])
        assert again.cached > 0
        again.prefill().commit()


@pytest.mark.parametrize("kinds", [("full", "rotating"), ("full", "recurrent")], ids="+".join)
def test_a_checkpoint_leaves_no_account_behind(kinds: tuple[str, ...]) -> None:
    model, known = FakeModel(kinds), text(2 * WINDOW, 1)
    with PrefixCache(model, budget=40_000_000, min_checkpoint_tokens=1) as cache:
        before = len(cache.state.ledger._accounts)
        for i in range(3):
            known = turn(model, cache, [*known, *text(3, i)])
        cache.clear()
        assert len(cache.state.ledger._accounts) == before


def test_a_checkpoint_that_drops_what_it_would_share_keeps_to_the_share() -> None:
    """Room for it is made by dropping an earlier one of the same request, whose run it would have shared."""
    model = FakeModel(("rotating",) * 8, dim=256)
    for budget in range(4_600_000, 5_200_000, 50_000):
        with PrefixCache(model, budget=budget, min_checkpoint_tokens=1) as cache:
            pinned = cache.pin(Session(model, cache, text(20, 9)).prefill(31).commit())
            known = Session(model, cache, text(20, 1)).prefill(31).commit()
            places = [len(known) + i for i in (3, 6, 9, 12)]
            session = Session(model, cache, [*known, *text(14, 2)], checkpoints=places)
            while len(session.tokens) < len(session.prompt):
                session.prefill(3, upto=min(len(session.prompt), len(session.tokens) + 3))
                assert cache.stats().bytes["checkpoint"] <= budget // 4
            session.commit()
            pinned.release()


def test_reading_the_keys_of_a_restored_layer_keeps_nothing() -> None:
    model, known = FakeModel(("full", "rotating"), dim=256), text(2 * WINDOW, 1)
    with PrefixCache(model, budget=40_000_000) as cache:
        known = turn(model, cache, [*turn(model, cache, known), *text(2)], 1)
        session = Session(model, cache, [*known, 5])
        before = mx.get_active_memory()
        keys = session.lease.layers[1].keys
        mx.eval(keys)
        assert mx.get_active_memory() - before >= keys.nbytes
        del keys
        assert mx.get_active_memory() == before
        assert session.lease.hold.live_point_bytes() == 0
        session.prefill().commit()


# -- a walk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, seed", [("back", 0), ("through", 1)])
@pytest.mark.parametrize("kinds", SHARING, ids="+".join)
def test_whatever_was_stored_is_restored_exactly(
    kinds: tuple[str, ...], mode: str, seed: int, tmp_path: Path
) -> None:
    """Turns shorter and longer than the window, branches, edits, answers asked for again, restarts; `Session` compares
    each step with mlx-lm's own caches."""
    r, model = random.Random(seed), FakeModel(kinds)
    options = {"disk_mode": mode, "disk_budget": r.choice(["1GB", 120_000])}
    known, cache = [text(r.randrange(2, 3 * WINDOW), seed)], opened(model, tmp_path, **options)
    reused = 0
    for i in range(24):
        what, old = r.random(), r.choice(known)
        if what < 0.12:
            cache.close()
            cache = opened(model, tmp_path, **options)
            continue
        if what < 0.25:  # an edit
            old = old[: r.randrange(1, len(old) + 1)]
        elif what < 0.35:  # a branch at the end of an earlier turn
            old = r.choice(known)
        new = text(r.choice([1, 2, 5, WINDOW - 1, WINDOW, 2 * WINDOW + 3]), 100 * seed + i)
        session = Session(model, cache, [*old, *new]).prefill(r.choice([3, 7, 31]))
        reused += session.cached
        if r.random() < 0.1:
            session.cancel()
        else:
            known.append(session.decode(r.randrange(4)).commit())
            del known[: max(0, len(known) - 5)]
        if r.random() < 0.3:
            assert cache.flush(20)
            settled(cache)
    cache.close()
    assert reused > 0


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4"])
def test_a_real_model_answers_as_without_a_cache(name: str, tmp_path: Path) -> None:
    model = tiny(name)

    def answer(prompt: list[int], layers: Any) -> list[int]:
        return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=4, prompt_cache=layers)]

    known = text(40, 3)
    for i, n in enumerate((3, 9, 2, 30)):
        with opened(model, tmp_path, disk_mode="through") as cache:  # type: ignore[arg-type]
            for new in (text(n, i), text(2, 50 + i)):
                prompt = [*known, *new]
                with cache.lease(prompt) as lease:
                    assert i == 0 or lease.cached == len(known)
                    found = answer(lease.rest, lease.layers)
                    known = [*prompt, *found]
                    lease.commit(known)
                assert found == answer(prompt, make_prompt_cache(model))
            cache.check()


# -- disk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [3, WINDOW // 2, 2 * WINDOW])
@pytest.mark.parametrize("kinds", [("full", "rotating"), ("chunked", "full")], ids="+".join)
def test_a_turn_writes_each_token_once(kinds: tuple[str, ...], new: int, tmp_path: Path) -> None:
    model, known = FakeModel(kinds), text(2 * WINDOW, 1)
    with opened(model, tmp_path, disk_mode="through") as cache:
        window = cache.state.model.window
        known = turn(model, cache, known)
        assert cache.flush(20)
        per_token = payload(point_files(tmp_path)) / window  # the first turn has one, whole
        for i in range(6):
            before, there = len(known), files(tmp_path)
            known = turn(model, cache, [*known, *text(new, i + 3)])
            assert cache.flush(20)
            written = [p for p in files(tmp_path) if p not in there]
            tokens = len(known) - before
            full = cache.state.store.token_bytes * tokens
            expected = full + per_token * min(tokens, window)
            assert payload(written) <= 1.1 * expected + 4 * tokens
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*known, 1]).prefill().cached == len(known)


def conversation(model: FakeModel, folder: Path, turns: int = 6, **options: Any) -> list[list[int]]:
    """Turns of a few tokens each, on disk. Returns the tokens at the end of each."""
    known, ends = text(2 * WINDOW, 1), []
    with opened(model, folder, disk_mode="through", **options) as cache:
        for i in range(turns):
            known = turn(model, cache, [*known, *text(3, i + 9)])
            assert cache.flush(20)
            ends.append(known)
    return ends


@pytest.mark.parametrize("kinds", SHARING, ids="+".join)
def test_every_end_of_a_turn_stays_resumable(kinds: tuple[str, ...], tmp_path: Path) -> None:
    model = FakeModel(kinds)
    ends = conversation(model, tmp_path, 8)
    with opened(model, tmp_path) as cache:
        for known in ends[::-1]:
            assert cache.durable(known) == len(known)
            assert Session(model, cache, [*known, other(known[-1])]).prefill().cached == len(known)
            settled(cache)


def chain(folder: Path) -> list[Path]:
    """The points that continue others, by position."""
    return [p for p in point_files(folder) if parse_name(p.name).after]  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["deleted", "damaged", "cut off", "unreadable"])
def test_a_point_without_a_link_is_not_there(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(("full", "rotating"))
    ends = conversation(model, tmp_path, 3)
    link = chain(tmp_path)[-2]
    position = parse_name(link.name).start  # type: ignore[union-attr]
    if how == "deleted":
        link.unlink()
    elif how == "damaged":
        flip(link, link.stat().st_size - 3)
    elif how == "cut off":
        link.write_bytes(link.read_bytes()[:-9])
    else:
        link.write_bytes(b"")
    with opened(model, tmp_path, disk_mode="through") as cache:
        session = Session(model, cache, [*ends[-1], 5]).prefill()
        assert session.cached < position
        known = session.decode(2).commit()
        assert cache.flush(20)
        settled(cache)
        assert cache.durable(known) == len(known)
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*known, 5]).prefill().cached == len(known)
        assert Session(model, cache, [*ends[0], 5]).prefill().cached == len(ends[0])


def test_what_was_read_of_a_damaged_chain_is_freed(tmp_path: Path) -> None:
    model = FakeModel(("full", "rotating"))
    ends = conversation(model, tmp_path, 4)
    last = chain(tmp_path)[-1]
    flip(last, last.stat().st_size - 3)
    with opened(model, tmp_path) as cache:
        session = Session(model, cache, [*ends[-1], 5])
        assert session.cached < len(ends[-1])
        session.cancel()
        cache.clear(disk=False)
        assert cache.stats().bytes["checkpoint"] == 0


def test_points_wait_for_a_link_that_cannot_be_read_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(("full", "rotating"))
    ends = conversation(model, tmp_path, 4)
    link, before = chain(tmp_path)[-2], files(tmp_path)
    with unreadable(monkeypatch, {link.name}), opened(model, tmp_path) as cache:
        session = Session(model, cache, [*ends[-1], 5])
        assert session.cached < len(ends[-1])
        session.cancel()
        assert files(tmp_path) == before  # the last point waits for its link
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*ends[-1], 5]).cached == len(ends[-1])


def test_killed_between_two_points(tmp_path: Path) -> None:
    model = FakeModel(("full", "rotating"))
    ends = conversation(model, tmp_path, 3)
    chain(tmp_path)[-1].unlink()
    with opened(model, tmp_path) as cache:
        assert len(ends[-2]) <= cache.durable(ends[-1]) < len(ends[-1])
        session = Session(model, cache, [*ends[-1], 5]).prefill()
        assert session.cached == cache.durable(ends[-1])


def test_points_of_format_2_are_read_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(("full", "rotating"))
    with monkeypatch.context() as patch:
        patch.setattr(runs, "MOST", 0)
        patch.setattr(jobs, "_continued", lambda node, checkpoint: None)
        ends = conversation(model, tmp_path, 2)
        assert {parse_name(p.name).version for p in files(tmp_path)} == {2}  # type: ignore[union-attr]
    with opened(model, tmp_path, disk_mode="through") as cache:
        session = Session(model, cache, [*ends[-1], 5]).prefill()
        assert session.cached == len(ends[-1])
        known = session.decode(2).commit()
        assert cache.flush(20)
    assert chain(tmp_path)
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*known, 5]).prefill().cached == len(known)


def test_a_chain_does_not_become_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LINKS_MOST", 3)
    model, known = FakeModel(("full", "rotating")), text(2 * WINDOW, 1)
    with opened(model, tmp_path, disk_mode="through") as cache:
        for i in range(8):
            known = turn(model, cache, [*known, i], 1)
            assert cache.flush(20)
    names = [parse_name(p.name) for p in point_files(tmp_path)]
    assert 0 < sum(bool(n.after) for n in names if n) < len(names) - 1
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*known, 5]).prefill().cached == len(known)


def test_eviction_from_disk_leaves_no_point_without_its_link(tmp_path: Path) -> None:
    model = FakeModel(("full", "rotating"))
    conversation(model, tmp_path, 5)
    budget = 4096 * (len(files(tmp_path)) - 3)  # each takes a block
    with opened(model, tmp_path, disk_budget=budget) as cache:
        settled(cache)
    there = {parse_name(p.name).address for p in files(tmp_path)}  # type: ignore[union-attr]
    assert chain(tmp_path)
    assert all(parse_name(p.name).after in there for p in chain(tmp_path))  # type: ignore[union-attr]
