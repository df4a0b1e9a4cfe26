"""A hybrid model (gated delta nets and attention), and a model that decodes with a draft model."""

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama, qwen3_next

hybrid = qwen3_next.Model(
    qwen3_next.ModelArgs.from_dict(
        {
            "model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "full_attention_interval": 4,
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts": 0,
            "num_experts_per_tok": 0, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0, 1, 2, 3], "moe_intermediate_size": 64, "rms_norm_eps": 1e-5,
            "vocab_size": 100, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
            "max_position_embeddings": 4096,
        }
    )
)  # fmt: skip

# A recurrent state cannot be rewound: say where a later request will branch off, and it is kept there.
system = list(range(90))
with onefold.PrefixCache(hybrid, budget="64MB") as cache:
    for question in ([1, 2, 3], [4, 5, 6]):
        with cache.lease(system + question, checkpoints=[len(system)]) as lease:
            for chunk in lease.chunks():  # ends a chunk at each checkpoint
                mx.eval(hybrid(mx.array(chunk)[None], cache=lease.layers))
            last = mx.array(lease.tokens[-1:])
            answer = [t for t, _ in generate_step(last, hybrid, max_tokens=5, prompt_cache=lease.layers)]
            lease.commit(lease.tokens.tolist() + answer)
        print(f"hybrid: {lease.cached} of {len(lease.tokens)} tokens reused; {lease.reason or 'a whole hit'}")

shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "rms_norm_eps": 1e-5}
sizes = [llama.ModelArgs(model_type="llama", vocab_size=100, num_hidden_layers=n, **shape) for n in (4, 1)]
target, draft = (llama.Model(args) for args in sizes)
# The draft's layers are leased with the target's, behind them in one list, as mlx-lm wants it.
with onefold.PrefixCache(target, budget="64MB", draft_model=draft) as cache:
    conversation = list(range(50))
    for question in ([1, 2, 3], [4, 5]):
        prompt = conversation + question
        with cache.lease(prompt) as lease:
            steps = speculative_generate_step(
                mx.array(lease.rest), target, draft, max_tokens=12, prompt_cache=lease.layers
            )
            answer = [token for token, _, _ in steps]
            conversation = prompt + answer
            lease.commit(conversation[: lease.offset])  # the last token has not been through both models
        print(f"with a draft: {lease.cached} of {len(prompt)} tokens reused, {len(answer)} generated")
