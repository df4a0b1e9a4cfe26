"""Decode steps of a batch: what is copied, what a failed step leaves, and what follows a batch."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from typing import Any

import mlx.core as mx
import pytest
from driving import close, cold, decode, forward, fresh, greedy, prefilled, rows_on_a_prefix, same, words
from kernel_reference import reference_kernel, traceable_kernel
from mlx_lm.models.cache import make_prompt_cache
from tiny import WINDOW, build, tiny
from zoo import config

import onefold
from onefold.cache.memory import device
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.segment import STEP
from onefold.cache.model.kernels import current
from onefold.cache.request import arena
from onefold.cache.request.arena import EARLY, ROWS_PER_MOVE


@pytest.fixture(params=["composed", "kernel"])
def attention(request, monkeypatch):
    """The two ways in which attention of a step is computed."""
    if request.param == "kernel":
        kernel = reference_kernel()
        monkeypatch.setattr(current, "kernel", lambda: kernel)
    return request.param


def test_every_token_is_copied_at_most_once_and_conversations_continue_in_one_piece():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(20 + 7 * i, seed=i) for i in range(3)]
        leases = prefilled(cache, model, said, reserve=2 * STEP + 40)
        decode(cache.batch(leases, pooled=True), said, 2 * STEP + 30)
        for lease, row in zip(leases, said, strict=True):
            lease.commit(row[:-1])
        cache.check()
        stats = cache.stats()
        assert stats.decoded_bytes == 3 * (2 * STEP + 30) * stats.token_bytes
        assert 0 < stats.moved_bytes <= stats.decoded_bytes
        for row in said:
            with cache.lease([*row, 5]) as lease:
                assert lease.cached == len(row) - 1
                assert lease.hold.track.whole and lease.hold.track.writable(lease.hold.track.pieces[0])
                logits = forward(model, lease.layers, [*row, 5], lease.cached)
                assert close(logits, fresh(model, [*row, 5]))


def test_a_commit_copies_no_more_than_a_region():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(30, seed=1), words(40, seed=2)]
        leases = prefilled(cache, model, said, reserve=STEP + 100)
        decode(cache.batch(leases, pooled=True), said, STEP + 50)
        before = cache.stats()
        leases[0].commit(said[0][:-1])
        assert 0 < cache.stats().moved_bytes - before.moved_bytes <= STEP * before.token_bytes
        leases[1].cancel()  # generated tokens are not stored, and not copied
        after = cache.stats()
        assert after.moved_bytes - before.moved_bytes <= STEP * before.token_bytes


def test_rows_that_joined_together_are_brought_home_a_few_at_a_time(monkeypatch):
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        n = ROWS_PER_MOVE + 2
        said = [words(10, seed=i) for i in range(n)]
        leases = prefilled(cache, model, said, reserve=2 * STEP)
        batch = cache.batch(leases, pooled=True)
        front = len(said[0]) - 1  # a region begins with a copy of these
        decode(batch, said, STEP - EARLY - front)
        moved: list[int] = []

        def note() -> None:
            moved.append(cache.stats().moved_bytes // cache.stats().token_bytes)

        decode(batch, said, EARLY + 2, note)
        steps = [b - a for a, b in zip([0, *moved], moved, strict=False)]
        assert max(steps) <= math.ceil(n / ROWS_PER_MOVE) * STEP
        assert moved[-1] >= n * (STEP - EARLY - front)
        for lease in leases:
            lease.cancel()


def test_batches_agree_with_single_runs_over_several_regions(attention):
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said, leases = rows_on_a_prefix(cache, model)
        batch = cache.batch(leases, pooled=True)
        decode(batch, said, STEP + 20)
        batch.remove(leases.pop(1))
        del said[1]
        decode(batch, said, 10)
        batch.remove(leases.pop())
        said.pop()
        decode(batch, said, 10)  # a row alone
        leases[0].commit(said[0][:-1])
        logits = fresh(model, said[0][:-1])
        assert mx.argmax(logits, axis=-1).item() == said[0][-1]
        answer, check = said[0][75:], said[0][:75]
        for token in answer[:40]:
            assert mx.argmax(fresh(model, check), axis=-1).item() == token
            check.append(token)
        cache.check()


def test_a_step_that_raises_leaves_every_row_where_it_was(monkeypatch):
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(20, seed=1), words(33, seed=2)]
        leases = prefilled(cache, model, said)
        batch = cache.batch(leases, pooled=True)
        decode(batch, said, 3)
        offsets = [lease.offset for lease in leases]
        original = type(model.model.norm).__call__
        calls: list[int] = []

        def fail(self: Any, x: mx.array) -> mx.array:
            calls.append(1)
            if len(calls) > len(model.layers):  # in the middle of the model, after layers have written
                raise ValueError("no")
            return original(self, x)

        with monkeypatch.context() as patched:
            patched.setattr(type(model.model.norm), "__call__", fail)
            with pytest.raises(ValueError, match="no"):
                batch.step([row[-1] for row in said])
        assert [lease.offset for lease in leases] == offsets
        decode(batch, said, 3)
        for row, lease in zip(said, leases, strict=True):
            assert mx.argmax(fresh(model, row[:-1]), axis=-1).item() == row[-1]
            lease.commit(row[:-1])
        cache.check()


def test_a_refused_step_of_a_ragged_batch_leaves_no_row_ahead():
    model = tiny("llama")
    with onefold.PrefixCache(model, "24MB") as cache:
        said = [words(STEP - 1, seed=1), words(STEP, seed=2)]
        leases = prefilled(cache, model, said)
        batch, ledger = cache.batch(leases, pooled=False), cache.state.ledger
        decode(batch, said, 1)
        offsets = [lease.offset for lease in leases]
        left = ledger.free_bytes + ledger.spare() - ledger.headroom()
        short = ledger.open(Purpose.LIVE, max(0, left - 3000))
        with pytest.raises(onefold.BudgetError):
            decode(batch, said, 40)
        steps = {lease.offset - before for lease, before in zip(leases, offsets, strict=True)}
        assert len(steps) == 1
        short.close()
        decode(batch, said, 2)
        for row in said:
            assert mx.argmax(fresh(model, row[:-1]), axis=-1).item() == row[-1]
        cache.check()


def test_rows_for_which_there_is_no_room_at_home_stay_in_the_arena():
    """The own slab has room for a part of the tokens, and there are no bytes for the others."""
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(150, seed=1), words(160, seed=2)]
        leases = prefilled(cache, model, said)
        batch, ledger = cache.batch(leases, pooled=True), cache.state.ledger
        decode(batch, said, STEP - EARLY)
        left = ledger.free_bytes + ledger.spare() - ledger.headroom()
        short = ledger.open(Purpose.LIVE, left - 20_000)
        decode(batch, said, EARLY // 2)
        assert cache.stats().moved_bytes == 0
        logits = batch.step([row[-1] for row in said])
        for i, row in enumerate(said):
            assert close(logits[i : i + 1], fresh(model, row))
            row.append(7)
        short.close()
        decode(batch, said, EARLY)
        assert cache.stats().moved_bytes > 0
        for lease, row in zip(leases, said, strict=True):
            assert mx.argmax(fresh(model, row[:-1]), axis=-1).item() == row[-1]
            lease.commit(row[:-1])
        cache.check()


def test_a_batch_checks_what_its_rows_are_fed():
    model, other = tiny("llama"), tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(20, seed=1), words(33, seed=2)]
        leases = prefilled(cache, model, said)
        batch = cache.batch(leases, pooled=True)
        with pytest.raises(onefold.LeaseError, match="was fed at position 19"):
            batch.step([(said[0][-1] + 1) % 100, said[1][-1]])
        with pytest.raises(onefold.LeaseError, match="one token per row"):
            model(mx.array([[1, 2], [3, 4]]), cache=batch.layers)
        with pytest.raises(onefold.LeaseError, match="another model"):
            other(mx.array([[1], [2]]), cache=batch.layers)
        assert [lease.offset for lease in leases] == [19, 32]
        decode(batch, said, 2)
        leases[0].cancel()
        with pytest.raises(onefold.LeaseClosed):
            batch.step([1, 2])
        batch.remove(leases[0])
        decode(batch, said[1:], 2)


def test_the_kernel_reads_a_row_alone_on_several_pieces(monkeypatch):
    kernel = reference_kernel()
    monkeypatch.setattr(current, "kernel", lambda: kernel)
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        prefix = words(40, seed=1)
        with cache.lease(prefix) as lease:
            forward(model, lease.layers, prefix, 0)
            lease.commit(prefix)
        with cache.lease([*prefix, 7]), cache.lease([*prefix, 8, 9, 10]) as lease:
            told, before = [*prefix, 8, 9, 10], kernel.counts[""]
            logits = model(mx.array([told[lease.cached :]]), cache=lease.layers)[:, -1]
            assert kernel.counts[""] > before  # several queries, of which each sees one key less than the next
            assert close(logits, fresh(model, told))
            for n in range(4):
                told.append(20 + n)
                assert close(forward(model, lease.layers, told, lease.offset), fresh(model, told))


def test_a_kernel_that_is_faster_than_mlx_s_own_attention_replaces_it(monkeypatch):
    kernel = reference_kernel()
    kernel.replaces_stock = True
    monkeypatch.setattr(current, "kernel", lambda: kernel)
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache, cache.lease(words(300, seed=1)) as lease:
        told, before = words(300, seed=1), kernel.counts[""]
        mx.eval(model(mx.array([told]), cache=lease.layers))
        assert kernel.counts[""] == before  # a prompt in one piece
        for n in range(3):
            told.append(n)
            assert close(forward(model, lease.layers, told, lease.offset), fresh(model, told))
        assert kernel.counts[""] - before == 3 * len(model.layers)


# -- windows on caches that keep all ----------------------------------------------------------------


def windowed(name: str = "smollm3", window: int = WINDOW, **fields: int) -> Any:
    """A model that gives the mask of a plain cache a window, in every other layer."""
    made = config(name)
    made.get("text_config", made).update(sliding_window=window, **fields)
    return build(name, made)


AROUND = (WINDOW - 7, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 3 * WINDOW, 90)
"""Tokens of rows: fewer than a window, about as many, and more; two rows have equally many."""


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", ["smollm3", "mistral3"])
def test_each_row_of_a_step_sees_its_own_window(name, pooled, attention):
    model = windowed(name)
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(n, seed=i) for i, n in enumerate(AROUND)]
        expected = [cold(model, row, 6) for row in said]
        batch = cache.batch(prefilled(cache, model, said), pooled=pooled)
        assert batch.ragged
        seen = [decode(batch, said, 1) for _ in range(7)]
        for i, (_, logits) in enumerate(expected):
            assert same([x[i : i + 1] for x in seen], logits)
        cache.check()


def agrees(model: Any, said: list[list[int]], logits: mx.array) -> bool:
    """Whether the last step's logits are those of mlx-lm's own caches, in long chunks."""
    alone = [forward(model, make_prompt_cache(model), row[:-1], 0, grid=128) for row in said]
    return all(close(logits[i : i + 1], own) for i, own in enumerate(alone))


@pytest.mark.parametrize("window", [48, STEP + 44])
def test_windows_end_inside_pieces_that_rows_share_and_in_regions(window, attention):
    model = windowed(window=window)
    with onefold.PrefixCache(model, "64MB") as cache:
        said, leases = rows_on_a_prefix(cache, model)
        batch = cache.batch(leases, pooled=True)
        assert batch.ragged
        for n in (1, 30) if attention == "kernel" else (1, 30, STEP - 40, 20):  # a kernel knows no regions
            assert agrees(model, said, decode(batch, said, n))
        batch.remove(leases.pop(1))
        del said[1]
        assert agrees(model, said, decode(batch, said, 2))
        cache.check()


@pytest.mark.parametrize("lengths", [(40, 40), (40, 23, 9)])
def test_windows_in_the_operations_for_a_gpu(lengths, monkeypatch):
    """Rows of one prompt share all that they read but the tail that is common to them."""
    model = windowed()
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    with onefold.PrefixCache(model, "64MB") as cache:
        prompt = words(max(lengths), seed=1)
        with cache.lease(prompt) as lease:
            forward(model, lease.layers, prompt, 0)
            lease.commit(prompt)
        said = [[*prompt[:n], 7 + i, 8] for i, n in enumerate(lengths)]
        batch = cache.batch(prefilled(cache, model, said), pooled=True)
        for _ in range(WINDOW + 4):
            assert agrees(model, said, decode(batch, said, 1))
        assert len(batch._plan._windows[WINDOW][1].cores) == 0  # their ranges would be others in each step


def alone(cache: onefold.PrefixCache, model: Any, said: list[list[int]], n: int) -> list[list[mx.array]]:
    """The logits of rows that are run in turn, and not stored."""
    found = []
    for row in said:
        lease = cache.lease(row)
        found.append(greedy(model, lease.layers, forward(model, lease.layers, row, lease.cached), n)[1])
        lease.discard()
    return found


@pytest.mark.parametrize("kv", ["8", "k8v4", "4", "4+1", "turbo3", "affine4"])
def test_windows_on_quantised_kv(kv):
    """The rows share a prefix; each equals a row alone, which the model's own mask is applied to."""
    model = windowed(head_dim=64)
    with onefold.PrefixCache(model, "64MB", kv=kv) as cache:
        prefix = words(40, seed=9)
        with cache.lease(prefix) as lease:
            forward(model, lease.layers, prefix, 0)
            lease.commit(prefix)
        said = [[*prefix, *words(5, seed=1)], [*prefix[:30], *words(4, seed=2)], words(WINDOW - 2, seed=3)]
        expected = alone(cache, model, said, 5)
        batch = cache.batch(prefilled(cache, model, said), pooled=True)
        assert batch.ragged
        seen = [decode(batch, said, 1) for _ in range(6)]
        for i, logits in enumerate(expected):
            assert same([x[i : i + 1] for x in seen], logits, 1e-3)


