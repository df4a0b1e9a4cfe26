"""Places that people come back to: ends of turns and of prompts, in memory while there is room, and on disk."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from disk_caches import files, opened, turn
from effort import effort
from fake import FakeModel, Session, settled, text

from onefold import PrefixCache
from onefold.cache.memory import reclaiming
from onefold.cache.memory.checkpoints import DISK_PER_PATH, DISK_RECENT, PER_PATH, Place, surplus
from onefold.cache.tiers.records import catalog

KINDS = {
    "window": ("full", "rotating"),
    "window alone": ("rotating",),
    "chunked": ("chunked", "full"),
    "hybrid": ("full", "recurrent"),
}
QUESTION, ANSWER = 30, 6


def talk(model: FakeModel, cache: PrefixCache, turns: int) -> tuple[list[int], list[int]]:
    """Some turns of a conversation. Returns its tokens, and where each answer ends."""
    said, ends = list[int](), list[int]()
    for i in range(turns):
        said = turn(model, cache, said + text(QUESTION, seed=i), ANSWER)
        ends.append(len(said))
    return said, ends


def reused(model: FakeModel, cache: PrefixCache, said: list[int], ends: list[int]) -> list[int]:
    """Edits the question behind each of these ends, the first one first. Returns how many tokens are reused."""
    found = []
    for i, end in enumerate(ends):
        session = Session(model, cache, said[:end] + text(9, seed=500 + i))
        found.append(session.cached)
        session.prefill(31).decode(1)
        session.lease.cancel()
    return found


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_every_end_of_a_turn_can_be_resumed_while_memory_is_free(kinds: tuple[str, ...]) -> None:
    model = FakeModel(kinds)
    with PrefixCache(model, "64MB") as cache:
        said, ends = talk(model, cache, effort(8, 30))
        assert reused(model, cache, said, ends[1:-1]) == ends[1:-1]
        settled(cache)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_a_prompt_can_be_answered_again_while_memory_is_free(kinds: tuple[str, ...]) -> None:
    model = FakeModel(kinds)
    with PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        said, ends = talk(model, cache, 6)
        for end in ends:
            prompt = said[: end - ANSWER]
            session = Session(model, cache, prompt)
            assert session.cached == len(prompt) - 1
            session.prefill(31).decode(2)
            session.lease.cancel()
        settled(cache)


@pytest.mark.parametrize("kinds", [KINDS["window"], KINDS["hybrid"]], ids=["window", "hybrid"])
def test_surplus_checkpoints_go_before_kv_when_bytes_are_short(kinds: tuple[str, ...]) -> None:
    model = FakeModel(kinds)
    with PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        said, ends = talk(model, cache, 12)
        state = cache.state
        state.lock.run(state.reclaiming.releasing_room())
        before = cache.stats()
        assert before.checkpoints > 2 * PER_PATH
        state.lock.run(state.reclaiming.making_room(1))
        assert cache.stats().checkpoints == before.checkpoints - 1
        state.lock.run(state.reclaiming.making_room(state.nodes.points.bytes // 2))
        after = cache.stats()
        assert after.stored_tokens == before.stored_tokens
        assert PER_PATH <= after.checkpoints <= before.checkpoints * 2 // 3
        assert reused(model, cache, said, ends[-1:]) == ends[-1:]
        settled(cache)


def test_a_short_turn_has_a_checkpoint_while_bytes_are_free_and_a_short_conversation_none() -> None:
    model = FakeModel(KINDS["hybrid"])
    with PrefixCache(model, "64MB", min_checkpoint_tokens=20) as cache:
        turn(model, cache, text(10), 2)
        assert cache.stats().checkpoints == 0
        said = turn(model, cache, text(40), 2)
        assert cache.stats().checkpoints == 2
        again = Session(model, cache, [*said, 1])
        assert again.cached == len(said)
        again.lease.cancel()


@pytest.mark.parametrize(
    ("kinds", "prompt", "kept"),
    [
        (("full", "full"), 60, 60),
        (("full", "full"), 90, 62),
        (KINDS["window"], 60, 59),
        (KINDS["window"], 90, 62),
        (KINDS["hybrid"], 60, 59),
    ],
)
def test_a_prompt_stays_for_others_when_its_conversation_rotates(
    kinds: tuple[str, ...], prompt: int, kept: int
) -> None:
    """Where the bound is reached in the answer, or in the prompt, whose chunks have 31 tokens."""
    model, bound = FakeModel(kinds), (64, 4)
    with PrefixCache(model, "64MB", max_kv_size=64, keep=4, min_checkpoint_tokens=1) as cache:
        first = text(prompt)
        said = turn(model, cache, first, 20, bound=bound)
        other = Session(model, cache, first[:62] + text(1, seed=9), bound=bound)
        assert other.cached == kept
        other.prefill().decode(1)
        other.lease.cancel()
        again = Session(model, cache, [*said, 5], bound=bound)
        assert again.cached == len(said)
        again.lease.cancel()
        settled(cache)


def test_a_conversation_that_rotates_without_room_keeps_to_the_budget() -> None:
    model, bound = FakeModel(("full", "full")), (64, 4)
    with PrefixCache(model, "64MB", max_kv_size=64, keep=4) as cache:
        for i in range(effort(5, 20)):
            turn(model, cache, text(50, seed=i), 30, bound=bound)
            settled(cache)


# -- on disk -----------------------------------------------------------------------------------------


def points(folder: Path) -> list[Path]:
    return [path for path in files(folder) if ".point." in path.name]


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("mode", ["through", "back"])
def test_turns_can_be_resumed_after_a_restart(kinds: tuple[str, ...], mode: str, tmp_path: Path) -> None:
    model = FakeModel(kinds)
    with opened(model, tmp_path, disk_mode=mode) as cache:
        said, ends = talk(model, cache, 12)
        assert cache.flush(20)
    with opened(model, tmp_path, disk_mode=mode) as cache:
        assert reused(model, cache, said, ends[-DISK_RECENT:-1]) == ends[-DISK_RECENT:-1]
        found = reused(model, cache, said, ends[:1])
        assert found[0] in (0, ends[0])
        settled(cache)


def test_what_was_thinned_on_disk_is_not_written_again(tmp_path: Path) -> None:
    model = FakeModel(KINDS["hybrid"])
    with opened(model, tmp_path, disk_mode="through") as cache:
        talk(model, cache, DISK_PER_PATH + 6)
        assert cache.flush(20)
        assert cache.stats().checkpoints > DISK_PER_PATH
        assert len(points(tmp_path)) == DISK_PER_PATH
        written = cache.stats().disk.written_bytes
        assert cache.flush(20, everything=True)
        assert cache.stats().disk.written_bytes == written
        settled(cache)


def test_a_state_that_would_be_thinned_is_not_written_first(tmp_path: Path) -> None:
    model = FakeModel(KINDS["hybrid"])
    sizes = []
    for turns in (DISK_PER_PATH + 2, DISK_PER_PATH + 12):
        with opened(model, tmp_path / str(turns), disk_mode="back") as cache:
            said, ends = talk(model, cache, turns)
            assert cache.flush(20, everything=True)
            sizes.append(cache.stats().disk.written_bytes)
            assert len(points(tmp_path / str(turns))) == DISK_PER_PATH
            assert sizes[-1] == sum(path.stat().st_size for path in files(tmp_path / str(turns)))
            assert [cache.durable([*said[:end], 1]) for end in ends[-DISK_RECENT:]] == ends[-DISK_RECENT:]
            settled(cache)
    assert sizes[0] < sizes[1]


def test_states_have_a_share_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "STATES_SHARE", 8)  # those of this model are no larger than a turn's KV
    model = FakeModel(KINDS["hybrid"])
    conversations = []
    with opened(model, tmp_path, disk_mode="through") as cache:
        talk(model, cache, 4)
        assert cache.flush(20)
        state = -(-points(tmp_path)[0].stat().st_size // 4096) * 4096
    for path in files(tmp_path):
        path.unlink()
    budget = 8 * (10 * state + 100)
    with opened(model, tmp_path, disk_mode="through", disk_budget=budget) as cache:
        for i in range(3):
            said = text(QUESTION, seed=1000 * i + 1000)
            for j in range(7):
                said = turn(model, cache, said + text(QUESTION, seed=1000 * i + j), ANSWER)
                assert cache.flush(20)
                assert len(points(tmp_path)) <= 10
            conversations.append(said)
        assert len(points(tmp_path)) == 10
        assert [cache.durable([*said, 1]) for said in conversations] == [len(said) for said in conversations]
        settled(cache)
    with opened(model, tmp_path, disk_mode="through", disk_budget=budget) as cache:
        for said in conversations:
            assert Session(model, cache, [*said, 1]).cached == len(said)


def test_one_recurrent_state_is_written_a_turn(tmp_path: Path) -> None:
    model = FakeModel(KINDS["hybrid"])
    with opened(model, tmp_path, disk_mode="through") as cache:
        for i in range(1, 6):
            talk(model, cache, i)
            assert cache.flush(20)
            assert len(points(tmp_path)) == i + 1  # and the end of the first prompt, before which there is none


def test_a_state_in_the_middle_of_a_turn_is_written_where_another_conversation_branches_off(tmp_path: Path) -> None:
    model = FakeModel(KINDS["hybrid"])
    with opened(model, tmp_path, disk_mode="through") as cache:
        said, ends = talk(model, cache, 2)
        prompt = said[: ends[1] - ANSWER]
        other = Session(model, cache, prompt[:-1] + text(4, seed=77))
        assert other.cached == len(prompt) - 1
        other.prefill().decode(2).commit()
        assert cache.flush(20)
        assert len(points(tmp_path)) == 5  # the first prompt's end, two of turns, the other's, and where they part


@pytest.mark.parametrize("kinds", [KINDS["window"], KINDS["hybrid"]], ids=["window", "hybrid"])
def test_the_first_answer_can_be_asked_for_again_after_a_restart(kinds: tuple[str, ...], tmp_path: Path) -> None:
    model = FakeModel(kinds)
    with opened(model, tmp_path, disk_mode="through") as cache:
        said, _ = talk(model, cache, 1)
        assert cache.flush(20)
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, said[:QUESTION]).cached == QUESTION - 1


@pytest.mark.parametrize("kinds", [KINDS["window"], KINDS["hybrid"]], ids=["window", "hybrid"])
@pytest.mark.parametrize("more", [0, 2])
def test_what_was_committed_in_the_middle_of_a_lease_is_written(
    kinds: tuple[str, ...], more: int, tmp_path: Path
) -> None:
    model, tokens = FakeModel(kinds), text(130)
    with opened(model, tmp_path, disk_mode="through") as cache:
        session = Session(model, cache, tokens).prefill(31)
        session.lease.commit(tokens, close=False)
        if more:
            session.decode(more)
        session.lease.cancel()
        assert cache.flush(20)
        assert cache.durable(tokens) == len(tokens)
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*tokens, 1]).cached == len(tokens)


@pytest.mark.parametrize("more", [text(11, seed=900), []], ids=["branches off", "ends"])
def test_a_thinned_place_is_written_again_for_another_conversation(more: list[int], tmp_path: Path) -> None:
    """Which branches off there, or ends there."""
    model = FakeModel(KINDS["hybrid"])
    with opened(model, tmp_path, disk_mode="through") as cache:
        said, ends = talk(model, cache, DISK_PER_PATH + 6)
        assert cache.flush(20)
        thinned = next(end for end in ends[1:] if cache.durable([*said[:end], 1]) < end)
        Session(model, cache, said[:thinned] + more).prefill().commit()
        assert cache.flush(20)
        assert cache.durable([*said[:thinned], 1]) == thinned
    with opened(model, tmp_path) as cache:
        assert Session(model, cache, [*said[:thinned], 1]).cached == thinned


def test_requests_that_are_open_take_no_place_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the share has room for a few checkpoints: each request keeps its newest, and drops nothing in vain."""
    model = FakeModel(KINDS["hybrid"])
    with PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        size = _point_bytes(model)
        monkeypatch.setattr(reclaiming, "POINTS_SHARE", cache.state.ledger.budget_bytes // (4 * size))
        first = Session(model, cache, text(400), checkpoints=range(50, 400, 50)).prefill(50).decode(5)
        said = first.commit()
        again = Session(model, cache, [*said, 1])
        assert again.cached == len(said)
        again.lease.cancel()
        settled(cache)


def _point_bytes(model: FakeModel) -> int:
    with PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        turn(model, cache, text(40), 1)
        stats = cache.stats()
        return stats.bytes["checkpoint"] // stats.checkpoints


def test_the_last_ones_stay_and_older_ones_become_sparser() -> None:
    turns = [Place(500 * i, False) for i in range(1, 200)]
    kept, dropped = list[Place](), set[int]()
    for place in turns:
        kept.append(place)
        dropped |= {*surplus(kept, DISK_PER_PATH, DISK_RECENT)}
        kept = [p for p in kept if p.position not in dropped]
    assert len(kept) == DISK_PER_PATH
    assert kept[-DISK_RECENT:] == turns[-DISK_RECENT:]
    gaps = [b.position - a.position for a, b in itertools.pairwise(kept)]
    assert max(gaps) == max(gaps[: DISK_PER_PATH - DISK_RECENT]) >= 4 * 500
