"""The kernels of MLX's default device, if there are any and they are not switched off."""

from __future__ import annotations

import functools
import logging
import os

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.model.kernels import coding, cuda, metal, product, trial
from onefold.cache.model.kernels.coded_rows import Coding, Turning
from onefold.cache.model.kernels.decode import DecodeKernel, Shape

log = logging.getLogger("onefold")

SWITCH = "ONEFOLD_KERNELS"
"""The environment variable that switches kernels off. So does a value that is not known: it may be a misspelt off."""
ON, OFF = ("on", "1", "yes", "true"), ("off", "0", "no", "false")

_known: dict[bool, DecodeKernel] = {}
"""By whether the device is one of Metal."""
_products: dict[tuple[mx.Dtype, bool], bool] = {}
"""By the type of the weights, and whether there is a bias: whether the kernel for products may be used."""
_codings: dict[Coding, bool] = {}
"""By format: whether the kernels that rotate and encode may be used."""


def is_switched_off() -> bool:
    return _is_off(os.environ.get(SWITCH, ""))


@functools.cache
def _is_off(value: str) -> bool:
    told = value.strip().lower()
    if told not in ("", *ON, *OFF):
        log.warning("%s=%s is not known, and kernels are not used: set it to on or off, or unset it", SWITCH, value)
    return told not in ("", *ON)


def device_kernel() -> DecodeKernel | None:
    """Returns the kernel of the device, whether it is switched off or not; None if the device has none."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return None
    on_metal = device.on_metal()
    if on_metal not in _known:
        _known[on_metal] = metal.kernel(_judge) if on_metal else cuda.kernel(_judge)
    return _known[on_metal]


def kernel() -> DecodeKernel | None:
    """Returns the kernel with which attention of a decode step is computed; None: with MLX's own operations."""
    found = device_kernel()
    return None if found is None or is_switched_off() else found


def products() -> frozenset[tuple[mx.Dtype, bool]]:
    """Returns for which products of a few rows there is a kernel now: types of weights, with a bias or without."""
    usable = frozenset(which for which, passed in _products.items() if passed)
    return usable if usable and kernel() is not None else frozenset()


def compile_products(dtype: mx.Dtype, biased: bool) -> None:
    """Try the kernel for products with weights of a type, and compile it, unless that is done. If it fails the trial,
    or cannot be compiled, it is not used; this is logged. CUDA only."""
    if (dtype, biased) not in _products and dtype in product.TYPES and not is_switched_off():
        _products[dtype, biased] = not trial.reason(trial.ProductTrial(dtype)) and _is_compiled(dtype, biased)


def _is_compiled(dtype: mx.Dtype, biased: bool) -> bool:
    """Compile the kernel for products. Returns whether it can be."""
    weight, bias = mx.zeros((32, 32), dtype), mx.zeros((32,), dtype) if biased else None
    try:
        for rows in product.row_counts():
            device.evaluate(product.multiply(mx.zeros((rows, 1, 32), dtype), weight, bias))
    except RuntimeError as error:
        log.warning("the kernel for products cannot be compiled, and MLX's own operations are used: %s", error)
        return False
    return True


def codes(how: Coding) -> bool:
    """Whether there are kernels now that rotate and encode so."""
    return _codings.get(how, False) and kernel() is not None


def compile_coding(how: Coding) -> None:
    """Try the kernels that rotate and encode so, and compile them, unless that is done. If they fail the trial, or
    cannot be compiled, they are not used; this is logged."""
    if how not in _codings and coding.takes(how) and kernel() is not None:
        _codings[how] = not trial.reason(trial.CodingTrial(how)) and _is_coding_compiled(how)


def _is_coding_compiled(how: Coding) -> bool:
    k, v = (mx.zeros((1, 1, 1, dim), how.dtype) for dim in (how.key_dim, how.value_dim))
    signs = [mx.ones((dim,)) for dim in (how.key_dim, how.value_dim)]
    try:
        device.evaluate(list(coding.decode(how, coding.encode(how, k, v, *signs))))
        device.evaluate(coding.encode(how, k, v, *signs, across=True))
        device.evaluate(coding.turn(Turning(how.key_dim, how.dtype, back=False), k, signs[0]))
        device.evaluate(coding.turn(Turning(how.value_dim, how.dtype, back=True), v, signs[1]))
    except RuntimeError as error:
        log.warning("the kernels that encode KV cannot be compiled, and MLX's own operations are used: %s", error)
        return False
    return True


def calls() -> dict[str, int]:
    """Returns how many calls of attention the kernel has computed, and how many not, by reason."""
    return {reason or "kernel": n for known in _known.values() for reason, n in known.counts.items()}


def _judge(shape: Shape, heads: int, n_kv: int) -> str:
    """Returns why a shape may not serve, and logs on Metal that it does."""
    tried = trial.Trial(shape, heads, n_kv)
    reason = trial.reason(tried)
    if not reason and device.on_metal():
        log.info("the decode kernel passed its trial and is used for %s; set %s=off to use MLX's own", tried, SWITCH)
    return reason
