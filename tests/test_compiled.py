"""With compiled graphs, as users run it: the other tests have them off (conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from driving import turn
from tiny import tiny

import onefold


@pytest.fixture
def compiled() -> Iterator[None]:
    mx.enable_compile()
    yield
    mx.disable_compile()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v3", "lfm2"])
def test_what_is_reused_equals_a_cold_run(compiled: None, family: str) -> None:
    model = tiny(family)
    with onefold.PrefixCache(model, "64MB", min_checkpoint_tokens=1) as cache:
        first, tokens = turn(cache, model, [i % 97 for i in range(50)])
        second, longer = turn(cache, model, [*tokens, 3, 1, 4])
        branch, _ = turn(cache, model, [*longer[:40], 7, 7, 7])
    assert (first.cached, second.cached) == (0, len(tokens))
    assert 0 <= branch.cached <= 40
