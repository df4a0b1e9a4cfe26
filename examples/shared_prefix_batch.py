"""Eight requests decode in one batch on one prefix, which is held once and read where it lies."""

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
from mlx_lm.models import llama

ROWS, PREFIX = 8, 1500
shape = {"hidden_size": 64, "num_hidden_layers": 12, "intermediate_size": 64, "num_attention_heads": 2}
args = llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=100, head_dim=64, **shape)
model = llama.Model(args)  # or any model: model, tokenizer = mlx_lm.load("...")
prefix = [i * 7 % 97 for i in range(PREFIX)]

with onefold.PrefixCache(model, budget="512MB") as cache:
    with cache.lease([*prefix, 0]) as lease:
        for chunk in lease.chunks(500):  # all but the last token
            mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
        lease.commit(prefix)
    alone = cache.stats().bytes["stored"]

    leases = [cache.lease([*prefix, row]) for row in range(ROWS)]  # each has its own last token
    batch = cache.batch(leases)
    tokens = mx.array([int(lease.tokens[-1]) for lease in leases])
    for _ in range(20):
        tokens = mx.argmax(batch.step(tokens), axis=-1)  # one forward for all rows
        mx.eval(tokens)
    held = cache.stats().bytes
    print(f"{ROWS} requests each reused {leases[0].cached} tokens and stand at {leases[0].offset}")
    print(
        f"KV held while all {ROWS} decode: {(held['live'] + held['stored']) / 1e6:.1f} MB, the prefix alone "
        f"{alone / 1e6:.1f} MB; a copy per row would be {ROWS * alone / 1e6:.1f} MB"
    )
    for lease in leases:
        lease.cancel()
