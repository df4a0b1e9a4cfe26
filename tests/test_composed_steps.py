"""Decode steps of a batch on a CPU: composed attention equals each row alone, and its graph stays small."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from driving import close, forward, fresh, prefilled, words
from mlx_lm.models.cache import BatchKVCache, trim_prompt_cache
from tiny import tiny

import onefold
from onefold.cache.memory import device
from onefold.cache.memory.segment import STEP
from onefold.cache.memory.shapes import ArraySpec, View
from onefold.cache.model import seam
from onefold.cache.model.composed_row import attend_row
from onefold.cache.model.composed_shared import attend_shared
from onefold.cache.model.composed_step import attend_step
from onefold.cache.model.formats.plain import PlainCodec
from onefold.cache.model.formats.registry import KvFormat
from onefold.cache.model.region_plan import Held, RegionPlan, plan_regions
from onefold.cache.request.arena import FRONT

HEADS, REPEATS, DIM = 2, 3, 32
SPEC, TRIED = ArraySpec(HEADS, DIM, mx.float32), ("16", "8", "4", "turbo3")


class Layer(Held):
    """A slab of one layer with random content, and what was decoded of it."""

    def __init__(self, capacity: int, codec: Any, dtype: mx.Dtype) -> None:
        k, v = (mx.random.normal((1, HEADS, capacity, DIM)).astype(dtype) for _ in range(2))
        super().__init__(list(codec.encode(k, v)))
        if not codec.plain:
            k, v = codec.decode(self._arrays, dtype)
        self.keys, self.values = k.astype(mx.float32), v.astype(mx.float32)


def attended(q: mx.array, row: list[tuple[Any, int, int]], scale: float, sinks: mx.array | None) -> mx.array:
    """One row's attention, over its pieces side by side."""
    k = mx.concatenate([slab.keys[..., lo:hi, :] for slab, lo, hi in row], axis=2)
    v = mx.concatenate([slab.values[..., lo:hi, :] for slab, lo, hi in row], axis=2)
    return mx.fast.scaled_dot_product_attention(q.astype(mx.float32), k, v, scale=scale, sinks=sinks)


def layouts(make: Any) -> dict[str, list[list[tuple[Any, int, int]]]]:
    arena, prefix, parts = make(6 * STEP), make(700), make(300)
    last = [(arena, n * STEP, n * STEP + end) for n, end in ((4, 9), (0, 70), (2, 256), (1, 1), (3, 33))]
    own = [(make(n), lo, hi) for n, lo, hi in ((256, 0, 256), (768, 0, 600), (256, 40, 90), (2048, 0, 2000), (8, 0, 8))]
    return {
        "regions": [[piece] for piece in last],
        "regions with gaps": [[last[0]], [last[1]], [(arena, 5 * STEP + 3, 5 * STEP + 8)]],
        "own and regions": [[a, b] for a, b in zip(own, last, strict=True)],
        "some have own": [[own[1], last[0]], [last[1]], [own[0], own[2], last[2]], [last[3]], [own[3], last[4]]],
        "own": [[piece] for piece in own],
        "shared and own": [[(prefix, 0, 700)], [(prefix, 0, 700), own[1]], [own[2]]],
        "shared and regions": [[(prefix, 0, 700), own[0], last[0]], [(prefix, 0, 700), last[1]], [last[2]]],
        "different parts": [[(parts, 0, 100), last[0]], [(parts, 0, 200), last[1]], [own[3], last[2]]],
        "only shared": [[(prefix, 0, 700)], [(prefix, 0, 700)]],
    }


@pytest.mark.parametrize("codec", [KvFormat(kv).codec(SPEC, SPEC) for kv in TRIED], ids=TRIED)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("sunk", [False, True], ids=["", "sinks"])
def test_every_form_of_a_step_equals_each_row_alone(codec, dtype, sunk):
    mx.random.seed(3)
    sinks = mx.random.normal((HEADS * REPEATS,)) if sunk else None
    for name, layout in layouts(lambda n: Layer(n, codec, dtype)).items():
        q = mx.random.normal((len(layout), HEADS * REPEATS, 1, DIM)).astype(dtype)
        plan = plan_regions(layout, [0] * len(layout), dtype, codec.plain, None)
        out = attend_step(q, plan, 0, codec, 0.2, sinks)
        assert out.dtype == dtype
        for i, row in enumerate(layout):
            want = attended(q[i : i + 1], row, 0.2, sinks)
            limit = 1e-5 if dtype == mx.float32 else 3e-2 if codec.plain or codec.stock_form else 6e-2
            assert mx.abs(out[i : i + 1] - want).max().item() <= limit, (name, i)


def test_a_plan_is_kept_while_only_the_last_pieces_grow():
    layout = layouts(lambda n: Layer(n, PlainCodec(), mx.float32))["own and regions"]
    layout = [[own, (slab, lo, lo + 5)] for own, (slab, lo, _) in layout]
    known: RegionPlan | None = None
    for more in range(40):
        now = [[own, (slab, lo, hi + more)] for own, (slab, lo, hi) in layout]
        plan = plan_regions(now, [0] * len(now), mx.float32, True, known)
        assert known is None or plan is known
        known = plan
        assert plan.columns == (5 + more + 31) // 32 * 32
    layout[0][0] = (layout[0][0][0], 0, 100)
    assert plan_regions(layout, [0] * len(layout), mx.float32, True, known) is not known


