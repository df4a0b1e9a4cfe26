"""Continue a conversation with mlx-lm's own generate_step: the lease's layers are its prompt cache."""

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

shape = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 4}
args = llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=100, **shape)
model = llama.Model(args)  # or any model: model, tokenizer = mlx_lm.load("...")

with onefold.PrefixCache(model, budget="64MB") as cache:
    conversation = list(range(60))
    for question in ([1, 2, 3], [4, 5], [6, 7, 8]):
        prompt = conversation + question
        with cache.lease(prompt) as lease:
            steps = generate_step(mx.array(lease.rest), model, max_tokens=10, prompt_cache=lease.layers)
            answer = [token for token, _ in steps]
            conversation = prompt + answer
            lease.commit(conversation)
        print(f"{len(prompt)} prompt tokens, {lease.cached} of them reused, {len(answer)} generated")
    stats = cache.stats()
    print(f"turns continued in place: {stats.moves}; tokens held: {stats.stored_tokens}")
