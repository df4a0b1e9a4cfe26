"""How a token is drawn from the scores of a row."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler

from onefold.cache.memory import device
from onefold.engine import stock
from onefold.engine.request import Sampling
from onefold.engine.sampling import Row

VOCAB = 1000


def scores(rows: int = 1) -> mx.array:
    found = 3 * mx.random.normal((rows, VOCAB), key=mx.random.key(5))
    return found - mx.logsumexp(found, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95},
        {"temperature": 2.0, "top_k": 7, "min_p": 0.01, "top_p": 0.8},
    ],
)
def test_a_draw_is_that_of_mlx_lm(settings):
    row, given = Row(Sampling(**settings), VOCAB), dict(settings)
    stock_sampler = make_sampler(temp=given.pop("temperature"), **given)
    for rows in (1, 3):
        for seed in range(20):
            mx.random.seed(seed)
            wanted = stock_sampler(scores(rows)).tolist()
            mx.random.seed(seed)
            assert row.draw(scores(rows)).tolist() == wanted


@pytest.mark.parametrize("filtered", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_a_draw_that_falls_on_a_token_without_a_score_is_the_likeliest(filtered, monkeypatch):
    given = mx.zeros((3, 10)) + mx.arange(10) - 20.0
    given[0, 7:] = -math.inf  # forbidden; 6 is the likeliest that is left
    drawn = [9, 8, 0] if filtered else [9, 8, 3]
    monkeypatch.setattr(stock, "categorical_sampling", lambda x, temp: mx.array(drawn, mx.uint32))
    wanted = [6, 8, 9] if filtered else [6, 8, 3]
    assert Row(Sampling(temperature=1.0, **filtered), 10).draw(given).tolist() == wanted


@pytest.mark.skipif(not device.on_gpu(), reason="the cumulative sum of a CPU is ascending")
def test_no_draw_of_many_has_a_probability_of_zero():
    vocab, row = 49_152, Row(Sampling(temperature=0.7), 49_152)
    given = 3 * mx.random.normal((1, vocab), key=mx.random.key(1))
    given = mx.where(mx.arange(vocab) % 3 == 0, given, -math.inf)
    mx.random.seed(0)
    drawn = mx.concatenate([row.draw(given) for _ in range(20_000)])
    assert (drawn % 3).max().item() == 0
