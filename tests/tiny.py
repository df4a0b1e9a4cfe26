"""Tiny random-weight instances of mlx-lm architectures, small enough for a CPU.

Each family has every kind of layer its architecture has, sliding windows and
attention chunks of 16 tokens so that they wrap in a short test, and fp32 weights.
"""

import copy
import importlib
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

WINDOW = 16


@dataclass(frozen=True)
class Family:
    """One architecture: its mlx_lm.models module, its config and its caches.

    `note` starts with the caches that make_prompt_cache gives: KV, Rotating,
    Arrays(n), Chunked or List(...), one name where all layers have the same. For
    recurrent layers, "masked" means that the model calls cache.make_mask and
    "advances" that it calls cache.advance.
    """

    module: str
    config: dict[str, Any]
    note: str


def _config(model_type: str, **fields: Any) -> dict[str, Any]:
    """A config over common defaults; an architecture ignores fields it lacks."""
    return {
        "model_type": model_type,
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "sliding_window": WINDOW,
        **fields,
    }


_SLIDING = "sliding_attention"
_FULL = "full_attention"

_MLA: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}

_DEEPSEEK: dict[str, Any] = {
    **_MLA,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

# Recurrent key and state sizes are 32, the least that the Metal kernels take.
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

_LONGCAT: dict[str, Any] = {
    **_MLA,
    "num_layers": 2,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "moe_topk": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", _config("llama"), "KV"),
    "llama_q": Family(
        "llama",
        _config("llama", head_dim=64),
        "KV; head_dim 64, so that KV can be quantized in groups of 64 or 32",
    ),
    "llama_sliding": Family(
        "llama",
        _config(
            "llama",
            num_hidden_layers=4,
            layer_types=[_SLIDING, _FULL, _SLIDING, _FULL],
        ),
        "Rotating, KV, Rotating, KV",
    ),
    "qwen3": Family("qwen3", _config("qwen3"), "KV"),
    "mixtral": Family(
        "mixtral",
        _config("mixtral", num_local_experts=4, num_experts_per_tok=2),
        "KV; MoE",
    ),
    "phi3": Family("phi3", _config("phi3"), "KV"),
    "minimax": Family(
        "minimax",
        _config(
            "minimax",
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
            rotary_dim=8,
        ),
        "KV; MoE",
    ),
    "gemma2": Family(
        "gemma2",
        _config("gemma2", query_pre_attn_scalar=16.0),
        "KV; soft-capped attention, always tied, no sliding window",
    ),
    "gemma3": Family(
        "gemma3_text",
        _config(
            "gemma3_text",
            num_hidden_layers=6,
            query_pre_attn_scalar=16.0,
            sliding_window_pattern=3,
        ),
        "Rotating, Rotating, KV, Rotating, Rotating, KV",
    ),
    "gemma3n": Family(
        "gemma3n",
        {
            "model_type": "gemma3n",
            "text_config": _config(
                "gemma3n_text",
                num_hidden_layers=6,
                num_kv_shared_layers=2,
                layer_types=[_SLIDING, _FULL] * 3,
                vocab_size_per_layer_input=101,
                hidden_size_per_layer_input=16,
                rope_local_base_freq=10000.0,
                final_logit_softcapping=30.0,
                activation_sparsity_pattern=[0.5] + [0.0] * 5,
                altup_num_inputs=2,
                altup_coef_clip=120.0,
                altup_correct_scale=True,
                altup_active_idx=0,
                laurel_rank=8,
            ),
        },
        "Rotating, KV, Rotating, KV; 6 layers with 4 caches: the last 2 layers "
        "read those of layers 2 and 3 with cache.keys_and_values(), but use their "
        "own weights where there is no cache",
    ),
    "gemma4": Family(
        "gemma4_text",
        _config(
            "gemma4_text",
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            layer_types=[_SLIDING, _FULL] * 3,
            global_head_dim=32,
            vocab_size_per_layer_input=101,
            hidden_size_per_layer_input=16,
        ),
        "Rotating, KV, Rotating, KV; 6 layers with 4 caches: the last 2 layers "
        "reuse what update_and_fetch returned to layers 2 and 3; "
        "head_dim 16 in sliding layers, 32 in full ones",
    ),
    "cohere2": Family(
        "cohere2",
        _config(
            "cohere2",
            num_hidden_layers=4,
            sliding_window_pattern=2,
            logit_scale=2.0,
        ),
        "Rotating, KV, Rotating, KV; always tied",
    ),
    "olmo3": Family(
        "olmo3",
        _config("olmo3", num_hidden_layers=4),
        "Rotating, Rotating, Rotating, KV",
    ),
    "gpt_oss": Family(
        "gpt_oss",
        _config(
            "gpt_oss",
            num_hidden_layers=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=[_SLIDING, _FULL] * 2,
        ),
        "Rotating, KV, Rotating, KV; attention sinks, MoE",
    ),
    "llama4": Family(
        "llama4",
        {
            "model_type": "llama4",
            "text_config": _config(
                "llama4_text",
                num_hidden_layers=4,
                attention_chunk_size=WINDOW,
                interleave_moe_layer_step=2,
                intermediate_size_mlp=96,
                num_local_experts=4,
                num_experts_per_tok=1,
                rope_scaling=None,
                use_qk_norm=True,
                floor_scale=16,
            ),
        },
        "Chunked, Chunked, Chunked, KV; calls cache.maybe_trim_front() and reads start_position",
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        _config("deepseek_v3", **_DEEPSEEK),
        "KV; MLA: keys (B, 1, T, 32) are the latent, values (B, 1, T, 16) its rope",
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        _config(
            "deepseek_v32",
            **_DEEPSEEK,
            index_topk=WINDOW,
            index_n_heads=16,
            index_head_dim=32,
        ),
        "List(KV, KV); MLA and the keys of its indexer, whose values are zeros; "
        "attends to the top 16 entries. The model assigns keys and values",
    ),
    "deepseek_v41": Family(
        "deepseek_v41",
        _config(
            "deepseek_v41",
            num_hidden_layers=4,
            head_dim=24,  # no multiple of 16: its KV is not rounded to fp8 and fp4
            q_lora_rank=32,
            qk_rope_head_dim=8,
            o_groups=2,
            o_lora_rank=16,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            rms_norm_eps=1e-6,
            compress_ratios=(0, 4, 4, 4),
            kv_source_layer_ids=(1,),
            index_source_layer_ids=(1, 3),
            candidate_source_layer_id=1,
            candidate_topk_blocks=3,
            candidate_block_size=2,
            index_n_heads=16,
            index_head_dim=24,
            index_topk=4,
            hc_mult=2,
            hc_sinkhorn_iters=4,
        ),
        "deepseek_v41.LayerCache: not a mlx_lm.models.cache class, state has no "
        "setter, no make_mask, never trimmable; layer 1 also keeps compressed KV, "
        "which layers 2 and 3 read",
    ),
    "longcat_flash": Family(
        "longcat_flash",
        _config("longcat_flash", **_LONGCAT),
        "List(KV, KV); two MLA attentions in a layer",
    ),
    "longcat_flash_ngram": Family(
        "longcat_flash_ngram",
        _config(
            "longcat_flash_ngram",
            **_LONGCAT,
            ngram_vocab_size_ratio=2,
            emb_neighbor_num=3,
            emb_split_num=2,
        ),
        "Arrays(1), List(KV, KV), List(KV, KV); the first is not a layer's: it keeps "
        "the last token ids for the n-gram embedding, and never advances",
    ),
    "qwen3_next": Family(
        "qwen3_next",
        _config(
            "qwen3_next",
            **DELTA_NET,
            partial_rotary_factor=0.5,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[0],
        ),
        "Arrays(2), KV, Arrays(2), KV; masked, advances; MoE",
    ),
    "qwen3_5": Family(
        "qwen3_5",
        _config(
            "qwen3_5",
            **DELTA_NET,
            rope_parameters={
                "type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        "Arrays(2), KV, Arrays(2), KV; masked, advances",
    ),
    "falcon_h1": Family(
        "falcon_h1",
        _config(
            "falcon_h1",
            mamba_d_conv=4,
            mamba_d_head=16,
            mamba_d_ssm=64,
            mamba_d_state=32,
            mamba_n_groups=2,
            mamba_n_heads=4,
        ),
        "List(Arrays(2), KV); masked, advances",
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        _config(
            "granitemoehybrid",
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            embedding_multiplier=8.0,
            attention_multiplier=0.25,
            logits_scaling=1.0,
            residual_multiplier=1.0,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_proj_bias=False,
            mamba_d_state=32,
            mamba_d_conv=4,
            mamba_n_groups=2,
            mamba_conv_bias=True,
        ),
        "Arrays(2), KV, Arrays(2); masked, advances; MoE",
    ),
    "nemotron_h": Family(
        "nemotron_h",
        _config(
            "nemotron_h",
            hybrid_override_pattern=["M", "-", "*", "E", "M"],
            mamba_num_heads=4,
            mamba_head_dim=32,
            mamba_proj_bias=False,
            ssm_state_size=32,
            conv_kernel=4,
            n_groups=2,
            mlp_bias=False,
            layer_norm_epsilon=1e-5,
            use_bias=False,
            use_conv_bias=True,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
            n_group=1,
            n_routed_experts=4,
            n_shared_experts=1,
            topk_group=1,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        "Arrays(2), KV, Arrays(2); masked, advances; 5 layers with 3 caches: MLP and MoE layers have none",
    ),
    "jamba": Family(
        "jamba",
        _config(
            "jamba",
            num_hidden_layers=4,
            attn_layer_offset=1,
            attn_layer_period=2,
            expert_layer_offset=0,
            expert_layer_period=3,
            mamba_d_conv=4,
            mamba_d_state=8,
            mamba_expand=2,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        "Arrays(2), KV, Arrays(2), KV; masked, but its Mamba layers ignore the mask, and never advance; MoE",
    ),
    "lfm2": Family(
        "lfm2",
        _config(
            "lfm2",
            num_hidden_layers=4,
            layer_types=["conv", _FULL, "conv", _FULL],
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=64,
            block_multiple_of=32,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
        ),
        "Arrays(1), KV, Arrays(1), KV; masked, advances; always tied",
    ),
    "mamba": Family(
        "mamba",
        _config(
            "mamba",
            intermediate_size=128,
            state_size=8,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank=4,
        ),
        "Arrays(2); no mask, never advances, and writes its state only where the cache is an instance of ArraysCache",
    ),
    "mamba2": Family(
        "mamba2",
        _config(
            "mamba2",
            num_heads=4,
            head_dim=32,
            intermediate_size=128,
            state_size=32,
            layer_norm_epsilon=1e-5,
            conv_kernel=4,
            n_groups=2,
            use_bias=False,
            use_conv_bias=True,
            time_step_limit=(0.0, float("inf")),
            time_step_rank=4,
        ),
        "Arrays(2); masked, advances",
    ),
    "rwkv7": Family(
        "rwkv7",
        _config(
            "rwkv7",
            num_hidden_layers=3,
            head_dim=32,
            norm_eps=1e-5,
            a_low_rank_dim=8,
            v_low_rank_dim=8,
            gate_low_rank_dim=8,
            decay_low_rank_dim=8,
        ),
        "Arrays(3); no mask, never advances",
    ),
}


_EMBEDDINGS = (
    "embed_tokens.weight",
    "embed_in.weight",
    "embeddings.weight",
    "embedding.weight",
    "embed.weight",
    "embd.weight",
    "tok_embeddings.weight",
    "token_embeddings.weight",
    "wte.weight",
)


def _init(path: str, value: mx.array, key: mx.array) -> mx.array:
    """A random value for one parameter, which no other random state changes."""
    name = path.rsplit(".", 1)[-1]
    if not mx.issubdtype(value.dtype, mx.floating):  # packed weights
        return mx.random.randint(0, 256, value.shape, key=key).astype(value.dtype)
    # Slow decay in A_log, w_lora and recurrent_param, so that a recurrent state remembers.
    if name == "A_log":
        return mx.random.uniform(-4.0, -1.0, value.shape, key=key)
    noise = mx.random.normal(value.shape, key=key)
    if name == "recurrent_param":
        return 0.1 * noise - 4.0
    if name == "bias":
        return 0.1 * noise - (4.0 if "w_lora" in path else 0.0)
    if value.ndim <= 1:  # norms, gates and sinks, around their constant
        return value.astype(mx.float32) + 0.1 * noise
    # Small embeddings, so that a tied model does not repeat its last token.
    gain = 0.5 if path.endswith(_EMBEDDINGS) else 1.5
    fan_in = next((d for d in reversed(value.shape) if d > 1), 1)
    return noise * (gain * fan_in**-0.5)


def build(module: str, config: dict[str, Any], *, seed: int = 0) -> nn.Module:
    """A model of one module of mlx_lm.models, with fp32 weights that depend only on the seed."""
    source = importlib.import_module(f"mlx_lm.models.{module}")
    # Some architectures write to their config.
    args = source.ModelArgs.from_dict(copy.deepcopy(config))
    model: nn.Module = source.Model(args)
    params = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(params))
    model.update(
        tree_unflatten([(path, _init(path, value, key)) for (path, value), key in zip(params, keys, strict=True)])
    )
    mx.eval(model.parameters())
    return model.eval()


def with_unknown_caches(monkeypatch: Any) -> nn.Module:
    """A model whose caches keep something that could change behind a snapshot's back."""
    model = tiny("deepseek_v41")

    class Listing(type(model.make_cache()[0])):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(window_size=WINDOW)
            self.seen: list[int] = []

    monkeypatch.setattr(type(model), "make_cache", lambda self: [Listing() for _ in self.layers])
    return model


def tiny(name: str, *, seed: int = 0) -> nn.Module:
    """The model of a family."""
    return build(FAMILIES[name].module, FAMILIES[name].config, seed=seed)
