"""When KV from a shared store pays, what a store holds, and the simulated fleet, on cases with known answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from onefold.cache.tiers.remote.grid import VALUE_BYTES, record_tokens

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


# -- sizes ------------------------------------------------------------------------------------------------


def test_bytes_of_a_token_are_those_of_the_formats() -> None:
    import scale

    sizes = {shape.name: shape.token for shape in scale.SHAPES}
    assert sizes["Llama-8B, 16"] == 131072
    assert sizes["Llama-8B, 8"] / 131072 == pytest.approx(0.516, abs=0.001)
    assert sizes["Llama-8B, 4"] / 131072 == pytest.approx(0.289, abs=0.001)
    assert sizes["Qwen3.5-27B, 16"] == 65536 and pytest.approx(154e6, rel=0.001) == scale.QWEN_STATE


def test_a_hit_arrives_as_fast_as_its_bytes() -> None:
    import scale

    shape = scale.Shape("plain", 131072)
    n, head = record_tokens(shape.token), scale.head_bytes(31)
    assert n == 31 and 50 < head < 300
    assert scale.values_of(shape, 5 * n + 3) == [(5, n * 131072 + scale.head_bytes(n))]
    bytes_of_hit = 264 * (31 * 131072 + head)  # 264 records have 8,184 tokens
    assert scale.hit_bytes(shape, 8192) == bytes_of_hit
    assert scale.arrival(shape, 1e9, 8192) == pytest.approx(8184 / (bytes_of_hit / 1e9), rel=0.002)
    assert scale.arrival(shape, 2e9, 8192) == pytest.approx(2 * scale.arrival(shape, 1e9, 8192))


def test_a_checkpoint_is_read_with_each_hit_in_parts_that_fit_a_value() -> None:
    import scale

    plain, state = scale.Shape("plain", 65536), scale.Shape("state", 65536, 100_000_000)
    parts = scale.values_of(state, 0)[1:]
    assert sum(n * (size - scale.head_bytes(0)) for n, size in parts) == 100_000_000
    assert all(size <= VALUE_BYTES for _, size in parts)
    records = [(8192 // 32, 32 * 65536 + scale.head_bytes(32))]  # at powers of two, where checkpoints can be
    assert scale.values_of(state, 8192)[:1] == records and scale.values_of(plain, 8192)[0][0] == 8192 // 63
    assert scale.hit_bytes(state, 8192) - records[0][0] * records[0][1] == pytest.approx(100_000_000, rel=0.001)


def test_how_long_a_hit_must_be_to_pay() -> None:
    import scale

    plain, state = scale.Shape("plain", 65536), scale.Shape("state", 65536, 50_000_000)
    n, arrives = record_tokens(65536, edges=True), 1e9 / 65536
    assert scale.pays_from(plain, 1e9, 1.01 * arrives) == float("inf")
    assert scale.pays_from(plain, 1e9, 0.9 * arrives) == record_tokens(65536)
    least = scale.pays_from(state, 1e9, 0.5 * arrives)
    assert least % n == 0
    for tokens, pays in ((least, True), (least - n, False)):
        reading, computing = scale.hit_bytes(state, int(tokens)) / 1e9, tokens / (0.5 * arrives)
        assert (reading <= computing) is pays


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        (1048576, 1310840),
        (2097352, 2621560),
        (2162888, 2621560),
        (2425032, 2621560),
        (4063432, 4194424),
        (4177920, 4194424),
        (4194304, 5243000),
    ],
)
def test_what_a_value_takes_in_a_redis_is_what_it_says(value: int, taken: int) -> None:
    """`MEMORY USAGE` of Redis 7.0.15 on x86-64, without its other table."""
    import scale

    assert scale.in_redis(value) == pytest.approx(taken, abs=64)


def test_conversations_in_a_store() -> None:
    import scale

    shape = scale.Shape("plain", 131072)
    bucket, redis = (scale.conversation_bytes(shape, 8192, redis=r) for r in (False, True))
    assert bucket == 264 * (31 * 131072 + scale.head_bytes(31))
    assert redis == 264 * (1 << 22) + 264 * scale.KEY_BYTES  # 4 MiB each
    assert 64e9 // redis == 57 and 64e9 // bucket == 59


def test_what_many_machines_ask_of_a_store() -> None:
    import scale

    shape, load = scale.Shape("plain", 65536), scale.Load(1000, 0.5, 0.25, 0.8, 4)
    asked = scale.demand(10, load, shape)
    token = 65536 + scale.head_bytes(63) / 63
    assert asked.looks == pytest.approx(10 * 1000 * 0.8 / 63)
    assert asked.served == pytest.approx(10 * 1000 * 0.5 * token)
    assert asked.taken == pytest.approx(asked.served / 2)
    assert scale.breaking(asked, 1) == ["1 GbE", "2.5 GbE"]
    assert scale.breaking(asked, 4) == ["1 GbE", "2.5 GbE", "10 GbE"]
    assert scale.breaking(scale.demand(1, load, shape), 1) == []
    assert scale.breaking(scale.Demand(2e5, 1, 1), 1) == ["looks"]
    assert scale.breaking(scale.Demand(1, 0.6 * scale.GET_A_SECOND, 0.6 * scale.SET_A_SECOND), 1)[-1] == "one Redis"


def test_the_script_prints_its_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import scale

    monkeypatch.setenv("COLUMNS", "200")
    scale.main([])
    out = capsys.readouterr().out
    assert all(shape.name in out for shape in scale.SHAPES) and "100 GbE" in out and "1,000" in out
    scale.main(["--show", "pays", "--token", "98304", "--link", "0.6", "--prefill", "450"])
    assert "own model" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        scale.main(["--token", "9000000"])


# -- the fleet ----------------------------------------------------------------------------------------------


def requests_of(*prompts: tuple[float, Sequence[int]]) -> list[Any]:
    from trace_files import HASHED, Request

    return [Request(now, list(blocks), HASHED) for now, blocks in prompts]


def ran(requests: list[Any], servers: int, room: int = 1000, **settings: Any) -> Any:
    import fleet

    return fleet.Fleet(fleet.Setup(servers, room, **settings)).run(requests)


TALK = [(100.0 * i, range(5 * (i + 1))) for i in range(4)]
"""Four requests of a conversation: of 5, 10, 15 and 20 blocks."""


def test_a_conversation_is_what_shares_more_than_all_prompts_do() -> None:
    import fleet

    first, second, other, short = [0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 7], [0]
    names = fleet.conversations([first, second, other, short, short, []])
    assert names[0] == names[1] and len({names[0], *names[2:]}) == 5
    assert len(set(fleet.conversations([[1, 2], [3, 4], [1, 5]]))) == 2  # all share nothing
    assert fleet.conversations([]) == []


def test_servers_on_a_ring_keep_their_conversations_when_one_joins() -> None:
    import fleet

    few, more = fleet.Ring(8), fleet.Ring(9)
    keys = [str(i) for i in range(2000)]
    moved = [k for k in keys if few.server_of(k) != more.server_of(k)]
    assert {more.server_of(k) for k in moved} == {8} and len(moved) < 2 * len(keys) / 9
    counts = [sum(few.server_of(k) == s for k in keys) for s in range(8)]
    assert min(counts) > 0.5 * len(keys) / 8


def test_round_robin_finds_nothing_that_another_server_has() -> None:
    requests = requests_of(*TALK)
    alone, apart, together = ran(requests, 1), ran(requests, 4), ran(requests, 4, affinity=True)
    assert (alone.asked, alone.local, alone.computed.total()) == (50, 30, 20)
    assert (apart.local, apart.computed) == (0, {0: 5, 1: 10, 2: 15, 3: 20})
    assert together.local == 30 and together.imbalance == 4


@pytest.mark.parametrize("writes", ["all", "shared"])
def test_the_store_has_what_another_server_computed(writes: str) -> None:
    figures = ran(requests_of(*TALK), 4, writes=writes, store=1000)
    assert (figures.local, figures.remote, figures.computed.total()) == (0, 30, 20)
    assert (figures.sent, figures.stored, figures.looked) == (20, 20, 50)
    assert figures.served_in.total() == 30 and figures.sent_in.total() == 20


def test_the_end_of_a_turn_is_written_after_a_while_and_what_is_shared_at_once() -> None:
    soon = requests_of((0, [0, 1, 2]), (5, [0, 1, 2]), (60, [0, 1, 2]))
    assert [ran(soon, 3, writes=w, store=9).remote for w in ("all", "shared")] == [6, 3]
    # one server sees where two prompts part, and another one asks for what they share
    parting = requests_of((0, [0, 1, 2, 3]), (1, [9]), (2, [0, 1, 7, 8]), (3, [0, 1, 5]))
    assert ran(parting, 2, writes="shared", store=99).remote == 2
    # the first prompt is replaced by the one that continues it
    going_on = ran(requests_of((0, [0, 1]), (20, [0, 1, 2]), (40, [0, 1, 2, 3])), 1, writes="shared", store=99)
    assert going_on.sent == 4 and going_on.sent_in[7] == 4  # 30 s after the last


def test_what_was_evicted_before_its_turn_is_not_written() -> None:
    requests = requests_of((0, [1, 2, 3, 4]), (10, [5, 6, 7]), (50, [1, 2, 3, 4]))
    figures = ran(requests, 1, room=5, writes="shared", store=99)  # two blocks of the first stay
    assert figures.local == 2 and figures.stored == 7
    assert ran(requests[:2], 1, room=5, writes="shared", store=99).stored == 5


def test_the_store_forgets_what_was_not_used() -> None:
    talk = requests_of((0, [1, 2]), (100, [1, 2]), (300, [1, 2]))
    assert ran(talk, 3, writes="all", store=9, ttl=150).remote == 2
    assert ran(talk, 3, writes="all", store=9, ttl=250).remote == 4
    full = requests_of((0, [1, 2]), (1, [3, 4]), (2, [5, 6]), (3, [1, 2]), (4, [5, 6]))
    assert ran(full, 5, writes="all", store=4).remote == 2


def test_writing_can_renew_what_the_store_has() -> None:
    """A conversation stays on the first of two servers, which never reads its beginning from the store."""
    requests = requests_of(*enumerate([[1], [8], [1, 2], [9], [1, 2, 3], [1, 2, 3]]))
    assert [ran(requests, 2, writes="all", store=4, refresh=r).remote for r in (True, False)] == [3, 0]


def test_a_fleet_of_one_is_block_lru() -> None:
    import trace_bounds

    chance = random.Random(1)
    prompts = [list(range(1000 * k, 1000 * k + chance.randint(1, 30))) for k in chance.choices(range(12), k=300)]
    requests = requests_of(*((float(i), p) for i, p in enumerate(prompts)))
    for room in (40, 90):
        figures = ran(requests, 1, room=room)
        assert figures.local / figures.asked == trace_bounds.least_recently_used(prompts, room)
        both = ran(requests, 3, room=room, writes="all", store=10_000)
        distinct = len({b for p in prompts for b in p})
        assert both.computed.total() == distinct == both.stored


def test_real_caches_find_what_lists_of_blocks_do() -> None:
    import fleet

    requests = requests_of(*((float(10 * i), range(1000 * (i % 6), 1000 * (i % 6) + 20 + i)) for i in range(24)))
    for servers, affinity in ((1, False), (3, True)):
        setup = fleet.Setup(servers, 400, affinity)
        figures = fleet.Fleet(setup).run(requests)
        found = fleet.in_real_caches(setup, requests)
        assert found == pytest.approx(figures.local / figures.asked, abs=0.02) and found > 0.5


def test_sizes_and_times_of_the_command_line() -> None:
    import fleet

    assert fleet.bytes_of("64GB") == 64e9 and fleet.bytes_of("1.5TB") == 1.5e12
    assert fleet.seconds_of("90s") == 90 and fleet.seconds_of("30d") == 30 * 86400
    assert fleet.tokens_of("256k") == 262144
    for wrong in (fleet.bytes_of, fleet.seconds_of):
        with pytest.raises(ValueError, match="write"):
            wrong("12")


def test_the_simulation_prints_its_table_and_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fleet

    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "t.jsonl"
    lines = [{"timestamp": 1000 * t, "input_length": 512 * len(b), "hash_ids": list(b)} for t, b in TALK]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fleet.main([str(path), "--servers", "1,4"])
    out = capsys.readouterr().out
    assert "A simulation" in out and out.count("round robin") == 4 and out.count("affinity + store") == 2
    assert "0.600" in out  # 30 of 50 blocks