def test_a_step_with_windows_is_not_compiled(monkeypatch):
    """Its first steps are like others: the rows are shorter than a window."""
    kernel = traceable_kernel()
    monkeypatch.setattr(current, "kernel", lambda: kernel)
    model = windowed()
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(5, seed=1), words(7, seed=2)]
        batch = cache.batch(prefilled(cache, model, said), pooled=True)
        for _ in range(WINDOW + 4):
            assert agrees(model, said, decode(batch, said, 1))
        assert batch._compiled._refused
        assert kernel.counts[""]


def test_rows_of_a_bounded_model_with_windows_are_stepped_row_by_row():
    """A row's mask is an array then, in the order of its ring."""
    model = windowed()
    said = [words(WINDOW - 3, seed=1), words(2 * WINDOW - 3, seed=2), words(50, seed=3)]
    with onefold.PrefixCache(model, "64MB", max_kv_size=2 * WINDOW) as cache:
        expected = alone(cache, model, said, 9)
    with onefold.PrefixCache(model, "64MB", max_kv_size=2 * WINDOW) as cache:
        batch = cache.batch(prefilled(cache, model, said))
        assert not batch.ragged
        seen = [decode(batch, said, 1) for _ in range(10)]
        for i, logits in enumerate(expected):
            assert same([x[i : i + 1] for x in seen], logits)