def rows_of(cache: Any, model: Any, prompts: list[list[int]]) -> list[onefold.Lease]:
    leases = [cache.lease(prompt) for prompt in prompts]
    for lease, prompt in zip(leases, prompts, strict=True):
        forward(model, lease.layers, prompt, lease.cached)
    return leases


@pytest.mark.parametrize(("family", "pooled"), [("llama", False), ("llama", True), ("gpt_oss", True)])
def test_rows_of_different_lengths_that_come_and_go(family, pooled):
    model = tiny(family)
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(n, seed=n) for n in (20, 130, 400, 5)]
        leases = rows_of(cache, model, said)
        batch = cache.batch(leases, pooled=pooled)
        for step in range(5):
            logits = batch.step([7 + step] * len(said))
            for i, row in enumerate(said):
                row.append(7 + step)
                assert step % 2 or close(logits[i : i + 1], fresh(model, row))
            if step == 2:
                batch.remove(leases.pop(0))
                del said[0]
                said.append(words(40, seed=9))
                leases += rows_of(cache, model, said[-1:])
                batch.add(leases[-1])
        cache.check()


def test_a_row_that_is_taken_back_does_not_read_the_copy_in_its_region():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(20, seed=1), words(30, seed=2)]
        leases = rows_of(cache, model, said)
        batch = cache.batch(leases)
        mx.eval(batch.step([3, 4]))
        assert [lease.hold.track.pieces[-1].front for lease in leases] == [20, 30]
        for lease in leases:
            trim_prompt_cache(lease.layers, 4)  # before the regions begin
        said = [row[:-3] for row in said]
        for step in range(6):
            logits = batch.step([50 + step] * 2)
            for i, row in enumerate(said):
                row.append(50 + step)
                assert close(logits[i : i + 1], fresh(model, row))
        cache.check()


def test_long_rows_have_no_copy_in_their_regions():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        leases = rows_of(cache, model, [words(FRONT, seed=1), words(FRONT + 1, seed=2)])
        mx.eval(cache.batch(leases).step([3, 4]))
        assert [lease.hold.track.pieces[-1].front for lease in leases] == [FRONT, 0]


# -- primitives ------------------------------------------------------------------------------------


def primitives(out: mx.array) -> int:
    written = io.StringIO()
    mx.export_to_dot(written, out)
    return written.getvalue().count("shape=rectangle")


def step_primitives(model: Any, n: int, length: int) -> int:
    with onefold.PrefixCache(model, "256MB") as cache:
        batch = cache.batch(rows_of(cache, model, [words(length, seed=i) for i in range(n)]))
        mx.eval(batch.step([5] * n))
        out = batch.step([5] * n)
        found = primitives(out)
        mx.eval(out)
        return found


def test_a_step_of_short_rows_has_few_primitives_more_than_mlx_lm_s_and_none_per_row(monkeypatch):
    monkeypatch.setattr(seam, "schedule", lambda arrays: None)
    model = tiny("llama")
    caches = [BatchKVCache([0] * 8) for _ in model.layers]
    mx.eval(model(mx.array(np.ones((8, 40), np.int32)), cache=caches))
    stock = primitives(model(mx.array([[5]] * 8), cache=caches))
    eight = step_primitives(model, 8, 40)
    assert eight <= 1.3 * stock
    assert step_primitives(model, 16, 40) <= eight


def test_a_longer_row_takes_two_products_and_four_slices(monkeypatch):
    monkeypatch.setattr(seam, "schedule", lambda arrays: None)
    model = tiny("llama")
    four, eight = (step_primitives(model, n, 200) for n in (4, 8))
    assert eight - four <= 4 * 6 * len(model.layers)


def test_a_row_that_was_not_a_number_does_not_reach_the_next_one_in_its_region():
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(20, seed=1), words(33, seed=2)]
        leases = prefilled(cache, model, said)
        batch = cache.batch(leases, pooled=True)
        batch.step([row[-1] for row in said])
        gone, last = leases[1], leases[1].hold.track.pieces[-1]
        for layer in last.slab.layers:
            for j, array in enumerate(layer):
                layer[j] = array.at[..., last.lo : last.lo + STEP, :].add(mx.nan)
        batch.remove(gone)
        gone.cancel()
        other = words(37, seed=3)
        batch.add(prefilled(cache, model, [other])[0])
        logits = batch.step([7, other[-1]])
        assert batch.leases[1].hold.track.pieces[-1].slab is last.slab
        assert close(logits[1:], fresh(model, other))
        assert not mx.isnan(logits).any().item()
        for lease in batch.leases:
            lease.cancel()


def rewind(lease: onefold.Lease, tokens: list[int], to: int) -> None:
    for layer in lease.layers:
        layer.trim(len(tokens) - to)
    del tokens[to:]


