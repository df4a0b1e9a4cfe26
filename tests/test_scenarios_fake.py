"""Reused equals fresh, for every kind of layer and the usual ways in which requests meet.

Each request runs beside a stock run that is fed the same calls (`fake.Session`): every call's logits and
every layer's tokens are compared. How much was reused is asserted too: a cache that never hits fails.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from effort import quick
from fake import (
    KEEP,
    WINDOW,
    FakeModel,
    Fault,
    FaultAt,
    Session,
    assert_close,
    assert_holds,
    leaves_of,
    logits_of,
    settled,
    stock_caches,
    text,
)
from mlx_lm.generate import generate_step

from onefold import BudgetError, CommitError, LeaseClosed, PrefixCache

SLICEABLE = ("full", "composite_kv", "outside")
RECURRENT = ("recurrent", "composite")


@dataclass(frozen=True)
class Case:
    kinds: tuple[str, ...]
    kv: str = "16"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sliceable(self) -> bool:
        return all(k in SLICEABLE for k in self.kinds)

    @property
    def recurrent(self) -> bool:
        return any(k in RECURRENT for k in self.kinds)

    @property
    def counts(self) -> bool:
        """Whether some layer says how many tokens it holds."""
        return self.options.get("advances", True) or any(k != "recurrent" for k in self.kinds)


CASES = {
    "full": Case(("full", "full")),
    "rotating": Case(("rotating",)),
    "rotating_keep": Case(("rotating_keep",)),
    "chunked": Case(("chunked",)),
    "recurrent": Case(("recurrent",)),
    "composite": Case(("composite", "composite")),
    "composite_kv": Case(("composite_kv",)),
    "outside": Case(("outside", "outside")),
    "8": Case(("full", "full"), kv="8", options={"dim": 64}),
    "4": Case(("full", "full"), kv="4", options={"dim": 64}),
    "k8v4+rotating": Case(("full", "rotating"), kv="k8v4", options={"dim": 64}),
    "turbo4+recurrent": Case(("full", "recurrent"), kv="turbo4", options={"dim": 64}),
    "turbo3": Case(("full",), kv="turbo3", options={"dim": 64}),
    "full+rotating": Case(("full", "rotating")),
    "rotating+full": Case(("rotating", "full")),
    "full+recurrent": Case(("full", "recurrent")),
    "recurrent+full": Case(("recurrent", "full")),
    "recurrent that does not count+full": Case(("recurrent", "full"), options={"advances": False}),
    "chunked+full": Case(("chunked", "full")),
    "outside+rotating": Case(("outside", "rotating")),
    "all": Case(("full", "rotating_keep", "composite", "recurrent", "composite_kv")),
}


class World:
    """One model and its cache."""

    def __init__(self, case: Case, budget: str = "64MB") -> None:
        self.case = case
        self.model = FakeModel(case.kinds, **case.options)
        self.cache = PrefixCache(self.model, budget, kv=case.kv, min_checkpoint_tokens=1)
        assert not self.cache.uncached_reason

    def open(self, prompt: Sequence[int], **options: Any) -> Session:
        return Session(self.model, self.cache, prompt, kv=self.case.kv, **options)

    def turn(self, prompt: Sequence[int], *, chunk: int = 7, new: int = 3, **options: Any) -> list[int]:
        """A whole request; returns the conversation as it was committed."""
        return self.open(prompt, **options).prefill(chunk).decode(new).commit()


MIRRORED = ("rotating+full", "recurrent+full", "chunked+full", "outside+rotating")
"""Two kinds that others have in the other order, or that `all` has."""
MOST = [case for name, case in CASES.items() if name not in MIRRORED]


@pytest.fixture(params=quick(CASES.values(), *MOST), ids=CASES.keys())
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    with made.cache:
        yield made
        settled(made.cache)
    assert made.cache.stats().used_bytes == 0  # every account is closed


def on(*names: str) -> pytest.MarkDecorator:
    """Only these cases."""
    return pytest.mark.parametrize("world", [CASES[n] for n in names], ids=names, indirect=True)


# -- one request after the other -------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 9])
def test_a_continued_conversation_is_reused_whole(world: World, chunk: int) -> None:
    said = world.turn(text(WINDOW + 5), chunk=chunk)
    again = world.open(said + text(11, seed=1))
    assert (again.matched, again.cached, again.lease.reason) == (len(said), len(said), "")
    again.prefill(chunk).decode(2).commit()


@on("rotating", "rotating_keep", "chunked", "full+rotating", "chunked+full", "all")
@pytest.mark.parametrize("length", [WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
@pytest.mark.parametrize("chunk", quick([1, 9], 9))
def test_resuming_is_right_around_the_edge_of_a_window(world: World, length: int, chunk: int) -> None:
    said = world.turn(text(length - 1), chunk=chunk, new=1)
    again = world.open(said + text(20, seed=1))
    assert again.cached == length
    again.prefill(chunk).decode(3).commit()


def test_many_turns_each_reuse_all_that_went_before(world: World) -> None:
    said: list[int] = []
    for turn in range(8):
        session = world.open(said + text(6 + turn, seed=turn))
        assert session.cached == len(said)
        said = session.prefill(chunk=1 + turn).decode(4).commit()
    stats = world.cache.stats()
    assert (stats.requests, stats.hits) == (8, 7)
    assert stats.tokens_cached == stats.tokens_matched > 0


def test_an_exact_repeat_runs_just_the_last_token(world: World) -> None:
    prompt = text(WINDOW + 9)
    first = world.turn(prompt)
    again = world.open(prompt)
    assert (again.matched, again.cached) == (len(prompt), len(prompt) - 1)
    assert again.prefill().decode(3).commit() == first


def test_a_branch_at_a_wanted_place_reuses_the_prefix(world: World) -> None:
    prefix = text(WINDOW + 4)
    world.turn(prefix + text(9, seed=1), checkpoints=[len(prefix)])
    branch = world.open(prefix + text(9, seed=2))
    assert (branch.matched, branch.cached) == (len(prefix), len(prefix))
    branch.prefill(4).decode(3).commit()
    back = world.open(prefix + text(9, seed=1))
    assert back.cached == len(prefix) + 8
    back.prefill().decode(1).commit()


def test_a_branch_at_any_place_is_right_and_says_what_it_could_not_reuse(world: World) -> None:
    prefix = text(WINDOW + 4)
    world.turn(prefix + text(9, seed=1))
    branch = world.open(prefix + text(9, seed=2))
    assert branch.matched == len(prefix)
    if world.case.sliceable:
        assert branch.cached == len(prefix)
    assert branch.lease.reason == ("" if branch.cached == len(prefix) else "no checkpoint")
    branch.prefill(4).decode(3).commit()


def test_the_third_branch_off_one_place_reuses_what_the_second_saw(world: World) -> None:
    prefix = text(WINDOW + 4)
    world.turn(prefix + text(9, seed=1))
    second = world.open(prefix + text(9, seed=2))
    for chunk in list(second.lease.chunks()):
        second.feed(chunk.tolist())
    second.prefill().decode(2).commit()
    third = world.open(prefix + text(9, seed=3))
    assert third.cached == len(prefix)
    third.prefill().decode(2).commit()


def test_a_rewind_into_a_segment_is_right(world: World) -> None:
    said = world.turn(text(3 * WINDOW))
    for length in (2 * WINDOW + 3, WINDOW, 5):
        session = world.open(said[:length])
        assert session.matched == length
        if world.case.sliceable:
            assert session.cached == length - 1
        session.prefill(4).decode(3).commit()


def test_a_rewind_reuses_a_window_that_was_not_full(world: World) -> None:
    if world.case.recurrent:
        pytest.skip("a recurrent state cannot be rewound")
    said = world.turn(text(WINDOW - 4), new=2)
    session = world.open(said[:7] + text(3, seed=1))
    assert (session.matched, session.cached) == (7, 7)
    session.prefill().decode(3).commit()


def test_a_branch_off_a_rewound_window_can_be_continued(world: World) -> None:
    if world.case.recurrent:
        pytest.skip("a recurrent state cannot be rewound")
    said = world.turn(text(WINDOW - 4), new=2)
    branch = world.turn(said[:4] + text(3, seed=1), new=1)
    again = world.open(branch + text(9, seed=2))
    assert again.cached == len(branch)
    again.prefill().decode(2).commit()


@on("full", "composite_kv", "8", "4", "outside", "full+rotating")
def test_trimming_a_live_lease_leaves_what_was_committed(world: World) -> None:
    session = world.open(text(6)).prefill().decode(4)
    public = session.commit(close=False)
    session.decode(1)
    for layers in (session.lease.layers, session.stock):
        for leaf in leaves_of(layers):
            assert leaf.trim(3) == 3
    del session.tokens[-3:]
    session.holds()
    session.feed([(public[-2] + 1) % 64, 7])
    session.holds()
    settled(world.cache)
    reader = world.open([*public, 1])
    assert reader.cached == len(public)
    reader.prefill().decode(1)
    own = session.decode(1).commit()
    reader.decode(1).commit()
    for said in (own, public):
        again = world.open([*said, 2])
        assert again.cached == len(said)
        again.prefill().commit()


def test_one_token_is_a_prompt(world: World) -> None:
    said = world.turn(text(1), new=2)
    assert world.open(said[:1]).cached == 0
    session = world.open([*said, 5])
    assert session.cached == 3
    session.prefill().decode(1).commit()
    for lease in list(world.cache.state.leases):
        lease.cancel()


def test_a_stop_token_may_be_left_out_of_the_commit(world: World) -> None:
    prompt = text(WINDOW + 2)
    session = world.open(prompt).prefill().decode(4)
    kept = session.tokens[:-1]
    session.lease.commit(kept)
    settled(world.cache)
    again = world.open(kept + text(5, seed=1))
    if world.case.sliceable:
        assert again.cached == len(kept)
    else:
        assert again.cached >= len(prompt) - 1
    again.prefill().decode(2).commit()


def test_namespaces_share_nothing(world: World) -> None:
    prompt = text(WINDOW + 3)
    world.turn(prompt, namespace="a")
    other = world.open(prompt, namespace="b")
    assert (other.matched, other.cached) == (0, 0)
    other.prefill().decode(2).commit()
    assert world.open(prompt, namespace="a").cached == len(prompt) - 1


def test_generate_step_gives_the_tokens_of_a_stock_run(world: World) -> None:
    def generate(prompt: Sequence[int], layers: list[Any], n: int) -> list[int]:
        tokens = mx.array(np.asarray(prompt, np.int32))
        steps = generate_step(tokens, world.model, max_tokens=n, prompt_cache=layers, prefill_step_size=6)
        return [int(token) for token, _ in steps]

    said: list[int] = []
    for turn in range(3):
        prompt = said + text(WINDOW, seed=turn)
        wanted = generate(prompt, stock_caches(world.model, kv=world.case.kv), 4)
        with world.cache.lease(prompt) as lease:
            assert lease.cached == len(said)
            found = generate(lease.rest, lease.layers, 4)
            assert found == wanted
            said = prompt + found
            lease.commit(said)
        settled(world.cache)


# -- what goes wrong -----------------------------------------------------------------------------


def test_a_retry_after_a_cancel_goes_on_where_it_stopped(world: World) -> None:
    prompt = text(3 * WINDOW)
    first = world.open(prompt).prefill(chunk=6, upto=24)
    first.cancel()
    again = world.open(prompt)
    assert (again.matched, again.cached) == (24, 24)
    again.prefill(5).decode(3).commit()


def test_a_cancel_while_decoding_keeps_the_prompt(world: World) -> None:
    prompt = text(WINDOW + 6)
    world.open(prompt).prefill().decode(5).cancel()
    again = world.open(prompt)
    assert again.cached == len(prompt) - 1
    again.prefill().decode(5).commit()


def test_leaving_the_with_block_is_a_cancel(world: World) -> None:
    prompt = text(2 * WINDOW)
    with pytest.raises(Fault), world.cache.lease(prompt) as lease:
        logits_of(world.model, prompt[:20], lease.layers)
        raise Fault
    settled(world.cache)
    with pytest.raises(LeaseClosed):
        lease.commit(prompt[:20])
    again = world.open(prompt)
    assert again.cached == 20
    again.prefill().decode(1).commit()


def faults(case: Case) -> list[FaultAt]:
    """Every place at which a forward can break off with some layers updated and some not."""
    inside = [FaultAt(i, "inside") for i, kind in enumerate(case.kinds) if kind.startswith("composite")]
    return [FaultAt(i, "after") for i in range(len(case.kinds) - 1)] + inside


FAULTY = pytest.mark.parametrize(
    ("world", "at"),
    [pytest.param(case, at, id=f"{name}-{at.layer}-{at.where}") for name, case in CASES.items() for at in faults(case)],
    indirect=["world"],
)


@FAULTY
def test_an_error_in_prefill_costs_only_the_chunk_that_failed(world: World, at: FaultAt) -> None:
    prompt = text(3 * WINDOW)
    first = world.open(prompt).prefill(chunk=6, upto=24)
    first.fail(prompt[24:33], at)
    settled(world.cache)
    first.cancel()
    again = world.open(prompt)
    assert again.cached == 24
    again.prefill(5).decode(3).commit()


@FAULTY
def test_an_error_in_decode_leaves_what_was_said(world: World, at: FaultAt) -> None:
    first = world.open(text(WINDOW + 3)).prefill().decode(3)
    first.fail([first.next], at)
    said = first.tokens
    first.lease.commit(said)
    settled(world.cache)
    again = world.open(said + text(5, seed=1))
    assert again.cached == len(said)
    again.prefill(5).decode(3).commit()


@FAULTY
@pytest.mark.parametrize("n", [1, 5])
def test_a_failed_forward_can_be_run_again_on_the_same_lease(world: World, at: FaultAt, n: int) -> None:
    prompt = text(3 * WINDOW)
    session = world.open(prompt).prefill(chunk=6, upto=18)
    session.fail(prompt[18 : 18 + n], at)
    session.feed(prompt[18 : 18 + n])
    session.holds()
    session.prefill().decode(2).commit()


@FAULTY
def test_an_error_in_the_first_forward_leaves_nothing(world: World, at: FaultAt) -> None:
    prompt = text(WINDOW + 3)
    first = world.open(prompt)
    first.fail(prompt[:9], at)
    first.cancel()
    again = world.open(prompt)
    assert (again.matched, again.cached) == (0, 0)
    again.prefill().decode(1).commit()


def test_an_error_after_the_last_layer_undoes_the_forward_too(world: World) -> None:
    prompt = text(2 * WINDOW)
    last = FaultAt(len(world.case.kinds) - 1, "after")
    first = world.open(prompt).prefill(chunk=6, upto=12)
    first.fail(prompt[12:20], last)
    first.feed(prompt[12:20])
    first.holds()
    first.fail(prompt[20:21], last)
    first.cancel()
    again = world.open(prompt)
    assert again.cached == 20
    again.prefill(5).decode(3).commit()


def test_a_commit_of_other_tokens_is_refused_and_harms_nothing(world: World) -> None:
    prompt = text(WINDOW + 3)
    session = world.open(prompt).prefill()
    with pytest.raises(CommitError):
        session.lease.commit([(prompt[0] + 1) % 64, *prompt[1:]])
    if world.case.counts:
        with pytest.raises(CommitError):
            session.lease.commit([*prompt, 1])
    session.decode(2).commit()


# -- several requests at once ----------------------------------------------------------------------


def test_two_readers_of_one_prefix_are_both_right(world: World) -> None:
    said = world.turn(text(WINDOW + 7))
    one, two = world.open(said + text(3, seed=1)), world.open(said + text(5, seed=2))
    assert one.cached == two.cached == len(said)
    one.prefill(2)
    two.prefill(3)
    for _ in range(4):
        one.decode(1)
        two.decode(1)
        settled(world.cache)
    ends = [one.commit(), two.commit()]
    for end in ends:
        again = world.open([*end, 1])
        assert again.cached == len(end)
        again.prefill().decode(1).commit()


@on("full", "composite_kv", "8", "turbo4+recurrent", "full+rotating", "composite")
def test_readers_hold_the_prefix_once(world: World) -> None:
    prefix = text(700)
    said = world.turn(prefix, chunk=350)
    token_bytes = world.cache.state.store.token_bytes
    held = []
    sessions = []
    for i in range(3):
        sessions.append(world.open(said + text(4, seed=i + 1)).prefill().decode(2))
        stats = world.cache.stats()
        held.append(stats.bytes["live"] + stats.bytes["stored"])
    assert held[0] >= 700 * token_bytes
    assert held[-1] - held[0] < 700 * token_bytes
    assert world.cache.stats().borrows >= 2
    for session in sessions:
        session.decode(1).commit()


def test_a_reader_that_comes_while_another_appends_leaves_both_right(world: World) -> None:
    said = world.turn(text(WINDOW + 7))
    writer = world.open(said + text(6, seed=1)).prefill(4).decode(2)
    reader = world.open(said + text(5, seed=2))
    assert reader.cached == len(said)
    writer.decode(2)
    reader.prefill(2).decode(2)
    writer.decode(1)
    writer.holds()
    reader.holds()
    ends = [reader.commit(), writer.decode(1).commit()]
    for end in ends:
        again = world.open([*end, 1])
        assert again.cached == len(end)
        again.prefill().commit()


def test_a_published_prefix_can_be_borrowed_while_its_writer_goes_on(world: World) -> None:
    prompt = text(WINDOW + 7)
    writer = world.open(prompt).prefill()
    public = writer.commit(close=False)
    writer.decode(1)
    reader = world.open(public + text(4, seed=2))
    assert reader.cached == len(public)
    for _ in range(3):
        writer.decode(1)
        reader.prefill(2, upto=min(len(reader.prompt), len(reader.tokens) + 2))
        settled(world.cache)
    later = writer.commit(close=False)
    third = world.open([*later, 3])
    assert third.cached == len(later)
    third.prefill().decode(1)
    writer.decode(2)
    for session in (third, writer, reader.prefill().decode(2)):
        end = session.commit()
        assert world.open([*end, 1]).cached == len(end)
    for lease in list(world.cache.state.leases):
        lease.cancel()


def test_publishing_at_every_step_is_right(world: World) -> None:
    writer = world.open(text(WINDOW + 2)).prefill()
    for step in range(6):
        public = writer.decode(1).commit(close=False)
        if step % 2:
            reader = world.open([*public, 7]).prefill().decode(1)
            reader.commit() if step == 3 else reader.cancel()
    writer.decode(1).commit()


def test_two_writers_of_the_same_tokens_end_in_one_node(world: World) -> None:
    prompt = text(WINDOW + 7)
    one, two = world.open(prompt).prefill(5), world.open(prompt).prefill(3)
    first = one.decode(3).commit()
    assert two.decode(3).commit() == first
    again = world.open([*first, 1])
    assert again.cached == len(first)
    again.prefill().decode(1).commit()
    assert world.cache.stats().stored_tokens == (len(again.tokens) if any(leaf_in_track(world)) else 0)


def leaf_in_track(world: World) -> list[bool]:
    return [k in (*SLICEABLE, "composite") for k in world.case.kinds]


def test_a_batch_of_ragged_rows_equals_single_runs(world: World) -> None:
    said = world.turn(text(WINDOW + 7))
    prompts = [said + text(3, seed=1), said + text(9, seed=2), text(4, seed=3), text(2 * WINDOW, seed=4)]
    rows = [world.open(p).prefill() for p in prompts]
    batch = world.cache.batch([r.lease for r in rows])

    def step(rows: list[Session]) -> None:
        found = np.array(batch.step(mx.array([r.next for r in rows])))
        for row, logits in zip(rows, found, strict=True):
            wanted = logits_of(world.model, [row.next], row.stock)[-1]
            assert_close(logits, wanted, row.tolerance)
            row.tokens.append(row.next)
            row.next = int(wanted.argmax())
            row.holds()
        settled(world.cache)

    for _ in range(4):
        step(rows)
    gone = rows.pop(1)
    batch.remove(gone.lease)
    gone.decode(1).commit()
    step(rows)
    late = world.open(said + text(5, seed=5)).prefill()
    batch.add(late.lease)
    rows.append(late)
    for _ in range(3):
        step(rows)
    for row in rows:
        end = row.commit()
        again = world.open([*end, 1])
        assert again.cached == len(end)
        again.prefill().commit()


@FAULTY
def test_an_error_in_a_batch_step_leaves_every_row_as_it_was(world: World, at: FaultAt) -> None:
    rows = [world.open(text(n, seed=n)).prefill().decode(1) for n in (5, WINDOW, WINDOW + 8)]
    batch = world.cache.batch([r.lease for r in rows])
    world.model.fault = at
    with pytest.raises(Fault):
        batch.step(mx.array([r.next for r in rows]))
    world.model.fault = None
    settled(world.cache)
    for row in rows:
        end = row.commit()
        again = world.open([*end, 1])
        assert again.cached == len(end)
        again.prefill().decode(1).commit()


# -- short of bytes ------------------------------------------------------------------------------


SMALL = ("full", "rotating", "recurrent", "composite", "composite_kv", "outside", "full+rotating")


@pytest.mark.parametrize("name", quick(SMALL, "full", "recurrent", "composite", "full+rotating"))
def test_requests_stay_right_while_conversations_are_evicted(name: str) -> None:
    world = World(CASES[name], budget="420KB")
    with world.cache:
        said = {i: world.turn(text(100, seed=i), chunk=10) for i in range(20)}
        reused = 0
        for round_ in range(2):
            for i in (19, 0, 18, 1, 17):
                session = world.open(said[i] + text(5, seed=30 + round_))
                reused += session.cached
                said[i] = session.prefill(10).decode(2).commit()
        stats = world.cache.stats()
        assert reused > 0
        if name not in ("recurrent", "rotating"):  # their states are too small to run out of bytes
            assert stats.evicted_tokens > 0
        assert stats.peak_bytes <= stats.budget_bytes


@pytest.mark.parametrize("name", ["full", "full+rotating", "full+recurrent", "composite", "outside"])
def test_a_prompt_that_can_never_fit_is_refused_and_costs_nothing(name: str) -> None:
    world = World(CASES[name], budget="900KB")
    with world.cache:
        said = [world.turn(text(60, seed=i)) for i in range(3)]
        before = world.cache.stats()
        with pytest.raises(BudgetError):
            world.cache.lease(text(20_000, seed=9))
        settled(world.cache)
        after = world.cache.stats()
        assert after.stored_tokens == before.stored_tokens
        assert after.evicted_tokens == before.evicted_tokens
        assert after.reasons["no room"] == 1
        for conversation in said:
            session = world.open([*conversation, 1])
            assert session.cached == len(conversation)
            session.prefill().commit()


@pytest.mark.parametrize("name", ["full", "full+rotating", "full+recurrent", "composite", "outside"])
def test_a_conversation_that_outgrows_the_budget_keeps_the_part_that_fits(name: str) -> None:
    world = World(CASES[name], budget="900KB")
    with world.cache:
        session = world.open(text(40))
        session.prefill()
        with pytest.raises(BudgetError):
            for seed in range(2000):
                session.feed(text(24, seed=seed))
        session.holds()
        said = session.commit()
        assert len(said) > 256
        again = world.open([*said, 1])
        assert again.cached == len(said)
        again.cancel()


def lower_budget(cache: PrefixCache) -> None:
    """So that more has to go than room alone."""
    cache.set_budget(cache.stats().bytes["stored"] * 3 // 5)
    settled(cache)


@on("full", "full+rotating")
def test_the_budget_can_be_lowered_to_what_the_conversations_need(world: World) -> None:
    world.turn(text(20))
    world.cache.set_budget("2MB")
    settled(world.cache)


@on("full", "full+rotating", "full+recurrent", "outside")
def test_lowering_the_budget_frees_and_later_requests_are_right(world: World) -> None:
    said = [world.turn(text(300, seed=i), chunk=64) for i in range(4)]
    lower_budget(world.cache)
    assert world.cache.stats().evicted_tokens > 0
    world.cache.set_budget("64MB")
    for conversation in said:
        world.open([*conversation, 1]).prefill(64).decode(1).commit()


@on("full", "full+rotating", "full+recurrent", "composite")
def test_a_pinned_prefix_survives_eviction_and_a_released_one_does_not(world: World) -> None:
    said = [world.turn(text(300, seed=i), chunk=64) for i in range(4)]
    pin = world.cache.pin(said[0])
    lower_budget(world.cache)
    world.cache.set_budget("64MB")
    kept = world.open([*said[0], 1])
    assert kept.cached == len(said[0])
    kept.cancel()
    pin.release()
    settled(world.cache)
    world.cache.clear()
    assert world.cache.stats().nodes == 0
    assert world.open(said[0]).cached == 0


def test_clearing_under_an_open_lease_leaves_it_right(world: World) -> None:
    said = world.turn(text(WINDOW + 7))
    world.turn(text(9, seed=8))
    session = world.open(said + text(6, seed=1)).prefill(3)
    world.cache.clear()
    settled(world.cache)
    end = session.decode(3).commit()
    again = world.open([*end, 1])
    assert again.cached == len(end)
    again.prefill().commit()


# -- bounded conversations -------------------------------------------------------------------------

BOUND = (32, 4)


class Bounded(World):
    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = FakeModel(case.kinds, **case.options)
        bound = {"max_kv_size": BOUND[0], "keep": BOUND[1]}
        self.cache = PrefixCache(self.model, "64MB", kv=case.kv, min_checkpoint_tokens=1, **bound)

    def open(self, prompt: Sequence[int], **options: Any) -> Session:
        return super().open(prompt, bound=BOUND, **options)


BOUNDED = {
    "full+full": Case(("full", "full")),
    "full+rotating": Case(("full", "rotating")),
    "full+recurrent": Case(("full", "recurrent")),
    "outside+outside": Case(("outside", "outside")),
    "8": Case(("full", "full"), kv="8", options={"dim": 64}),
    "4": Case(("full", "full"), kv="4", options={"dim": 64}),
    "turbo3": Case(("full", "full"), kv="turbo3", options={"dim": 64}),
}


@pytest.fixture(params=BOUNDED.values(), ids=BOUNDED.keys())
def bounded(request: pytest.FixtureRequest) -> Iterator[Bounded]:
    made = Bounded(request.param)
    with made.cache:
        yield made
        settled(made.cache)


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_below_its_bound_a_conversation_is_reused_like_any_other(bounded: Bounded, chunk: int) -> None:
    plain = World(bounded.case)
    with plain.cache:
        for world in (bounded, plain):
            said = world.turn(text(14), chunk=chunk, checkpoints=[6])
            branch = world.open(said[:6] + text(4, seed=3))
            assert branch.cached == 6
            branch.prefill(chunk).decode(1).commit()
            one, two = world.open(said + text(3, seed=1)), world.open(said + text(4, seed=2))
            assert one.cached == two.cached == len(said)
            one.prefill(chunk)
            two.prefill(chunk)
            for _ in range(3):
                one.decode(1)
                two.decode(1)
            one.commit()
            two.commit()
        ours, theirs = bounded.cache.stats(), plain.cache.stats()
        same = ("hits", "moves", "borrows", "tokens_cached", "stored_tokens", "nodes", "reasons")
        assert [getattr(ours, f) for f in same] == [getattr(theirs, f) for f in same]
        assert ours.bytes["stored"] == theirs.bytes["stored"]  # but no windows in runs under a bound


LENGTHS_AND_CHUNKS = list(itertools.product([28, 31, 32, 33, 50], [1, 9, 40]))


@pytest.mark.parametrize(
    "both",
    quick(LENGTHS_AND_CHUNKS, (28, 40), (31, 9), (32, 1), (33, 9), (50, 40)),
    ids=["-".join(map(str, both)) for both in LENGTHS_AND_CHUNKS],
)
def test_beyond_its_bound_it_equals_a_stock_ring(bounded: Bounded, both: tuple[int, int]) -> None:
    length, chunk = both
    said = bounded.turn(text(length), chunk=chunk, new=3)
    again = bounded.open(said + text(12, seed=1))
    assert again.cached == len(said)
    said = again.prefill(chunk).decode(3).commit()
    again = bounded.open(said + text(2, seed=2))
    assert again.cached == len(said)
    again.prefill(chunk).decode(2).commit()
    assert bounded.cache.stats().reasons["rotated"] >= 1


def test_a_conversation_that_rotates_while_another_reads_its_prefix(bounded: Bounded) -> None:
    said = bounded.turn(text(24))
    reader = bounded.open([*said, 9]).prefill()
    writer = bounded.open(said + text(4, seed=1)).prefill()
    writer.decode(8)
    reader.decode(2)
    settled(bounded.cache)
    ends = [writer.commit(), reader.commit()]
    for end in ends:
        again = bounded.open([*end, 1])
        assert again.cached == len(end)
        again.prefill().decode(1).commit()
    branch = bounded.open([*said, 11])
    if bounded.case.sliceable:
        assert branch.cached == len(said)
    branch.prefill().decode(2).commit()


@pytest.mark.parametrize("n", [1, 6])
def test_an_error_as_the_ring_begins_is_undone(bounded: Bounded, n: int) -> None:
    session = bounded.open(text(BOUND[0])).prefill()
    session.fail(text(n, seed=2), FaultAt(0, "after"))
    session.cancel()
    again = bounded.open(text(BOUND[0]) + text(4, seed=1))
    assert again.cached == BOUND[0]
    again.prefill().decode(3).commit()


def test_rotated_rows_decode_in_one_batch_with_others(bounded: Bounded) -> None:
    rows = [bounded.open(text(n, seed=n)).prefill() for n in (20, 31, 40)]
    batch = bounded.cache.batch([r.lease for r in rows])
    for _ in range(4):
        found = np.array(batch.step(mx.array([r.next for r in rows])))
        for row, logits in zip(rows, found, strict=True):
            wanted = logits_of(bounded.model, [row.next], row.stock)[-1]
            assert_close(logits, wanted, row.tolerance)
            row.tokens.append(row.next)
            row.next = int(wanted.argmax())
            row.holds()
    for row in rows:
        row.commit()


# -- the instrument itself -----------------------------------------------------------------------


def test_the_fake_tells_a_wrong_token_a_wrong_place_and_a_wrong_layer() -> None:
    model = FakeModel(["full", "rotating_keep", "recurrent"])
    tokens = text(10)
    with PrefixCache(model, "64MB") as cache, cache.lease(tokens) as lease:
        logits_of(model, tokens, lease.layers)
        assert_holds(model, lease.layers, tokens)
        wrong = [*tokens[:4], (tokens[4] + 1) % 64, *tokens[5:]]
        swapped = [*tokens[:4], tokens[5], tokens[4], *tokens[6:]]
        for other in (wrong, swapped, tokens[:-1]):
            with pytest.raises(AssertionError):
                assert_holds(model, lease.layers, other)
            found, wanted = (logits_of(model, [*t, 3], model.make_cache())[-1] for t in (tokens, other))
            with pytest.raises(AssertionError):
                assert_close(found, wanted)
        assert len(leaves_of(lease.layers)) == 3
        assert KEEP < WINDOW


def test_a_lease_that_is_collected_while_all_is_recounted_is_no_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = FakeModel(("full", "full"))
    with PrefixCache(model, "40MB") as cache:
        Session(model, cache, text(100)).prefill().commit()
        recount = cache.state.store.check

        def collecting() -> list[str]:
            gc.collect()
            return recount()

        monkeypatch.setattr(cache.state.store, "check", collecting)
        gc.disable()
        try:
            for i in range(3):
                lease: Any = cache.lease([*text(100), i])
                lease.itself = lease
            del lease
            cache.check()
        finally:
            gc.enable()
        settled(cache)