# -- threads and lifetimes -------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2])
def test_another_thread_cannot_step_a_batch_in_the_middle_of_a_step(rows, monkeypatch):
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(20, seed=1), words(33, seed=2)]
        leases = prefilled(cache, model, said)
        batch = cache.batch(leases, pooled=True)
        decode(batch, said, 2)
        for lease in leases[rows:]:
            batch.remove(lease)
        said = said[:rows]
        original, errors, calls = type(model.model.norm).__call__, list[Exception](), list[int]()

        def other() -> None:
            try:
                batch.step([7] * rows)
            except onefold.OnefoldError as error:
                errors.append(error)

        def interrupted(self: Any, x: mx.array) -> mx.array:
            calls.append(1)
            if len(calls) == 2:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            return original(self, x)

        with monkeypatch.context() as patched:
            patched.setattr(type(model.model.norm), "__call__", interrupted)
            logits = batch.step([row[-1] for row in said])
        assert [type(error) for error in errors] == [onefold.WrongThread]
        for i, row in enumerate(said):
            assert close(logits[i : i + 1], fresh(model, row))
        cache.check()


def test_a_dropped_batch_keeps_nothing_alive():
    gc.collect()
    gc.disable()
    try:
        model = tiny("llama")
        cache = onefold.PrefixCache(model, "64MB")
        said = [words(20, seed=1), words(33, seed=2)]
        leases = prefilled(cache, model, said)
        decode(cache.batch(leases, pooled=True), said, 2)
        for lease in leases:
            lease.commit()
        state = weakref.ref(cache.state)
        del lease, leases
        cache.close()
        del cache
        assert state() is None
    finally:
        gc.enable()


def test_rows_that_are_brought_home_in_one_step_get_another_slab(monkeypatch):
    """The slab is freed when the last of its rows has left it."""
    monkeypatch.setattr(arena, "EARLY", 0)
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(200, seed=1), words(233, seed=2)]
        leases = prefilled(cache, model, said)
        batch = cache.batch(leases, pooled=True)
        decode(batch, said, STEP)
        before = batch._arena.slab
        decode(batch, said, 3)
        assert batch._arena.slab is not before
        assert batch._arena.slab in cache.state.store.slabs
        for lease, row in zip(leases, said, strict=True):
            assert mx.argmax(fresh(model, row[:-1]), axis=-1).item() == row[-1]
            lease.commit(row[:-1])
        cache.check()