@pytest.mark.parametrize("committed", [False, True])
def test_a_copy_before_a_region_is_not_read_once_its_tokens_were_written_again(committed: bool) -> None:
    """A row leaves its region by a long chunk, and comes back to it by a rewind."""
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        said = [words(50, seed=1), words(50, seed=2)]
        leases = prefilled(cache, model, [[*row, 0] for row in said])
        batch = cache.batch(leases)
        row, lease = said[1], leases[1]

        def step(*tokens: int) -> None:
            logits = batch.step(tokens)
            for fed, token, found in zip(said, tokens, logits, strict=True):
                fed.append(token)
                assert close(found[None], fresh(model, fed))

        def feed(more: list[int]) -> None:
            row.extend(more)
            assert close(model(mx.array([more]), cache=lease.layers)[:, -1], fresh(model, row))

        step(0, 0)
        for token in range(4):
            step(7 + token, 8 + token)
        if committed:
            feed(words(250, seed=4))
            rewind(lease, row, 20)
            feed(words(100, seed=5))
            with cache.lease(row) as other:  # stores the same tokens first
                forward(model, other.layers, row, 0)
                other.commit(row)
            lease.commit(row, close=False)
            rewind(lease, row, len(row) - 10)
        else:
            rewind(lease, row, 20)
            feed(words(STEP + 30, seed=5))
            rewind(lease, row, len(row) - 150)
        for token in range(3):
            step(11 + token, 12 + token)
        cache.check()
        for lease in leases:
            lease.cancel()


def test_scores_of_a_shared_piece_are_those_of_its_readers_only():
    rows, tokens = 64, 16_000
    q = mx.random.normal((HEADS, rows, REPEATS, DIM))
    held = [mx.random.normal((1, HEADS, tokens, DIM)) for _ in range(2)]
    mx.eval(q, held)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    (block,) = attend_shared(q, [held], [None], ((0, tokens, (3, 60)),), PlainCodec())
    mx.eval(block.out, block.logsum)
    scores = HEADS * REPEATS * tokens * 4
    assert mx.get_peak_memory() - before < 8 * scores  # of two rows; all rows have 64
    assert block.out.shape == (HEADS, rows, REPEATS, DIM)
    assert (block.logsum[:, 4] < -1e29).all().item() and (block.logsum[:, 60] > -100).all().item()


@pytest.mark.parametrize("pooled", [True, False])
def test_what_a_discarded_request_left_behind_a_prefix_does_not_reach_the_next_one(pooled: bool) -> None:
    model = tiny("llama")
    with onefold.PrefixCache(model, "64MB") as cache:
        prefix = words(140, seed=1)
        with cache.lease(prefix) as lease:
            forward(model, lease.layers, prefix, 0)
            lease.commit(prefix)
        with cache.lease([*prefix, 1, 2]) as lease:
            slab = lease.hold.track.pieces[-1].slab
            forward(model, lease.layers, [*prefix, 1, 2], lease.cached)
            for layer in slab.layers:
                layer[1] = layer[1].at[..., 140:, :].add(mx.nan)
            lease.discard()
        said = [[*prefix, 5, 6, 7], words(30, seed=2)]
        leases = prefilled(cache, model, said)
        assert leases[0].hold.track.pieces[0].slab is slab
        logits = cache.batch(leases, pooled=pooled).step([row[-1] for row in said])
        for row, found in zip(said, logits, strict=True):
            assert close(found[None], fresh(model, row))
        for lease in leases:
            lease.cancel()


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("codec", [KvFormat(kv).codec(SPEC, SPEC) for kv in TRIED], ids=TRIED)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_one_row_over_several_pieces(on_gpu, codec, with_sinks, queries, monkeypatch):
    monkeypatch.setattr(device, "on_gpu", lambda: on_gpu)
    slabs = [Layer(n, codec, mx.float32) for n in (64, 256, 32)]
    row = list(zip(slabs, (0, 17, 3), (64, 200, 32), strict=True))
    views = [View(slab.arrays(0), lo, hi, id(slab)) for slab, lo, hi in row]
    q = mx.random.normal((1, HEADS * REPEATS, queries, DIM))
    sinks = mx.random.normal((HEADS * REPEATS,)) if with_sinks else None
    for n in (1, 2, 3):
        found = attend_row(q, views[:n], codec, 0.2, None, sinks)
        assert mx.allclose(found, attended(q, row[:n], 0.2, sinks), atol=1e-5).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_many_pieces_are_added_up_without_loss(dtype: mx.Dtype) -> None:
    slabs = [Layer(16, PlainCodec(), dtype) for _ in range(200)]
    views = [View(slab.arrays(0), 0, 16, id(slab)) for slab in slabs]
    q = mx.random.normal((1, HEADS * REPEATS, 1, DIM)).astype(dtype)
    expected = attended(q, [(slab, 0, 16) for slab in slabs], 0.2, None)
    found = attend_row(q, views, PlainCodec(), 0.2, None, None).astype(mx.float32)
    assert (mx.abs(found - expected).max() / mx.abs(expected).max()).item() < 0.01
