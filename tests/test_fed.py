"""A commit stores only what the model was fed: no caller can put wrong KV under right tokens."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from driving import cold, elsewhere, forward, greedy, same, turn
from mlx_lm.generate import generate_step
from tiny import tiny

import onefold
from onefold.cache.request.fed import Fed


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


def array(*tokens: int) -> mx.array:
    return mx.array([tokens])


# -- the record ------------------------------------------------------------------------------


def test_forwards_are_recorded_by_position() -> None:
    fed = Fed()
    fed.begin_with(np.array([1, 2], np.int32))
    fed.append(2, array(3, 4), 0, 2)
    fed.append(4, array(5), 0, 1)
    assert fed.end == 5 and fed.tokens().tolist() == [1, 2, 3, 4, 5]
    assert fed.agreement(np.array([1, 2, 3, 9, 5], np.int32)) == 3
    assert fed.agreement(np.array([1, 2, 3, 4, 5, 6], np.int32)) == 5


def test_a_rewind_is_recorded_over() -> None:
    fed = Fed()
    fed.append(0, array(1, 2, 3, 4), 0, 4)
    fed.append(2, array(8, 9), 0, 2)
    assert fed.tokens().tolist() == [1, 2, 8, 9]
    fed.cut(1)
    assert fed.end == 1 and fed.tokens().tolist() == [1]


def test_the_tokens_that_a_lease_began_with_are_never_written_to() -> None:
    given = np.arange(6, dtype=np.int32)
    fed = Fed()
    fed.begin_with(given)
    fed.append(3, array(77, 78), 0, 2)
    assert fed.tokens().tolist() == [0, 1, 2, 77, 78] and given.tolist() == list(range(6))


@pytest.mark.parametrize("unwatched", ["embeddings", "a hole"])
def test_nothing_agrees_from_a_gap_on(unwatched: str) -> None:
    fed = Fed()
    fed.append(0, array(1, 2), 0, 2)
    if unwatched == "embeddings":
        fed.append(2, None, 0, 2)
    fed.append(4, array(5), 0, 1)
    assert fed.tokens().tolist() == [1, 2]
    assert fed.agreement(np.array([1, 2, 3, 4, 5], np.int32)) == 2


def test_a_row_of_a_batch_and_many_forwards() -> None:
    fed = Fed()
    for i in range(300):
        fed.append(i, mx.array([[7], [i]]), 1, 1)
    assert fed.tokens().tolist() == list(range(300))


# -- commits -----------------------------------------------------------------------------------


@pytest.fixture
def cache():
    model = tiny("llama")
    with onefold.PrefixCache(model, "16MB") as cache:
        yield cache
        cache.check()


def test_generated_tokens_that_were_not_fed_are_refused_with_both_tokens(cache) -> None:
    prompt = words(30)
    with cache.lease(prompt) as lease:
        out, _ = greedy(cache.model, lease.layers, forward(cache.model, lease.layers, prompt, 0), 4)
        wrong = [*prompt, out[0], out[1] + 1, *out[2:]]
        with pytest.raises(onefold.CommitError, match=f"token 31 .* is {out[1] + 1}, .* fed {out[1]} there"):
            lease.commit(wrong)
        assert lease.agreement(wrong) == 31 and not lease.closed
        lease.commit(prompt + out)
    assert cache.lease([*wrong, 1]).cached == 31
    assert cache.lease([*prompt, *out, 1]).cached == 34


def test_a_commit_without_tokens_commits_what_was_fed(cache) -> None:
    """generate_step feeds a token before it yields it: what was yielded is all there, wherever the loop stops."""
    prompt = words(30)
    for stop in (1, 3, 8):
        with cache.lease(prompt, namespace=stop) as lease:
            out = []
            for token, _ in generate_step(mx.array(lease.rest), cache.model, max_tokens=8, prompt_cache=lease.layers):
                out.append(token)
                if len(out) == stop:
                    break
            committed = lease.commit()
        assert committed == prompt + out
        with cache.lease([*prompt, *out, 5], namespace=stop) as lease:
            assert lease.cached == len(prompt) + stop
            reference = cold(cache.model, [*prompt, *out, 5], 2)[1]
            logits = forward(cache.model, lease.layers, [*prompt, *out, 5], lease.cached)
            assert same(greedy(cache.model, lease.layers, logits, 2)[1], reference)


def test_a_commit_of_nothing_closes_the_lease(cache) -> None:
    lease = cache.lease(words(30))
    forward(cache.model, lease.layers, words(30), 0)
    assert lease.commit([]) == [] and lease.closed
    assert cache.stats().open_leases == 0 and cache.stats().stored_tokens == 0


def test_what_a_part_of_the_model_was_fed_is_not_known(cache) -> None:
    """The model's own call is watched, its parts are not."""
    prompt = words(30)
    with cache.lease(prompt) as lease:
        forward(cache.model, lease.layers, prompt[:20], 0)
        mx.eval(cache.model.model(mx.array([prompt[20:]]), cache=lease.layers))
        assert lease.offset == 30 and lease.agreement(prompt) == 20
        with pytest.raises(onefold.CommitError, match=r"token 20 .* is not known"):
            lease.commit(prompt)
    assert cache.lease([*prompt, 1]).cached == 20


