"""Steps of a batch as compiled graphs: what they compute, when they are used, and what a failed trace leaves.

Most tests run without `mx.compile` (conftest.py): a graph is then computed by calling the traced function again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from driving import close, decode, fresh, prefilled, rows_on_a_prefix, words
from kernel_reference import traceable_kernel
from tiny import tiny

import onefold
from onefold.cache.memory.segment import STEP
from onefold.cache.model import compiled_step
from onefold.cache.model.attention import Handle
from onefold.cache.model.compiled_step import AFTER
from onefold.cache.model.kernels import current
from onefold.cache.model.kernels.decode import DecodeKernel


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> DecodeKernel:
    made = traceable_kernel()
    monkeypatch.setattr(current, "kernel", lambda: made)
    return made


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the traced function was run."""
    found: list[int] = []
    traced = compiled_step._traced

    def counted(*given: Any) -> Any:
        found.append(1)
        return traced(*given)

    monkeypatch.setattr(compiled_step, "_traced", counted)
    return found


@pytest.fixture
def compiled() -> Iterator[None]:
    mx.enable_compile()
    yield
    mx.disable_compile()


@contextmanager
def two_rows(model: Any) -> Iterator[tuple[onefold.Batch, list[list[int]]]]:
    """A batch, and what its rows were fed and said. The rows end with it."""
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(20, seed=1), words(33, seed=2)]
        batch = cache.batch(prefilled(cache, model, said), pooled=True)
        yield batch, said
        for lease in batch.leases:
            lease.cancel()
        cache.check()


def stays_right(model: Any, kernel: DecodeKernel, n_steps: int, stages: int) -> int:
    """Decodes rows that leave one after the other, and compares the logits with fresh forwards. Returns how many calls
    of attention the steps have made."""
    with onefold.PrefixCache(model, "64MB") as cache:
        said, leases = rows_on_a_prefix(cache, model)
        batch = cache.batch(leases, pooled=True)
        calls = 0
        for _ in range(stages):
            before = kernel.counts[""]
            logits = decode(batch, said, n_steps)
            calls += kernel.counts[""] - before
            for row, found in zip(said, logits, strict=True):
                assert close(found[None], fresh(model, row[:-1]))
            gone, tokens = leases.pop(), said.pop()
            batch.remove(gone)
            gone.commit(tokens[:-1])
            cache.check()
        for lease in leases:
            lease.cancel()
        return calls


def test_compiled_steps_agree_with_single_runs(kernel: DecodeKernel, traces: list[int]) -> None:
    stays_right(tiny("llama"), kernel, STEP // 4 + AFTER, stages=3)  # three rows, two, a row alone
    assert len(traces) > 100  # without mx.compile, each step from a graph is one


@pytest.mark.slow
def test_compiled_graphs_agree_with_single_runs(kernel: DecodeKernel, traces: list[int], compiled: None) -> None:
    model, n_steps = tiny("llama"), AFTER + 12
    calls = stays_right(model, kernel, n_steps, stages=1)
    assert len(traces) == 1  # a graph runs no Python
    assert calls == n_steps * len(model.layers)


def test_a_row_alone_continues_in_its_own_buffer(kernel: DecodeKernel, traces: list[int]) -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(30, seed=4)]
        leases = prefilled(cache, model, said)
        batch = cache.batch(leases)
        logits = decode(batch, said, STEP + 20)  # its buffer grows
        assert traces and close(logits, fresh(model, said[0][:-1]))
        assert leases[0].hold.track.whole
        leases[0].commit(said[0][:-1])
        cache.check()


def test_other_weights_are_used_from_the_next_step_on(kernel: DecodeKernel, traces: list[int]) -> None:
    model = tiny("llama")
    with two_rows(model) as (batch, said):
        decode(batch, said, AFTER + 4)
        ran = len(traces)
        assert ran == 3
        norm = model.model.norm
        norm.weight, kept = norm.weight * 2, norm.weight
        a = batch.step([row[-1] for row in said])
        assert len(traces) == ran
        norm.weight = kept
        for lease in batch.leases:
            for layer in lease.layers:
                layer.trim(1)
        b = batch.step([row[-1] for row in said])
        assert close(a, 2 * b)


