"""Replaying traces: the files, the ways that are compared, and the cache itself on stand-ins."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from onefold.cache.memory.checkpoints import PER_PATH
from onefold.cache.memory.eviction import LONGEST_PAUSE, PERSON_PAUSE

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def session(*requests: tuple[float, int, int, int, str], size: int = 64) -> dict[str, Any]:
    """A session: each request's time, `ref`, `keep` and `new`, and why its answer ended."""
    chains: list[int] = []
    for _, _, keep, new, _ in requests:
        chains.append(keep + new)
    told = [
        [t, n * size, 10, 0, 1.0, stop, 0, ref, keep, new]
        for n, (t, ref, keep, new, stop) in zip(chains, requests, strict=True)
    ]
    return {"block_size": size, "reqs": told}


def turns(n: int, first: int, more: int, gap: float, stop: str = "tool_use") -> dict[str, Any]:
    """A session that goes on `n` times, with so many seconds between."""
    made, length = [(0.0, -1, 0, first, stop)], first
    for i in range(1, n):
        made.append((i * gap, i - 1, length, more, stop))
        length += more
    return session(*made)


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mixed(seed: int, n: int = 30) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [turns(chance.randint(1, 8), chance.randint(8, 40), chance.randint(1, 6), 20.0) for _ in range(n)]


# -- files ------------------------------------------------------------------------------------------


def test_sessions_share_what_their_prompts_share_and_nothing_else(tmp_path: Path) -> None:
    import trace_files

    branching = session((0, -1, 0, 4, "tool_use"), (5, 0, 4, 2, "end_turn"), (9, 0, 3, 2, ""))
    path = written(tmp_path / "t.jsonl", branching, turns(1, 3, 0, 0))
    made = trace_files.load(path, users=1)
    first, second, third, other = (r.blocks for r in made)
    assert second[:4] == first and third[:3] == first[:3] and third[3] not in first + second
    assert not set(other) & {*first, *second, *third}
    assert [r.ended for r in made] == [False, True, None, False]
    assert [r.n_tokens for r in made] == [256, 384, 320, 192] and len(made[0].tokens()) == 256
    assert (made[0].tokens()[192:] != made[2].tokens()[192:256]).all()
    assert made[3].time == 9 + 1 + 60  # when the first has ended, and a minute later
    assert made[0].coarse(128) == [first[1], first[3]]


def test_users_take_turns_and_pauses_are_capped(tmp_path: Path) -> None:
    import trace_files

    path = written(tmp_path / "t.jsonl", *[turns(2, 4, 1, 9000.0)] * 3)
    assert [r.time for r in trace_files.load(path, users=2)] == [0, 0, 1800, 1800, 1861, 3661]
    halves = [trace_files.load(path, users=2, half=h) for h in (0, 1)]
    assert [len(h) for h in halves] == [4, 2]


def test_hashes_of_requests(tmp_path: Path) -> None:
    import trace_files

    path = written(tmp_path / "t.jsonl", {"timestamp": 1500, "input_length": 1100, "hash_ids": [7, 8, 9]})
    (request,) = trace_files.load(path)
    assert (request.time, request.blocks, request.n_tokens) == (1.5, [7, 8], 1024)


def test_another_format_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    import trace_files

    with pytest.raises(ValueError, match=r'is not a trace: each line must be an object with "reqs" or "hash_ids"'):
        trace_files.load(written(tmp_path / "t.jsonl", {"prompt": "hello"}))


# -- what it is compared with -------------------------------------------------------------------------


def test_bounds_of_two_prompts_by_turns() -> None:
    """Two conversations of 4 blocks by turns, with room for 6: LRU keeps two blocks of one, and the best possible keeps
    four of one and two of the other."""
    import trace_bounds

    a, b = [1, 2, 3, 4], [11, 12, 13, 14]
    requests = [a, b] * 10
    assert trace_bounds.least_recently_used(requests, 6) == pytest.approx(18 * 2 / 80)
    assert trace_bounds.whole_conversations(requests, 6) == 0
    best = trace_bounds.best_possible(requests, 6)
    running = trace_bounds.best_possible(requests, 6, holds_running=True)
    assert best > running == pytest.approx(18 * 2 / 80)
    assert trace_bounds.best_possible(requests, 8) == pytest.approx(18 * 4 / 80)
    assert trace_bounds.whole_conversations(requests, 8) == pytest.approx(18 * 4 / 80)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_finds_more_than_the_best_possible(tmp_path: Path, seed: int) -> None:
    import trace_bounds
    import trace_files
    import trace_orders

    requests = trace_files.load(written(tmp_path / "t.jsonl", *mixed(seed)), users=4)
    blocks = [r.coarse(64) for r in requests]
    for room in (20, 60, 120):
        running = trace_bounds.best_possible(blocks, room, holds_running=True)
        assert trace_bounds.best_possible(blocks, room) >= running
        assert trace_bounds.whole_conversations(blocks, room) <= running
        for name, make in trace_orders.ORDERS.items():
            assert 0 <= trace_orders.Simulation(room, make()).run(requests, 64) <= running + 1e-9, name
        if room > max(map(len, blocks)):  # else blocks keep what a tree has no room for
            known = trace_bounds.least_recently_used(blocks, room)
            found = trace_orders.Simulation(room, trace_orders.Order()).run(requests, 64)
            assert found == pytest.approx(known, abs=0.02)  # some requests come at the same time


# -- the cache ------------------------------------------------------------------------------------------


def replay(requests: Any, room: int, **options: Any) -> Any:
    import trace_cache

    sizes = options.pop("sizes", None) or trace_cache.plain(16)
    made = trace_cache.Replay(trace_cache.Settings(sizes, room * sizes.token, **options))
    peak = 0
    for request in requests:
        made.run([request])
        peak = max(peak, made.ledger.peak_bytes)
        assert made.check() == []
    assert peak <= made.ledger.budget_bytes
    made.close()
    return made


