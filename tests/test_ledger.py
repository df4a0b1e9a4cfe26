"""Bytes: reserved before they are allocated, counted once, and never beyond the budget."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.cache.memory.ledger import HELD, Account, Ledger, Purpose
from onefold.cache.memory.segment import Store
from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.memory.track import Track
from onefold.errors import BudgetError, ConfigError


def state(ledger: Ledger) -> tuple[Any, ...]:
    accounts = sorted((a.purpose.value, a.bytes) for a in ledger._accounts)
    return ledger.by_purpose(), ledger.used_bytes, ledger.budget_bytes, ledger.peak_bytes, accounts


def test_reservations_are_counted_by_purpose() -> None:
    ledger = Ledger(1000)
    accounts = [ledger.open(p, 10 * i, "x") for i, p in enumerate(Purpose)]
    assert ledger.by_purpose() == {p.value: 10 * i for i, p in enumerate(Purpose)}
    assert ledger.used_bytes == sum(a.bytes for a in accounts) == 280
    assert ledger.held_bytes == sum(ledger.by_purpose()[p.value] for p in HELD)
    assert ledger.free_bytes == 720 and ledger.peak_bytes == 280
    for account in accounts:
        account.close()
    assert ledger.used_bytes == 0 and ledger.peak_bytes == 280 and ledger.recount() == []


def test_a_refusal_names_both_numbers_and_changes_nothing() -> None:
    ledger = Ledger(10_000)
    kept = ledger.open(Purpose.STORED, 4000)
    before = state(ledger)
    with pytest.raises(BudgetError) as caught:
        ledger.open(Purpose.LIVE, 8000, "a buffer of 32 tokens")
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (8000, 6000)
    for part in ("8.0 kB needed", "6.0 kB available", "a buffer of 32 tokens", "budget of 10.0 kB"):
        assert part in str(caught.value)
    with pytest.raises(BudgetError) as caught:
        kept.resize(10_001)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (6001, 6000)
    assert state(ledger) == before and kept.bytes == 4000 and ledger.recount() == []


def test_the_last_byte_can_be_had() -> None:
    ledger = Ledger(100)
    account = ledger.open(Purpose.LIVE, 100)
    assert ledger.free_bytes == 0 and not ledger.fits(1) and ledger.fits(0)
    assert ledger.open(Purpose.LIVE, 0).bytes == 0
    account.close()
    assert ledger.fits(100) and not ledger.fits(101)


def test_reserve_before_allocate() -> None:
    """What the ledger refuses is never asked of the allocator."""
    spec = ArraySpec(2, 8, mx.float32)
    store = Store([LayerSpec((spec, spec))], Ledger(300 * 2 * spec.token_bytes))
    asked: list[Any] = []
    allocate = store.allocate

    def watched(*args: Any) -> Any:
        asked.append(store.ledger.used_bytes)
        return allocate(*args)

    store.allocate = watched
    track = Track(store)
    with pytest.raises(BudgetError):
        track.ensure(0, 301)
    assert asked == [] and store.slabs == set() and track.pieces == [] and store.ledger.used_bytes == 0
    track.ensure(0, 200)
    assert asked == [] and store.ledger.used_bytes == 256 * 2 * spec.token_bytes
    track.pieces[0].slab.arrays(0)
    assert asked == [256 * 2 * spec.token_bytes] * 2


def test_resize() -> None:
    ledger = Ledger(100)
    account = ledger.open(Purpose.LIVE, 10)
    account.resize(60)
    account.resize(20)
    assert (account.bytes, ledger.used_bytes, ledger.peak_bytes) == (20, 20, 60)
    with pytest.raises(ValueError, match="-1"):
        account.resize(-1)
    with pytest.raises(ValueError, match="-1"):
        ledger.open(Purpose.LIVE, -1)
    assert state(ledger)[1] == 20 and ledger.recount() == []


def test_force_records_what_is_there_already_and_recount_says_so() -> None:
    ledger = Ledger(100)
    account = ledger.open(Purpose.LIVE, 90)
    account.resize(120, force=True)
    assert ledger.used_bytes == 120 and ledger.free_bytes == -20
    assert ledger.recount() == ["120 bytes used of a budget of 100"]
    account.resize(100)
    assert ledger.recount() == []


def test_move_counts_bytes_once() -> None:
    ledger = Ledger(100)
    account = ledger.open(Purpose.LIVE, 100)
    account.move(Purpose.STORED)
    assert (ledger.by_purpose()["live"], ledger.by_purpose()["stored"]) == (0, 100)
    account.move(Purpose.STORED)
    account.resize(30)
    assert ledger.used_bytes == 30 and ledger.peak_bytes == 100 and ledger.recount() == []
    account.close()
    assert ledger.by_purpose()["stored"] == 0


def test_an_account_is_closed_exactly_once() -> None:
    ledger = Ledger(100)
    account = ledger.open(Purpose.LIVE, 40)
    account.close()
    before = state(ledger)
    with pytest.raises(RuntimeError, match="exactly once"):
        account.close()
    with pytest.raises(RuntimeError, match="closed account"):
        account.resize(10)
    assert state(ledger) == before and account.closed and account.bytes == 0


def test_headroom_is_for_copies_in_flight_only() -> None:
    ledger = Ledger(100)
    ledger.headroom = lambda: 30
    for purpose in Purpose:
        if purpose is Purpose.INFLIGHT:
            continue
        with pytest.raises(BudgetError) as caught:
            ledger.open(purpose, 71)
        assert caught.value.available_bytes == 70
        ledger.open(purpose, 70).close()
    assert ledger.fits(70) and not ledger.fits(71)
    live = ledger.open(Purpose.LIVE, 70)
    copy = ledger.open(Purpose.INFLIGHT, 30)
    with pytest.raises(BudgetError):
        ledger.open(Purpose.INFLIGHT, 1)
    with pytest.raises(BudgetError):
        live.resize(71)
    copy.close()


def test_room_is_made_for_what_is_missing_and_no_more() -> None:
    ledger = Ledger(100)
    stored = [ledger.open(Purpose.STORED, 30) for _ in range(3)]
    asked: list[int] = []

    def make_room(missing: int) -> None:
        asked.append(missing)
        stored.pop(0).close()

    ledger.make_room = make_room
    ledger.open(Purpose.LIVE, 10)
    assert asked == []
    ledger.open(Purpose.LIVE, 20)
    assert asked == [20] and ledger.used_bytes == 90
    with pytest.raises(BudgetError):  # asked once; what was freed does not do
        ledger.open(Purpose.LIVE, 80)
    assert asked == [20, 70] and ledger.used_bytes == 60 and ledger.recount() == []


def test_make_room_may_reserve_for_itself() -> None:
    """Reclaiming copies a layer: it opens and closes accounts while a reservation waits for it."""
    ledger = Ledger(100)
    stored = ledger.open(Purpose.STORED, 80)

    def make_room(missing: int) -> None:
        transient = ledger.open(Purpose.INFLIGHT, 20)
        stored.resize(stored.bytes - missing)
        transient.close()

    ledger.make_room = make_room
    account = ledger.open(Purpose.LIVE, 50)
    assert (account.bytes, stored.bytes, ledger.used_bytes) == (50, 50, 100) and ledger.recount() == []


def test_set_budget() -> None:
    ledger = Ledger(100)
    stored = ledger.open(Purpose.STORED, 60)
    ledger.set_budget(60)
    assert ledger.budget_bytes == 60 and ledger.free_bytes == 0
    before = state(ledger)
    with pytest.raises(BudgetError, match=r"60 B are in use") as caught:
        ledger.set_budget(59)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (60, 59)
    for budget in (0, -1):
        with pytest.raises(ConfigError):
            ledger.set_budget(budget)
    assert state(ledger) == before
    ledger.make_room = lambda missing: stored.resize(stored.bytes - missing)
    ledger.set_budget(40)
    assert ledger.used_bytes == ledger.budget_bytes == 40
    ledger.set_budget(500)
    ledger.open(Purpose.LIVE, 460)


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_is_positive(budget: int) -> None:
    with pytest.raises(ConfigError):
        Ledger(budget)


def test_recount_finds_bytes_that_went_astray() -> None:
    ledger = Ledger(100)
    account = ledger.open(Purpose.LIVE, 40)
    account.bytes = 10
    assert ledger.recount() == ["ledger says 40 bytes are live, its accounts sum to 10"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "open", "resize", "move", "close", "budget"]),
            st.sampled_from(list(Purpose)),
            st.integers(0, 120),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)
@settings(max_examples=100, deadline=None)
def test_any_sequence_keeps_the_books(calls: list[tuple[str, Purpose, int, int]]) -> None:
    ledger, accounts = Ledger(200), list[Account]()
    for what, purpose, n, pick in calls:
        before = state(ledger)
        account = accounts[pick % len(accounts)] if accounts else None
        try:
            if what == "open":
                accounts.append(ledger.open(purpose, n))
            elif what == "budget":
                ledger.set_budget(n + 1)
            elif account is not None and what == "resize":
                account.resize(n)
            elif account is not None and what == "move":
                account.move(purpose)
            elif account is not None:
                account.close()
                accounts.remove(account)
        except BudgetError as error:
            assert state(ledger) == before and error.needed_bytes > error.available_bytes
        assert ledger.used_bytes == sum(a.bytes for a in accounts) <= ledger.budget_bytes
        assert ledger.recount() == []


def test_threads_never_get_more_than_there_is() -> None:
    ledger = Ledger(1000)
    over: list[int] = []
    refused = threading.Event()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(300):
                try:
                    account = ledger.open(list(Purpose)[(seed + i) % 6], 150 + (seed * 7 + i) % 100)
                except BudgetError:
                    refused.set()
                    continue
                if ledger.used_bytes > 1000:
                    over.append(ledger.used_bytes)
                account.move(Purpose.STORED)
                account.resize(100)
                account.close()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not over and not errors
    assert ledger.used_bytes == 0 and ledger.peak_bytes <= 1000 and ledger.recount() == []