@pytest.mark.parametrize("change", ["number", "from none", "to an array", "other name", "other key", "moved"])
def test_other_settings_of_a_module_are_used_from_the_next_step_on(
    kernel: DecodeKernel, traces: list[int], change: str
) -> None:
    model = tiny("llama")
    norm = model.model.norm
    norm.cap, norm.weights, norm.lists = None, {"a": mx.ones(1), "b": mx.zeros(1)}, [[mx.ones(1), mx.ones(1)], []]
    with two_rows(model) as (batch, said):
        decode(batch, said, AFTER + 3)
        ran = len(traces)
        if change == "number":
            norm.eps = 0.5
        elif change == "from none":
            norm.cap = 0.5
        elif change == "to an array":
            vars(norm)["eps"] = np.full(2, norm.eps)
        elif change == "other name":
            del norm.cap
            norm.limit = 0.5
        elif change == "other key":
            norm.weights["c"] = norm.weights.pop("b")
        else:
            norm.lists[1].append(norm.lists[0].pop())
        if change == "to an array":
            with pytest.raises(TypeError):
                decode(batch, said, 1)
        else:
            decode(batch, said, 1)
        assert len(traces) == ran > 0


def test_a_model_that_counts_its_steps_is_compiled(
    kernel: DecodeKernel, traces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    norm, original = model.model.norm, type(model.model.norm).__call__
    norm.seen, norm.left = {"calls": 0, "weight": mx.ones(1)}, [object() for _ in range(99)]

    def counting(self: Any, x: mx.array) -> mx.array:
        if self is norm:
            self.seen["calls"] += 1
            self.left.pop()
        return original(self, x)

    monkeypatch.setattr(type(norm), "__call__", counting)
    with two_rows(model) as (batch, said):
        decode(batch, said, AFTER + 6)
        assert len(traces) > 1
        before, norm.seen["weight"] = len(traces), mx.zeros(1)
        decode(batch, said, 1)
        assert len(traces) == before


def test_a_batch_that_begins_with_other_rows_makes_new_graphs(kernel: DecodeKernel, traces: list[int]) -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        batch = cache.batch([])
        for seed in (1, 3):
            said = [words(20, seed=seed), words(33, seed=seed + 1)]
            leases = prefilled(cache, model, said)
            batch.seat(leases)
            decode(batch, said, AFTER + 1)  # the first one makes the table
            assert not traces
            for lease in leases:
                lease.cancel()
            cache.clear()


@pytest.mark.parametrize("how", ["evaluates", "reads the length", "keeps an array"])
def test_a_model_that_cannot_be_traced_is_run_as_before(
    kernel: DecodeKernel, traces: list[int], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model = tiny("llama")
    norm = type(model.model.norm)
    original, attend = norm.__call__, kernel.attend

    def other(self: Any, x: mx.array) -> mx.array:
        if how == "evaluates" and plan().is_traced:  # as MLX says it
            raise ValueError("[eval] Attempting to eval an array during function transformations")
        if how == "keeps an array":
            self.weight = self.weight + 0
        return original(self, x)

    def measured(q: mx.array, *given: Any) -> mx.array:
        if how == "reads the length":
            keys = Handle([], None, (1, 1, 1, 1), q.dtype, [0], plan())  # type: ignore[arg-type]
            assert keys.shape[2] == 1
        return attend(q, *given)

    with two_rows(model) as (batch, said):

        def plan() -> Any:
            return batch.layers[0].plan

        monkeypatch.setattr(norm, "__call__", other)
        monkeypatch.setattr(kernel, "attend", measured)
        logits = decode(batch, said, AFTER + 6)
        monkeypatch.undo()
        assert len(traces) == 1
        assert [lease.offset for lease in batch.leases] == [len(row) - 1 for row in said]
        for row, found in zip(said, logits, strict=True):
            assert close(found[None], fresh(model, row[:-1]))
        for lease, row in zip(batch.leases, said, strict=True):
            lease.commit(row[:-1])


def test_a_dropped_batch_keeps_no_weights(kernel: DecodeKernel) -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(20, seed=1), words(33, seed=2)]
        leases = prefilled(cache, model, said)
        batch = cache.batch(leases, pooled=True)
        decode(batch, said, AFTER + 3)
        for lease in leases:
            lease.cancel()
        gone = weakref.ref(batch._compiled)
        gc.disable()
        try:
            del batch
            assert gone() is None
        finally:
            gc.enable()


def test_a_step_replaces_every_array_of_the_slab_that_it_writes(kernel: DecodeKernel) -> None:
    model = tiny("llama")
    with two_rows(model) as (batch, said):
        decode(batch, said, AFTER + 3)
        slab = batch._arena.slab
        held = [a for layer in slab.layers for a in layer]
        assert len({id(a) for a in held}) == 2 * len(model.layers)
        decode(batch, said, 1)
        assert not {id(a) for a in held} & {id(a) for layer in slab.layers for a in layer}