def test_a_roomy_cache_finds_all_that_was_there_before(tmp_path: Path) -> None:
    import trace_files

    requests = trace_files.load(written(tmp_path / "t.jsonl", turns(6, 40, 5, 10.0)), users=1)
    counts = replay(requests, 20_000).counts
    assert counts["asked"] == sum(r.n_tokens for r in requests) and counts["refused"] == 0
    assert counts["found"] == sum(r.n_tokens for r in requests[:-1])


@pytest.mark.parametrize("seed", range(2))
def test_a_small_cache_finds_about_what_its_order_finds_by_blocks(tmp_path: Path, seed: int) -> None:
    """The real tree, ledger and eviction, and the few lines that orders are tried with. A part of the budget is not KV:
    MLX's pool, scratch, and what a copy needs."""
    import trace_files
    import trace_orders

    requests = trace_files.load(written(tmp_path / "t.jsonl", *mixed(seed, 40)), users=6)
    made = replay(requests, 8192)
    found = made.counts["found"] / made.counts["asked"]
    rooms = [int(8192 * share) // 64 for share in (0.80, 1.0)]
    low, high = (trace_orders.Simulation(r, trace_orders.ByPause(told=True)).run(requests, 64) for r in rooms)
    assert low - 0.02 <= found <= high + 0.02


def test_nothing_is_evicted_before_its_bytes_are_needed(tmp_path: Path) -> None:
    import trace_files

    requests = trace_files.load(written(tmp_path / "t.jsonl", *[turns(1, 16, 0, 0)] * 40), users=1)
    made, marked = replay(requests, 16_384), replay(requests, 16_384, high_water=0.7, low_water=0.5)
    assert made.state.store.owned > 0.88 * 16_384  # a 16th is MLX's pool
    assert marked.state.store.owned <= 0.7 * 16_384


def test_who_comes_back_soon_stays_before_who_waits_for_a_person(tmp_path: Path) -> None:
    """Three conversations, and room for two: when bytes are short, the one that was told to be over goes."""
    import trace_files

    soon, person = turns(6, 40, 1, 10.0), turns(2, 40, 1, 45.0, "end_turn")
    requests = trace_files.load(written(tmp_path / "t.jsonl", soon, person), users=2)
    made = replay(requests, 20_000)
    pauses = sorted(n.pause for n in made.state.nodes.nodes())
    assert pauses == pytest.approx([10, PERSON_PAUSE])
    untold = replay(requests, 20_000, hints=False)
    assert sorted(n.pause for n in untold.state.nodes.nodes()) == pytest.approx([10, 45])


def test_a_branch_is_not_expected_back_as_soon_as_what_it_left(tmp_path: Path) -> None:
    import trace_files

    branching = session((0, -1, 0, 40, ""), (4, 0, 40, 2, ""), (8, 1, 42, 2, ""), (9, 0, 20, 30, ""))
    made = replay(trace_files.load(written(tmp_path / "t.jsonl", branching), users=1), 40_000)
    shared, *ends = sorted(made.state.nodes.nodes(), key=lambda n: n.end)
    assert shared.end == 20 * 64 and shared.pause == pytest.approx(1)
    assert sorted(n.pause for n in ends) == pytest.approx([4, LONGEST_PAUSE])


@pytest.mark.parametrize("through", [False, True])
def test_what_memory_has_no_room_for_is_found_on_the_disk(tmp_path: Path, through: bool) -> None:
    import trace_cache
    import trace_files

    requests = trace_files.load(written(tmp_path / "t.jsonl", *[turns(3, 40, 2, 100.0)] * 8), users=4)
    room, token = 6000, trace_cache.plain(16).token
    alone = replay(requests, room).counts
    both = replay(requests, room, disk=40_000 * token, through=through).counts
    assert both["found"] > alone["found"] and both["from_disk"] > 0
    assert both["found"] == sum(min(r.n_tokens, q.n_tokens) for q, r in following(requests))
    little = replay(requests, room, disk=3000 * token, through=through).counts
    assert little["found"] <= both["found"]


def following(requests: Any) -> list[tuple[Any, Any]]:
    """Each request that continues another, with that one."""
    pairs = []
    for i, request in enumerate(requests):
        before = [r for r in requests[:i] if r.blocks == request.blocks[: len(r.blocks)]]
        if before:
            pairs.append((max(before, key=lambda r: len(r.blocks)), request))
    return pairs


def test_models_that_cannot_be_cut_keep_few_checkpoints_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trace_cache
    import trace_files

    from onefold.cache.request import closing

    most, thin = 0, closing.thin_taken

    def counted(hold: Any) -> None:
        nonlocal most
        thin(hold)
        most = max(most, len(hold.taken))

    monkeypatch.setattr(closing, "thin_taken", counted)
    requests = trace_files.load(written(tmp_path / "t.jsonl", turns(3, 1000, 20, 10.0)), users=1)
    made = replay(requests, 85_000, sizes=trace_cache.hybrid())
    assert most == PER_PATH  # of seven that a prompt of 64,000 tokens wants, where memory is short
    assert made.counts["found"] >= sum(r.n_tokens - 2 for r in requests[:-1])


def test_the_script_prints_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import traces

    path = written(tmp_path / "t.jsonl", *[turns(3, 40, 2, 100.0)] * 4)
    traces.main([str(path), "--room", "8k", "--users", "2", "--show", *traces.SHOWN])
    out = capsys.readouterr().out
    assert "12 requests" in out and all(f"{name}:" in out for name in traces.SHOWN)
    assert out.count("| 8k, 1.1 GB |") >= 1 + 2 + 4
