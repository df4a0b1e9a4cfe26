"""Every architecture of the installed mlx-lm: which there are, and a tiny config for each.

- An architecture is a module of `mlx_lm.models` that mlx-lm can load a model from: it has a `Model` and a `ModelArgs`.
- `KNOWN` is the record of those that somebody has looked at. A module that is installed and not in it is `new`; one
  that is in it and not installed is `gone`. Neither passes in silence.
- A config is `SMALL`, one table of small values by field name, since architectures ignore fields that they lack; what
  an architecture needs of its own, to have every kind of layer that it can have, is in `OWN` or in `tiny.FAMILIES`.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import pkgutil
import sys
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import stand_ins
from tiny import DELTA_NET, FAMILIES, WINDOW, build

# fmt: off
KNOWN = frozenset({
    "Klear", "afm7", "afmoe", "apertus", "baichuan_m1", "bailing_hybrid", "bailing_moe", "bailing_moe_linear",
    "bailing_moe_v3", "bitnet", "cohere", "cohere2", "dbrx", "deepseek", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v41", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe",
    "falcon_h1", "gear", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text", "glm",
    "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj",
    "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan", "hunyuan_v1_dense", "internlm2", "internlm3",
    "iquestloopcoder", "jamba", "kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl", "laguna", "lfm2", "lfm2-vl",
    "lfm2_moe", "lille-130m", "llama", "llama4", "llama4_text", "longcat_flash", "longcat_flash_ngram", "mamba",
    "mamba2", "mellum", "mimo", "mimo_v2_flash", "minicpm", "minicpm3", "minimax", "minimax_m3_vl", "ministral3",
    "mistral3", "mistral4", "mixtral", "muse_glimmer", "muse_spark", "nanbeige", "nanochat", "nemotron",
    "nemotron-nas", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openelm", "phi", "phi3",
    "phi3small", "phimoe", "phixtral", "pixtral", "plamo", "plamo2", "plamo3", "prism_hadamard_qwen35", "qwen",
    "qwen2", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl",
    "qwen3_vl_moe", "recurrent_gemma", "rwkv7", "seed_oss", "smollm3", "solar_open", "spark2_5", "stablelm",
    "starcoder2", "step3p5", "talkie", "telechat3", "youtu_llm",
})
# fmt: on
"""Every architecture of mlx-lm 0.32.2. Add a new one here once its config has been looked at."""

_SLIDING, _FULL = "sliding_attention", "full_attention"

SMALL: dict[str, Any] = {
    # widths and depths, by all the names that they go by
    **dict.fromkeys(["vocab_size", "num_vocab"], 101),
    **dict.fromkeys(["hidden_size", "hidden_dim", "d_model", "n_embd", "model_dim"], 64),
    **dict.fromkeys(["intermediate_size", "n_inner", "mlp_hidden_size", "ff_intermediate_size"], 96),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layers", "n_layer"], 2),
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_heads", "n_head"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"], 2),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "block_size"], 2048),
    "head_dim": 16,
    "tie_word_embeddings": False,
    # norms and positions
    **dict.fromkeys(["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"], 1e-5),
    **dict.fromkeys(["rope_theta", "rotary_emb_base"], 10000.0),
    **dict.fromkeys(["partial_rotary_factor", "rotary_pct"], 0.5),
    "rotary_dim": 8,
    "rope_scaling": None,
    # biases
    **dict.fromkeys(["attention_bias", "mlp_bias", "use_bias", "use_qkv_bias"], False),
    "use_qk_norm": True,
    # windows
    **dict.fromkeys(["sliding_window", "window_size", "attention_window_size", "sliding_window_size"], WINDOW),
    "sliding_window_pattern": 2,
    # mixtures
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "num_shared_expert"], 1),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"], 32),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "share_expert_dim"], 32),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers", "n_group", "topk_group"], 1),
    **dict.fromkeys(["decoder_sparse_step", "moe_layer_freq"], 1),
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    # latent attention
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank"], 32),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 16),
    # scales
    **dict.fromkeys(["logits_scaling", "residual_multiplier"], 1.0),
    "logit_scale": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 8.0,
    "query_pre_attn_scalar": 16.0,
}
"""Small values by the name of the field."""

_FOUR: dict[str, Any] = {"num_hidden_layers": 4}
_ALTERNATING: dict[str, Any] = {**_FOUR, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
_INDEX: dict[str, Any] = {**_LATENT, "index_n_heads": 16, "index_head_dim": 32, "index_topk": WINDOW}
_YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LLAMA_4_SCALING: dict[str, Any] = {
    "type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 32,
}
_DELTA_AND_LATENT: dict[str, Any] = {
    **_FOUR,
    **_LATENT,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
}
_CONV: dict[str, Any] = {**_FOUR, "layer_types": ["conv", _FULL, "conv", _FULL], "conv_bias": False, "conv_L_cache": 3}
_GROUPED: dict[str, Any] = {**_FOUR, "layer_group_size": 2, "group_norm_size": 2}
_SCALED: dict[str, Any] = {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 2.0}
_BY_TYPE: dict[str, Any] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
    _FULL: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}

OWN: dict[str, dict[str, Any]] = {
    "afm7": {"num_layers": 4, "num_kv_reuse_layers": 2},
    "afmoe": _ALTERNATING,
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {
        **_FOUR,
        "sliding_window_layers": [1, 3],
        "num_swa_attention_heads": 8,
        "num_swa_key_value_heads": 4,
        "conv_window": 2,
    },
    "bailing_hybrid": {**_LATENT, **_GROUPED},
    "bailing_moe": {"use_qk_norm": True, "moe_router_enable_expert_bias": True},
    "bailing_moe_linear": _GROUPED,
    "bailing_moe_v3": {**_LATENT, **_FOUR, "layer_group_size": 2, "head_dim": 32},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {**_LATENT, "rope_scaling": _YARN, "topk_method": "greedy"},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "exaone4": {**_FOUR, "sliding_window_pattern": "LG"},
    "exaone_moe": {**_ALTERNATING, "is_moe_layer": [False, True, False, True]},
    "gear": {**_FOUR, "layer_types": ["conv_mixer", _SLIDING, _FULL, "conv_mixer"]},
    "gemma3": {"text": _FOUR},
    "gemma4": {"text": FAMILIES["gemma4"].config},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": {**_INDEX, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "hunyuan": {
        **_FOUR,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "kimi_k25": {"text": _LATENT},
    "kimi_k3": {
        "text": {
            **_DELTA_AND_LATENT,
            "activation_situ_beta": 1.0,
            "attn_res_block_size": 2,
            "mla_use_output_gate": True,
        }
    },
    "kimi_linear": _DELTA_AND_LATENT,
    "kimi_vl": {"text": _LATENT},
    "laguna": {**_ALTERNATING, "rope_parameters": _BY_TYPE},
    "lfm2-vl": {"text": FAMILIES["lfm2"].config},
    "lfm2_moe": {**_CONV, "use_expert_bias": True},
    "llama": FAMILIES["llama_sliding"].config,
    "llama4_text": {**_FOUR, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0, 1, 0]},
    "mellum": {**_ALTERNATING, "rope_parameters": _BY_TYPE},
    "mimo_v2_flash": {
        **_FOUR,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "head_dim": 24,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "n_shared_experts": None,
    },
    "minicpm": _SCALED,
    "minicpm3": {**_SCALED, **_LATENT, "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 512}},
    "minimax_m3_vl": {
        "text": {
            **_FOUR,
            "layer_types": [_FULL, "sparse", _FULL, "sparse"],
            "moe_layer_freq": [0, 1, 1, 1],
            "dense_intermediate_size": 96,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 4,
        }
    },
    "ministral3": {**_ALTERNATING, "rope_parameters": _LLAMA_4_SCALING},
    "mistral3": {"text": {**_ALTERNATING, "model_type": "ministral3", "rope_parameters": _LLAMA_4_SCALING}},
    "mistral4": {**_LATENT, "rope_parameters": _LLAMA_4_SCALING},
    "muse_glimmer": _ALTERNATING,
    "muse_spark": {
        "text": {
            **_ALTERNATING,
            "post_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0, 10000.0, 0.0],
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
            "moe_hidden_size": 32,
            "num_shared_experts": 0,
        }
    },
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        **_FOUR,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    },
    "olmo": {"embedding_size": 101},
    "olmo_hybrid": {**DELTA_NET, "layer_types": ["linear_attention", _FULL] * 2, "linear_allow_neg_eigval": True},
    "openelm": {
        "num_transformer_layers": 2,
        "ffn_dim_divisor": 32,
        "num_query_heads": [4, 8],
        "num_kv_heads": [2, 4],
        "ffn_multipliers": [1.0, 1.5],
    },
    "phi3small": {
        "vocab_size": 100352,  # it masks ids near the end of this vocabulary
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "pixtral": {"text": {}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {**_FOUR, "hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_d_state": 32},
    "plamo3": _FOUR,
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 512},
            {"path": "model.layers.1.mlp.up_proj", "embedding": False, "dtype": "float16", "block": 0},
        ],
        "text": {**FAMILIES["qwen3_5"].config, "hidden_size": 128, "intermediate_size": 512, "num_experts": 0},
    },
    "qwen": {"kv_channels": 16},
    "qwen2_vl": {"text": {}},
    "qwen3_5_moe": {"text": FAMILIES["qwen3_5"].config},
    "qwen3_vl": {"text": {}},
    "qwen3_vl_moe": {"text": {}},
    "recurrent_gemma": {
        **_FOUR,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
    },
    "smollm3": {**_ALTERNATING, "no_rope_layer_interval": 2},
    "spark2_5": {**_ALTERNATING, "rope_parameters": _BY_TYPE},
    "step3p5": {
        **_ALTERNATING,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4, "head_dim": 16},
        "moe_layers_enum": "1,2,3",
    },
    "youtu_llm": _LATENT,
}
"""What an architecture's config has beyond `SMALL`; `text` is its `text_config`, for one that wraps another."""

