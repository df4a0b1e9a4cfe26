"""Random-weight models in the shapes that the benchmarks need."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import gemma4_text, llama, qwen3_next


def _ready(model: nn.Module, dtype: mx.Dtype = mx.float32) -> nn.Module:
    cast = lambda p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) else p  # noqa: E731
    model.update(tree_map(cast, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def llama_model(
    *,
    layers: int = 32,
    hidden: int = 128,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 128,
    intermediate: int = 256,
    vocab: int = 128,
    window: int = 0,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
) -> nn.Module:
    """Full attention; with a `window`, every second layer slides over that many tokens."""
    mx.random.seed(seed)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        vocab_size=vocab,
        tie_word_embeddings=False,
        layer_types=["full_attention" if i % 2 or not window else "sliding_attention" for i in range(layers)],
        sliding_window=window or None,
    )
    return _ready(llama.Model(args), dtype)


def hybrid_model(*, layers: int = 8) -> nn.Module:
    """qwen3_next: three gated delta nets to one attention layer."""
    mx.random.seed(0)
    args = qwen3_next.ModelArgs.from_dict(
        {
            "model_type": "qwen3_next",
            "hidden_size": 128,
            "num_hidden_layers": layers,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "num_experts": 0,
            "num_experts_per_tok": 0,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": list(range(layers)),
            "moe_intermediate_size": 64,
            "rms_norm_eps": 1e-5,
            "vocab_size": 128,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "max_position_embeddings": 4096,
            "full_attention_interval": 4,
        }
    )
    return _ready(qwen3_next.Model(args))


def gemma_model(*, layers: int = 12, window: int = 64, head_dim: int = 64) -> nn.Module:
    """gemma4: five sliding windows to one attention layer, whose heads are twice as wide."""
    mx.random.seed(0)
    args = gemma4_text.ModelArgs(
        hidden_size=128,
        num_hidden_layers=layers,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        global_head_dim=2 * head_dim,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        sliding_window=window,
        sliding_window_pattern=6,
        vocab_size=128,
        use_double_wide_mlp=False,
    )
    return _ready(gemma4_text.Model(args))
