"""Rows of a decode step as one matrix at quantised layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from driving import close
from tiny import tiny

import onefold
from onefold.cache.model import folding


def quantised() -> nn.Module:
    model = tiny("llama")
    nn.quantize(model, group_size=32, bits=4)
    return model


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 20])
def test_folded_rows_are_computed_as_before(rows, monkeypatch):
    monkeypatch.setattr(folding.device, "on_cuda", lambda: True)
    model = quantised()
    layer = next(m for _, m in model.named_modules() if isinstance(m, nn.QuantizedLinear))
    x = mx.random.normal((rows, 1, 64))
    before, many = layer(x), layer(mx.random.normal((rows, 3, 64), key=mx.random.key(1)))
    seen: list[tuple[int, ...]] = []
    original = nn.QuantizedLinear.__call__
    installed = folding.install([model])
    try:
        assert installed
        assert nn.QuantizedLinear.__call__ is not original
        product = mx.quantized_matmul

        def watched(x: mx.array, *args: Any, **options: Any) -> mx.array:
            seen.append(tuple(x.shape))
            return product(x, *args, **options)

        monkeypatch.setattr(mx, "quantized_matmul", watched)
        assert close(layer(x), before) and layer(x).shape == before.shape
        assert close(layer(mx.random.normal((rows, 3, 64), key=mx.random.key(1))), many)
    finally:
        folding.uninstall(installed)
    assert seen[0] == ((rows, 1, 64) if rows < 8 else (1, rows, 64))
    assert seen[-1] == (rows, 3, 64)
    assert nn.QuantizedLinear.__call__ is original


def test_rows_are_folded_while_a_cache_of_a_quantised_model_is_open_on_cuda(monkeypatch):
    original = nn.QuantizedLinear.__call__
    with onefold.PrefixCache(quantised(), "64MB"):
        assert nn.QuantizedLinear.__call__ is original  # not on a CPU
    monkeypatch.setattr(folding.device, "on_cuda", lambda: True)
    assert not folding.install([tiny("llama")])
    first, second = folding.install([quantised()]), folding.install([quantised()])
    folding.uninstall(first)
    assert nn.QuantizedLinear.__call__ is not original
    folding.uninstall(second)
    assert nn.QuantizedLinear.__call__ is original