STANDS_IN = {
    "bitnet": "Its ternary layers need Metal: tested with plain ones in their place.",
    "muse_spark": "Its fused kernels need Metal: tested with plain operations in their place, in fp32.",
}
"""What is not quite the architecture in its tiny model, where there is no Metal. See `stand_ins.py`."""

LEFT_OUT = {
    "olmo": (
        "mlx-lm's module adds a mask that is a word to its scores, and raises on prompts of more than one token; to be "
        "mended there. olmo2 and olmo3 are other modules, and reused."
    ),
    "phi3small": (
        "mlx-lm's module adds a mask of booleans to the scores of its block-sparse layers, which masks nothing; to be "
        "mended there."
    ),
}
"""What is known not to be reused, or not rightly, and why: nobody needs to be told again."""

_FAMILY = {family.module: family for family in reversed(FAMILIES.values())}


def installed() -> list[str]:
    """The architectures of the installed mlx-lm, by their names in `mlx_lm.models`."""
    found = [m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__) if is_architecture(m.name)]
    return sorted(found, key=str.lower)


def is_architecture(name: str) -> bool:
    """Whether a module defines, or takes over, a `Model` and a `ModelArgs`: others are what models are written with.
    Read off its source, since one of them ends the process where a package of its own is missing."""
    spec = importlib.util.find_spec(f"mlx_lm.models.{name}")
    if spec is None or spec.origin is None:
        return False
    bound = set()
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            bound |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {"Model", "ModelArgs"} <= bound


def config(name: str) -> dict[str, Any]:
    """A tiny config. An architecture that is not in the record gets the table alone, for itself and for what it may
    wrap."""
    if name not in OWN and name in _FAMILY:
        return copy.deepcopy(_FAMILY[name].config)
    own = dict(OWN.get(name, {} if name in KNOWN else {"text": {}}))
    if (text := own.pop("text", None)) is not None:
        own["text_config"] = {**SMALL, "model_type": name, **text}
    return copy.deepcopy({**SMALL, "model_type": name, **own})


def model(name: str) -> nn.Module:
    """A tiny model of an architecture, with random fp32 weights."""
    if name == "olmo":  # asks for a package that it does not use, and ends the process without it
        sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))
    if not mx.metal.is_available():
        stand_ins.spell_out(importlib.import_module(f"mlx_lm.models.{name}"))
    made = build(name, config(name))
    if not mx.metal.is_available():
        stand_ins.unpack(made)
    return made
