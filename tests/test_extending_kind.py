"""A new kind is one file and one line: the example of docs/extending.md is cached, shared and restored from disk."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from example_kind import MeanLayer, MeanLeaf, MeanModel

from onefold import PrefixCache
from onefold.cache.model.kinds import registry


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KINDS", [MeanLeaf, *registry.KINDS])


@pytest.fixture
def model() -> MeanModel:
    mx.random.seed(7)
    return MeanModel()


def cold(model: MeanModel, tokens: list[int]) -> mx.array:
    return model(mx.array([tokens]))[:, -1]


def ask(model: MeanModel, cache: PrefixCache, tokens: list[int]) -> tuple[mx.array, int, str]:
    """The logits of the last token, how many tokens were cached, and why not more."""
    with cache.lease(tokens) as lease:
        for chunk in lease.chunks(16):
            model(mx.array(chunk)[None], cache=lease.layers)
        logits = model(mx.array([tokens[-1:]]), cache=lease.layers)[:, -1]
        lease.commit(tokens)
        return logits, lease.cached, lease.reason


TURN = [(7 * i) % 61 for i in range(100)]
KEPT = len(TURN)
"""While bytes are free there is a checkpoint at the end of every turn."""
NEXT = [*TURN, *((11 * i) % 59 for i in range(40))]


def test_it_is_recognised_and_its_bytes_are_counted(model: MeanModel) -> None:
    with PrefixCache(model, "8MB") as cache:
        assert not cache.uncached_reason
        assert cache.parts.models.anatomies[0].kinds == {"running mean": 2}
        ask(model, cache, TURN)
        assert cache.stats().bytes["checkpoint"] > 0
        cache.check()


def test_a_conversation_continues_from_it_and_another_branches_off(model: MeanModel) -> None:
    with PrefixCache(model, "8MB") as cache:
        ask(model, cache, TURN)
        logits, cached, _ = ask(model, cache, NEXT)
        assert cached == KEPT
        assert mx.allclose(logits, cold(model, NEXT), atol=1e-5).item()
        other = [*TURN, 5, 6]
        logits, cached, _ = ask(model, cache, other)
        assert cached == KEPT
        assert mx.allclose(logits, cold(model, other), atol=1e-5).item()


def test_it_comes_back_from_disk(model: MeanModel, tmp_path: Path) -> None:
    with PrefixCache(model, "8MB", disk=tmp_path) as cache:
        ask(model, cache, TURN)
    with PrefixCache(model, "8MB", disk=tmp_path) as cache:
        logits, cached, _ = ask(model, cache, NEXT)
        assert cached == KEPT and cache.stats().tokens_from_disk == KEPT
        assert mx.allclose(logits, cold(model, NEXT), atol=1e-5).item()


def test_a_forward_that_fails_half_way_is_undone(model: MeanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with PrefixCache(model, "8MB") as cache, cache.lease(TURN) as lease:
        model(mx.array([TURN[:50]]), cache=lease.layers)
        second, real = lease.layers[1], MeanLayer.mean

        def fails(layer: MeanLayer, x: mx.array) -> mx.array:
            if layer is second:
                raise RuntimeError("half-way")
            return real(layer, x)

        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="half-way"):
            patched.setattr(MeanLayer, "mean", fails)
            model(mx.array([TURN[50:-1]]), cache=lease.layers)
        assert lease.offset == 50
        model(mx.array([TURN[50:-1]]), cache=lease.layers)
        logits = model(mx.array([TURN[-1:]]), cache=lease.layers)[:, -1]
        assert mx.allclose(logits, cold(model, TURN), atol=1e-5).item()
