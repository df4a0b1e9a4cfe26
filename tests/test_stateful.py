"""Any sequence of requests, cancels, faults and budget changes leaves everything right.

Hypothesis drives requests at random over a few conversations. After each step every open layer must hold
exactly the tokens it was fed, `check()` must find nothing and the budget must hold; every forward is compared
with a stock run. In the end, closing the cache must give back every byte.
"""

from __future__ import annotations

import contextlib
import gc
import os
from functools import cache as memoize
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from effort import effort
from fake import FakeModel, FaultAt, Session, assert_close, logits_of, settled, text
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

from onefold import BudgetError, ConfigError, Pin, PrefixCache

BUDGETS = (330_000, 450_000, 700_000, 4_000_000)
NAMESPACES = ("", "other")
SLACK_BYTES = 4096

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=24)
places = st.lists(st.integers(1, 60), max_size=2)
which = st.integers(0, 1 << 16)


class Asked(NamedTuple):
    """How a prompt goes on from something known."""

    fresh: bool
    base: int
    cut: int | None
    repeat: bool
    more: list[int]


prompts = st.builds(
    Asked,
    fresh=st.sampled_from([False, False, False, False, True]),
    base=which,
    cut=st.one_of(st.none(), st.integers(1, 60)),
    repeat=st.booleans(),
    more=tokens,
)


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

    @initialize(budget=st.sampled_from(BUDGETS[1:]), first=st.integers(5, 45))
    def start(self, budget: int, first: int) -> None:
        options: dict[str, Any] = {}
        if self.bound is not None:
            options = {"max_kv_size": self.bound[0], "keep": self.bound[1]}
        self.cache = PrefixCache(self.model, budget, min_checkpoint_tokens=1, **options)
        for name in NAMESPACES:
            self._turn(name, [t % 4 for t in text(first)], chunk=9, n=3)

    # -- requests --------------------------------------------------------------------------

    @rule(of=prompts, chunk=st.integers(1, 20), n=st.integers(0, 6))
    def turn(self, of: Asked, chunk: int, n: int) -> None:
        """A whole request."""
        name, prompt = self._prompt(of)
        self._turn(name, prompt, chunk=chunk, n=n)

    @precondition(lambda self: len(self.open) < 4)
    @rule(of=prompts, places=places, chunk=st.integers(1, 20), n=st.integers(0, 60))
    def lease(self, of: Asked, places: list[int], chunk: int, n: int) -> None:
        """A request that stays open, some of its prompt read."""
        name, prompt = self._prompt(of)
        try:
            session = self._session(name, prompt, places)
        except BudgetError:
            return
        self.open.append((name, session))
        self._read(session, chunk, n)

    @precondition(lambda self: len(self.ready) < len(self.open))
    @rule(i=which, chunk=st.integers(1, 20), n=st.integers(1, 40))
    def prefill(self, i: int, chunk: int, n: int) -> None:
        waiting = [s for _, s in self.open if len(s.tokens) < len(s.prompt)]
        self._read(waiting[i % len(waiting)], chunk, n)

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
    @rule(i=which, at=which, more=tokens, then=st.sampled_from(["again", "commit", "cancel"]))
    def fail(self, i: int, at: int, more: list[int], then: str) -> None:
        """A forward breaks off; it is run again, or the request ends, with or without what it said."""
        name, session = self.open[i % len(self.open)]
        waiting = session.prompt[len(session.tokens) :]
        fed = waiting[: len(more)] if waiting else more
        try:
            session.fail(fed, self.faults[at % len(self.faults)])
            if then == "again":
                session.feed(fed)
                return
        except BudgetError:
            session.holds()
            return
        self._close(session)
        keep = then == "commit"
        said = session.tokens if keep else session.tokens[: len(session.prompt)]
        self._remember(name, said)
        if keep and said:
            session.commit()
        else:
            session.cancel()
        self._turn(name, [*said, 1], chunk=5, n=1)

    # -- the cache itself ------------------------------------------------------------------

    @rule(what=st.sampled_from(["pin", "unpin", "clear", *BUDGETS]), i=which, cut=st.integers(1, 60))
    def upkeep(self, what: str | int, i: int, cut: int) -> None:
        if isinstance(what, int):
            self._set_budget(what)
        elif what == "pin":
            name, old = self.known[i % len(self.known)]
            with contextlib.suppress(ConfigError):  # gone by now
                self.pins.append(self.cache.pin(old[:cut], namespace=name))
        elif what == "unpin" and self.pins:
            self.pins.pop(i % len(self.pins)).release()
        elif what == "clear" and i % 4 == 0:
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

    def _prompt(self, of: Asked) -> tuple[str, list[int]]:
        """A continuation, a branch, a rewind, a repeat, or something new."""
        if of.fresh:
            return NAMESPACES[of.base % 2], of.more
        name, old = self.known[-1 - of.base % min(6, len(self.known))]
        return name, list(old[: of.cut]) if of.repeat else old[: of.cut] + of.more

    def _session(self, name: str, prompt: list[int], places: list[int]) -> Session:
        session = Session(self.model, self.cache, prompt, namespace=name, checkpoints=places, bound=self.bound)
        told = [old for space, old in self.known if space == name]
        assert session.matched <= max((_common(prompt, old) for old in told), default=0)
        return session

    def _read(self, session: Session, chunk: int, n: int) -> None:
        try:
            session.prefill(chunk, upto=min(len(session.prompt), len(session.tokens) + n))
        except BudgetError:
            session.holds()

    def _turn(self, name: str, prompt: list[int], *, chunk: int, n: int) -> None:
        try:
            session = self._session(name, prompt, [])
        except BudgetError:
            return
        try:
            session.prefill(chunk).decode(n)
        except BudgetError:
            session.holds()
        self._remember(name, session.tokens)
        if session.tokens:
            session.commit()
        else:
            session.cancel()

    def _set_budget(self, budget: int) -> None:
        before = self.cache.stats().budget_bytes
        try:
            self.cache.set_budget(budget)
        except BudgetError:
            assert self.cache.stats().budget_bytes == before

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
            max_examples=int(os.environ.get("ONEFOLD_EXAMPLES", effort(2, 15))),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
