"""Linear layers of a forward of few rows, as they are computed on CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from driving import close, fresh, prefilled, words
from tiny import tiny

import onefold
from onefold.cache.memory import device
from onefold.cache.model import linear
from onefold.cache.model.kernels import comparison, current, product, trial


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Pretends that MLX computes on CUDA, with plain operations in the kernel's place. Returns the shapes it was given;
    it takes products of any type."""
    given: list[tuple[int, ...]] = []

    def multiply(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        given.append(tuple(x.shape))
        return x @ weight.T if bias is None else x @ weight.T + bias

    monkeypatch.setattr(linear.device, "on_cuda", lambda: True)
    monkeypatch.setattr(product, "multiply", multiply)
    monkeypatch.setattr(product, "NAMES", {mx.float32: "f32"})
    monkeypatch.setattr(current, "products", lambda: frozenset({(mx.float32, False), (mx.float32, True)}))
    return given


@contextmanager
def replaced(model: nn.Module) -> Iterator[None]:
    originals = [getattr(cls, name) for cls, name, _ in linear._PLACES]
    installed = linear.install([model])
    try:
        assert installed
        assert all(getattr(cls, name) is not f for (cls, name, _), f in zip(linear._PLACES, originals, strict=True))
        yield
    finally:
        linear.uninstall(installed)
    assert [getattr(cls, name) for cls, name, _ in linear._PLACES] == originals


def quantised(bits: int = 4) -> nn.Module:
    model = tiny("llama")
    nn.quantize(model, group_size=32, bits=bits)
    return model


@pytest.mark.parametrize(
    ("rows", "bits", "computed"),
    [(1, 4, (1, 1)), (2, 4, (1, 8)), (7, 8, (1, 8)), (7, 3, (7, 1)), (8, 4, (1, 8)), (20, 3, (1, 20))],
)
def test_rows_of_quantised_layers_are_folded_and_padded(rows, bits, computed, on_cuda, monkeypatch):
    model = quantised(bits)
    layer = next(m for _, m in model.named_modules() if isinstance(m, nn.QuantizedLinear))
    x, long = mx.random.normal((rows, 1, 64)), mx.random.normal((rows, 3, 64), key=mx.random.key(1))
    before, many = layer(x), layer(long)
    seen: list[tuple[int, ...]] = []
    product_ = mx.quantized_matmul

    def watched(x: mx.array, *args: Any, **options: Any) -> mx.array:
        seen.append(tuple(x.shape))
        return product_(x, *args, **options)

    monkeypatch.setattr(mx, "quantized_matmul", watched)
    with replaced(model):
        layer(x)
        with linear.in_forward():
            assert close(layer(x), before) and layer(x).shape == before.shape
            assert close(layer(long), many)
    assert seen == [(rows, 1, 64), (*computed, 64), (*computed, 64), (rows, 3, 64)]


def test_a_few_rows_are_multiplied_by_the_kernel_in_forwards_that_are_watched(on_cuda):
    model = tiny("llama")
    layer = nn.Linear(64, 48)
    with replaced(model):
        x = mx.random.normal((4, 1, 64))
        before = layer(x)
        assert not on_cuda
        with linear.in_forward():
            assert close(layer(x), before)
            assert on_cuda == [(4, 1, 64)]
            for other in (x[:1], x[0], mx.zeros((33, 1, 64)), x.astype(mx.float16)):
                layer(other)
            nn.Linear(60, 8)(mx.zeros((2, 1, 60)))
            assert on_cuda == [(4, 1, 64)]
        assert mx.grad(lambda x: layer(x).sum())(x).shape == x.shape


def test_another_threads_forward_does_not_count(on_cuda):
    layer = nn.Linear(64, 48)
    mx.eval(layer.parameters())  # only the thread that made a lazy array can compute it
    with replaced(layer), linear.in_forward():
        thread = threading.Thread(target=lambda: mx.eval(layer(mx.zeros((4, 1, 64)))))
        thread.start()
        thread.join()
    assert not on_cuda


@pytest.mark.parametrize("family", ["llama"])
def test_a_batch_uses_the_kernel_for_every_linear_layer(family, on_cuda, monkeypatch):
    monkeypatch.setattr(current, "compile_products", lambda *_: None)
    model = tiny(family)
    prompts = [words(20 + i, seed=i) for i in range(3)]
    wanted = [fresh(model, prompt) for prompt in prompts]
    with onefold.PrefixCache(model, "64MB") as cache:
        leases = prefilled(cache, model, prompts)
        batch = cache.batch(leases)
        del on_cuda[:]
        logits = batch.step([prompt[-1] for prompt in prompts])
        n = sum(isinstance(m, nn.Linear) for _, m in model.named_modules())
        assert n and len(on_cuda) >= n and set(on_cuda) == {(3, 1, x[-1]) for x in on_cuda}
        for row, logit in zip(wanted, logits, strict=True):
            assert close(logit[None], row)
    assert nn.Linear.__call__.__qualname__ == "Linear.__call__"


def test_the_kernel_is_used_where_it_passed_its_trial(monkeypatch):
    tried: list[mx.Dtype] = []

    def reason(one: trial.ProductTrial) -> str:
        tried.append(one.dtype)
        return "" if one.dtype == mx.bfloat16 else "it differs"

    monkeypatch.setattr(linear.device, "on_cuda", lambda: True)
    monkeypatch.setattr(current, "kernel", object)
    monkeypatch.setattr(current, "_products", {})
    monkeypatch.setattr(current, "_is_compiled", lambda _, biased: biased)
    monkeypatch.setattr(trial, "reason", reason)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for biased in (True, False):
            model = nn.Linear(32, 32, bias=biased)
            model.set_dtype(dtype)
            linear.compile_kernels(model)
            linear.compile_kernels(model)
    assert tried == [mx.float16, mx.float16, mx.bfloat16, mx.bfloat16]
    assert current.products() == {(mx.bfloat16, True)}  # it cannot be compiled without a bias
    monkeypatch.setattr(current, "kernel", lambda: None)  # switched off, or on a CPU by now
    assert not current.products()


def test_it_is_not_tried_where_kernels_are_switched_off(monkeypatch):
    monkeypatch.setenv("ONEFOLD_KERNELS", "off")
    monkeypatch.setattr(current, "_products", {})
    monkeypatch.setattr(trial, "reason", lambda _: pytest.fail("it was tried"))
    current.compile_products(mx.bfloat16, False)
    assert not current.products()


def test_a_wrong_product_fails_the_comparison(monkeypatch):
    def right(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        found = x.astype(mx.float32) @ weight.astype(mx.float32).T
        return (found if bias is None else found + bias.astype(mx.float32)).astype(x.dtype)

    monkeypatch.setattr(product, "multiply", right)
    assert comparison.compare_products(mx.bfloat16) == ""
    monkeypatch.setattr(product, "multiply", lambda x, weight, bias: right(x, weight, None))
    assert "differ" in comparison.compare_products(mx.bfloat16)
    monkeypatch.setattr(product, "multiply", lambda x, weight, bias: right(x, weight, bias) * mx.nan)
    assert "2 rows of 32 to 1 differ by nan" in comparison.compare_products(mx.float16)


@pytest.mark.skipif(not device.on_cuda(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", product.TYPES)
def test_the_trial_of_products_passes_on_this_device(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEFOLD_CACHE_DIR", str(tmp_path))
    assert trial.reason(trial.ProductTrial(dtype)) == ""
    assert list(trial.kept().values()) == [trial.ProductTrial(dtype)]


@pytest.mark.skipif(not device.on_cuda(), reason="needs CUDA")
def test_a_rows_product_does_not_depend_on_the_rows_beside_it():
    x, weight = (mx.random.normal(shape).astype(mx.bfloat16) for shape in ((32, 1, 4096), (1000, 4096)))
    whole = product.multiply(x, weight, None)
    for rows in (2, 5, 8, 11, 16, 27):
        assert mx.array_equal(product.multiply(x[:rows], weight, None), whole[:rows])


def test_only_a_linear_layer_adds_a_bias(on_cuda):
    embedding, x = nn.Embedding(10, 64), mx.random.normal((3, 1, 64))
    wanted = embedding.as_linear(x)
    embedding.bias = mx.ones((10,))
    with replaced(embedding), linear.in_forward():
        assert close(embedding.as_linear(x), wanted)
    assert on_cuda


def test_what_others_put_in_a_methods_place_stays(on_cuda, monkeypatch):
    monkeypatch.setattr(nn.Linear, "__call__", nn.Linear.__call__)  # to restore it
    installed = linear.install([tiny("llama")])
    ours = nn.Linear.__call__
    nn.Linear.__call__ = theirs = lambda self, x: ours(self, x)
    linear.uninstall(installed)
    assert nn.Linear.__call__ is theirs


def test_layers_are_replaced_while_a_cache_is_open_on_cuda(monkeypatch):
    original = nn.Linear.__call__
    with onefold.PrefixCache(tiny("llama"), "64MB"):
        assert nn.Linear.__call__ is original  # not on a CPU
    monkeypatch.setattr(linear.device, "on_cuda", lambda: True)
    assert not linear.install([])
    first, second = linear.install([tiny("llama")]), linear.install([quantised()])
    linear.uninstall(first)
    assert nn.Linear.__call__ is not original
    linear.uninstall(second)
    assert nn.Linear.__call__ is original


def test_warming_runs_every_kind_of_layer_with_every_length(on_cuda, monkeypatch):
    monkeypatch.setattr(linear, "LENGTHS", range(33, 36))
    model, ran = tiny("llama"), []
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: path.endswith("down_proj"))
    for cls in (nn.Linear, nn.QuantizedLinear):

        def call(self: nn.Module, x: mx.array, original: Any = cls.__call__) -> mx.array:
            ran.append((type(self), self["weight"].shape[0], x.shape))
            return original(self, x)

        monkeypatch.setattr(cls, "__call__", call)
    linear.warm(model)
    down = model.layers[0].mlp.down_proj
    dims = down["scales"].shape[1] * 32
    quantised = [x[1] for cls, _, x in ran if cls is nn.QuantizedLinear]
    assert quantised == [16, 32, 64, 128, 256] and {x[2] for c, _, x in ran if c is nn.QuantizedLinear} == {dims}
    plain = {(layer["weight"].shape) for _, layer in model.named_modules() if type(layer) is nn.Linear}
    assert sorted((n, x[2], x[1]) for cls, n, x in ran if cls is nn.Linear) == sorted(
        (n, dims, length) for n, dims in plain for length in (33, 34, 35)
    )
    del ran[:]
    monkeypatch.setattr(linear, "MOST_WARMED_BYTES", 34 * max(n for n, _ in plain) * 4)
    linear.warm(model)
    largest = max(n for n, _ in plain)
    assert {x[1] for cls, n, x in ran if cls is nn.Linear and n == largest} == {33, 34}
    del ran[:]
    monkeypatch.setattr(linear.device, "on_cuda", lambda: False)
    linear.warm(model)
    assert not ran