def test_an_interrupted_prompt_keeps_what_was_fed_of_it(cache) -> None:
    prompt = words(40)
    lease = cache.lease(prompt)
    forward(cache.model, lease.layers, prompt[:16], 0)
    lease.cancel()
    assert cache.lease(prompt).cached == 16


def test_tokens_taken_back_and_fed_again_otherwise(cache) -> None:
    prompt = words(30)
    with cache.lease(prompt) as lease:
        forward(cache.model, lease.layers, prompt, 0)
        cache.model(mx.array([[1, 2, 3]]), cache=lease.layers)
        for layer in lease.layers:
            assert layer.trim(2) == 2
        forward(cache.model, lease.layers, [*prompt, 1, 8], 31)
        with pytest.raises(onefold.CommitError):
            lease.commit([*prompt, 1, 2])
        assert lease.commit() == [*prompt, 1, 8]
    turn(cache, cache.model, [*prompt, 1, 8, 4])


@pytest.mark.parametrize("family", ["gemma3", "llama_sliding", "qwen3_next", "llama4"])
def test_a_refused_rewind_stops_the_next_forward_and_spoils_nothing(family: str) -> None:
    """mlx-lm's loops do not look whether a rewind was done."""
    model = tiny(family)
    with onefold.PrefixCache(model, "64MB") as cache:
        prompt = words(50)
        with cache.lease(prompt) as lease:
            out, _ = greedy(model, lease.layers, forward(model, lease.layers, prompt, 0), 6)
            took = [layer.trim(20) for layer in lease.layers]
            assert min(took) == 0
            with pytest.raises(onefold.LeaseError):
                model(mx.array([[3]]), cache=lease.layers)
            with pytest.raises(onefold.CommitError):
                lease.commit([*prompt, *out[:-1], 3])
        cache.check()
        turn(cache, model, [*prompt, *out[:3], 5, 6], n=3)


def test_a_model_whose_call_is_made_of_a_watched_one() -> None:
    """Target and draft may be of classes of which one derives from the other."""
    base = tiny("llama")

    class Derived(type(base)):  # type: ignore[misc]
        def __call__(self, *args: object, **kwargs: object) -> mx.array:
            return super().__call__(*args, **kwargs)

    model = tiny("llama", seed=1)
    model.__class__ = Derived
    with onefold.PrefixCache(base, "16MB"), onefold.PrefixCache(model, "16MB") as cache:
        _, tokens = turn(cache, model, words(30))
        lease, _ = turn(cache, model, [*tokens, 5])
        assert lease.cached == len(tokens)


