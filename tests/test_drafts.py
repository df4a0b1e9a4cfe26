"""Speculative decoding on every kind of layer: the answer is the plain one, and what is stored is right."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from driving import cold, forward, greedy, same
from effort import effort, quick
from mlx_lm.generate import generate_step, speculative_generate_step
from tiny import tiny

import onefold

FAMILIES = (
    "llama",
    "llama_sliding",
    "gemma3",
    "gemma2",
    "qwen3_next",
    "falcon_h1",
    "llama4",
    "rwkv7",
    "deepseek_v41",
)
"""Full attention, windows, contiguous, recurrent and hybrid, chunked, and a cache class of the model's own."""


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=n)


def plain(model: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    with onefold.PrefixCache(model, "256MB", **options) as cache, cache.lease(prompt) as lease:
        steps = generate_step(mx.array(lease.rest), model, max_tokens=n, prompt_cache=lease.layers)
        return [token for token, _ in steps]


def drafted(cache: onefold.PrefixCache, lease: onefold.Lease, n: int, draft_tokens: int = 3) -> list[int]:
    steps = speculative_generate_step(
        mx.array(lease.rest),
        cache.model,
        cache.draft_model,
        max_tokens=n,
        prompt_cache=lease.layers,
        num_draft_tokens=draft_tokens,
    )
    return [token for token, _, _ in steps]


def is_right(cache: onefold.PrefixCache, tokens: list[int], namespace: Any = "") -> int:
    """What is stored of these tokens leads to a cold run's logits; returns how much of them was reused."""
    model = cache.model
    with cache.lease(tokens, namespace=namespace) as lease:
        mine = lease.layers[: len(model.layers)]
        logits = forward(model, mine, tokens, lease.cached)
        assert same(greedy(model, mine, logits, 2)[1], cold(model, tokens, 2)[1], 1e-3)
        return lease.cached


@pytest.mark.parametrize("family", quick(FAMILIES, "llama", "llama_sliding", "qwen3_next", "llama4", "deepseek_v41"))
def test_a_draft_changes_neither_the_answer_nor_what_is_stored(family: str) -> None:
    model, draft = tiny(family), tiny(family, seed=3)
    prompt = words(50)
    reference = plain(model, prompt, 24)
    with onefold.PrefixCache(model, "256MB", draft_model=draft, min_checkpoint_tokens=1) as cache:
        with cache.lease(prompt) as lease:
            answer = drafted(cache, lease, 24)
            assert answer == reference
            assert lease.agreement(prompt + answer) == lease.offset >= len(prompt) + 23
            lease.commit((prompt + answer)[: lease.offset])
        cache.check()
        assert is_right(cache, [*prompt, *answer, *words(9, 5)]) >= len(prompt) + 23
        is_right(cache, [*prompt, *answer[:12], *words(9, 6)])
        cache.check()


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("bound", quick([40, 64, 96], 40, 96))
def test_a_bounded_conversation_with_a_draft_is_the_plain_one(bound: int, keep: int) -> None:
    model, draft, prompt = tiny("llama"), tiny("llama", seed=3), words(50)
    reference = plain(model, prompt, 70, max_kv_size=bound, keep=keep)
    with onefold.PrefixCache(model, "256MB", draft_model=draft, max_kv_size=bound, keep=keep) as cache:
        with cache.lease(prompt) as lease:
            answer = drafted(cache, lease, 70)
            assert answer == reference
            lease.commit((prompt + answer)[: lease.offset])
        cache.check()


@pytest.mark.parametrize("draft_tokens", quick([2, 4], 2))
@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "falcon_h1"])
def test_a_hybrid_that_rotates_in_the_middle_of_a_round(family: str, draft_tokens: int) -> None:
    model, draft, prompt = tiny(family), tiny(family, seed=3), words(20)
    options = {"max_kv_size": 24, "keep": 4, "min_checkpoint_tokens": 1}
    reference = plain(model, prompt, 24, **options)
    with onefold.PrefixCache(model, "256MB", draft_model=draft, **options) as cache:
        with cache.lease(prompt) as lease:
            assert drafted(cache, lease, 24, draft_tokens) == reference
        cache.check()


def test_layers_that_a_draft_cannot_be_fitted_to_are_refused_before_anything_is_fed() -> None:
    """mlx-lm cuts the list of caches by the number of layers, where this model's layers share caches."""
    model, draft = tiny("gemma4"), tiny("gemma4", seed=3)
    with onefold.PrefixCache(model, "64MB", draft_model=draft) as cache, cache.lease(words(50)) as lease:
        with pytest.raises(onefold.LeaseError, match="pass all of them"):
            drafted(cache, lease, 8)
        assert lease.offset == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "llama4"])
def test_any_sequence_of_drafted_turns(family: str) -> None:
    """Turns that go on and branch off, drafts of any length, aborted ones, plain turns between them."""
    model, draft, rng = tiny(family), tiny(family, seed=3), random.Random(7)
    with onefold.PrefixCache(model, "256MB", draft_model=draft, min_checkpoint_tokens=1) as cache:
        known = [words(30)]
        for step in range(effort(4, 12)):
            base = rng.choice(known)
            tokens = base[: rng.randint(1, len(base))] + words(rng.randint(1, 20), step + 20)
            n, k = rng.randint(1, 25), rng.randint(1, 5)
            with cache.lease(tokens) as lease:
                reference = plain(model, tokens, n)
                if step % 4 == 3:  # the caller goes away in the middle
                    steps = speculative_generate_step(
                        mx.array(lease.rest), model, draft, max_tokens=n, prompt_cache=lease.layers, num_draft_tokens=k
                    )
                    answer = [token for (token, _, _), _ in zip(steps, range(max(1, n // 2)), strict=False)]
                    steps.close()
                    assert answer == reference[: len(answer)]
                else:
                    answer = drafted(cache, lease, n, k)
                    assert answer == reference
                whole = tokens + answer
                kept = lease.agreement(whole)
                assert kept >= len(tokens) - 1
                lease.commit(whole[:kept])
            cache.check()
            known.append(whole)
            is_right(cache, [*whole[: rng.randint(1, len(whole))], *words(5, step)])


def test_a_draft_that_the_cache_does_not_know_is_right_on_windows_too() -> None:
    """The target's layers are leased, the draft's are the caller's own."""
    from mlx_lm.models.cache import make_prompt_cache

    model, draft, prompt = tiny("gemma3"), tiny("llama", seed=3), words(50)
    reference = plain(model, prompt, 40)
    with onefold.PrefixCache(model, "256MB") as cache:
        with cache.lease(prompt) as lease:
            steps = speculative_generate_step(
                mx.array(prompt), model, draft, max_tokens=40, prompt_cache=[*lease.layers, *make_prompt_cache(draft)]
            )
            answer = [token for token, _, _ in steps]
            assert answer == reference
            lease.commit((prompt + answer)[: lease.offset])
        assert is_right(cache, [*prompt, *answer, 7, 8]) == len(prompt) + 39
