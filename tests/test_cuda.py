"""What CUDA needs, as far as it can be seen without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from onefold.cache.memory import device
from onefold.cache.model import attention
from onefold.cache.model.formats.plain import PlainCodec


@pytest.mark.parametrize("given", [None, "1"])
def test_importing_onefold_switches_mlx_s_thrashing_check_off_unless_told_otherwise(given: str | None) -> None:
    names = ("MLX_ENABLE_CACHE_THRASHING_CHECK", "MLX_CUDA_SDPA_CACHE_SIZE", "MLX_CUDA_GRAPH_CACHE_SIZE")
    env = {k: v for k, v in os.environ.items() if k not in names}
    if given is not None:
        env[names[0]] = given
    code = f"import onefold, os; print([os.environ[n] for n in {names}])"
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([given or "0", "1024", "2000"])


def address(array: mx.array) -> int:
    mx.eval(array)
    return int(np.array(array, copy=False).__array_interface__["data"][0])


@pytest.mark.parametrize("queries", [1, 2, 40])
@pytest.mark.parametrize("lo", [0, 5])
def test_no_slice_that_begins_past_0_reaches_the_fused_kernel_on_cuda(monkeypatch, queries: int, lo: int) -> None:
    """There it gives NaN for them."""
    buffers = [mx.random.normal((1, 2, 64, 16)) for _ in range(2)]
    starts = {address(a): a.nbytes for a in buffers}
    seen: list[mx.array] = []
    real = mx.fast.scaled_dot_product_attention

    def spy(q: mx.array, k: mx.array, v: mx.array, **options: object) -> mx.array:
        seen.extend((k, v))
        return real(q, k, v, **options)

    monkeypatch.setattr(device, "on_cuda", lambda: True)
    monkeypatch.setattr("onefold.cache.model.composed_row.mx.fast.scaled_dot_product_attention", spy)
    q = mx.random.normal((1, 4, queries, 16))
    views = [attention.View(buffers, lo, lo + 50, 1)]
    pair = [attention.Handle([views], PlainCodec(), (1, 2, 50, 16), mx.float32, [0]) for _ in range(2)]
    mask = "causal" if queries > 1 else None
    out = attention.attention(q, *pair, None, 0.25, mask)
    for array in seen:
        at = address(array)
        assert not any(start < at < start + n for start, n in starts.items())
    assert queries < 40 or len(seen) == 2
    want = real(q, *(a[..., lo : lo + 50, :] for a in buffers), scale=0.25, mask=mask)
    assert mx.allclose(out, want, atol=1e-5).item()
