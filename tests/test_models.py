"""Reused equals fresh, on tiny random-weight models of each family that matters."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from driving import cold, forward, greedy, same, turn
from effort import quick
from tiny import tiny

import onefold

DENSE = ["llama", "gemma2"]
SLIDING = ["gemma3", "gemma4", "gpt_oss", "llama_sliding", "llama4"]
RECURRENT = ["qwen3_next", "qwen3_5", "mamba2", "mamba", "jamba"]
COMPOSITE = ["falcon_h1", "deepseek_v32"]
MLA = ["deepseek_v3"]
ALL = DENSE + SLIDING + RECURRENT + COMPOSITE + MLA
SLICEABLE = [*DENSE, "deepseek_v32", "deepseek_v3"]


FEW = quick(ALL, "gemma2", "gemma3", "llama4", "qwen3_next", "mamba", "falcon_h1", "deepseek_v3")
"""For what takes long: one family of each kind."""
TWINS = ("llama_sliding", "qwen3_5", "mamba2")
"""Their layers are of the kinds that gemma3, qwen3_next and mamba have."""


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


@pytest.fixture(params=quick(ALL, *(name for name in ALL if name not in TWINS)))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str):
    return tiny(family)


@pytest.fixture
def cache(model):
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        yield cache


def test_continue(cache, model):
    _, known = turn(cache, model, words(40))
    for i in range(3):
        lease, known2 = turn(cache, model, known + words(5, seed=i + 1))
        assert lease.cached == lease.matched == len(known)
        known = known2


def test_branch(cache, model):
    _, known = turn(cache, model, words(40))
    turn(cache, model, known + words(9, seed=1))
    lease, other = turn(cache, model, [*known, 91, 92])
    assert lease.cached == len(known)
    lease, _ = turn(cache, model, [*other, 3])
    assert lease.cached == len(other)


def test_rewind(cache, model, family):
    turn(cache, model, words(40))
    lease, _ = turn(cache, model, [*words(40)[:21], 91, 92, 93])
    assert lease.matched == 21
    assert lease.cached == (21 if family in SLICEABLE else 0)
    assert lease.reason == ("" if family in SLICEABLE else "no checkpoint")


def test_exact_repeat_holds_one_token_back(cache, model):
    prompt = words(40)
    turn(cache, model, prompt)
    lease, _ = turn(cache, model, prompt)
    assert lease.matched == 40
    assert lease.cached == 39


def test_earlier_prompt_plus_its_own_output(cache, model):
    _, known = turn(cache, model, words(40))
    lease, _ = turn(cache, model, known)
    assert lease.matched == len(known)


def test_retry_after_cancel(cache, model):
    prompt = words(40)
    with cache.lease(prompt) as lease:
        forward(model, lease.layers, prompt[:24], 0)
    cache.check()
    lease, _ = turn(cache, model, prompt)
    assert lease.matched >= 23
    assert lease.cached >= 23


def test_error_in_the_middle_of_a_forward_keeps_the_sound_part(cache, model, family, monkeypatch):
    prompt = words(40)
    _, known = turn(cache, model, prompt)
    longer = known + words(20, seed=5)
    with pytest.raises(RuntimeError, match="broken"), cache.lease(longer) as lease:
        forward(model, lease.layers, longer[:48], lease.cached)
        held = lease.offset
        leaf = lease.hold.watchers[0].leaves[-1]
        name = "__setitem__" if leaf.kind == "recurrent" else "update_and_fetch"

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(type(leaf), name, broken)
        model(mx.array([longer[48:56]]), cache=lease.layers)
    monkeypatch.undo()
    cache.check()
    lease, _ = turn(cache, model, longer)
    assert held == 48
    assert lease.matched >= len(known)
    assert lease.cached >= len(known)


def test_a_forward_that_failed_can_be_tried_again_on_the_same_lease(cache, model, monkeypatch):
    prompt = words(40)
    reference = cold(model, prompt, 4)
    with cache.lease(prompt) as lease:
        forward(model, lease.layers, prompt[:24], 0)
        leaf = lease.hold.watchers[0].leaves[-1]
        name = "__setitem__" if leaf.kind == "recurrent" else "update_and_fetch"
        with monkeypatch.context() as patch:
            patch.setattr(type(leaf), name, lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
            with pytest.raises(RuntimeError):
                model(mx.array([prompt[24:32]]), cache=lease.layers)
        logits = forward(model, lease.layers, prompt, 24)
        _, seen = greedy(model, lease.layers, logits, 4)
        assert same(seen, reference[1])


def test_two_readers_and_a_writer(cache, model):
    """Three leases on one prefix, decoding in turn, one of them opened while another writes."""
    _, known = turn(cache, model, words(40))
    prompts = [[*known, 80 + i, *words(3, seed=i)] for i in range(3)]
    references = [cold(model, p, 6) for p in prompts]
    leases = [cache.lease(p) for p in prompts[:2]]
    runs = []
    for lease, prompt in zip(leases, prompts, strict=False):
        runs.append([forward(model, lease.layers, prompt, lease.cached)])
    leases.append(cache.lease(prompts[2]))
    runs.append([forward(model, leases[2].layers, prompts[2], leases[2].cached)])
    assert all(lease.cached == len(known) for lease in leases)
    for _ in range(6):
        for lease, seen in zip(leases, runs, strict=True):
            seen.extend(greedy(model, lease.layers, seen[-1], 1)[1][1:])
        cache.check()
    for seen, reference in zip(runs, references, strict=True):
        assert same(seen, reference[1])
    for lease, prompt, reference in zip(leases, prompts, references, strict=True):
        lease.commit(prompt + reference[0])
    cache.check()


@pytest.mark.parametrize("family", FEW, indirect=True)
def test_evicted_and_back(model, family):
    with onefold.PrefixCache(model, "3MB", min_checkpoint_tokens=1) as cache:
        prompts = [words(60, seed=i) for i in range(12)]
        for _ in range(2):
            for prompt in prompts:
                turn(cache, model, prompt, n=2)


@pytest.mark.parametrize("family", FEW, indirect=True)
def test_many_turns(cache, model):
    known = words(12)
    for i in range(12):
        lease, known = turn(cache, model, known + words(3, seed=i), n=2)
    assert lease.cached == lease.matched


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("family", FEW, indirect=True)
def test_batch_equals_single_runs(cache, model, pooled):
    _, known = turn(cache, model, words(40))
    prompts = [[*known, 70 + i, *words(2 + i, seed=i)] for i in range(3)] + [words(11, seed=9)]
    references = [cold(model, p, 6) for p in prompts]
    leases = [cache.lease(p) for p in prompts]
    last = []
    for lease, prompt in zip(leases, prompts, strict=True):
        last.append(forward(model, lease.layers, prompt, lease.cached))
    batch = cache.batch(leases, pooled=pooled)
    seen = [mx.concatenate(last, axis=0)]
    for _ in range(6):
        seen.append(batch.step(mx.argmax(seen[-1], axis=-1)))
        mx.eval(seen[-1])
    for row, reference in enumerate(references):
        assert same([s[row : row + 1] for s in seen], reference[1])
    cache.check()
    for lease, prompt, reference in zip(leases, prompts, references, strict=True):
        lease.commit(prompt + reference[0])
        cache.check()
    for prompt, reference in zip(prompts, references, strict=True):
        lease, _ = turn(cache, model, [*prompt, *reference[0], 5])
        assert lease.cached == lease.matched == len(prompt) + 6


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("family", FEW, indirect=True)
def test_rows_come_and_go(cache, model, pooled):
    """Rows join and leave between steps, one outgrows its region, one is read by a newcomer meanwhile."""
    _, known = turn(cache, model, words(40))
    prompts = [[*known, 70 + i, *words(2 + i, seed=i)] for i in range(3)]
    references = [cold(model, p, 12) for p in prompts]
    rows: dict[int, tuple[onefold.Lease, list[mx.array]]] = {}
    batch = cache.batch([], pooled=pooled)

    def join(i: int) -> None:
        lease = cache.lease(prompts[i])
        rows[i] = (lease, [forward(model, lease.layers, prompts[i], lease.cached)])
        batch.add(lease)

    def steps(n: int) -> None:
        for _ in range(n):
            logits = batch.step(mx.array([int(mx.argmax(rows[i][1][-1]).item()) for i in rows]))
            for row, i in enumerate(rows):
                rows[i][1].append(logits[row : row + 1])
            cache.check()

    join(0)
    join(1)
    steps(3)
    join(2)
    steps(4)
    lease, seen = rows.pop(0)
    batch.remove(lease)
    assert same(seen, references[0][1][: len(seen)])
    lease.commit(prompts[0] + references[0][0][: len(seen) - 1])
    turn(cache, model, [*prompts[0], *references[0][0][: len(seen) - 1], 9])  # while the others go on
    steps(4)
    for i, (lease, seen) in rows.items():
        assert same(seen, references[i][1][: len(seen)])
        lease.cancel()
    cache.check()


def test_closing_returns_memory_to_the_weights(family):
    import gc

    model = tiny(family)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    cache = onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1)
    _, known = turn(cache, model, words(40))
    turn(cache, model, known + words(4, seed=1))
    lease = cache.lease([*known, 5])
    forward(model, lease.layers, [*known, 5], lease.cached)
    cache.close()
    del cache, lease
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 4096
