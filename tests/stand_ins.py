"""Plain MLX operations in place of what two architectures can only do on Metal, so that their caches can be tried on
any machine. None of it touches keys and values that are cached, nor the attention over them.

- Ternary linear layers multiply in a kernel of their own: plain layers of the same shape are put there.
- One family is written on fused kernels, in bf16: they are spelled out here, in fp32 as every tiny model is.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.bitlinear_layers import BitLinear


def unpack(model: nn.Module) -> None:
    """Plain linear layers for ternary ones."""
    packed = [(path, m) for path, m in model.named_modules() if isinstance(m, BitLinear)]
    for i, (path, layer) in enumerate(packed):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
        plain.weight = 1.5 * layer.in_features**-0.5 * mx.random.normal(plain.weight.shape, key=mx.random.key(i))
        model.update_modules(tree_unflatten([(path, plain)]))
    mx.eval(model.parameters())


def spell_out(module: ModuleType) -> None:
    """Put plain operations where a module has imported fused kernels."""
    found = [f for f in _FUSED if hasattr(module, f.__name__)]
    for function in found:
        setattr(module, function.__name__, function)
    if found:
        module.mx = _InFp32()  # type: ignore[attr-defined]


class _InFp32:
    """`mlx.core`, for a module that would round its activations to bf16."""

    bfloat16 = mx.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    split = n_heads * head_dim
    queries, keys = qkvg[..., :split], qkvg[..., split : split + n_kv_heads * head_dim]
    queries = mx.unflatten(queries, -1, (n_heads, head_dim))
    keys = mx.unflatten(keys, -1, (n_kv_heads, head_dim))
    return [mx.fast.rms_norm(queries, None, eps) * query_scale, mx.fast.rms_norm(keys, None, eps)]


def qk_norm_rope(
    qkvg: mx.array, *, head_dim: int, rope_base: float, offset: int | mx.array, **norm: Any
) -> list[mx.array]:
    return [
        mx.fast.rope(x.swapaxes(1, 2), head_dim, traditional=True, base=rope_base, scale=1.0, offset=offset).swapaxes(
            1, 2
        )
        for x in qk_norm(qkvg, head_dim=head_dim, **norm)
    ]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    normed = mx.fast.rms_norm(x, None, eps).swapaxes(1, 2)
    return normed.flatten(-2) * mx.sigmoid(gate)


def pre_norm(stream: mx.array, norm: nn.RMSNorm, *, dtype: mx.Dtype) -> mx.array:
    return mx.fast.rms_norm(stream, norm.weight, norm.eps).astype(dtype)


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: nn.RMSNorm | None,
) -> tuple[mx.array, mx.array | None]:
    scaled = branch if post_weight is None else branch * post_weight
    total = alpha * stream + beta * mx.fast.rms_norm(scaled, None, post_eps)
    return total, None if next_norm is None else pre_norm(total, next_norm, dtype=branch.dtype)


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return [chosen, weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale]


def post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    return (mx.fast.rms_norm(experts * norm_weight, None, eps) * weights[..., None]).sum(axis=-2)


_FUSED = [
    qk_norm,
    qk_norm_rope,
    rms_norm_sigmoid_gate,
    pre_norm,
    norm_add_norm,
    expert_routing,
    post_expert_norm_combine,
]
