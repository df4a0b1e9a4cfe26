"""Any sequence of requests, cancels, faults and budget changes leaves everything right.

Hypothesis drives requests at random over a few conversations. After each step every open layer must hold
exactly the tokens it was fed, `check()` must find nothing and the budget must hold; every forward is compared
with a stock run. In the end, closing the cache must give back every byte.
"""

from __future__ import annotations

import gc
import os
from functools import cache as memoize
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fake import FakeModel, FaultAt, Session, assert_close, logits_of, settled
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from onefold import BudgetError, Pin, PrefixCache

BUDGETS = (330_000, 450_000, 700_000, 4_000_000)
NAMESPACES = ("", "other")
SLACK_BYTES = 4096

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=24)
which = st.integers(0, 1 << 16)


@memoize
def model_of(kinds: tuple[str, ...]) -> FakeModel:
    model = FakeModel(kinds)
    mx.eval(model.parameters())
    return model


def active_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


class Requests(RuleBasedStateMachine):
    kinds: tuple[str, ...] = ("full",)
    bound: tuple[int, int] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of(self.kinds)
        self.before = active_bytes()
        self.known: list[tuple[str, list[int]]] = []
        self.open: list[tuple[str, Session]] = []
        self.pins: list[Pin] = []

    @initialize(budget=st.sampled_from(BUDGETS[1:]))
    def start(self, budget: int) -> None:
        options: dict[str, Any] = {}
        if self.bound is not None:
            options = {"max_kv_size": self.bound[0], "keep": self.bound[1]}
        self.cache = PrefixCache(self.model, budget, min_checkpoint_tokens=1, **options)

    # -- requests --------------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < 4)
    @rule(
        base=which,
        cut=st.one_of(st.just(None), st.integers(0, 60)),
        more=tokens,
        repeat=st.booleans(),
        places=st.lists(st.integers(1, 60), max_size=2),
        name=st.sampled_from(NAMESPACES),
    )
    def lease(
        self, base: int, cut: int | None, more: list[int], repeat: bool, places: list[int], name: str
    ) -> None:
        """A continuation, a branch, a rewind, a repeat, or something new."""
        prompt = list(more)
        if self.known:
            name, old = self.known[base % len(self.known)]
            prompt = list(old) if repeat else old[:cut] + more
        try:
            session = Session(
                self.model, self.cache, prompt, namespace=name, checkpoints=places, bound=self.bound
            )
        except BudgetError:
            return
        told = [old for space, old in self.known if space == name]
        assert session.matched <= max((_common(prompt, old) for old in told), default=0)
        self.open.append((name, session))

    @precondition(lambda self: self.open)
    @rule(i=which, chunk=st.integers(1, 20), n=st.integers(1, 40))
    def prefill(self, i: int, chunk: int, n: int) -> None:
        _, session = self.open[i % len(self.open)]
        try:
            session.prefill(chunk, upto=min(len(session.prompt), len(session.tokens) + n))
        except BudgetError:
            session.holds()

    @precondition(lambda self: self.ready)
    @rule(i=which, n=st.integers(1, 6))
    def decode(self, i: int, n: int) -> None:
        _, session = self.ready[i % len(self.ready)]
        try:
            session.decode(n)
        except BudgetError:
            session.holds()

    @precondition(lambda self: self.ready)
    @rule(i=which, said=tokens)
    def append(self, i: int, said: list[int]) -> None:
        """Many tokens at once, behind the prompt."""
        _, session = self.ready[i % len(self.ready)]
        try:
            session.feed(said)
        except BudgetError:
            session.holds()

    @precondition(lambda self: len(self.ready) > 1)
    @rule()
    def batch(self) -> None:
        rows = [session for _, session in self.ready]
        try:
            found = np.array(self.cache.batch([r.lease for r in rows]).step(mx.array([r.next for r in rows])))
        except BudgetError:
            for name, session in self.ready:
                self._remember(name, session.prompt)
                self._close(session)
                session.cancel()
            return
        for row, logits in zip(rows, found, strict=True):
            wanted = logits_of(self.model, [row.next], row.stock)[-1]
            assert_close(logits, wanted, row.tolerance)
            row.tokens.append(row.next)
            row.next = int(wanted.argmax())

    @precondition(lambda self: any(s.tokens for _, s in self.open))
    @rule(i=which, unsaid=st.integers(0, 3), close=st.booleans())
    def commit(self, i: int, unsaid: int, close: bool) -> None:
        able = [(name, s) for name, s in self.open if s.tokens]
        name, session = able[i % len(able)]
        kept = session.tokens[: max(1, len(session.tokens) - unsaid)]
        self._remember(name, kept)
        if close:
            self._close(session)
        session.lease.commit(kept, close=close)

    @precondition(lambda self: self.open)
    @rule(i=which)
    def cancel(self, i: int) -> None:
        name, session = self.open[i % len(self.open)]
        self._remember(name, session.tokens[: len(session.prompt)])
        self._close(session)
        session.cancel()

    @precondition(lambda self: self.open and self.faults)
    @rule(i=which, at=which, said=tokens, keep=st.booleans())
    def fail(self, i: int, at: int, said: list[int], keep: bool) -> None:
        """A forward breaks off; the request is given up, with or without what it had said."""
        name, session = self.open[i % len(self.open)]
        try:
            session.fail(said, self.faults[at % len(self.faults)])
        except BudgetError:
            session.holds()
            return
        self._close(session)
        if keep and session.tokens:
            self._remember(name, session.tokens)
            session.commit()
        else:
            self._remember(name, session.tokens[: len(session.prompt)])
            session.cancel()

    # -- the cache itself ------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(i=which, cut=st.integers(1, 60))
    def pin(self, i: int, cut: int) -> None:
        name, old = self.known[i % len(self.known)]
        try:
            self.pins.append(self.cache.pin(old[:cut], namespace=name))
        except ValueError:
            return

    @precondition(lambda self: self.pins)
    @rule(i=which)
    def unpin(self, i: int) -> None:
        self.pins.pop(i % len(self.pins)).release()

    @rule(budget=st.sampled_from(BUDGETS))
    def set_budget(self, budget: int) -> None:
        before = self.cache.stats().budget_bytes
        try:
            self.cache.set_budget(budget)
        except BudgetError:
            assert self.cache.stats().budget_bytes == before

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        if not self.open:
            assert self.cache.stats().nodes == 0

    # -- what always holds -----------------------------------------------------------------

    @invariant()
    def layers_hold_their_tokens(self) -> None:
        for _, session in self.open:
            session.holds()

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "cache"):
            settled(self.cache)
            stats = self.cache.stats()
            assert stats.open_leases == len(self.open)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.close()
        assert self.cache.stats().used_bytes == 0
        del self.cache
        self.open, self.pins = [], []
        assert abs(active_bytes() - self.before) <= SLACK_BYTES

    # -- details ---------------------------------------------------------------------------

    @property
    def ready(self) -> list[tuple[str, Session]]:
        """Open requests whose prompt has been read."""
        return [(name, s) for name, s in self.open if len(s.tokens) >= len(s.prompt)]

    @property
    def faults(self) -> list[FaultAt]:
        places = [FaultAt(i, "before") for i in range(1, len(self.kinds))]
        return places + [FaultAt(i, "inside") for i, k in enumerate(self.kinds) if k.startswith("composite")]

    def _remember(self, name: str, said: list[int]) -> None:
        if said:
            self.known.append((name, list(said)))

    def _close(self, session: Session) -> None:
        self.open = [(name, s) for name, s in self.open if s is not session]


def _common(a: list[int], b: list[int]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


@pytest.mark.parametrize(
    ("kinds", "bound"),
    [
        (("full",), None),
        (("full", "rotating"), None),
        (("full", "recurrent"), None),
        (("composite",), None),
        (("full", "full"), (32, 4)),
        (("outside", "outside"), None),
    ],
    ids=["full", "full+rotating", "full+recurrent", "composite", "bounded", "outside"],
)
def test_any_sequence_of_requests_leaves_everything_right(
    kinds: tuple[str, ...], bound: tuple[int, int] | None
) -> None:
    machine = type("Requests", (Requests,), {"kinds": kinds, "bound": bound})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("ONEFOLD_EXAMPLES", "8")),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
