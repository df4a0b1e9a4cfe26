"""The decode kernel of MLX's default device, if there is one and it is not switched off."""

from __future__ import annotations

import logging
import os

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.model.kernels import cuda, metal, trial
from onefold.cache.model.kernels.decode import DecodeKernel, Shape

log = logging.getLogger("onefold")

SWITCH = "ONEFOLD_KERNELS"
"""The environment variable that switches kernels off."""

_known: dict[bool, DecodeKernel] = {}
"""By whether the device is one of Metal."""


def is_switched_off() -> bool:
    return os.environ.get(SWITCH, "").strip().lower() in ("off", "0", "no", "false")


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