def test_a_buffer_that_the_caller_writes_into_again(cache) -> None:
    prompt, buffer = words(20), mx.zeros((1, 1), mx.int32)
    with cache.lease(prompt) as lease:
        forward(cache.model, lease.layers, prompt, 0)
        for token in (5, 6, 7, 8):
            buffer[0, 0] = token
            mx.eval(cache.model(buffer, cache=lease.layers))
        assert lease.fed()[20:] == [5, 6, 7, 8]
        lease.commit()
    turn(cache, cache.model, [*prompt, 5, 6, 7, 8, 3])


@pytest.mark.parametrize("how", ["keyword", "positional", "instead"])
def test_what_a_model_is_fed_beside_tokens_is_not_committed_as_these_tokens(cache, how: str) -> None:
    prompt, model = words(20), cache.model
    other = mx.random.normal((1, 20, 64))
    with cache.lease(prompt) as lease:
        tokens = mx.array([prompt])
        if how == "keyword":
            mx.eval(model(tokens, cache=lease.layers, input_embeddings=other))
        elif how == "positional":
            mx.eval(model(tokens, lease.layers, other))
        else:
            mx.eval(model(None, cache=lease.layers, input_embeddings=other))
        assert lease.offset == 20 and lease.fed() == []
        with pytest.raises(onefold.CommitError, match="not known"):
            lease.commit(prompt)
    turn(cache, model, prompt)


@pytest.mark.parametrize("family", ["mamba", "rwkv7"])
def test_a_part_of_a_model_whose_layers_do_not_count_is_refused(family: str) -> None:
    model, prompt = tiny(family), words(20)
    part = model.backbone if hasattr(model, "backbone") else model.model
    with onefold.PrefixCache(model, "16MB", min_checkpoint_tokens=1) as cache:
        with cache.lease(prompt) as lease:
            forward(model, lease.layers, prompt, 0)
            with pytest.raises(onefold.LeaseError, match="call the model itself"):
                part(mx.array([[3, 4, 5]]), lease.layers)
            lease.commit(prompt)
        turn(cache, model, [*prompt, 9, 9])


def test_what_could_not_be_computed_is_never_stored(monkeypatch) -> None:
    """On a thread of its own. If the main thread meets a failed operation while it starts another one, MLX may count
    that one as running for ever, and a later test waits for it."""

    def fail_and_go_on() -> None:
        prompt, model = words(20), tiny("llama")
        layer = model.model.layers[0].self_attn.k_proj
        real = type(layer).__call__

        def broken(self, x):
            out = real(self, x)
            return out * mx.linalg.inv(mx.zeros((1, 3, 3)), stream=mx.cpu).sum() if self is layer else out

        with onefold.PrefixCache(model, "16MB") as cache:
            for _ in range(6):
                lease = cache.lease(prompt)
                monkeypatch.setattr(type(layer), "__call__", broken)
                with pytest.raises((RuntimeError, onefold.DeviceError)):
                    model(mx.array([prompt]), cache=lease.layers)
                    lease.commit()
                monkeypatch.undo()
                if not lease.closed:
                    lease.discard()
                cache.check()
                turn(cache, model, prompt)
                cache.clear()

    elsewhere(fail_and_go_on)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("to", [0, 1, 2, 3])
def test_a_rewind_takes_back_exactly_what_lies_behind_it(to: int, read: bool) -> None:
    fed = Fed()
    fed.append(0, mx.array([[1, 2]]), 0, 2)
    fed.append(2, mx.array([[3]]), 0, 1)
    if read:
        assert fed.tokens().tolist() == [1, 2, 3]
    fed.cut(to)
    assert fed.end == to and fed.tokens().tolist() == [1, 2, 3][:to]
    assert fed.agreement(np.array([1, 2, 3], np.int32)) == to
